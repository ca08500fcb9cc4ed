"""Facts that are added to the records of an engine, and a trace that forgets its oldest steps."""

from __future__ import annotations

from itertools import chain

import msgspec

from workbench.engine.output_processor import OutputProcessor
from workbench.engine.stages import Computed, StepPart
from workbench.scheduler.scheduler import Scheduler
from workbench.trace import Keyframe, StepRecord, Supplement, Trace
from workbench.trace.readings.last_tokens import with_times
from workbench.trace.readings.top_tokens import NAME as TOP_TOKENS
from workbench.trace.size import size_of, size_of_step


class TopTokens(StepPart):
    """Records the most likely tokens beside each sampled one.

    Args:
        outputs: Knows the texts of tokens.
    """

    def __init__(self, outputs: OutputProcessor) -> None:
        self._outputs = outputs

    def recorded(self, record: StepRecord, computed: Computed, trace: Trace) -> Trace:
        """Add the tokens that were kept with the step's output."""
        chunks = [chunk for chunk in computed.batch.chunks if chunk.samples] if computed.batch is not None else ()
        found = [
            msgspec.to_builtins(self._outputs.with_texts(token.top))
            for chunk, tokens in zip(chunks, computed.sampled)
            for token in tokens[: len(chunk.sampled_before) + (chunk.sampled is not None)]
            if token.top is not None
        ]
        if found:
            supplement = Supplement(record.step, TOP_TOKENS, {"tokens": found})
            trace.add_supplement(supplement)
            computed.supplements = (*computed.supplements, supplement)
        return trace


class Window(StepPart):
    """Lets a trace begin later and later, so that it holds the newest steps alone.

    The trace then holds between half of ``keep_steps`` or ``keep_bytes`` and all of them, and nothing that is derived
    from it grows with the number of steps or of requests.

    Args:
        scheduler: Tells the state that a trace begins with.
        keep_steps: Maximum number of steps in the trace; None for any number.
        keep_bytes: Maximum size of the trace (`workbench.trace.size`); None for any size.
    """

    def __init__(self, scheduler: Scheduler, keep_steps: int | None, keep_bytes: int | None) -> None:
        self._scheduler = scheduler
        self._interval = keep_steps // 2 if keep_steps is not None else None
        self._size = keep_bytes // 2 if keep_bytes is not None else None
        self._num_bytes = 0  # of what was added to the trace since the latest keyframe
        self._keyframe: Keyframe | None = None

    def recorded(self, record: StepRecord, computed: Computed, trace: Trace) -> Trace:
        """If enough was added since the latest keyframe, let the trace begin there, and take the next one."""
        if self._size is not None:
            arrivals = map(trace.requests.__getitem__, record.arrived)
            self._num_bytes += size_of_step(record) + sum(map(size_of, chain(arrivals, computed.supplements)))
        is_full = self._size is not None and self._num_bytes > self._size
        if not is_full and (self._interval is None or (record.step + 1) % self._interval):
            return trace
        self._num_bytes = 0
        previous, self._keyframe = self._keyframe, self._scheduler.keyframe()
        return trace if previous is None else trace.continued_from(with_times(previous, trace))
