"""Text to token ids and back, and chat templates: one small interface for every kind of tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from workbench.base.outside_files import read_text
from workbench.base.text import shown
from workbench.models.template_losses import CALLED, MADE_UP, MARK, left_out
from workbench.models.template_renderer import TemplateProblem, render_template

Message = Mapping[str, Any]
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template refused the messages or did something that is not allowed."""


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer that the engine uses.

    Attributes:
        vocab_size: Token ids are 0 to ``vocab_size - 1``.
        eos_token_ids: Tokens that end an output.
        bos_token_id: Token that begins a text, None if the model has none.
        adds_bos: Whether the model expects texts to begin with ``bos_token_id``. ``encode`` never adds it.
        has_chat_template: Whether ``apply_chat_template`` can be used.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    adds_bos: bool
    has_chat_template: bool

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Special tokens in the text are recognised; none are added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        ...

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kw: Any) -> str:
        """The text of a conversation, as the model was trained to see it.

        Args:
            messages: {"role": ..., "content": ...}, oldest first.
            add_generation_prompt: End with the text that makes the model answer.
            **kw: Further variables of the template, such as ``tools`` or ``enable_thinking``.

        Raises:
            ChatTemplateError: There is no template, or it refuses these messages.
        """
        ...


def with_special_tokens(tokenizer: Any, token_ids: Sequence[int]) -> list[int]:
    """Token ids of a plain text, with the tokens that the tokenizer itself puts around one: mostly a BOS, or none.

    A chat template writes its own special tokens, so this is not for its texts.
    """
    around = getattr(tokenizer, "around_texts", None)
    if around is None:
        begin = [tokenizer.bos_token_id] if tokenizer.adds_bos and tokenizer.bos_token_id is not None else []
        around = begin, ()
    return [*around[0], *token_ids, *around[1]]


MAX_TEMPLATE_SECONDS = 10.0
"""Maximum time that a chat template takes."""


class ChatTemplate:
    """A Jinja chat template. It comes with the model's file and is not trusted.

    It is compiled and rendered in Jinja's sandbox, in a separate process with little memory, which is ended after
    MAX_TEMPLATE_SECONDS.

    Args:
        source: The template.
        variables: Variables of every rendering besides the messages, such as ``bos_token``.

    Raises:
        ChatTemplateError: The template is not valid Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self._forms: dict[str, tuple[bool, bool]] = {}
        self._text_arguments: bool | None = None
        self._variables = dict(variables or {})
        try:
            render_template(source, None, MAX_TEMPLATE_SECONDS)
        except TemplateProblem as problem:
            raise ChatTemplateError(f"the model's chat template is not valid: {problem}") from None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kw: Any) -> str:
        """The text of a conversation.

        Args:
            messages: {"role": ..., "content": ...}, oldest first.
            add_generation_prompt: End with the text that makes the model answer.
            **kw: Further variables of the template, such as ``tools`` or ``enable_thinking``.

        Raises:
            ChatTemplateError: The template refused the messages, failed, broke the sandbox's rules, or took too much
                time or memory; or a message or variable is not data that JSON can hold, or a part of a content is not
                a text.
        """
        return self._render(list(map(self._as_wanted, messages)), add_generation_prompt, **kw)

    def _as_wanted(self, message: Message) -> Message:
        """A message whose content, reasoning and calls are in the form that the template shows."""
        message = _with_reasoning_names(message)
        if message.get("tool_calls") and self._wants_text_arguments():
            message = _with_text_arguments(message)
        content = message.get("content")
        if isinstance(content, str) and content and self._shows(message) == (False, True):
            return _in_parts(message)
        if isinstance(content, list):
            texts = [_text_of(part) for part in content]
            if not self._shows(message)[1]:  # as in vLLM
                return {**message, "content": "\n".join(texts)}
        return message

    def _shows(self, message: Message) -> tuple[bool, bool]:
        """Whether the template shows contents of a role that are texts, and those that are lists of parts."""
        role = str(message.get("role"))
        if role not in self._forms:
            made_up = MADE_UP.get(role, [{"role": role, "content": MARK}])
            shown = []
            for wanted in (dict, _in_parts):
                others = [each if each.get("content") == MARK else self._as_wanted(each) for each in made_up]
                made = [wanted(each) if each.get("content") == MARK else each for each in others]
                shown.append(MARK in (text := self._tried(made)) and "'type'" not in text)
            self._forms[role] = (shown[0], shown[1])
        return self._forms[role]

    def _wants_text_arguments(self) -> bool:
        """Whether the template fails if arguments of calls are objects, and takes them as JSON."""
        if self._text_arguments is None:
            fails = not self._tried(CALLED)
            self._text_arguments = fails and bool(self._tried(list(map(_with_text_arguments, CALLED))))
        return self._text_arguments

    def leaves_out(self) -> list[str]:
        """The kinds of texts that the template leaves out or refuses, see `left_out`."""
        return left_out(self.render)

    def thinking(self) -> str:
        """Whether the model is asked to think if a request does not say, and what decides it."""
        if "enable_thinking" not in self.source:
            return "the template decides alone: it does not read enable_thinking"
        message = {"role": "user", "content": MARK}
        unset, on, off = (self._tried([message], **kw) for kw in ({}, *({"enable_thinking": e} for e in (True, False))))
        if on == off:
            return "the template reads enable_thinking, but says the same either way to a first message"
        as_set = {on: "yes, as with enable_thinking true", off: "no, as with enable_thinking false"}
        because = ", because the template takes that if a request does not set enable_thinking"
        return as_set.get(unset, "neither as with true nor with false") + because

    def _tried(self, messages: Sequence[Message], **kw: Any) -> str:
        try:
            return self._render(messages, True, **kw)
        except ChatTemplateError:
            return ""

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, **kw: Any) -> str:
        variables = {"tools": None, "documents": None, **self._variables, **kw}
        variables |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return render_template(self.source, variables, MAX_TEMPLATE_SECONDS)
        except TemplateProblem as problem:
            if problem.kind == "RefusedError":
                raise ChatTemplateError(f"the model's chat template refuses these messages: {problem}") from None
            if problem.kind == "TimeoutError":
                raise ChatTemplateError(f"the model's chat template {problem}") from None
            raise ChatTemplateError(f"the model's chat template failed: {problem.kind}: {problem}") from None


def _in_parts(message: Message) -> Message:
    """A message whose content is a list of parts, as templates of models with several kinds of input expect."""
    content = message.get("content")
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) and content else message
    )


def _with_reasoning_names(message: Message) -> Message:
    """A message whose reasoning has all names that templates read, as in transformers.

    gpt-oss's template refuses ``thinking`` beside a text and calls, of which it shows the calls.
    """
    reasoning = next((text for name in _REASONING if (text := message.get(name)) is not None), None)
    if reasoning is None:
        return message
    thinking = {} if message.get("tool_calls") and message.get("content") else {"thinking": reasoning}
    return {**thinking, **message, "reasoning_content": reasoning}


def _with_text_arguments(message: Message) -> Message:
    """A message whose calls have their arguments as JSON."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        if isinstance(arguments := function.get("arguments"), Mapping):
            call = {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}
        calls.append(call)
    return {**message, "tool_calls": calls} if calls else message


def _text_of(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise ChatTemplateError(f"a part of a content must be {{'type': 'text', 'text': ...}}, got {shown(part)}")


def chosen_template(given: str | Path | None) -> str | None:
    """A chat template that the user gives: a file, or the template itself.

    Raises:
        ValueError: There is no such file.
    """
    if given is None or (isinstance(given, str) and ("{{" in given or "{%" in given)):
        return given
    try:
        return read_text(Path(given).expanduser())
    except (OSError, ValueError) as problem:
        why = getattr(problem, "strerror", None) or problem
        raise ValueError(
            f"chat_template {str(given)[:200]!r} cannot be read ({why}): give a file with a template"
        ) from None


class HuggingFaceTokenizer:
    """A tokenizer loaded by mlx-lm or transformers.

    Args:
        tokenizer: An ``mlx_lm.tokenizer_utils.TokenizerWrapper``, or a transformers tokenizer.
        chat_template: A template in place of the tokenizer's.

    Attributes:
        around_texts: The tokens that it puts before and behind a plain text.
        special_token_ids: The tokens that ``skip_special_tokens`` of transformers leaves out.

    Raises:
        ChatTemplateError: The given template is not valid.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._given = chat_template
        self.vocab_size = len(tokenizer)
        eos = getattr(tokenizer, "eos_token_ids", None) or tokenizer.eos_token_id
        self.eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or ())
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.around_texts = _around(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_token_ids = frozenset(token for token, text in added.items() if text.special)
        self.adds_bos = self.bos_token_id is not None and self.around_texts[0][:1] == [self.bos_token_id]
        own = getattr(tokenizer, "has_chat_template", tokenizer.chat_template)
        self.has_chat_template = chat_template is not None or bool(own)
        self._templates: dict[str, ChatTemplate] = {}
        if chat_template is not None:
            self._template(chat_template)

    def serialized(self) -> str | None:
        """The tokenizer in the format of PyPI ``tokenizers``; None if it is none of these."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return backend.to_str() if backend is not None else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Special tokens in the text are recognised; none are added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def piece(self, token: int) -> str | None:
        """The token as the vocabulary writes it; None if there is no such token."""
        found = self._tokenizer.convert_ids_to_tokens(token)
        return found if isinstance(found, str) else None

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kw: Any) -> str:
        """See `Tokenizer.apply_chat_template`."""
        if not self.has_chat_template:
            raise ChatTemplateError(NO_TEMPLATE)
        if self._given is not None:
            return self._template(self._given).render(messages, add_generation_prompt, **kw)
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
        """The compiled template of a source: a model may have a second template for tools."""
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, dict(self._tokenizer.special_tokens_map))
        return self._templates[source]

    def thinking(self) -> str:
        """See `ChatTemplate.thinking`."""
        if not self.has_chat_template:
            return NO_TEMPLATE
        if self._given is None and _has_own_renderer(self._tokenizer):
            return "code of mlx-lm or transformers renders conversations"
        return self._template(self._given or self._tokenizer.get_chat_template()).thinking()

    def leaves_out(self) -> list[str]:
        """See `ChatTemplate.leaves_out`."""
        return left_out(self.apply_chat_template) if self.has_chat_template else []

    def __repr__(self) -> str:
        return f"HuggingFaceTokenizer({self.vocab_size} tokens)"


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before and behind a text."""
    whole, plain = list(tokenizer.encode("a")), list(tokenizer.encode("a", add_special_tokens=False))
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return whole[:1] if whole[:1] == [tokenizer.bos_token_id] else [], []


def _has_own_renderer(tokenizer: Any) -> bool:
    """Whether code of mlx-lm or transformers renders conversations, and not a template from the model's files."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, TokenizerWrapper):
        if tokenizer._chat_template is not None:
            return True
        tokenizer = tokenizer._tokenizer
    return type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template


NO_TEMPLATE = "this model has no chat template: give the prompt as text"
