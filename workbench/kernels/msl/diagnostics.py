"""Clang's messages about a kernel, at the lines of the caller's own text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from workbench.kernels.msl.errors import MslCompileError

_MESSAGE = re.compile(r"^(?P<file>[^\s:][^:]*):(?P<line>\d+):\d+: (?P<kind>fatal error|error|note): (?P<text>.*)$")
_MOST_SHOWN = 8

# Clang's messages use the names of address spaces in C++ for OpenCL.
_METAL_WORDS = {"__global": "device", "__local": "threadgroup", "__private": "thread"}


@dataclass(frozen=True)
class Finding:
    """A mistake in a kernel's text.

    Attributes:
        file: "NAME.source", "NAME.header", or the name in a ``#line``.
        line: Line in that file, from 1.
        text: The mistake and its remedy.
    """

    file: str
    line: int
    text: str


def findings_of(output: str, own_folder: str) -> list[Finding]:
    """The errors in clang's output, and why each of the caller's functions does not fit a call.

    An error inside the shim, such as a static assertion, is placed at the caller's line that led there.

    Args:
        output: Clang's output.
        own_folder: Folder of the shim; its lines mean nothing to a caller.
    """
    messages = [m for m in map(_MESSAGE.match, output.splitlines()) if m]
    findings = []
    for i, message in enumerate(messages):
        if message["kind"] == "note":
            continue
        notes = []
        for note in messages[i + 1 :]:
            if note["kind"] != "note":
                break
            notes.append(note)
        candidates = [m for m in (message, *notes) if not m["file"].startswith(own_folder)]
        place = candidates[0] if candidates else message
        findings.append(Finding(place["file"], int(place["line"]), in_metal_words(message["text"])))
        findings += [
            Finding(note["file"], int(note["line"]), "note: " + in_metal_words(note["text"]))
            for note in candidates
            if note["kind"] == "note" and note is not place and note["text"].startswith("candidate")
        ]
    return findings


def in_metal_words(text: str) -> str:
    """Replace clang's names of types and address spaces by Metal's."""
    text = re.sub(r" ?__private(?=[\s']|$)(?=')", "", text)  # the variable's own space, which Metal does not write
    text = re.sub("|".join(_METAL_WORDS), lambda word: _METAL_WORDS[word[0]], text)
    text = re.sub(r"typeof\(([^()]*)\)", r"\1", text)
    text = re.sub(r"('[^']*') \(aka \1\)", r"\1", text.replace("__bf16", "bfloat"))
    text = re.sub(r" \[-W[^\]]*\]$", "", text)
    return re.sub(r"(\w+) __attribute__\(\(ext_vector_type\((\d)\)\)\)", r"\1\2", text)


def compile_error(kernel: str, findings: list[Finding], texts: Mapping[str, str]) -> MslCompileError:
    """The error that lists the findings, each with its line.

    Args:
        kernel: Name of the kernel.
        findings: One or more findings.
        texts: The caller's texts by file name.
    """
    lines = [f"kernel {kernel} does not compile:"]
    for finding in findings[:_MOST_SHOWN]:
        lines.append(f"{finding.file}:{finding.line}: {finding.text}")
        if quoted := quote(texts, finding.file, finding.line):
            lines.append(f"    {quoted}")
    if len(findings) > _MOST_SHOWN:
        lines.append(f"and {len(findings) - _MOST_SHOWN} more")
    return MslCompileError(
        "\n".join(lines), kind="compile error", kernel=kernel, file=findings[0].file, line=findings[0].line
    )


_LINE_DIRECTIVE = re.compile(r'^[ \t]*#[ \t]*line[ \t]+(\d+)[ \t]+"([^"\n]*)"')


def texts_by_file(texts: Mapping[str, str]) -> dict[str, str]:
    """Texts by the names that ``#line`` gives to their parts; lines of a file that no part has are empty."""
    found: dict[str, dict[int, str]] = {}
    for name, text in texts.items():
        file, line = name, 1
        found.setdefault(file, {})
        for words in text.split("\n"):
            if directive := _LINE_DIRECTIVE.match(words):
                line, file = int(directive[1]), directive[2]
                found.setdefault(file, {})
                continue
            found[file].setdefault(line, words)
            line += 1
    return {
        file: "\n".join(lines.get(number, "") for number in range(1, max(lines, default=0) + 1))
        for file, lines in found.items()
        if any(lines.values())
    }


def quote(texts: Mapping[str, str], file: str, line: int) -> str:
    """A line of the caller's text, or "" if it is not known."""
    lines = texts.get(file, "").split("\n")
    return lines[line - 1].strip() if 1 <= line <= len(lines) else ""


def with_carets(message: str) -> str:
    """The message of a `compile_error` with marks below each line that it quotes."""
    lines = []
    for line in message.split("\n"):
        lines.append(line)
        if line.startswith("    "):
            lines.append(carets(line, line.strip()))
    return "\n".join(lines)


def carets(message: str, quoted: str) -> str:
    """A line of marks below the quotation that ends a message."""
    last = message.rpartition("\n")[2]
    return " " * (len(last) - len(quoted)) + "^" + "~" * (len(quoted) - 1)
