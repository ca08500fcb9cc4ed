"""Register tiles of a matrix product, emitted as vector instructions.

The sums of a tile stay in registers over the whole depth of the product. This makes a matrix product fast, and a loop
vectoriser does not do it. A matrix lies in a float32 array, b also in a narrower one; ``x_at`` is the index of its
first element, ``x_row`` and ``x_col`` are the distances between its rows and between its columns, in elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from workbench.cpu.attention.simd import (
    INDEX,
    LANES,
    VECTOR,
    element_pointer,
    load_vector,
    loop,
    multiply_add,
    splat_scalar,
    store_vector,
    sum_lanes,
    sums_of_four,
)


def matmul_tile(rows: int, vectors: int, accumulate: bool) -> Callable[..., None]:
    """A function ``c = a @ b`` (or ``c += a @ b``) for a tile of ``rows`` x ``vectors * LANES`` elements.

    Its arguments are ``(c, c_at, c_row, a, a_at, a_row, a_col, b, b_at, b_row, depth)``: c is [rows, vectors *
    LANES], a is [rows, depth], b is [depth, vectors * LANES]; the columns of b and c are adjacent elements.
    """

    @intrinsic
    def tile(typing_context, c, c_at, c_row, a, a_at, a_row, a_col, b, b_at, b_row, depth):
        def codegen(context, builder, signature, values):
            c, c_at, c_row, a, a_at, a_row, a_col, b, b_at, b_row, depth = values
            c_first = element_pointer(context, builder, signature.args[0], c, c_at)
            a_first = element_pointer(context, builder, signature.args[3], a, a_at)
            b_first, b_type = element_pointer(context, builder, signature.args[7], b, b_at), signature.args[7].dtype
            places = [
                builder.gep(c_first, [_plus(builder, _times(builder, c_row, row), vector * LANES)])
                for row in range(rows)
                for vector in range(vectors)
            ]

            def step(k: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                b_offset, a_offset = builder.mul(k, b_row), builder.mul(k, a_col)
                factors = []
                for row in range(rows):
                    a_place = builder.gep(a_first, [builder.add(a_offset, _times(builder, a_row, row))])
                    factors.append(splat_scalar(builder, builder.load(a_place)))
                updated = list(sums)
                for vector in range(vectors):
                    b_place = builder.gep(b_first, [_plus(builder, b_offset, vector * LANES)])
                    b_vector = load_vector(builder, b_place, b_type)
                    for row, factor in enumerate(factors):
                        at = row * vectors + vector
                        updated[at] = multiply_add(builder, factor, b_vector, sums[at])
                return updated

            zero = ir.Constant(VECTOR, [0.0] * LANES)
            for value, place in zip(loop(builder, depth, step, [zero] * len(places)), places):
                # Added last, so that a short sum added to a long one is rounded once instead of at every step.
                total = builder.fadd(load_vector(builder, place), value) if accumulate else value
                store_vector(builder, total, place)
            return context.get_dummy_value()

        at = types.intp
        return types.void(c, at, at, a, at, at, at, b, at, at, at), codegen

    return tile


def dot_tile(rows: int, keys: int) -> Callable[..., None]:
    """A function ``c = a @ b.T`` for a few rows, with the depth of the product along the lanes.

    Its arguments are ``(c, c_at, c_row, a, a_at, a_row, b, b_at, b_row, vectors)``: c is [rows, keys], a is [rows,
    vectors * LANES], b is [keys, vectors * LANES]; columns are adjacent elements. Each vector of b is loaded, and
    widened, once for all rows. ``keys`` is 1 or a multiple of 4, whose sums are added together.
    """
    width = 1 if keys == 1 else 4

    @intrinsic
    def tile(typing_context, c, c_at, c_row, a, a_at, a_row, b, b_at, b_row, vectors):
        def codegen(context, builder, signature, values):
            c, c_at, c_row, a, a_at, a_row, b, b_at, b_row, vectors = values
            c_first = element_pointer(context, builder, signature.args[0], c, c_at)
            a_first = element_pointer(context, builder, signature.args[3], a, a_at)
            b_first, b_type = element_pointer(context, builder, signature.args[6], b, b_at), signature.args[6].dtype

            def row_of(
                first: ir.Value, distance: ir.Value, row: int, offset: ir.Value, dtype: Any = types.float32
            ) -> ir.Value:
                place = builder.add(offset, _times(builder, distance, row))
                return load_vector(builder, builder.gep(first, [place]), dtype)

            def step(k: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                offset = _times(builder, k, LANES)
                a_vectors = [row_of(a_first, a_row, row, offset) for row in range(rows)]
                updated = list(sums)
                for key in range(keys):
                    b_vector = row_of(b_first, b_row, key, offset, b_type)
                    for row in range(rows):
                        at = row * keys + key
                        updated[at] = multiply_add(builder, a_vectors[row], b_vector, sums[at])
                return updated

            zero = ir.Constant(VECTOR, [0.0] * LANES)
            products = loop(builder, vectors, step, [zero] * (rows * keys))
            for at in range(0, rows * keys, width):
                row, key = divmod(at, keys)
                place = builder.gep(c_first, [_plus(builder, _times(builder, c_row, row), key)])
                if width == 1:
                    builder.store(sum_lanes(builder, products[at]), place)
                else:
                    sums = sums_of_four(builder, products[at : at + width])
                    builder.store(sums, builder.bitcast(place, sums.type.as_pointer()), align=4)
            return context.get_dummy_value()

        at = types.intp
        return types.void(c, at, at, a, at, at, b, at, at, at), codegen

    return tile


def _times(builder: ir.IRBuilder, index: ir.Value, factor: int) -> ir.Value:
    return builder.mul(index, ir.Constant(INDEX, factor))


def _plus(builder: ir.IRBuilder, index: ir.Value, summand: int) -> ir.Value:
    return builder.add(index, ir.Constant(INDEX, summand))
