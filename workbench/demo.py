"""The demo: a real model serving real requests, seen step by step."""

from __future__ import annotations

import contextlib
import pydoc_data.topics
import sys
from collections import deque
from typing import TYPE_CHECKING

from workbench.engine.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workbench.distributed.job import MakeEngine
    from workbench.engine.engine import Engine
    from workbench.models.load import LoadedModel
    from workbench.trace import StepRecord

# The threshold keeps the long prompt from taking whole steps, so that short ones prefill beside it.
CONFIG = EngineConfig(
    max_num_batched_tokens=256, max_num_seqs=16, block_size=16, num_blocks=512, long_prefill_token_threshold=160
)

LONG_TOPIC, LONG_PROMPT_TOKENS = "execmodel", 1500
SHORT_TOPICS = {0: ("strings",), 1: ("lists",), 2: ("while", "import"), 3: ("lambda",), 5: ("assert",), 8: ("global",)}
"""The short prompts by the step before which they arrive, while the long one prefills."""

QUESTION = "Explain in one short paragraph what this says."


Prompt = str | list[dict[str, str]]


def demo_requests(engine: Engine) -> Iterator[tuple[int, str, Prompt, SamplingParams]]:
    """The demo's requests as (arrival step, request id, prompt, sampling).

    The texts are Python's own documentation (``pydoc_data.topics``), which every Python has.
    """

    def ask(topic: str, characters: int) -> Prompt:
        text = f"{QUESTION}\n\n{pydoc_data.topics.topics[topic][:characters]}"
        return [{"role": "user", "content": text}] if engine.tokenizer.has_chat_template else text

    # About 4 characters to a token; less where the model's context is short.
    characters = 4 * min(LONG_PROMPT_TOKENS, engine.config.max_model_len // 2)
    yield 0, "long", ask(LONG_TOPIC, characters), SamplingParams(max_tokens=32)
    for step, topics in SHORT_TOPICS.items():
        for topic in topics:
            yield step, topic, ask(topic, 420), SamplingParams(max_tokens=48)


def describe(step: StepRecord) -> str:
    """One line per step: what was packed, what waited, what it took."""
    prefill = ", ".join(f"{c.request_id}[{c.start}:{c.end}]" for c in step.chunks if c.arm != "decode")
    decodes = sum(c.arm == "decode" for c in step.chunks)
    tokens = f"{step.num_tokens:4d} token" + ("s" if step.num_tokens != 1 else "")
    parts = [tokens, f"{decodes} decode" + ("s" if decodes != 1 else "")]
    if prefill:
        parts.append(f"prefill {prefill}")
    for label, names in (("preempted", step.preempted), ("finished", step.finished)):
        if names:
            parts.append(f"{label} {', '.join(names)}")
    return f"step {step.step:3d}  {sum(step.timings.values()) * 1000:6.0f} ms  " + " | ".join(parts)


class Arrivals:
    """Adds the demo's requests to an engine as their steps come, and prints a line for every step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending = deque(demo_requests(engine))
        self._add_due(0)
        engine.on_step(self._after)

    def _add_due(self, step: int) -> None:
        while self._pending and self._pending[0][0] <= step:
            _, request_id, prompt, sampling = self._pending.popleft()
            self._engine.add_request(prompt, sampling, request_id=request_id)

    def _after(self, record: StepRecord) -> None:
        print(describe(record), flush=True)
        self._add_due(record.step + 1)
        if self._pending and not self._engine.scheduler.has_unfinished_requests():
            self._add_due(self._pending[0][0])


def run_headless(model: str) -> int:
    """Run the demo's requests, print every text and a summary; the exit status."""
    from workbench.distributed.job import run_job

    def lead(_model: LoadedModel, make_engine: MakeEngine) -> int:
        with make_engine(CONFIG) as engine:
            print(engine, flush=True)
            Arrivals(engine)
            engine.run(progress=False)
            outputs = engine.outputs.values()
            for output in outputs:
                print(f"\n{output.request_id} ({len(output.prompt_token_ids)} prompt tokens, {output.finish_reason}):")
                print("  " + output.text.strip().replace("\n", "\n  "))
            print("\n" + str(engine.trace.metrics()))
        return 1 if any(output.finish_reason == "error" for output in outputs) else 0

    return run_job(model, lead)


def run_served(model: str, port: int) -> int:
    """Serve the dashboard over a running engine until Ctrl-C; the exit status."""
    from workbench.distributed.job import run_job
    from workbench.viz.app import serve

    def lead(_model: LoadedModel, make_engine: MakeEngine) -> int:
        with make_engine(CONFIG) as engine:
            print(engine, flush=True)
            Arrivals(engine)
            engine.start()
            print(f"dashboard: http://127.0.0.1:{port}", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                serve(engine, port=port, title="Workbench")
        print("stopped", file=sys.stderr)
        return 0

    return run_job(model, lead)
