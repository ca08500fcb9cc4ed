"""Vector registers for numba: a value type of LANES float32 numbers, with arithmetic, exp, exp2 and tanh.

LLVM's loop vectoriser decides which loops become vector instructions, and a kernel that relies on it can become slow
without notice. Code written with vector values is vector code by construction::

    maximum = load(scores, 0)
    for key in range(1, num_keys):
        maximum = larger(maximum, load(scores, key * LANES))

Indices count elements from an array's first one, in memory order, and are not checked. An array may also hold float16,
as int16, or bfloat16, as uint16, which NumPy and numba do not know, or codes of 8 bits, whose scales lie between them:
`load` and `get` widen them to float32, and `store` rounds to the nearest.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, overload, register_model

from workbench.kernels.cpu.attention.inner import jit
from workbench.kernels.cpu.attention.processor import LANES, config

numba.config.CPU_NAME, numba.config.CPU_FEATURES = config.CPU_NAME, config.CPU_FEATURES  # type: ignore[attr-defined]


FLOAT, INDEX = ir.FloatType(), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
_BITS = ir.VectorType(ir.IntType(32), LANES)
_LINE = 64  # bytes of a cache line


class VectorType(types.Type):
    """Numba's type of a vector register."""

    def __init__(self) -> None:
        super().__init__(name=f"Vector{LANES}")


vector_type = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: types.Type):
        super().__init__(manager, numba_type, VECTOR)


# -- instructions, as LLVM builds them -------------------------------------------------------------------------


def element_pointer(context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, at: ir.Value) -> ir.Value:
    """Address of the element ``at`` of an array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [at])


def load_vector(builder: ir.IRBuilder, pointer: ir.Value, dtype: Any = types.float32) -> ir.Value:
    """Load LANES elements, starting at ``pointer``, as float32."""
    stored = ir.VectorType(pointer.type.pointee, LANES)
    return _widened(
        builder, builder.load(builder.bitcast(pointer, stored.as_pointer()), align=dtype.bitwidth // 8), dtype
    )


def _widened(builder: ir.IRBuilder, stored: ir.Value, dtype: Any) -> ir.Value:
    """Elements of an array as float32."""
    if dtype == types.float32:
        return stored
    if dtype == types.int8:
        return builder.sitofp(builder.sext(stored, _like(stored, ir.IntType(32))), _like(stored, FLOAT))
    if dtype == types.int16:
        return builder.fpext(builder.bitcast(stored, _like(stored, ir.HalfType())), _like(stored, FLOAT))
    bits = _like(stored, ir.IntType(32))
    return builder.bitcast(builder.shl(builder.zext(stored, bits), _constant(bits, 16)), _like(stored, FLOAT))


def _narrowed(builder: ir.IRBuilder, value: ir.Value, dtype: Any) -> ir.Value:
    """float32 values as elements of an array."""
    if dtype == types.float32:
        return value
    if dtype == types.int8:
        name = f"llvm.rint.v{LANES}f32" if isinstance(value.type, ir.VectorType) else "llvm.rint.f32"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(value.type, [value.type]), name)
        whole = builder.fptosi(builder.call(function, [value]), _like(value, ir.IntType(32)))
        return builder.trunc(whole, _like(value, ir.IntType(8)))
    stored = _like(value, ir.IntType(16))
    if dtype == types.int16:
        return builder.bitcast(builder.fptrunc(value, _like(value, ir.HalfType())), stored)
    bits = _like(value, ir.IntType(32))
    whole = builder.bitcast(value, bits)
    is_odd = builder.and_(builder.lshr(whole, _constant(bits, 16)), _constant(bits, 1))
    rounded = builder.add(builder.add(whole, _constant(bits, 0x7FFF)), is_odd)
    kept = builder.select(builder.fcmp_unordered("uno", value, value), _constant(bits, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(kept, _constant(bits, 16)), stored)


def _like(value: ir.Value, element: ir.Type) -> ir.Type:
    """The type of a vector, or of a scalar, with another type of elements."""
    return ir.VectorType(element, LANES) if isinstance(value.type, ir.VectorType) else element


def _constant(kind: ir.Type, number: int) -> ir.Constant:
    return ir.Constant(kind, [number] * LANES if isinstance(kind, ir.VectorType) else number)


def store_vector(builder: ir.IRBuilder, vector: ir.Value, pointer: ir.Value, dtype: Any = types.float32) -> None:
    """Store LANES elements, starting at ``pointer``."""
    stored = _narrowed(builder, vector, dtype)
    builder.store(stored, builder.bitcast(pointer, stored.type.as_pointer()), align=dtype.bitwidth // 8)


def splat_scalar(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """Copy a float32 to all lanes."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(INDEX, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_BITS, [0] * LANES))


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """``a * b + c``, rounded once."""
    function_type = ir.FunctionType(VECTOR, [VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [a, b, c])


def sum_lanes(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """The sum of all lanes, added pairwise."""
    function_type = ir.FunctionType(FLOAT, [FLOAT, VECTOR])
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, [ir.Constant(FLOAT, 0.0), vector], fastmath=("reassoc",))


def sums_of_two(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Two vectors, added up to two parts of each sum: [a, b, a, b]."""
    width = LANES // 2
    while width >= 4:
        low, high = list(range(width)), list(range(width, 2 * width))
        a, b = (builder.fadd(_shuffled(builder, x, x, low), _shuffled(builder, x, x, high)) for x in (a, b))
        width //= 2
    return builder.fadd(_shuffled(builder, a, b, [0, 4, 1, 5]), _shuffled(builder, a, b, [2, 6, 3, 7]))


def sums_of_four(builder: ir.IRBuilder, ab: ir.Value, cd: ir.Value) -> ir.Value:
    """The sums of all lanes of four vectors, from those of two pairs: half the instructions of four `sum_lanes`."""
    return builder.fadd(_shuffled(builder, ab, cd, [0, 1, 4, 5]), _shuffled(builder, ab, cd, [2, 3, 6, 7]))


def _shuffled(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def prefetch_elements(builder: ir.IRBuilder, pointer: ir.Value, count: int, size: int) -> None:
    """Fetch ``count`` elements of ``size`` bytes into the second-level cache (the first is soon full)."""
    flag = ir.IntType(32)
    for at in range(0, count, _LINE // size):
        place = builder.gep(pointer, [ir.Constant(INDEX, at)])
        function_type = ir.FunctionType(ir.VoidType(), [place.type, flag, flag, flag])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        builder.call(function, [place, flag(0), flag(2), flag(1)])  # to read, second level, data


def loop(
    builder: ir.IRBuilder,
    count: ir.Value,
    step: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
    start: list[ir.Value],
) -> list[ir.Value]:
    """``values = step(k, values)`` for k in [0, count). LLVM turns the stack cells into registers."""
    cells = [cgutils.alloca_once(builder, value.type) for value in start]
    for cell, value in zip(cells, start):
        builder.store(value, cell)
    with cgutils.for_range(builder, count) as current:
        for cell, value in zip(cells, step(current.index, [builder.load(cell) for cell in cells])):
            builder.store(value, cell)
    return [builder.load(cell) for cell in cells]


def _max_lanes(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    function_type = ir.FunctionType(FLOAT, [VECTOR])
    name = f"llvm.vector.reduce.fmax.v{LANES}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), [vector])


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered("<", a, b), b, a)


def _smaller(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), b, a)


def _times_power_of_two(builder: ir.IRBuilder, factor: ir.Value, rounded: ir.Value) -> ir.Value:
    exponent = builder.shl(builder.bitcast(rounded, _BITS), ir.Constant(_BITS, [23] * LANES))
    power = builder.add(exponent, ir.Constant(_BITS, [0x3F800000] * LANES))
    return builder.fmul(factor, builder.bitcast(power, VECTOR))


# -- the same instructions as functions for compiled code ------------------------------------------------------


def _function(result: types.Type, num_vectors: int, emit: Callable[..., ir.Value]) -> Callable[..., Any]:
    """A function of ``num_vectors`` vectors that emits one or a few instructions."""
    arguments = (vector_type,) * num_vectors

    def codegen(context, builder, signature, values):
        return emit(builder, *values)

    def function(typing_context, *given):
        return (result(*arguments), codegen) if given == arguments else None

    # numba counts the parameters in a function's signature, and *given would count as one.
    names = ("typing_context", "a", "b", "c", "d")[: num_vectors + 1]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(function)


_add = _function(vector_type, 2, lambda builder, a, b: builder.fadd(a, b))
_subtract = _function(vector_type, 2, lambda builder, a, b: builder.fsub(a, b))
_multiply = _function(vector_type, 2, lambda builder, a, b: builder.fmul(a, b))
_divide = _function(vector_type, 2, lambda builder, a, b: builder.fdiv(a, b))
_scale = _function(vector_type, 2, _times_power_of_two)

fma = _function(vector_type, 3, multiply_add)
"""``a * b + c``, rounded once."""
larger = _function(vector_type, 2, _larger)
"""The larger of two lanes; ``a`` if either is NaN."""
smaller = _function(vector_type, 2, _smaller)
"""The smaller of two lanes; ``a`` if either is NaN."""
where_less = _function(
    vector_type, 4, lambda builder, a, b, c, d: builder.select(builder.fcmp_ordered("<", a, b), c, d)
)
"""Lane by lane, ``c`` if ``a < b``, else ``d``."""
total_of = _function(types.float32, 1, sum_lanes)
"""The sum of all lanes."""
largest_of = _function(types.float32, 1, _max_lanes)
"""The largest lane; NaN is skipped."""


def _overload(symbol: Callable[..., Any], implementation: Callable[..., Any]) -> None:
    """Give vectors an arithmetic operator."""

    @overload(symbol)
    def choose(a, b):
        if a == vector_type and b == vector_type:
            return lambda a, b: implementation(a, b)
        return None


_overload(operator.add, _add)
_overload(operator.sub, _subtract)
_overload(operator.mul, _multiply)
_overload(operator.truediv, _divide)


@intrinsic
def load(typing_context, array, at):
    """Load LANES elements of an array, starting at element ``at``."""

    def codegen(context, builder, signature, values):
        return load_vector(builder, element_pointer(context, builder, signature.args[0], *values), array.dtype)

    return vector_type(array, types.intp), codegen


@intrinsic
def get(typing_context, array, at):
    """Element ``at`` of an array as float32."""

    def codegen(context, builder, signature, values):
        pointer = element_pointer(context, builder, signature.args[0], *values)
        return _widened(builder, builder.load(pointer), array.dtype)

    return types.float32(array, types.intp), codegen


@intrinsic
def put(typing_context, array, at, value):
    """Set element ``at`` of an array to a float32."""

    def codegen(context, builder, signature, values):
        pointer = element_pointer(context, builder, signature.args[0], *values[:2])
        builder.store(_narrowed(builder, values[2], array.dtype), pointer)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), codegen


@intrinsic
def store(typing_context, array, at, vector):
    """Store LANES elements of an array, starting at element ``at``."""

    def codegen(context, builder, signature, values):
        pointer = element_pointer(context, builder, signature.args[0], *values[:2])
        store_vector(builder, values[2], pointer, array.dtype)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector_type), codegen


@intrinsic
def has_scales(typing_context, array):
    """Whether an array holds codes; a constant of the compiled code."""

    def codegen(context, builder, signature, values):
        return ir.Constant(ir.IntType(1), int(array.dtype == types.int8))

    return types.boolean(array), codegen


@intrinsic
def scale_at(typing_context, array, at):
    """The scale, a float32, that begins at element ``at`` of an array of codes; 1 for numbers."""

    def codegen(context, builder, signature, values):
        if array.dtype != types.int8:
            return ir.Constant(FLOAT, 1.0)
        pointer = element_pointer(context, builder, signature.args[0], *values)
        return builder.load(builder.bitcast(pointer, FLOAT.as_pointer()), align=1)

    return types.float32(array, types.intp), codegen


@intrinsic
def put_scale(typing_context, array, at, scale):
    """Set the scale that begins at element ``at`` of an array of codes."""

    def codegen(context, builder, signature, values):
        if array.dtype == types.int8:
            pointer = element_pointer(context, builder, signature.args[0], *values[:2])
            builder.store(values[2], builder.bitcast(pointer, FLOAT.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), codegen


@intrinsic
def splat(typing_context, scalar):
    """Copy a float32 to all lanes."""

    def codegen(context, builder, signature, values):
        return splat_scalar(builder, values[0])

    return vector_type(types.float32), codegen


@intrinsic
def prefetch_row(typing_context, array, at, count):
    """Prefetch ``count`` elements from element ``at`` of an array on; see `prefetch_elements`."""

    def codegen(context, builder, signature, values):
        size = array.dtype.bitwidth // 8
        pointer = element_pointer(context, builder, signature.args[0], *values[:2])
        per_line = ir.Constant(INDEX, _LINE // size)
        lines = builder.udiv(builder.add(values[2], ir.Constant(INDEX, _LINE // size - 1)), per_line)

        def step(line: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            prefetch_elements(builder, builder.gep(pointer, [builder.mul(line, per_line)]), 1, size)
            return []

        loop(builder, lines, step, [])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), codegen


_ROUND = np.float32(1.5 * 2**23)
"""Adding this to a small float32 rounds it to an integer, which is then in the low bits of the sum."""

# Minimax polynomials (Remez exchange in float64, relative error), constant term first.
_EXP2 = tuple(
    map(np.float32, (1.0, 0.693147206, 0.240226469, 0.0555032878, 0.00961848896, 0.00133999312, 0.00015345812))
)
"""2**f on [-0.5, 0.5] to 2e-9."""
_TANH = tuple(map(np.float32, (1.0, -0.33333261, 0.13331128, -0.05372107, 0.02059099, -0.00565999)))
"""tanh(x) / x in powers of x**2 on [0, 0.625] to 4e-9."""
_TANH_NEAR = np.float32(0.625)

_LOWEST, _HIGHEST = np.float32(-127.0), np.float32(128.0)
_EXP_LOWEST, _EXP_HIGHEST = np.float32(-88.02), np.float32(88.9)
_LOG2_E = np.float32(1.4426950408889634)
_LOG2_E_REST = np.float32(1.4426950408889634 - float(_LOG2_E))
_ZERO, _ONE, _MINUS_TWO, _TWO_LOG2_E = map(np.float32, (0.0, 1.0, -2.0, 2.8853900817779268))


@jit
def exp2(x):
    """2**x to one unit in the last place; 0 below -126.5, inf from 127.5, and NaN stays NaN.

    (libm's exp costs as much as the rest of an attention kernel.)
    """
    x = smaller(larger(x, splat(_LOWEST)), splat(_HIGHEST))
    rounded = x + splat(_ROUND)
    return _scale(_exp2_of_fraction(x - (rounded - splat(_ROUND))), rounded)


@jit
def exp(x):
    """e**x to two units in the last place; 0 below -87.7, inf from 88.4, and NaN stays NaN."""
    x = smaller(larger(x, splat(_EXP_LOWEST)), splat(_EXP_HIGHEST))
    rounded = fma(x, splat(_LOG2_E), splat(_ROUND))
    f = fma(x, splat(_LOG2_E), splat(_ROUND) - rounded)
    return _scale(_exp2_of_fraction(fma(x, splat(_LOG2_E_REST), f)), rounded)


@jit
def _exp2_of_fraction(f):
    polynomial = fma(splat(_EXP2[6]), f, splat(_EXP2[5]))
    polynomial = fma(polynomial, f, splat(_EXP2[4]))
    polynomial = fma(polynomial, f, splat(_EXP2[3]))
    polynomial = fma(polynomial, f, splat(_EXP2[2]))
    polynomial = fma(polynomial, f, splat(_EXP2[1]))
    return fma(polynomial, f, splat(_EXP2[0]))


@jit
def tanh(x):
    """Hyperbolic tangent to 2 units in the last place; NaN stays NaN."""
    square = x * x
    polynomial = fma(splat(_TANH[5]), square, splat(_TANH[4]))
    polynomial = fma(polynomial, square, splat(_TANH[3]))
    polynomial = fma(polynomial, square, splat(_TANH[2]))
    polynomial = fma(polynomial, square, splat(_TANH[1]))
    polynomial = fma(polynomial, square, splat(_TANH[0]))
    far = fma(splat(_MINUS_TWO), splat(_ONE) / (exp2(x * splat(_TWO_LOG2_E)) + splat(_ONE)), splat(_ONE))
    return where_less(square, splat(_TANH_NEAR * _TANH_NEAR), x * polynomial, far)
