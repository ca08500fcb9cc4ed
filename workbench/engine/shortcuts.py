"""Short ways to use an engine: an answer to a question, texts for prompts, a view."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Unpack

from workbench.base.keyword_fields import SamplingFields
from workbench.base.named_fields import show_fields
from workbench.base.on_demand import find
from workbench.config import SamplingParams
from workbench.engine.outputs import Outputs
from workbench.models.tokenizer import ChatTemplateError

if TYPE_CHECKING:
    from workbench.trace import Trace

CHAT_MAX_TOKENS = 256
"""Maximum number of tokens of an answer unless the caller says otherwise."""

Prompt = str | Sequence[int] | Sequence[dict[str, str]]


@dataclass(frozen=True)
class Answer:
    """An answer of `Engine.ask`, with the steps that computed it.

    Attributes:
        text: The answer.
        request_id: Id of its request.
        trace: The trace of the engine.
        steps: The part of the trace from the question to the end of the answer.
    """

    text: str
    request_id: str
    trace: Trace
    steps: Trace

    def __repr__(self) -> str:
        return repr(find("Trace.explain")(self.trace, self.request_id))

    def _repr_html_(self) -> str:
        explanation = find("Trace.explain")(self.trace, self.request_id)
        causes = explanation._repr_html_() or f"<pre>{escape(repr(explanation))}</pre>"
        return f"{causes}{self.steps._repr_html_() or ''}"


class Shortcuts:
    """The part of `Engine` that is made of its other methods."""

    def generate(self: Any, prompts: Prompt | Sequence[Prompt], **sampling: Unpack[SamplingFields]) -> Outputs:
        """Add prompts and take steps until each has its output. Other requests of the engine advance too.

        Args:
            prompts: A list of prompts, or one prompt: text, token ids or chat messages as `add_request` takes them.
            **sampling: Fields of SamplingParams by name, the same for all prompts.

        Returns:
            The outputs in the order of the prompts: a list, which a notebook draws as a table.

        Raises:
            TypeError: There is no such sampling field.
            ValueError: As `add_request` raises it, before any prompt is queued twice; prompts before the refused one
                are aborted.

        Example:
            >>> [output.text for output in engine.generate(["The capital of France is"], max_tokens=1)]
            [' Paris']
        """
        request_ids: list[str] = []
        try:
            for prompt in _as_list(prompts):
                request_ids.append(self.add_request(prompt, **sampling))
        except Exception:
            for request_id in request_ids:
                self.abort(request_id)
            raise
        return self._finish(request_ids)

    def chat(self: Any, messages: str | Sequence[dict[str, str]], **sampling: Unpack[SamplingFields]) -> str:
        """The model's answer to a message, through its chat template.

        Args:
            messages: A message of the user, or the conversation so far as {"role": ..., "content": ...}.
            **sampling: Fields of SamplingParams by name; ``max_tokens`` is 256 unless the context or the KV pool ends
                earlier.

        Raises:
            ChatTemplateError: The model has no chat template.
            TypeError: There is no such sampling field.
            ValueError: As `add_request` raises it.

        Example:
            >>> engine.chat("What is the capital of France?", max_tokens=8)
            'The capital of France is Paris.'
        """
        (output,) = self._finish([self._add_message(messages, sampling)])
        return output.text.strip()

    def ask(self: Any, question: str | Sequence[dict[str, str]], **sampling: Unpack[SamplingFields]) -> Answer:
        """Print the model's answer word by word, then show the steps that computed it.

        Args:
            question: A message of the user, or a conversation, as `chat` takes them.
            **sampling: As `chat` takes them.

        Returns:
            The answer. A notebook draws its steps; a terminal shows where its time went.

        Raises:
            ChatTemplateError: The model has no chat template.
            TypeError: There is no such sampling field.
            ValueError: As `add_request` raises it.

        Example:
            >>> answer = engine.ask("What is the capital of France?", max_tokens=8)
            The capital of France is Paris.
            >>> answer.text
            'The capital of France is Paris.'
        """
        begin = self.scheduler.step
        request_id = self._add_message(question, sampling)
        state = self._outputs[request_id]
        words: list[str] = []
        for word in self._growing_text(state):
            words.append(word if words else word.lstrip())
            print(words[-1], end="", flush=True)
        print()
        state.returned = True
        self._idle_since = self.scheduler.step
        num_steps = self.scheduler.step - begin
        return Answer("".join(words).strip(), request_id, self.trace, self.trace[max(0, len(self.trace) - num_steps) :])

    def _add_message(self: Any, messages: str | Sequence[dict[str, str]], sampling: dict[str, Any]) -> str:
        """Add a conversation as a request; returns its id."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        tokenizer = self.tokenizer
        if not tokenizer.has_chat_template:
            raise ChatTemplateError(f"{self.name!r} has no chat template: use generate(), which continues a text")
        if "max_tokens" not in sampling and "sampling" not in sampling:
            num_prompt_tokens = len(tokenizer.encode(tokenizer.apply_chat_template(list(messages))))
            slots = (self.config.num_blocks - 1) * self.config.block_size
            room = min(self.config.max_model_len or slots, slots + 1) - num_prompt_tokens
            sampling["max_tokens"] = max(1, min(CHAT_MAX_TOKENS, room))
        request_id: str = self.add_request(messages, **sampling)
        return request_id

    def _finish(self: Any, request_ids: Sequence[str]) -> Outputs:
        """Take steps, or wait for a background run that does, until requests have ended."""
        states = [self._outputs[request_id] for request_id in request_ids]
        while any(state.finish_reason is None for state in states):
            if self._loop.running:
                time.sleep(0.005)
            else:
                self.step()
        for state in states:
            state.returned = True
        self._idle_since = self.scheduler.step
        return Outputs([state.output() for state in states], self.trace)


show_fields(SamplingParams, Shortcuts.generate, Shortcuts.chat, Shortcuts.ask)


def _as_list(prompts: Any) -> list[Any]:
    """A list of prompts from a list or from one prompt.

    Raises:
        ValueError: It is empty or neither.
    """
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise ValueError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
    if len(prompts) == 0:
        raise ValueError("prompts is empty: give at least one prompt")
    one = isinstance(prompts[0], dict) or (hasattr(prompts[0], "__index__") and not hasattr(prompts[0], "__len__"))
    return [prompts] if one else list(prompts)
