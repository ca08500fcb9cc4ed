"""Text to token ids and back, and chat templates: one small face for every kind of tokenizer."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence, Sized
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """A model has no chat template, or its template refused the messages or did something that is not allowed."""


@runtime_checkable
class Tokenizer(Protocol):
    """What the engine needs of a tokenizer.

    Attributes:
        vocab_size: Token ids are 0 to ``vocab_size - 1``.
        eos_token_ids: Tokens that end an output.
        bos_token_id: Token that begins a text, None where the model has none.
        adds_bos: The model expects its texts to begin with ``bos_token_id``. ``encode`` never adds it.
        has_chat_template: ``apply_chat_template`` can be used.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    adds_bos: bool
    has_chat_template: bool

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Special tokens written out in it are recognised; none are added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens written out."""
        ...

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kw: Any) -> str:
        """The text of a conversation, as the model was trained to see it.

        Raises:
            ChatTemplateError: There is no template, or it refuses these messages.
        """
        ...


MAX_TEMPLATE_CHARACTERS = 2**24
"""Longest text that a chat template may make, and longest text, list or number of anything on the way to it."""

MAX_INTEGER_BITS = 4096
"""Size of the integers a chat template may compute; operations on large ones take long in one go."""

MAX_TEMPLATE_SECONDS = 10.0
"""Longest time that a chat template may take."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which keeps a template from reaching anything, with limits on what it may use up."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse to multiply, to add and to format what would become too large."""
        numbers = isinstance(left, int) and isinstance(right, int)
        length_or_count = [_size_of(value) for value in (left, right)]
        if operator == "%" and isinstance(left, str):
            _check_size(max(map(int, re.findall("[0-9]+", left)), default=0))
        elif operator in ("*", "**") and numbers:
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            _check_size(bits, MAX_INTEGER_BITS)
        elif operator == "+" and not numbers:
            _check_size(sum(length_or_count))
        elif operator == "*" and not numbers:
            _check_size(math.prod(length_or_count))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse widths and counts that are too large."""
        for value in (*args, *kwargs.values()):
            _check_size(value if isinstance(value, int) else 0)
        return super().call(context, function, *args, **kwargs)


def _size_of(value: Any) -> int:
    """Length of a text or a list; an integer, as how often something is repeated, is itself."""
    if isinstance(value, Sized):
        return len(value)
    return value if isinstance(value, int) else 1


def _check_size(size: int, limit: int = MAX_TEMPLATE_CHARACTERS) -> None:
    if size > limit:
        raise SecurityError(f"a size of {size}, allowed are {limit}")


class _Generation(Extension):
    """``{% generation %}``, by which templates mark the model's own words for training: rendered as what it holds."""

    tags = frozenset(("generation",))

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's content."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A Jinja chat template, run in a sandbox: it comes with the model's file and is not trusted.

    Besides what the sandbox forbids, a rendering ends when its text becomes longer than MAX_TEMPLATE_CHARACTERS or
    takes longer than MAX_TEMPLATE_SECONDS. The time is looked at whenever text comes out; a server ends a template
    that never puts any out by other means.

    Args:
        source: The template.
        variables: What every rendering sees besides the messages, such as ``bos_token``.

    Raises:
        ChatTemplateError: The template is not valid Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        # Hugging Face's settings, which templates are written for.
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        self.source = source
        self._variables = dict(variables or {})
        try:
            self._template = environment.from_string(source)
        except Exception as problem:  # TemplateError, or what Python's compiler says of one that is nested too deeply
            raise ChatTemplateError(f"the model's chat template is not valid: {problem}") from problem

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kw: Any) -> str:
        """The text of a conversation.

        Args:
            messages: {"role": ..., "content": ...}, oldest first.
            add_generation_prompt: End with the words that make the model answer.
            **kw: Further variables of the template, such as ``tools`` or ``enable_thinking``.

        Raises:
            ChatTemplateError: The template refused the messages, failed, tried what the sandbox forbids, or took too
                much time or space.
        """
        variables = {"tools": None, "documents": None, **self._variables, **kw}
        deadline = time.monotonic() + MAX_TEMPLATE_SECONDS
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **variables
            ):
                parts.append(part)
                size += len(part)
                _check_size(size)
                if time.monotonic() > deadline:
                    raise ChatTemplateError(f"the model's chat template took more than {MAX_TEMPLATE_SECONDS:g} s")
            return "".join(parts)
        except ChatTemplateError:
            raise
        except Exception as problem:  # a template is a program: whatever it raises is its failure, not ours
            raise ChatTemplateError(f"the model's chat template failed: {type(problem).__name__}: {problem}") from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """The ``tojson`` filter without Jinja's escapes for HTML, which models were not trained on."""
    import json

    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    raise ChatTemplateError(f"the model's chat template refuses these messages: {message}")


class HuggingFaceTokenizer:
    """A tokenizer loaded by mlx-lm or transformers.

    Args:
        tokenizer: An ``mlx_lm.tokenizer_utils.TokenizerWrapper``, or a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        eos = getattr(tokenizer, "eos_token_ids", None) or tokenizer.eos_token_id
        self.eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or ())
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.adds_bos = self.bos_token_id is not None and tokenizer.encode("a")[:1] == [self.bos_token_id]
        self.has_chat_template = bool(getattr(tokenizer, "has_chat_template", tokenizer.chat_template))
        self._templates: dict[str, ChatTemplate] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Special tokens written out in it are recognised; none are added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens written out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kw: Any) -> str:
        """The text of a conversation, as the model was trained to see it.

        Args:
            messages: {"role": ..., "content": ...}, oldest first.
            add_generation_prompt: End with the words that make the model answer.
            **kw: Further variables of the template, such as ``tools`` or ``enable_thinking``.

        Raises:
            ChatTemplateError: There is no template, or it refuses these messages.
        """
        if not self.has_chat_template:
            raise ChatTemplateError(NO_TEMPLATE)
        try:
            if _has_own_renderer(self._tokenizer):
                return self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **kw
                )
            source = self._tokenizer.get_chat_template(tools=kw.get("tools"))
        except Exception as problem:
            raise ChatTemplateError(f"the model's chat template failed: {type(problem).__name__}: {problem}") from None
        return self._template(source).render(messages, add_generation_prompt, **kw)

    def _template(self, source: str) -> ChatTemplate:
        """One of the model's templates: it may have another for tools."""
        if source not in self._templates:
            variables = dict(self._tokenizer.special_tokens_map)
            if hasattr(self._tokenizer, "has_thinking"):  # mlx-lm's default
                variables["enable_thinking"] = self._tokenizer.has_thinking
            self._templates[source] = ChatTemplate(source, variables)
        return self._templates[source]

    def __repr__(self) -> str:
        return f"HuggingFaceTokenizer({self.vocab_size} tokens)"


def _has_own_renderer(tokenizer: Any) -> bool:
    """Conversations are rendered by code of mlx-lm or transformers, and not by a template from the model's files."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, TokenizerWrapper):
        if tokenizer._chat_template is not None:
            return True
        tokenizer = tokenizer._tokenizer
    return type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template


NO_TEMPLATE = "this model has no chat template: give the prompt as text"
