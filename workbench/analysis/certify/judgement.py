"""The share of a simulator's schedules that equals the judge's, and the first difference of each feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.analysis.certify.neutral import ASPECTS
from workbench.analysis.hunt.schedule import said
from workbench.base.text import printable, shortened

PARTS = ("steps", *ASPECTS)


@dataclass
class Score:
    """Equal ones of all; of nothing, all are equal."""

    equal: int = 0
    of: int = 0

    def __str__(self) -> str:
        if not self.of:
            return "-"
        text = f"{self.equal / self.of:.1%}"
        return text if self.equal == self.of or text != "100.0%" else ">99.9%"


@dataclass
class First:
    """The first difference in a feature.

    Attributes:
        workload: The neutral workload.
        step: Index of the step.
        aspect: Of ASPECTS, or "length" for another number of steps.
        message: The two sides.
        steps: The program's steps.
    """

    workload: dict[str, Any]
    step: int
    aspect: str
    message: str
    steps: list[dict[str, Any]]


@dataclass
class Row:
    """The result of a feature.

    Attributes:
        feature: Its name.
        scores: Equal steps, chunks, hits, preemptions, ends and block tables.
        num_workloads: Number of workloads that were answered.
        first: The first difference; None if there is none.
        problem: The fault of an answer; "" if there is none.
        unsupported: The reasons of the workloads that the program does not support.
    """

    feature: str
    scores: dict[str, Score] = field(default_factory=lambda: {name: Score() for name in PARTS})
    num_workloads: int = 0
    first: First | None = None
    problem: str = ""
    unsupported: list[str] = field(default_factory=list)

    @property
    def certified(self) -> bool:
        """At least half of the workloads are answered, and each schedule equals the judge's, as far as it is told."""
        is_answered = self.num_workloads > 0 and self.num_workloads >= len(self.unsupported)
        return is_answered and self.first is None and not self.problem

    @property
    def verdict(self) -> str:
        """The last column of the table."""
        if self.certified:
            return "equal"
        if self.first is not None:
            return "differs"
        return "not supported" if self.unsupported and not self.problem else "no answer"

    def add(self, workload: dict[str, Any], truth: Sequence[Mapping[str, Any]], told: list[dict[str, Any]]) -> None:
        """Compare the schedules of a workload. Empty steps behind its end make a difference, and no share."""
        self.num_workloads += 1
        last = max((index + 1 for index, step in enumerate(told) if step["chunks"]), default=0)
        aspects = [name for name in ASPECTS if any(name in step for step in told)] or ["chunks"]
        for index in range(max(len(truth), len(told))):
            right = truth[index] if index < len(truth) else {}
            given = told[index] if index < len(told) else {}
            differs = [name for name in aspects if not self._equal(name, right, given)]
            if index < max(len(truth), last):
                self.scores["steps"].of += 1
                self.scores["steps"].equal += not differs
            if self.first is None and (differs or not (right and given)):
                name = differs[0] if differs else "length"
                aspect = differs[0] if differs else "chunks"
                message = f"expected {_words(right, aspect)}, got {_words(given, aspect)}"
                self.first = First(workload, index, name, message, told)

    def _equal(self, name: str, right: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
        one, other = _comparable(name, right), _comparable(name, given)
        if name in ("hits", "blocks"):
            parts = [(one.get(key), other.get(key)) for key in {**one, **other}]
        elif name == "chunks":
            here, there = ({chunk[0]: chunk for chunk in side} for side in (one, other))
            parts = [(here.get(key), there.get(key)) for key in {**here, **there}]
        else:
            parts = [(one, other)] if one or other else []
        self.scores[name].of += len(parts)
        self.scores[name].equal += sum(a == b for a, b in parts)
        return bool(one == other)


def _words(step: Mapping[str, Any], name: str) -> str:
    return shortened(printable(said(step, name)))


def _comparable(name: str, step: Mapping[str, Any]) -> Any:
    value = step.get(name)
    if name == "chunks":
        return [(c["id"], c["start"], c["num_tokens"], c.get("num_drafts", 0)) for c in value or ()]
    if name == "finished":
        return sorted(value or ())
    return (value or {}) if name in ("hits", "blocks") else list(value or ())
