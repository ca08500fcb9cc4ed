"""Asynchronous steps: the next step is scheduled while the model computes this one.

An iteration schedules batch k, then waits for the output of batch k - 1 and takes it in, then hands batch k to a second
thread that runs the model, and records step k - 1. So scheduling, recording and the listeners' work happen while the
model computes. The order of the scheduler's calls is that of vLLM's ``step_with_batch_queue`` with two batches.

The model runs on one thread, a step at a time: a step's keys and values are in the pool before the next step begins.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple, NoReturn

from workbench.base.compatibility import PHASES, excluded
from workbench.engine.packed_batch import PackedBatch
from workbench.engine.sampler import SampledToken
from workbench.engine.stages import Computed
from workbench.engine.step import Step, Stopwatch
from workbench.engine.thread import EngineThread
from workbench.scheduler.batch import ScheduledBatch
from workbench.trace import StepRecord


class InFlight(NamedTuple):
    """A batch whose output has not been taken in.

    Attributes:
        batch: The batch.
        timed: Its times so far.
        output: Its output, or the exception that it failed with.
    """

    batch: ScheduledBatch
    timed: Stopwatch
    output: Future[Computed]


class AsyncStepper:
    """Takes asynchronous steps, see `Stepper`. Every method is for the engine's thread alone.

    Args:
        step: The parts of the engine.

    Attributes:
        phase: None, because steps overlap.
    """

    phase = None

    def __init__(self, step: Step) -> None:
        self.step = step
        self._thread = EngineThread("workbench-forward")
        self._in_flight: InFlight | None = None

    @property
    def in_step(self) -> bool:
        """Whether a batch is in flight."""
        return self._in_flight is not None

    def take(self) -> StepRecord | None:
        """Run iterations until a step is complete, which takes two at first; None when there is nothing to do."""
        record: StepRecord | None = None
        while record is None:
            self.step.empty_inbox()
            to_come = self._in_flight is not None and bool(self._in_flight.batch.chunks)
            if not self.step.has_work() and not to_come:
                return self._finish_empty_batch()
            record = self._iterate()
        return record

    def _iterate(self) -> StepRecord | None:
        """Schedule a batch, take in the output of the one before, and start the new one; the record of the old one."""
        batch = self.step.scheduler.schedule()
        timed = Stopwatch(self.step.scheduler.clock, batch.time)
        previous, self._in_flight = self._in_flight, None
        if previous is None:
            self._in_flight = InFlight(batch, timed, self._start(batch, timed))
            return None
        previous.output.exception()
        timed.lap("wait")
        previous.timed.continue_at(timed.end)
        computed = self._take_output(previous, batch)
        timed.continue_at(previous.timed.end)
        self._in_flight = InFlight(batch, timed, self._start(batch, timed))
        return self.step.complete(previous.batch, previous.timed, computed)

    def _finish_empty_batch(self) -> StepRecord | None:
        """Complete the last batch, which was scheduled when nothing was left to compute."""
        last, self._in_flight = self._in_flight, None
        if last is None:
            return None
        last.timed.resume()
        return self.step.complete(last.batch, last.timed, self._take_output(last, last.batch))

    def _take_output(self, in_flight: InFlight, iteration: ScheduledBatch) -> Computed:
        """Wait for the output of a batch and give it to the requests."""
        try:
            computed = in_flight.output.result()
        except Exception as problem:
            computed = Computed()
            self.step.fail(in_flight.batch, problem, iteration)
        else:
            self.step.take_output(in_flight.batch, computed, iteration)
        in_flight.timed.lap("update")
        return computed

    def _start(self, batch: ScheduledBatch, timed: Stopwatch) -> Future[Computed]:
        """Let the second thread run the model on a batch. A batch whose requests have all ended is not run."""
        if all(chunk.request.status == "finished" for chunk in batch.chunks):
            thrown_away = [[SampledToken(0)] for chunk in batch.chunks if chunk.samples]
            return _done(Computed(sampled=thrown_away))
        try:
            if self.step.speculator is not None:
                self.step.speculator.fill_in(batch)
            packed = self.step.prepare(batch, timed)
        except Exception as problem:
            return _done(problem)
        return self._thread.submit(lambda: self._compute(batch, packed, timed))

    def _compute(self, batch: ScheduledBatch, packed: PackedBatch, timed: Stopwatch) -> Computed:
        """Run the model; on the second thread."""
        phases = self.step.compute(batch, packed, timed)
        while True:
            try:
                next(phases)
            except StopIteration as end:
                return end.value

    def advance(self, *, stop_at_layers: bool) -> NoReturn:
        """Asynchronous steps have no phases one after another.

        Raises:
            ValueError: Always.
        """
        config = self.step.scheduler.config
        raise ValueError(next(excluded(config, "call", PHASES)).sentence(config))

    def give_up(self) -> None:
        """Wait for the model, and drop the output of the batch in flight."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.output.exception()

    def close(self) -> None:
        """End the second thread."""
        self._thread.close()


def _done(result: Computed | Exception) -> Future[Computed]:
    """A future that is complete."""
    future: Future[Computed] = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future
