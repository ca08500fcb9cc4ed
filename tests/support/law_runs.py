"""Runs whose every step is checked against the laws."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from workbench.config import EngineConfig
from workbench.scheduler.block_pool import BlockPool
from workbench.scheduler.checked import CheckedScheduler, state_of
from workbench.scheduler.policy import described
from workbench.scheduler.request import Request
from workbench.scheduler.scheduler import Scheduler
from workbench.simulation import run as run_module
from workbench.simulation.arrivals import Arrival
from workbench.simulation.simulate import next_token, simulate_requests
from workbench.simulation.workload import read_workload
from workbench.trace import Trace
from workbench.trace.laws import Broken, Checker, LawError, Limits, SchedulerState


def checked_run(config: EngineConfig, arrivals: Sequence[Arrival], **options: Any) -> tuple[Trace | None, list[Broken]]:
    """Simulate requests; the trace, None if the run crashed, and the laws that the scheduler broke."""
    made: list[CheckedScheduler] = []

    def make(*arguments: Any, **more: Any) -> CheckedScheduler:
        made.append(CheckedScheduler(*arguments, **more, on_broken=lambda broken: None))
        return made[0]

    with patch.object(run_module, "Scheduler", make):
        try:
            trace = simulate_requests(config, arrivals, next_token, **{"max_steps": 300, **options})
        except Exception:
            assert made[0].checker.broken[-1].law == "crash", made[0].checker.broken
            return None, made[0].checker.broken
    return trace, made[0].checker.broken


def checked_workload(workload: dict[str, Any], **options: Any) -> tuple[Trace | None, list[Broken]]:
    """The same for a workload in the format of ``simulate()``."""
    return checked_run(*read_workload(workload), **options)


def assert_laws(scheduler: Scheduler) -> None:
    """Check a scheduler's present state.

    Raises:
        LawError: A law is broken.
    """
    limits = Limits.of(described(scheduler.config, scheduler.policy))
    _assert_state(state_of(scheduler), limits)


def assert_pool(pool: BlockPool, tables: Sequence[Sequence[int]]) -> None:
    """Check a pool alone against the block tables in use.

    Raises:
        LawError: A law is broken.
    """
    requests = [Request(f"r{index}", [1]) for index in range(len(tables))]
    for request, table in zip(requests, tables):
        request.status, request.block_tables, request.num_kv_computed = "running", [list(table)], len(table)
    by_id = {request.request_id: request for request in requests}
    state = SchedulerState(
        pool.num_blocks,
        pool._free,
        {name: request.block_tables for name, request in by_id.items()},
        by_id,
        requests,
        ref_counts=pool._ref_counts,
        cached_blocks=pool._hash_of,
        blocks_by_hash=pool._blocks_of,
    )
    _assert_state(state, Limits.of({"block_size": 1}))


def _assert_state(state: SchedulerState, limits: Limits) -> None:
    checker = Checker(limits, whole=False)
    for request in (*state.running, *state.waiting):
        checker.add_running(request, request.num_kv_computed, request.block_tables)
    if broken := checker.look(state):
        raise LawError(broken)
