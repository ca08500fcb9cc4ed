"""Conversations and the tokenizer's endpoints, against a server process whose model has a chat template."""

import json
import random

import pytest
from serve_helpers import ENGINE, ServerProcess
from word_llama import TemplateTokenizer

from workbench.apps.serve.conversation import ChatMessage, render_conversation
from workbench.apps.serve.protocol import TokenizeRequest

TEMPLATE = (
    "{% for m in messages %}"
    " w{{ {'system': 101, 'user': 102, 'assistant': 103, 'tool': 104}[m.role] }} {{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %} {{ call.function.name }}{% for v in call.function.arguments.values() %}"
    " w{{ v }}{% endfor %}{% endfor %} w100"
    "{% endfor %}"
    "{% if add_generation_prompt %} w103{% if enable_thinking is defined and not enable_thinking %} w106{% endif %}"
    "{% endif %}"
)
USER = {"role": "user", "content": "w17 w33"}
CALL = {"id": "call-1", "type": "function", "function": {"name": "w105", "arguments": '{"word": 55}'}}


@pytest.fixture(scope="module")
def server():
    server = ServerProcess(engine=ENGINE, serve={"max_body_bytes": 1 << 20}, template=TEMPLATE)
    yield server
    server.end()


@pytest.fixture(scope="module")
def without_tools():
    """A server whose template leaves out what tools answer."""
    source = "{% for m in messages if m.role == 'user' %} w102 {{ m.content }}{% endfor %} w103"
    server = ServerProcess(engine=ENGINE, template=source)
    yield server
    server.end()


def ask(server, path, body, status=200):
    given, _, text = server.ask("POST", path, json.dumps(body))
    assert given == status, text
    return json.loads(text)


def tokens(server, **body):
    return ask(server, "/tokenize", body)["tokens"]


def error(server, path="/v1/chat/completions", **body):
    return ask(server, path, body, 400)["error"]


# -- the tokenizer's endpoints -----------------------------------------------------------------------------------------


def test_a_prompt_has_the_tokens_of_its_completion(server):
    answer = ask(server, "/tokenize", {"prompt": "w3 w4"})
    assert answer == {"tokens": [1, 3, 4], "count": 3, "max_model_len": 256}
    usage = ask(server, "/v1/completions", {"prompt": "w3 w4", "max_tokens": 1})["usage"]
    assert usage["prompt_tokens"] == answer["count"]
    assert tokens(server, prompt="w3 w4", add_special_tokens=False) == [3, 4]
    assert tokens(server, messages=[USER], add_special_tokens=True) == [1, *tokens(server, messages=[USER])]


def test_texts_of_tokens_are_the_tokens_again(server):
    draw = random.Random(34)
    for length in (0, 1, 7, 300, 5000):
        ids = [draw.randrange(120) for _ in range(length)]
        text = ask(server, "/detokenize", {"tokens": ids})["prompt"]
        assert text == "".join(f" w{token}" for token in ids)
        assert tokens(server, prompt=text, add_special_tokens=False) == ids


@pytest.mark.parametrize(
    "path, body, param, words",
    [
        ("/detokenize", {"tokens": [3, 120]}, "tokens", r"tokens[1]=120 is outside the vocabulary: 0 to 119"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", ">= 0"),
        ("/detokenize", {"tokens": [1] * 65_537}, "tokens", "holds 65537 token ids: allowed are up to 65536"),
        ("/detokenize", {}, "tokens", "missing"),
        ("/detokenize", {"tokens": [3], "prompt": "w3"}, "prompt", "another address reads it"),
        ("/tokenize", {"prompt": "w3", "messages": [USER]}, "prompt", "either"),
        ("/tokenize", {"prompt": "w3", "add_generation_prompt": False}, "add_generation_prompt", "needs messages"),
    ],
)
def test_errors_of_the_tokenizers_endpoints(server, path, body, param, words):
    problem = error(server, path, **body)
    assert problem["param"] == param and words in problem["message"], problem


def test_the_version(server):
    import workbench

    status, _, text = server.ask("GET", "/version")
    assert status == 200 and json.loads(text) == {"version": workbench.__version__}


# -- options of the template -------------------------------------------------------------------------------------------


def test_options_change_the_text_of_a_conversation(server):
    whole = [102, 17, 33, 100]
    assert tokens(server, messages=[USER]) == [*whole, 103]
    assert tokens(server, messages=[USER], add_generation_prompt=False) == whole
    assert tokens(server, messages=[USER], chat_template_kwargs={"enable_thinking": False}) == [*whole, 103, 106]
    assert tokens(server, messages=[USER], chat_template_kwargs={"enable_thinking": True}) == [*whole, 103]


@pytest.mark.parametrize("content", ["w5", "w5 w6 ", " w5\n"])
def test_a_final_message_is_continued(server, content):
    messages = [USER, {"role": "assistant", "content": content}]
    expected = [102, 17, 33, 100, 103, *(int(word[1:]) for word in content.split())]
    assert tokens(server, messages=messages, continue_final_message=True) == expected
    assert tokens(server, messages=messages, continue_final_message=True, add_generation_prompt=False) == expected


@pytest.mark.parametrize("strips", [True, False])
def test_spaces_at_the_end_of_a_continued_message_are_the_templates(strips):
    content = "{{ m.content | trim }}" if strips else "{{ m.content }}"
    tokenizer = TemplateTokenizer("{% for m in messages %} w103 " + content + " w100{% endfor %}")
    draw = random.Random(34)
    for _ in range(20):
        text = " ".join(f"w{draw.randrange(3, 100)}" for _ in range(draw.randrange(1, 5))) + " \n" * draw.randrange(3)
        body = TokenizeRequest(messages=[ChatMessage("assistant", text)], continue_final_message=True)
        rendered, _ = render_conversation(body.messages, body, tokenizer)
        assert rendered == " w103 " + (text.strip() if strips else text)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"continue_final_message": True},
        {"add_special_tokens": True},
    ],
)
def test_a_chat_continues_what_tokenize_shows(server, options):
    fields = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    messages = [USER, {"role": "assistant", "content": "w5 w6"}]
    chat = ask(server, "/v1/chat/completions", {"messages": messages, **options, **fields})
    prompt = tokens(server, messages=messages, **options)
    completion = ask(server, "/v1/completions", {"prompt": prompt, **fields})
    assert chat["choices"][0]["message"]["content"] == completion["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == len(prompt)


def test_results_of_tools_are_part_of_the_text(server):
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call-1", "content": "w60"},
    ]
    assert tokens(server, messages=messages) == [102, 17, 33, 100, 103, 105, 55, 100, 104, 60, 100, 103]
    assert ask(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 2})["usage"]["prompt_tokens"] == 12


def test_a_template_that_leaves_out_results_of_tools_refuses_them(without_tools):
    messages = [USER, {"role": "tool", "content": "w60"}]
    problem = error(without_tools, messages=messages)
    assert problem["param"] == "messages" and "leaves out messages of role tool" in problem["message"]
    problem = error(without_tools, messages=[USER, {"role": "assistant", "content": "w5"}], continue_final_message=True)
    assert problem["param"] == "continue_final_message" and "does not show the final message" in problem["message"]


@pytest.mark.parametrize(
    "options, param, words",
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "cannot both be"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "none of"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "none of"),
        ({"chat_template_kwargs": {"not a name": 1}}, "chat_template_kwargs", "names of variables"),
        ({"chat_template_kwargs": {"deep": {"a": 1}}}, "chat_template_kwargs[...]", "Expected"),
        ({"chat_template_kwargs": {"long": "x" * 1025}}, "chat_template_kwargs", "allowed are up to 1024"),
        ({"chat_template_kwargs": {f"v{i}": i for i in range(33)}}, "chat_template_kwargs", "up to 32"),
        ({"messages": [USER, {"role": "assistant"}]}, "messages", "needs content"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages", "role assistant"),
        ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages", "role tool"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}]},
            "messages",
            "not a JSON object",
        ),
    ],
)
def test_errors_of_conversations(server, options, param, words):
    for path in ("/v1/chat/completions", "/tokenize"):
        problem = error(server, path, **{"messages": [USER], **options})
        assert problem["param"] == param and words in problem["message"], problem
