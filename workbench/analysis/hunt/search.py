"""The search: Hypothesis draws workloads and shrinks those that break a law, and its database remembers them.

A fault is known by its law, its place, and its shape: the features that its smallest case needs. A run that breaks a
known law at a known place with at least these features counts as the same fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.analysis.hunt.meetings import Corpus, Meetings
from workbench.analysis.hunt.progress import UNSERVABLE, obstacle
from workbench.analysis.hunt.shrink import shrink
from workbench.analysis.hunt.target import ALL_FREE, Fault, Refused, Tally, Target
from workbench.analysis.hunt.workloads import WORKLOAD_BYTES, make_workload

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase

BATCH = 250
"""Workloads that are drawn before findings are written and known."""

CHANGED_TO_RANDOM = 2
"""One batch of this many has random workloads; the others change those with rare meetings."""

SHRINK_SECONDS = 0.5
"""Processor time in which Hypothesis shrinks a case; afterwards the smallest one so far is taken."""


_KEY = b"workloads"
"""Key of the remembered cases in the database."""


@dataclass
class Found:
    """A distinct fault with its smallest case.

    Attributes:
        fault: The broken law.
        workload: The smallest workload that breaks it.
        num_workloads: Workloads until it was first seen.
        seconds: Seconds until then.
        num_seen: Number of workloads in which it was seen, those of shrinking left out.
    """

    fault: Fault
    workload: dict[str, Any]
    num_workloads: int
    seconds: float
    num_seen: int = 1

    @property
    def needs(self) -> frozenset[str]:
        """The features without which the fault was not found."""
        return frozenset() if self.fault.place == UNSERVABLE else shape(self.workload)


class _Interesting(Exception):
    """A workload that breaks a law."""

    def __init__(self, fault: Fault, workload: dict[str, Any]) -> None:
        super().__init__(fault.message)
        self.fault, self.workload = fault, workload


class Limited:
    """Something that runs workloads until the time or their number is used up."""

    started: float
    seconds: float | None
    workloads: int | None
    num_workloads: int

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def over(self) -> bool:
        """The time or the workloads are used up."""
        if self.seconds is not None and self.elapsed >= self.seconds:
            return True
        return self.workloads is not None and self.num_workloads >= self.workloads


@dataclass
class Search(Limited):
    """A hunt in one process.

    Args:
        target: The scheduler under test.
        seconds: Time limit; None for none.
        workloads: Largest number of workloads; None for no limit.
        seed: Chooses the workloads.
        laws: Names of the laws to check; None for all.
        database: Folder of cases that are tried first; None for none.
        tell: Called with this object now and then, and with each finding.
        guided: Count meetings of events. It found known faults no sooner (docs/hunt.md), so a hunt is not.
        changes: If it is guided, change workloads with rare meetings.

    Attributes:
        meetings: The meetings of events so far.
        pairs: Pairs of features that a workload had.
        tally: The processor time and its parts, and the settings that the scheduler under test does not have.
    """

    target: Target
    seconds: float | None = None
    workloads: int | None = None
    seed: int | str = 0
    laws: Collection[str] | None = None
    database: Path | None = None
    tell: Callable[[Search, Found | None], None] = lambda search, found: None
    guided: bool = False
    changes: bool = True
    found: list[Found] = field(default_factory=list)
    num_workloads: int = 0
    num_refused: int = 0
    pairs: set[tuple[str, str]] = field(default_factory=set)
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.started, self._began = time.monotonic(), time.process_time()
        self._first_seen = (0, 0.0)
        self._shrinking: tuple[str, str] | None = None
        self._shrinks_until = 0.0
        self._tried: dict[bytes, _Interesting | None] = {}
        self.meetings, self._corpus = Meetings(), Corpus(self.seed)

    def run(self) -> list[Found]:
        """Search until it is over, after the cases that the database remembers."""
        self._retry()
        batch = 0
        while not self.over:
            drawn = (
                self._changed_batch
                if self.guided and self.changes and batch % CHANGED_TO_RANDOM and self._corpus
                else self._batch
            )
            if (problem := drawn(batch)) is not None:
                self._note(problem)
            self.tally.whole = time.process_time() - self._began
            self.tell(self, None)
            batch += 1
        return self.found

    def _retry(self) -> None:
        """Try the remembered cases, and forget those without a fault. Hypothesis itself keeps none of a seeded run."""
        if (kept := self._kept_cases()) is None:
            return
        for choices in sorted(kept.fetch(_KEY)):
            if (problem := self._try(make_workload(choices, self.target.features))) is not None:
                self._note(problem)
            else:
                kept.delete(_KEY, choices)

    def _kept_cases(self) -> ExampleDatabase | None:
        from hypothesis.database import DirectoryBasedExampleDatabase

        return DirectoryBasedExampleDatabase(self.database) if self.database else None

    def _batch(self, batch: int) -> _Interesting | None:
        """Draw workloads until one breaks a law that is not known, and shrink it."""
        from hypothesis import HealthCheck, Phase, given, seed, settings
        from hypothesis import strategies as st

        # One draw: Hypothesis takes half of the time that it takes for a draw per request.
        choices = st.binary(min_size=WORKLOAD_BYTES, max_size=WORKLOAD_BYTES)
        left = BATCH if self.workloads is None else min(BATCH, self.workloads - self.num_workloads)
        limits = settings(
            max_examples=left,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
            print_blob=False,
        )
        examined = given(choices)(self._examine)
        self._shrinking, self._tried, self._shrinks_until = None, {}, 0.0
        try:
            seed(f"{self.seed}:{batch}")(limits(examined))()
        except _Interesting as problem:
            if (kept := self._kept_cases()) is not None:
                kept.save(_KEY, next(choices for choices, tried in self._tried.items() if tried is problem))
            return problem
        return None

    def _changed_batch(self, batch: int) -> _Interesting | None:
        """Change workloads with rare meetings until one breaks a law that is not known."""
        for _ in range(BATCH):
            if self.over:
                return None
            choices = self._corpus.changed(self.meetings.times)
            if (problem := self._try_choices(choices)) is not None:
                if (kept := self._kept_cases()) is not None:
                    kept.save(_KEY, choices)
                return problem
        return None

    def _try_choices(self, choices: bytes) -> _Interesting | None:
        """Run a workload, and keep it if events met in it that rarely do."""
        problem = self._try(make_workload(choices, self.target.features))
        if self.meetings.is_rare:
            self._corpus.keep(choices, self.meetings.rarest)
        return problem

    def _examine(self, choices: bytes) -> None:
        if self._shrinking is None:
            if self.over:
                return
            problem = self._try_choices(choices)
            if problem is not None:
                self._shrinking, self._shrinks_until = (
                    (problem.fault.law, problem.fault.place),
                    time.process_time() + SHRINK_SECONDS,
                )
        elif choices in self._tried or time.process_time() > self._shrinks_until:
            problem = self._tried.get(choices)
        else:
            problem = self._again(make_workload(choices, self.target.features), self._shrinking)
        if self._shrinking is not None:
            self._tried[choices] = problem
        if problem is not None:
            raise problem

    def _try(self, workload: dict[str, Any]) -> _Interesting | None:
        """Run a workload; its fault, unless it is known."""
        has = shape(workload)
        self.num_workloads += 1
        self.pairs.update(combinations(sorted(has), 2))
        self.meetings.is_rare = False
        fault = self.fault(workload, meetings=self.meetings if self.guided else None)
        if fault is None:
            return None
        if (same := self._explained((fault.law, fault.place), has)) is not None:
            same.num_seen += 1
            return None
        self._first_seen = (self.num_workloads, round(self.elapsed, 3))
        return _Interesting(fault, workload)

    def _again(self, workload: dict[str, Any], key: tuple[str, str]) -> _Interesting | None:
        """Run a smaller workload; its fault, if it is the one that is being shrunk."""
        if self._explained(key, shape(workload)) is not None:
            return None
        fault = self.fault(workload, key[1])
        return _Interesting(fault, workload) if fault is not None and (fault.law, fault.place) == key else None

    def fault(self, workload: dict[str, Any], place: str = "", meetings: Meetings | None = None) -> Fault | None:
        """The fault of a workload.

        Args:
            workload: The workload.
            place: The place that a fault of progress is asked for, which is tried alone; "" to find it.
            meetings: Takes the events of the run.
        """
        try:
            fault = self.target.run(workload, self.laws, tally=self.tally, meetings=meetings)
        except Refused:
            self.num_refused += 1
            return None
        if fault is not None and fault.law == "progress":
            words = obstacle(workload, self.ends, place, all_free=fault.place == ALL_FREE)
            fault = fault._replace(place=words)
        return fault

    def ends(self, workload: dict[str, Any]) -> bool:
        """Whether a workload keeps the law of progress."""
        try:
            fault = self.target.run(workload, self.laws)
        except Refused:
            return False
        return fault is None or fault.law != "progress"

    def _explained(self, key: tuple[str, str], has: frozenset[str]) -> Found | None:
        same = (found for found in self.found if (found.fault.law, found.fault.place) == key)
        return next((found for found in same if found.needs <= has), None)

    def _note(self, problem: _Interesting) -> None:
        """Keep a fault with its smallest case, instead of larger cases of the same."""
        key = (problem.fault.law, problem.fault.place)
        smallest = shrink(problem.workload, lambda smaller: self._again(smaller, key) is not None)
        found = Found(self.fault(smallest, key[1]) or problem.fault, smallest, *self._first_seen)
        self.keep(found)
        self.tell(self, found)

    def keep(self, found: Found) -> None:
        """Keep a fault instead of larger cases of the same, unless a smaller one is known."""
        key = (found.fault.law, found.fault.place)
        if (same := self._explained(key, found.needs)) is not None and same.needs < found.needs:
            same.num_seen += found.num_seen
            return
        for larger in [each for each in self.found if (each.fault.law, each.fault.place) == key]:
            if found.needs <= larger.needs:
                self.found.remove(larger)
                found.num_workloads, found.seconds = larger.num_workloads, larger.seconds
                found.num_seen += larger.num_seen
        self.found.append(found)


def shape(workload: dict[str, Any]) -> frozenset[str]:
    """The features that a workload uses."""
    config, requests = workload["config"], workload["requests"]
    kinds = {group["kind"] for group in config.get("kv_cache_groups", ())}
    names = {
        "drafts": config.get("num_speculative_tokens"),
        "async": config.get("async_scheduling"),
        "caching": config.get("enable_prefix_caching", True),
        "priority": config.get("policy") == "priority",
        "states": "mamba" in kinds,
        "windows": "sliding_window" in kinds,
        "groups": len(config.get("kv_cache_groups", ())) > 1,
        "caps": config.get("long_prefill_token_threshold"),
        "scheduled_tokens": config.get("max_num_scheduled_tokens"),
        "active_seqs": config.get("max_num_active_seqs"),
        "watermark": config.get("watermark"),
        "unchunked": config.get("enable_chunked_prefill", True) is False,
        "partial_prefills": config.get("max_num_partial_prefills"),
        "aborts": any(request.get("abort_step") is not None for request in requests),
        "grammars": any("grammar" in request for request in requests),
        "loads": any("remote" in request for request in requests),
        "adapters": any(request.get("adapter") for request in requests),
        "stops": any(request.get("stop_at") is not None for request in requests),
    }
    return frozenset(name for name, used in names.items() if used)
