"""SentencePiece tokenizers from GGUF metadata, compared with Google's own library on a model trained by the tests."""

import io

import pytest
import sentencepiece
from hypothesis import given, settings
from tokenizer_texts import CORPUS, texts

from workbench.models.gguf.file import GGUFError
from workbench.models.gguf.tokenizer import GGUFTokenizer


def user_defined(add_dummy_prefix):
    """Gemma adds no space in front and defines tokens for runs of spaces."""
    return ["<tool>"] if add_dummy_prefix else ["<tool>", "▁▁▁▁"]


def train_sentencepiece(add_dummy_prefix):
    """A SentencePiece BPE with byte fallback, like those of Llama and Gemma."""
    lines = [line for text in CORPUS for line in text.splitlines() if line.strip()]
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=file,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=user_defined(add_dummy_prefix),
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())


def sentencepiece_metadata(processor, add_dummy_prefix):
    """The metadata that llama.cpp's converter writes for a SentencePiece model."""
    size = processor.get_piece_size()

    def kind(index):
        for number, test in (
            (2, processor.is_unknown),
            (3, processor.is_control),
            (5, processor.is_unused),
            (6, processor.is_byte),
        ):
            if test(index):
                return number
        return 4 if processor.id_to_piece(index) in user_defined(add_dummy_prefix) else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [processor.id_to_piece(index) for index in range(size)],
        "tokenizer.ggml.scores": [processor.get_score(index) for index in range(size)],
        "tokenizer.ggml.token_type": [kind(index) for index in range(size)],
        "tokenizer.ggml.add_space_prefix": add_dummy_prefix,
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
    }


@pytest.fixture(scope="module", params=[True, False], ids=["space prefix", "no prefix"])
def sentencepiece_pair(request):
    processor = train_sentencepiece(request.param)
    return processor, GGUFTokenizer(sentencepiece_metadata(processor, request.param))


def test_sentencepiece_equals_googles_library(sentencepiece_pair):
    processor, tokenizer = sentencepiece_pair

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(texts.filter(lambda text: "\x00" not in text and "▁" not in text and "<" not in text))
    def check(text):
        assert tokenizer.encode(text) == processor.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()
    for text in CORPUS[:5]:
        if "<" not in text:
            assert tokenizer.encode(text) == processor.encode(text)


def test_sentencepiece_control_and_user_defined_tokens(sentencepiece_pair):
    processor, tokenizer = sentencepiece_pair
    assert tokenizer.bos_token_id == processor.bos_id()
    assert tokenizer.eos_token_ids == {processor.eos_id()}
    assert tokenizer.adds_bos
    tool = processor.piece_to_id("<tool>")
    assert tool in tokenizer.encode("use <tool> now")
    assert tokenizer.encode("<s>")[0] == processor.bos_id()
    assert tokenizer.encode("日")[-3:] == [processor.piece_to_id(f"<0x{byte:02X}>") for byte in "日".encode()]


def test_the_space_prefix_comes_after_every_special_token(sentencepiece_pair):
    """As in llama.cpp: the text after <s> in a rendered chat template begins like a separate text."""
    _, tokenizer = sentencepiece_pair
    assert tokenizer.encode("<s>the")[1:] == tokenizer.encode("the")
    assert tokenizer.decode(tokenizer.encode("the")) == "the"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.scores": [1.0]}, "scores has 1 entries"),
        ({"tokenizer.ggml.scores": [-1000.0] * 900}, "scores are all the same"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces=True is not supported"),
    ],
)
def test_sentencepiece_metadata_that_cannot_be_used_is_refused(sentencepiece_pair, changes, message):
    processor, _ = sentencepiece_pair
    with pytest.raises(GGUFError, match=message):
        GGUFTokenizer({**sentencepiece_metadata(processor, True), **changes})
