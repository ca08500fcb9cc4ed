"""A tiny random llama whose tokens are pieces of text, for grammars over characters."""

import string
from dataclasses import replace

from word_llama import make_tiny_llama

PIECES = ["true", "false", "null", '", "', '": ', "ab", "12", "{}", "[]", "  ", "é", "日", "\\n"]
TEXTS = ["", "", *string.printable[:97], *PIECES]


class LetterTokenizer:
    """A tokenizer for tests: printable characters and a few pieces; token 1 ends an output."""

    vocab_size = len(TEXTS)
    eos_token_ids = frozenset({1})
    bos_token_id = 0
    adds_bos = False
    has_chat_template = False

    def encode(self, text):
        return [TEXTS.index(letter, 2) for letter in text]

    def decode(self, ids):
        return "".join(TEXTS[i] if i < len(TEXTS) else "\N{REPLACEMENT CHARACTER}" for i in ids)


def make_letter_llama(template=None):
    """The tiny random llama, over text; with a chat template if one is given."""
    model, tokenizer = make_tiny_llama(), LetterTokenizer()
    assert tokenizer.vocab_size <= model.vocab_size
    if template is not None:
        from workbench.models.tokenizer import ChatTemplate

        tokenizer.has_chat_template, tokenizer.apply_chat_template = True, ChatTemplate(template).render
    return replace(model, tokenizer=tokenizer, eos_token_ids=tokenizer.eos_token_ids)
