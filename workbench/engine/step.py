"""One step of an engine: schedule, prepare, forward, sample, draft, update, record."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from workbench.engine.failed_steps import FailedSteps
from workbench.engine.forward.path import ForwardOutput
from workbench.engine.model_runner import ModelRunner
from workbench.engine.output_processor import OutputProcessor
from workbench.engine.packed_batch import PackedBatch, prepare_unified
from workbench.engine.sampler import Sampler
from workbench.engine.stages import STAGES, Computed, Stage, StepPart
from workbench.models.paged_cache import Kept
from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.scheduler import Scheduler
from workbench.trace import StepRecord, Trace
from workbench.trace.step_span import StepSpan

if TYPE_CHECKING:
    from workbench.engine.shadow import ShadowLauncher
    from workbench.engine.speculation.speculator import Speculator


MIN_KEEP_STEPS = 16
MIN_KEEP_BYTES = 1 << 20

_GRAMMAR_SECONDS = 0.001
"""Interval at which an engine with nothing to do but to wait for a grammar looks again."""

SHOWN_TOP_TOKENS = 5
"""Number of most likely tokens beside each sampled one in a step that is taken phase by phase."""

log = logging.getLogger("workbench")

Phases = Generator[tuple[str, Any], bool | None, None]
"""The phases of a step: they yield (name, result), and are sent whether to stop at layers from there on."""


def run_model(runner: ModelRunner, computed: Computed) -> tuple[str, Any]:
    """The stage "forward"."""
    computed.logits, computed.kernel = computed.output or runner.forward(computed.packed)
    computed.lap("forward")
    return "forward", computed.logits.values


def sample(sampler: Sampler, computed: Computed) -> tuple[str, Any]:
    """The stage "sample", a token for each chunk that reaches the last known one."""
    requests = [chunk.request for chunk in computed.batch.chunks if chunk.samples]
    tokens = sampler.sample(computed.logits, requests)
    computed.sampled = [[token] for token in tokens]
    computed.lap("sample")
    return "sample", tokens


class Step:
    """The parts of an engine that take a step, and the step itself. Every method is for the engine's thread alone.

    Args:
        scheduler: Chooses the tokens to compute.
        runner: Runs the model once.
        sampler: Chooses tokens.
        outputs: Turns tokens into the outputs of requests.
        trace: Holds the records.
        shadow: Runs the Metal source beside the backend; None without.
        speculator: Makes drafts and verifies them; None without speculative decoding.

    Attributes:
        computing: Index of the step whose forward pass ran last, or runs.
        packed: The batch that was packed last, from which the next one reuses what still holds.
        timed: The times of the step that `phases` began last.
        trace: The trace that the next record is added to.
        record_top_tokens: Number of most likely tokens that are recorded with each output token.
        inbox: Work to do before the next step: arrivals, aborts, and calls of ``before_step``.
        listeners: Functions that are called with the record of every step.
        failed: The steps that raised.
        parts: The features that take part in every step, in the order in which they are asked.
        stages: The stages of a computation in order.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        sampler: Sampler,
        outputs: OutputProcessor,
        trace: Trace,
        *,
        shadow: ShadowLauncher | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.sampler = sampler
        self.outputs = outputs
        self.trace = trace
        self.shadow = shadow
        self.speculator = speculator
        self.record_top_tokens = sampler.num_top_tokens
        self.computing = 0
        self.packed: PackedBatch | None = None
        self.timed: Stopwatch | None = None
        self.inbox: deque[Callable[[], None]] = deque()
        self.listeners: list[Callable[[StepRecord], None]] = []
        self.failed = FailedSteps()
        self._end = 0.0  # of the latest step
        self._was_empty = False  # the latest step had no chunk
        self._has_states = not all(group.is_attention for group in runner.groups)
        self.parts: tuple[StepPart, ...] = ()
        self.run_with(runner)

    def run_with(self, runner: ModelRunner) -> None:
        """Run the model with this runner from now on; between two steps."""
        self.runner = runner
        self._make_stages()

    def join(self, part: StepPart) -> None:
        """Let a feature take part in every step from now on; between two steps."""
        self.parts += (part,)
        self._make_stages()

    def _make_stages(self) -> None:
        # They do not refer to this object, so that an engine that is dropped is gone at once.
        stages: dict[str, Stage] = {
            "forward": partial(run_model, self.runner),
            "sample": partial(sample, self.sampler),
        }
        for part in self.parts:
            stages |= part.stages(stages)
        self.stages = tuple([stages[name] for name in STAGES if name in stages])

    def begin(self) -> bool:
        """Do the work of the inbox; whether there is a step to take."""
        self.empty_inbox()
        return self.has_work()

    def empty_inbox(self) -> None:
        """Do the work of the inbox; never in the middle of a step, whose requests must stay as they are.

        If all requests wait for their grammars, and a step has recorded it, this waits until one is compiled.
        """
        while self._was_empty and not self.inbox and self.scheduler.waits_for_grammars():
            time.sleep(_GRAMMAR_SECONDS)
        while self.inbox:
            self.inbox.popleft()()

    def has_work(self) -> bool:
        """Whether there is a step to take. An abort that leaves no request needs one, without chunks, to be seen."""
        return bool(self.scheduler.queues.requests or self.scheduler.queues.aborted)

    def phases(self, batch: ScheduledBatch) -> Phases:
        """One step, phase by phase.

        Args:
            batch: Has just been scheduled.

        Yields:
            ("schedule", ScheduledBatch), ("prepare", PackedBatch), ("forward", logits), with a grammar ("mask", the
            tokens that are allowed, bool [vocab_size] by row of logits), ("sample", sampled tokens), with speculative
            decoding ("draft", drafts by request), and ("record", StepRecord). When True is sent in between, also
            ("layer 0", LayerCapture), ("layer 1", LayerCapture), ... before "forward". An exception in a phase ends the
            requests of the batch with reason "error", and no others.
        """
        timed = self.timed = Stopwatch(self.scheduler.clock, batch.time)
        yield "schedule", batch
        computed = Computed()
        try:
            if batch.chunks:
                packed = self.prepare(batch, timed)
                stops_at_layers = yield "prepare", packed
                computed = yield from self.compute(batch, packed, timed, stops_at_layers)
        except Exception as problem:
            timed.lap("failed")
            self.fail(batch, problem, batch)
        else:
            self.take_output(batch, computed, batch)
        timed.lap("update")
        yield "record", self.complete(batch, timed, computed)

    def prepare(self, batch: ScheduledBatch, timed: Stopwatch) -> PackedBatch:
        """Pack a batch."""
        self.packed = prepare_unified(
            batch,
            self.runner.kv_cache.block_size,
            num_blocks=self.runner.kv_cache.num_blocks,
            previous=self.packed,
            groups=self.runner.groups,
            kept=self._kept_states() if self._has_states else None,
        )
        timed.lap("prepare")
        return self.packed

    def _kept_states(self) -> Kept:
        """See `PackedBatch.kept`."""
        running = {request.request_id for request in self.scheduler.queues.running}
        return running, [group.is_cached for group in self.scheduler.kv_cache.groups]

    def compute(
        self, batch: ScheduledBatch, packed: PackedBatch, timed: Stopwatch, stops_at_layers: bool | None = None
    ) -> Generator[tuple[str, Any], bool | None, Computed]:
        """The phases that run the model: "forward", "mask", "sample" and "draft", see `phases`."""
        self.computing = batch.step
        computed = Computed(batch=batch, packed=packed, lap=timed.lap)
        if stops_at_layers:
            computed.output = yield from self._run_stopping(packed, timed)
        for stage in self.stages:
            if (phase := stage(computed)) is not None:
                yield phase
        return computed

    def _run_stopping(
        self, packed: PackedBatch, timed: Stopwatch
    ) -> Generator[tuple[str, Any], bool | None, ForwardOutput]:
        """The forward pass with a stop after each layer, for as long as True is sent."""
        from workbench.engine.forward.stopping import StoppingPath

        with closing(StoppingPath(self.runner, packed, self.computing)) as path:
            stops_at_layers: bool | None = True
            while stops_at_layers and (layer := path.advance()) is not None:
                timed.lap("forward")
                stops_at_layers = yield f"layer {layer.layer}", layer
            return path.run(packed)

    def complete(self, batch: ScheduledBatch, timed: Stopwatch, computed: Computed) -> StepRecord:
        """Record a step whose output has been taken in."""
        times = timed.fields(self._end)
        self._end = times["end"]
        self._was_empty = not batch.chunks
        record = batch.to_record(kernel=computed.kernel, **times)
        self.keep(record, computed)
        return record

    def take_output(self, batch: ScheduledBatch, computed: Computed, iteration: ScheduledBatch) -> None:
        """Append the tokens of a step to its requests, and end those that are done.

        Args:
            batch: The step.
            computed: Its output.
            iteration: The batch that was scheduled last, whose record names the requests that end here.
        """
        for part in self.parts:
            part.took(computed)
        tokens, finish = self.outputs.append_tokens(batch, computed.sampled, self.scheduler.max_model_len)
        self.scheduler.update(batch, tokens, finish=finish)
        self._finish(iteration)
        for part in self.parts:
            part.updated(computed)

    def fail(self, batch: ScheduledBatch, problem: Exception, iteration: ScheduledBatch) -> None:
        """End the requests of a batch with an error, see `take_output` for the arguments."""
        log.exception("step %d failed; its requests end with finish_reason 'error'", batch.step, exc_info=problem)
        self.failed.add(problem)
        for chunk in chain(batch.chunks, iteration.chunks):
            self.outputs[chunk.request.request_id].error = f"{type(problem).__name__}: {problem}"
        self.scheduler.fail(batch)
        self._finish(iteration)

    def _finish(self, iteration: ScheduledBatch) -> None:
        for part in self.parts:
            part.ending(iteration)
        self.outputs.finish(iteration.finish_reasons)

    def keep(self, record: StepRecord, computed: Computed) -> None:
        """Add a record to the trace, and show it to the parts and the listeners."""
        self.trace.append(record)
        for part in self.parts:
            self.trace = part.recorded(record, computed, self.trace)
        for listener in list(self.listeners):
            try:
                listener(record)
            except Exception:  # a failing listener must not stop the engine
                log.exception("a listener failed in step %d", record.step)


class Stopwatch(StepSpan):
    """Times a step. A phase begins where the one before it ended, so that no work is left out.

    Args:
        clock: Returns seconds since the start of the run.
        start: When the scheduler began with the step; its phase "schedule" ends now.
    """

    def __init__(self, clock: Callable[[], float], start: float) -> None:
        super().__init__(start)
        self._clock = clock
        self._held = 0.0
        self.lap("schedule")

    def lap(self, phase: str) -> None:
        """End a phase now."""
        self.add(phase, self.end, self._clock() - self._held)

    def resume(self) -> None:
        """Leave out the time since the last phase: it was that of somebody who looked at the step."""
        self._held = self._clock() - self.end

    def continue_at(self, moment: float) -> None:
        """Begin the next phase at a moment at which the thread that runs it was free again."""
        self.end, self._held = moment, 0.0


class Stepper:
    """Takes steps whole or phase by phase; a step that was begun phase by phase is finished by the next whole one.

    Every method is for the engine's thread alone. The phases do not refer to this object, so that an engine that is
    dropped in the middle of a step does not have to wait for the garbage collector.

    Args:
        step: The step.

    Attributes:
        phase: (name, result) of the latest phase until its step is complete; else None. Any thread may read it.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.phase: tuple[str, Any] | None = None
        self._phases: Phases | None = None

    @property
    def in_step(self) -> bool:
        """Whether a step has been begun and is not complete."""
        return self._phases is not None

    def take(self) -> StepRecord | None:
        """Take what is left of the current step, or a whole one; None when there is nothing to do."""
        step = self.step
        step.sampler.num_top_tokens = step.record_top_tokens
        phases: Iterable[tuple[str, Any]] = ()
        if self._phases is not None:
            phases, self._phases, self.phase = self._resumed(), None, None
        elif step.begin():
            phases = step.phases(step.scheduler.schedule())
        record: StepRecord | None = None
        for _, made in phases:
            record = made  # the last phase makes it
        return record

    def advance(self, *, stop_at_layers: bool) -> tuple[str, Any] | StepRecord | None:
        """Take the next phase of the current step, or the first of a new one; the record after the last."""
        step, choice = self.step, stop_at_layers if self.in_step else None
        step.sampler.num_top_tokens = step.record_top_tokens or SHOWN_TOP_TOKENS
        if self._phases is not None:
            phases = self._resumed()
        elif step.begin():
            phases = self._phases = step.phases(step.scheduler.schedule())
        else:
            return None
        try:  # a generator's first send() takes None
            name, made = phases.send(choice)  # meanwhile views can read the phase before
        except BaseException:
            self._phases = self.phase = None
            raise
        if name == "record":
            self._phases = self.phase = None
            return made
        self.phase = name, made
        return self.phase

    def _resumed(self) -> Phases:
        """The rest of the current step; the time of those who looked at its latest phase is left out."""
        assert self._phases is not None
        if self.step.timed is not None:
            self.step.timed.resume()
        return self._phases

    def give_up(self) -> None:
        """Leave what is left of the current step undone."""
        phases, self._phases, self.phase = self._phases, None, None
        if phases is not None:
            phases.close()

    def close(self) -> None:
        """Steps one after another need nothing to be given back."""
