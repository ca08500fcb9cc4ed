"""Try real chat templates: ``python scripts/list_call_forms.py FOLDER``, a folder with ``*.jinja`` files.

A line for each says the form of calls that is learned from it, or the reason why tools are refused. If it is learned, a
call with odd arguments is rendered, and has to be allowed by the grammar and read back by the parser. The last line
compares six conversations per template with the texts of transformers, refusals included.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as Tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from workbench.apps.serve.call_forms import CallForm, Function  # noqa: E402
from workbench.apps.serve.channels import ChannelForm, has_channels  # noqa: E402
from workbench.apps.serve.known_forms import with_written_calls  # noqa: E402
from workbench.apps.serve.tools import MessageParser  # noqa: E402
from workbench.models.tokenizer import ChatTemplate, ChatTemplateError  # noqa: E402

VARIABLES = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "description": "a"}, "b": {"type": "integer", "description": "b"},
        "c": {"type": "object", "properties": {"d": {"type": "array", "items": {"type": "string"}}}, "description": ""},
    },
    "required": ["a"],
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "go", "description": "Go.", "parameters": SCHEMA}}]
USER, ANSWER = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief"}


def call_of(arguments: dict[str, Any], identity: str = "call00000") -> dict[str, Any]:
    """An answer with a call."""
    call = {"id": identity, "type": "function", "function": {"name": "go", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


CONVERSATIONS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([USER], {}),
    ([SYSTEM, USER], {}),
    ([USER, ANSWER, USER], {}),
    ([USER], {"tools": TOOLS}),
    ([USER, call_of({"a": "x"}), {"role": "tool", "tool_call_id": "call00000", "content": "done"}], {"tools": TOOLS}),
    ([USER, ANSWER], {"add_generation_prompt": False}),
]


class Bytes:
    """A tokenizer whose tokens are bytes."""

    eos_token_ids = frozenset({256})
    has_chat_template = True

    def __init__(self, template: ChatTemplate) -> None:
        self.apply_chat_template = template.render

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """The text of bytes."""
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def vocabulary() -> LLTokenizer:
    """The bytes as llguidance takes them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = Tokenizers(models.BPE(vocab={**{letter: i for i, letter in enumerate(letters)}, "<E>": 256}, merges=[]))
    known.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    known.decoder = decoders.ByteLevel()
    known.add_special_tokens(["<E>"])
    return LLTokenizer(known.to_str(), n_vocab=257, eos_token=256)


def tried(template: ChatTemplate, letters: LLTokenizer) -> str:
    """The form of a template's calls, or the reason why it has none.

    Raises:
        AssertionError: The template writes a call that the grammar refuses or the parser reads differently.
    """
    tokenizer: Any = Bytes(template)
    if has_channels(tokenizer):
        return f"{ChannelForm.of(tokenizer, TOOLS).mark!r}, arguments: a JSON object, one"
    try:
        form = CallForm.of(tokenizer, TOOLS)
    except ValueError as problem:
        return f"refused: {str(problem).removeprefix('tools: ')}"
    functions = [Function("go", parameters=SCHEMA | {"additionalProperties": False})]
    matcher = LLMatcher(letters, form.grammar(functions, "auto", tokenizer, parallel=True), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    for arguments in ({"a": "x < y, z"}, {"a": "", "b": -3, "c": {"d": ["}", "x"]}}):
        identity = "functions.go:0" if form.in_id else "call00000"
        messages = with_written_calls([USER, call_of(arguments, identity)], tokenizer)
        text = template.render(messages, False, tools=TOOLS)
        if "{'d'" in text:  # Python's spelling, in which models write JSON as well
            continue
        begin = form.mark if not form.leads else form.opening
        text = text[text.rindex(begin, 0, text.index("go", text.rindex("Hello"))) :]
        ends = [text.rindex(end) + len(end) for end in (form.end or form.closing,) if end in text] or [len(text)]
        text = text[: ends[0]]
        parser, calls = MessageParser(form, functions=functions), []
        for i, letter in enumerate(text):
            calls += parser.feed(letter, final=i + 1 == len(text)).get("tool_calls", [])
        read = json.loads("".join(call["function"]["arguments"] for call in calls))
        assert read == arguments, (text, read)
        ids = letters.tokenize_str(text)
        assert matcher.deep_copy().validate_tokens(ids) == len(ids), text
    kind = "a JSON object" if form.pairs is None else "pairs" if not form.pairs.own else "pairs, quotes of the model"
    return f"{form.mark + form.opening!r}, arguments: {kind}, {'several' if form.more else 'one'}"


def same(source: str, template: ChatTemplate) -> int:
    """The number of conversations that transformers renders, or refuses, alike."""
    count = 0
    for messages, options in CONVERSATIONS:
        tools, begins = options.get("tools"), options.get("add_generation_prompt", True)
        try:
            ours = template.render(messages, begins, tools=tools)
        except ChatTemplateError:
            ours = None
        try:
            theirs = render_jinja_template(
                [messages], chat_template=source, add_generation_prompt=begins, tools=tools, **VARIABLES
            )[0][0]
        except Exception:  # a template may raise anything
            theirs = None
        count += ours == theirs
        if ours != theirs:
            print("differs:", messages, options, repr(ours)[-300:], repr(theirs)[-300:], sep="\n  ")
    return count


def main() -> None:
    """Print the table."""
    letters, alike, paths = vocabulary(), 0, sorted(Path(sys.argv[1]).rglob("*.jinja"))
    for path in paths:
        source = path.read_text("utf-8")
        try:
            template = ChatTemplate(source, VARIABLES)
        except ChatTemplateError as problem:
            print(f"{path.stem}: {problem}")
            continue
        try:
            print(f"{path.stem}: {tried(template, letters)}")
        except (AssertionError, ValueError) as wrong:
            print(f"{path.stem}: WRONG {wrong}")
        alike += same(source, template)
    print(f"{alike} of {len(paths) * len(CONVERSATIONS)} conversations as transformers renders them")


if __name__ == "__main__":
    main()
