"""Translate Metal Shading Language to the C++ for OpenCL that clang compiles.

The two languages share their address spaces, so few changes are needed. Every line keeps its number.
"""

from __future__ import annotations

import re

from workbench.kernels.msl.signature import ATTRIBUTE_TYPES, KernelText

# Declarations around the caller's code, which mark it in clang's syntax tree.
USER_CODE_BEGINS = "msl_user_code_begins"
USER_CODE_ENDS = "msl_user_code_ends"

# Metal's own headers, which the shim replaces.
_METAL_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<metal_\w+>", re.MULTILINE)

# A declaration of threadgroup variables, as opposed to one of a pointer to threadgroup memory.
THREADGROUP_DECLARATION = re.compile(
    r"(?P<before>^|[;{}])(?P<space>\s*)threadgroup\s+(?P<type>[\w:]+(?:\s*<[^;(){}]*?>)?)\s+"
    r"(?P<declarators>\w+\s*(?:\[[^;]*?\]\s*)*(?:,\s*\w+\s*(?:\[[^;]*?\]\s*)*)*);",
    re.MULTILINE,
)
_DECLARATOR = re.compile(r"\s*(?P<name>\w+)\s*(?P<extents>(?:\[[^\[\]]*\]\s*)*)")

# In Metal a floating-point literal without a suffix is a float.
_UNSUFFIXED_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])")

VECTOR = r"(?:char|uchar|short|ushort|int|uint|long|ulong|half|float|bfloat)[234]"
_VECTOR_TEMPLATE_CALL = re.compile(r"(?<![\w:])(?:metal::)?vec<([^<>;]+),\s*([^<>;]+)>\s*\((?!&)")
_VECTOR_DECLARATION = re.compile(rf"(?m)^(\s*(?:const\s+)?)({VECTOR})\s+(\w+)\(([^;{{}}]*)\);")


def rewrite(text: str, first_variable: int = 0) -> str:
    """Rewrite the source or the header of a kernel; lines keep their numbers.

    Args:
        text: Metal Shading Language.
        first_variable: Number of the first threadgroup variable of this text; every variable has a different number.
    """
    text = _METAL_INCLUDE.sub("", text)
    text = _place_threadgroup_variables(text, first_variable)
    text = _UNSUFFIXED_LITERAL.sub(r"\1f", text)
    text = _VECTOR_TEMPLATE_CALL.sub(r"metal::make_vector<metal::vec<\1, \2>>(", text)
    return _VECTOR_DECLARATION.sub(r"\1\2 \3 = \2(\4);", text)


def count_threadgroup_variables(text: str) -> int:
    """Number of threadgroup variables that a text declares."""
    return sum(len(_split_declarators(match["declarators"])) for match in THREADGROUP_DECLARATION.finditer(text))


def _place_threadgroup_variables(text: str, first_variable: int) -> str:
    """Turn threadgroup variables into references to memory of the runtime.

    C++ for OpenCL allows variables in local memory only in functions that are not templates. The runtime places each
    variable, with a red zone around it, and knows its name.
    """
    number = first_variable

    def place(match: re.Match[str]) -> str:
        nonlocal number
        declarations = []
        for name, extents in _split_declarators(match["declarators"]):
            element = match["type"]
            declarations.append(
                f"threadgroup auto& {name} = *(threadgroup __typeof__({element}{extents})*)"
                f"msl_threadgroup_variable({number}, sizeof({element}{extents}), sizeof({element}), "
                f'metal::type_code<{element}>, "{name}");'
            )
            number += 1
        kept = match["before"] + match["space"]
        newlines = match[0].count("\n") - kept.count("\n")
        return kept + " ".join(declarations) + "\n" * newlines

    return THREADGROUP_DECLARATION.sub(place, text)


def _split_declarators(declarators: str) -> list[tuple[str, str]]:
    """Names and extents of ``a[4], b[2][8]``."""
    return [(m["name"], " ".join(m["extents"].split())) for m in _DECLARATOR.finditer(declarators) if m["name"]]


def translation_unit(kernel: KernelText, name: str) -> str:
    """The whole text that clang compiles: shim, header, kernel function, and an entry point that calls it.

    Places are reported in files "NAME.header" and "NAME.source", with the caller's own line numbers.
    """
    header_variables = count_threadgroup_variables(kernel.header)
    arguments = [f"msl_argument{{arguments[{i}]}}" for i in range(len(kernel.parameters))]
    for attribute in kernel.attributes:
        value = f"attributes->{attribute}"
        arguments.append(f"msl_uint3({value})" if ATTRIBUTE_TYPES[attribute] == "uint3" else value)
    call = f"{kernel.function}{kernel.template_arguments}({', '.join(arguments)})"
    return "\n".join(
        [
            "#include <mlx_prelude.h>",
            "#include <entry.h>",
            f"struct {USER_CODE_BEGINS};",
            f'#line 1 "{name}.header"',
            rewrite(kernel.header),
            f'#line 1 "{name}.signature"',
            kernel.signature.rstrip("\n"),
            f'#line 1 "{name}.source"',
            rewrite(kernel.source, header_variables),
            '#line 1 "entry"',
            "}",
            f"struct {USER_CODE_ENDS};",
            'extern "C" MSL_NOT_CHECKED __attribute__((visibility("default"))) void msl_entry(',
            "    __global const size_t* arguments, __global const msl_thread_attributes* attributes) {",
            f"  {call};",
            "}",
            "",
        ]
    )
