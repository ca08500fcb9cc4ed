r"""Pre-tokenizers of byte-level BPE: they cut a text before merges are applied. GGUF files give their names.

The expressions are those of the models' own tokenizer.json files, the names are llama.cpp's. Only names that occur with
`ARCHITECTURES` are here. The expressions are applied one after another, each to the pieces of the one before; a part
that an expression does not match stays one piece.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from workbench.models.gguf.fields import GGUFError


@dataclass(frozen=True)
class PreTokenizer:
    """The rules for cutting a text, and the other settings that a name implies.

    Attributes:
        patterns: Regular expressions, applied one after another.
        whole_words: Whether a piece that is a token stays whole, without regard to merges.
        adds_bos: Whether texts begin with the BOS token if the file does not say.
        nfc: Whether texts are first brought into Unicode's composed form (NFC).
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    nfc: bool = False

    def splitter(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer of PyPI ``tokenizers``."""
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns])

    def normalizer(self) -> normalizers.Normalizer | None:
        """The normalizer for a text before it is cut, None for no normalizer."""
        return normalizers.NFC() if self.nfc else None


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


def _words_and_digits(digits: str) -> str:
    """The pattern of OpenAI's cl100k: words with one sign before them, digits, signs with line ends."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words_and_digits(digits: str, contractions: str = "") -> str:
    """The pattern of OpenAI's o200k: a word is also cut between a small letter and a capital one."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    sign = r"[^\r\n\p{L}\p{N}]?"
    words = f"{sign}{upper}*{lower}+{contractions}|{sign}{upper}+{lower}*{contractions}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LLAMA3 = PreTokenizer((_words_and_digits(r"\p{N}{1,3}"),), whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer((_words_and_digits(r"\p{N}"),), nfc=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": PreTokenizer((_GPT2,)),
    "gigachat": PreTokenizer((_GPT2,)),
    "mellum": PreTokenizer((_GPT2,)),
    "trillion": PreTokenizer((_GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "minerva-7b": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "lfm2": _LLAMA3,
    "smaug-bpe": PreTokenizer(_LLAMA3.patterns),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": PreTokenizer(_QWEN2.patterns),
    "megrez": PreTokenizer(_QWEN2.patterns),
    "kormo": PreTokenizer(_QWEN2.patterns),
    "seed-coder": PreTokenizer(
        (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ),
    "gpt-4o": PreTokenizer((_cased_words_and_digits(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)),
    "kanana2": PreTokenizer((_cased_words_and_digits(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)),
    "tekken": PreTokenizer((_cased_words_and_digits(r"\p{N}"),), whole_words=True, adds_bos=True),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            _CJK,
            rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
        )
    ),
    "poro-chat": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
}
"""Pre-tokenizers by ``tokenizer.ggml.pre``."""


def find_pre_tokenizer(name: str | None) -> PreTokenizer:
    """The pre-tokenizer of a name.

    Raises:
        GGUFError: The name is unknown, or the file has none.
    """
    if name not in PRE_TOKENIZERS:
        raise GGUFError(
            f"pre-tokenizer tokenizer.ggml.pre={name!r} is unknown, and a wrong one would cut texts in other places "
            f"than in training; known are {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]
