"""Byte-level BPE from GGUF metadata against its definition.

The reference is a few lines of Python over the ``regex`` package, with the full expressions of the models' own
tokenizer.json files.
"""

import json
import random
import unicodedata

import pytest
import regex
from byte_level_bpe import numbered, reference_bpe
from hypothesis import given, settings
from tokenizer_texts import CORPUS, HARD_TEXTS, texts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from workbench.models.gguf.file import GGUFError, GGUFFile
from workbench.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from workbench.models.gguf.tokenizer import GGUFTokenizer

# As in the tokenizer.json of GPT-2, SmolLM2, Llama 3, Qwen2, Mistral Nemo and GPT-4o.
GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS_OF_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+@"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*@"
)
ORIGINAL_PATTERNS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen2": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "tekken": [
        WORDS_OF_O200K.replace("@", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "gpt-4o": [
        WORDS_OF_O200K.replace("@", CONTRACTIONS + "?")
        + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}


@pytest.fixture(scope="module")
def bpe_metadata():
    """A vocabulary of 256 bytes and some 500 merges, trained on Python's own documentation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=760, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    num_plain = len(tokens)
    tokens += ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * num_plain + [3, 3, 3, 4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": num_plain + 2,
    }


@pytest.mark.parametrize("name", ORIGINAL_PATTERNS)
def test_byte_level_bpe_equals_its_definition(bpe_metadata, name):
    tokenizer = GGUFTokenizer({**bpe_metadata, "tokenizer.ggml.pre": name})
    tokens, merges = (numbered(bpe_metadata[f"tokenizer.ggml.{key}"]) for key in ("tokens", "merges"))
    whole_words = name in ("llama-bpe", "tekken")

    @settings(max_examples=150, deadline=None)
    @given(texts)
    def check(text):
        if name == "qwen2":
            text = unicodedata.normalize("NFC", text)
        expected = reference_bpe(text, ORIGINAL_PATTERNS[name], tokens, merges, whole_words)
        assert tokenizer.encode(text) == expected

    check()
    for text in CORPUS[:3]:
        assert tokenizer.encode(text) == reference_bpe(text, ORIGINAL_PATTERNS[name], tokens, merges, whole_words)


def test_pre_tokenizers_differ(bpe_metadata):
    """The negative control: with the wrong expression the comparison above fails."""
    text = "12345 don't WE'RE camelCase\n\n\n  x"
    ids = {
        name: tuple(GGUFTokenizer({**bpe_metadata, "tokenizer.ggml.pre": name}).encode(text))
        for name in ORIGINAL_PATTERNS
    }
    tokens, merges = (numbered(bpe_metadata[f"tokenizer.ggml.{key}"]) for key in ("tokens", "merges"))
    assert ids["llama-bpe"] != tuple(reference_bpe(text, [GPT2], tokens, merges, False))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_known_pre_tokenizer_gives_the_text_back(bpe_metadata, name):
    tokenizer = GGUFTokenizer({**bpe_metadata, "tokenizer.ggml.pre": name})

    @settings(max_examples=40, deadline=None)
    @given(texts)
    def check(text):
        expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[name].nfc else text
        assert tokenizer.decode(tokenizer.encode(text)) == expected

    check()


def test_words_that_no_merge_reaches_are_taken_whole_by_llama_3_only(bpe_metadata):
    tokens = [*bpe_metadata["tokenizer.ggml.tokens"], "xqzkj"]
    metadata = {
        **bpe_metadata,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*bpe_metadata["tokenizer.ggml.token_type"], 1],
    }
    whole = {
        name: GGUFTokenizer({**metadata, "tokenizer.ggml.pre": name}).encode("xqzkj") == [len(tokens) - 1]
        for name in ORIGINAL_PATTERNS
    }
    assert whole == {name: name in ("llama-bpe", "tekken") for name in ORIGINAL_PATTERNS}


def test_qwen_composes_characters_first(bpe_metadata):
    decomposed, composed = "cafe\u0301", "caf\u00e9"
    for name, same in (("qwen2", True), ("gpt-2", False)):
        tokenizer = GGUFTokenizer({**bpe_metadata, "tokenizer.ggml.pre": name})
        assert (tokenizer.encode(decomposed) == tokenizer.encode(composed)) == same


def test_special_tokens_in_a_text_are_recognised_and_none_are_added(bpe_metadata):
    tokenizer = GGUFTokenizer({**bpe_metadata, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 1})
    tokens = bpe_metadata["tokenizer.ggml.tokens"]
    start, end, tool = (tokens.index(token) for token in ("<|im_start|>", "<|im_end|>", "<tool>"))
    ids = tokenizer.encode("<|im_start|>a<tool><|im_end|>")
    assert ids == [start, *tokenizer.encode("a"), tool, end]
    assert tokenizer.decode(ids) == "<|im_start|>a<tool><|im_end|>"
    assert tokenizer.adds_bos
    assert tokenizer.eos_token_ids == {tokens.index("<|endoftext|>"), end}


def test_half_a_character_decodes_to_a_replacement(bpe_metadata):
    tokenizer = GGUFTokenizer(bpe_metadata)
    ids = tokenizer.encode("👩")
    assert len(ids) > 1
    assert tokenizer.decode(ids[:1]) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.decode(ids) == "👩"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "default"}, "tokenizer.ggml.pre='default' is unknown"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre=None is unknown"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert' is not supported; gpt2, llama are"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model=None is not supported"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 entries"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id=1000000 is outside the vocabulary"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": [1, 1, 1]}, "'a' twice"),
    ],
)
def test_unknown_values_are_refused_by_name(bpe_metadata, changes, message):
    with pytest.raises(GGUFError, match=regex.escape(message)):
        GGUFTokenizer({**bpe_metadata, **changes})


@pytest.mark.parametrize("key", ["tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
def test_missing_metadata_is_named(bpe_metadata, key):
    with pytest.raises(GGUFError, match=f"metadata {key} is missing"):
        GGUFTokenizer({name: value for name, value in bpe_metadata.items() if name != key})


def test_the_bundled_tokenizer_equals_the_hugging_face_one(smollm2):
    """SmolLM2's tokenizer.json: digits one by one, then GPT-2's byte level."""
    metadata = GGUFFile(smollm2.source).metadata
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    reference = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    reference.decoder = decoders.ByteLevel()
    samples = HARD_TEXTS + CORPUS[:10]
    draw = random.Random(4)
    samples += ["".join(chr(draw.choice([draw.randrange(32, 127), draw.randrange(160, 0x3000)])) for _ in range(60))]
    for text in samples:
        ids = smollm2.tokenizer.encode(text)
        assert ids == reference.encode(text).ids
        assert smollm2.tokenizer.decode(ids) == text == reference.decode(ids)
    assert smollm2.tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
