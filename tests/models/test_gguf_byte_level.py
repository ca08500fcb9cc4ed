"""Byte-level BPE of random vocabularies and the bundled one, compared with the definition."""

import random
import re
import unicodedata

import pytest
from byte_level_bpe import numbered, reference_bpe
from tiers import examples

from workbench.models.gguf.file import GGUFError, GGUFFile
from workbench.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from workbench.models.gguf.tokenizer import GGUFTokenizer

SPECIAL = ["<s>", "<tool>", "  ", "日"]
PIECES = ["a", "b", "aab", " ", "é", "e\u0301", "日", "x", "1", "\n", *SPECIAL]


def reference(metadata):
    """A function that gives the token ids of a text, special tokens included, by the definition."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    ids, ranks = numbered(tokens), numbered(metadata["tokenizer.ggml.merges"])
    pre_tokenizer = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]
    special = sorted((token for token, kind in zip(tokens, kinds) if kind in (3, 4)), key=len, reverse=True)
    pattern = f"({'|'.join(map(re.escape, special))})" if special else "(?!)"

    def encode(text):
        found = []
        for part in re.split(pattern, text):
            if part in special:
                found.append(ids[part])
            else:
                part = unicodedata.normalize("NFC", part) if pre_tokenizer.nfc else part
                found += reference_bpe(part, pre_tokenizer.patterns, ids, ranks, pre_tokenizer.whole_words)
        return found

    return encode


def vocabulary(draw, name):
    """Metadata of few bytes, some of them missing, and tokens that can be made in more than one way."""
    # The letters of the bytes of "ab é1": Ġ is the space.
    letters = [letter for letter in "abĠÃ©1" if draw.random() < 0.8]
    tokens, merges = list(letters), []
    for _ in range(draw.randrange(2, 30)):
        left, right = draw.choice(tokens), draw.choice(tokens)
        if len(left + right) < 8:
            merges.append(f"{left} {right}")  # may be there already, and then with a later rank
            tokens += [left + right] * (left + right not in tokens)
    draw.shuffle(merges)
    tokens += [word for word in ("bab", "aab", "éa", "日b") if word not in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [*SPECIAL, *tokens],
        "tokenizer.ggml.token_type": [3, 4, 4, 3] + [1] * len(tokens),
        "tokenizer.ggml.merges": merges,
    }


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_random_vocabularies_equal_the_definition(name):
    for seed in range(examples(60)):
        draw = random.Random(seed)
        metadata = vocabulary(draw, name)
        tokenizer, expected = GGUFTokenizer(metadata), reference(metadata)
        for size in (0, 1, 3, 8, 20, 40):
            text = "".join(draw.choices(PIECES, [9, 9, 3, 4, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1], k=size))
            assert tokenizer.encode(text) == expected(text), (metadata, text)


def test_the_bundled_vocabulary_equals_the_definition_on_texts_of_every_kind(smollm2):
    expected = reference(GGUFFile(smollm2.source).metadata)
    draw = random.Random(16)
    alphabets = ["aB \n", "0123456789.", "({[]}):;='\"_ \tdefself", "<|im_start|>", "".join(map(chr, range(160, 700)))]
    samples = [
        "",
        "a" * 500,
        "1" * 5000,
        " " * 500,
        "<|im_start|>1" * 2000,
        "<|im_start|>user\nHi<|im_end|>\n",
        "\U0001f600" * 100,
    ]
    for _ in range(300):
        alphabet = draw.choice(alphabets)
        samples.append("".join(draw.choice(alphabet) for _ in range(draw.randrange(80))))
        codes = (draw.randrange(0x110000) for _ in range(20))
        samples.append("".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000))
    for text in samples:
        assert smollm2.tokenizer.encode(text) == expected(text)


def test_the_last_of_two_merges_of_a_pair_counts():
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "bc"],
        "tokenizer.ggml.token_type": [1] * 5,
        "tokenizer.ggml.merges": ["b c", "a b", "b c"],
    }
    assert GGUFTokenizer(metadata).encode("abc") == reference(metadata)("abc") == [3, 2]


@pytest.mark.parametrize("merge", ["ab", "a x", "x a", "a ", "a b", "", " "])
def test_a_merge_of_unknown_tokens_is_refused(merge):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "aa"],
        "tokenizer.ggml.merges": ["a a", merge],
    }
    with pytest.raises(GGUFError, match=f"merges contains {merge!r}; a merge must be two tokens"):
        GGUFTokenizer(metadata)
