"""Find code that clang accepts and Apple's compiler rejects.

A kernel that runs here should also compile on a Mac. Clang compiles a larger language: pointers without an address
space, OpenCL's keywords, and parts of C++ that Metal leaves out (Metal Shading Language Specification 3.1, sections
1.5 and 4). Two passes find them: one over the text, one over clang's syntax tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workbench.kernels.msl.diagnostics import Finding, in_metal_words
from workbench.kernels.msl.rewrite import THREADGROUP_DECLARATION, USER_CODE_BEGINS, USER_CODE_ENDS, VECTOR
from workbench.kernels.msl.signature import KernelText

# ---- the text ----

_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)

TEXT_RULES = (
    (
        re.compile(rf"(?<!\w)\(\s*{VECTOR}\s*\)\s*\("),
        "a vector literal of OpenCL, which Metal reads as a comma expression: write float4(...)",
    ),
    (
        re.compile(r"\b(?:__global|__local|__constant|__private|__generic|__kernel)\b"),
        "a keyword of OpenCL: write device, threadgroup, constant, thread or [[kernel]]",
    ),
    (
        re.compile(r"\b(?:global|local|generic)\b|\bprivate\b(?!\s*:)"),
        "a word that OpenCL reserves for an address space: choose another name",
    ),
    (
        re.compile(r"(?<!\[\[)\b(?:vertex|fragment|threadgroup_imageblock|ray_data|object_data)\b"),
        "a word that Metal reserves: choose another name",
    ),
    (
        re.compile(r"\b(?:simd|quad)_\w+\s*<\s*(?:long|ulong|int64_t|uint64_t)\b"),
        "simd functions take components of at most 32 bits",
    ),
    (re.compile(r"\bextern\b"), "extern: a Metal kernel is one text, with nothing to link"),
    (
        re.compile(r"\batomic_u?long\b|\batomic\s*<\s*(?:long|ulong|int64_t|uint64_t)\s*>"),
        "an atomic of 64 bits, which most Apple GPUs lack: use atomic_int, atomic_uint or atomic_float",
    ),
    (
        re.compile(
            r"\b(?:char|uchar|short|ushort|int|uint|long|ulong|half|float|bfloat|bool)(?:[5-9]|1\d)\b"
            r"|\bvec\s*<[^<>;]*,\s*(?:[5-9]|1\d)\s*>"
        ),
        "a vector of more than 4 components: Metal has 2, 3 and 4",
    ),
)

_BLOCK_MARK = re.compile(r"[{}]")
_STRUCT = re.compile(r"(?P<template>\btemplate\s*<[^{};]*>\s*)?\bstruct\s+(?P<name>\w+)\s*(?:final\s*)?(?::[^{;]*)?\{")


def lint_text(kernel: KernelText, name: str) -> list[Finding]:
    """Findings in the text of a kernel.

    Args:
        kernel: The kernel.
        name: The kernel's name, for the names of the files.
    """
    findings = []
    structs = list(_structs(_without_comments(kernel.header + "\n" + kernel.source)))
    for file, text in ((f"{name}.header", kernel.header), (f"{name}.source", kernel.source)):
        if (place := next((at for at, char in enumerate(text) if not char.isascii()), None)) is not None:
            what = f"{text[place]!r}: MLX hands sources over as ASCII, comments included: write it in ASCII"
            findings.append(Finding(file, _line_at(text, place), what))
        code = _without_comments(text)
        for pattern, what in TEXT_RULES:
            for match in pattern.finditer(code):
                findings.append(Finding(file, _line_at(code, match.start()), f"{match[0].strip()!r}: {what}"))
        findings += [Finding(file, _line_at(code, place), what) for place, what in _structural(code, structs)]
        if file.endswith(".header"):
            for match in THREADGROUP_DECLARATION.finditer(code):
                line = _line_at(code, match.start("type"))
                findings.append(
                    Finding(
                        file,
                        line,
                        "a threadgroup variable outside the kernel: declare it in the source and pass a pointer",
                    )
                )
    return findings


@dataclass(frozen=True)
class _Struct:
    """A struct of the caller: its name, whether it is a template, whether its own text has a constructor."""

    name: str
    is_template: bool
    has_constructor: bool


def _structs(code: str) -> Iterator[_Struct]:
    for match in _STRUCT.finditer(code):
        body = code[match.end() : _end_of_block(code, match.end())]
        constructors = re.findall(rf"(?<![\w.~:]){match['name']}\s*\([^()]*\)\s*(=\s*default)?", body)
        yield _Struct(match["name"], bool(match["template"]), any(not default for default in constructors))


def _end_of_block(code: str, start: int) -> int:
    """Place of the brace that closes a block, from the place after the one that opens it."""
    depth = 1
    for mark in _BLOCK_MARK.finditer(code, start):
        depth += 1 if mark[0] == "{" else -1
        if depth == 0:
            return mark.start()
    return len(code)


def _structural(code: str, structs: Sequence[_Struct]) -> Iterator[tuple[int, str]]:
    """Faults that need to know blocks and structs, as place and text."""
    with_constructor = {struct.name for struct in structs if struct.has_constructor}
    for match in THREADGROUP_DECLARATION.finditer(code):
        place = match.start("type")
        if code.count("{", 0, place) > code.count("}", 0, place):
            yield place, "a threadgroup variable in an inner block: declare it at the beginning of the kernel"
        if match["type"].split("<")[0].strip() in with_constructor:
            yield place, f"a threadgroup variable of {match['type'].strip()!r}, whose constructor nothing runs"
    own = [(match.start(), _end_of_block(code, match.end())) for match in _STRUCT.finditer(code)]
    for struct in structs:
        if not struct.is_template:
            continue
        for match in re.finditer(rf"(?<![\w:~]){struct.name}\s+\w+\s*[({{=]|(?<![\w:~]){struct.name}\s*[({{]", code):
            inside = any(start <= match.start() < end for start, end in own)
            if not inside and not code[: match.start()].rstrip().endswith("struct"):
                what = (
                    f"{struct.name!r} without template arguments, which Metal does not deduce: write {struct.name}<...>"
                )
                yield match.start(), what


def _without_comments(text: str) -> str:
    """The text with comments and strings blanked; every character stays on its line."""
    return _COMMENT_OR_STRING.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _line_at(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


# ---- the syntax tree ----

# Functions of the metal namespace, which every kernel has in scope: a second function of the same name is ambiguous.
METAL_FUNCTIONS = frozenset(
    (
        "abs", "absdiff", "acos", "acosh", "addsat", "all", "any", "asin", "asinh", "atan", "atan2", "atanh",
        "ceil", "clamp", "clz", "copysign", "cos", "cosh", "cospi", "cross", "ctz", "degrees", "determinant",
        "dfdx", "dfdy", "distance", "distance_squared", "divide", "dot", "exp", "exp10", "exp2", "extract_bits",
        "fabs", "faceforward", "fdim", "floor", "fma", "fmax", "fmax3", "fmedian3", "fmin", "fmin3", "fmod",
        "fract", "frexp", "fwidth", "hadd", "ilogb", "insert_bits", "isfinite", "isinf", "isnan", "isnormal",
        "isordered", "isunordered", "ldexp", "length", "length_squared", "log", "log10", "log2", "mad24",
        "madhi", "madsat", "max", "max3", "median3", "min", "min3", "mix", "modf", "mul24", "mulhi",
        "nextafter", "normalize", "popcount", "pow", "powr", "quad_broadcast", "quad_max", "quad_min",
        "quad_shuffle", "quad_sum", "radians", "reflect", "refract", "reverse_bits", "rhadd", "rint", "rotate",
        "round", "rsqrt", "saturate", "select", "sign", "signbit", "simd_all", "simd_any", "simd_ballot",
        "simd_broadcast", "simd_max", "simd_min", "simd_product", "simd_shuffle", "simd_sum", "sin", "sincos",
        "sinh", "sinpi", "smoothstep", "sqrt", "step", "subsat", "tan", "tanh", "tanpi", "transpose", "trunc",
        "unpack_unorm4x8_to_float",
    )
)  # fmt: skip

_NODE = re.compile(r"^(?P<indent>[ |`]*-)?(?P<kind>\w+) (?P<address>0x[0-9a-f]+)(?P<rest>.*)$")
_QUOTED = re.compile(r"'[^']*'")
_PLACE = re.compile(r"(?:line|(?P<file>[^\s<>,:]+)):(?P<line>\d+):\d+")
_DECLARATION_MARKS = frozenset(("used", "referenced", "implicit", "constexpr", "static", "invalid"))
_FUNCTION_KINDS = ("FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl")


@dataclass(frozen=True)
class _Node:
    """A node of clang's syntax tree, from the caller's code."""

    depth: int
    kind: str
    address: str
    text: str  # the rest of its line
    file: str
    line: int

    def finding(self, text: str) -> Finding:
        return Finding(self.file, self.line, text)

    @property
    def name(self) -> str:
        """Name of a declaration, the word before its type; "" if it has none."""
        word = self.text.split(" '", 1)[0].split()[-1:]
        return word[0] if word and word[0].isidentifier() and word[0] not in _DECLARATION_MARKS else ""

    @property
    def type(self) -> str:
        """Type of a declaration or an expression."""
        quoted = _QUOTED.search(self.text)
        return quoted[0].strip("'") if quoted else ""


def lint_tree(tree: str) -> list[Finding]:
    """Findings in a syntax tree in the format of ``clang -Xclang -ast-dump``."""
    nodes = list(_user_nodes(tree))
    findings: list[Finding] = []
    for i, node in enumerate(nodes):
        findings += _lint_node(node, nodes[i + 1] if i + 1 < len(nodes) else None)
        findings += _lint_with_children(node, nodes[i + 1 :])
    findings += _recursion(nodes)
    return sorted(set(findings), key=lambda f: (f.file, f.line, f.text))


def _user_nodes(tree: str) -> Iterator[_Node]:
    """The nodes between the two marks. Each place is written relative to the place before it."""
    begin, end = tree.find(USER_CODE_BEGINS), tree.find(USER_CODE_ENDS)
    file, line = "", 0
    for text in tree[begin : end if end >= 0 else None].splitlines()[1:]:
        match = _NODE.match(text)
        if not match:
            continue
        for place in _PLACE.finditer(_QUOTED.sub("", match["rest"])):
            file, line = place["file"] or file, int(place["line"])
        yield _Node(len(match["indent"] or ""), match["kind"], match["address"], match["rest"], file, line)


def _lint_node(node: _Node, following: _Node | None) -> Iterator[Finding]:
    if node.kind in ("VarDecl", "ParmVarDecl"):
        yield from _lint_variable(node)
    elif node.kind == "FunctionDecl" and node.name in METAL_FUNCTIONS:
        yield node.finding(f"function {node.name!r}: Metal has a function of this name; choose another")
    elif node.kind == "LambdaExpr":
        yield node.finding("lambda expression: Metal before 3.2 has no lambdas; write a function")
    elif node.kind == "GotoStmt":
        yield node.finding("goto: Metal has no goto")
    elif node.kind == "ImplicitCastExpr" and "AddressSpaceConversion" in node.text and following:
        space = re.match(r"(?:const |volatile )*__(global|local|constant)\b", following.type)
        if space and "*" not in node.type:
            where = in_metal_words(f"__{space[1]}")
            yield node.finding(
                f"a member function is called on an object in {where} memory: declare the function {where} too"
            )


_NO_SPACE = "without an address space: write device, threadgroup, constant or thread in front of its type"
_CASTS = ("CStyleCastExpr", "CXXReinterpretCastExpr", "CXXStaticCastExpr", "CXXFunctionalCastExpr")
_ONE_BIT = re.compile(r"'(?:simd|quad)_(?:shuffle\w*|broadcast\w*|sum|product|min|max|prefix\w*)' 'bool ")

# Names that MLX's text in front of every kernel defines (mlx/backend/metal/kernels/utils.h and what it includes).
MLX_NAMES = frozenset(
    (
        "ConditionalType", "Limits", "LoopedElemToLoc", "MLX_MTL_CONST", "WorkPerThread", "bfloat16_t", "ceildiv",
        "complex64_t", "complex_t", "elem_to_loc", "elem_to_loc_1", "elem_to_loc_2", "elem_to_loc_2_nd",
        "elem_to_loc_3", "elem_to_loc_3_nd", "expm1", "expm1f", "float16_t", "log1p", "uint2_to_uint64",
        "uint64_to_uint2",
    )
)  # fmt: skip
_DECLARATIONS = (*_FUNCTION_KINDS[:1], "CXXRecordDecl", "ClassTemplateDecl", "FunctionTemplateDecl", "TypedefDecl")


def _lint_with_children(node: _Node, following: Sequence[_Node]) -> Iterator[Finding]:
    """Faults of declarations and of expressions together with what they consist of."""
    own_type = node.type.split("(", 1)[0] if node.kind in _FUNCTION_KINDS else node.type
    if "__generic" in own_type and "implicit" not in node.text:
        if node.kind == "FieldDecl":
            yield node.finding(f"member {node.name!r} is a pointer or reference {_NO_SPACE}")
        elif node.kind in ("FunctionDecl", "CXXMethodDecl"):
            yield node.finding(f"function {node.name!r} returns a pointer or reference {_NO_SPACE}")
        elif node.kind in _CASTS and "*" in node.type:  # clang's own copies of structs cast to references
            yield node.finding(f"a cast to a pointer {_NO_SPACE}")
    if node.kind in _DECLARATIONS and node.name in MLX_NAMES:
        yield node.finding(f"{node.name!r}: MLX defines this name in front of every kernel; choose another")
    if node.kind == "DeclRefExpr" and _ONE_BIT.search(node.text):
        yield node.finding("a simd function of bool, which Metal lacks: convert to int, or use simd_any or simd_all")
    is_constant = node.kind == "VarDecl" and "__constant" in node.type and "constexpr" not in node.text
    if is_constant and any(child.kind == "CallExpr" for child in _subtree(node, following)):
        yield node.finding(f"constant {node.name!r} is computed by a call: Metal needs a value known at compile time")
    if node.kind in ("BinaryOperator", "CompoundAssignOperator"):
        types = {_operand_type(child, following) for child in _children(node, following)}
        if {"half", "bfloat"} <= types:
            yield node.finding("half and bfloat in one operation, which Metal lacks: convert both of them to float")


def _subtree(node: _Node, following: Sequence[_Node]) -> Iterator[_Node]:
    for child in following:
        if child.depth <= node.depth:
            return
        yield child


def _children(node: _Node, following: Sequence[_Node]) -> list[_Node]:
    below = list(_subtree(node, following))
    return [child for child in below if child.depth == below[0].depth]


def _operand_type(operand: _Node, following: Sequence[_Node]) -> str:
    """Type of an operand before any implicit conversion: "half", "bfloat" or another."""
    nodes = [operand, *_subtree(operand, following[following.index(operand) + 1 :])]
    source = next((node for node in nodes if node.kind not in ("ImplicitCastExpr", "ParenExpr")), operand)
    words = {"half": "half", "_Float16": "half", "bfloat": "bfloat", "__bf16": "bfloat"}
    found = re.findall(r"\b(?:half|_Float16|bfloat|__bf16)\b", source.type)
    return words[found[-1]] if found else source.type


def _lint_variable(node: _Node) -> Iterator[Finding]:
    if "__generic" in node.type and node.name:  # declarations that clang adds have no name
        yield node.finding(
            f"{node.name!r} is a pointer or reference without an address space: "
            "write device, threadgroup, constant or thread in front of its type"
        )
    # The last word of a type is the space of the variable itself.
    if node.kind == "VarDecl" and re.search(r"__global$|^(?:const )?__global \w+$", node.type):
        yield node.finding(f"variable {node.name!r} outlives the kernel: Metal allows only constant variables to do so")


def _recursion(nodes: Sequence[_Node]) -> Iterator[Finding]:
    """Functions that can call themselves."""
    functions: dict[str, _Node] = {}
    first_declaration: dict[str, str] = {}
    for node in nodes:
        if node.kind in _FUNCTION_KINDS:
            earlier = re.match(r" (?:parent 0x\w+ )?prev (0x\w+)", node.text)
            first = first_declaration[earlier[1]] if earlier and earlier[1] in first_declaration else node.address
            first_declaration[node.address] = first
            functions.setdefault(first, node)
    calls: dict[str, set[str]] = {address: set() for address in functions}
    enclosing: list[_Node] = []
    for node in nodes:
        while enclosing and enclosing[-1].depth >= node.depth:
            enclosing.pop()
        if node.kind in _FUNCTION_KINDS:
            enclosing.append(node)
        elif enclosing and node.kind in ("DeclRefExpr", "MemberExpr"):
            called = {first_declaration.get(address, "") for address in re.findall(r"0x[0-9a-f]+", node.text)}
            calls[first_declaration[enclosing[-1].address]] |= called & functions.keys()
    for address, function in functions.items():
        reached: set[str] = set()
        frontier = set(calls[address])
        while frontier:
            reached |= frontier
            frontier = set().union(*(calls[a] for a in frontier)) - reached
        if address in reached:
            yield function.finding(f"function {function.name!r} can call itself: Metal has no recursion")
