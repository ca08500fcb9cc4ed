"""Answers in channels: reasoning, content and calls of tools, as gpt-oss writes them."""

import json
import random
import re
from dataclasses import replace

import jsonschema
import pytest
from call_templates import CHANNELS, FAMILIES
from letter_llama import make_letter_llama
from llguidance import LLMatcher
from serve_helpers import serving
from test_call_families import FUNCTIONS, MESSAGES, PARAMETERS, SCHEMAS, TOOLS, MarkedTokenizer, walked

from workbench import Engine, EngineConfig
from workbench.apps.serve.channels import ChannelForm, ChannelParser, has_channels
from workbench.engine.grammar import vocabulary_of
from workbench.engine.grammar_process import make_tokenizer

MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"]
GO = '{"choice": "a", "flag": true}'
THINK = "<|channel|>analysis<|message|>why < not<|end|><|start|>assistant"
SAY = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"


@pytest.fixture(scope="module", params=[False, True])
def made(request):
    """The tokenizer, with and without tokens for the marks, and its letters."""
    plain = make_letter_llama(CHANNELS)
    if not request.param:
        return plain.tokenizer, make_tokenizer(vocabulary_of(plain))
    tokenizer = MarkedTokenizer(MARKS, CHANNELS)
    return tokenizer, make_tokenizer(vocabulary_of(replace(plain, tokenizer=tokenizer)))


def test_a_template_with_channels_is_found():
    assert has_channels(make_letter_llama(CHANNELS).tokenizer)
    assert not any(has_channels(make_letter_llama(FAMILIES[name]).tokenizer) for name in ("tags", "numbered"))
    assert not has_channels(make_letter_llama().tokenizer)


def parsed(parts):
    """The fields of an answer in parts."""
    parser, whole, calls = ChannelParser(), {}, []
    for i, part in enumerate(parts, 1):
        added = parser.feed(part, final=i == len(parts))
        for call in added.pop("tool_calls", []):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
        for name, text in added.items():
            whole[name] = whole.get(name, "") + text
    return whole, calls


HEADS = [
    "<|channel|>commentary to=functions.go <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.go<|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.go<|message|>",
    "<|channel|>commentary to=functions.go json<|message|>",
    " to=functions.go<|channel|>commentary json<|message|>",
    " to=functions.go<|channel|>commentary <|constrain|>json<|message|>",
]
WHY = {"reasoning": "why < not", "reasoning_content": "why < not"}
ANSWERS = [
    ("<|channel|>final<|message|>Hi <b>", {"content": "Hi <b>"}, []),
    (THINK + "<|channel|>final<|message|>Hi", {**WHY, "content": "Hi"}, []),
    (THINK + SAY + "<|channel|>final<|message|>Hi", {**WHY, "content": "I look.Hi"}, []),
    *((THINK + head + GO, WHY, [["go", GO]]) for head in HEADS),
    (SAY + HEADS[0] + GO, {"content": "I look."}, [["go", GO]]),
    ("plain words", {"content": "plain words"}, []),
    ("<|channel|>analysis<|message|>cut o", {"reasoning": "cut o", "reasoning_content": "cut o"}, []),
    (THINK + "<|channel|>fin", WHY, []),
]


@pytest.mark.parametrize(("text", "fields", "calls"), ANSWERS)
def test_an_answer_is_separated_at_any_cut(text, fields, calls):
    assert parsed([text]) == (fields, calls)
    assert parsed(list(text)) == (fields, calls)
    assert all(parsed([text[:cut], text[cut:]]) == (fields, calls) for cut in range(len(text)))
    for end in ("<|call|>", "<|return|>", "<|end|>"):
        assert not text.endswith(GO) or parsed([text + end]) == (fields, calls)


def test_the_grammar_allows_what_models_write(made):
    tokenizer, letters = made
    form = ChannelForm.of(tokenizer, TOOLS)
    for choice in ("auto", "required"):
        matcher = LLMatcher(letters, form.grammar(FUNCTIONS, choice, tokenizer, parallel=True), log_level=0)
        assert not matcher.is_error(), matcher.get_error()

        def fits(text, matcher=matcher):
            ids = [*tokenizer.encode(text), 1]
            return matcher.deep_copy().validate_tokens(ids) == len(ids)

        for text, _, calls in ANSWERS[:10]:
            assert fits(text) is (choice == "auto" or bool(calls)), (choice, text)
        for head in HEADS:
            wrong = [head.replace("go", "fly") + GO, head + '{"choice": "c", "flag": true}', head + GO + head + GO]
            assert not any(map(fits, wrong)), head
            assert fits(head.replace("go", "stop") + "{}")


def test_random_answers_of_the_grammar_are_calls_with_valid_arguments(made):
    tokenizer, letters = made
    form, rng, finished = ChannelForm.of(tokenizer, TOOLS), random.Random(3), 0
    grammar = form.grammar(FUNCTIONS, "required", tokenizer, parallel=True)
    for _ in range(12):
        ids = walked(LLMatcher(letters, grammar, log_level=0), rng, tokenizer)
        if ids is not None:
            finished += 1
            ((name, arguments),) = parsed([tokenizer.decode([i]) for i in ids])[1]
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert finished >= 2


def test_a_conversation_over_http():
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=4, block_size=4, num_blocks=800, max_model_len=500)
    with Engine(make_letter_llama(CHANNELS), config) as engine, serving(engine) as server:

        def ask(messages, **body):
            given = {"messages": messages, "max_tokens": 200, "seed": 1, **body}
            status, _, text = server.ask("POST", "/v1/chat/completions", given)
            assert status == 200, text
            return json.loads(text)["choices"][0]

        tools = [{"function": {"name": "go", "parameters": {"properties": {"a": {"enum": ["x"]}}, "required": ["a"]}}}]
        choice = ask(MESSAGES, tools=tools, tool_choice="required")
        if choice["finish_reason"] == "tool_calls":
            (call,) = choice["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"])["a"] == "x"
            result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
            assert ask([*MESSAGES, choice["message"], result], tools=tools, max_tokens=4)
        assert ask(MESSAGES, max_tokens=4)["finish_reason"] == "length"
        calling = {
            "role": "assistant", "content": None, "reasoning": "why",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "go", "arguments": '{"a": "x"}'}}],
        }  # fmt: skip
        body = {"messages": [*MESSAGES, calling, {"role": "tool", "tool_call_id": "a", "content": "done"}]}
        tokens = json.loads(server.ask("POST", "/tokenize", body)[2])["tokens"]
        shown = make_letter_llama(CHANNELS).tokenizer.decode(tokens)
        assert re.search(r"analysis<\|message\|>why<\|end\|>.*to=functions.go.*{\"a\": \"x\"}<\|call\|>.*done", shown)


def test_the_parameters_are_those_of_the_other_families():
    assert FUNCTIONS[0].parameters is PARAMETERS
