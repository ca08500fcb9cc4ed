"""Chat templates that leave out texts: a content is shown in the form that the template reads, or refused by name."""

import json

import pytest
from door_folders import fields_of, write_folder

from workbench.apps.cli import main
from workbench.apps.serve.conversation import render_conversation
from workbench.apps.serve.protocol import ChatRequest, decode_body
from workbench.engine.input_processor import tokenize_prompt
from workbench.models import load_model
from workbench.models.template_losses import left_out
from workbench.models.tokenizer import ChatTemplate, ChatTemplateError


class Letters:
    """A tokenizer whose tokens are characters."""

    has_chat_template = True

    def __init__(self, template):
        self.apply_chat_template = ChatTemplate(template).render

    def encode(self, text):
        return list(map(ord, text))


def rendered(template, messages, **fields):
    """The text of a request's conversation, and the same from Python, with the answer's beginning."""
    body = decode_body(json.dumps({"messages": messages, **fields}).encode(), ChatRequest)
    return render_conversation(body.messages, body, Letters(template))[0]


def each(body, only="true"):
    return "{% for m in messages %}{% if " + only + " %}" + body + "{% endif %}{% endfor %}"


CALLS = "{% for c in m.tool_calls or () %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %};"
SAID = "{{ m.role }}={{ m.content }}" + CALLS
PARTS = "{{ m.role }}={% for p in m.content %}{{ p.text }}{% endfor %}" + CALLS
USER, SYSTEM, ANSWER = (
    {"role": r, "content": c} for r, c in (("user", "Hi you"), ("system", "Be"), ("assistant", "a"))
)
CALL = {"id": "call00000", "type": "function", "function": {"name": "go", "arguments": '{"k": 1}'}}
GO = {"name": "go", "arguments": {"k": 1}}
CALLING = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call00000", "content": "done"}
WHOLE = [SYSTEM, USER, {**CALLING, "content": None}, RESULT, ANSWER, USER]


def in_python(messages):
    """The messages as templates expect them."""
    said = [{**m, "content": m["content"] or ""} for m in messages]
    return [{**m, "tool_calls": [{**CALL, "function": GO}]} if m.get("tool_calls") else m for m in said]


LOSES = {
    "system": (each(SAID, "m.role != 'system'"), [SYSTEM, USER], 0, "system"),
    "a second system message": (each(SAID, "m.role != 'system' or loop.first"), [SYSTEM, USER, SYSTEM], 2, "system"),
    "user": (each(SAID, "m.role != 'user' or loop.last"), [USER, ANSWER, USER], 0, "user"),
    "the latest": (each(SAID, "loop.index < 3"), [USER, ANSWER, USER], 2, "user"),
    "answers": (each(SAID, "m.role != 'assistant'"), [USER, ANSWER, USER], 1, "assistant"),
    "results": (each(SAID, "m.role != 'tool'"), [USER, {**CALLING, "content": None}, RESULT], 2, "tool"),
    "the end of a text": (each("{{ m.content[:30] }}"), [{"role": "user", "content": "x" * 31}], 0, "user"),
    "the second line": (each("{{ m.content.split('\n')[0] }}"), [{"role": "user", "content": "x\ny"}], 0, "user"),
    "the beginning": (each("{{ m.content.split('/')[-1] }}"), [{"role": "user", "content": "x/y"}], 0, "user"),
    "what stands elsewhere too": (each("Hi you" + SAID, "m.role != 'user'"), [SYSTEM, USER], 1, "user"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSES)
def test_a_text_that_the_template_leaves_out_is_refused(name):
    template, messages, index, role = LOSES[name]
    words = rf"messages\[{index}\]: the model's chat template leaves out messages of role {role},.*--chat"
    with pytest.raises(ValueError, match=words):
        rendered(template, messages)
    with pytest.raises(ValueError, match=words):
        tokenize_prompt(in_python(messages), Letters(template))
    assert rendered(each(SAID), messages) and tokenize_prompt(in_python(messages), Letters(each(SAID)))


SHOWN = {
    "text": each(SAID),
    "parts": each(PARTS),
    "text for users alone": each("{% if m.role == 'user' %}" + SAID + "{% else %}" + PARTS + "{% endif %}"),
    "parts for users alone": each("{% if m.role == 'user' %}" + PARTS + "{% else %}" + SAID + "{% endif %}"),
    "parts of results": each("{% if m.role == 'tool' %}" + PARTS + "{% else %}" + SAID + "{% endif %}"),
    "parts of the system": each("{% if m.role == 'system' %}" + PARTS + "{% else %}" + SAID + "{% endif %}"),
    "either": each("{% if m.content is string %}" + SAID + "{% else %}" + PARTS + "{% endif %}"),
}


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("as_parts", [False, True])
def test_each_role_gets_the_form_that_the_template_shows(name, as_parts):
    messages = [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if as_parts and m["content"] else m for m in WHOLE
    ]
    expected = 'system=Be;user=Hi you;assistant=[go{"k": 1}];tool=done;assistant=a;user=Hi you;'
    assert rendered(SHOWN[name], messages) == expected
    assert tokenize_prompt(in_python(messages), Letters(SHOWN[name]))[0] == expected


@pytest.mark.parametrize("template", [each(SAID.replace("m.content", "m.content | trim")), each(SAID.upper().lower())])
def test_a_text_that_is_written_otherwise_is_not_left_out(template):
    assert "Hi you" in rendered(template, [{"role": "user", "content": "  Hi you\n"}])


@pytest.mark.parametrize("change", ["m.content | upper", "m.content | tojson", "m.content | replace(' ', '_')"])
def test_a_text_that_is_changed_is_not_left_out(change):
    assert rendered(each("{{ " + change + " }}"), [{"role": "user", "content": 'say "é\nx"'}])


def test_reasoning_inside_of_an_earlier_answer_may_be_left_out():
    template = each("{{ m.role }}={{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }};")
    answer = {"role": "assistant", "content": "<think>why</think>b"}
    assert rendered(template, [USER, answer, USER]) == "user=Hi you;assistant=b;user=Hi you;"
    with pytest.raises(ValueError, match="role user"):
        rendered(each("{{ m.content.split('</think>')[-1] }}"), [{"role": "user", "content": "why</think>b"}])


def test_a_template_that_reads_contents_as_json():
    template = each("{% if m.role == 'tool' and m.content[:1] != '{' %}{{ raise_exception('JSON') }}{% endif %}" + SAID)
    result = {**RESULT, "content": '{"a": 1}'}
    assert '{"a": 1}' in rendered(template, [USER, {**CALLING, "content": None}, result])


def test_a_part_that_is_not_a_text_is_refused():
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    for template in (each(SAID), each(PARTS)):
        with pytest.raises(ChatTemplateError, match=r"a part of a content must be .*image_url"):
            tokenize_prompt([{"role": "user", "content": [{"type": "text", "text": "a"}, image]}], Letters(template))


def test_what_a_template_leaves_out_is_said(tmp_path, capsys):
    silent = each("{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}" + SAID, "not m.tool_calls")
    assert left_out(ChatTemplate(silent).render) == [
        "messages of role system (refused)",
        "contents of answers with calls of tools",
        "reasoning in front of calls of tools",
        "reasoning of earlier answers",
    ]
    folder = write_folder(tmp_path / "m", fields_of("llama"), template=silent)
    assert "contents of answers with calls of tools" in load_model(folder).described_files()["template_leaves_out"]
    main(["doctor", str(folder)])
    assert "the chat template leaves out: messages of role system (refused), contents" in capsys.readouterr().out


def test_several_parts_are_lines():
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]
    for template in (each(SAID), each(PARTS)):
        assert rendered(template, [{"role": "user", "content": parts}]) == "user=Hi\nyou;"
    assert tokenize_prompt([{"role": "user", "content": parts}], Letters(each(SAID)))[0] == "user=Hi\nyou;"
    assert tokenize_prompt([{"role": "user", "content": parts}], Letters(each(PARTS)))[0] == "user=Hiyou;"


SHOWS_IDS = each(
    "{{ m.content }}{% for c in m.tool_calls or () %}<{{ c.id }}:{{ c.function.arguments | tojson }}>{% endfor %}"
)
AS_TEXT = each(
    "{{ m.content }}{% for c in m.tool_calls or () %}{{ '<' + c.function.name + c.function.arguments + '>' }}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ("", r"messages\[1\].tool_calls\[0\]: .* leaves out the name and the arguments of a call"),
        ("{{ m.tool_calls[0].function.name }}", "leaves out the arguments of a call"),
        ("{{ m.tool_calls[0].id }}", r"leaves out the name and the arguments of a call"),
        ("{% for c in (m.tool_calls or ())[1:] %}{{ c | tojson }}{% endfor %}", r"tool_calls\[0\]: .*leaves out"),
    ],
)
def test_a_call_that_the_template_leaves_out_is_refused(calls, words):
    template = each("{{ m.content }}{% if m.tool_calls %}" + calls + "{% endif %}")
    with pytest.raises(ValueError, match=words):
        rendered(template, [USER, {**CALLING, "tool_calls": [CALL, CALL]}, RESULT])


def test_a_template_that_shows_the_ids_of_calls_alone():
    calling = {**CALLING, "tool_calls": [{**CALL, "id": "functions.go:0"}]}
    assert '<functions.go:0:{"k": 1}>' in rendered(SHOWS_IDS, [USER, calling, RESULT])
    with pytest.raises(
        ValueError, match=r"tool_calls\[0\]: .*the name of a call in its id alone, such as 'functions.go:0'"
    ):
        rendered(SHOWS_IDS, [USER, CALLING, RESULT])


def test_a_template_may_say_for_itself_what_is_called():
    template = each("{{ m.content }}{% for c in m.tool_calls or () %}look: {{ c.function.arguments.k }}{% endfor %}")
    assert "I look.look: 1" in rendered(template, [USER, CALLING, RESULT])


def test_a_template_that_wants_arguments_as_text_gets_them():
    assert '<go{"k": 1}>' in rendered(AS_TEXT, [USER, CALLING, RESULT])


SILENT = "{% if m.tool_calls %}" + CALLS + "{% else %}" + SAID + "{% endif %}"


@pytest.mark.parametrize("shown", ["not m.tool_calls", "not (m.tool_calls and n > 3)"])
def test_a_text_beside_calls_may_be_left_out(shown):
    """As Llama 3 and Mistral do, and gpt-oss once the answer is there: answers of the server have such texts."""
    template = "{% set n = messages | length %}" + each("{% if " + shown + " %}{{ m.content }}{% endif %}" + CALLS)
    assert "Hi you" in rendered(template, [USER, CALLING, RESULT, ANSWER, USER])
    assert "I look." not in rendered(template, [USER, CALLING, RESULT, ANSWER, USER])
    assert "contents of answers with calls of tools" in left_out(ChatTemplate(each(SILENT)).render)
    with pytest.raises(ValueError, match="leaves out messages of role user"):
        rendered(each(SILENT, "m.role != 'user'"), [USER, CALLING, RESULT])
