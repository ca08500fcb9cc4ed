"""Write docs/api.md from the docstrings of all public names: ``python scripts/make_api_page.py``. ``--check`` compares.

A public name is one that ``workbench`` or one of its public modules lists in ``__all__``; of ``workbench.panes`` the
components are shown.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generated_files import write_or_check
from make_reference import CONFIGURATIONS, RECORDS

import workbench
import workbench.viz

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
PACKAGES = ("workbench", "workbench.viz", "workbench.panes", "workbench.msl", "workbench.course")
BEGINNING = """# Functions and classes by name

All public names with their docstrings, written by `scripts/make_api_page.py`: what a package lists in `__all__`.
The fields of configurations and records are [on a page by themselves](reference.md).
"""
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes|Example|Examples):$")


def _is_large_record(of: Any) -> bool:
    """Whether a class has many fields and is read rather than made: its fields are attributes, not arguments."""
    is_record = inspect.isclass(of) and dataclasses.is_dataclass(of) and "Args:" not in (of.__doc__ or "")
    return is_record and len(dataclasses.fields(of)) > 6


def names(package: Any) -> list[str]:
    """Public names of a package; a package of components without ``__all__`` shows the classes that it defines."""
    listed = getattr(package, "__all__", None)
    if listed is not None:
        return sorted(listed, key=str.lower)
    return [name for name, it in vars(package).items() if inspect.isclass(it) and it.__module__ == package.__name__]


def annotation(of: Any) -> str:
    """A type as the source has it."""
    return of if isinstance(of, str) else inspect.formatannotation(of)


def _shown(default: object) -> str:
    """A default as the source has it; a function by its name."""
    if default is os.environ:
        return "os.environ"
    name = getattr(default, "__name__", "")
    return repr(default) if not inspect.isfunction(default) else "..." if name == "<lambda>" else name


def signature(name: str, of: Any, *, typed: bool = True) -> str:
    """Name and parameters of a function or of a class's constructor; with types, as many lines as it needs."""
    try:
        found = inspect.signature(of)
    except (TypeError, ValueError):
        return name
    parts, starred = [], False
    for parameter in found.parameters.values():
        if parameter.name == "self" or parameter.default is ...:  # a field that the keywords stand for
            continue
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        kind = f": {annotation(parameter.annotation)}" if typed and parameter.annotation is not parameter.empty else ""
        default = (
            f"{' = ' if kind else '='}{_shown(parameter.default)}" if parameter.default is not parameter.empty else ""
        )
        parts.append(f"{stars}{parameter.name}{kind}{default}")
    to = (
        ""
        if not typed or inspect.isclass(of) or found.return_annotation is found.empty
        else annotation(found.return_annotation)
    )
    line = f"{name}({', '.join(parts)})" + (f" -> {to}" if to else "")
    if typed and len(line) > 100:
        line = f"{name}(\n    " + ",\n    ".join(parts) + ",\n)" + (f" -> {to}" if to else "")
    return line


def prose(text: str) -> str:
    """Docstring markup as Markdown."""
    return re.sub(r"``(.*?)``", r"`\1`", text)


def paragraphs(lines: list[str]) -> Iterator[str]:
    """A docstring's lines as Markdown: sections become lists, examples become code."""
    while lines:
        heading = SECTION.match(lines[0])
        if heading is None:
            yield prose(lines.pop(0))
            continue
        lines.pop(0)
        body = []
        while lines and (not lines[0].strip() or lines[0].startswith(" ")):
            body.append(lines.pop(0))
        text = textwrap.dedent("\n".join(body)).strip()
        yield f"\n**{heading[1]}**\n"
        if heading[1].startswith("Example"):
            yield f"```pycon\n{text}\n```\n"
        elif re.match(r"[*\w, ]+: ", text):
            entries = re.sub(r"\n\s+", " ", text).splitlines()
            yield "\n".join(prose(re.sub(r"^([*\w]+): ", r"- `\1`: ", entry)) for entry in entries if entry) + "\n"
        else:
            yield prose(text) + "\n"


def description(of: Any) -> str:
    """The docstring of an object as Markdown."""
    return "\n".join(paragraphs((inspect.getdoc(of) or "").splitlines())).strip()


def methods(of: type) -> Iterator[tuple[str, str, Any]]:
    """Kind, name and function of the public methods and properties that a class of ours defines or inherits."""
    homes = [home for home in of.__mro__ if home.__module__.startswith("workbench")]
    for name in dict.fromkeys(name for home in homes for name in vars(home)):
        member = inspect.getattr_static(of, name)
        kind = "property" if isinstance(member, property) or type(member).__name__ == "cached_property" else "method"
        function = getattr(of, name, None) if kind == "method" else getattr(member, "fget", None) or member.func
        if name.startswith("_") or not (inspect.isroutine(function) and inspect.getdoc(function)):
            continue
        yield kind, name, function


def _call(name: str, function: Any) -> str:
    """A method's call, without the object that an attached function has as its first parameter."""
    call = signature(name, function, typed=False)
    return re.sub(r"\((trace|metrics|source)(, |(?=\)))", "(", call) if "." not in function.__qualname__ else call


def entry(name: str, of: Any) -> Iterator[str]:
    """A heading, the signature and the docstring; for a class also a line for each method."""
    yield from (f"### `{name}`", "")
    if of in (*CONFIGURATIONS, *RECORDS):
        text = prose((inspect.getdoc(of) or "").split("\n\n")[0])
        yield from (f"{text} Its fields are [in the reference](reference.md#{name.lower()}).", "")
    elif _is_large_record(of):
        yield from (f"```py\n{name}(...)\n```", "", description(of), "")
    elif callable(of):
        yield from (f"```py\n{signature(name, of)}\n```", "", description(of), "")
    else:
        is_plain = all(isinstance(part, int | str | float) for part in (of if isinstance(of, tuple) else (of,)))
        yield from (f"A constant: `{of!r}`." if is_plain else "A constant.", "")
    if not inspect.isclass(of):
        return
    rows = [
        (
            name if kind == "property" else _call(name, function),
            prose((inspect.getdoc(function) or "").split("\n\n")[0]),
        )
        for kind, name, function in methods(of)
    ]
    if rows:
        yield from ("| member | meaning |", "|---|---|")
        yield from (
            f"| `{name.replace('|', chr(92) + '|')}` | {' '.join(text.split()).replace('|', chr(92) + '|')} |"
            for name, text in rows
        )
        yield ""


def page() -> str:
    """The whole page."""
    lines, seen = [BEGINNING], set()
    for place in PACKAGES:
        package = operator.attrgetter(place.partition(".")[2])(workbench) if "." in place else workbench
        lines += [f"## `{place}`", "", prose((inspect.getdoc(package) or "").split("\n\n")[0]), ""]
        for name in names(package):
            of = getattr(package, name)
            if id(of) in seen or inspect.ismodule(of):
                continue
            seen.add(id(of))
            lines += entry(name, of)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def main() -> int:
    """Write the page or check it."""
    return write_or_check(__doc__.splitlines()[0], [(PAGE, page())], "the docstrings")


if __name__ == "__main__":
    raise SystemExit(main())
