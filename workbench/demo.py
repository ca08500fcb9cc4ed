"""The requests of ``workbench demo``: a long document, and questions that arrive while it prefills.

The document is a page of Python's own documentation (``pydoc_data.topics``), which every Python has.
"""

from __future__ import annotations

import pydoc_data.topics
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from workbench.config import EngineConfig, SamplingParams
from workbench.trace.narrate import narrate_briefly

if TYPE_CHECKING:
    from workbench.engine.engine import Engine
    from workbench.trace import StepRecord

# The threshold leaves a few tokens of each step to the questions, which prefill beside the document and have to wait.
CONFIG = EngineConfig(
    max_num_batched_tokens=192, max_num_seqs=16, block_size=16, num_blocks=512, long_prefill_token_threshold=176
)

LONG_TOPIC, LONG_PROMPT_TOKENS = "execmodel", 1500
LONG_QUESTION = "Explain in one short paragraph what this says."

QUESTIONS = {
    0: {"paris": "What is the capital of France?"},
    1: {"week": "How many days are there in a week?"},
    2: {"sky": "Why is the sky blue?", "seasons": "List the four seasons."},
    3: {"leaves": "What is photosynthesis?"},
}
"""Short questions that the bundled model answers well, by request id, by the step before which they arrive."""

Prompt = str | list[dict[str, str]]


def demo_requests(engine: Engine) -> Iterator[tuple[int, str, Prompt, SamplingParams]]:
    """The demo's requests as (arrival step, request id, prompt, sampling)."""

    def ask(text: str) -> Prompt:
        return [{"role": "user", "content": text}] if engine.tokenizer.has_chat_template else text

    # A token has about 4 characters. A model with a short context gets a shorter prompt.
    num_characters = 4 * min(LONG_PROMPT_TOKENS, engine.model.max_position // 2)
    document = pydoc_data.topics.topics[LONG_TOPIC][:num_characters]
    yield 0, "long", ask(f"{LONG_QUESTION}\n\n{document}"), SamplingParams(max_tokens=48)
    for step, questions in QUESTIONS.items():
        for request_id, question in questions.items():
            yield step, request_id, ask(question), SamplingParams(max_tokens=64)


class Arrivals:
    """Adds the demo's requests to an engine when their steps come, and prints a line for every step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending = deque(demo_requests(engine))
        self._add_due(0)
        engine.on_step(self._after_step)

    def _add_due(self, step: int) -> None:
        while self._pending and self._pending[0][0] <= step:
            _, request_id, prompt, sampling = self._pending.popleft()
            self._engine.add_request(prompt, sampling, request_id=request_id)

    def _after_step(self, record: StepRecord) -> None:
        print(describe(record), flush=True)
        self._add_due(record.step + 1)
        if self._pending and not self._engine.scheduler.has_unfinished_requests():
            self._add_due(self._pending[0][0])


def describe(step: StepRecord) -> str:
    """A step in one line: its number, its duration, and `narrate_briefly`."""
    return f"step {step.step:3d}  {sum(step.timings.values()) * 1000:6.0f} ms  {narrate_briefly(step)}"
