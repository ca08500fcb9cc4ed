"""A certificate that a simulator of vLLM's scheduler is faithful, feature by feature."""

from __future__ import annotations

import json
import random
import secrets
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from workbench.analysis.certify.features import FEATURES, Feature, draw
from workbench.analysis.certify.judgement import PARTS, Row
from workbench.analysis.certify.neutral import Unsupported, judge, read_schedule, steps_of
from workbench.analysis.certify.program import Program
from workbench.analysis.hunt.schedule import sentence
from workbench.base.field_checks import integer, number
from workbench.base.on_demand import find
from workbench.base.tables import table_lines, terminal_width
from workbench.base.text import counted, printable

__all__ = ["Certificate", "certify"]

MOST_REASONS = 3
"""Reasons of a feature that is not supported, the most frequent ones."""


@dataclass
class Certificate:
    """The result of a simulator.

    Attributes:
        program: Its name.
        rows: The result of each feature.
        seed: Chose the workloads.
    """

    program: str
    rows: list[Row]
    seed: int

    @property
    def certified(self) -> bool:
        """Every feature is."""
        return all(row.certified for row in self.rows)

    def __str__(self) -> str:
        heads = ["feature", "workloads", *PARTS, ""]
        lines = [heads, *(self._cells(row) for row in self.rows)]
        table = table_lines(lines, width=terminal_width(), title=(0, len(heads) - 1), left=range(len(heads)))
        firsts = []
        for row in self.rows:
            if row.first is not None:
                place = f"workload {row.first.workload['id']!r}, step {row.first.step}"
                firsts.append(f"{row.feature}: {place}: {row.first.message}")
            if row.problem:  # it ends the row, whatever was answered before
                firsts.append(f"{row.feature}: {row.problem}")
            for reason, count in Counter(row.unsupported).most_common(MOST_REASONS):
                firsts.append(f"{row.feature}: not supported: {reason} ({counted(count, 'workload')})")
        num_certified = sum(row.certified for row in self.rows)
        verdict = "certified" if self.certified else f"not certified: {num_certified} of {len(self.rows)} features are"
        if num_lacking := sum(row.verdict == "not supported" for row in self.rows):
            verdict += f", {num_lacking} not supported"
        return "\n".join([*table, *firsts, f"{self.program}: {verdict} (seed {self.seed})"])

    def _cells(self, row: Row) -> list[str]:
        count = f"{row.num_workloads} of {row.num_workloads + len(row.unsupported)}"
        return [row.feature, count, *(str(row.scores[part]) for part in PARTS), row.verdict]

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def facts(self) -> dict[str, Any]:
        """The fields of ``certificate.json``."""
        return {
            "program": self.program,
            "certified": self.certified,
            "seed": self.seed,
            "features": [
                {
                    "feature": row.feature,
                    "certified": row.certified,
                    "verdict": row.verdict,
                    "workloads": row.num_workloads,
                    **{part: [row.scores[part].equal, row.scores[part].of] for part in PARTS},
                    "unsupported": len(row.unsupported),
                    "reasons": dict(Counter(row.unsupported).most_common(MOST_REASONS)),
                    "problem": row.problem,
                    "first": None
                    if row.first is None
                    else {"workload": row.first.workload["id"], "step": row.first.step, "message": row.first.message},
                }
                for row in self.rows
            ],
        }


def certify(
    program: str | Callable[[dict[str, Any]], Any],
    *,
    workloads: int = 100,
    seed: int | None = None,
    features: Collection[str] | None = None,
    timeout: float = 60,
    out: Path | str | None = None,
) -> Certificate:
    """Compare a simulator's schedules with vLLM's, on workloads that are drawn now.

    The judge is Workbench's scheduler, which recorded runs of vLLM 0.33.0 check in turn.

    Args:
        program: "module:function", a function that takes a workload and returns its schedule, or a command line that
            answers each line of JSON with one (docs/certify.md).
        workloads: Number of workloads for each feature.
        seed: Chooses the workloads; None for others each time.
        features: Names of the features to look at; None for all.
        timeout: Seconds that a command may take for an answer.
        out: Folder that gets ``certificate.json`` and a page of the first difference of each feature; None to write
            nothing.

    Returns:
        The certificate; ``str()`` of it is a table.

    Raises:
        ValueError: There is no such program or feature.

    Example:
        >>> from workbench import certify
        >>> print(certify(lambda workload: {"steps": []}, workloads=1, seed=1, features=["priority"]).certified)
        False
    """
    integer("workloads", workloads, 1)
    number("timeout", timeout, 0, low_open=True)
    known = [feature.name for feature in FEATURES]
    if unknown := sorted(set(features or ()).difference(known)):
        raise ValueError(f"features names {unknown[0]!r}; the features are {', '.join(known)}")
    chosen = [feature for feature in FEATURES if features is None or feature.name in features]
    seed = secrets.randbits(31) if seed is None else integer("seed", seed, 0)
    asked, left = Program(program, timeout), ""
    made = Certificate(asked.name, [], seed)
    try:
        for feature in chosen:
            made.rows.append(_row(asked, feature, workloads, random.Random(f"{seed} {feature.name}")))
    finally:
        left = asked.close()
    for row in made.rows:  # no answer is known to be that of its workload
        row.problem = row.problem or left
    if out is not None:
        _write(Path(out), made)
    return made


def _row(program: Program, feature: Feature, count: int, rng: random.Random) -> Row:
    row = Row(feature.name)
    for workload, trace in draw(feature, count, rng):
        try:
            told = read_schedule(program.schedule(workload))
        except Unsupported as problem:
            row.unsupported.append(str(problem))
            continue
        except (Exception, SystemExit) as problem:
            kind = "" if isinstance(problem, ValueError) else f"{type(problem).__name__}: "
            row.problem = printable(f"{kind}{problem}")
            return row
        row.add(workload, steps_of(trace), told)
    return row


def _write(out: Path, certificate: Certificate) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "certificate.json").write_text(json.dumps(certificate.facts(), indent=1) + "\n", encoding="utf-8")
    (out / "certificate.txt").write_text(f"{certificate}\n", encoding="utf-8")
    for row in certificate.rows:
        if row.first is None:
            continue
        folder = out / row.feature.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        (folder / "workload.json").write_text(json.dumps(row.first.workload) + "\n", encoding="utf-8")
        (folder / "answer.json").write_text(json.dumps({"steps": row.first.steps}) + "\n", encoding="utf-8")
        trace = judge(row.first.workload)
        trace.save(folder / "expected.jsonl.gz")
        facts = {
            "title": f"{certificate.program}: {row.feature}",
            "message": row.first.message,
            "step": row.first.step,
            "expected": [printable(sentence(step)) for step in steps_of(trace)],
            "got": [printable(sentence(step)) for step in row.first.steps],
        }
        (folder / "page.html").write_text(find("Certificate.page")(trace, facts), encoding="utf-8")
