"""Text that grows token by token: no half characters, and stop strings found across tokens."""

import pytest

from workbench.engine.output_processor import IncrementalDetokenizer


class Bytes:
    """A tokenizer whose tokens are bytes: every multi-byte character takes several tokens."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


class Words:
    """A tokenizer that, like SentencePiece, drops the space of the first word it decodes."""

    def decode(self, ids):
        return "".join(f" w{i}" for i in ids).removeprefix(" ")


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語のテキスト", "🙂👩‍👩‍👧 family", "a\nb\tc"])
def test_pieces_join_to_the_text_and_no_piece_is_half_a_character(text):
    detokenizer = IncrementalDetokenizer(Bytes(), list(b"prompt"))
    pieces = [detokenizer.append(byte) for byte in text.encode()]
    assert "".join(pieces) == text == detokenizer.text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_the_first_word_keeps_its_space():
    detokenizer = IncrementalDetokenizer(Words(), [1, 2])
    assert detokenizer.append(3) == " w3"


def test_an_incomplete_character_comes_out_at_the_end():
    detokenizer = IncrementalDetokenizer(Bytes(), b"p")
    assert detokenizer.append(0xF0) == ""
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("stop", ["END", "E", "xEND", "hello x"])
def test_a_stop_string_is_found_across_tokens_and_cut_away(stop):
    detokenizer = IncrementalDetokenizer(Bytes(), b"p", stop=[stop])
    full = "hello xEND more"
    for byte in full.encode():
        detokenizer.append(byte)
        if detokenizer.stopped_by:
            break
    assert detokenizer.stopped_by == stop
    assert detokenizer.text == full[: full.index(stop)]


def test_a_stop_string_of_the_prompt_does_not_count():
    detokenizer = IncrementalDetokenizer(Bytes(), b"EN", stop=["END"])
    assert detokenizer.append(ord("D")) == "D"
    assert not detokenizer.stopped_by


def test_an_end_token_adds_no_text():
    detokenizer = IncrementalDetokenizer(Bytes(), b"p", hidden=frozenset({65}))
    assert detokenizer.append(66) == "B"
    assert detokenizer.append(65) == ""
    assert detokenizer.text == "B"
