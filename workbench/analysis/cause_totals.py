"""The causes of a run as counters that only grow: each request counts once, when its latency is known.

A request is explained when it has its first token, and again when it has ended, so that no counter ever falls; what it
waits for until then counts by the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import get_args

from workbench.analysis.causes import KINDS, Part
from workbench.analysis.explain import explainer_of
from workbench.trace import StepRecord, Trace
from workbench.trace.reasons import Kind

REASONS: tuple[str, ...] = get_args(Kind)
"""Why a step leaves a request waiting; names of labels."""


class CauseTotals:
    """Counters of one run.

    Args:
        created: Wall clock of its beginning, which tells it from a later run of the same rank.

    Attributes:
        created: As above.
        seconds: Seconds of the requests' times to first token ("ttft") and whole times ("e2e"), by kind of cause.
        num_requests: Number of requests in them.
        waited: Seconds that requests waited in steps which left them out, by kind of reason: two requests that wait for
            a second each are two seconds.
        waiting: Number of requests that wait after the newest step, likewise.
        num_steps: Number of steps.
        num_preemptions: Number of preemptions.
        newest: The newest step; None before the first one.
    """

    def __init__(self, created: float) -> None:
        self.created = created
        self.seconds = {"ttft": dict.fromkeys(KINDS, 0.0), "e2e": dict.fromkeys(KINDS, 0.0)}
        self.num_requests: Counter[str] = Counter()
        self.waited = dict.fromkeys(REASONS, 0.0)
        self.waiting: Counter[str] = Counter()
        self.num_steps = self.num_preemptions = 0
        self.newest: StepRecord | None = None
        self._counted: dict[str, set[str]] = {"ttft": set(), "e2e": set()}

    def update(self, trace: Trace) -> None:
        """Count what is new.

        Args:
            trace: The run, with the steps of the last call and any that followed.
        """
        run = trace[:]  # it may grow meanwhile
        self._count_steps(run)
        explainer = explainer_of(run)
        if explainer.unit != "s":
            return
        for request_id, request in explainer.metrics.requests.items():
            if request.ttft is not None and self._is_new("ttft", request_id):
                span = explainer.first_token(request_id)
                self._add("ttft", span.parts if span is not None else ())
            if request.e2e is not None and self._is_new("e2e", request_id):
                self._add("e2e", explainer.explain(request_id).parts)

    def _count_steps(self, run: Trace) -> None:
        end = self.newest.end if self.newest is not None else None
        for record in run[self.num_steps :]:
            self.num_preemptions += len(record.preempted)
            self.waiting = Counter(reason.root for reason in record.not_scheduled.values())
            seconds = max(0.0, record.end - (record.time if end is None else max(record.time, end)))
            for reason, number in self.waiting.items():
                self.waited[reason] += number * seconds
            self.newest, end = record, record.end
        self.num_steps = len(run)

    def _is_new(self, by: str, request_id: str) -> bool:
        is_new = request_id not in self._counted[by]
        self._counted[by].add(request_id)
        return is_new

    def _add(self, by: str, parts: tuple[Part, ...]) -> None:
        self.num_requests[by] += 1
        for part in parts:
            self.seconds[by][part.kind if part.kind in KINDS else "unknown"] += part.amount


def totals_of(traces: Mapping[str, Trace], known: Mapping[str, CauseTotals]) -> dict[str, CauseTotals]:
    """The counters of several ranks, by their names, brought up to date.

    Args:
        traces: The ranks.
        known: Their counters so far. A rank that is new, or runs again, begins with none; one that is gone is left out.
    """
    totals = {}
    for name, trace in traces.items():
        counted = known.get(name)
        if counted is None or counted.created != trace.meta.created or counted.num_steps > len(trace):
            counted = CauseTotals(trace.meta.created)
        counted.update(trace)
        totals[name] = counted
    return totals
