"""Requests: the server's own answers sent back, labels and defaults of clients, odd tools, special tokens."""

import json

import pytest
from letter_llama import TEXTS, make_letter_llama
from openai.types import chat as types
from openai.types.chat.chat_completion_message import FunctionCall
from openai.types.chat.parsed_chat_completion import ParsedChatCompletionMessage
from serve_helpers import serving

from workbench import Engine, EngineConfig
from workbench.apps.serve import unread_fields
from workbench.apps.serve.conversation import render_conversation
from workbench.apps.serve.errors import ApiError
from workbench.apps.serve.protocol import ChatRequest, CompletionRequest, TokenizeRequest, decode_body
from workbench.models.tokenizer import ChatTemplate

CONFIG = EngineConfig(max_num_batched_tokens=256, max_num_seqs=8, block_size=4, num_blocks=2000, max_model_len=512)
HELLO = {"role": "user", "content": "abc"}
THINKS = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}\n{% endfor %}{% if reasoning_effort == 'low' %}briefly {% endif %}"
    "{% if add_generation_prompt %}assistant: {% if think is not defined %}<think>{% endif %}{% endif %}"
)
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
    decode_body(json.dumps({**body, **LABELS, **DEFAULTS, **NULL}).encode(), kind)
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
