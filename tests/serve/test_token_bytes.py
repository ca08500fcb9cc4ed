"""The bytes of log-probabilities, which clients join: also of tokens that are part of a character."""

import random
from dataclasses import replace
from itertools import chain

import pytest
from gguf_files import byte_tokenizer
from serve_helpers import ENGINE, serving
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from word_llama import make_tiny_llama

from workbench import Engine, EngineConfig
from workbench.models.gguf.tokenizer import GGUFTokenizer
from workbench.models.token_bytes import byte_letters, token_bytes
from workbench.models.tokenizer import HuggingFaceTokenizer

TEXTS = ("😀", "naïve 日本 😀🏽 the end", "\u200b\x00 \ufffd x", "🇩🇪", " leading and  double ", "\x7f\x80\xa0\xad")
PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{value:02X}>" for value in range(256)),
    "\u2581",
    *"abcdefghijklmnopqrstuvwxyz",
]


def sentencepiece(add_prefix):
    return GGUFTokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": PIECES,
            "tokenizer.ggml.scores": [0.0] * len(PIECES),
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 27],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_space_prefix": add_prefix,
        }
    )


def hugging_face(byte_level):
    from transformers import PreTrainedTokenizerFast

    if byte_level:
        made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(sorted(byte_letters()))}, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    else:
        vocabulary = {piece: i for i, piece in enumerate(PIECES)}
        made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([AddedToken("<|end \ufffd|>")])
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end \ufffd|>"))


TOKENIZERS = {
    "byte-level": lambda: GGUFTokenizer(byte_tokenizer(300)),
    "sentencepiece": lambda: sentencepiece(False),
    "sentencepiece with a prefix": lambda: sentencepiece(True),
    "transformers, byte-level": lambda: hugging_face(True),
    "transformers, sentencepiece": lambda: hugging_face(False),
}


def bytes_of(tokenizer, tokens):
    return b"".join(token_bytes(tokenizer, token, tokenizer.decode([token])) for token in tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_joined_bytes_are_those_of_the_text(kind):
    tokenizer, rng = TOKENIZERS[kind](), random.Random(10)
    drawn = [
        "".join(chr(rng.choice([rng.randrange(128), rng.randrange(0xD800)])) for _ in range(20)) for _ in range(20)
    ]
    for text in (*TEXTS, *(text.replace("\u2581", "") for text in drawn)):
        found = bytes_of(tokenizer, tokenizer.encode(text))
        assert found == (b" " * ("prefix" in kind) + text.encode())


def test_every_byte_has_a_letter():
    assert {*byte_letters()} == {*pre_tokenizers.ByteLevel.alphabet()} and sorted(byte_letters().values()) == [
        *range(256)
    ]


def test_special_tokens_and_tokenizers_without_a_vocabulary_have_the_bytes_of_their_text():
    tokenizer = hugging_face(True)
    (token,) = tokenizer.eos_token_ids
    assert bytes_of(tokenizer, [token]) == "<|end \ufffd|>".encode()

    class Bare:
        def decode(self, ids):
            return "\ufffd"

    assert bytes_of(Bare(), [3]) == b"\xef\xbf\xbd"


class ByteTokenizer:
    """Token n is the byte 0x88 + n: most tokens are part of a character."""

    def __init__(self):
        self._inner = GGUFTokenizer(byte_tokenizer(300))
        letters = {value: letter for letter, value in byte_letters().items()}
        tokens = byte_tokenizer(300)["tokenizer.ggml.tokens"]
        self._ids = [tokens.index(letters[0x88 + token]) for token in range(120)]
        self.vocab_size, self.eos_token_ids, self.bos_token_id, self.adds_bos = 120, frozenset(), None, False
        self.has_chat_template = True

    def encode(self, text):
        return [5, 6, 7]

    def decode(self, ids):
        return self._inner.decode([self._ids[token] for token in ids])

    def piece(self, token):
        return self._inner.piece(self._ids[token])

    def apply_chat_template(self, messages, add_generation_prompt=True, **kw):
        return "x"


@pytest.fixture(scope="module")
def server():
    model = replace(make_tiny_llama(), tokenizer=ByteTokenizer(), eos_token_ids=frozenset())
    with Engine(model, EngineConfig(**ENGINE)) as engine, serving(engine) as client:
        yield client


OPTIONS = {"model": "tiny-llama", "max_tokens": 40, "temperature": 1, "seed": 3, "logprobs": True}


@pytest.mark.parametrize("stream", [False, True])
def test_chat_gives_the_bytes_of_each_token(server, stream):
    pytest.importorskip("openai", reason="the openai client is not installed (extra: test)")
    extra = {"return_token_ids": True}
    asked = OPTIONS | {"top_logprobs": 3, "messages": [{"role": "user", "content": "x"}], "extra_body": extra}
    answer = server.openai().chat.completions.create(stream=stream, **asked)
    choices = [event.choices[0] for event in (answer if stream else [answer]) if event.choices]
    content = list(chain.from_iterable(choice.logprobs.content for choice in choices if choice.logprobs))
    tokens = list(chain.from_iterable(choice.model_extra.get("token_ids") or () for choice in choices))
    assert [item.bytes for item in content] == [[0x88 + token] for token in tokens] and len(tokens) == 40
    assert all(top.bytes != [0xEF, 0xBF, 0xBD] and len(top.bytes) == 1 for item in content for top in item.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_give_the_bytes_of_each_token(server, stream):
    pytest.importorskip("openai", reason="the openai client is not installed (extra: test)")
    asked = OPTIONS | {"logprobs": 2, "prompt": [5, 6, 7], "extra_body": {"return_token_ids": True}}
    answer = server.openai().completions.create(stream=stream, **asked)
    choices = [event.choices[0] for event in (answer if stream else [answer]) if event.choices]
    found = list(chain.from_iterable(each.logprobs.model_extra["bytes"] for each in choices if each.logprobs))
    tokens = list(chain.from_iterable(choice.model_extra.get("token_ids") or () for choice in choices))
    assert found == [[0x88 + token] for token in tokens] and len(tokens) == 40
