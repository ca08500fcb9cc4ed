"""The phases of one step, from the scheduler's choice to the record."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.engine.layer_by_layer import ForwardByLayer
from workbench.engine.model_runner import ModelRunner
from workbench.engine.packed_batch import PackedBatch, prepare_unified
from workbench.engine.request_book import RequestBook
from workbench.engine.sampler import SampledToken, Sampler
from workbench.engine.scheduled_batch import ScheduledBatch
from workbench.engine.scheduler import Scheduler
from workbench.trace import KernelLaunch, StepRecord

if TYPE_CHECKING:
    import mlx.core as mx

log = logging.getLogger("workbench")

T = TypeVar("T")
Phases = Generator[tuple[str, Any], bool | None, StepRecord]
"""The phases of a step: they yield (name, what was made), and are sent whether to stop at layers from there on."""


class Pipeline:
    """Takes a step phase by phase.

    Args:
        scheduler: Chooses what is computed.
        runner: Runs the model once.
        sampler: Chooses tokens.
        book: Takes texts and results of requests.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, sampler: Sampler, book: RequestBook) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self.book = book

    def _pack(self, batch: ScheduledBatch) -> PackedBatch:
        return prepare_unified(batch, self.scheduler.config.block_size, previous=self.runner.latest)

    def step(self) -> Phases:
        """One step: a generator that stops after each phase and returns the record.

        Yields:
            ("schedule", ScheduledBatch), ("prepare", PackedBatch), ("forward", logits), ("sample", sampled tokens).
            When True is sent in between, also ("layer 0", LayerCapture), ("layer 1", LayerCapture), ... before
            "forward". An exception in a phase ends the requests of the batch with reason "error", and no others.
        """
        timings: dict[str, float] = {}

        def timed(phase: str, work: Callable[[], T]) -> T:
            start = time.perf_counter()
            result = work()
            timings[phase] = timings.get(phase, 0.0) + time.perf_counter() - start
            return result

        batch = timed("schedule", self.scheduler.schedule)
        yield "schedule", batch
        kernel: KernelLaunch | None = None
        sampled: list[SampledToken] = []
        try:
            if batch.chunks:
                packed: PackedBatch = timed("prepare", lambda: self._pack(batch))
                logits: mx.array
                if (yield "prepare", packed):
                    with closing(ForwardByLayer(self.runner, packed, batch.step)) as forward:
                        while (layer := timed("forward", forward.advance)) is not None:
                            if not (yield f"layer {layer.layer}", layer):
                                forward.stop_no_more()
                        logits = forward.logits
                else:
                    logits = timed("forward", lambda: self.runner.forward(packed))
                kernel = self.runner.kernel_launch(packed)
                yield "forward", logits
                requests = [chunk.request for chunk in batch.chunks if chunk.samples]
                sampled = timed("sample", lambda: self.sampler.sample(logits, requests))
                yield "sample", sampled
        except Exception as problem:
            log.exception("step %d failed; its requests end with finish_reason 'error'", batch.step)
            record = self.scheduler.fail(batch)
            for chunk in batch.chunks:
                self.book[chunk.request.request_id].error = f"{type(problem).__name__}: {problem}"
        else:

            def update() -> StepRecord:
                tokens, texts, finish = self.book.accept(batch, sampled)
                return self.scheduler.update(batch, tokens, texts=texts, finish=finish, timings=timings, kernel=kernel)

            record = timed("update", update)
        self.book.settle(record)
        return record
