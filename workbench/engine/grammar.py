"""Structured output: grammars that llguidance compiles, and the tokens that they allow at each position.

A request's grammar is compiled beside the engine, and the scheduler lets the request wait until then, as in vLLM. From
there on the grammar follows the tokens that are known: a step masks the rows of a chunk with the tokens that may come
after the output so far, and after each of its drafts. Drafts are taken back at once, so a rejected one never counts. In
asynchronous steps a batch is masked when the output of the batch before it is known.

Grammars come from clients, and both compiling and masks may take any time. So llguidance runs in a process for each
text, which can be ended (`workbench.engine.grammar_texts`). A step asks for its masks before the forward pass, and then
waits for them no longer than `grammar_host.Patience` allows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from workbench.base.text import duration
from workbench.config import SamplingParams
from workbench.engine.grammar_form import first_line, text_of
from workbench.engine.grammar_host import GrammarHost, MaskWait, Patience
from workbench.engine.grammar_process import FAILED, WORN
from workbench.engine.grammar_texts import GrammarText, GrammarTexts
from workbench.engine.output_processor import OutputProcessor
from workbench.engine.sampler import Logits
from workbench.engine.stages import Computed, Stage, StepPart
from workbench.models.load import LoadedModel
from workbench.models.tokenizer import Tokenizer
from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.request import Request

ENDED = "it took too much memory, or its process was ended"


class Grammar:
    """The grammar of one request.

    Args:
        text: Its text, which other requests may have too.
        number: Tells the requests of a text apart.
        num_prompt_tokens: Tokens of the request that it does not apply to.
        vocab_size: Number of logits in a row.
        texts: The texts that it is one of.
    """

    def __init__(
        self, text: GrammarText, number: int, num_prompt_tokens: int, vocab_size: int, texts: GrammarTexts
    ) -> None:
        self.text = text
        self._texts = texts
        self._number = number
        self._num_consumed = num_prompt_tokens
        self._vocab_size = vocab_size
        self._new: list[int] = []
        self._asked: int | None = None
        self._has_asked = False
        self._is_released = False

    @property
    def is_ready(self) -> bool:
        """Whether it has been compiled."""
        return self.text.is_ready

    @property
    def error(self) -> str:
        """Why it cannot be used; "" if nothing is wrong."""
        return self.text.failure

    def wait(self) -> None:
        """Wait until it is ready, or cannot be compiled."""
        with contextlib.suppress(ValueError):
            wait_for(self.text.compiled)

    def release(self) -> None:
        """Let others have what it holds: the request has ended."""
        if self._is_released:
            return
        self._is_released = True
        process = self.text.process
        if process is not None and self._has_asked:
            with contextlib.suppress(OSError):
                process.tell("forget", self._number)
        self._texts.leave(self.text)

    def ask(self, token_ids: Sequence[int], drafts: Sequence[int]) -> None:
        """Begin to compute the masks that ``masks`` returns for the same tokens.

        Raises:
            ValueError: The grammar cannot be used any more.
        """
        if self._asked is not None:  # for a step that was given up
            self._answer(self._asked, self.text.patience.wait())
        self._follow(token_ids)
        self._asked = self._ask("masks", drafts)

    def masks(self, token_ids: Sequence[int], drafts: Sequence[int], wait: MaskWait | None = None) -> list[np.ndarray]:
        """The tokens that are allowed after a request's tokens, and after each of its drafts.

        Args:
            token_ids: Prompt and output.
            drafts: The drafts that the step verifies.
            wait: The step's wait for masks.

        Returns:
            bool [vocab_size] for the last token and for each draft, up to the first draft that is not allowed: what
            comes after that one is thrown away.

        Raises:
            ValueError: The output is not what the grammar allows, or has become too complex for it.
        """
        if self._asked is None:
            self.ask(token_ids, drafts)
        asked, self._asked = self._asked, None
        assert asked is not None
        found = np.frombuffer(self._answer(asked, wait or self.text.patience.wait()), np.uint8)
        rows = np.unpackbits(found.reshape(-1, -(-self._vocab_size // 8)), axis=1, bitorder="little")
        return [row[: self._vocab_size].view(bool) for row in rows]

    def num_valid(self, token_ids: Sequence[int], drafts: Sequence[int]) -> int:
        """Number of leading drafts that the grammar allows after a request's tokens."""
        self._follow(token_ids)
        return int(self._answer(self._ask("valid", drafts), self.text.patience.wait()))

    def _follow(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that have become known."""
        if len(token_ids) > self._num_consumed:
            self._new += token_ids[self._num_consumed :]
            self._num_consumed = len(token_ids)

    def _ask(self, question: str, drafts: Sequence[int]) -> int:
        process = self.text.process
        if process is None:
            raise ValueError(self.error)
        tokens, self._new = self._new, []
        self._has_asked = True
        try:
            return process.ask(question, self._number, tokens, drafts)
        except OSError:
            raise self._fail(ENDED, remember=False) from None

    def _answer(self, asked: int, wait: MaskWait) -> bytes:
        process = self.text.process
        if process is None:
            raise ValueError(self.error)
        try:
            answer = process.answer(asked, wait)
        except TimeoutError:
            allowed = f"allowed are {duration(wait.limit)}"
            raise self._fail(f"the tokens that it allows take too long to find ({allowed})", remember=True) from None
        except (EOFError, OSError):
            raise self._fail(ENDED, remember=False) from None
        if answer[:1] == FAILED:
            raise ValueError(f"structured_outputs: the grammar cannot continue: {first_line(answer[1:].decode())}")
        process.is_worn = process.is_worn or answer[:1] == WORN
        return answer[1:]

    def _fail(self, problem: str, *, remember: bool) -> ValueError:
        sentence = f"structured_outputs: the grammar cannot continue: {problem}"
        self._texts.fail(self.text, sentence, remember=remember)
        return ValueError(sentence)


class GrammarCompiler:
    """Compiles the grammars of one model's requests.

    Args:
        model: The model, whose tokens a grammar allows or not.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.texts = GrammarTexts(GrammarHost(lambda: vocabulary_of(model)))
        self._num_grammars = 0

    def join(self, wanted: Mapping[str, Any], client: str = "") -> GrammarText:
        """The text of ``SamplingParams.structured_outputs`` for one more user, who has to leave it; see `GrammarTexts`.

        Args:
            wanted: The form of the output.
            client: Clients take turns when many texts wait.

        Raises:
            ValueError: It is too large, or cannot be read; or the model has no tokenizer, or no token that ends an
                output.
        """
        if self._model.tokenizer is None or not self._model.eos_token_ids:
            raise ValueError("structured_outputs needs a model with a tokenizer and an end-of-sequence token")
        return self.texts.join(*text_of(wanted), client)

    def compile(self, sampling: SamplingParams, num_prompt_tokens: int) -> Grammar | None:
        """The grammar of a request, checked here and compiled meanwhile; None if its output is free.

        Ctrl-C ends the wait, and the check with it.

        Raises:
            ValueError: It is not valid, or too large; or the model has no tokenizer, or no token that ends an output.
        """
        wanted = sampling.structured_outputs
        if not wanted:
            return None
        text = self.join(wanted)
        try:
            wait_for(text.validated)
            if text.failure:
                raise ValueError(text.failure)
        except BaseException:
            self.leave(text)
            raise
        self._num_grammars += 1
        return Grammar(text, self._num_grammars, num_prompt_tokens, self._model.vocab_size, self.texts)

    def leave(self, text: GrammarText) -> None:
        """One user of a text less."""
        self.texts.leave(text)

    def close(self) -> None:
        """End all processes."""
        self.texts.close()


def wait_for(future: Future[None]) -> None:
    """Wait for a future in short pieces: a wait without a time limit cannot be interrupted on every platform."""
    while True:
        try:
            return future.result(timeout=0.2)
        except TimeoutError:
            if future.done():
                return future.result()


def vocabulary_of(model: LoadedModel) -> dict[str, Any]:
    """The facts about a model that `grammar_process.make_tokenizer` needs."""
    tokenizer, size, ends = model.tokenizer, model.vocab_size, sorted(model.eos_token_ids)
    assert tokenizer is not None
    serialized = getattr(tokenizer, "serialized", None)
    content = serialized() if serialized is not None else None
    known = {"size": size, "ends": ends, "serialized": content}
    return known if content is not None else known | {"texts": _texts_of(tokenizer, size, ends)}


def _texts_of(tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> list[str]:
    """The bytes of each token as Latin-1, of a tokenizer that is known by its texts alone.

    A token that is not a whole character has none, so that no grammar allows it; nor has a special token, whose text
    other tokens can spell.
    """
    special: frozenset[int] = getattr(tokenizer, "special_token_ids", frozenset())
    anchor = next((token for token in range(tokenizer.vocab_size) if tokenizer.decode([token])), 0)
    length = len(tokenizer.decode([anchor]))  # behind another token, a word keeps the space before it
    texts = [tokenizer.decode([anchor, token])[length:] for token in range(tokenizer.vocab_size)]
    for token, text in enumerate(texts):
        is_left_out = token in ends or token in special or "\N{REPLACEMENT CHARACTER}" in text
        texts[token] = "" if is_left_out else text.encode("utf-8", "replace").decode("latin-1")
    return texts + [""] * (vocab_size - len(texts))


def ask_masks(batch: ScheduledBatch) -> None:
    """Begin to compute the masks of a step whose tokens and drafts are known; `constrain` waits for them."""
    for chunk in batch.chunks:
        grammar = chunk.request.grammar
        if chunk.samples and isinstance(grammar, Grammar) and chunk.request.status != "finished":
            with contextlib.suppress(ValueError):  # constrain() finds it out again
                grammar.ask(chunk.request.token_ids, chunk.drafts)


def constrain(logits: Logits, batch: ScheduledBatch) -> Logits:
    """The logits of a step with the masks of the requests that have grammars."""
    best, masks, errors = list(logits.best), {}, {}
    row = 0
    grammars = [chunk.request.grammar for chunk in batch.chunks]
    texts = {grammar.text for grammar in grammars if isinstance(grammar, Grammar)}
    patience = next(iter(texts)).patience if texts else Patience()
    wait = patience.wait()
    for chunk in batch.chunks:
        request, grammar = chunk.request, chunk.request.grammar
        if not chunk.samples:
            continue
        if isinstance(grammar, Grammar) and request.status != "finished":
            try:
                for index, allowed in enumerate(grammar.masks(request.token_ids, chunk.drafts, wait), row):
                    masks[index] = allowed
                    if best[index] >= 0 and not allowed[best[index]]:
                        best[index] = int(np.where(allowed, logits.rows[index], -np.inf).argmax())
            except ValueError as problem:
                best[row], errors[row] = -1, str(problem)
        row += 1 + len(chunk.drafts)
    if None in grammars or len(texts) > 1:
        patience.charge(wait)
    return Logits(logits.values, best, masks, errors)


def allowed_drafts(request: Request, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """The drafts of a request up to the first that its grammar does not allow."""
    grammar = request.grammar
    return drafts[: grammar.num_valid(request.token_ids, drafts)] if isinstance(grammar, Grammar) else drafts


class Masks(StepPart):
    """Masks the rows of requests that have a grammar.

    Args:
        outputs: The outputs of requests, which say why a grammar ended them.
    """

    def __init__(self, outputs: OutputProcessor) -> None:
        self._outputs = outputs

    def stages(self, others: Mapping[str, Stage]) -> Mapping[str, Stage]:
        """Ask for masks before the forward pass, and apply them after it."""
        return {"ask": self._ask, "mask": self._mask}

    def _ask(self, computed: Computed) -> None:
        ask_masks(computed.batch)

    def _mask(self, computed: Computed) -> tuple[str, Any] | None:
        if all(chunk.request.grammar is None for chunk in computed.batch.chunks):
            return None
        computed.logits = constrain(computed.logits, computed.batch)
        computed.lap("mask")
        return "mask", computed.logits.masks

    def ending(self, iteration: ScheduledBatch) -> None:
        """Say why the grammar of a request could not be compiled."""
        for request_id, reason in iteration.finish_reasons.items():
            state = self._outputs[request_id]
            if reason == "error" and not state.error and state.request.grammar is not None:
                state.error = state.request.grammar.error
