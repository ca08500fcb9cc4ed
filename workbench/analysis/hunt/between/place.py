"""The lines of two sources that decide a difference.

Two releases of one scheduler are compared by trial: a function that ran in B gets A's text, and if the difference is
gone, that function decides; then each of its changed places is tried alone. If there is no such function, or the two
schedulers have no common source, the lines that ran on one side only are told.
"""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import NamedTuple

Lines = Sequence[Sequence[tuple[str, str, int]]]
"""For each step the lines that ran: file, function and line."""

Trial = Callable[[Sequence[Mapping[str, str]]], bool]
"""Tells whether the difference is gone when functions of B have other texts."""

MOST_LINES = 10
"""Lines told for each side."""


class Line(NamedTuple):
    """A line of a source.

    Attributes:
        file: The file, named as within its package.
        function: Qualified name of the function.
        number: Number of the line.
        text: Its text.
    """

    file: str
    function: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} {self.function}: {self.text}"


@dataclass(frozen=True)
class Decided:
    """The lines that decide a difference.

    Attributes:
        lines_a: The lines of A.
        lines_b: The lines of B.
        by_trial: With these lines of A in B the difference is gone; otherwise they ran on one side only.
    """

    lines_a: list[Line] = field(default_factory=list)
    lines_b: list[Line] = field(default_factory=list)
    by_trial: bool = False

    @property
    def place(self) -> str:
        """The files and functions; "" if they are not known."""
        lines = [*self.lines_b, *self.lines_a]
        chosen = lines if self.by_trial else lines[:1]
        return ", ".join(dict.fromkeys(f"{line.file} {line.function}" for line in chosen))


class Source:
    """The source of a side.

    Args:
        roots: {folder or file: name} of its code.
    """

    def __init__(self, roots: Mapping[str, str]) -> None:
        self._roots = {name: Path(root) for root, name in roots.items()}
        self.lines = functools.cache(self._lines)
        self.functions = functools.cache(self._functions)

    def path(self, file: str) -> Path | None:
        """The path of a file that is named as within its package."""
        if file in self._roots:
            return self._roots[file]
        root, _, rest = file.partition("/")
        found = self._roots[root] / rest if root in self._roots else None
        return found if found is not None and found.exists() else None

    def _lines(self, file: str) -> list[str]:
        path = self.path(file)
        return [] if path is None else path.read_text(encoding="utf-8").splitlines()

    def _functions(self, file: str) -> dict[str, tuple[int, list[str]]]:
        """The first line and the lines of each function of a file that is not inside another."""
        found: dict[str, tuple[int, list[str]]] = {}

        def walk(node: ast.AST, name: str) -> None:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.ClassDef):
                    walk(child, f"{name}{child.name}.")
                elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                    lines = textwrap.dedent("\n".join(self.lines(file)[first - 1 : child.end_lineno])).splitlines()
                    found[f"{name}{child.name}"] = first, lines

        walk(ast.parse("\n".join(self.lines(file))), "")
        return found


def decided(sources: tuple[Source, Source], ran: tuple[Lines, Lines], step: int, is_gone: Trial) -> Decided:
    """The lines that decide a difference.

    Args:
        sources: The sources of A and B.
        ran: The lines that ran in A and B.
        step: The step that differs.
        is_gone: Tries texts of functions in B.
    """
    changed = [key for key in _functions_that_ran(ran[1][: step + 1]) if _is_changed(sources, *key)]
    texts = [_graft(sources[0], *key) for key in changed]
    chosen = [text for text in texts if is_gone([text])][:1]
    if not chosen and texts and is_gone(texts):
        chosen = _fewer(texts, is_gone)
    if chosen:
        found: list[tuple[list[Line], list[Line]]] = []
        for index, text in enumerate(chosen):
            *lines, chosen[index] = _places(sources, text, chosen, is_gone)
            found.append((lines[0], lines[1]))
        needed = _fewer(chosen, is_gone)
        found = [lines for text, lines in zip(chosen, found) if text in needed]
        return Decided([line for a, _ in found for line in a], [line for _, b in found for line in b], True)
    return Decided(_alone(*sources, *ran, step), _alone(*sources[::-1], *ran[::-1], step))


def _functions_that_ran(lines: Lines) -> Iterator[tuple[str, str]]:
    """The functions that ran, the latest first: what is near the step that differs is more likely to decide."""
    seen = {(file, function.partition(".<locals>")[0]) for step in lines for file, function, _ in step}
    last = [(file, function.partition(".<locals>")[0]) for step in reversed(lines) for file, function, _ in step[::-1]]
    yield from (key for key in dict.fromkeys(last) if key in seen)


def _is_changed(sources: tuple[Source, Source], file: str, function: str) -> bool:
    one, other = (source.functions(file).get(function) for source in sources)
    return one is not None and other is not None and _code(one[1]) != _code(other[1])


def _code(lines: Sequence[str]) -> str:
    """A definition without comments and layout."""
    return ast.dump(ast.parse("\n".join(lines)))


def _graft(source: Source, file: str, function: str) -> dict[str, str]:
    return {"file": file, "function": function, "text": "\n".join(source.functions(file)[function][1])}


def _fewer(texts: list[dict[str, str]], is_gone: Trial) -> list[dict[str, str]]:
    """The functions that are needed together."""
    kept = list(texts)
    for text in texts:
        rest = [each for each in kept if each is not text]
        if rest and is_gone(rest):
            kept = rest
    return kept


def _places(
    sources: tuple[Source, Source], graft: dict[str, str], all_of_them: Sequence[dict[str, str]], is_gone: Trial
) -> tuple[list[Line], list[Line], dict[str, str]]:
    """The changed places of a function that are needed, as lines of A and of B, and B's text with A's places."""
    file, function = graft["file"], graft["function"]
    (first_a, a), (first_b, b) = (source.functions(file)[function] for source in sources)
    changes = [code for code in SequenceMatcher(None, a, b, autojunk=False).get_opcodes() if code[0] != "equal"]
    others = [each for each in all_of_them if each is not graft]

    def text(chosen: Sequence[tuple[str, int, int, int, int]]) -> list[str]:
        made = list(b)
        for _, i1, i2, j1, j2 in sorted(chosen, key=lambda code: -code[3]):
            made[j1:j2] = a[i1:i2]
        return made

    def still(chosen: Sequence[tuple[str, int, int, int, int]]) -> bool:
        made = text(chosen)
        try:
            ast.parse("\n".join(made))
        except SyntaxError:
            return False
        return is_gone([*others, {**graft, "text": "\n".join(made)}])

    kept = next(([each] for each in changes if still([each])), list(changes))
    if len(kept) > 1:
        for each in changes:
            rest = [one for one in kept if one is not each]
            if rest and still(rest):
                kept = rest
    lines_a = [Line(file, function, first_a + i, a[i].strip()) for _, i1, i2, _, _ in kept for i in range(i1, i2)]
    lines_b = [Line(file, function, first_b + i, b[i].strip()) for _, _, _, j1, j2 in kept for i in range(j1, j2)]
    is_code = [[line for line in lines if line.text and line.text[0] != "#"] for lines in (lines_a, lines_b)]
    return is_code[0], is_code[1], {**graft, "text": "\n".join(text(kept))}


def _alone(source: Source, other_source: Source, ran: Lines, other: Lines, step: int) -> list[Line]:
    """The lines that ran on one side only up to the step, those first that the other side's file does not have."""
    here, there = _texts(source, ran[step : step + 1]), _texts(other_source, other[: step + 1])
    before, there_last = _texts(source, ran[:step]), _texts(other_source, other[step : step + 1])
    new = [line for line in here if not _has(other_source, *line) and line not in there]
    new += [line for line in before if not _has(other_source, *line) and line not in there and line not in new]
    old = [line for line in here if line not in there_last and line not in before and line not in new]
    texts = {**before, **here}
    return [texts[line] for line in [*new, *old]][:MOST_LINES]


def _texts(source: Source, steps: Lines) -> dict[tuple[str, str], Line]:
    """The lines of steps by file and text, in the order in which they ran."""
    found: dict[tuple[str, str], Line] = {}
    for file, function, number in (line for lines in steps for line in lines):
        text = source.lines(file)[number - 1].strip()
        found.setdefault((file, text), Line(file, function, number, text))
    return found


def _has(source: Source, file: str, text: str) -> bool:
    return any(line.strip() == text for line in source.lines(file))
