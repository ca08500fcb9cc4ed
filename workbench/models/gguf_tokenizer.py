"""The tokenizer that a GGUF file describes: byte-level BPE or SentencePiece, built with PyPI ``tokenizers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from workbench.models.gguf_file import GGUFError
from workbench.models.tokenizer import NO_TEMPLATE, ChatTemplate, ChatTemplateError, Message

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# Control tokens that end a turn or a text, whatever the metadata says; llama.cpp ends an output at these too.
_END_OF_OUTPUT = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"}
    | {"<eos>", "</s>", "<EOT>"}
)

# -- pre-tokenizers: regular expressions that split a text, one after another --------------------------------
# The expressions are those of the models' own tokenizer.json; which name means which is llama.cpp's convention.

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE_RUNS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4_SHAPE = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE_RUNS}"
_LLAMA3 = _GPT4_SHAPE % r"\p{N}{1,3}"
_QWEN2 = _GPT4_SHAPE % r"\p{N}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE_RUNS}"
)
_TEKKEN = _CASED % ("", "", r"\p{N}")
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE_RUNS}",
)

PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("trillion", "granite-docling", "a.x-4.0"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("minerva-7b",), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), (_LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "grok-2"), (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (_GPT4O,)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
}
"""Splitting expressions by ``tokenizer.ggml.pre``."""

_IGNORE_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "tekken"})
"""Pre-tokenizers of models that take a whole word as one token when the vocabulary has it, whatever the merges."""


class GGUFTokenizer:
    """The tokenizer of a GGUF file.

    Args:
        metadata: The file's metadata.

    Attributes:
        vocab_size: Token ids are 0 to ``vocab_size - 1``.
        eos_token_ids: Tokens that end an output.
        bos_token_id: Token that begins a text, None where the model has none.
        adds_bos: The model expects its texts to begin with ``bos_token_id``. ``encode`` never adds it.
        has_chat_template: ``apply_chat_template`` can be used.

    Raises:
        GGUFError: The metadata describes a tokenizer of a kind that is not known, or none.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        kind = metadata.get("tokenizer.ggml.model")
        builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece}
        if kind not in builders:
            raise GGUFError(f"tokenizer.ggml.model={kind!r} is not supported; {', '.join(builders)} are")
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
        if len(types) != len(tokens):
            raise GGUFError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
        self._tokenizer: FastTokenizer = builders[kind](metadata, tokens, types)
        self.vocab_size = len(tokens)
        self.bos_token_id: int | None = metadata.get("tokenizer.ggml.bos_token_id")
        self.adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"))
        self.eos_token_ids = _end_tokens(metadata, tokens, types)
        self._template = self._chat_template(metadata, tokens)
        self.has_chat_template = self._template is not None

    @staticmethod
    def _chat_template(metadata: Mapping[str, Any], tokens: list[str]) -> ChatTemplate | None:
        source = metadata.get("tokenizer.chat_template")
        if not source:
            return None
        names = ("bos", "eos", "unknown", "padding")
        ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names}
        text = {name: "" if ids[name] is None else tokens[ids[name]] for name in names}
        return ChatTemplate(
            source,
            {
                "bos_token": text["bos"],
                "eos_token": text["eos"],
                "unk_token": text["unknown"],
                "pad_token": text["padding"],
            },
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Special tokens written out in it are recognised; none are added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens written out; bytes that are no character become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kw: Any) -> str:
        """The text of a conversation, as the model was trained to see it.

        Args:
            messages: {"role": ..., "content": ...}, oldest first.
            add_generation_prompt: End with the words that make the model answer.
            **kw: Further variables of the template, such as ``tools`` or ``enable_thinking``.

        Raises:
            ChatTemplateError: There is no template, or it refuses these messages.
        """
        if self._template is None:
            raise ChatTemplateError(NO_TEMPLATE)
        return self._template.render(messages, add_generation_prompt, **kw)

    def __repr__(self) -> str:
        return f"GGUFTokenizer({self.vocab_size} tokens)"


def _end_tokens(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> frozenset[int]:
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    known = (i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _END_OF_OUTPUT)
    return frozenset(int(token) for token in (*named, *known) if token is not None)


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise GGUFError(f"tokenizer.ggml.tokens holds {twice!r} twice, so the file's tokenizer is not usable")
    return vocabulary


def _add_special_tokens(tokenizer: FastTokenizer, tokens: list[str], types: list[int]) -> None:
    """Tokens that are found in a text before it is split: control tokens and those a model's maker defined."""
    for token, kind in zip(tokens, types):
        if kind in (_CONTROL, _USER_DEFINED) and token:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL)])


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> FastTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise GGUFError(
            f"pre-tokenizer tokenizer.ggml.pre={name!r} is not known; guessing would split texts in other places than "
            f"the model was trained on. Known: {', '.join(PRE_TOKENIZERS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = FastTokenizer(
        models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=name in _IGNORE_MERGES)
    )
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, tokens, types)
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> FastTokenizer:
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise GGUFError("tokenizer.ggml.remove_extra_whitespaces=True is not supported for a SentencePiece tokenizer")
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise GGUFError("tokenizer.ggml.scores must hold one score per token")
    # What a maker defined is matched in the text itself, where a space is a space.
    tokens = [t.replace("▁", " ") if kind == _USER_DEFINED else t for t, kind in zip(tokens, types)]
    vocabulary = _vocabulary(tokens)
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == _UNKNOWN), None)
    merges = _merges_by_score(vocabulary, scores, types)
    tokenizer = FastTokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    add_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if add_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if add_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_special_tokens(tokenizer, tokens, types)
    return tokenizer


def _merges_by_score(vocabulary: Mapping[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's BPE would make, best first.

    SentencePiece has no list of merges: of all neighbours whose concatenation is a token it joins those whose token
    has the highest score. So every way to cut a token into two tokens is a merge of that token's score.
    """
    found = []
    for token, index in vocabulary.items():
        if types[index] != 1:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]
