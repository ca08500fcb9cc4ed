"""Write docs/api.md and docs/api/ from the docstrings: ``python scripts/make_api_page.py``. ``--check`` compares.

A public name is one that ``workbench`` or one of its public modules lists in ``__all__``. `GROUPS` says which page has
which names.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, ForwardRef, Literal, NamedTuple, get_args, get_origin

import msgspec
from generated_files import write_or_check
from make_reference import CONFIGURATIONS, RECORDS

import workbench
import workbench.viz
from workbench.base.named_fields import KEPT

DOCS = Path(__file__).parent.parent / "docs"
BEGINNING = """# Functions and classes by name

All public names with their docstrings, and the classes of what they return, written by `scripts/make_api_page.py`.
Each is imported from `workbench`. The fields of configurations and records are [on a page by themselves](reference.md).
"""


STANDS_FOR = {"ConfigFields": "EngineConfig", "ConfigChanges": "EngineConfig", "SamplingFields": "SamplingParams"}
"""Types of keywords, by the class whose fields they are."""

ABOUT_RESULTS = "Results of the functions and methods above: you read them, and make none."


class Group(NamedTuple):
    """A page.

    Attributes:
        file: Its name.
        title: Its heading.
        about: The sentence below the heading.
        names: The public names on it, in the order of use; a module stands for all of its names.
    """

    file: str
    title: str
    about: str
    names: str


GROUPS = (
    Group(
        "engine",
        "Engines",
        "Run a model, one step at a time.",
        "Engine EngineConfig SamplingParams load_model LoadedModel random_model backend_info SampledToken "
        "keyed_uniform verification",
    ),
    Group(
        "trace",
        "Traces",
        "Read a run: its steps, requests and latencies, and the answers to questions about them.",
        "Trace StepRecord Chunk RequestInfo TraceMeta Keyframe compare Comparison slowest misses_table narrate "
        "prefills service jain_index Fleet TraceFollower TraceWriter TraceError",
    ),
    Group(
        "simulation",
        "Simulation and prediction",
        "Run the scheduler without a model, and predict another setting.",
        "simulate simulate_at_scale CostModel Predictor read_access_log read_generated",
    ),
    Group(
        "fleet",
        "Fleets",
        "Several replicas behind a router.",
        "simulate_fleet simulate_fleet_at_scale Demand Router Change",
    ),
    Group(
        "policies",
        "Policies",
        "Decide the order of requests, the size of chunks, the victim of a preemption and the block that is evicted.",
        "SchedulingPolicy DecodeFirst ShortestRemainingFirst Deadline WeightedFairQueueing VirtualTokenCounter Victim "
        "Eviction SlidingWindow",
    ),
    Group(
        "laws",
        "Laws, hunts and certificates",
        "Find faults of a scheduler, and tell how much of a simulator's schedules equals vLLM's.",
        "hunt Finding Plan PlannedChunk certify Certificate Checker Limits SchedulerState Broken LAWS RULES",
    ),
    Group(
        "attention",
        "Attention",
        "The paged varlen kernel, its work list, and the probe that compares it with a plain reference.",
        "paged_varlen_attention build_work_list AttentionOptions AttentionMetadata AttentionBackend PagedVarlenKernels "
        "metal_source Probe probe_batch float64_attention relative_error ERROR_LIMIT WHOLE WORK_ITEM_COLUMNS",
    ),
    Group("machines", "Several machines", "Engines in lockstep.", "LockstepEngine join_group leader_host open_link"),
    Group("views", "Views", "Views for notebooks, Panel and a server.", "viz panes"),
    Group("msl", "Metal on a CPU", "`workbench.msl` runs Metal Shading Language on any CPU, with checks.", "msl"),
    Group("course", "The course", "`workbench.course`: the checkers and pictures of the notebooks.", "course"),
)
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes|Example|Examples):$")


def _is_large_record(of: Any) -> bool:
    """Whether a class has many fields and is read rather than made: its fields are attributes, not arguments."""
    is_record = inspect.isclass(of) and dataclasses.is_dataclass(of) and "Args:" not in (of.__doc__ or "")
    return is_record and len(dataclasses.fields(of)) > 6


def names(package: Any) -> list[str]:
    """Public names of a package."""
    return sorted(package.__all__, key=str.lower)


def annotation(of: Any) -> str:
    """A type as the source has it."""
    if isinstance(of, ForwardRef):  # of a field of a named tuple
        return of.__forward_arg__
    return of if isinstance(of, str) else inspect.formatannotation(of)


def _shown(default: object) -> str:
    """A default as the source has it; a function by its name."""
    if default is os.environ:
        return "os.environ"
    if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
        return "..."
    name = getattr(default, "__name__", "")
    return repr(default) if not inspect.isfunction(default) else "..." if name == "<lambda>" else name


def signature(name: str, of: Any, *, typed: bool = True, bound: bool = False) -> str:
    """Name and parameters of a function or of a class's constructor; with types, as many lines as it needs.

    Args:
        name: The name.
        of: The function or class.
        typed: Show types.
        bound: It is a method: its first parameter is the object.
    """
    try:
        found = inspect.signature(of)
    except (TypeError, ValueError):
        return name
    parts, starred = [], False
    first = 1 if bound and not is_static(of) else 0
    for parameter in list(found.parameters.values())[first:]:
        if parameter.default is KEPT:  # a field that the keywords stand for
            continue
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        kind = f": {annotation(parameter.annotation)}" if typed and parameter.annotation is not parameter.empty else ""
        kind = with_choices(kind, of.__module__)
        default = (
            f"{' = ' if kind else '='}{_shown(parameter.default)}" if parameter.default is not parameter.empty else ""
        )
        parts.append(f"{stars}{parameter.name}{kind}{default}")
    to = (
        ""
        if not typed or inspect.isclass(of) or found.return_annotation is found.empty
        else with_choices(annotation(found.return_annotation), of.__module__)
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


def description(of: Any, *, bound: bool = False) -> str:
    """The docstring of an object as Markdown.

    Args:
        of: The object.
        bound: It is a method: what its docstring says of a first parameter, the object, is left out, as in `signature`.
    """
    text = f"{inspect.getdoc(of) or ''}\n"
    if bound and not is_static(of):
        first = next(iter(inspect.signature(of).parameters), "")
        text = re.sub(rf"(?m)(^Args:\n(?: .*\n)*?)    {first}: .*\n(?:     .*\n)*", r"\1", text)
        text = re.sub(r"(?m)^Args:\n(?! )\n?", "", text)
    return "\n".join(paragraphs(text.splitlines())).strip()


def is_static(method: Any) -> bool:
    """Whether the first parameter of a method is not the object."""
    return inspect.ismethod(method) or isinstance(method, staticmethod)


def parent(of: type) -> type | None:
    """The public class whose members a class has, too."""
    listed = [getattr(workbench, name) for name in workbench.__all__]
    return next((home for home in of.__mro__[1:] if home in listed), None)


def methods(of: type) -> Iterator[tuple[str, str, Any]]:
    """Kind, name and function of the public methods and properties that a class of ours defines or inherits.

    Those of a public class are with that class, unless the class has its own.
    """
    above = of.__mro__[of.__mro__.index(parent(of) or object) :]
    homes = [home for home in of.__mro__ if home.__module__.startswith("workbench") and home not in above]
    for name in dict.fromkeys(name for home in homes for name in vars(home)):
        member = inspect.getattr_static(of, name)
        kind = "property" if isinstance(member, property) or type(member).__name__ == "cached_property" else "method"
        function = getattr(of, name, None) if kind == "method" else getattr(member, "fget", None) or member.func
        if name.startswith("_") or not (inspect.isroutine(function) and inspect.getdoc(function)):
            continue
        yield kind, name, function


def has_more(function: Any) -> bool:
    """Whether a docstring says more than its first paragraph."""
    return "\n\n" in (inspect.getdoc(function) or "")


def table_row(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


def first_paragraph(of: Any) -> str:
    """The beginning of a docstring."""
    return prose((inspect.getdoc(of) or "").split("\n\n")[0])


def anchor(name: str) -> str:
    """The anchor of the heading of a name."""
    return name.lower().replace(".", "")


def place_of(name: str) -> str:
    """The page and the anchor of a public name."""
    return next(f"{group.file}.md#{anchor(name)}" for group in GROUPS if name in group.names.split())


class Places(NamedTuple):
    """Addresses of the classes of all pages, seen from one of them.

    Attributes:
        file: The page's name.
        by_id: Page and anchor by the id of a class.
    """

    file: str
    by_id: dict[int, str]

    def types(self, call: str, home: str) -> Iterator[str]:
        """A line with links to the types of a signature; ``scripts/docs_hooks.py`` puts them into the signature."""
        links = {}
        for name, of in named_classes(call, home):
            if place := self.by_id.get(id(of)):
                links[name] = f"[`{name}`]({place.removeprefix(f'{self.file}.md')})"
        for name, stands_for in STANDS_FOR.items():
            if re.search(rf"\b{name}\b", call):
                links[name] = f"[`{name}`]({place_of(stands_for).removeprefix(f'{self.file}.md')})"
        if links:
            yield f"Types: {', '.join(links[name] for name in sorted(links))}\n"


def members(name: str, of: type, places: Places) -> Iterator[str]:
    """A table of a class's members; those whose docstring says more have a section each below it."""
    found = list(methods(of))
    if found:
        yield from ("| member | meaning |", "|---|---|")
    for kind, member, function in found:
        call = member if kind == "property" else signature(member, function, typed=False, bound=True)
        link = f"[`{call}`](#{anchor(name)}{member})" if has_more(function) else f"`{call}`"
        yield table_row(link, first_paragraph(function))
    yield ""
    for kind, member, function in found:
        if has_more(function):
            yield from (f"### `{name}.{member}`", "")
            if kind == "method":
                call = signature(member, function, bound=True)
                yield f"```py\n{call}\n```\n"
                yield from places.types(call, function.__module__)
            yield from (description(function, bound=kind == "method"), "")


def entry(name: str, of: Any, places: Places) -> Iterator[str]:
    """A heading, the signature and the docstring; for a class also its members."""
    yield from (f"## `{name}`", "")
    if of in (*CONFIGURATIONS, *RECORDS):
        yield from (f"{first_paragraph(of)} Its fields are [in the reference](../reference.md#{anchor(name)}).", "")
    elif _is_large_record(of):
        yield from (f"```py\n{name}(...)\n```", "", description(of), "")
    elif callable(of):
        call = signature(name, of)
        types = places.types(call.removeprefix(name), of.__module__)
        yield from (f"```py\n{call}\n```", "", *types, description(of), "")
    else:
        is_plain = all(isinstance(part, int | str | float) for part in (of if isinstance(of, tuple) else (of,)))
        yield from (f"A constant: `{of!r}`." if is_plain else "A constant.", "")
    if inspect.isclass(of):
        if (above := parent(of)) is not None:
            yield from (f"It also has the members of [`{above.__name__}`]({place_of(above.__name__)}).", "")
        yield from members(name, of, places)


@cache
def imports_of(home: str) -> dict[str, tuple[str, str]]:
    """Module and name of what a module imports, for type checkers alone too, by the name that it has there."""
    tree = ast.parse(inspect.getsource(importlib.import_module(home)))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: (node.module or "", alias.name) for node in imports for alias in node.names}


def named(text: str, home: str) -> Iterator[tuple[str, Any]]:
    """The names of a text of a module that begin with a capital, with what they name there."""
    module = importlib.import_module(home)
    for name in re.findall(r"\b[A-Z]\w+", text):
        of = vars(module).get(name)
        if of is None and name in imports_of(home):
            place, there = imports_of(home)[name]
            of = getattr(importlib.import_module(place), there, None)
        yield name, of


def with_choices(text: str, home: str) -> str:
    """A type of a module with the values in place of a name for them: ``Literal["auto", "cpu"]`` for ``Device``."""
    for name, of in named(text, home):
        if get_origin(of) is Literal and name != "Literal":
            values = ", ".join(map(repr, get_args(of)))
            if len(values) > 80:
                values = f"\n{textwrap.indent(textwrap.fill(values, 90), ' ' * 8)},\n    "
            text = re.sub(rf"\b{name}\b", f"Literal[{values}]", text)
    return text


def named_classes(text: str, home: str) -> Iterator[tuple[str, type]]:
    """The classes of the package that a text of a module names, with the names."""
    for name, of in named(text, home):
        if inspect.isclass(of) and of.__module__.startswith("workbench") and not issubclass(of, BaseException):
            yield name, of


def classes_in(text: str, home: str) -> Iterator[type]:
    """The classes of the package that a type of a module names."""
    for _, of in named_classes(text, home):
        yield of


def returned_by(of: Any) -> Iterator[type]:
    """The classes that a function, or the methods of a class, return."""
    for function in (
        [function for _, _, function in methods(of)] if inspect.isclass(of) else [of] if callable(of) else []
    ):
        to = inspect.signature(function).return_annotation
        if to is not inspect.Signature.empty:
            yield from classes_in(annotation(to), function.__module__)


def held_by(of: type) -> Iterator[type]:
    """The classes of the fields of a record."""
    if dataclasses.is_dataclass(of) or issubclass(of, tuple | msgspec.Struct):
        for home in of.__mro__:
            if home.__module__.startswith("workbench"):
                for field in inspect.get_annotations(home).values():
                    yield from classes_in(annotation(field), home.__module__)


def public(name: str) -> Iterator[tuple[str, Any]]:
    """A public name with its object, or all names of a public module."""
    of = getattr(workbench, name)
    if not inspect.ismodule(of):
        yield name, of
        return
    for each in names(of):
        if not inspect.ismodule(getattr(of, each)):
            yield f"{name}.{each}", getattr(of, each)


def pages() -> dict[Path, str]:
    """Every page by its path: one for each group, and the list of all names."""
    groups = {group: [found for name in group.names.split() for found in public(name)] for group in GROUPS}
    missing = set(workbench.__all__) - {name for group in GROUPS for name in group.names.split()}
    if missing:
        raise SystemExit(f"scripts/make_api_page.py: no group has {', '.join(sorted(missing))}")
    seen = {id(of) for found in groups.values() for _, of in found} | {id(of) for of in RECORDS}
    results = {group: _results(found, seen) for group, found in groups.items()}
    by_id = {
        id(of): f"{group.file}.md#{anchor(name)}"
        for group, found in groups.items()
        for name, of in (*results[group].items(), *found)
        if inspect.isclass(of)
    }
    listing = [BEGINNING]
    written = {}
    for group, found in groups.items():
        places = Places(group.file, by_id)
        lines = [f"# {group.title}\n\n{group.about}\n"]
        listing += [f"## [{group.title}](api/{group.file}.md)\n\n{group.about}\n", "| name | meaning |", "|---|---|"]
        for name, of in found:
            lines += entry(name, of, places)
            about = first_paragraph(of) if callable(of) else "A constant."
            listing.append(table_row(f"[`{name}`](api/{group.file}.md#{anchor(name)})", about))
        if results[group]:
            lines.append(f"## Classes of results\n\n{ABOUT_RESULTS}\n")
            for name, of in sorted(results[group].items()):
                lines += [f"#{line}" if line.startswith("##") else line for line in entry(name, of, places)]
        listing.append("")
        written[DOCS / "api" / f"{group.file}.md"] = lines
    texts = {path: "\n".join(lines) for path, lines in written.items()} | {DOCS / "api.md": "\n".join(listing)}
    return {path: re.sub(r"\n{3,}", "\n\n", text).strip() + "\n" for path, text in texts.items()}


def _results(found: list[tuple[str, Any]], seen: set[int]) -> dict[str, type]:
    """The classes that the objects of a page return, by name, and what those hold; ``seen`` are on another page."""
    others = [of for _, each in found for of in returned_by(each)]
    results = {}
    while others:
        of = others.pop(0)
        if id(of) not in seen and not of.__name__.startswith("_"):
            seen.add(id(of))
            results[of.__name__] = of
            others += [*held_by(of), *(returned_by(of) if is_read(of) else ())]
    return results


def is_read(of: type) -> bool:
    """Whether a class is a result that people read, not a part of the engine."""
    return dataclasses.is_dataclass(of) or issubclass(of, tuple | msgspec.Struct)


def main() -> int:
    """Write the pages or check them."""
    return write_or_check(__doc__.splitlines()[0], pages().items(), "the docstrings")


if __name__ == "__main__":
    raise SystemExit(main())
