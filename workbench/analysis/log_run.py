"""The run that a server would make of an access log."""

from __future__ import annotations

from workbench.config import EngineConfig
from workbench.scheduler.request import Request
from workbench.simulation.access_log import AccessLog
from workbench.simulation.arrivals import Arrival
from workbench.simulation.costs.cost_model import StepCost
from workbench.simulation.simulate import simulate_requests
from workbench.trace import Trace, TraceMeta

SOURCE = "access log"
"""Beginning of the source of a trace that was simulated from a log: nothing in it was measured."""


def simulate_log(log: AccessLog, config: EngineConfig, cost_model: StepCost) -> Trace:
    """The run that a server with this configuration and these costs would make of a log.

    Args:
        log: The access log.
        config: Configuration of the server.
        cost_model: Duration of a step, from a recording of such a server.
    """
    arrivals = log.arrivals
    meta = TraceMeta(source=f"{SOURCE} {log.path.name}, simulated", config=config.to_dict())

    def sample_token(request: Request) -> int:
        return 3

    return simulate_requests(
        config, arrivals, sample_token, cost_model=cost_model, meta=meta, max_steps=100 * sum(map(_size, arrivals))
    )


def _size(arrival: Arrival) -> int:
    return arrival.sampling.max_tokens + len(arrival.prompt_token_ids)
