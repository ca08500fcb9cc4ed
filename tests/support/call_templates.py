"""Chat templates that write the arguments of calls one by one, or number calls, after the forms of several families."""

_SHOWN = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.tool_calls %}CALLS{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_JSON = "{{ v if v is string else v | tojson }}"
_SPELLED = "{{ v if v is string else (v | tojson if v is mapping or v is iterable else v | string) }}"
_OWN = (
    "{% macro own(v) %}{% if v is string %}<|q|>{{ v }}<|q|>{% elif v is mapping %}{ {%- for k, w in v.items() %}"
    "{{ k }}:{{ own(w) }}{% if not loop.last %},{% endif %}{% endfor -%} }{% elif v is iterable %}[{% for w in v %}"
    "{{ own(w) }}{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)


def _calls(each, begin="", end="", between="", before=""):
    last = "{% if not loop.last %}" + between + "{% endif %}"
    loop = "{% for c in m.tool_calls %}{% set a = c.function.arguments %}" + each + last + "{% endfor %}"
    return before + _SHOWN.replace("CALLS", begin + loop + end)


def _pairs(pair, between=""):
    last = "{% if not loop.last %}" + between + "{% endif %}" if between else ""
    return "{% for k, v in a.items() %}" + pair + last + "{% endfor %}"


_NAME, _N = "{{ c.function.name }}", "{{ '\\n' }}"
_QUOTED = '{{ "\'" + v + "\'" if v is string else (v | tojson if v is mapping or v is iterable else v | string) }}'
_WRAPPED = (
    "{% if v is string and ('<' in v or '&' in v) %}{{ '<![CDATA[' + v + ']]>' }}{% else %}" + _SPELLED + "{% endif %}"
)
_TYPED = "{{ 'true' if v is string else 'false' }}"

FAMILIES = {
    "tags, a line each": _calls(
        f"{_N}<tool_call>{_NAME}\n"
        + _pairs(f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_JSON}</arg_value>\n")
        + "</tool_call>"
    ),
    "tags": _calls(
        f"<tool_call>{_NAME}"
        + _pairs(f"<arg_key>{{{{ k }}}}</arg_key><arg_value>{_JSON}</arg_value>")
        + "</tool_call>"
    ),
    "functions": _calls(
        f"{_N}<tool_call>\n<function={_NAME}>\n"
        + _pairs(f"<parameter={{{{ k }}}}>\n{_SPELLED}\n</parameter>\n")
        + "</function>\n</tool_call>"
    ),
    "invocations": _calls(
        f'<invoke name="{_NAME}">\n'
        + _pairs(f'<parameter name="{{{{ k }}}}">{_JSON}</parameter>\n')
        + "</invoke>\n",
        f"{_N}<m:tool_call>\n",
        "</m:tool_call>",
    ),
    "typed invocations": _calls(
        f'<|D|invoke name="{_NAME}">\n'
        + _pairs(f'<|D|parameter name="{{{{ k }}}}" string="{_TYPED}">{_JSON}</|D|parameter>\n')
        + "</|D|invoke>\n",
        f"{_N}<|D|calls>\n",
        "</|D|calls>",
    ),
    "own quotes": _calls(
        f"<|tool_call>call:{_NAME}{{{{ own(a) }}}}<tool_call|>", before=_OWN
    ),
    "keywords": _calls(
        f"{_NAME}(" + _pairs(f"{{{{ k }}}}={_QUOTED}", ", ") + ")", "<|calls|>[", "]<|end|>", ", "
    ),
    "numbered": _calls(
        f"<|call|>functions.{_NAME}:{{{{ loop.index0 }}}}<|argument|>{{{{ a | tojson }}}}<|end|>",
        "<|calls|>",
        "<|done|>",
    ),
    "numbered in a list": _calls(
        f'{_N}    {{"id": "{{{{ loop.index0 }}}}", "name": "{_NAME}", "parameters": {{{{ a | tojson }}}}}}',
        "<|action|>[",
        f"{_N}]<|end|>",
        ",",
    ),
    "fenced": _calls(
        f"<|call|>function<|sep|>{_NAME}\n```json\n{{{{ a | tojson }}}}\n```<|end|>", "<|calls|>", "<|done|>", _N
    ),
    "with an id": _calls(
        f"<|call|>{{{{ c.id }}}}<|name|>{_NAME}<|args|>{{{{ a | tojson }}}}<|end|>", "<|calls|>", "<|done|>"
    ),
    "a tag for the name": _calls(f"<function={_NAME}>{{{{ a | tojson }}}}</function>"),
    "wrapped strings": _calls(
        f'<function name="{_NAME}">' + _pairs(f'<param name="{{{{ k }}}}">{_WRAPPED}</param>') + "</function>"
    ),
    "a list behind words": _calls(
        f'{_N}    {{"tool": "{_NAME}", "parameters": {{{{ a | tojson }}}}}}', "Action: [", f"{_N}]", ","
    ),
}  # fmt: skip

NAMED_IN_IDS = _calls("<|call|>{{ c.id }}<|argument|>{{ a | tojson }}<|end|>", "<|calls|>", "<|done|>")
"""Calls without names, whose ids contain them."""

AS_TEXT = _calls("{{ '<|call|>' + c.function.name + '<|sep|>' + a + '<|end|>' }}", "<|calls|>", "<|done|>")
"""Arguments have to be JSON, as texts."""

NO_CALLS = (
    "{% if tools %}<|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}{% for m in messages %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Tools and no calls, after LFM 2."""

NO_CALLS_AND_WORDS = (
    "{% if tools %}Write <|tool_call|> followed by a JSON list of tools used.\n{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Tools and no calls, after Granite 3."""


def _said(variable):
    return (
        "{% if VARIABLE %}<tools>{% for t in VARIABLE %}{{ t | string }}\n{% endfor %}</tools>\nFor each call, return "
        'JSON within tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n'
        "{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ).replace("VARIABLE", variable)


SAID = {name: _said(name) for name in ("tools", "xml_tools")}
"""The form of calls is described, and calls are left out; SmolLM 3 reads the second variable."""

NO_TOOLS = FAMILIES["numbered"].replace("tools: {{ tools | tojson }}\n", "")
"""Calls and no tools, after DeepSeek V3."""

BEHIND_AN_END = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}<|role|>{{ m.content }}"
    '<|sep|>\n{% for c in m.tool_calls or [] %}function call<|role|>{{ \'{\' }}"name": "{{ c.function.name }}", '
    "\"arguments\": {{ c.function.arguments | tojson }}{{ '}' }}<|sep|>\n{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant<|role|>{% endif %}"
)
"""A call begins with the text that ends a message, after GigaChat 3."""

CHANNELS = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{% if m.content or m.thinking %}<|start|>assistant"
    "<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}"
    "{% set c = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}"
    "<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|end|>' if add_generation_prompt or not loop.last else '<|return|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""Answers in channels, after gpt-oss."""

REFUSED = {
    "which is not a tag": _calls(f" to={_NAME}<|channel|>{{{{ a | tojson }}}}<|call|>"),
    "leaves out the calls": _SHOWN.replace("CALLS", ""),
    "strings with markup": _calls(
        f"<call>{_NAME}" + _pairs("<k>{{ k }}</k><v>{{ v | e if v is string else v | tojson }}</v>") + "</call>"
    ),
    "the end of an argument": _calls(f"<call>{_NAME}" + _pairs("<k>{{ k }}</k>{{ v }}") + "</call>"),
    "objects as arguments": _calls(
        f"<call>{_NAME}" + _pairs("<k>{{ k }}</k><v>{{ v | length if v is mapping else v }}</v>") + "</call>"
    ),
    "numbers are written": _calls(
        f"<call>{_NAME}" + _pairs("<k>{{ k }}</k>{{ '<s>' + v + '</s>' if v is string else '' }}") + "</call>"
    ),
    "depends on the call": _calls(f"<call>{_NAME}<{{{{ c.function.name | length * 2 }}}}>{{{{ a | tojson }}}}</call>"),
    "behind the name": _calls(f"<call>{_NAME}</call>"),
    "answers stand between tags": (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|open|>{{ m.role }}<|sep|>"
        "{% if m.role == 'assistant' %}<|open|>said<|sep|>{% endif %}{{ m.content }}"
        "{% if m.role == 'assistant' %}<|close|>said<|sep|>{% endif %}{% for c in m.tool_calls or [] %}"
        "<|open|>call {{ c.function.name }}<|sep|>{{ c.function.arguments | tojson }}<|close|>call<|sep|>{% endfor %}"
        "<|close|>{{ m.role }}<|sep|>{% endfor %}{% if add_generation_prompt %}<|open|>assistant<|sep|>{% endif %}"
    ),
    "are repeated": _calls(f"<call>{_NAME} {{{{ a | tojson }}}} {{{{ a | tojson }}}}</call>"),
}  # fmt: skip
"""Templates whose calls cannot be learned, by the reason."""
