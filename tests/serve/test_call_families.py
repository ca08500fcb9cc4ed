"""Calls of tools whose arguments are written one by one, or which are numbered: learned, held and read."""

import json
import random
import re
from dataclasses import replace
from functools import cache

import jsonschema
import msgspec
import pytest
from call_templates import (
    AS_TEXT,
    BEHIND_AN_END,
    FAMILIES,
    NAMED_IN_IDS,
    NO_CALLS,
    NO_CALLS_AND_WORDS,
    NO_TOOLS,
    REFUSED,
    SAID,
)
from letter_llama import TEXTS, LetterTokenizer, make_letter_llama
from llguidance import LLMatcher
from serve_helpers import serving
from test_tools import collected
from tiers import examples

from workbench import Engine, EngineConfig
from workbench.apps.serve.call_forms import CallForm, Function
from workbench.apps.serve.conversation import render_conversation
from workbench.apps.serve.protocol import ChatRequest, decode_body, tool_dicts
from workbench.apps.serve.tools import MessageParser
from workbench.engine.grammar import vocabulary_of
from workbench.engine.grammar_form import MAX_GRAMMAR_BYTES
from workbench.engine.grammar_process import make_tokenizer
from workbench.models.tokenizer import ChatTemplate

KINDS = {
    "text": {"type": "string", "maxLength": 6},
    "choice": {"enum": ["a", "b<", 'say "c"', 7, None, "7"]},
    "count": {"type": "integer", "minimum": 3, "maximum": 40},
    "flag": {"type": "boolean"},
    "either": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "integer", "maximum": 9}, {"type": "null"}]},
    "list": {"type": "array", "items": {"enum": ["x}", "y]", 1]}},
    "inner": {
        "type": "object", "properties": {"k": {"enum": ["</v>", "q"]}, "n": {"$ref": "#/$defs/small"}},
        "required": ["k"], "additionalProperties": False,
    },
    "pattern": {"type": "string", "pattern": "^[a-c]{2,3}$"},
}  # fmt: skip
PARAMETERS = {
    "type": "object", "properties": KINDS, "required": ["choice", "flag"], "additionalProperties": False,
    "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 5}},
}  # fmt: skip
FUNCTIONS = [Function("go", parameters=PARAMETERS), Function("stop"), Function("free", parameters={"type": "object"})]
TOOLS = [{"type": "function", "function": msgspec.to_builtins(function)} for function in FUNCTIONS]
SCHEMAS = {"go": PARAMETERS, "stop": {"type": "object", "maxProperties": 0}, "free": {"type": "object"}}
MESSAGES = [{"role": "user", "content": "abc"}]


def written(tokenizer, calls):
    """Calls as a template writes them in an answer."""
    made = [{"id": f"call{i:05d}", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)]
    text = tokenizer.apply_chat_template(
        [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": made}], False, tools=TOOLS
    )
    return text.removeprefix(tokenizer.apply_chat_template(MESSAGES, tools=TOOLS)).strip("\n")


def parsed(form, parts):
    """The content and the calls of an answer in parts; arguments as they came."""
    parser, content, calls = MessageParser(form, functions=FUNCTIONS), "", []
    for i, part in enumerate(parts, 1):
        added = parser.feed(part, final=i == len(parts))
        content += added.get("content", "")
        for call in added.get("tool_calls", []):
            if call["index"] == len(calls):
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return content, calls


def drawn(rng, family):
    """Arguments for the first tool."""
    texts = ["", "a < b", "é 1", "nul", "{}x"[2:], "</", "a=b, c"] + (["it's \\"] if family != "keywords" else [])
    made = {
        "text": rng.choice(texts), "choice": rng.choice(["a", 'say "c"', 7, None]), "count": rng.randint(3, 40),
        "flag": rng.random() < 0.5, "either": rng.choice(["b", "", 5, None]), "list": rng.choice([[], ["x}", 1, "y]"]]),
        "inner": rng.choice([{"k": "</v>"}, {"k": "q", "n": 3}]), "pattern": "abc",
    }  # fmt: skip
    return {key: value for key, value in made.items() if key in ("choice", "flag") or rng.random() < 0.5}


@pytest.fixture(scope="module")
def letters():
    return make_tokenizer(vocabulary_of(make_letter_llama()))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_template_writes_is_allowed_and_read_back(family, letters):
    """The parts of an answer put together are the whole, at any cut."""
    tokenizer, rng = make_letter_llama(FAMILIES[family]).tokenizer, random.Random(family)
    form = CallForm.of(tokenizer, TOOLS)
    assert form.more is not None

    @cache
    def matcher_of(choice, parallel):
        grammar = form.grammar(FUNCTIONS, choice, tokenizer, parallel=parallel)
        matcher = LLMatcher(letters, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(text, choice="required", parallel=True):
        ids = [*tokenizer.encode(text), 1]
        return matcher_of(choice, parallel).deep_copy().validate_tokens(ids) == len(ids)

    for count in [1, 1, 2, 3] * examples(3):
        calls = [rng.choice([("go", drawn(rng, family)), ("stop", {})]) for _ in range(count)]
        text = written(tokenizer, calls)
        assert accepts(text) and accepts("a < b" + text, "auto"), text
        assert accepts(text, parallel=False) is (count == 1)
        assert not accepts(text.replace("go", "fly").replace("stop", "fly")) and not accepts("a" + text)
        expected = [(name, arguments) for name, arguments in calls]
        content, whole = parsed(form, [text])
        assert (content, [(name, json.loads(arguments)) for name, arguments in whole]) == ("", expected), text
        assert parsed(form, list(text)) == ("", whole)
        for cut in range(0, len(text), 3):
            assert parsed(form, [text[:cut], text[cut:]]) == ("", whole), (text, cut)
        assert parsed(form, ["a <", " b" + text]) == ("a < b", whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_outside_a_schema_are_not_allowed(family, letters):
    tokenizer = make_letter_llama(FAMILIES[family]).tokenizer
    form = CallForm.of(tokenizer, TOOLS)
    good = {"choice": "a", "flag": True}
    wrong = [
        {}, {"choice": "a"}, {"flag": True}, good | {"more": 1}, good | {"count": 2}, good | {"count": "x"},
        good | {"flag": 1}, good | {"choice": "c"}, good | {"text": "abcdefg"}, good | {"pattern": "abcd"},
        good | {"list": ["z"]}, good | {"inner": {}}, good | {"inner": {"k": "q", "n": 6}}, good | {"either": 10},
    ]  # fmt: skip
    matcher = LLMatcher(letters, form.grammar(FUNCTIONS, "required", tokenizer, parallel=True), log_level=0)
    for arguments in [good, *wrong]:
        ids = [*tokenizer.encode(written(tokenizer, [("go", arguments)])), 1]
        assert (matcher.deep_copy().validate_tokens(ids) == len(ids)) is (arguments is good), arguments


def random_schema(rng):
    """A schema of up to eleven arguments, some of which are required."""
    kinds = [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}, {"enum": ["x", "y"]}]
    names = rng.sample(["a", "ab", "b", "b1", "c", "d", "e", "f_f", "g", "h", "i"], rng.randint(1, 11))
    required = rng.sample(names, rng.randint(0, min(4, len(names))))
    properties = {name: rng.choice(kinds) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@pytest.mark.parametrize("family", ["tags", "functions", "keywords", "own quotes"])
@pytest.mark.parametrize("seed", range(6))
def test_arguments_come_in_any_order(family, seed, letters):
    """Up to seven of them, and beyond that the required ones; each once, and all that are required."""
    rng, tokenizer = random.Random(f"{family} {seed}"), make_letter_llama(FAMILIES[family]).tokenizer
    form, schema = CallForm.of(tokenizer, TOOLS), random_schema(rng)
    required, names = schema["required"], list(schema["properties"])
    values = {"integer": 7, "boolean": True, None: "x"}
    grammar = form.grammar([Function("go", parameters=schema)], "required", tokenizer, parallel=False)
    matcher = LLMatcher(letters, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()

    def fits(order):
        arguments = {name: values[schema["properties"][name].get("type")] for name in order}
        ids = [*tokenizer.encode(written(tokenizer, [("go", arguments)])), 1]
        return matcher.deep_copy().validate_tokens(ids) == len(ids)

    for _ in range(8):
        optional = [name for name in names if name not in required and rng.random() < 0.5]
        order = rng.sample(required + optional, len(required) + len(optional))
        if len(names) > 7:  # the optional ones in the order of the schema
            places = iter(sorted(optional, key=names.index))
            order = [name if name in required else next(places) for name in order]
        assert fits(order), (schema, order)
        for name in required:
            assert not fits([other for other in order if other != name])
        if order:
            text = written(tokenizer, [("go", {order[0]: values[schema["properties"][order[0]].get("type")]})])
            pairs = form.pairs
            begin, pair = text.partition(pairs.final)[0], text.split("go", 1)[1][len(form.between) :]
            pair = pair[: pair.rindex(pairs.final)]
            twice = begin.removesuffix(pair) + pair + pairs.separator + pair + text[text.rindex(pairs.final) :]
            assert matcher.deep_copy().validate_tokens([*tokenizer.encode(twice), 1]) <= len(twice)


def test_many_tools_leave_less_room_for_orders(letters):
    """The grammar stays within the limit on its length."""
    tokenizer = make_letter_llama(FAMILIES["functions"]).tokenizer
    form = CallForm.of(tokenizer, TOOLS)
    properties = {f"argument_{i}": {"type": "integer"} for i in range(6)}
    schema = {"type": "object", "properties": properties, "required": ["argument_1", "argument_4"]}
    sizes = []
    for count in (1, 10, 40):
        functions = [Function(f"go_{i}", parameters=schema) for i in range(count)]
        grammar = form.grammar(functions, "auto", tokenizer, parallel=True)
        assert len(grammar) <= MAX_GRAMMAR_BYTES and not LLMatcher(letters, grammar, log_level=0).is_error()
        sizes.append(len(grammar) / count)
    assert sizes == sorted(sizes, reverse=True)


def walked(matcher, rng, tokenizer=None):
    """A random text of a grammar; the letters that end strings and numbers come often, and special tokens."""
    ids, size = [], tokenizer.vocab_size if tokenizer is not None else len(TEXTS)
    for _ in range(500):
        mask = matcher.compute_logit_bias()
        allowed = [token for token in range(size) if mask[token]]
        if 1 in allowed and rng.random() < 0.7:
            return ids
        ends = [token for token in allowed if token >= len(TEXTS) or TEXTS[token] in tuple("<'/>}])|,\n")]
        ids.append(rng.choice(ends if ends and rng.random() < 0.6 else [t for t in allowed if t != 1] or allowed))
        if ids[-1] == 1:
            return ids[:-1]
        assert matcher.consume_token(ids[-1])
    return None


@pytest.mark.parametrize("family", FAMILIES)
def test_random_texts_of_a_grammar_are_calls_with_valid_arguments(family, letters):
    tokenizer, rng = make_letter_llama(FAMILIES[family]).tokenizer, random.Random(f"walk {family}")
    form, finished = CallForm.of(tokenizer, TOOLS), 0
    matchers = {
        parallel: LLMatcher(letters, form.grammar(FUNCTIONS, "required", tokenizer, parallel=parallel), log_level=0)
        for parallel in (True, False)
    }
    for parallel in [True, False] * examples(15):
        ids = walked(matchers[parallel].deep_copy(), rng)
        if ids is None:
            continue
        finished += 1
        text = tokenizer.decode(ids)
        content, calls = parsed(form, list(text))
        assert content == "" and calls and (parallel or len(calls) == 1), text
        assert parsed(form, [text]) == ("", calls)
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert finished >= 5


@pytest.mark.repeats(step=7)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_model_calls_over_http(family):
    """Whole and streamed, required and named; the client sends the calls back with their results."""
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=8, block_size=4, num_blocks=800, max_model_len=512)
    schema = {"type": "object", "properties": {"x": {"enum": ["a", "bc"]}, "n": {"enum": [1, True]}}, "required": ["x"]}
    schema["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": "go", "parameters": schema}}, TOOLS[1]]
    with Engine(make_letter_llama(FAMILIES[family]), config) as engine, serving(engine) as server:
        create, body = (
            server.openai().chat.completions.create,
            {"model": "tiny-llama", "tools": tools, "max_tokens": 300},
        )
        for choice in ("required", {"type": "function", "function": {"name": "go"}}):
            options = {**body, "tool_choice": choice, "messages": MESSAGES, "seed": 1, "parallel_tool_calls": False}
            first = create(**options).choices[0]
            assert first.finish_reason == "tool_calls" and first.message.content is None, first
            (call,) = first.message.tool_calls
            arguments = json.loads(call.function.arguments)
            jsonschema.validate(arguments, schema if call.function.name == "go" else SCHEMAS["stop"])
            streamed = [[call.function.name, call.function.arguments]]
            assert collected(create(**options, stream=True)) == ("", streamed, "tool_calls")
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        free = create(**{**body, "max_tokens": 9}, messages=[*MESSAGES, first.message.to_dict(), result])
        assert free.choices[0].message.content and not free.choices[0].message.tool_calls


@pytest.mark.parametrize("reason", REFUSED)
def test_a_form_that_cannot_be_learned_is_refused_with_the_reason(reason):
    with pytest.raises(ValueError, match=reason):
        CallForm.of(make_letter_llama(REFUSED[reason]).tokenizer, TOOLS)


@pytest.mark.parametrize(
    ("template", "text", "ids"),
    [
        (
            NAMED_IN_IDS,
            '<|calls|><|call|>functions.stop:3<|argument|>{}<|end|><|call|>functions.go:12<|argument|>{"choice": "a", '
            '"flag": true}<|end|><|done|>',
            ["functions.stop:3", "functions.go:12"],
        ),
        (AS_TEXT, '<|calls|><|call|>go<|sep|>{"choice": "a", "flag": true}<|end|><|done|>', None),
    ],
)
def test_names_in_ids_and_arguments_as_text(template, text, ids, letters):
    tokenizer = make_letter_llama(template).tokenizer
    form = CallForm.of(tokenizer, TOOLS)
    matcher = LLMatcher(letters, form.grammar(FUNCTIONS, "required", tokenizer, parallel=True), log_level=0)
    tokens = [*tokenizer.encode(text), 1]
    assert matcher.deep_copy().validate_tokens(tokens) == len(tokens)
    for cut in range(len(text)):
        parser, calls = MessageParser(form, functions=FUNCTIONS), []
        for part, final in ((text[:cut], False), (text[cut:], True)):
            calls += parser.feed(part, final=final).get("tool_calls", [])
        assert ids is None or [call["id"] for call in calls if "id" in call] == ids, cut
        assert [call["function"]["name"] for call in calls if "id" in call][-1] == "go"
    wrong = text.replace("functions.go", "functions.fly").replace(">go<", ">fly<")
    assert matcher.deep_copy().validate_tokens(tokenizer.encode(wrong)) < len(wrong)


def test_calls_that_a_template_leaves_out_are_written_for_it(letters):
    """As LFM 2 calls tools; earlier calls become part of the content."""
    tokenizer = make_letter_llama(NO_CALLS).tokenizer
    form = CallForm.of(tokenizer, TOOLS)
    arguments = {"choice": 'say "c"', "flag": True, "count": 7, "list": ["x}", 1], "inner": {"k": "q"}, "either": None}
    arguments = {key: arguments[key] for key in KINDS if key in arguments}
    calls = [{"id": "a", "type": "function", "function": {"name": "go", "arguments": json.dumps(arguments)}}]
    calls.append({"id": "b", "type": "function", "function": {"name": "stop", "arguments": "{}"}})
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls}]
    body = decode_body(json.dumps({"messages": messages, "add_generation_prompt": False}).encode(), ChatRequest)
    text = render_conversation(body.messages, body, tokenizer)[0].partition("assistant: ")[2].rstrip("\n")
    assert text == (
        '<|tool_call_start|>[go(choice="say \\"c\\"", count=7, flag=True, either=None, list=["x}", 1], '
        'inner={"k": "q"}), stop()]<|tool_call_end|>'
    )
    matcher = LLMatcher(letters, form.grammar(FUNCTIONS, "required", tokenizer, parallel=True), log_level=0)
    ids = [*tokenizer.encode(text), 1]
    assert matcher.validate_tokens(ids) == len(ids)
    content, read = parsed(form, list(text))
    assert content == "" and [(n, json.loads(a)) for n, a in read] == [("go", arguments), ("stop", {})]


def test_a_form_that_a_template_only_names_is_written_for_it(letters):
    """As Granite 3 calls tools."""
    tokenizer = make_letter_llama(NO_CALLS_AND_WORDS).tokenizer
    form, calls = CallForm.of(tokenizer, TOOLS), [("go", {"choice": 'say "c"', "flag": True}), ("stop", {})]
    made = [{"id": n, "type": "function", "function": {"name": n, "arguments": json.dumps(a)}} for n, a in calls]
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": made}]
    body = decode_body(json.dumps({"messages": messages, "add_generation_prompt": False}).encode(), ChatRequest)
    text = render_conversation(body.messages, body, tokenizer)[0].partition("assistant: ")[2].rstrip("\n")
    assert text == (
        '<|tool_call|>[{"name": "go", "arguments": {"choice": "say \\"c\\"", "flag": true}}, '
        '{"name": "stop", "arguments": {}}]'
    )
    matcher = LLMatcher(letters, form.grammar(FUNCTIONS, "required", tokenizer, parallel=True), log_level=0)
    ids = [*tokenizer.encode(text), 1]
    assert matcher.validate_tokens(ids) == len(ids)
    content, read = parsed(form, list(text))
    assert content == "" and [(n, json.loads(a)) for n, a in read] == calls


@pytest.mark.parametrize("variable", SAID)
def test_a_form_that_a_prompt_describes_is_used(variable, letters):
    """As SmolLM 3 calls tools, whose template reads them under another name."""
    tokenizer = make_letter_llama(SAID[variable]).tokenizer
    calls = [("go", {"choice": "a", "flag": True}), ("stop", {})]
    made = [{"id": n, "type": "function", "function": {"name": n, "arguments": json.dumps(a)}} for n, a in calls]
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": made}]
    body = {"messages": messages, "tools": TOOLS, "add_generation_prompt": False}
    request = decode_body(json.dumps(body).encode(), ChatRequest)
    prompt = render_conversation(request.messages, request, tokenizer, tool_dicts(request.tools))[0]
    form, text = request.call_form(tokenizer, prompt), prompt.partition("assistant: ")[2].rstrip("\n")
    assert all(function.name in prompt.partition("user: ")[0] for function in FUNCTIONS)
    assert text == (
        '<tool_call>\n{"name": "go", "arguments": {"choice": "a", "flag": true}}\n</tool_call>\n'
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    )
    hidden = decode_body(json.dumps(body | {"chat_template_kwargs": {variable: 0}}).encode(), ChatRequest)
    with pytest.raises(ValueError, match=f"chat_template_kwargs.*{variable}"):
        render_conversation(hidden.messages, hidden, tokenizer, tool_dicts(hidden.tools))
    for choice, answer in {"required": text, "auto": "abc\n" + text}.items():
        matcher = LLMatcher(letters, form.grammar(FUNCTIONS, choice, tokenizer, parallel=True), log_level=0)
        ids = [*tokenizer.encode(answer), 1]
        assert matcher.validate_tokens(ids) == len(ids)
        assert [(n, json.loads(a)) for n, a in parsed(form, list(answer))[1]] == calls


def test_a_call_may_begin_with_the_text_that_ends_a_message(letters):
    tokenizer = make_letter_llama(BEHIND_AN_END).tokenizer
    form = CallForm.of(tokenizer, TOOLS)
    arguments = '{"choice": "a", "flag": true}'
    text = f'<|sep|>\nfunction call<|role|>{{"name": "go", "arguments": {arguments}}}'
    assert written(tokenizer, [("go", {"choice": "a", "flag": True})]) == text + "<|sep|>"
    for choice, answer in {"required": text, "auto": "abc" + text}.items():
        matcher = LLMatcher(letters, form.grammar(FUNCTIONS, choice, tokenizer, parallel=True), log_level=0)
        ids = [*tokenizer.encode(answer), 1]
        assert matcher.validate_tokens(ids) == len(ids)
        assert parsed(form, list(answer)) == ("" if choice == "required" else "abc", [["go", arguments]])
    for special in ([], ["<|sep|>", "<|role|>"]):  # an answer without calls may end as a message does
        tokenizer = MarkedTokenizer(special, BEHIND_AN_END)
        vocabulary = make_tokenizer(vocabulary_of(replace(make_letter_llama(), tokenizer=tokenizer)))
        grammar = form.grammar(FUNCTIONS, "auto", tokenizer, parallel=True)
        for answer in ("abc", "abc<|sep|>", "abc<|sep|>\n", "abc<|sep|>\n \n", "abc<|sep|> ", "abc" + text):
            ids = [*tokenizer.encode(answer), 1]
            assert LLMatcher(vocabulary, grammar, log_level=0).validate_tokens(ids) == len(ids), (special, answer)
            content, calls = parsed(form, [tokenizer.decode([i]) for i in ids[:-1]])
            assert content == "abc" and bool(calls) is (text in answer)
    ends = make_letter_llama(BEHIND_AN_END).tokenizer
    ends.eos_token_ids, ends.decode = {7}, lambda ids: "<|sep|>"
    with pytest.raises(ValueError, match="also ends an answer"):
        CallForm.of(ends, TOOLS)


@pytest.mark.parametrize("family", ["tags", "own quotes", "numbered"])
def test_text_between_calls_is_the_same_however_it_is_cut(family):
    tokenizer = make_letter_llama(FAMILIES[family]).tokenizer
    form, call = CallForm.of(tokenizer, TOOLS), written(tokenizer, [("go", {"choice": "a", "flag": True})])
    for before, between, after, content in (
        ("a b\n", "\n\n", "\n", "a b\n"),
        ("", " \n", "\n\nIt  is\n\n- a\n", "\n\nIt  is\n\n- a"),
        ("", " x y\n", " \n z\n", " x y \n z"),
    ):
        answer = before + call + between + call + after
        for parts in ([answer], list(answer), [*re.split(r"(\s)", answer), ""]):
            read = parsed(form, parts)
            assert read[0] == content and len(read[1]) == 2, (parts, read)


def test_tools_may_be_described_by_the_messages():
    """As DeepSeek V3's and R1's templates need it, which show calls and no tools."""
    tokenizer = make_letter_llama(NO_TOOLS).tokenizer
    tools = [{"type": "function", "function": msgspec.to_builtins(function)} for function in FUNCTIONS[:2]]
    words = ["go", "stop", *KINDS]
    for lost in (None, *words):
        said = " ".join(word for word in words if word != lost)
        body = {"messages": [{"role": "user", "content": said}], "tools": tools}
        request = decode_body(json.dumps(body).encode(), ChatRequest)
        prompt = render_conversation(request.messages, request, tokenizer, tool_dicts(request.tools))[0]
        if lost is None:
            assert request.call_form(tokenizer, prompt).mark == "<|calls|>"
            continue
        with pytest.raises(ValueError, match="leaves them out: describe them in a message"):
            request.call_form(tokenizer, prompt)


def test_words_of_python_may_be_written_for_null_alone(letters):
    """As Gemma 4's template writes it, inside of lists too."""
    template = FAMILIES["own quotes"].replace("{{ v | tojson }}", "{{ v | tojson if v is not none else 'None' }}")
    tokenizer = make_letter_llama(template).tokenizer
    form = CallForm.of(tokenizer, TOOLS)
    grammar = form.grammar(FUNCTIONS, "required", tokenizer, parallel=True)
    for calls in (
        [("go", {"choice": None, "flag": True, "either": None})],
        [("free", {"a": [None, {"b": None, "c": "None"}], "d": True})],
    ):
        text = written(tokenizer, calls)
        assert "None" in text and "null" not in text
        ids = [*tokenizer.encode(text), 1]
        assert LLMatcher(letters, grammar, log_level=0).validate_tokens(ids) == len(ids), text
        assert [(n, json.loads(a)) for n, a in parsed(form, list(text))[1]] == calls


@pytest.mark.parametrize("key", ["k", "x y", "ключ", "a.b", "1", "$ref", "None", "a|b", "a b-c/d"])
def test_keys_without_quotes_are_any_words(key, letters):
    """In an object in the model's own quotes, after Gemma 4."""
    form = CallForm.of(make_letter_llama(FAMILIES["own quotes"]).tokenizer, TOOLS)
    inner = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
    schema = {"type": "object", "properties": {"o": inner}, "required": ["o"], "additionalProperties": False}
    assert form.unserved(schema) == []
    for arguments in ({"o": {key: "v"}}, {"o": {key: f"{{{key}:1,True}}"}}):
        text = f"<|tool_call>call:go{{o:{{{key}:<|q|>{arguments['o'][key]}<|q|>}}}}<tool_call|>"
        matcher = LLMatcher(
            letters, form.grammar([Function("go", parameters=schema)], "required", LetterTokenizer(), parallel=True)
        )
        if set(text) <= set(TEXTS):
            ids = [*LetterTokenizer().encode(text), 1]
            assert matcher.validate_tokens(ids) == len(ids)
        parser = MessageParser(form, functions=[Function("go", parameters=schema)])
        calls = parser.feed(text, final=True)["tool_calls"]
        assert json.loads(calls[0]["function"]["arguments"]) == arguments


@pytest.mark.parametrize("key", ["", " k", "a,b", "a:b", "a{b", 'q"q', "a]", "a\nb"])
def test_keys_that_cannot_be_spelled_are_named(key):
    form = CallForm.of(make_letter_llama(FAMILIES["own quotes"]).tokenizer, TOOLS)
    inner = {"type": "object", "properties": {key: {"type": "string"}, "z": {"type": "null"}}}
    lost = form.unserved({"type": "object", "properties": {"o": inner}})
    assert [one.because for one in lost] == ["calls of this model cannot spell this name"]


SPECIAL = {
    "tags": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "tags, a line each": ["<arg_value>", "</arg_value>", "<tool_call>", "</tool_call>"],
    "functions": ["<tool_call>", "</tool_call>"],
    "typed invocations": ["|D|"],
    "own quotes": ["<|tool_call>", "<tool_call|>", "<|q|>"],
    "keywords": ["<|calls|>", "<|end|>"],
    "wrapped strings": ["</param>", "</function>"],
    "numbered": ["<|calls|>", "<|call|>", "<|argument|>", "<|end|>", "<|done|>"],
}


class MarkedTokenizer(LetterTokenizer):
    """Letters, and special tokens behind them."""

    def __init__(self, special, template):
        self.special, self.vocab_size = special, len(TEXTS) + len(special)
        self.special_token_ids = frozenset(range(len(TEXTS), self.vocab_size))
        self.has_chat_template, self.apply_chat_template = True, ChatTemplate(template).render

    def encode(self, text):
        pieces = re.split("(" + "|".join(map(re.escape, self.special)) + ")", text)
        known = {word: len(TEXTS) + i for i, word in enumerate(self.special)}
        letters = super().encode
        return [i for piece in pieces for i in ([known[piece]] if piece in known else letters(piece))]

    def decode(self, ids):
        return "".join(self.special[i - len(TEXTS)] if i >= len(TEXTS) else TEXTS[i] for i in ids)


def test_a_token_for_calls_tells_their_form_too():
    """As in LFM 2.5, whose template has no words around tools."""
    template = NO_CALLS.replace("<|tool_list_start|>", "").replace("<|tool_list_end|>", "")
    form = CallForm.of(MarkedTokenizer(["<|tool_call_start|>"], template), TOOLS)
    assert (form.mark, form.opening) == ("<|tool_call_start|>", "[")
    with pytest.raises(ValueError, match="leaves out the calls"):
        CallForm.of(MarkedTokenizer(["<|other|>"], template), TOOLS)


@pytest.mark.parametrize("family", SPECIAL)
def test_marks_may_be_special_tokens(family):
    tokenizer, rng = MarkedTokenizer(SPECIAL[family], FAMILIES[family]), random.Random(f"special {family}")
    model = replace(make_letter_llama(), tokenizer=tokenizer)
    letters, form = make_tokenizer(vocabulary_of(model)), CallForm.of(tokenizer, TOOLS)
    for choice in ("required", "auto"):
        grammar = form.grammar(FUNCTIONS, choice, tokenizer, parallel=True)
        whole = LLMatcher(letters, grammar, log_level=0)
        assert not whole.is_error(), whole.get_error()
        for count in (1, 2, 3):
            calls = [rng.choice([("go", drawn(rng, family)), ("stop", {})]) for _ in range(count)]
            text = written(tokenizer, calls)
            ids = [*tokenizer.encode(text), 1]
            assert whole.deep_copy().validate_tokens(ids) == len(ids), text
            ids = [*tokenizer.encode(text.replace("go", "fly").replace("stop", "fly")), 1]
            assert whole.deep_copy().validate_tokens(ids) < len(ids), text
    grammar, finished = form.grammar(FUNCTIONS, "required", tokenizer, parallel=True), 0
    for _ in range(examples(20)):
        ids = walked(LLMatcher(letters, grammar, log_level=0), rng, tokenizer)
        if ids is not None:
            finished += 1
            content, calls = parsed(form, [tokenizer.decode([i]) for i in ids])
            assert content == "" and calls, tokenizer.decode(ids)
            for name, arguments in calls:
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert finished >= 2


@pytest.mark.parametrize("family", ["tags", "own quotes", "numbered"])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_calls_follow_the_reasoning_that_a_prompt_opens(family, choice, letters):
    tokenizer = make_letter_llama(FAMILIES[family]).tokenizer
    form = CallForm.of(tokenizer, TOOLS)
    matcher = LLMatcher(letters, form.grammar(FUNCTIONS, choice, tokenizer, parallel=True, reasons=True), log_level=0)
    call = written(tokenizer, [("stop", {})])
    for text, fits in {f"why {form.mark}</think>\n{call}": True, call: False}.items():
        ids = [*tokenizer.encode(text), 1]
        assert (matcher.deep_copy().validate_tokens(ids) == len(ids)) is fits, text
    parser = MessageParser(form, reasons=True, functions=FUNCTIONS)
    added = parser.feed(f"why {form.mark}</think>\n{call}", final=True)
    assert added["reasoning"] == f"why {form.mark}" and added["tool_calls"][0]["function"]["name"] == "stop"


@pytest.fixture(scope="module", params=["functions", "own quotes", "keywords"])
def server(request):
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=8, block_size=4, num_blocks=800, max_model_len=512)
    with Engine(make_letter_llama(FAMILIES[request.param]), config) as engine, serving(engine) as server:
        yield server


def asked(server, tools, choice, max_tokens=40):
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": choice, "max_tokens": max_tokens, "seed": 1}
    status, headers, text = server.ask("POST", "/v1/chat/completions", body)
    return status, headers.get("X-Unconstrained-Arguments"), text


SMALL = [
    {"function": {"name": "go", "parameters": {
        "properties": {"a": {"enum": ["x", 1]}, "b": {"type": "string", "maxLength": 4}}, "required": ["a"],
    }}},
    TOOLS[1],
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "odd"}}
HELD = [
    {}, {"type": "object"}, {"properties": {"a": {}}, "required": ["a"]}, {"required": ["b"]},
    {"properties": {"a": {"allOf": [{"type": "string"}, {"maxLength": 3}]}}, "required": ["a"]},
    {"properties": {"a": {"type": ["string", "number"], "minimum": 3, "maxLength": 3}}, "required": ["a"]},
    {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"$ref": "#/$defs/A"}}, "additionalProperties": False}}},
    {"properties": {"a": {"type": "string", "maxLength": 300_000}}}, {"properties": {"a": {"const": "x\n"}}},
    {"additionalProperties": {"type": "integer"}}, {"properties": {"a b": {"type": "null"}}, "required": ["a b"]},
    {"properties": {"a": {"type": "array", "items": {"properties": {"b": {"type": "string"}}, "type": "object"}}}},
]  # fmt: skip
FREE = {
    "#/anyOf": {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
    "#/patternProperties": {"patternProperties": {"^a": {}}},
    "#/minProperties": {"minProperties": 2},
    "#/properties/a/format": {"properties": {"a": {"type": "string", "format": "date"}}},
    "#/properties/a/pattern": {"properties": {"a": {"type": "string", "pattern": "^a|b$"}}},
    "#/properties/a/enum": {"properties": {"a": {"enum": []}}},
    "#/properties/%3E%0A%3Ch%3D%3A%3C%7Cq%7C%3E%27": {"properties": {">\n<h=:<|q|>'": {}}},
}
"""Parts that a grammar of pairs cannot hold, by their places."""


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("parameters", HELD, ids=json.dumps)
def test_unusual_schemas_are_held(server, parameters):
    tools = [TOOLS[1], {"type": "function", "function": {"name": "odd", "parameters": parameters}}]
    for choice in ("auto", "required", NAMED):
        status, header, text = asked(server, tools, choice)
        assert status == 200 and header is None, text
        for call in json.loads(text)["choices"][0]["message"].get("tool_calls") or ():
            if json.loads(text)["choices"][0]["finish_reason"] == "tool_calls" and call["function"]["name"] == "odd":
                jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)


@pytest.mark.parametrize("place", FREE)
def test_what_pairs_cannot_hold_is_left_free_and_named_or_refused(server, place):
    tools = [TOOLS[1], {"type": "function", "function": {"name": "odd", "parameters": FREE[place]}}]
    status, header, text = asked(server, tools, "auto")
    assert status == 200 and header == f"odd{place}", (header, text)
    for choice in ("required", NAMED):
        status, _, text = asked(server, tools, choice)
        assert status == 400 and f"'odd': {place}" in json.loads(text)["error"]["message"], text


def test_mutated_schemas_are_served_or_refused_by_name(server):
    from test_structured_output import mutated

    rng, statuses = random.Random("mutated schemas"), []
    for _ in range(examples(150)):
        tools = SMALL
        for _ in range(rng.randint(1, 3)):
            tools = mutated(rng, tools) if isinstance(tools, (dict, list)) else SMALL
        status, _, text = asked(server, tools, rng.choice(["auto", "required", {"function": {"name": "go"}}]), 3)
        assert status in (200, 400), (status, tools, text)
        assert status == 200 or json.loads(text)["error"]["message"]
        statuses.append(status)
    assert statuses.count(200) > len(statuses) // 20


def test_a_wrap_that_is_opened_is_closed(letters):
    """Else the reader would look for its end in the arguments that follow."""
    tokenizer = make_letter_llama(FAMILIES["wrapped strings"]).tokenizer
    form = CallForm.of(tokenizer, TOOLS)
    begin, end = form.pairs.wrap
    text = written(tokenizer, [("go", {"text": "zz", "choice": "a", "flag": True})])
    matcher = LLMatcher(letters, form.grammar(FUNCTIONS, "required", tokenizer, parallel=True), log_level=0)
    for value, is_allowed in {"zz": True, f"{begin}zz{end}": True, f"{begin}zz": False}.items():
        ids = [*tokenizer.encode(text.replace("zz", value)), 1]
        assert (matcher.deep_copy().validate_tokens(ids) == len(ids)) is is_allowed, value
