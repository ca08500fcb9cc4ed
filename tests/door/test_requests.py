"""Requests: the server's own answers sent back, labels and defaults of clients, odd tools, special tokens."""

import json
import random

import jsonschema
import pytest
from door_folders import byte_tokenizer, fields_of, write_folder
from gguf_files import byte_tokenizer as metadata_of_tokenizer
from letter_llama import TEXTS, make_letter_llama
from llguidance import LLMatcher
from openai.types import chat as types
from openai.types.chat.chat_completion_message import FunctionCall
from openai.types.chat.parsed_chat_completion import ParsedChatCompletionMessage
from serve_helpers import serving
from tokenizers import AddedToken, Tokenizer, models
from tool_templates import HERMES, THINKS
from transformers import AutoTokenizer

from workbench import Engine, EngineConfig
from workbench.apps.serve import unread_fields
from workbench.apps.serve.call_forms import CallForm, Function
from workbench.apps.serve.conversation import render_conversation
from workbench.apps.serve.errors import ApiError
from workbench.apps.serve.protocol import ChatRequest, CompletionRequest, TokenizeRequest, decode_body
from workbench.engine.grammar import vocabulary_of
from workbench.engine.grammar_form import grammar_of
from workbench.engine.grammar_process import make_tokenizer, with_hidden_names
from workbench.engine.output_processor import IncrementalDetokenizer
from workbench.models import load_model
from workbench.models.gguf.tokenizer import GGUFTokenizer
from workbench.models.tokenizer import ChatTemplate

CONFIG = EngineConfig(max_num_batched_tokens=256, max_num_seqs=8, block_size=4, num_blocks=2000, max_model_len=512)
HELLO = {"role": "user", "content": "abc"}
PLACE = {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call-1", "type": "function", "function": {"name": "go", "arguments": "{}"}}


@pytest.fixture(scope="module")
def server():
    with Engine(make_letter_llama(THINKS), CONFIG) as engine, serving(engine) as server:
        yield server


def ask(server, messages, **options):
    no_text = {str(token): -100 for token in range(len(TEXTS), 120)}
    options = {"max_tokens": 8, "seed": 1, "logit_bias": no_text, **options}
    return server.openai().chat.completions.create(model="tiny-llama", messages=messages, **options)


def error(server, status=400, **body):
    given, _, text = server.ask("POST", "/v1/chat/completions", {"messages": [HELLO], "max_tokens": 2, **body})
    assert given == status, text
    return json.loads(text)["error"] if status != 200 else json.loads(text)


# -- what the server says itself ---------------------------------------------------------------------------------------


def put_together(stream):
    """A message from the parts of a stream, as clients put it together: texts joined, calls by their index."""
    message = {}
    for chunk in stream:
        for name, value in chunk.choices[0].delta.model_dump().items():
            if name == "tool_calls":
                for part in value or []:
                    calls = message.setdefault("tool_calls", [])
                    if part["index"] == len(calls):
                        calls.append(part)
                    else:
                        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
            elif isinstance(value, str) and name != "role":
                message[name] = (message.get(name) or "") + value
            else:
                message[name] = message.get(name) or value
    return message


def test_an_answer_with_reasoning_is_taken_back(server):
    answer = ask(server, [HELLO]).choices[0].message
    assert answer.reasoning and answer.reasoning == answer.reasoning_content
    streamed = put_together(ask(server, [HELLO], stream=True))
    assert streamed["reasoning"] == streamed["reasoning_content"] == answer.reasoning
    for form in (answer, answer.model_dump(), answer.to_dict(), answer.model_dump(exclude_none=True), streamed):
        assert ask(server, [HELLO, form, HELLO]).choices


def test_an_answer_with_calls_is_taken_back(server):
    options = {
        "tools": [PLACE], "tool_choice": "required", "extra_body": {"chat_template_kwargs": {"think": False}},
        "max_tokens": 200, "parallel_tool_calls": False,
    }  # fmt: skip
    answer = ask(server, [HELLO], **options).choices[0].message
    assert answer.tool_calls
    streamed = put_together(ask(server, [HELLO], stream=True, **options))
    for form in (answer, answer.model_dump(), streamed):
        calls = form["tool_calls"] if isinstance(form, dict) else [call.model_dump() for call in form.tool_calls]
        result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "done"}
        assert "done" in rendered([HELLO, form if isinstance(form, dict) else form.model_dump(), result])
        assert ask(server, [HELLO, form, result], tools=[PLACE], max_tokens=2).choices


def rendered(messages, **fields):
    """The text of a conversation under the template."""

    class Tokenizer:
        apply_chat_template = staticmethod(ChatTemplate(THINKS).render)

        def encode(self, text):
            return []

    body = decode_body(json.dumps({"messages": messages, **fields}).encode(), ChatRequest)
    return render_conversation(body.messages, body, Tokenizer())[0]


ANSWER = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (types.ChatCompletionMessage(**ANSWER).model_dump(), "b"),
        (types.ChatCompletionMessage(**ANSWER, annotations=[]).model_dump(), "b"),
        (ParsedChatCompletionMessage(**ANSWER, parsed={"b": 1}).model_dump(), "b"),
        ({**ANSWER, "reasoning": "why"}, "(why)b"),
        ({**ANSWER, "reasoning_content": "why"}, "(why)b"),
        ({**ANSWER, "reasoning": "why", "reasoning_content": "why"}, "(why)b"),
        ({**ANSWER, "reasoning": None, "reasoning_content": "why"}, "(why)b"),
        ({**ANSWER, "content": None, "reasoning": "why"}, "(why)"),
        (types.ChatCompletionMessage(role="assistant", refusal="I cannot").model_dump(), "I cannot"),
        ({**ANSWER, "content": [{"type": "refusal", "refusal": "I cannot"}]}, "I cannot"),
        ({**ANSWER, "content": [{"type": "text", "text": "b", "prompt_cache_breakpoint": {"mode": "explicit"}}]}, "b"),
        (
            types.ChatCompletionMessage(
                role="assistant", function_call=FunctionCall(name="go", arguments='{"x": 1}')
            ).model_dump(),
            '{"name": "go", "arguments": {"x": 1}}',
        ),
        (
            {**ANSWER, "tool_calls": [{**CALL, "function": {"name": "go", "arguments": '{"x":1E999,"y":2.5}'}}]},
            '{"name": "go", "arguments": {"x": "1E999", "y": 2.5}}',
        ),
        ({"role": "assistant", "tool_calls": [{**CALL, "index": 0}]}, '{"name": "go", "arguments": {}}'),
        (
            {**ANSWER, "tool_calls": [{**CALL, "type": None, "function": {"name": "go", "arguments": None}}]},
            '{"name": "go", "arguments": {}}',
        ),
        (
            {**ANSWER, "tool_calls": [{**CALL, "function": {**CALL["function"], "parsed_arguments": None}}]},
            'b\n<tool_call>\n{"name": "go"',
        ),
        ({"role": "function", "name": "go", "content": "done"}, "tool: done"),
    ],
)  # fmt: skip
def test_every_form_of_a_message_is_taken(message, shown):
    assert shown in rendered([HELLO, message])


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({**ANSWER, "audio": {"id": "audio-1"}}, "audio"),
        ({**ANSWER, "reasoning": "why", "reasoning_content": "how"}, "two names of one text"),
        ({**HELLO, "reasoning": "why"}, "reasoning is a field of role assistant"),
        ({**HELLO, "refusal": "no"}, "refusal is a field of role assistant"),
        ({**ANSWER, "tool_calls": [CALL], "function_call": CALL["function"]}, "function_call is the older name"),
        ({**ANSWER, "mood": "good"}, "mood"),
        ({"role": "assistant", "content": None, "reasoning": ""}, "needs content"),
    ],
)
def test_what_a_text_cannot_hold_is_refused_by_name(message, problem):
    with pytest.raises((ApiError, ValueError), match=problem):
        rendered([HELLO, message])


# -- fields of clients -------------------------------------------------------------------------------------------------

LABELS = {
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k",
    "safety_identifier": "s", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"},
    "request_id": "r",
}  # fmt: skip
DEFAULTS = {
    "min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True, "use_beam_search": False,
    "length_penalty": 1, "include_stop_str_in_output": False, "return_tokens_as_token_ids": False,
    "include_reasoning": True, "modalities": ["text"], "verbosity": "medium", "suffix": "", "bad_words": [],
}  # fmt: skip
REFUSED = {
    "audio": {"voice": "alloy", "format": "wav"}, "modalities": ["text", "audio"], "prediction": {"type": "content"},
    "functions": [{"name": "go"}], "function_call": {"name": "go"}, "guided_json": {"type": "object"},
    "guided_regex": "a", "web_search_options": {}, "min_tokens": 1, "verbosity": "low", "use_beam_search": True,
    "bad_words": ["a"], "allowed_token_ids": [5], "documents": [{"text": "a"}], "chat_template": "{{ 1 }}",
    "include_stop_str_in_output": True, "truncate_prompt_tokens": 4, "include_reasoning": False, "suffix": "a",
    "echo": True, "best_of": 1, "prompt_cache_kay": "k",
}  # fmt: skip
NULL = {name: None for rule in unread_fields.KNOWN for name in rule.keys.split()} | {"echo": None, "best_of": None}


def test_labels_defaults_and_null_change_nothing(server):
    plain = error(server, 200, seed=3)
    for fields in (LABELS, DEFAULTS, NULL, {"reasoning_effort": "high"}, {"echo": False}):
        assert error(server, 200, seed=3, **fields)["choices"] == plain["choices"]
    assert error(server, 200, stream_options={"include_usage": None, "include_obfuscation": False})


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_would_change_the_answer_is_refused_by_name(name, server):
    problem = error(server, **{name: REFUSED[name]})
    assert problem["param"] == name and problem["message"].startswith(f"the body: {name} "), problem
    assert problem["message"].count(": ") >= 2  # the reason


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest])
def test_the_same_rules_hold_at_every_address(kind):
    body = {"prompt": "a"} if kind is not ChatRequest else {"messages": [HELLO]}
    defaults = {name: value for name, value in DEFAULTS.items() if kind is not TokenizeRequest or "special" not in name}
    decode_body(json.dumps({**body, **LABELS, **defaults, **NULL}).encode(), kind)
    others = {"messages": None, "tools": []} if kind is CompletionRequest else {"echo": False}
    decode_body(json.dumps({**body, **others}).encode(), kind)
    for name in ("audio", "seeds"):
        with pytest.raises(ApiError, match=name):
            decode_body(json.dumps({**body, name: 1}).encode(), kind)


def test_reasoning_effort_is_a_variable_of_the_template(server):
    assert "briefly" in rendered([HELLO], reasoning_effort="low")
    assert rendered([HELLO], reasoning_effort="high") == rendered([HELLO]) == rendered([HELLO], reasoning_effort=None)
    assert "briefly" in rendered([HELLO], chat_template_kwargs={"reasoning_effort": "low"})
    with pytest.raises(ValueError, match="reasoning_effort is 'low', and in chat_template_kwargs it is 'high'"):
        rendered([HELLO], reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})


def test_each_known_field_has_a_reason_or_is_read():
    """OpenAI's own client knows no field that the rules do not know."""
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_params

    known = {*NULL, *ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    for module in (chat_params, completion_create_params):
        assert set(module.CompletionCreateParamsBase.__annotations__) <= known


# -- tools -------------------------------------------------------------------------------------------------------------

OTHER_FORMS = {
    "arguments before the name": '{"arguments": {{ c.function.arguments | tojson }}, "name": "{{ c.function.name }}"}',
    "the arguments twice": '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"again": {{ c.function.arguments | tojson }}}',
    "the name twice": '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"as": "{{ c.function.name }}"}',
}
WRAPPED = {"each in a tag": ("", "<call>", "</call>", ""), "all in a tag": ("<calls>[", "", ", ", "]</calls>")}


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("form", OTHER_FORMS)
def test_a_form_never_holds_the_text_of_a_probe(form, wrap):
    begin, before, after, end = WRAPPED[wrap]
    source = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% if m.tool_calls %}" + begin + "{% for c in m.tool_calls %}" + before + OTHER_FORMS[form] + after +
        "{% endfor %}" + end + "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )  # fmt: skip
    with pytest.raises(ValueError, match="a form that is not known"):
        CallForm.of(make_letter_llama(source).tokenizer, [PLACE])


def call(server, parameters, **options):
    """The calls and headers of an answer that has to call a tool with some parameters, or the error."""
    strict = {"strict": options.pop("strict")} if "strict" in options else {}
    tools = [PLACE, {"type": "function", "function": {"name": "odd", "parameters": parameters, **strict}}]
    body = {
        "messages": [HELLO], "tools": tools, "tool_choice": "auto", "max_tokens": 300, "seed": 1,
        "chat_template_kwargs": {"think": False}, "temperature": 0, **options,
    }  # fmt: skip
    status, headers, text = server.ask("POST", "/v1/chat/completions", body)
    answer = json.loads(text)
    return status, headers.get("X-Unconstrained-Arguments"), answer["error"] if status != 200 else answer["choices"][0]


BRIEF = {str(TEXTS.index(text)): 20 for text in ("}", "{}", '"')}
NAMED = {"type": "function", "function": {"name": "odd"}}
OBJECTS = [
    {}, {"description": "no input"}, {"type": ["object", "null"], "additionalProperties": False},
    {"anyOf": [{"type": "string"}, {"type": "object", "additionalProperties": False}]}, {"enum": ["x}y", {"a": 1}]},
    {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {}, "additionalProperties": False}}}, {"properties": {}},
    {"oneOf": [{"type": "null"}, {"type": "object", "additionalProperties": False}]},
]  # fmt: skip


@pytest.mark.parametrize("parameters", OBJECTS, ids=json.dumps)
def test_arguments_are_always_an_object(parameters, server):
    """A schema may allow more: an object ends where the parser sees its end, and the next call is another."""
    status, header, choice = call(server, parameters, tool_choice=NAMED, logit_bias=BRIEF)
    assert status == 200 and header is None, choice
    (made,) = choice["message"]["tool_calls"]
    if choice["finish_reason"] == "tool_calls":
        arguments = json.loads(made["function"]["arguments"])
        assert isinstance(arguments, dict)
        jsonschema.validate(arguments, parameters)
    assert made["function"]["arguments"].startswith("{")


@pytest.mark.parametrize("parameters", OBJECTS, ids=json.dumps)
def test_the_grammar_of_a_call_allows_objects_alone(parameters):
    form = CallForm.of(make_letter_llama(HERMES).tokenizer, [PLACE])
    model = make_letter_llama(HERMES)
    grammar = form.grammar([Function("go", parameters=parameters)], "required", model.tokenizer, parallel=True)
    tokenizer = make_tokenizer(vocabulary_of(model))
    for arguments in ("null", '"x}y"', "[]", "1", "true", '{"a": 1}', "{}"):
        text = '<tool_call>\n{"name": "go", "arguments": ' + arguments + "}\n</tool_call>"
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        tokens = [*model.tokenizer.encode(text), 1]
        valid = jsonschema.Draft202012Validator(parameters).is_valid(json.loads(arguments))
        assert (matcher.validate_tokens(tokens) == len(tokens)) is (arguments[0] == "{" and valid), arguments


ODD = {
    "#/properties/a/not": {"not": {}},
    "#/properties/a/uniqueItems": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "#/properties/a/propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "#/properties/a/if": {"if": {"const": 1}, "then": {"type": "string"}},
    "#/properties/a/dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "#/properties/a/contains": {"type": "array", "contains": {"const": 1}, "minContains": 2},
    "#/properties/a/unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "#/properties/a/pattern": {"type": "string", "pattern": "^(?!-).*$"},
    "#/properties/a/items/pattern": {"type": "array", "items": {"type": "string", "pattern": r"(a)\1"}},
    "#/properties/a/anyOf/1/pattern": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": r"\bword"}]},
    "#/properties/a/patternProperties/%5E%28%3F%21a%29": {"type": "object", "patternProperties": {"^(?!a)": {}}},
    "#/properties/a/$ref": {"$ref": "https://example.org/schema"},
}  # fmt: skip
WHOLE = {
    "a string": {"type": "string"}, "null": {"type": "null"}, "a list of kinds": {"type": ["string", "null"]},
    "an enum": {"enum": ["x}y"]}, "a constant": {"const": None}, "all of": {"allOf": [{"type": "string"}]},
    "a pattern": {"type": "object", "properties": {"a": {"type": "string", "pattern": r"\cA"}}},
    "one of": {"oneOf": [{"type": "object", "properties": {n: {"type": "string"}}} for n in "ab"]},
}  # fmt: skip


@pytest.mark.parametrize("place", ODD)
def test_what_is_not_served_is_left_free_and_named(place, server):
    parameters = {"type": "object", "properties": {"a": ODD[place], "é": {"type": "string", "format": "x"}}}
    status, header, answer = call(server, parameters, max_tokens=3)
    assert status == 200 and header == f"odd{place}", answer
    for options in ({"strict": True}, {"tool_choice": "required"}, {"tool_choice": NAMED}):
        status, header, problem = call(server, parameters, **options)
        assert status == 400 and header is None
        assert "'odd'" in problem["message"] and place in problem["message"] and problem["param"] == "tools", problem
    assert call(server, parameters, tool_choice="none", max_tokens=3)[:2] == (200, None)


@pytest.mark.parametrize("kind", WHOLE)
def test_arguments_that_cannot_be_held_are_left_free_as_a_whole(kind, server):
    status, header, answer = call(server, WHOLE[kind], max_tokens=3)
    assert status == 200 and header == "odd#", answer
    for options in ({"strict": True}, {"tool_choice": NAMED}):
        status, header, problem = call(server, WHOLE[kind], **options)
        assert status == 400 and header is None and "'odd': " in problem["message"], problem
        assert problem["param"] == "tools" and "structured_outputs" not in problem["message"]


@pytest.mark.parametrize(
    "annotated",
    [
        {"type": "string", "format": "path"}, {"type": "string", "format": "binary"},
        {"type": "integer", "format": "int64"}, {"type": "array", "uniqueItems": False}, {"x-mcp": {"not": 1}},
        {"discriminator": {"propertyName": "not"}},
        {"type": "object", "unevaluatedProperties": True}, {"if": {}}, {"minContains": 1}, {"default": {"not": {}}},
        {"enum": [{"not": {}}]}, {"type": "object", "properties": {"not": {}, "format": {"format": "x"}}},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_annotations_do_not_matter(annotated, server):
    parameters = {"type": "object", "properties": {"a": annotated}}
    for options in ({}, {"strict": True}, {"tool_choice": NAMED}):
        status, header, answer = call(server, parameters, max_tokens=3, **options)
        assert status == 200 and header is None, answer
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": parameters}}
    assert error(server, 200, response_format=schema, chat_template_kwargs={"think": False})


def test_a_response_format_names_the_place():
    with pytest.raises(ValueError, match="#/properties/a/not is not supported: a grammar says"):
        grammar_of("json", json.dumps({"properties": {"a": {"not": {}}}}))


def test_a_schema_that_is_not_valid_is_refused_with_its_tool(server):
    for wrong in ({"type": "x"}, {"type": "object", "properties": []}, {"properties": {"a": {"type": "y"}}}):
        status, _, problem = call(server, wrong)
        assert status == 400 and "'odd'" in problem["message"] and problem["param"] == "tools", problem
    status, _, problem = call(server, {"properties": {"a": {"multipleOf": 2**23 + 1}}}, tool_choice=NAMED)
    assert status == 400 and "'odd'" in problem["message"] and "#/properties/a" in problem["message"], problem


# -- special tokens ----------------------------------------------------------------------------------------------------

MARKED = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    '{% for c in m.tool_calls or [] %}<call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</call>{% endfor %}<|im_end|>{% endfor %}assistant: "
)
MARKS = ("<|bos|>", "<|im_end|>", "<sop>", "<think>", "</think>", "<call>", "</call>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("special") / "m"
    return write_folder(path, fields_of("llama"), template=MARKED, tokenizer=byte_tokenizer(MARKS))


@pytest.fixture(scope="module")
def marked(folder):
    with Engine(load_model(folder), CONFIG) as engine, serving(engine) as server:
        server.id_of = {text: engine.model.tokenizer.encode(text)[0] for text in (*MARKS, "a", "b")}
        yield server


def likely(server, **texts):
    """A bias towards some tokens."""
    return {str(server.id_of[text]): bias for text, bias in texts.items()}


def test_a_text_without_special_tokens_is_that_of_transformers(folder):
    tokenizer, theirs = load_model(folder).tokenizer, AutoTokenizer.from_pretrained(str(folder))
    draw = random.Random(50)
    assert len(tokenizer.special_token_ids) == len(MARKS)
    for _ in range(30):
        ids = [
            draw.choice([draw.randrange(256), *theirs.encode("é🙂a"), *tokenizer.special_token_ids]) for _ in range(20)
        ]
        for skips in (True, False):
            text = IncrementalDetokenizer(
                tokenizer, [65], skipped=tokenizer.special_token_ids if skips else frozenset()
            )
            parts = [*map(text.append, ids), text.flush()]
            expected = theirs.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
            assert text.text == "".join(parts) == expected


def test_control_tokens_of_a_gguf_file_are_special():
    metadata = metadata_of_tokenizer(300)
    tokenizer = GGUFTokenizer(metadata)
    kinds = metadata["tokenizer.ggml.token_type"]
    assert tokenizer.special_token_ids == {token for token, kind in enumerate(kinds) if kind == 3} != set()


def test_special_tokens_are_hidden_unless_they_are_asked_for(marked):
    bias = likely(marked, **{"<sop>": 100, "<think>": 100, "a": 100})
    body = {"prompt": "b", "max_tokens": 40, "logit_bias": bias, "seed": 1, "temperature": 5}

    def text(**fields):
        status, _, answer = marked.ask("POST", "/v1/completions", {**body, **fields})
        assert status == 200, answer
        return json.loads(answer)["choices"][0]

    shown, hidden = text(skip_special_tokens=False, return_token_ids=True), text(return_token_ids=True)
    assert shown["token_ids"] == hidden["token_ids"] and "<sop>" in shown["text"] and "a" in shown["text"]
    assert (
        hidden["text"]
        == shown["text"].replace("<sop>", "").replace("<think>", "")
        == text(skip_special_tokens=True)["text"]
    )
    assert text(skip_special_tokens=False, spaces_between_special_tokens=False)["text"] == shown["text"]
    _, _, events = marked.ask("POST", "/v1/completions", {**body, "stream": True})
    parts = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    assert "".join(part["choices"][0]["text"] for part in parts) == hidden["text"]


def test_marks_of_reasoning_and_calls_are_found_and_others_hidden(marked):
    def message(**fields):
        body = {"messages": [HELLO], "max_tokens": 40, "seed": 1, **fields}
        status, _, answer = marked.ask("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        return json.loads(answer)["choices"][0]

    bias = likely(marked, **{"</think>": 100, "<sop>": 100, "a": 100})
    found = [message(logit_bias=bias, temperature=5, seed=seed)["message"]["content"] for seed in range(3)]
    assert all("a" in text and "<sop>" not in text for text in found) and any("</think>" in text for text in found)
    opened = {"role": "assistant", "content": "<think>"}
    options = {"messages": [HELLO, opened], "continue_final_message": True, "logit_bias": bias, "temperature": 5}
    choice = message(**options)["message"]
    assert "a" in choice["reasoning"] + choice["content"] and "<sop>" not in choice["reasoning"] + choice["content"]
    tools = [{"type": "function", "function": {"name": "go"}}]
    choice = message(tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    (made,) = choice["message"]["tool_calls"]
    assert made["function"]["name"] == "go" and choice["finish_reason"] == "tool_calls"
    assert json.loads(made["function"]["arguments"]) == {}


SPELLED = [
    ({"regex": "a<sop>b"}, "a<sop>b"), ({"choice": ["a <|im_end|> b"]}, "a <|im_end|> b"),
    ({"choice": ["<|im_end|>"]}, "<|im_end|>"), ({"choice": ["<sop>x"]}, "<sop>x"),
    ({"json": {"const": "x</call>y"}}, '"x</call>y"'), ({"json": {"enum": ["<|im_end|>"]}}, '"<|im_end|>"'),
    ({"grammar": 'start: "a<sop>b"'}, "a<sop>b"), ({"grammar": 'start: "a" "<|im" "_end|>" "b"'}, "a<|im_end|>b"),
    ({"regex": "(a|b)<think>c</think>"}, "<think>c</think>"),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "text"), SPELLED, ids=str)
def test_what_a_grammar_spells_is_text_and_not_a_token(wanted, text, marked):
    """The text of a special token, also of the one that ends an output, is spelled by others and never hidden."""
    body = {"prompt": "b", "max_tokens": 40, "structured_outputs": wanted, "return_token_ids": True}
    status, _, answer = marked.ask("POST", "/v1/completions", body)
    assert status == 200, answer
    choice = json.loads(answer)["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["text"].endswith(text)
    special = marked.engine.model.tokenizer.special_token_ids
    assert special.intersection(choice["token_ids"]) == {marked.id_of["<|im_end|>"]}
    assert choice["token_ids"].count(marked.id_of["<|im_end|>"]) == 1


def test_a_grammar_names_a_token_in_angle_brackets(marked):
    body = {"prompt": "b", "structured_outputs": {"grammar": 'start: "a" <sop> "b"'}, "return_token_ids": True}
    for shows, text in ((True, "ab"), (False, "a<sop>b")):
        answer = json.loads(marked.ask("POST", "/v1/completions", {**body, "skip_special_tokens": shows})[2])
        assert answer["choices"][0]["text"].removesuffix("<|im_end|>") == text
        assert marked.id_of["<sop>"] in answer["choices"][0]["token_ids"]


def test_an_argument_may_hold_the_end_of_its_call(marked):
    words = {"type": "object", "properties": {"x": {"const": "a</call>b"}}, "required": ["x"]}
    tools = [{"type": "function", "function": {"name": "go", "parameters": {**words, "additionalProperties": False}}}]
    body = {"messages": [HELLO], "tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    status, _, answer = marked.ask("POST", "/v1/chat/completions", {**body, "max_tokens": 200})
    assert status == 200, answer
    (made,) = json.loads(answer)["choices"][0]["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"x": "a</call>b"}


@pytest.mark.parametrize("model", ["BPE", "Unigram", "WordLevel"])
def test_special_tokens_keep_their_ids_where_their_names_are_hidden(model):
    """Also if the vocabulary itself names them."""
    words = ["<unk>", "<s>", "a", "b", "<sop>"]
    made = {
        "BPE": lambda: models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"),
        "Unigram": lambda: models.Unigram([(word, -1.0) for word in words], unk_id=0),
        "WordLevel": lambda: models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"),
    }  # fmt: skip
    tokenizer = Tokenizer(made[model]())
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "<sop>")])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    hidden = Tokenizer.from_str(with_hidden_names(tokenizer.to_str()))
    assert hidden.get_vocab_size() == tokenizer.get_vocab_size()
    assert [hidden.token_to_id(word) for word in ("a", "b", "<think>")] == [2, 3, 5]
    assert {hidden.token_to_id(name) for name in ("<s>", "<sop>")} == {None}
