"""The search for workloads whose schedules differ, and the smallest of each kind and place."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.analysis.hunt.between.differ import Difference, consequence, difference
from workbench.analysis.hunt.between.place import MOST_LINES, Decided, Line, Source, decided
from workbench.analysis.hunt.between.sides import Asked
from workbench.analysis.hunt.search import Limited, shape
from workbench.analysis.hunt.shrink import shrink
from workbench.analysis.hunt.workloads import FEATURES, PAGES, WORKLOAD_BYTES, make_workload

BATCH = 50
"""Workloads that the two sides are asked for at once."""

SHRINK_SECONDS = 6.0
"""Seconds in which a case is made smaller."""

TRIAL_SECONDS = 20.0
"""Seconds in which texts of functions are tried; what is found until then is told."""


@dataclass
class Apart:
    """A difference of two schedulers with its smallest case.

    Attributes:
        difference: The first difference of the two schedules.
        workload: The smallest workload that shows it.
        decided: The lines of the two sources that decide it.
        num_seen: Number of workloads in which a difference of this kind with the same needs was seen.
        num_workloads: Workloads until it was first seen.
        seconds: Seconds until then.
        leads_to: Consequences of a difference of blocks alone: {kind: number of workloads}.
    """

    difference: Difference
    workload: dict[str, Any]
    decided: Decided
    num_seen: int
    num_workloads: int
    seconds: float
    leads_to: Counter[str] = field(default_factory=Counter)

    @property
    def needs(self) -> frozenset[str]:
        """The features of the smallest case."""
        return shape(self.workload)


@dataclass
class Comparison(Limited):
    """Two schedulers under the same workloads.

    Args:
        a: The first one.
        b: The second one.
        seconds: Time limit; None for none.
        workloads: Largest number of workloads; None for no limit.
        seed: Chooses the workloads.
        tell: Called with this object now and then.

    Attributes:
        found: The distinct differences.
        kinds: Number of workloads that differ first in each kind.
        dropped: Settings that one side does not have, which no workload sets.
    """

    a: Asked
    b: Asked
    seconds: float | None = None
    workloads: int | None = None
    seed: int = 0
    tell: Callable[[Comparison], None] = lambda comparison: None
    found: list[Apart] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    dropped: dict[str, list[str]] = field(default_factory=dict)
    num_workloads: int = 0
    num_different: int = 0

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self._sources = Source(self.a.roots), Source(self.b.roots)
        self.features = [name for name in FEATURES if name in self.a.features and name in self.b.features]
        self.features += [PAGES] if PAGES in {*self.a.features, *self.b.features} else []
        self._asks: dict[str, bool] = {}

    def run(self) -> list[Apart]:
        """Compare until it is over."""
        self._learn_what_is_lacking()
        drawn = random.Random(self.seed)
        while not self.over:
            count = BATCH if self.workloads is None else min(BATCH, self.workloads - self.num_workloads)
            self._batch([drawn.randbytes(WORKLOAD_BYTES).hex() for _ in range(count)])
            self.tell(self)
        self._merge()
        return self.found

    def _learn_what_is_lacking(self) -> None:
        values: dict[str, Any] = {"watermark": 0.1, "scheduler_reserve_full_isl": False, "max_num_active_seqs": 1}
        values |= {"long_prefill_token_threshold": 4, "long_prefill_token_threshold_adaptive": True}
        values |= {"max_num_scheduled_tokens": 4, "max_num_batched_tokens": 8, "max_num_seqs": 4}
        config = {**values, "num_blocks": 20, "block_size": 4, "max_model_len": 64}
        request = {"id": "r", "prompt": {"len": 1}, "max_tokens": 1}
        tells_cache = True
        for side in (self.a, self.b):
            told = side.ask({"workload": {"config": config, "requests": [request]}, "cache": True})
            if told["dropped"]:
                self.dropped[side.place.spec] = told["dropped"]
            tells_cache &= "cached" in (told["steps"] or [()])[0]
        self._asks = {"cache": tells_cache}

    @property
    def _without(self) -> list[str]:
        return sorted({name for names in self.dropped.values() for name in names})

    def _batch(self, choices: Sequence[str]) -> None:
        asked = {"choices": choices, "features": self.features, "without": self._without, **self._asks}
        self.a.send(asked)
        self.b.send(asked)
        for each, one, other in zip(choices, self.a.read(), self.b.read()):
            self.num_workloads += 1
            if one != other:
                self._examine(each)

    def _examine(self, choices: str) -> None:
        workload = make_workload(bytes.fromhex(choices), self.features)
        for name in self._without:
            workload["config"].pop(name, None)
        told = self._schedules(workload)
        found = difference(*told, workload["config"])
        if found is None:
            return  # the end of a run that one side gives up in another place
        self.num_different += 1
        self.kinds[found.kind] += 1
        if (same := self._explained(found.kind, shape(workload))) is not None:
            same.num_seen += 1
        else:
            seen = (self.num_workloads, round(self.elapsed, 1))
            same = self._smallest(workload, found.kind, seen)
            self.found.append(same)
        if next_kind := consequence(*told, workload["config"]):
            same.leads_to[next_kind] += 1

    def _explained(self, kind: str, has: frozenset[str]) -> Apart | None:
        same = (each for each in self.found if each.difference.kind == kind)
        return next((each for each in same if each.needs <= has), None)

    def differs(self, workload: dict[str, Any]) -> Difference | None:
        """The first difference of the two schedules of a workload."""
        return difference(*self._schedules(workload), workload["config"])

    def _schedules(self, workload: dict[str, Any], *, follow: bool = False) -> tuple[Any, Any]:
        asked = {"workload": workload, **self._asks, **({"follow": True} if follow else {})}
        self.a.send(asked)
        self.b.send(asked)
        return self.a.read(), self.b.read()

    def _smallest(self, workload: dict[str, Any], kind: str, seen: tuple[int, float]) -> Apart:
        def still(smaller: dict[str, Any]) -> bool:
            found = self.differs(smaller)
            return found is not None and found.kind == kind

        smallest = shrink(workload, still, clock=time.monotonic, seconds=SHRINK_SECONDS)
        told = self._schedules(smallest, follow=True)
        found = difference(*told, smallest["config"])
        assert found is not None
        return Apart(found, smallest, self._decided(smallest, found, told), 1, *seen)

    def _decided(self, workload: dict[str, Any], found: Difference, told: tuple[Any, Any]) -> Decided:
        until = time.monotonic() + TRIAL_SECONDS

        def is_gone(grafts: Sequence[Mapping[str, str]]) -> bool:
            if time.monotonic() > until:
                return False
            made = self.b.ask({"workload": workload, "grafts": grafts, **self._asks})
            if "problem" in made:
                return False
            left = difference(told[0], made, workload["config"])
            return left is None or left.step > found.step

        made = decided(self._sources, (told[0]["ran"], told[1]["ran"]), found.step, is_gone)
        if made.by_trial or found.kind != "crash":
            return made
        last = [self._last_line(source, side) for source, side in zip(self._sources, told)]
        return Decided([*last[0], *made.lines_a][:MOST_LINES], [*last[1], *made.lines_b][:MOST_LINES])

    @staticmethod
    def _last_line(source: Source, told: Mapping[str, Any]) -> list[Line]:
        """The line that ended a run in an exception."""
        text = told["end"].partition("crash: ")[2].partition(": ")[2]  # behind the name of the file
        lines = [
            Line(file, function, number, text)
            for step in told["ran"]
            for file, function, number in step
            if text and source.lines(file)[number - 1].strip() == text
        ]
        return lines[-1:]

    def _merge(self) -> None:
        """Leave of each kind and place the smallest case."""
        merged: dict[tuple[str, ...], Apart] = {}
        for each in sorted(self.found, key=lambda one: (len(one.needs), len(one.workload["requests"]))):
            first = merged.setdefault(
                (each.difference.kind, str(each.decided.place), *map(str, each.decided.lines_b)), each
            )
            if first is not each:
                first.num_seen += each.num_seen
                first.leads_to += each.leads_to
                first.num_workloads, first.seconds = min(
                    (first.num_workloads, first.seconds), (each.num_workloads, each.seconds)
                )
        self.found = sorted(merged.values(), key=lambda one: -one.num_seen)
