"""The engine: a real model, one scheduler step at a time."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from workbench.engine.config import EngineConfig, SamplingParams
from workbench.engine.engine_thread import EngineThread
from workbench.engine.model_runner import ModelRunner
from workbench.engine.outputs import RequestOutput
from workbench.engine.pipeline import Phases, Pipeline
from workbench.engine.policy import SchedulingPolicy, described
from workbench.engine.request_book import Entry, RequestBook
from workbench.engine.run_loop import RunLoop
from workbench.engine.sampler import Sampler
from workbench.engine.scheduler import Scheduler
from workbench.engine.shadow import start_shadow
from workbench.engine.step_under_way import StepUnderWay
from workbench.engine.trace_window import TraceWindow
from workbench.engine.validation import resolve_config
from workbench.models.capture import LayerCapture
from workbench.models.load import LoadedModel, load_model
from workbench.trace import StepRecord, Trace, TraceMeta
from workbench.trace.breakpoints import Breakpoint, Breakpoints, Condition

if TYPE_CHECKING:
    from workbench.models.paged_cache import AttentionCall
    from workbench.models.tokenizer import Tokenizer

log = logging.getLogger("workbench")


class Engine:
    """An inference engine that can be opened.

    Args:
        model: "smollm2" (bundled), a GGUF file, an MLX or Hugging Face folder, a repository name, or a LoadedModel.
        config: Limits and policies; defaults suit a notebook.
        policy: A SchedulingPolicy that decides order, chunk sizes and victims; None for vLLM's rules.
        keep_steps: Steps that the trace keeps at most, for an engine that runs for long: when there are as many, the
            older half is forgotten, and ``trace`` is another object from then on. None keeps every step.

    Attributes:
        config: The configuration with ``max_model_len`` resolved.
        trace: The record of every step so far, or of the newest ``keep_steps``; always on.
        breakpoints: Conditions that stop ``run()`` and ``start()``, see ``break_when``.
        scheduler: The scheduler, to look at; call ``peek_next_batch`` and the methods here rather than its own.

    Raises:
        ValueError: A configuration the model cannot serve.
        UnsupportedModelError: A model the preflight cannot serve, with the reason.

    Example:
        >>> engine = Engine("smollm2", EngineConfig(max_num_batched_tokens=64))
        >>> engine.add_request("The capital of France is", SamplingParams(max_tokens=8))
        'r0'
        >>> step = engine.step()
        >>> step.chunks[0].num_tokens
        5
        >>> engine.run(progress=False)[0].finish_reason
        'length'
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = "smollm2",
        config: EngineConfig | None = None,
        *,
        policy: SchedulingPolicy | None = None,
        keep_steps: int | None = None,
    ) -> None:
        self._thread = EngineThread("workbench-engine")
        self._started = time.perf_counter()
        self._inbox: deque[Callable[[], None]] = deque()
        self._listeners: list[Callable[[StepRecord], None]] = []
        self.breakpoints = Breakpoints()
        self._loop = RunLoop(self._thread, self._inbox, self.breakpoints)
        self._under_way = StepUnderWay()
        self._thread.call(lambda: self._load(model, config or EngineConfig(), policy, keep_steps))

    def _load(
        self,
        model: str | Path | LoadedModel,
        config: EngineConfig,
        policy: SchedulingPolicy | None,
        keep_steps: int | None,
    ) -> None:
        self.model = model if isinstance(model, LoadedModel) else load_model(model)
        self.config = resolve_config(config, self.model)
        self.runner = self._make_runner()
        self.scheduler = Scheduler(self.config, clock=self._clock, policy=policy)
        self._window = TraceWindow(keep_steps, self.scheduler)
        self.sampler = Sampler(self.config.seed)
        self._book = RequestBook(self.model, self.config)
        self._pipeline = Pipeline(self.scheduler, self.runner, self.sampler, self._book)
        self._shadow = start_shadow(self.config, self.runner)
        self.trace = Trace(
            TraceMeta(
                source="engine",
                config=described(self.config, policy),
                model=self.runner.describe(),
                versions=_versions(),
                created=time.time(),
            )
        )

    def _make_runner(self) -> ModelRunner:
        """What runs the model; an engine over several ranks has another."""
        return ModelRunner(self.model, self.config)

    def _clock(self) -> float:
        """Seconds since the engine was made; monotonic, so a change of the wall clock does not show."""
        return time.perf_counter() - self._started

    # -- requests --------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer: ``encode(str)``, ``decode(ids)``, ``apply_chat_template(messages)``."""
        if self.model.tokenizer is None:
            raise ValueError(f"model {self.name!r} came without a tokenizer: give prompts as lists of token ids")
        return self.model.tokenizer

    def add_request(
        self,
        prompt: str | Sequence[int] | Sequence[dict[str, str]],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **sampling_fields: Any,
    ) -> str:
        """Queue a request. It is checked here and scheduled by the next step.

        Args:
            prompt: Text, token ids, or chat messages ({"role": ..., "content": ...}) for the chat template.
            sampling: How to sample and when to stop.
            request_id: A name of your own; "r0", "r1", ... by default.
            priority: Smaller is served first under policy "priority".
            **sampling_fields: Fields of SamplingParams by name, such as ``max_tokens=32``, instead of ``sampling``.

        Returns:
            The request id.

        Raises:
            TypeError: There is no such sampling field.
            ValueError: An empty or too long prompt, an unknown token id, an id in use, or a request that the KV
                pool could never hold. Nothing is queued then.
        """
        sampling = replace(sampling or SamplingParams(), **sampling_fields) if sampling_fields else sampling
        entry = self._book.add(prompt, sampling or SamplingParams(), request_id, priority, self._clock())
        self._inbox.append(lambda: self._enqueue(entry))
        return entry.request.request_id

    def _enqueue(self, entry: Entry) -> None:
        entry.request.arrival_step = self.scheduler.step
        self.scheduler.add_request(entry.request)
        self.trace.add_request(entry.request.info(entry.prompt))

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its blocks come back then. A finished request stays as it is.

        Raises:
            ValueError: There is no such request.
        """
        _ = self._book[request_id]
        self._inbox.append(lambda: self._abort(request_id))

    def _abort(self, request_id: str) -> None:
        if self.scheduler.abort_request(request_id):
            self._book[request_id].finish_reason = "abort"

    def forget(self, request_id: str) -> None:
        """Drop the output of a request that has ended, for an engine that runs for long; its trace stays.

        Raises:
            ValueError: There is no such request, or it has not ended.
        """
        self._book.forget(request_id)

    def output(self, request_id: str) -> RequestOutput:
        """What a request has produced so far.

        Raises:
            ValueError: There is no such request.
        """
        return self._book[request_id].output()

    @property
    def outputs(self) -> dict[str, RequestOutput]:
        """Every request's output so far, by request id, in order of arrival."""
        return {request_id: entry.output() for request_id, entry in list(self._book.entries.items())}

    # -- one step ---------------------------------------------------------------------------------------------

    def step(self) -> StepRecord | None:
        """Take one scheduler step.

        Returns:
            The record of the step, or None when there is nothing to do.
        """
        return self._thread.call(self._step)

    def _step(self) -> StepRecord | None:
        record = self._under_way.finish(self._begin)
        return None if record is None else self._finish(record)

    def step_into(self, *, layers: bool = True) -> tuple[str, Any] | StepRecord | None:
        """Take one phase of a step: "schedule", "prepare", "layer 0", ..., "forward", "sample", then the record.

        The forward pass stops after the attention of each layer, inside the model's own code. A model whose attention
        does its own arithmetic (``engine.runner.mode == "gather"``) runs it in one piece.

        Args:
            layers: Stop at the next layer; False goes on to the end of the forward pass.

        Returns:
            The phase's name and what it made (ScheduledBatch, PackedBatch, a LayerCapture for each layer, logits,
            sampled tokens), the StepRecord after the last phase, or None when there is nothing to do. ``step()`` and
            ``run()`` finish a step that was begun.

        Example:
            >>> name, batch = engine.step_into()
            >>> name, batch.chunks[0].num_tokens
            ('schedule', 5)
            >>> name, packed = engine.step_into()
            >>> name, packed.cu_seqlens_q.tolist()
            ('prepare', [0, 5])
        """

        def advance() -> tuple[str, Any] | StepRecord | None:
            made = self._under_way.advance(self._begin, stop_at_layers=layers)
            return self._finish(made) if isinstance(made, StepRecord) else made

        return self._thread.call(advance)

    @property
    def phase(self) -> tuple[str, Any] | None:
        """What ``step_into()`` gave last while its step is not over, for whoever looks on; None otherwise."""
        return self._under_way.phase

    def _empty_inbox(self) -> None:
        """Do what was asked since the last step; never in the middle of one, whose requests must stay as they are."""
        while self._inbox:
            self._inbox.popleft()()

    def _begin(self) -> Phases | None:
        self._empty_inbox()
        return self._next_step()

    def _next_step(self) -> Phases | None:
        # An abort that leaves nothing to do is in a record too, one without chunks, or nobody would learn of it.
        return self._pipeline.step() if self.scheduler.has_unfinished_requests() or self.scheduler.aborted else None

    def _finish(self, record: StepRecord) -> StepRecord:
        if self._shadow is not None:
            self._shadow.attach(record)
        self.trace.append(record)
        self.trace = self._window.after_step(self.trace)
        for listener in list(self._listeners):
            try:
                listener(record)
            except Exception:  # who looks on must not stop the engine
                log.exception("a listener failed in step %d", record.step)
        return record

    def capture(self, layer: int) -> LayerCapture:
        """Keep what an attention layer is handed and gives back in the next step.

        Args:
            layer: Index of the layer.

        Returns:
            A LayerCapture that the next step fills: q, k, v, out, and ``weights(row)``.

        Raises:
            ValueError: There is no such layer, or this model's attention is its own (mode "gather").

        Example:
            >>> capture = engine.capture(layer=3)
            >>> step = engine.step()
            >>> capture.weights(row=4).shape            # heads, context
            (9, 5)
        """
        caches = self.runner.kv_cache.layers
        if self.runner.mode != "kernel":
            raise ValueError(f"layers of {self.name!r} cannot be captured: its attention does its own arithmetic")
        if not isinstance(layer, int) or not 0 <= layer < len(caches):
            raise ValueError(f"layer must be from 0 to {len(caches) - 1}, got {layer!r}")
        capture = LayerCapture(layer)

        def keep(call: AttentionCall) -> None:
            caches[layer].taps.remove(keep)
            capture.fill(self.scheduler.step - 1, call, self.runner.latest.request_ids)

        caches[layer].taps.append(keep)
        return capture

    # -- many steps -------------------------------------------------------------------------------------------

    def run(self, *, progress: bool = True) -> list[RequestOutput]:
        """Step until every request has ended.

        Ctrl-C stops after the step that is under way; the engine can go on from there.

        Args:
            progress: Show a progress bar of the tokens still to compute.

        Returns:
            The outputs of the requests that ended and were not returned by an earlier run(), in order of arrival.
        """
        with tqdm(total=self._book.num_tokens_left(), desc=self.name, unit="tok", disable=not progress) as bar:

            def show(record: StepRecord) -> None:
                bar.update(record.num_tokens)
                bar.set_postfix_str(f"{len(record.running)} running, {len(record.waiting)} waiting", refresh=False)

            self._loop.run(self._step, after_step=show)
            # Requests that stopped early, or were computed twice, make the estimate wrong; the end is the end.
            bar.total = bar.n + self._book.num_tokens_left()
            bar.refresh()
        return self._book.take_ended()

    def start(self) -> None:
        """Run in the background until there is nothing to do, or until pause(); returns at once."""
        self._loop.start(self._step)

    def pause(self) -> None:
        """Stop a background run after the step that is under way, and wait for it."""
        self._loop.pause()

    def on_step(self, listener: Callable[[StepRecord], None]) -> Callable[[], None]:
        """Call a function with the record of every step, on the engine's thread, before the next step is taken.

        Args:
            listener: Must be quick: the engine waits for it. It may add and abort requests. What it raises is logged.

        Returns:
            A function that ends it.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def before_step(self, work: Callable[[], None]) -> None:
        """Call a function once on the engine's thread, between two steps; an idle engine does so when it is started.

        Args:
            work: Must be quick and must not raise: the engine waits for it.
        """
        self._inbox.append(work)

    def break_when(self, condition: str | Condition, label: str = "") -> Breakpoint:
        """Stop run() and start() after a step for which a condition holds; they go on from there when called again.

        Args:
            condition: "preemption", "free_blocks < 8", "num_kv_computed[r3] >= 1024", "block 17", "finish", or a
                function that is called with each StepRecord.
            label: What to call a function.

        Returns:
            The breakpoint; ``breakpoints.remove(number)`` takes it back.

        Raises:
            ValueError: The condition is not understood.
        """
        return self.breakpoints.add(condition, label)

    @property
    def stopped_by(self) -> str:
        """Which breakpoint stopped the latest run, and at which step; "" when none did."""
        stop = self.breakpoints.stopped_by
        return f"{stop[1]!r} at step {stop[0]}" if stop else ""

    @property
    def state(self) -> str:
        """One of "running" (in the background or in run()), "paused" (work is left) and "idle"."""
        if self._loop.running:
            return "running"
        return "paused" if self._inbox or self.scheduler.has_unfinished_requests() else "idle"

    def stream(self, prompt: str | Sequence[int], sampling: SamplingParams | None = None) -> Iterator[str]:
        """Add a request and give its text as it grows, taking steps as needed.

        Other requests of the engine advance too. Text that might be the beginning of a stop string is held back.
        """
        return self._growing_text(self._book[self.add_request(prompt, sampling)])

    def _growing_text(self, entry: Entry) -> Iterator[str]:
        held_back = max((len(stop) for stop in entry.request.sampling.stop), default=1) - 1
        done = 0
        output = entry.output()
        while output.finish_reason is None:
            if self._loop.running:
                time.sleep(0.01)
            else:
                self.step()
            output = entry.output()
            upto = len(output.text) - (held_back if output.finish_reason is None else 0)
            if upto > done:
                yield output.text[done:upto]
                done = upto

    def peek_next_batch(self) -> tuple[bool, int]:
        """Whether the next step holds a prefill, and how many tokens it has; nothing is changed but the queue."""

        def peek() -> tuple[bool, int]:
            if not self._under_way.begun:
                self._empty_inbox()
            return self.scheduler.peek_next_batch()

        return self._thread.call(peek)

    def fork(self, at_step: int = 0, **config_changes: Any) -> Trace:
        """What if: the same arrivals and the same sampled tokens under another configuration, simulated.

        Args:
            at_step: The first step under the new configuration.
            **config_changes: EngineConfig fields to change.

        Returns:
            The trace of the simulated run, from step 0.
        """
        from workbench.engine.fork import fork

        return fork(self.trace, at_step, **config_changes)

    def watch(self, **options: Any) -> Any:
        """A live view of the engine for a notebook cell; each call makes a new view.

        Args:
            **options: ``panels``, ``theme`` and ``other`` of `workbench.viz.widget.watch`.
        """
        from workbench.viz import watch

        return watch(self, **options)

    def close(self) -> None:
        """Stop after the step under way and end the engine's thread. The trace stays readable."""
        self._loop.pause_soon()
        if self._under_way.begun:
            self._thread.call(self._under_way.give_up)
        if self._shadow is not None:
            self._shadow.close()
        self._thread.close()
        self.runner.close()
        if not self.scheduler.has_unfinished_requests():
            self.trace.end = "done"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- how it looks -----------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        config, scheduler = self.config, self.scheduler
        return (
            f"Engine({self.name!r}, {self.runner.backend_name} attention, {self.state}: step {scheduler.step}, "
            f"{scheduler.num_running} running, {scheduler.num_waiting} waiting, "
            f"{scheduler.num_free_blocks} of {config.num_blocks - 1} KV blocks free)"
        )

    def _repr_html_(self) -> str:
        from workbench.viz.reprs import engine_html

        return engine_html(self.facts(), self.trace)

    def facts(self) -> dict[str, Any]:
        """What the engine is and where it stands, by name, for the views."""
        from workbench.blas import backend_info

        scheduler = self.scheduler
        return {
            "model": self.name,
            "state": self.state,
            "step": scheduler.step,
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "free_blocks": scheduler.num_free_blocks,
            "usable_blocks": self.config.num_blocks - 1,
            "backend": self.runner.backend_name,
            "attention": self.runner.mode,
            "blas": backend_info(),
        }


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    import workbench

    return {
        "workbench": workbench.__version__,
        **{package: version(package) for package in ("mlx", "mlx-lm", "numpy")},
    }
