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

_Place = tuple[int, int, int, int]
"""Lines [i1, i2) of A's function that stand where lines [j1, j2) of B's do."""

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


class _Changed:
    """A function that both sources have with different code.

    Attributes:
        changes: Its changed places.
    """

    def __init__(self, sources: tuple[Source, Source], file: str, function: str) -> None:
        self._file, self._function = file, function
        (self._first_a, self._a), (self._first_b, self._b) = (source.functions(file)[function] for source in sources)
        codes = SequenceMatcher(None, self._a, self._b, autojunk=False).get_opcodes()
        self.changes = [code[1:] for code in codes if code[0] != "equal"]

    def graft(self, chosen: Sequence[_Place]) -> dict[str, str] | None:
        """B's text with A's in some places; None if that is not Python."""
        made = list(self._b)
        for i1, i2, j1, j2 in sorted(chosen, key=lambda place: -place[2]):
            made[j1:j2] = self._a[i1:i2]
        text = "\n".join(made)
        try:
            ast.parse(text)
        except SyntaxError:
            return None
        return {"file": self._file, "function": self._function, "text": text}

    def lines(self, chosen: Sequence[_Place]) -> tuple[list[Line], list[Line]]:
        """The lines of code of A and B in some places."""
        sides = (self._first_a, self._a, 0), (self._first_b, self._b, 2)
        made = [
            [
                Line(self._file, self._function, first + index, text.strip())
                for place in chosen
                for index, text in enumerate(lines[place[at] : place[at + 1]], start=place[at])
                if text.strip() and text.strip()[0] != "#"
            ]
            for first, lines, at in sides
        ]
        return made[0], made[1]


def decided(sources: tuple[Source, Source], ran: tuple[Lines, Lines], step: int, is_gone: Trial) -> Decided:
    """The lines that decide a difference.

    Args:
        sources: The sources of A and B.
        ran: The lines that ran in A and B.
        step: The step that differs.
        is_gone: Tries texts of functions in B.
    """
    keys = _functions_that_ran(ran[1][: step + 1])
    changed = [_Changed(sources, *key) for key in keys if _is_changed(sources, *key)]

    def still(chosen: Sequence[_Chosen]) -> bool:
        grafts = [graft for function, places in chosen if (graft := function.graft(places)) is not None]
        return len(grafts) == len(chosen) and is_gone(grafts)

    whole: list[_Chosen] = [(function, function.changes) for function in changed]
    single: list[_Chosen] = [(function, [place]) for function in changed for place in function.changes]
    found = next(([each] for each in [*whole, *single] if still([each])), None)
    if found is None and whole and still(whole):
        found = _fewer(whole, still)
    if found is None:
        return Decided(_alone(*sources, *ran, step), _alone(*sources[::-1], *ran[::-1], step))
    for index, (function, places) in enumerate(found):
        found[index] = function, _places(places, lambda fewer, at=index: still(_with(found, at, fewer)))  # type: ignore[misc]
    lines = [function.lines(places) for function, places in _fewer(found, still)]
    return Decided([line for a, _ in lines for line in a], [line for _, b in lines for line in b], True)


_Chosen = tuple[_Changed, list[_Place]]
"""A function and some of its changed places."""


def _with(chosen: list[_Chosen], at: int, places: list[_Place]) -> list[_Chosen]:
    return [(function, places if index == at else its) for index, (function, its) in enumerate(chosen)]


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


def _fewer(chosen: list[_Chosen], still: Callable[[list[_Chosen]], bool]) -> list[_Chosen]:
    """The functions that are needed together."""
    kept = list(chosen)
    for each in chosen:
        rest = [one for one in kept if one is not each]
        if rest and still(rest):
            kept = rest
    return kept


def _places(places: list[_Place], still: Callable[[list[_Place]], bool]) -> list[_Place]:
    """The changed places of a function that are needed: one, if one is enough."""
    kept = next(([each] for each in places if still([each])), list(places))
    for each in places if len(kept) > 1 else ():
        rest = [one for one in kept if one is not each]
        if rest and still(rest):
            kept = rest
    return kept


def _alone(source: Source, other_source: Source, ran: Lines, other: Lines, step: int) -> list[Line]:
    """The lines that ran on one side only up to the step, those first that the other side's file does not have."""
    here, there = _texts(source, ran[step : step + 1]), _texts(other_source, other[: step + 1])
    before, there_last = _texts(source, ran[:step]), _texts(other_source, other[step : step + 1])
    new = [line for line in here if not _has(other_source, *line) and line not in there]
    new += [line for line in before if not _has(other_source, *line) and line not in there and line not in new]
    old = [line for line in here if line not in there_last and line not in before and line not in new]
    texts = {**before, **here}
    told = [texts[line] for line in [*new, *old]]
    return sorted(told, key=lambda line: "__" in line.function)[:MOST_LINES]  # what is made behind what is decided


def _texts(source: Source, steps: Lines) -> dict[tuple[str, str], Line]:
    """The lines of steps by file and text, in the order in which they ran."""
    found: dict[tuple[str, str], Line] = {}
    for file, function, number in (line for lines in steps for line in lines):
        text = source.lines(file)[number - 1].strip()
        found.setdefault((file, text), Line(file, function, number, text))
    return found


def _has(source: Source, file: str, text: str) -> bool:
    return any(line.strip() == text for line in source.lines(file))
