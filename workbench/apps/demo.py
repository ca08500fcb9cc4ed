"""The requests of ``workbench demo``: a long document, and questions that arrive while it prefills.

The document is the Declaration of Independence of 1776, abridged (``demo_document.txt``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.tables import terminal_width, wrapped
from workbench.config import EngineConfig, SamplingParams
from workbench.trace.readings.narrate import narrate_briefly

if TYPE_CHECKING:
    from workbench.engine.engine import Engine
    from workbench.trace import StepRecord

# The threshold leaves a few tokens of each step to the questions, which prefill beside the document and have to wait.
CONFIG = EngineConfig(
    max_num_batched_tokens=192,
    max_num_seqs=16,
    block_size=16,
    num_blocks=512,
    long_prefill_token_threshold=176,
    record_top_tokens=5,
)

LONG_QUESTION = "What does this document declare? Answer in two sentences."

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

    # A model with a short context gets a shorter prompt.
    yield 0, "long", ask(document(engine, engine.model.max_position // 2)), SamplingParams(max_tokens=49)
    for step, questions in QUESTIONS.items():
        for request_id, question in questions.items():
            yield step, request_id, ask(question), SamplingParams(max_tokens=64)


def document(engine: Engine, max_tokens: int) -> str:
    """The long prompt: the document, cut to about a number of tokens, and a question."""
    text = (Path(__file__).parent / "demo_document.txt").read_text(encoding="utf-8")
    return f"{text[: 4 * max_tokens]}\n\n{LONG_QUESTION}"  # a token has about 4 characters


SENTENCE_AT = 20
"""Columns before a sentence that is continued in a further line."""


class Arrivals:
    """Adds the demo's requests to an engine when their steps come, and prints a line for every step.

    The first of them arrive with `begin`: those that wait for a browser would be slow for a reason of no engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending = deque(demo_requests(engine))
        engine.on_step(self._after_step)

    def begin(self) -> None:
        """Add the requests that arrive before the first step."""
        self._add_due(0)

    def _add_due(self, step: int) -> None:
        while self._pending and self._pending[0][0] <= step:
            _, request_id, prompt, sampling = self._pending.popleft()
            try:
                self._engine.add_request(prompt, sampling, request_id=request_id)
            except RuntimeError:  # the engine was closed in the middle of a step, as Ctrl-C does
                if not self._engine.closed:
                    raise
                self._pending.clear()

    def _after_step(self, record: StepRecord) -> None:
        with suppress(BrokenPipeError):  # behind ``head``
            print(*wrapped(describe(record), terminal_width(), indent=SENTENCE_AT), sep="\n", flush=True)
        self._add_due(record.step + 1)
        if self._pending and not self._engine.scheduler.has_unfinished_requests():
            self._add_due(self._pending[0][0])


def describe(step: StepRecord) -> str:
    """A step in one line: its number, its duration, and `narrate_briefly`."""
    return f"step {step.step:3d}  {step.duration * 1000:6.0f} ms  {narrate_briefly(step)}"
