"""Reasoning of an answer has the names under which templates read it."""

import pytest

from workbench.models.tokenizer import ChatTemplate

TEMPLATE = ChatTemplate("{% for m in messages %}[{{ m.thinking }}|{{ m.reasoning_content }}]{% endfor %}", {})
CALLS = [{"id": "a", "type": "function", "function": {"name": "go", "arguments": {}}}]


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("more", [{"content": "b"}, {"content": "", "tool_calls": CALLS}])
def test_each_name_is_given_to_both(name, more):
    assert TEMPLATE.render([{"role": "assistant", name: "x", **more}], False) == "[x|x]"


def test_calls_behind_a_text_have_no_thinking():
    """gpt-oss's template refuses the two together."""
    message = {"role": "assistant", "reasoning": "x", "content": "b", "tool_calls": CALLS}
    assert TEMPLATE.render([message], False) == "[|x]"
