"""Tools and reasoning in chat completions, as OpenAI's client sends and reads them."""

import json
import random
from dataclasses import replace

import jsonschema
import msgspec
import pytest
from letter_llama import make_letter_llama
from llguidance import LLMatcher
from serve_helpers import ServerProcess, serving
from tiers import examples
from tool_templates import ENDS, HERMES, TEMPLATES

from workbench import Engine, EngineConfig
from workbench.apps.serve.call_forms import CallForm, Function
from workbench.apps.serve.tools import MessageParser
from workbench.engine.grammar import vocabulary_of
from workbench.engine.grammar_process import make_tokenizer

PLACE = {"type": "object", "properties": {"x": {"$ref": "#/$defs/c"}}, "required": ["x"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "go", "parameters": PLACE | {"$defs": {"c": {"enum": ["a", "bc"]}}}}},
    {"type": "function", "function": {"name": "stop", "description": "Stand still."}},
]
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {"type": "object"}) for tool in TOOLS}
MESSAGES = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def server():
    engine = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 4, "num_blocks": 800, "max_model_len": 512}
    process = ServerProcess(letters=True, template=HERMES, engine=engine)
    yield process
    process.end()


def ask(server, **body):
    body = {"model": "tiny-llama", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, "seed": 1, **body}
    return server.openai().chat.completions.create(**body)


def check_calls(calls, names):
    for call in calls:
        assert call.type == "function" and call.id and call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def collected(stream):
    """Content, calls as (name, arguments) and the finish reason of a stream."""
    content, calls, reason = "", [], None
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert call.id and call.function.name
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return content, calls, reason


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_obey_the_tools_schemas(server, parallel):
    for seed in range(4):
        options = {"tool_choice": "required", "seed": seed, "parallel_tool_calls": parallel}
        choice = ask(server, **options).choices[0]
        if choice.finish_reason == "length":
            continue
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        check_calls(choice.message.tool_calls, ["go", "stop"])
        assert parallel or len(choice.message.tool_calls) == 1
        content, calls, reason = collected(ask(server, **options, stream=True))
        assert (content, reason) == ("", "tool_calls")
        assert calls == [[call.function.name, call.function.arguments] for call in choice.message.tool_calls]


def test_a_named_tool_is_called_once(server):
    choice = ask(server, tool_choice={"type": "function", "function": {"name": "go"}}).choices[0]
    (call,) = choice.message.tool_calls
    check_calls([call], ["go"])


def test_an_answer_may_have_no_call(server):
    for choice in ({"tool_choice": "auto"}, {"tool_choice": "none"}, {}):
        answer = ask(server, max_tokens=20, **choice).choices[0]
        assert not answer.message.tool_calls and answer.message.content


def test_results_of_tools_continue_the_conversation(server):
    first = ask(server, tool_choice={"type": "function", "function": {"name": "stop"}}).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "done"}
    answer = ask(server, messages=[*MESSAGES, first.to_dict(), result], max_tokens=5, tool_choice="none")
    assert answer.choices[0].message.content is not None


FORMS = {
    "hermes": CallForm(
        "<tool_call>", '\n{"name": "', '", "arguments": ', "}\n</tool_call>", '\n<tool_call>\n{"name": "'
    ),
    "llama": CallForm("<|python_tag|>", '{"name": "', '", "parameters": ', "}", leads=True),
    "mistral": CallForm(
        "[TOOL_CALLS]", ' [{"name": "', '", "arguments": ', ', "id": "call00000"}', ', {"name": "', "]"
    ),
    "ministral": CallForm("[TOOL_CALLS]", "", "[ARGS]", "", "[TOOL_CALLS]"),
    "nemotron": CallForm("<TOOLCALL>", '[{"name": "', '", "arguments": ', "}", ', {"name": "', "]</TOOLCALL>"),
    "apriel": CallForm(
        "<tool_calls>", '[{"name": "', '", "arguments": ', ', "id": "call00000"}', ', {"name": "', "]</tool_calls>"
    ),
    "minimax": CallForm("<tool_calls>", '\n{"name": "', '", "arguments": ', "}", '\n{"name": "', "\n</tool_calls>"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_that_of_the_template(name):
    assert CallForm.of(make_letter_llama(TEMPLATES[name]).tokenizer, TOOLS) == FORMS[name]


def test_another_form_is_refused():
    odd = HERMES.replace("<tool_call>", "call ").replace("</tool_call>", "")
    with pytest.raises(ValueError, match="a form that is not known"):
        CallForm.of(make_letter_llama(odd).tokenizer, TOOLS)


def written(tokenizer, name, calls):
    """Calls as a template writes them in an answer."""
    user = {"role": "user", "content": "abc"}
    calls = [{"id": f"call{i:05d}", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)]
    text = tokenizer.apply_chat_template([user, {"role": "assistant", "content": "", "tool_calls": calls}], False)
    return text.removeprefix(tokenizer.apply_chat_template([user])).removesuffix(ENDS[name])


def parsed(form, parts):
    """Reasoning, content and calls of an answer in parts."""
    parser, found, calls = MessageParser(form), {"reasoning_content": "", "content": ""}, []
    for i, part in enumerate(parts, 1):
        added = parser.feed(part, final=i == len(parts))
        for field in found:
            found[field] += added.get(field, "")
        for call in added.get("tool_calls", []):
            if call["index"] == len(calls):
                assert len(call["id"]) == 9 or not form.mark.startswith("[")
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return *found.values(), [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_separated_wherever_they_are_cut(name):
    rng, form, tokenizer = random.Random(f"answers {name}"), FORMS[name], make_letter_llama(TEMPLATES[name]).tokenizer
    for _ in range(examples(50)):
        odd = {"a": rng.choice([1, '"}', "\\", "]", {"b": [{}, "}, {"]}]), "é": None}
        calls = [(rng.choice(["go", "stop"]), rng.choice([{}, odd])) for _ in range(rng.randint(0, 3))]
        calls = calls[:1] if form.more is None else calls
        reasoning, content = (
            rng.choice(["", "why <tool_call> {"]),
            rng.choice(["", "a < b", "<tool", '{"nam', "[TOOL é\n"]),
        )
        if form.leads and calls:
            reasoning = content = ""
        text = (f"<think>{reasoning}</think>" if reasoning else "") + content
        if calls:
            text += (form.mark if form.leads and rng.random() < 0.5 else "") + written(tokenizer, name, calls).lstrip(
                "\n"
            )
        expected = reasoning, content, calls
        assert parsed(form, list(text)) == expected, text
        for cut in range(len(text)):
            assert parsed(form, [text[:cut], text[cut:]]) == expected, (text, cut)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_grammar_takes_what_the_template_writes_and_nothing_else(name, choice):
    model, form, rng = make_letter_llama(TEMPLATES[name]), FORMS[name], random.Random(f"grammars {name}")
    functions = msgspec.convert([tool["function"] for tool in TOOLS], list[Function])
    tokenizer = make_tokenizer(vocabulary_of(model))

    def accepts(text, parallel=True):
        matcher = LLMatcher(tokenizer, form.grammar(functions, choice, model.tokenizer, parallel=parallel), log_level=0)
        tokens = [*model.tokenizer.encode(text), 1]
        return matcher.validate_tokens(tokens) == len(tokens)

    for count in (1, 1, 2, 3) if form.more is not None else (1, 1):
        calls = [rng.choice([("go", {"x": rng.choice(["a", "bc"])}), ("stop", {})]) for _ in range(count)]
        text = written(model.tokenizer, name, calls).lstrip("\n")
        assert accepts(text) and accepts(text, parallel=False) is (count == 1)
        assert not accepts(text.replace("go", "fly").replace("stop", "fly"))
    assert accepts("a < b") is (choice == "auto")


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "hermes"])
def test_calls_in_other_forms_come_whole_and_streamed(name):
    """The random model writes calls that obey the schemas; a client sends them back with their results."""
    # Room for a dozen calls: after each, a random model may begin another.
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=8, block_size=4, num_blocks=800, max_model_len=1024)
    model = replace(make_letter_llama(TEMPLATES[name]), max_position=1024)
    with Engine(model, config) as engine, serving(engine) as server:
        named = {"type": "function", "function": {"name": "stop"}}
        for seed, choice in enumerate(["required", named]):
            body = {"tool_choice": choice, "seed": seed, "max_tokens": 600}
            first = ask(server, **body).choices[0]
            assert first.finish_reason == "tool_calls" and first.message.content is None
            check_calls(first.message.tool_calls, ["go", "stop"])
            calls = [[call.function.name, call.function.arguments] for call in first.message.tool_calls]
            assert collected(ask(server, **body, stream=True)) == ("", calls, "tool_calls")
        (call,) = first.message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        messages = [*MESSAGES, first.message.to_dict(), result]
        free = ask(server, messages=messages, max_tokens=9).choices[0].message
        assert free.content and not free.tool_calls


def test_reasoning_is_separated(server):
    options = {"extra_body": {"chat_template_kwargs": {"think": True}}, "max_tokens": 12, "tool_choice": "none"}
    message = ask(server, **options).choices[0].message
    assert message.reasoning_content and not message.content
    parts = [chunk.choices[0].delta for chunk in ask(server, **options, stream=True, seed=3)]
    assert any(getattr(part, "reasoning_content", None) for part in parts)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "the tools are go, stop"),
        ({"tools": TOOLS * 2}, "two have the same name"),
        ({"tools": TOOLS * 70}, "tools holds 140 tools"),
        ({"response_format": {"type": "json_object"}}, "tools do not work with response_format"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}]}, "Invalid type"),
    ],
)
def test_mistakes_are_answered_with_the_field(server, body, message):
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 5, **body}
    status, _, text = server.ask("POST", "/v1/chat/completions", {k: v for k, v in body.items() if v is not None})
    assert status == 400 and message in json.loads(text)["error"]["message"], text


def test_mutated_tools_are_served_or_refused_by_name(server):
    from test_structured_output import mutated

    rng, statuses = random.Random("mutated tools"), []
    for _ in range(examples(200)):
        body = {"tools": TOOLS, "tool_choice": rng.choice(["auto", "required", {"function": {"name": "go"}}])}
        for _ in range(rng.randint(1, 3)):
            body = mutated(rng, body) if isinstance(body, dict) else body
        body = body if isinstance(body, dict) else {"tools": body}
        status, _, text = server.ask("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, **body})
        assert status in (200, 400, 404), (status, body, text)
        assert status == 200 or json.loads(text)["error"]["message"]
        statuses.append(status)
    assert statuses.count(400) > len(statuses) // 5 and statuses.count(200) > len(statuses) // 20


def test_a_template_without_tools_refuses_them():
    plain = make_letter_llama("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="leaves them out"):
        CallForm.of(plain.tokenizer, TOOLS)
