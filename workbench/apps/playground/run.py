"""A run of the playground: of one scheduler, or of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from workbench.config import EngineConfig
from workbench.simulation.arrivals import Arrival
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import StepRecord, Trace
from workbench.trace.readings.metrics_collector import metrics

MAX_STEPS = 20_000
"""Maximum number of steps of a simulation in the page."""


def _mixes(step: StepRecord) -> bool:
    arms = {chunk.arm for chunk in step.chunks}
    return {"intermediate", "decode"} <= arms


MOMENTS: Mapping[str, Callable[[StepRecord], object]] = {
    "a chunk beside decodes": _mixes,
    "a request waits": lambda step: step.waiting,
    "a preemption": lambda step: step.preempted,
    "a hit in the prefix cache": lambda step: any(chunk.num_cached_tokens for chunk in step.chunks),
}
"""The subjects of steps, each with a function that says whether a step shows it."""


def first_step(trace: Trace, shows: str) -> int | None:
    """The first step that shows one of `MOMENTS`; None without one."""
    return next((step.step for step in trace if MOMENTS[shows](step)), None)


@dataclass(frozen=True, eq=False)
class Run:
    """A run of one scheduler, or of the replicas of a fleet.

    Attributes:
        traces: The trace of each replica.
        concentration: Why one replica got most of the requests, see `FleetRun.concentration`.
    """

    traces: tuple[Trace, ...]
    concentration: str = ""

    @property
    def is_fleet(self) -> bool:
        """Whether requests went through a router."""
        return len(self.traces) > 1

    @cached_property
    def busiest(self) -> int:
        """Index of the replica that got the most requests; the first of them."""
        return max(range(len(self.traces)), key=lambda index: len(self.traces[index].requests))

    @property
    def requests(self) -> list[str]:
        """The requests of all replicas, in order of arrival."""
        infos = [info for trace in self.traces for info in trace.requests.values()]
        if not self.is_fleet:
            return [info.request_id for info in infos]
        return [info.request_id for info in sorted(infos, key=lambda info: (info.arrival_time, info.arrival_step))]

    @property
    def slowest(self) -> list[str]:
        """The requests of all replicas, the one that took longest first; one that has not ended counts until then."""
        found = [request for trace in self.traces for request in metrics(trace).requests.values()]
        times = {request.request_id: request.e2e or request.age for request in found}

        def taken(name: str) -> tuple[float, int]:
            time = times[name]
            return (time.seconds or 0.0, time.steps) if time is not None else (0.0, 0)

        return sorted(times, key=taken, reverse=True)

    @property
    def end(self) -> str:
        """The first reason for which a replica ended without its requests, or else that of all."""
        return max((trace.end for trace in self.traces), key=("", "done", "part", "cut", "max_steps", "stuck").index)

    def of(self, request: str) -> Trace:
        """The trace of the replica that a request went to; the first one for an unknown request."""
        return next((trace for trace in self.traces if request in trace.requests), self.traces[0])


def run_of_fleet(
    config: EngineConfig, arrivals: Sequence[Arrival], cost_model: CostModel | None, replicas: int, router: str
) -> Run:
    """Simulate requests over equal replicas behind a router."""
    from workbench.analysis.fleet.simulate import run_fleet  # few pages run a fleet, and all wait for their modules

    models = [cost_model] * replicas
    run = run_fleet(arrivals, [config] * replicas, models, router=router, max_steps=MAX_STEPS)
    return Run(tuple(run.traces), run.concentration)
