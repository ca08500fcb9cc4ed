"""Chat templates that write calls of tools in the known forms, shortened from the models' own."""

HERMES = (
    "{% if tools %}tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if think %}<think>{% endif %}{% endif %}"
)
LLAMA = (
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "<|head|>assistant<|end|>{{ '\\n\\n' }}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot|>"
    "{% else %}<|head|>{{ m.role }}<|end|>\n\n{% if loop.first and tools %}{{ tools | tojson }}{% endif %}"
    "{{ m.content }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|end|>\n\n{% endif %}"
)
_MISTRAL_CALLS = (
    "[TOOL_CALLS] [{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    ', "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]'
)
_MINISTRAL_CALLS = (
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
)


def _mistral(calls):
    return (
        "<s>{% for m in messages %}{% if m.tool_calls %}" + calls + "</s>{% elif m.role == 'tool' %}"
        "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% elif m.role == 'assistant' %}{{ m.content }}</s>{% else %}"
        "{% if loop.first and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"
    )


def _in_one_tag(begin, between, end, with_ids=False):
    """All calls of a message in one tag."""
    with_id = ', "id": "{{ c.id }}"' if with_ids else ""
    return (
        "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% if m.tool_calls %}{{ '" + begin + "' }}{% for c in m.tool_calls %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}' + with_id + "}"
        "{% if not loop.last %}{{ '" + between + "' }}{% endif %}{% endfor %}{{ '" + end + "' }}{% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )


TEMPLATES = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": _mistral(_MISTRAL_CALLS),
    "ministral": _mistral(_MINISTRAL_CALLS),
    "nemotron": _in_one_tag("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "apriel": _in_one_tag("\\n<tool_calls>[", ", ", "]</tool_calls>", with_ids=True),
    "minimax": _in_one_tag("<tool_calls>\\n", "\\n", "\\n</tool_calls>"),
}
ENDS = {
    "hermes": "\n", "llama": "<|eot|>", "mistral": "</s>", "ministral": "</s>",
    "nemotron": "\n", "apriel": "\n", "minimax": "\n",
}  # fmt: skip
"""The text that follows the calls of a message."""

THINKS = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}\n{% endfor %}{% if reasoning_effort == 'low' %}briefly {% endif %}"
    "{% if add_generation_prompt %}assistant: {% if think is not defined %}<think>{% endif %}{% endif %}"
)
"""Thinks unless ``think`` is given, and calls tools as Hermes does."""
