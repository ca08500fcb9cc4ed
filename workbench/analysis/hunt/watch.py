"""Checks the laws at every moment of a driven run, and keeps the records of a run that is to be shown."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from time import process_time
from typing import Any

from workbench.analysis.hunt.drive import LiveRequest, Run
from workbench.analysis.hunt.meetings import Meetings
from workbench.analysis.hunt.protocol import Counters
from workbench.trace.laws import Broken, Checker, Limits, SchedulerState


class BrokenLaw(Exception):
    """Ends a run at its first broken law.

    Attributes:
        broken: The first broken law.
    """

    def __init__(self, broken: Broken) -> None:
        super().__init__(str(broken))
        self.broken = broken


class Seen:
    """A request of any scheduler, as the laws see it (`workbench.trace.laws.RequestState`).

    If the scheduler does not tell its counters, they are those of the driver and of the laws.
    """

    def __init__(self, request: LiveRequest, known: Any, counters: Counters | None) -> None:
        self.request_id, self._known = request.request_id, known
        told = counters or Counters(request.token_ids, request.status, None)
        self.token_ids = told.token_ids
        self.status = request.status if request.status == "preempted" == told.status else told.status
        self._counts = told[2:]

    num_kv_computed = property(lambda self: _first(self._counts[0], self._known.computed))
    num_output_placeholders = property(lambda self: _first(self._counts[1], self._known.placeholders))
    num_in_flight_tokens = property(lambda self: _first(self._counts[2], self._known.in_flight))
    num_stale_output_tokens = property(lambda self: _first(self._counts[3], self._known.stale))


def _first(told: int | None, counted: int) -> int:
    return counted if told is None else told


class Watch:
    """Checks every moment of a run.

    Args:
        scheduler: The driven scheduler.
        config: The workload's configuration.
        laws: Names of the laws to check; None for all.
        allow_exceptions: Leave out what a named exception allows, or one of those named here.
        meetings: Takes the events of the run; None for nobody.

    Attributes:
        checker: Checks the laws.
        seconds: Processor time that it took so far.
    """

    seconds = 0.0

    def __init__(
        self,
        scheduler: Any,
        config: Mapping[str, Any],
        *,
        laws: Collection[str] | None = None,
        allow_exceptions: bool | Collection[str] = False,
        meetings: Meetings | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._meetings = meetings
        if meetings is not None:
            meetings.begin(config)
        self.limits = scheduler.limits if hasattr(scheduler, "limits") else Limits.of(whole_config(config))
        self._counters = getattr(scheduler, "counters", None)
        for judge in getattr(scheduler, "judges", ()):
            judge.is_on = laws is None or judge.law in laws
        self._allows = tuple(getattr(scheduler, "allows", ()))
        self.checker = Checker(
            self.limits, allow_exceptions=allow_exceptions, laws=laws, names_changes=hasattr(scheduler, "state")
        )

    def added(self, request: LiveRequest) -> None:
        """Let the laws know a request that arrives."""
        tokens = self._counters(request.request_id)[0] if self._counters else request.token_ids
        self.checker.add(request, tokens, stops=request.stop_token_ids)

    def scheduled(self, run: Run, plan: Any) -> None:
        """Check a step that was just scheduled."""
        if self._meetings is not None:
            self._meetings.scheduled(run, plan)
        began = process_time()
        broken = self.checker.scheduled(plan, self._state(run))
        self.seconds += process_time() - began
        self._stop_at(broken)

    def updated(self, run: Run, plan: Any, latest: Any, ended: Mapping[str, str]) -> None:
        """Check a step whose output was just taken in."""
        if self._meetings is not None:
            self._meetings.updated(plan, ended)
        began = process_time()
        broken = self.checker.updated(plan, latest, ended, self._state(run))
        self.seconds += process_time() - began
        self._stop_at(broken)

    def proposed(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Let the laws know the drafts of the next step."""
        self.checker.proposed(drafts)

    def _stop_at(self, broken: list[Broken]) -> None:
        for each in broken:
            if not each.message.startswith(self._allows):
                raise BrokenLaw(each)

    def _state(self, run: Run) -> SchedulerState:
        scheduler = self.scheduler
        if hasattr(scheduler, "state"):
            state: SchedulerState = scheduler.state()
            return state
        requests: dict[str, Any] = {}
        for name, request in run.requests.items():
            told = Counters(*self._counters(name)) if self._counters else None
            requests[name] = Seen(request, self.checker.history.requests[name], told)
        running, waiting = run.queues()
        return SchedulerState(
            self.limits.num_blocks or 1,
            scheduler.free_blocks(),
            {name: [list(table) for table in scheduler.block_tables(name)] for name in run.requests},
            requests,
            [requests[name] for name in running if name in requests],
            [requests[name] for name in waiting if name in requests],
            **(scheduler.pool() if hasattr(scheduler, "pool") else {}),
        )


def whole_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A workload's configuration, with the defaults of one that leaves fields out."""
    defaults = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "block_size": 16, "num_blocks": 512}
    whole = {**defaults, "enable_prefix_caching": True, **config}
    if whole.get("num_speculative_tokens") and "speculative" not in whole:
        method = config.get("spec_method") or ("eagle" if config.get("async_scheduling") else "ngram")
        whole["speculative"] = {"method": method}
    return whole
