"""The kernel function that MLX generates around a source, as text.

`mx.fast.metal_kernel` takes the body of a kernel and generates the signature, from the names, dtypes and sizes of the
arrays and from the words that occur in the source. The rules here are those of MLX 0.32
(mlx/backend/common/metal_kernel.cpp); a test compares the text with MLX's output.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

TemplateArgument = bool | int | mx.Dtype

# Inputs with fewer elements than this are passed in the constant address space.
MAX_CONSTANT_ELEMENTS = 8

# Metal binds at most this many buffers to a kernel; shapes, strides and ndims count.
MAX_BUFFERS = 31

DTYPE_NAMES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
}

# Attributes in the order in which MLX adds them. One is added if its name occurs anywhere in the source.
ATTRIBUTE_TYPES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}


@dataclass(frozen=True)
class Parameter:
    """One buffer of the kernel function.

    Attributes:
        name: Name in the signature.
        role: "input", "shape", "strides", "ndim" or "output".
        array: Index of the input or output it belongs to.
        declaration: Its text in the signature, without the buffer's number.
    """

    name: str
    role: str
    array: int
    declaration: str


@dataclass(frozen=True)
class KernelText:
    """The text of a kernel function, in the parts that MLX joins.

    Attributes:
        function: Name of the function; it holds the template arguments and dtypes.
        header: The caller's header.
        signature: From ``template`` or ``[[kernel]]`` to the opening brace.
        source: The caller's source: the body.
        instantiation: The explicit instantiation of a template, or "".
        template_arguments: Such as ``<float, 64>``, or "".
        parameters: The buffers in order.
        attributes: Names of the attributes in order.
    """

    function: str
    header: str
    signature: str
    source: str
    instantiation: str
    template_arguments: str
    parameters: tuple[Parameter, ...]
    attributes: tuple[str, ...]

    @property
    def text(self) -> str:
        """The text as MLX generates it."""
        return f"{self.header}{self.signature}{self.source}\n}}\n{self.instantiation}"


def template_argument_text(value: TemplateArgument) -> str:
    """A template argument as MLX writes it: true is 1."""
    if isinstance(value, bool):
        return str(int(value))
    return str(value) if isinstance(value, int) else DTYPE_NAMES[value]


def write_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, TemplateArgument]],
    atomic_outputs: bool,
) -> KernelText:
    """Write the kernel function for one set of inputs, dtypes and template arguments."""
    template_arguments = "<" + ", ".join(template_argument_text(v) for _, v in template) + ">" if template else ""
    function = f"custom_kernel_{name}"
    if template:
        function += "_" + re.sub(r"<|>|, |-", "_", template_arguments)[:-1]
    parameters = []
    for i, (input_name, array) in enumerate(zip(input_names, inputs)):
        is_constant, dtype_name = array.size < MAX_CONSTANT_ELEMENTS, DTYPE_NAMES[array.dtype]
        function += f"_{dtype_name}{'s' if array.ndim == 0 else 'c' if is_constant else ''}"
        space, reference = "constant" if is_constant else "device", "&" if array.ndim == 0 else "*"
        parameters.append(Parameter(input_name, "input", i, f"const {space} {dtype_name}{reference}"))
        for role, kind in (("shape", "int*"), ("strides", "int64_t*"), ("ndim", "int&")):
            if array.ndim and f"{input_name}_{role}" in source:
                parameters.append(Parameter(f"{input_name}_{role}", role, i, f"const constant {kind}"))
    for i, (output_name, dtype) in enumerate(zip(output_names, output_dtypes)):
        function += f"_{DTYPE_NAMES[dtype]}"
        element = f"atomic<{DTYPE_NAMES[dtype]}>" if atomic_outputs else DTYPE_NAMES[dtype]
        parameters.append(Parameter(output_name, "output", i, f"device {element}*"))
    attributes = tuple(attribute for attribute in ATTRIBUTE_TYPES if attribute in source)

    lines = [f"  {p.declaration} {p.name} [[buffer({i})]]" for i, p in enumerate(parameters)]
    lines += [f"  {ATTRIBUTE_TYPES[attribute]} {attribute} [[{attribute}]]" for attribute in attributes]
    signature = f"[[kernel]] void {function}(\n" + ",\n".join(lines) + ") {\n"
    instantiation = ""
    if template:
        kinds = {bool: "bool", int: "int", mx.Dtype: "typename"}
        signature = "template <" + ", ".join(f"{kinds[type(v)]} {k}" for k, v in template) + ">\n" + signature
        instance = function + template_arguments
        instantiation = f'\ntemplate [[host_name("{function}")]] [[kernel]] decltype({instance}) {instance};\n'
    return KernelText(
        function, header, signature, source, instantiation, template_arguments, tuple(parameters), attributes
    )
