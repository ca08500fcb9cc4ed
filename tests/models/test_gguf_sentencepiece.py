"""SentencePiece tokenizers from GGUF metadata, compared with Google's own library on a model trained by the tests."""

import io

import pytest
import sentencepiece
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tokenizer_texts import CORPUS, texts
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

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

    @settings(max_examples=300, deadline=None)
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


def library_tokenizer(metadata):
    """The same tokenizer in PyPI tokenizers, with every way to cut a token into two tokens as a merge."""
    types, scores = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.scores"]
    tokens = [
        token.replace("▁", " ") if kind == 4 else token for token, kind in zip(metadata["tokenizer.ggml.tokens"], types)
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, index in vocabulary.items():
        for left, right in ((token[:cut], token[cut:]) for cut in range(1, len(token))):
            if types[index] in (1, 5) and left in vocabulary and right in vocabulary:
                merges.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    unknown = next((token for token, kind in zip(tokens, types) if kind == 2), None)
    merges = [(left, right) for *_, left, right in sorted(merges)]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = FastTokenizer(model)
    add_prefix = metadata["tokenizer.ggml.add_space_prefix"]
    prefix = [normalizers.Prepend("▁")] if add_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if add_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    special = [token for kind in (3, 4) for token, its in zip(tokens, types) if its == kind]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


@st.composite
def vocabularies(draw):
    """Metadata of few short tokens of every type."""
    words = draw(st.lists(st.text("ab▁é", min_size=2, max_size=4), min_size=8, max_size=40, unique=True))
    # Of letters without a token, sentencepiece joins a token, and the library with a list of merges does not.
    letters = draw(st.permutations("ab▁é"))
    others = ["<unk>", "<s>", "<tool>", "▁▁▁▁▁▁"]
    # With some of the bytes, the library writes an unknown character after the bytes that follow it.
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(draw(st.sampled_from([0, 256])))]
    # Characters without a token and bytes end a merge; without an unknown token, the library merges across them.
    unknown = draw(st.sampled_from([2, 3])) if byte_tokens else 2
    num_texts = len(words) + len(letters)
    kinds = [draw(st.sampled_from([1] * 9 + [5, 4])) for _ in words] + [1] * len(letters)
    scores = [-float(place) for place in draw(st.permutations(range(num_texts)))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*others, *byte_tokens, *words, *letters],
        "tokenizer.ggml.scores": [0.0] * (len(others) + len(byte_tokens)) + scores,
        "tokenizer.ggml.token_type": [unknown, 3, 4, 4] + [6] * len(byte_tokens) + kinds,
        "tokenizer.ggml.add_space_prefix": draw(st.booleans()),
    }


def test_random_vocabularies_equal_the_library_with_a_list_of_merges():
    num_compared = 0

    @settings(max_examples=150, deadline=None, phases=[Phase.generate])  # shrinking takes minutes
    @given(vocabularies(), st.lists(st.text("aabb é▁x<", max_size=30), min_size=1, max_size=4))
    def check(metadata, some_texts):
        nonlocal num_compared
        try:
            tokenizer = GGUFTokenizer(metadata)
        except GGUFError as refused:
            assert "all the same" in str(refused) or "twice" in str(refused)
            return
        expected = library_tokenizer(metadata)
        for text in [*some_texts, "<s>".join(some_texts) + "<tool>ab      a"]:
            ids = tokenizer.encode(text)
            assert ids == expected.encode(text, add_special_tokens=False).ids
            assert tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=False)
        num_compared += 1

    check()
    assert num_compared > 100


@pytest.mark.parametrize(("score", "expected"), [(0.0, ["ab", "c"]), (1.0, ["a", "bc"])])
def test_of_equal_scores_the_left_neighbours_are_joined_first(score, expected):
    tokens = ["<unk>", "bc", "a", "b", "c", "ab", "other"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0, score, -1.0, -1.0, -1.0, 0.0, -2.0],
        "tokenizer.ggml.token_type": [2] + [1] * 6,
        "tokenizer.ggml.add_space_prefix": False,
    }
    assert [tokens[token] for token in GGUFTokenizer(metadata).encode("abc")] == expected


@pytest.mark.parametrize("bytes_known", [0, 255])
def test_characters_without_a_token_are_one_unknown_token_or_none(bytes_known):
    """Only all 256 bytes can stand for characters; without an unknown token these are left out."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(bytes_known)]
    for kind, expected in ((2, ["a", "?", "a"]), (3, ["a", "a"])):
        tokens = ["?", "a", "", *byte_tokens]
        metadata = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * len(tokens),
            "tokenizer.ggml.token_type": [kind, 1, 1] + [6] * bytes_known,
            "tokenizer.ggml.add_space_prefix": False,
        }
        assert [tokens[token] for token in GGUFTokenizer(metadata).encode("a日éa")] == expected
