"""Checks the laws at every moment of a driven run, and keeps the records of a run that is to be shown."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from workbench.hunt.drive import LiveRequest, Run
from workbench.hunt.protocol import Counters
from workbench.laws import Broken, Checker, Limits, SchedulerState


class BrokenLaw(Exception):
    """Ends a run at its first broken law.

    Attributes:
        broken: The first broken law.
    """

    def __init__(self, broken: Broken) -> None:
        super().__init__(str(broken))
        self.broken = broken


class Seen:
    """A request of any scheduler, as the laws see it (`workbench.laws.state.RequestState`).

    If the scheduler does not tell its counters, they are those of the driver and of the laws.
    """

    def __init__(self, request: LiveRequest, watch: Watch, counters: Counters | None) -> None:
        self._watch, self._request = watch, request
        self.request_id, self.num_prompt_tokens = request.request_id, request.num_prompt_tokens
        self.max_tokens, self.priority = request.max_tokens, request.priority
        self.arrival_time, self.cache_salt = request.arrival_time, request.cache_salt
        self.block_tables = [list(table) for table in watch.scheduler.block_tables(self.request_id)]
        self._counters = counters
        self.token_ids = counters.token_ids if counters else request.token_ids
        self.status = counters.status if counters else request.status

    def _count(self, name: str, own: str) -> int:
        told = getattr(self._counters, name, None)
        if told is not None:
            return int(told)
        known = self._watch.checker.history.requests.get(self.request_id)
        return getattr(known, own) if known is not None else 0

    @property
    def num_kv_computed(self) -> int:
        """Tokens whose KV is computed."""
        return self._count("num_kv_computed", "computed")

    @property
    def num_output_placeholders(self) -> int:
        """Output tokens that steps in flight will give."""
        return self._count("num_output_placeholders", "placeholders")

    @property
    def num_in_flight_tokens(self) -> int:
        """Tokens of its chunks in flight."""
        return self._count("num_in_flight_tokens", "in_flight")

    @property
    def num_stale_output_tokens(self) -> int:
        """Those that were scheduled before its latest preemption."""
        return self._count("num_stale_output_tokens", "stale")


class Watch:
    """Checks every moment of a run.

    Args:
        scheduler: The driven scheduler.
        config: The workload's configuration.
        laws: Names of the laws to check; None for all.
        allow_exceptions: Leave out what a named exception allows.

    Attributes:
        checker: Checks the laws.
    """

    def __init__(
        self,
        scheduler: Any,
        config: Mapping[str, Any],
        *,
        laws: Collection[str] | None = None,
        allow_exceptions: bool = False,
    ) -> None:
        self.scheduler = scheduler
        limits = scheduler.limits if hasattr(scheduler, "limits") else Limits.of(whole_config(config))
        self.limits = limits
        self.checker = Checker(limits, allow_exceptions=allow_exceptions, laws=laws)

    def scheduled(self, run: Run, plan: Any) -> None:
        """Check a step that was just scheduled."""
        self._stop_at(self.checker.scheduled(plan, self._state(run)))

    def updated(self, run: Run, plan: Any, latest: Any, ended: Mapping[str, str]) -> None:
        """Check a step whose output was just taken in."""
        self._stop_at(self.checker.updated(plan, latest, ended, self._state(run)))

    @staticmethod
    def _stop_at(broken: list[Broken]) -> None:
        if broken:
            raise BrokenLaw(broken[0])

    def _state(self, run: Run) -> SchedulerState:
        scheduler = self.scheduler
        if hasattr(scheduler, "state"):
            state: SchedulerState = scheduler.state()
            return state
        tells = getattr(scheduler, "counters", None)
        requests: dict[str, Any] = {
            name: Seen(request, self, Counters(*tells(name)) if tells else None)
            for name, request in run.requests.items()
        }
        for name, request in run.requests.items():
            if requests[name].status == "waiting" and request.status == "preempted":
                requests[name].status = "preempted"
        running, waiting = run.queues()
        free = scheduler.free_blocks()
        if isinstance(free, int):  # ids below 0 are held by nobody
            free = range(-free, 0)
        return SchedulerState(
            self.limits,
            requests,
            [requests[name] for name in running if name in requests],
            [requests[name] for name in waiting if name in requests],
            self.limits.num_blocks or 1,
            free,
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
