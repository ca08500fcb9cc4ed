"""How the trace of an engine that runs for long forgets its oldest steps."""

from __future__ import annotations

from workbench.engine.field_checks import integer
from workbench.engine.scheduler import Scheduler
from workbench.trace import Keyframe, Trace

MIN_KEEP_STEPS = 16


class TraceWindow:
    """Replaces a trace that has become long by one that begins later.

    Every ``keep_steps / 2`` steps the scheduler's memory is taken as a keyframe, and the trace goes on as one that
    begins at the keyframe before: it has between half of ``keep_steps`` and all of them. Whatever was derived from
    the old trace goes with it, so that nothing grows with the number of steps or of requests.

    Args:
        keep_steps: Steps to keep at most; None keeps all.
        scheduler: The scheduler whose steps are traced.

    Raises:
        ValueError: ``keep_steps`` is too small.
    """

    def __init__(self, keep_steps: int | None, scheduler: Scheduler) -> None:
        if keep_steps is not None:
            integer("keep_steps", keep_steps, MIN_KEEP_STEPS, 2**31 - 1)
        self._interval = keep_steps // 2 if keep_steps is not None else None
        self._scheduler = scheduler
        self._keyframe: Keyframe | None = None

    def after_step(self, trace: Trace) -> Trace:
        """The trace to go on with, once a step is complete and before the next one begins."""
        if self._interval is None or self._scheduler.step % self._interval:
            return trace
        previous, self._keyframe = self._keyframe, keyframe_of(self._scheduler)
        return trace if previous is None else trace.continued_from(previous)


def keyframe_of(scheduler: Scheduler) -> Keyframe:
    """A scheduler's memory before its next step; not while a step is under way."""
    pool = scheduler.kv_cache.block_pool
    return Keyframe(
        step=scheduler.step,
        block_tables={request.request_id: tuple(request.block_table) for request in scheduler.running},
        num_kv_computed={request.request_id: request.num_kv_computed for request in scheduler.running},
        free_block_ids=tuple(pool.free_queue),
        cached_block_ids=tuple(sorted(pool.cached_blocks)),
    )
