"""A kernel in a file: the body that ``mx.fast.metal_kernel`` takes, or a whole ``[[kernel]]`` function."""

from __future__ import annotations

import re
from dataclasses import dataclass

from workbench.kernels.msl.signature import ATTRIBUTE_TYPES

_FUNCTION = re.compile(
    r"(?P<template>\btemplate\s*<[^{};]*>\s*)?(?:\[\[\s*kernel\s*\]\]|\bkernel\b)\s+(?:\[\[[^\]]*\]\]\s*)?"
    r"void\s+(?P<name>\w+)\s*\("
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PARAMETER = re.compile(r"^(?P<type>.*?)(?P<name>\w+)\s*(?:\[\[(?P<attribute>[^\]]*)\]\])?$", re.DOTALL)


@dataclass(frozen=True)
class KernelFile:
    """A kernel as `workbench.msl.metal_kernel` takes it.

    Attributes:
        name: Its name.
        source: Its body; lines keep the numbers that they have in the file.
        header: The text before it.
        inputs: Names of its inputs, if the file says them: those of a whole function.
        outputs: Names of its outputs, likewise.
    """

    name: str
    source: str
    header: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def read_kernel(text: str, file: str, function: str = "") -> KernelFile:
    """The kernel in the text of a file.

    Args:
        text: The text.
        file: Name of the file, for lines and messages.
        function: The ``[[kernel]]`` function to take, if there are several.

    Raises:
        ValueError: There is no such function, or one that cannot be called from MLX.
    """
    without_comments = _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    found = {match["name"]: match for match in _FUNCTION.finditer(without_comments)}
    if not found:
        if function:
            raise ValueError(f"--function is {function!r}: {file} has no [[kernel]] function, it is taken as a body")
        return KernelFile(_identifier(file), f'#line 1 "{file}"\n{text}')
    if function not in found and (function or len(found) > 1):
        raise ValueError(f"--function is {function!r}: {file} has {', '.join(found)}; choose one")
    chosen = found[function] if function else next(iter(found.values()))
    if chosen["template"]:
        raise ValueError(
            f"{file}: {chosen['name']} is a template; put its body into a file, and give its arguments with --template"
        )
    return _of_function(text, without_comments, file, chosen)


def _of_function(text: str, without_comments: str, file: str, function: re.Match[str]) -> KernelFile:
    end = _closing(without_comments, function.end() - 1, "()", file)
    opening = without_comments.index("{", end)
    closing = _closing(without_comments, opening, "{}", file)
    inputs, outputs, before = [], [], []
    for parameter in _split(without_comments[function.end() : end]):
        found = _PARAMETER.match(parameter.strip())
        if found is None:
            raise ValueError(f"{file}: the parameter {parameter.strip()!r} of {function['name']} is not understood")
        kind, name, attribute = found["type"], found["name"], (found["attribute"] or "").strip()
        if attribute in ATTRIBUTE_TYPES:
            before.append(_attribute(kind.strip(), name, attribute))
        elif attribute and not attribute.startswith("buffer"):
            raise ValueError(f"{file}: the parameter {name} is [[{attribute}]], which a kernel of MLX cannot have")
        elif "threadgroup" in kind.split():
            raise ValueError(
                f"{file}: the parameter {name} is threadgroup memory; declare it in the body, as kernels of MLX do"
            )
        elif re.search(r"\bconst\b|\bconstant\b", kind):
            inputs.append(name)
        else:
            outputs.append(name)
    line = text.count("\n", 0, opening) + 1
    source = f'{" ".join(before)}\n#line {line} "{file}"\n{text[opening + 1 : closing]}'
    # The signature is a comment, so that reports and pages can quote it.
    signature = without_comments[function.start() : opening + 1]
    header = f'#line 1 "{file}"\n{text[: function.start()]}/* {signature.strip()} */'
    return KernelFile(function["name"], source, header, tuple(inputs), tuple(outputs))


def _attribute(kind: str, name: str, attribute: str) -> str:
    """The declaration of a variable with the value of an attribute, which MLX passes under the attribute's name."""
    if name == attribute:
        return ""
    components = 3 if ATTRIBUTE_TYPES[attribute] == "uint3" else 1
    wanted = int(kind[-1]) if kind[-1:] in "23" else 1
    part = "" if components == wanted or components == 1 else ".x" if wanted == 1 else ".xy"
    return f"const {kind} {name} = {kind}({attribute}{part});"


def _closing(text: str, opening: int, brackets: str, file: str) -> int:
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == brackets[0]) - (text[place] == brackets[1])
        if not depth:
            return place
    raise ValueError(f"{file}: the {brackets[0]} in line {text.count(chr(10), 0, opening) + 1} is not closed")


def _split(parameters: str) -> list[str]:
    """The parameters between commas that are in no brackets."""
    parts, depth = [""], 0
    for letter in parameters:
        depth += (letter in "<([") - (letter in ">)]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def _identifier(file: str) -> str:
    return re.sub(r"\W", "_", file.rpartition("/")[2].partition(".")[0]) or "kernel"
