"""The files of a comparison: a folder for each difference, and a page for all of them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.analysis.hunt.between.differ import KINDS
from workbench.analysis.hunt.between.place import Line
from workbench.analysis.hunt.between.search import Apart, Comparison
from workbench.analysis.hunt.between.surface import Surface
from workbench.analysis.hunt.finding import workload_text
from workbench.analysis.hunt.schedule import sentence
from workbench.base.on_demand import find
from workbench.base.text import counted
from workbench.trace import Trace, TraceError

MOST_NAMES = 400
"""Names of each list of the static differences that the page tells."""


def write(out: Path, comparison: Comparison, surface: Surface | None) -> list[str]:
    """Write the folders of the differences, ``between.json`` and ``between.md``.

    Returns:
        The names of the folders.
    """
    out.mkdir(parents=True, exist_ok=True)
    names: list[str] = []
    for apart in comparison.found:
        words = re.sub(r"[^a-z0-9]+", "-", f"{apart.difference.kind} {apart.decided.place.rpartition(' ')[2]}".lower())
        name, number = words.strip("-")[:60], 2
        while name in names:
            name, number = f"{words.strip('-')[:60]}-{number}", number + 1
        names.append(name)
        _write_folder(out / name, comparison, apart)
    facts: dict[str, Any] = {
        "a": {"scheduler": comparison.a.place.spec, "version": comparison.a.version},
        "b": {"scheduler": comparison.b.place.spec, "version": comparison.b.version},
        "workloads": comparison.num_workloads,
        "different": comparison.num_different,
        "seconds": round(comparison.elapsed, 1),
        "seed": comparison.seed,
        "kinds": dict(comparison.kinds.most_common()),
        "settings_of_one_side": comparison.dropped,
        "findings": names,
        "surface": None if surface is None else vars(surface),
    }
    (out / "between.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (out / "between.md").write_text(page(comparison, names, surface), encoding="utf-8")
    return names


def _write_folder(folder: Path, comparison: Comparison, apart: Apart) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = apart.difference
    facts = {
        "kind": found.kind,
        "means": KINDS[found.kind],
        "message": found.message,
        "step": found.step,
        "request_id": found.request_id,
        "place": apart.decided.place,
        "by_trial": apart.decided.by_trial,
        "lines_a": [line._asdict() for line in apart.decided.lines_a],
        "lines_b": [line._asdict() for line in apart.decided.lines_b],
        "a": f"{comparison.a.place.spec} {comparison.a.version}".strip(),
        "b": f"{comparison.b.place.spec} {comparison.b.version}".strip(),
        "needs": sorted(apart.needs),
        "config": apart.workload["config"],
        "num_requests": len(apart.workload["requests"]),
        "num_seen": apart.num_seen,
        "num_workloads": apart.num_workloads,
        "seconds": apart.seconds,
        "leads_to": dict(apart.leads_to.most_common()),
    }
    (folder / "finding.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (folder / "workload.json").write_text(workload_text(apart.workload), encoding="utf-8")
    (folder / "report.md").write_text("\n".join(_section(apart, comparison)) + "\n", encoding="utf-8")
    traces: list[Trace] = []
    steps: list[list[str]] = []
    for name, side in (("a", comparison.a), ("b", comparison.b)):
        path = folder / f"{name}.jsonl.gz"
        steps.append([sentence(step) for step in side.ask({"workload": apart.workload})["steps"]])
        if "problem" not in side.ask({"record": apart.workload, "path": str(path.resolve())}):
            with contextlib.suppress(TraceError):  # a schedule may be impossible: that may be the difference
                traces.append(Trace.load(path))
    (folder / "page.html").write_text(find("Apart.page")(traces, facts, steps), encoding="utf-8")


def page(comparison: Comparison, names: Sequence[str], surface: Surface | None) -> str:
    """The page of a comparison, in Markdown."""
    a, b = (f"{side.place.spec} {side.version}".strip() for side in (comparison.a, comparison.b))
    found = comparison.found
    share = comparison.num_different / max(1, comparison.num_workloads)
    lines = [f"# {a} and {b} in behaviour", "", f"A is {a}, B is {b}.", ""]
    lines += [
        f"{counted(comparison.num_workloads, 'workload')}, seed {comparison.seed}: {comparison.num_different} differ "
        f"({share:.1%}), {counted(len(found), 'distinct difference')}.",
        "",
    ]
    for spec, dropped in comparison.dropped.items():
        lines += [f"{spec} does not have {', '.join(dropped)}: no workload sets them.", ""]
    if found:
        lines += ["| kind | needs | seen in | decided in | |", "|---|---|---|---|---|"]
    for each, name in zip(found, names):
        times = f"1 in {max(1, round(comparison.num_workloads / each.num_seen))}"
        needs = ", ".join(sorted(each.needs)) or "nothing"
        lines.append(
            f"| {each.difference.kind} | {needs} | {times} | {each.decided.place} | [{name}]({name}/report.md) |"
        )
    for each, name in zip(found, names):
        lines += ["", f"## {name}", "", *_section(each, comparison)]
    if surface is not None:
        lines += _static(surface)
    return "\n".join(lines) + "\n"


def _section(apart: Apart, comparison: Comparison) -> list[str]:
    found, decided = apart.difference, apart.decided
    needs = ", ".join(sorted(apart.needs)) or "no feature"
    how = "with these lines of A, B decides as A" if decided.by_trial else "these lines ran on one side only"
    lines = [
        f"**{found.kind}**: {KINDS[found.kind]}. Step {found.step}: {found.message}.",
        "",
        f"Seen in {apart.num_seen} of {counted(comparison.num_workloads, 'workload')}, first after "
        f"{counted(apart.num_workloads, 'workload')} ({apart.seconds} s); the smallest case has "
        f"{counted(len(apart.workload['requests']), 'request')} and needs {needs}.",
        "",
        *_consequences(apart),
        f"The lines that decide ({how}):",
        "",
        "```diff",
        *_diff(decided.lines_a, "-"),
        *_diff(decided.lines_b, "+"),
        "```",
        "",
        "```json",
        workload_text(apart.workload).strip(),
        "```",
    ]
    return lines


def _consequences(apart: Apart) -> list[str]:
    """The consequences of a difference of blocks alone."""
    if not apart.leads_to:
        return []
    told = ", ".join(f"{kind} ({number})" for kind, number in apart.leads_to.most_common())
    return [f"Only blocks differ at first. The next differences, and the workloads that had them: {told}.", ""]


def _diff(lines: Sequence[Line], sign: str) -> list[str]:
    shown = []
    for place in dict.fromkeys((line.file, line.function) for line in lines):
        shown.append(f"@@ {'A' if sign == '-' else 'B'} {place[0]} {place[1]} @@")
        shown += [f"{sign} {line.number:5} {line.text}" for line in lines if (line.file, line.function) == place]
    return shown


def _static(surface: Surface) -> list[str]:
    lines = ["", "## Differences that no run shows", ""]
    if surface.hooks:
        lines += ["Overridden by the class under test, and different in B: " + ", ".join(surface.hooks) + ".", ""]
    for title, names in (("Only in A", surface.removed), ("Only in B", surface.added)):
        if names:
            lines += [f"### {title}", ""]
            lines += [f"- `{name}`: `{what}`" for name, what in list(names.items())[:MOST_NAMES]]
            lines.append("")
    for title, pairs in (("Moved", surface.moved), ("Changed", surface.changed)):
        if pairs:
            lines += [f"### {title}", ""]
            lines += [f"- `{name}`: `{one}` -> `{other}`" for name, (one, other) in list(pairs.items())[:MOST_NAMES]]
            lines.append("")
    return lines
