"""What Apple's compiler rejects and clang accepts.

A kernel that runs here should also compile on a Mac. Clang compiles a larger language: pointers without an address
space, OpenCL's own words, and parts of C++ that Metal leaves out (Metal Shading Language Specification 3.1, sections
1.5 and 4). Two passes find them: one over the text, one over clang's syntax tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workbench.msl.diagnostics import Finding, in_metal_words
from workbench.msl.rewrite import THREADGROUP_DECLARATION, USER_CODE_BEGINS, USER_CODE_ENDS, VECTOR
from workbench.msl.signature import KernelText

# ---- the text ----

_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)

TEXT_RULES = (
    (
        re.compile(rf"(?<!\w)\(\s*{VECTOR}\s*\)\s*\("),
        "a vector literal of OpenCL; in Metal it is a comma expression: write float4(...)",
    ),
    (
        re.compile(r"\b(?:__global|__local|__constant|__private|__generic|__kernel)\b"),
        "a word of OpenCL: write device, threadgroup, constant, thread or [[kernel]]",
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
)


def lint_text(kernel: KernelText, name: str) -> list[Finding]:
    """Findings in the text of a kernel.

    Args:
        kernel: The kernel.
        name: Its name, for the names of the files.
    """
    findings = []
    for file, text in ((f"{name}.header", kernel.header), (f"{name}.source", kernel.source)):
        code = _without_comments(text)
        for pattern, what in TEXT_RULES:
            for match in pattern.finditer(code):
                findings.append(Finding(file, _line_at(code, match.start()), f"{match[0].strip()!r}: {what}"))
        if file.endswith(".header"):
            for match in THREADGROUP_DECLARATION.finditer(code):
                line = _line_at(code, match.start("type"))
                findings.append(
                    Finding(
                        file,
                        line,
                        "a threadgroup variable outside of the kernel: declare it in the source and pass a pointer",
                    )
                )
    return findings


def _without_comments(text: str) -> str:
    """The text with comments and strings blanked; every character stays on its line."""
    return _COMMENT_OR_STRING.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _line_at(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


# ---- the syntax tree ----

# Functions of the metal namespace, which every kernel has in scope: an own function of that name is ambiguous.
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
    """A node of clang's syntax tree that the caller wrote."""

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
        """Name of a declaration: the word before its type; "" where it has none."""
        word = self.text.split(" '", 1)[0].split()[-1:]
        return word[0] if word and word[0].isidentifier() and word[0] not in _DECLARATION_MARKS else ""

    @property
    def type(self) -> str:
        """Type of a declaration or an expression."""
        quoted = _QUOTED.search(self.text)
        return quoted[0].strip("'") if quoted else ""


def lint_tree(tree: str) -> list[Finding]:
    """Findings in a syntax tree, as ``clang -Xclang -ast-dump`` writes it."""
    nodes = list(_user_nodes(tree))
    findings = []
    for i, node in enumerate(nodes):
        findings += _lint_node(node, nodes[i + 1] if i + 1 < len(nodes) else None)
    findings += _recursion(nodes)
    return sorted(set(findings), key=lambda f: (f.file, f.line, f.text))


def _user_nodes(tree: str) -> Iterator[_Node]:
    """The nodes between the two marks. A place is written relative to the one before it."""
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
        yield node.finding(f"function {node.name!r}: Metal has one of that name; choose another name")
    elif node.kind == "LambdaExpr":
        yield node.finding("lambda expression: Metal before 3.2 has none; write a function")
    elif node.kind == "GotoStmt":
        yield node.finding("goto: Metal has none")
    elif node.kind == "ImplicitCastExpr" and "AddressSpaceConversion" in node.text and following:
        space = re.match(r"(?:const |volatile )*__(global|local|constant)\b", following.type)
        if space and "*" not in node.type:
            where = in_metal_words(f"__{space[1]}")
            yield node.finding(
                f"a member function is called on an object in {where} memory: declare the function {where} too"
            )


def _lint_variable(node: _Node) -> Iterator[Finding]:
    if "__generic" in node.type and node.name:  # what clang adds by itself has no name
        yield node.finding(
            f"{node.name!r} is a pointer or reference without an address space: "
            "write device, threadgroup, constant or thread in front of its type"
        )
    # The last word of a type is the space of the variable itself.
    if node.kind == "VarDecl" and re.search(r"__global$|^(?:const )?__global \w+$", node.type):
        yield node.finding(f"variable {node.name!r} outlives the kernel: Metal allows only constant ones")


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
