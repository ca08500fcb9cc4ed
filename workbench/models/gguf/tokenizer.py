"""The tokenizer in a GGUF file's metadata: byte-level BPE or SentencePiece, built from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.base.key_table import OFF, Finding, Rule, UnknownKeyError, judge
from workbench.models.gguf.fields import GGUFError, flag, list_of, text, whole_number
from workbench.models.gguf.pre_tokenizers import find_pre_tokenizer
from workbench.models.gguf.types import TokenType
from workbench.models.template_renderer import start_renderer
from workbench.models.tokenizer import NO_TEMPLATE, ChatTemplate, ChatTemplateError, Message

if TYPE_CHECKING:
    from workbench.models.gguf.byte_level import ByteLevelBPE
    from workbench.models.gguf.sentencepiece import SentencePieceBPE

log = logging.getLogger("workbench")

T = TypeVar("T")

MAX_TOKEN_CHARACTERS = 512
"""Maximum length of a token."""

# Control tokens that end an output even if the metadata does not say so, as in llama.cpp.
_END_OF_OUTPUT = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"}
    | {"<eos>", "</s>", "<EOT>"}
)


class GGUFTokenizer:
    """The tokenizer of a GGUF file.

    Args:
        metadata: The file's metadata.
        chat_template: A template in place of the file's.

    Attributes:
        vocab_size: Token ids are 0 to ``vocab_size - 1``.
        eos_token_ids: Tokens that end an output.
        bos_token_id: Token that begins a text, None if the model has none.
        adds_bos: Whether the model expects texts to begin with ``bos_token_id``. ``encode`` never adds it.
        around_texts: The tokens that are put before and behind a plain text.
        has_chat_template: Whether ``apply_chat_template`` can be used.
        findings: The verdict on each key of the tokenizer.

    Raises:
        ChatTemplateError: The given template is not valid.
        GGUFError: The metadata has no tokenizer, or one of an unknown kind.
    """

    def __init__(
        self, metadata: Mapping[str, Any], chat_template: str | None = None, ignored: Collection[str] = ()
    ) -> None:
        kind = text(metadata, "tokenizer.ggml.model")
        builders: dict[Any, Callable[..., ByteLevelBPE | SentencePieceBPE]] = {
            "gpt2": _byte_level,
            "llama": _sentencepiece,
        }
        if kind not in builders:
            raise GGUFError(f"tokenizer.ggml.model={kind!r} is not supported; {', '.join(builders)} are")
        self.findings = _judged(metadata, kind, ignored)
        if chat_template is not None or text(metadata, "tokenizer.chat_template"):
            start_renderer()  # beside the work on the vocabulary
        tokens = _required("tokenizer.ggml.tokens", list_of(metadata, "tokenizer.ggml.tokens", str))
        if (longest := max(map(len, tokens), default=0)) > MAX_TOKEN_CHARACTERS:
            raise GGUFError(
                f"tokenizer.ggml.tokens contains a token of {longest} characters; the maximum is {MAX_TOKEN_CHARACTERS}"
            )
        types = list_of(metadata, "tokenizer.ggml.token_type", int, len(tokens)) or [int(TokenType.NORMAL)] * len(
            tokens
        )
        try:
            self._tokenizer = builders[kind](metadata, tokens, types)
        except GGUFError:
            raise
        except Exception as problem:  # the libraries raise plain exceptions
            raise GGUFError(f"tokenizer.ggml: this tokenizer cannot be built: {problem}") from problem
        self.vocab_size = len(tokens)
        self.bos_token_id = _token_id(metadata, "bos", tokens)
        by_default = True if kind == "llama" else find_pre_tokenizer(metadata["tokenizer.ggml.pre"]).adds_bos
        add_bos = flag(metadata, "tokenizer.ggml.add_bos_token", by_default)
        self.adds_bos = self.bos_token_id is not None and add_bos
        self.eos_token_ids = _end_tokens(metadata, tokens, types)
        eos = _token_id(metadata, "eos", tokens)
        ends = eos is not None and flag(metadata, "tokenizer.ggml.add_eos_token", False)
        self.around_texts: tuple[list[int], list[int]] = (
            [self.bos_token_id] if self.adds_bos and self.bos_token_id is not None else [],
            [eos] if ends and eos is not None else [],
        )
        self.special_token_ids = frozenset(_of_type(TokenType.CONTROL, tokens, types))
        self._no_template = NO_TEMPLATE
        self._template = self._make_template(metadata, tokens, chat_template)
        self.has_chat_template = self._template is not None

    def serialized(self) -> str | None:
        """The tokenizer in the format of PyPI ``tokenizers``; None if it is none of these."""
        serialized = getattr(self._tokenizer, "serialized", None)
        return serialized() if serialized is not None else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Special tokens in the text are recognised; none are added."""
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included; bytes that are not a character become U+FFFD."""
        return self._tokenizer.decode(list(ids))

    def piece(self, token: int) -> str | None:
        """The token as the vocabulary writes it; None if there is no such token."""
        return self._tokenizer.piece(token) if 0 <= token < self.vocab_size else None

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kw: Any) -> str:
        """See `Tokenizer.apply_chat_template`."""
        if self._template is None:
            raise ChatTemplateError(self._no_template)
        return self._template.render(messages, add_generation_prompt, **kw)

    def thinking(self) -> str:
        """See `ChatTemplate.thinking`."""
        return self._no_template if self._template is None else self._template.thinking()

    def leaves_out(self) -> list[str]:
        """See `ChatTemplate.leaves_out`."""
        return self._template.leaves_out() if self._template is not None else []

    def _make_template(self, metadata: Mapping[str, Any], tokens: list[str], given: str | None) -> ChatTemplate | None:
        """The given template, or the file's; None if it has none, or one that is not valid."""
        source, variables = given or text(metadata, "tokenizer.chat_template"), _variables(metadata, tokens)
        if not source:
            return None
        try:
            return ChatTemplate(source, variables)
        except ChatTemplateError as problem:
            if given is not None:
                raise
            self._no_template = f"{problem}: give the prompt as text, or another template with --chat-template"
            log.warning("the file has no chat: %s", self._no_template)
            return None

    def __repr__(self) -> str:
        return f"GGUFTokenizer({self.vocab_size} tokens)"


def _required(key: str, value: T | None) -> T:
    if value is None:
        raise GGUFError(f"metadata {key} is missing: the file has no tokenizer")
    return value


def _token_id(metadata: Mapping[str, Any], name: str, tokens: list[str]) -> int | None:
    """A special token's id from the metadata, None if it has none."""
    token = whole_number(metadata, f"tokenizer.ggml.{name}_token_id", low=0)
    if token is not None and token >= len(tokens):
        raise GGUFError(f"tokenizer.ggml.{name}_token_id={token} is outside the vocabulary, 0 to {len(tokens) - 1}")
    return token


def _end_tokens(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> frozenset[int]:
    named = {_token_id(metadata, name, tokens) for name in ("eos", "eot", "eom")}
    known = {token for token in _of_type(TokenType.CONTROL, tokens, types) if tokens[token] in _END_OF_OUTPUT}
    return frozenset(token for token in named | known if token is not None)


def _variables(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    """The variables of a template: the texts of special tokens."""
    variables = {}
    for variable, name in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token = _token_id(metadata, name, tokens)
        variables[f"{variable}_token"] = "" if token is None else tokens[token]
    return variables


KEYS = (
    Rule("read", "ggml.model ggml.pre ggml.tokens ggml.token_type ggml.scores ggml.merges ggml.bos_token_id "
         "ggml.eos_token_id ggml.eot_token_id ggml.eom_token_id ggml.unknown_token_id ggml.padding_token_id "
         "ggml.add_bos_token ggml.add_eos_token chat_template", "the tokenizer or its template has it"),
    Rule("harmless", "ggml.*_token_id ggml.fim_* ggml.token_type_count ggml.added_tokens", "no text gets it"),
    Rule("harmless", "chat_template.* chat_templates ggml.chat_template huggingface.json", "the default "
         "template and the tokens are read"),
)  # fmt: skip
"""Keys behind ``tokenizer.`` of all kinds of tokenizers."""
_KEYS_OF = {
    "llama": (
        Rule("read", "ggml.add_space_prefix ggml.remove_extra_whitespaces", "texts begin and are cut so"),
        Rule("harmless", "ggml.escape_whitespaces", "spaces are written so", (True,)),
    ),
    "gpt2": (
        Rule("harmless", "ggml.add_space_prefix ggml.remove_extra_whitespaces", "byte-level BPE has it off", (False,)),
        Rule("harmless", "ggml.escape_whitespaces", "byte-level BPE escapes by itself"),
    ),
}
CHANGES_TEXT = (
    OFF,
    Rule("refused", "ggml.precompiled_charsmap", "texts would be rewritten before they are cut"),
    Rule("refused", "ggml.add_sep_token ggml.add_space_prefix ggml.remove_extra_whitespaces ggml.escape_whitespaces",
         "texts would be cut in other places"),
)  # fmt: skip


def _judged(metadata: Mapping[str, Any], kind: Any, ignored: Collection[str]) -> list[Finding]:
    """Judge the keys of a tokenizer.

    Raises:
        GGUFError: One is refused; the message names it.
    """
    keys = {key.removeprefix("tokenizer."): value for key, value in metadata.items() if key.startswith("tokenizer.")}
    names = {name.removeprefix("tokenizer.") for name in ignored}
    try:
        return judge("metadata tokenizer", keys, (*KEYS, *_KEYS_OF.get(kind, ()), *CHANGES_TEXT), names, _ADVICE)
    except UnknownKeyError as problem:
        raise GGUFError(str(problem).replace("metadata tokenizer: ", "metadata tokenizer.")) from None


_ADVICE = "; if it changes no text, accept it with ignore_config_keys or --ignore-config-key"


def _of_type(kind: int, tokens: list[str], types: list[int]) -> list[int]:
    """Ids of the tokens of a type that are not empty."""
    return [token for token, its_kind in enumerate(types) if its_kind == kind and tokens[token]]


def _special(tokens: list[str], types: list[int]) -> list[int]:
    """Ids of the tokens that are matched before a text is cut."""
    return [*_of_type(TokenType.CONTROL, tokens, types), *_of_type(TokenType.USER_DEFINED, tokens, types)]


def _ids(tokens: list[str]) -> dict[str, int]:
    """Token ids by their text.

    Raises:
        GGUFError: A token occurs twice.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise GGUFError(f"tokenizer.ggml.tokens contains {twice!r} twice, so the file's tokenizer is not usable")
    return ids


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> ByteLevelBPE:
    from workbench.models.gguf.byte_level import ByteLevelBPE

    pre_tokenizer = find_pre_tokenizer(text(metadata, "tokenizer.ggml.pre"))
    merges = _required("tokenizer.ggml.merges", list_of(metadata, "tokenizer.ggml.merges", str))
    return ByteLevelBPE(_ids(tokens), merges, [tokens[token] for token in _special(tokens, types)], pre_tokenizer)


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> SentencePieceBPE:
    from workbench.models.gguf.sentencepiece import SentencePieceBPE

    if flag(metadata, "tokenizer.ggml.remove_extra_whitespaces", False):
        raise GGUFError("tokenizer.ggml.remove_extra_whitespaces=True is not supported for a SentencePiece tokenizer")
    scores = list_of(metadata, "tokenizer.ggml.scores", float, len(tokens))
    # Tokens of the model's maker are matched in the text itself, in which a space is a space.
    own = set(_of_type(TokenType.USER_DEFINED, tokens, types))
    tokens = [token.replace("▁", " ") if index in own else token for index, token in enumerate(tokens)]
    _ids(tokens)
    return SentencePieceBPE(
        tokens,
        _required("tokenizer.ggml.scores", scores),
        types,
        special=_special(tokens, types),
        add_prefix=flag(metadata, "tokenizer.ggml.add_space_prefix", True),
    )
