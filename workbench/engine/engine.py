"""The engine: a real model, one scheduler step at a time."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import msgspec

from workbench.base.compatibility import ADAPTERS, ENGINE, Feature, check_compatible
from workbench.base.device import Device, default_device, hold_device
from workbench.base.field_checks import integer
from workbench.base.installed import installed_version
from workbench.base.keyword_fields import ConfigChanges, ConfigFields, PolicyName, SamplingFields
from workbench.base.named_fields import show_fields
from workbench.base.on_demand import find, picture, with_attached_methods
from workbench.base.progress import end_bar, progress_bar
from workbench.config import EngineConfig, SamplingParams
from workbench.engine.compiling import MAX_COMPARED_ROWS, Compiling, start, taken_over, why_wait
from workbench.engine.failed_steps import FailedSteps
from workbench.engine.input_processor import TokensPrompt, make_config, process_input, resolve_config
from workbench.engine.live import LIVE
from workbench.engine.model_runner import ModelRunner
from workbench.engine.output_processor import OutputProcessor, RequestOutput, RequestState
from workbench.engine.outputs import Outputs, OutputsByRequest
from workbench.engine.sampler import Sampler
from workbench.engine.shortcuts import Shortcuts
from workbench.engine.stages import StepPart
from workbench.engine.step import MIN_KEEP_BYTES, MIN_KEEP_STEPS, Step, Stepper
from workbench.engine.thread import EngineThread, RunLoop
from workbench.models.capture import LayerCapture
from workbench.models.load import Activations, LoadedModel, Weights, device_for, load_model
from workbench.scheduler.policy import SchedulingPolicy, described
from workbench.scheduler.request import Request
from workbench.scheduler.scheduler import Scheduler
from workbench.trace import StepRecord, Supplement, Trace, TraceMeta
from workbench.trace.readings.breakpoints import Breakpoint, Breakpoints, Condition

if TYPE_CHECKING:
    from workbench.engine.async_step import AsyncStepper
    from workbench.engine.grammar import Grammar, GrammarCompiler
    from workbench.engine.packed_batch import PackedBatch
    from workbench.engine.shadow_once import ShadowRun
    from workbench.engine.speculation.custom import DraftFunction
    from workbench.engine.speculation.proposer import Drafts
    from workbench.kernels.msl import KernelRun
    from workbench.models.layer_cache import AttentionCall
    from workbench.models.tokenizer import Tokenizer
    from workbench.trace.laws import Broken
    from workbench.trace.records import WorkItem

log = logging.getLogger("workbench")

NOTHING_TO_DO = "nothing to do: no request is waiting or running; add one with add_request()"


@with_attached_methods
class Engine(Shortcuts):
    """An LLM engine you can look inside.

    Args:
        model: "smollm2" (bundled), a GGUF file, an MLX or Hugging Face folder, a repository name, or a LoadedModel.
        config: Limits and policies; defaults suit a notebook.
        policy: A SchedulingPolicy that decides order, chunk sizes and victims, or a word that EngineConfig knows;
            None for vLLM's rules.
        keep_steps: Maximum number of steps that the trace keeps, for an engine that runs for long: when it is reached,
            the older half is forgotten, and ``trace`` is another object from then on. None keeps every step.
        keep_bytes: The same for its estimated size in memory, of which prompts are a large part.
        draft_model: A smaller model with the same vocabulary, for speculative decoding: like ``model``.
        proposer: A function ``propose(token_ids, num_drafts)`` for speculative decoding, which returns at most
            ``num_drafts`` token ids that it expects next.
        weights: "packed" or "float32", see `load_model`; not for a LoadedModel, whose weights are what they are.
        activations: "float32" or "int8", see `load_model`; not for a LoadedModel.
        device: "cpu", "gpu" or "auto", see `load_model`; a LoadedModel is computed where it was loaded for. MLX has one
            device per process: an engine for the other one is refused until this one is closed.
        chat_template: A chat template in place of the model's, see `load_model`; not for a LoadedModel.
        ignore_config_keys: Keys of the model's files that are accepted without effect, see `load_model`; not for a
            LoadedModel.
        wait_for_compiled: Compile what is not kept from an earlier start before the first step. By default, a small
            model on a CPU begins layer by layer and changes to compiled code when another process has compiled it
            (`workbench.engine.compiling`).
        clock: Returns seconds since any moment, and never less than before: the clock of every time in the trace. None
            for ``time.perf_counter``.
        check_laws: Check the laws (`workbench.trace.laws`) after every step; ``broken_laws`` and the log have what is
            broken.
        **config_fields: Fields of EngineConfig by name, instead of ``config`` or on top of it.

    Attributes:
        config: The configuration with ``max_model_len`` resolved.
        model: The model, its tokenizer and facts about it.
        runner: Runs the model; ``runner.mode`` says how its attention is served.
        device: The device that it computes on, "cpu" or "gpu".
        breakpoints: Conditions that stop ``run()`` and ``start()``, see ``break_when``.
        broken_laws: The laws that steps broke, with ``check_laws``.
        scheduler: The scheduler, to look at; call ``peek_next_batch`` and the methods here rather than its own.

    Raises:
        ValueError: A configuration the model cannot serve.
        UnsupportedModelError: A model the preflight cannot serve, with the reason.

    Example:
        >>> engine = Engine("smollm2", max_num_batched_tokens=64)
        >>> engine.add_request("The capital of France is", SamplingParams(max_tokens=8))
        'r0'
        >>> step = engine.step()
        >>> step.chunks[0].num_tokens
        5
        >>> engine.run(progress=False)[0].finish_reason
        'length'
    """

    _situations: tuple[Feature, ...] = ()

    def __init__(
        self,
        model: str | Path | LoadedModel = "smollm2",
        config: EngineConfig | None = None,
        *,
        policy: SchedulingPolicy | PolicyName | str | None = None,
        keep_steps: int | None = None,
        keep_bytes: int | None = None,
        draft_model: str | Path | LoadedModel | None = None,
        proposer: DraftFunction | None = None,
        weights: Weights | None = None,
        activations: Activations | None = None,
        device: Device = "auto",
        chat_template: str | Path | None = None,
        ignore_config_keys: Collection[str] = (),
        wait_for_compiled: bool = False,
        clock: Callable[[], float] | None = None,
        check_laws: bool = False,
        **config_fields: Unpack[ConfigFields],
    ) -> None:
        fields: dict[str, Any] = {**config_fields}
        if isinstance(policy, str):
            fields["policy"], policy = policy, None
        config = make_config(config, fields)
        loading: dict[str, Any] = {"weights": weights, "activations": activations, "chat_template": chat_template}
        loading["ignore_config_keys"] = ignore_config_keys
        options = {name: value for name, value in loading.items() if value}
        if options and isinstance(model, LoadedModel):
            given = ", ".join(f"{name}={value!r}" for name, value in options.items())
            raise ValueError(f"{given} has no effect on a LoadedModel: pass it to load_model()")
        if keep_steps is not None:
            integer("keep_steps", keep_steps, MIN_KEEP_STEPS, 2**31 - 1)
        if keep_bytes is not None:
            integer("keep_bytes", keep_bytes, MIN_KEEP_BYTES, 2**63 - 1)
        drafting: dict[str, Any] = {"draft_model": draft_model, "proposer": proposer}
        if config.num_speculative_tokens or any(each is not None for each in drafting.values()):
            from workbench.engine.speculation.make import with_method

            config = with_method(config, draft_model, proposer)
        check_compatible(config, "engine", ENGINE, *self._situations)
        self._let_go_of_device = hold_device(
            self, str(getattr(model, "name", model)), device_for(device, model, draft_model)
        )
        self.device = default_device()
        window = {"keep_steps": keep_steps, "keep_bytes": keep_bytes}
        self._thread = EngineThread("workbench-engine")
        self._given_clock, self._started = clock, 0.0
        self._compiler: GrammarCompiler | None = None
        self._making_compiler = threading.Lock()
        self._started, self._created = self._clock(), time.time()
        self.breakpoints = Breakpoints()
        self.broken_laws: list[Broken] = []
        self._checks_laws = check_laws
        self._compiling: Compiling | None = None
        waits = wait_for_compiled or bool(drafting["draft_model"]) or bool(self._situations)
        self._runs_first = not waits and not why_wait(model, config, options, self.device)
        try:
            self._thread.call(lambda: self._load(model, config, policy, window, drafting, options))
        except BaseException:
            self._let_go_of_device()  # a notebook keeps the engine of its last error alive
            raise
        self._arriving: set[str] = set()  # requests that the next step puts into the queue
        self._idle_since = 0  # the number of steps when step() or run() last found nothing to do
        self._loop = RunLoop(
            self._thread, self._stepper.take, self._step.inbox, self.breakpoints, self._step.failed.add
        )
        LIVE.add(self)

    def _load(
        self,
        model: str | Path | LoadedModel,
        config: EngineConfig,
        policy: SchedulingPolicy | None,
        window: Mapping[str, int | None],
        drafting: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        if self._runs_first and not isinstance(model, LoadedModel):
            self.model, self.runner, self._compiling = start(model, config, options)
        else:
            self.model = model if isinstance(model, LoadedModel) else load_model(model, **options)
            self.config = resolve_config(config, self.model)
            self.runner = self._make_runner()
        # With the model's KV cache groups, and the number of blocks that "auto" stands for.
        self.config = self.runner.config
        self.scheduler = self._make_scheduler(policy)
        self._outputs = OutputProcessor(self.model)
        trace = Trace(
            TraceMeta(
                source="engine",
                config=described(self.config, policy),
                model=self.runner.describe(),
                versions=_versions(),
                created=self._created,
            )
        )
        sampler = Sampler(self.config.seed, self.config.record_top_tokens)
        shadow = None
        if self.config.shadow_metal is not None:
            from workbench.engine.shadow import start_shadow

            shadow = start_shadow(self.config, self.runner)
        speculator = None
        if self.config.num_speculative_tokens:
            from workbench.engine.speculation.make import make_speculator

            speculator = make_speculator(self.config, self.model, sampler, **drafting)
        parts = (self.scheduler, self.runner, sampler, self._outputs, trace)
        self._step = self._make_step(*parts, shadow=shadow, speculator=speculator)
        for part in self._make_parts(**window):
            self._step.join(part)
        self._stepper: Stepper | AsyncStepper
        if self._compiling is not None:
            self._step.listeners.append(partial(_change_when_compiled, weakref.ref(self)))
        if self.config.async_scheduling:
            from workbench.engine.async_step import AsyncStepper

            self._stepper = AsyncStepper(self._step)
        else:
            self._stepper = Stepper(self._step)

    def _change_when_compiled(self, record: StepRecord) -> None:
        """After a step, let compiled code take over, if it is there and both ways can be compared by that step."""
        compiling, packed, runner = self._compiling, self._step.packed, self.runner
        if compiling is None or compiling.loaded is None or packed is None or record.kernel is None:
            return
        watched = any(layer.taps for layer in runner.kv_cache.kernel_layers)
        if watched or not 0 < len(packed.logits_rows) <= MAX_COMPARED_ROWS:
            return
        loaded = compiling.loaded
        made = taken_over(runner, loaded, packed)
        if isinstance(made, str):
            compiling.finish("failed", made)
            return
        self._step.run_with(made)
        self.runner = made
        runner.close()
        self.model.become(loaded)
        made.loaded = self.model
        compiling.finish(f"done: steps after step {record.step} run {made.path.name}")

    def _make_scheduler(self, policy: SchedulingPolicy | None) -> Scheduler:
        if not self._checks_laws:
            return Scheduler(self.config, clock=self._clock, policy=policy)
        from workbench.scheduler.checked import CheckedScheduler

        def report(broken: Sequence[Broken]) -> None:
            self.broken_laws.extend(broken)
            for each in broken:
                log.error("a law is broken: %s", each)

        return CheckedScheduler(self.config, clock=self._clock, policy=policy, on_broken=report)

    def _make_runner(self) -> ModelRunner:
        """Make the model runner; an engine over several ranks has another."""
        return ModelRunner(self.model, self.config, one_table=False)

    def _make_step(self, *parts: Any, **options: Any) -> Step:
        """Make the step; an engine in lockstep with others has another."""
        return Step(*parts, **options)

    def _make_parts(self, keep_steps: int | None, keep_bytes: int | None) -> Iterator[StepPart]:
        """The features of the configuration that take part in every step."""
        step = self._step
        if step.speculator is not None:
            from workbench.engine.speculation.part import Speculation

            yield Speculation(step.speculator, step.sampler, self.scheduler)
        if self.config.record_top_tokens:
            from workbench.engine.keeping import TopTokens

            yield TopTokens(self._outputs)
        if step.shadow is not None:
            yield step.shadow
        if keep_steps is not None or keep_bytes is not None:  # last: it may begin another trace
            from workbench.engine.keeping import Window

            yield Window(self.scheduler, keep_steps, keep_bytes)

    def _join_for(self, request: Request) -> None:
        """Let the features that a request needs, not a configuration, take part in the steps."""
        kinds = {type(part).__name__ for part in self._step.parts}
        if request.grammar is not None and "Masks" not in kinds:
            from workbench.engine.grammar import Masks

            self._step.join(Masks(self._outputs))
        if request.sampling.prompt_logprobs is not None and "PromptRows" not in kinds:
            from workbench.engine.prompt_logprobs import PromptRows

            self._step.join(PromptRows(self._outputs.add_prompt_logprobs))

    @property
    def trace(self) -> Trace:
        """The record of every step so far, or of the newest ``keep_steps`` or ``keep_bytes``; always on."""
        trace = self._step.trace
        drift = round(time.time() - self._created - self._clock(), 2)
        if self._given_clock is None:  # there is a drift if the wall clock was set, or the machine slept
            trace.clock_drift = drift or msgspec.UNSET
        return trace

    @property
    def sampler(self) -> Sampler:
        """Chooses tokens; holds the engine's seed."""
        return self._step.sampler

    @property
    def runs_on(self) -> str:
        """The device and the kernel, such as "Metal kernel on Apple M3"."""
        return self.runner.runs_on

    def _clock(self) -> float:
        """Seconds since the engine was made; monotonic, so a change of the wall clock does not show."""
        return (self._given_clock or time.perf_counter)() - self._started

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
        prompt: str | Sequence[int] | Sequence[dict[str, str]] | TokensPrompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        **sampling_fields: Unpack[SamplingFields],
    ) -> str:
        """Queue a request. It is checked here and scheduled by the next step.

        Args:
            prompt: Text, token ids, chat messages ({"role": ..., "content": ...}) for the chat template, or token ids
                with their text, as vLLM's TokensPrompt ({"prompt_token_ids": ..., "prompt": ...}).
            sampling: Sampling and stop parameters.
            request_id: Its name; "r0", "r1", ... by default.
            priority: Smaller is served first under policy "priority".
            cache_salt: Only requests with the same salt find each other's blocks in the prefix cache. Traces show it.
            adapter: Name of an adapter (`add_adapter`) to compute it with; "" for the model alone.
            **sampling_fields: Fields of SamplingParams by name, such as ``max_tokens=32``, instead of ``sampling``.

        Returns:
            The request id.

        Raises:
            TypeError: There is no such sampling field.
            ValueError: An empty or too long prompt, an unknown token id, an id in use, or a request that the KV
                pool could never hold. Nothing is queued then.

        Example:
            >>> engine = Engine("smollm2", num_blocks=64)
            >>> engine.add_request("The capital of France is", max_tokens=8, temperature=0.7, seed=3)
            'r0'
            >>> engine.add_request([{"role": "user", "content": "Why is the sky blue?"}], request_id="sky")
            'sky'
        """
        self._thread.check_open()
        sampling = replace(sampling or SamplingParams(), **sampling_fields) if sampling_fields else sampling
        sampling = sampling or SamplingParams()
        text, token_ids = process_input(
            prompt,
            sampling,
            self.config,
            self.model,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            projects_in_slices=self.runner.path.projects_in_slices,
        )
        if adapter:
            self.runner.adapters.check(adapter)
            adapter = self.runner.adapters.version(adapter)
        grammar = self._compile(sampling, len(token_ids)) if sampling.structured_outputs else None
        try:
            state = self._outputs.add_request(
                text,
                token_ids,
                sampling,
                request_id=request_id,
                priority=priority,
                arrival_time=self._clock(),
                cache_salt=cache_salt,
                adapter=adapter,
            )
        except BaseException:
            if grammar is not None:
                grammar.release()
            raise
        state.request.grammar = grammar
        if grammar is not None or sampling.prompt_logprobs is not None:
            self._step.inbox.append(lambda: self._join_for(state.request))
        arriving, name = self._arriving, state.request.request_id
        arriving.add(name)
        self._step.inbox.extend([lambda: self._enqueue(state), lambda: arriving.discard(name)])
        return name

    def add_adapter(self, name: str, path: str | Path) -> None:
        """Make an adapter (LoRA) available to requests, ``add_request(..., adapter=name)``.

        Its files are checked now. With ``max_loras`` as many stay in memory; another one is read when a step needs it,
        and takes the place of the one that was not needed for the longest time.

        Args:
            name: Its name; the prefix cache keeps adapters apart by it. If other files are there when an adapter is
                read again, new requests are computed with them, and their records name it "NAME@DIGEST".
            path: A folder with ``adapter_config.json``, and ``adapters.safetensors`` as mlx-lm writes them or
                ``adapter_model.safetensors`` as PEFT does.

        Raises:
            ValueError: The name is in use, a file is damaged, the adapter changes a layer that the model does not have
                or that is not a linear layer of it, or its rank is above ``max_lora_rank``.
            RuntimeError: The engine runs in the background: pause() it first.
        """
        if name == self.name:
            raise ValueError(f"name {name!r} is the model's: choose another name")
        if self._loop.running:
            raise RuntimeError("an adapter cannot be added while the engine runs in the background: pause() it first")
        check_compatible(self.config, "call", ADAPTERS, *self._situations)
        self._thread.call(lambda: self.runner.adapters.add(name, path))

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that requests can have."""
        return self.runner.adapters.names

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles the grammars of requests (``structured_outputs``); made when one is needed."""
        if self._compiler is None:
            from workbench.engine.grammar import GrammarCompiler

            with self._making_compiler:
                self._compiler = self._compiler or GrammarCompiler(self.model)
        return self._compiler

    @property
    def failed_steps(self) -> FailedSteps:
        """The steps that raised."""
        return self._step.failed

    def grammars_at_work(self) -> list[dict[str, Any]]:
        """The grammars that are being compiled, or wait for it: kind, characters, seconds so far, and state."""
        return self._compiler.texts.at_work() if self._compiler is not None else []

    def _compile(self, sampling: SamplingParams, num_prompt_tokens: int) -> Grammar | None:
        return self.grammars.compile(sampling, num_prompt_tokens)

    def _enqueue(self, state: RequestState) -> None:
        state.request.arrival_step = self.scheduler.step
        self.scheduler.add_request(state.request)
        self._step.trace.add_request(msgspec.structs.replace(state.info, arrival_step=self.scheduler.step))

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its blocks come back then. A finished request stays as it is.

        Raises:
            ValueError: There is no such request.
        """
        if self._outputs[request_id].finish_reason is None:
            self._step.inbox.append(lambda: self._abort(request_id))

    def _abort(self, request_id: str) -> None:
        if self.scheduler.abort_request(request_id):
            self._outputs[request_id].finish_reason = "abort"

    def forget(self, request_id: str) -> None:
        """Drop the output of a request that has ended, for an engine that runs for long; its trace stays.

        Raises:
            ValueError: There is no such request, or it has not ended.
        """
        self._outputs.forget(request_id)

    def output(self, request_id: str) -> RequestOutput:
        """The output of a request so far.

        Raises:
            ValueError: There is no such request.
        """
        return self._outputs[request_id].output()

    @property
    def outputs(self) -> OutputsByRequest:
        """Every request's output so far, by request id, in order of arrival."""
        outputs = {request_id: state.output() for request_id, state in list(self._outputs.states.items())}
        return OutputsByRequest(outputs, self.trace)

    # -- one step ---------------------------------------------------------------------------------------------

    def step(self) -> StepRecord | None:
        """Take one scheduler step.

        Returns:
            The record of the step, or None when there is nothing to do, said in the log from the second time on.
        """
        return self._thread.call(self._stepper.take) or self._no_step()

    def step_into(self, *, layers: bool = True) -> tuple[str, Any] | StepRecord | None:
        """Take one phase of a step: "schedule", "prepare", "layer 0", ..., "forward", "sample", then the record.

        With structured output, "mask" comes before "sample". The forward pass stops after the attention of each layer,
        inside the model's own code. A model whose attention does its own arithmetic
        (``engine.runner.mode == "gather"``) runs it in one piece.

        Args:
            layers: Stop at the next layer; False stops at the end of the forward pass.

        Returns:
            The phase's name and what it made (ScheduledBatch, PackedBatch, a LayerCapture for each layer, logits, the
            allowed tokens by row of logits, sampled tokens), the StepRecord after the last phase, or None when there is
            nothing to do. ``step()`` and ``run()`` finish a step that was begun.

        Example:
            >>> name, batch = engine.step_into()
            >>> name, batch.chunks[0].num_tokens
            ('schedule', 5)
            >>> name, packed = engine.step_into()
            >>> name, packed.cu_seqlens_q.tolist()
            ('prepare', [0, 5])
        """
        return self._thread.call(lambda: self._stepper.advance(stop_at_layers=layers))

    @property
    def phase(self) -> tuple[str, Any] | None:
        """The latest result of ``step_into()`` until its step is complete, then None. Any thread may read it."""
        return self._stepper.phase

    @property
    def drafts(self) -> Mapping[str, Drafts]:
        """By request the drafts that the next step verifies; between the phases of a step those that it verifies."""
        speculator = self._step.speculator
        return speculator.drafts if speculator is not None else {}

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
            >>> capture.weights(row=4).shape  # heads, context
            (9, 5)
        """
        caches = self.runner.kv_cache.kernel_layers
        if self.runner.mode != "kernel":
            raise ValueError(f"layers of {self.name!r} cannot be captured: its attention does its own arithmetic")
        if not caches:
            raise ValueError(f"{self.name!r} has no attention layer to capture")
        if not isinstance(layer, int) or not 0 <= layer < len(caches):
            raise ValueError(f"layer must be from 0 to {len(caches) - 1}, got {layer!r}")
        capture = LayerCapture(layer)

        def keep(call: AttentionCall) -> None:
            caches[layer].taps.remove(keep)
            packed = self._step.packed
            capture.fill(self._step.computing, call, packed.request_ids if packed is not None else ())

        caches[layer].taps.append(keep)
        return capture

    def shadow(self, step: StepRecord | int | None = None, *, layer: int = 0) -> ShadowRun:
        """Run the newest step's attention through the Metal source as well, on the emulator, and compare the results.

        The step's own queries, keys, values and block tables are taken. The launch, with the blocks that each
        threadgroup read, becomes the step's supplement "shadow", which views show; the first launch of a step does.

        Args:
            step: The newest step, or its index; None for it. Older ones cannot be run again, because their blocks may
                have other contents: ``EngineConfig(shadow_metal=...)`` does the same in every step.
            layer: Index of the layer.

        Raises:
            ValueError: It is not the newest step, or cannot be run again; the message gives the reason.

        Example:
            >>> step = engine.step()
            >>> engine.shadow(step, layer=3).agrees
            True
        """
        from workbench.engine.shadow_once import shadow_once

        def run() -> ShadowRun:
            newest, packed = self._newest_step(step, layer)
            made = shadow_once(self.runner, newest, packed, layer)
            if self.trace.supplement(newest.step, "shadow") is None:
                self.trace.add_supplement(Supplement(newest.step, "shadow", made.facts))
            return made

        return self._thread.call(run)

    def kernel_run(self, item: int | WorkItem = 0, step: StepRecord | int | None = None, **options: Any) -> KernelRun:
        """Record the threadgroup of the Metal kernel that computes a work item of a step, on the emulator.

        Of the newest step, the step's own queries, keys and values are taken. An older one is computed again over the
        blocks that its record names, with the steps before it as far as it reads what they wrote; the engine waits
        meanwhile. Blocks have their numbers in the pool.

        Args:
            item: The work item: its index in the kernel's own work list, or an item of ``step.kernel.work_items``, for
                which the kernel's item with the same first row and KV position is taken.
            step: The step, or its index; None for the newest.
            **options: Arguments of `workbench.engine.kernel_run.kernel_run`: ``layer``, ``kv_head`` and ``watch``.

        Raises:
            ValueError: The step cannot be computed again, or there is no such item; the message gives the reason.
        """
        from workbench.engine.kernel_run import kernel_run
        from workbench.engine.replay import attention_call
        from workbench.engine.shadow_once import call_of

        layer = options.get("layer", 0)
        asked = step.step if isinstance(step, StepRecord) else step

        def run() -> KernelRun:
            if asked is None or not len(self.trace) or asked == self.trace[-1].step:
                newest, packed = self._newest_step(step, layer)
                return kernel_run(call_of(self.runner, packed, layer), newest, item, **options)
            older = next((one for one in self.trace if one.step == asked), None)
            if older is None or not older.chunks:
                held = self.trace.steps_in_words
                raise ValueError(f"step {asked} has computed nothing, or is not in the trace, which holds {held}")
            adapters = self.runner.adapters.folders
            call = attention_call(self.trace, older, self.model, layer, config=self.config, adapters=adapters)
            return kernel_run(call, older, item, **options, made="computed again")

        return self._thread.call(run)

    def _newest_step(self, step: StepRecord | int | None, layer: int) -> tuple[StepRecord, PackedBatch]:
        """The newest step and its batch, if it can be run again.

        Raises:
            ValueError: It cannot, or another step is asked for.
        """
        from workbench.engine.shadow_once import why_no_shadow

        asked = step.step if isinstance(step, StepRecord) else step
        newest = self.trace[-1] if len(self.trace) else None
        if newest is None or self._stepper.in_step:
            raise ValueError("no step to run again: finish one first, with run() if steps are asynchronous")
        if asked not in (None, newest.step):
            raise ValueError(
                f"step {asked} is not the newest one, which is {newest.step}: only that can be run again; "
                'EngineConfig(shadow_metal={"layer": 0, "every": 1}) does so in every step'
            )
        packed = self._step.packed
        if reason := why_no_shadow(self.runner, newest, packed, layer):
            raise ValueError(f"no shadow launch: {reason}")
        assert packed is not None
        return newest, packed

    # -- many steps -------------------------------------------------------------------------------------------

    def run(self, *, progress: bool = True) -> Outputs:
        """Step until every request has ended.

        Ctrl-C stops after the current step, and says which one that was; run() continues from there.

        Args:
            progress: Show a progress bar of the tokens still to compute, of prompts and outputs ("in+out").

        Returns:
            The outputs of the requests that ended and were not returned by an earlier run(), in order of arrival: a
            list, which a notebook draws as a table.

        Example:
            >>> [(output.request_id, output.finish_reason) for output in engine.run(progress=False)]
            [('r0', 'length')]
        """
        # Without smoothing the rate is that of the whole run.
        left = self._outputs.num_tokens_left
        with progress_bar(left(), self.name, " in+out tok", shown=progress, smoothing=0) as bar:

            def show_state() -> None:
                state = f"{self.scheduler.num_running} running, {self.scheduler.num_waiting} waiting"
                bar.set_postfix_str(state, refresh=False)

            def show(record: StepRecord) -> None:
                bar.update(record.num_tokens - sum(len(chunk.drafts) - chunk.num_accepted for chunk in record.chunks))
                show_state()

            try:
                self._loop.run(after_step=show)
            except KeyboardInterrupt:
                step = self.trace[-1].step if len(self.trace) else "none"
                raise KeyboardInterrupt(f"stopped after step {step}: run() continues from there") from None
            # Requests that stop early or are computed twice make the estimate wrong: end the bar where the run ends.
            show_state()
            end_bar(bar, left())
        self._idle_since = self.scheduler.step
        return Outputs(self._outputs.take_ended(), self.trace)

    def start(self) -> None:
        """Run in the background until there is nothing to do, or until pause(); returns at once.

        A warning is logged when there is nothing to do already.
        """
        if self.state == "idle":
            log.warning("%s, then call start() again", NOTHING_TO_DO)
        self._loop.start()

    def _no_step(self) -> StepRecord | None:
        """None; a call after the end of the run is logged, but not the end of ``while engine.step():``."""
        if self._idle_since == self.scheduler.step:
            log.warning("%s", NOTHING_TO_DO)
        self._idle_since = self.scheduler.step
        return None

    def pause(self) -> None:
        """Stop a background run after the current step, and wait for it."""
        self._loop.pause()

    def on_step(self, listener: Callable[[StepRecord], None]) -> Callable[[], None]:
        """Call a function with the record of every step, on the engine's thread, before the next step is taken.

        Args:
            listener: Must be quick: the engine waits for it. It may add and abort requests. Its exceptions are logged.

        Returns:
            A function that ends it.

        Example:
            >>> sizes = []
            >>> stop = engine.on_step(lambda step: sizes.append(step.num_tokens))
            >>> outputs = engine.run(progress=False)
            >>> sizes
            [5, 1, 1, 1]
        """
        listeners = self._step.listeners
        listeners.append(listener)
        return lambda: listeners.remove(listener) if listener in listeners else None

    def before_step(self, work: Callable[[], None]) -> None:
        """Call a function once on the engine's thread, between two steps; an idle engine does so when it is started.

        Args:
            work: Must be quick and must not raise: the engine waits for it.
        """
        self._step.inbox.append(work)

    def break_when(self, condition: str | Condition, label: str = "") -> Breakpoint:
        """Stop run() and start() after a step for which a condition holds; they continue from there when called again.

        Args:
            condition: "preemption", "free_blocks < 8", "num_kv_computed[r3] >= 1024", "block 17", "finish", or a
                function that is called with each StepRecord.
            label: A name for a function.

        Returns:
            The breakpoint; ``breakpoints.remove(number)`` takes it back.

        Raises:
            ValueError: The condition is not understood.

        Example:
            >>> breakpoint = engine.break_when(lambda step: step.num_decode_tokens, "a decode")
            >>> outputs = engine.run(progress=False)
            >>> engine.stopped_by
            "'a decode' at step 1"
        """
        return self.breakpoints.add(condition, label)

    @property
    def stopped_by(self) -> str:
        """The breakpoint that stopped the latest run, and its step; "" if none did."""
        stop = self.breakpoints.stopped_by
        return f"{stop[1]!r} at step {stop[0]}" if stop else ""

    @property
    def state(self) -> str:
        """One of "running" (in the background or in run()), "paused" (work is left) and "idle"."""
        if self._loop.running:
            return "running"
        return "paused" if self._step.inbox or self.scheduler.has_unfinished_requests() else "idle"

    def stream(self, prompt: str | Sequence[int], sampling: SamplingParams | None = None) -> Iterator[str]:
        """Add a request and give its text as it grows, taking steps as needed.

        Other requests of the engine advance too. Text that might be the beginning of a stop string is held back.

        Example:
            >>> "".join(engine.stream("The capital of France is", SamplingParams(max_tokens=2)))
            ' Paris.'
        """
        return self._growing_text(self._outputs[self.add_request(prompt, sampling)])

    def _growing_text(self, state: RequestState) -> Iterator[str]:
        held_back = max((len(stop) for stop in state.request.sampling.stop), default=1) - 1
        done = 0
        output = state.output()
        while output.finish_reason is None:
            if self._loop.running:
                time.sleep(0.01)
            else:
                self.step()
            output = state.output()
            upto = len(output.text) - (held_back if output.finish_reason is None else 0)
            if upto > done:
                yield output.text[done:upto]
                done = upto

    def peek_next_batch(self) -> tuple[bool, int]:
        """Whether the next step holds a prefill, and how many tokens it has; nothing is changed but the queue."""

        def peek() -> tuple[bool, int]:
            if not self._stepper.in_step:
                self._step.empty_inbox()
            return self.scheduler.peek_next_batch()

        return self._thread.call(peek)

    def fork(self, at_step: int = 0, **config_changes: Unpack[ConfigChanges]) -> Trace:
        """Simulate the same arrivals and the same sampled tokens under another configuration ("what if").

        Args:
            at_step: The first step under the new configuration.
            **config_changes: EngineConfig fields to change.

        Returns:
            The trace of the simulated run, from step 0.

        Example:
            >>> steps = engine.run(progress=False)
            >>> len(engine.trace), len(engine.fork(max_num_batched_tokens=2))
            (4, 6)
        """
        trace: Trace = find("Trace.fork")(self.trace, at_step, **config_changes)
        return trace

    @property
    def closed(self) -> bool:
        """Whether the engine was closed: it takes no steps, and its trace stays readable."""
        return self._thread.closed

    def close(self) -> None:
        """Stop after the current step and end the engine's thread. The trace stays readable."""
        if self._thread.is_forked:
            return
        self._loop.pause_soon()
        if self._stepper.in_step:
            self._thread.call(self._stepper.give_up)
        if self._step.shadow is not None:
            self._step.shadow.close()
        if self._compiler is not None:
            self._compiler.close()
        if self._compiling is not None:
            self._compiling.close()
        self._stepper.close()
        self._thread.close()
        self.runner.close()
        if self._step.speculator is not None:
            self._step.speculator.close()
        self._let_go_of_device()
        if not self.scheduler.has_unfinished_requests():
            self.trace.end = "done"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _num_waiting(self) -> int:
        """Number of waiting requests, with those that the next step puts into the queue."""
        return self.scheduler.num_waiting + len(self._arriving)

    # -- how it looks -----------------------------------------------------------------------------------------

    def __str__(self) -> str:
        config, scheduler = self.config, self.scheduler
        return (
            f"{self.name!r}; {self.runs_on}; {self.state}: step {scheduler.step}, "
            f"{scheduler.num_running} running, {self._num_waiting} waiting, "
            f"{scheduler.num_free_blocks} of {config.num_usable_blocks} KV blocks of {config.block_size} tokens free"
        )

    def __repr__(self) -> str:
        return f"Engine({self})"

    def _repr_html_(self) -> str | None:
        return picture("Engine", self)

    def __panel__(self) -> Any:
        """The live view as a Panel component, for ``pn.panel(engine)`` and layouts."""
        return find("Engine.__panel__")(self)

    def describe(self) -> dict[str, Any]:
        """The way the engine serves its model, by name; a trace has the facts about the runner in ``meta.model``.

        Returns:
            Among others ``runs_on``, the device and the kernel, such as "Metal kernel on Apple M3"; ``forward``, the
            way through the model ("compiled", "replayed", "layer by layer" or "gathering"), and ``forward_not_taken``,
            the faster ones with the reason why the model cannot take them. If the engine began before its code was
            compiled, "compiling" has the state, the functions so far, and the reason if that failed. Besides, "files"
            has what was made of each key of the model's files, "thinking" whether the model is asked to think if a
            request does not say, and "template_leaves_out" the texts that the chat template loses.

        Example:
            >>> engine.describe()["attention_mode"]
            'kernel'
        """
        compiling = {"compiling": self._compiling.facts} if self._compiling is not None else {}
        return {**self.runner.describe(), **compiling, **self.model.described_files()}

    def facts(self) -> dict[str, Any]:
        """Facts about the engine and its progress by name, for the views."""
        from workbench.base.blas import backend_info

        scheduler = self.scheduler
        return {
            "model": self.name,
            "runs_on": self.runs_on,
            "state": self.state,
            "step": scheduler.step,
            "running": scheduler.num_running,
            "waiting": self._num_waiting,
            "free_blocks": scheduler.num_free_blocks,
            "usable_blocks": self.config.num_usable_blocks,
            "backend": self.runner.backend_name,
            "attention": self.runner.mode,
            "blas": backend_info(),
        }


show_fields(EngineConfig, Engine.__init__, Engine.fork)
show_fields(SamplingParams, Engine.add_request)


def _change_when_compiled(engine: weakref.ref[Engine], record: StepRecord) -> None:
    """See the method; a listener that does not keep the engine alive."""
    if (alive := engine()) is not None:
        alive._change_when_compiled(record)


def _versions() -> dict[str, str]:
    import workbench

    packages = {package: installed_version(package) or "unknown" for package in ("mlx", "mlx-lm", "numpy")}
    return {"workbench": workbench.__version__, **packages}
