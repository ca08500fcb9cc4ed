"""Chat templates, which come with a model's file and are not trusted, and the wrapper of Hugging Face tokenizers."""

import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from gguf_files import byte_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from workbench.models import template_renderer
from workbench.models.gguf.tokenizer import GGUFTokenizer
from workbench.models.tokenizer import ChatTemplate, ChatTemplateError, HuggingFaceTokenizer, Tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 < 2 & 'so'?"},
]
CHATML = """{% for message in messages %}
    {% if message['role'] == 'tool' %}
        {{ raise_exception('no tools here') }}
    {% endif %}
    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{ '<|im_start|>assistant\\n' }}
{% endif %}
"""


@pytest.fixture(scope="module")
def fast_tokenizer():
    """A byte-level tokenizer with a chat template, as transformers loads it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, normalized=False) for token in ("<s>", "<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="<|im_end|>", chat_template=CHATML)


# -- rendering -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_template_renders_as_in_transformers(fast_tokenizer, add_generation_prompt):
    expected = fast_tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert ChatTemplate(CHATML).render(CHAT, add_generation_prompt) == expected
    assert ("<|im_start|>assistant\n" in expected) == add_generation_prompt


def test_variables_filters_and_functions_that_templates_use():
    source = (
        "{{ bos_token }}{% for m in messages %}{% if m.content == 'stop' %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
        "{{ strftime_now('%Y') | length }}{{ extra }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    messages = [{"content": "a <b> & 'ü'"}, {"content": "stop"}, {"content": "never"}]
    assert template.render(messages, extra="!") == """<s>{"content": "a <b> & 'ü'"}4!"""
    assert '[\n  {\n    "name": "f"\n  }\n]' in template.render(messages, tools=[{"name": "f"}])


def test_a_template_may_refuse_the_messages():
    with pytest.raises(ChatTemplateError, match="refuses these messages: no tools here"):
        ChatTemplate(CHATML).render([{"role": "tool", "content": ""}])


@pytest.mark.parametrize("source", ["{% for m in messages %}", "{{ unclosed", "{% nonsense %}"])
def test_a_template_that_is_not_jinja_is_refused_at_once(source):
    with pytest.raises(ChatTemplateError, match="is not valid"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append('x') }}",
        "{{ messages[0].update({'content': 'changed'}) }}",
        "{% set _ = messages[0].pop('content') %}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_an_attack_is_refused(attack):
    messages = [{"role": "user", "content": "untouched"}]
    with pytest.raises(ChatTemplateError):
        ChatTemplate(attack).render(messages)
    assert messages == [{"role": "user", "content": "untouched"}]


@pytest.mark.parametrize(
    "attack",
    [
        "{{ 'x' * 1000000000000 }}",
        "{{ [0] * 1000000000000 }}",
        "{{ 1000000000000 * 'x' }}",
        "{{ ('x' * 10000) * ('x' * 10000) | length }}",
        "{{ 9 ** 9999999999 }}",
        "{{ 'x'.ljust(1000000000000) }}",
        "{{ 'x'.zfill(1000000000000) }}",
        "{{ '%1000000000000d' % 1 }}",
        "{{ '{:>1000000000000}'.format('x') }}",
        "{{ '{a:>1000000000000}'.format_map({'a': 'x'}) }}",
        "{{ '{:>{}}'.format('x', 1000000000000) }}",
        "{% set n = namespace(s='x') %}{% for i in range(100) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    ],
)
def test_a_template_that_needs_too_much_is_refused(attack):
    with pytest.raises(ChatTemplateError, match=r"the maximum is (16777216|4096)"):
        ChatTemplate(attack).render(CHAT)


def test_a_template_computes_nothing_huge_while_it_is_compiled():
    ChatTemplate("{% autoescape 10**(10**9) %}{% endautoescape %}")
    arithmetic = "{{ 3 * 4 }} {{ 2 ** 10 }} {{ 'ab' * 2 }} {{ 1.5 * 2 }} {{ 2 ** -1 }}"
    assert ChatTemplate(arithmetic).render([]) == "12 1024 abab 3.0 0.5"


@pytest.mark.repeats(step=4)
@pytest.mark.parametrize(
    "attack",
    [
        "{{ '{:>1500000000}'.format('x') }}",
        "{{ '{:>{}}'.format('x', 1500000000) }}",
        "{{ '{:.{}f}'.format(1.5, 16777216) }}{{ ('x' * 16000000).replace('x', 'y' * 100) }}",
        "{{ ('x' * 4096).replace('x', 'y' * 400000) }}",
        "{{ ('\\t' * 4096).expandtabs(400000) }}",
        "{{ ('x' * 4096).translate({120: 'y' * 400000}) }}",
        "{{ 'x' | center(1500000000) }}",
        "{{ '%1500000000d' | format(1) }}",
        "{{ ('x' * 4096) | replace('x', 'y' * 400000) }}",
        "{{ ([1] * 4096) | join('y' * 400000) }}",
        "{{ ('\\n' * 4096) | indent(400000, true, true) }}",
        "{{ ('x ' * 4096) | wordwrap(1, true, 'y' * 400000) }}",
        "{{ ([[0] * 4000] * 4000) | tojson | tojson | tojson | length * ([[0] * 4000] * 4000) | tojson }}",
        "{% set n = namespace(s='x') %}{% for i in range(31) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s=[[]]) %}{% for i in range(99999) %}{% set n.s = [n.s, [0] * 99999] %}{% endfor %}",
        "{% for x in range(99999) | batch(1) | list %}{% set _ = [x] * 16000000 %}{{ _ | string }}{% endfor %}",
        "{{ lipsum(n=100, min=16777216) }}",
        "{% macro m(n) %}{{ m(n + 1) }}{{ 'x' * 16000000 }}{% endmacro %}{{ m(0) }}",
        "{{ messages | xmlattr | urlize | escape | pprint * 0 }}{{ 'x' | center(16777216) | list | pprint }}",
    ],
)
def test_a_template_cannot_use_up_the_memory(attack, monkeypatch):
    """All of it happens in another process with little memory, also the constants that Jinja computes."""
    monkeypatch.setattr("workbench.models.tokenizer.MAX_TEMPLATE_SECONDS", 1.5)
    ChatTemplate("{{ 1 }}").render(CHAT)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ChatTemplateError):
        ChatTemplate(attack).render(CHAT)
    unit = 1024 if sys.platform == "darwin" else 1  # bytes there, KiB elsewhere
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000 * unit


@pytest.mark.skipif(sys.platform != "linux", reason="reads the limits and the peak of a process from /proc")
def test_the_process_of_templates_has_little_memory_and_no_files():
    template = ChatTemplate("{{ ('x' * 16000000) | length }}")
    assert template.render(CHAT) == "16000000"
    pid = template_renderer._running._process.pid
    status = Path(f"/proc/{pid}/status").read_text()
    size, peak = (int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) << 10 for name in ("VmSize", "VmHWM"))
    assert size < resource.prlimit(pid, resource.RLIMIT_AS)[1] < size + 2**28 + 2**25 and peak < 100 << 20
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        assert resource.prlimit(pid, limit) == (0, 0)
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (16, 16)
    assert os.getsid(pid) == pid, "Ctrl-C in the terminal does not reach it"


def test_a_text_that_is_too_large_to_send_is_refused():
    with pytest.raises(ChatTemplateError, match="its text is too large"):
        ChatTemplate("{{ '\U0001f600' * 15000000 }}").render(CHAT)


def test_a_process_whose_parent_does_not_end_it_ends():
    """For a parent that was killed."""
    source = "{% for a in range(99999) %}{% for b in range(99999) %}.{% endfor %}{% endfor %}"
    request = json.dumps({"source": source, "variables": {}, "seconds": -0.9}).encode()
    program = str(Path(template_renderer.__file__).with_name("template_process.py"))
    connection, its_end = multiprocessing.Pipe()
    with subprocess.Popen([sys.executable, program, str(its_end.fileno())], pass_fds=[its_end.fileno()]) as process:
        connection.send_bytes(request)
        assert process.wait(60) == -signal.SIGALRM


def test_a_process_that_was_ended_is_replaced():
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render(CHAT) == "Be brief."
    template_renderer._running._process.kill()
    with pytest.raises(ChatTemplateError, match="was ended"):
        template.render(CHAT)
    assert template.render(CHAT) == "Be brief."


def test_an_interrupted_rendering_does_not_answer_the_next_one(monkeypatch):
    template, poll = ChatTemplate("{{ messages[0].content }}"), Connection.poll

    def interrupted(connection, timeout):
        """Interrupts its caller when the answer is there, but not read."""
        if poll(connection, timeout):
            raise KeyboardInterrupt

    with monkeypatch.context() as interrupting:
        interrupting.setattr(Connection, "poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            template.render(CHAT)
    assert template.render(CHAT[1:]) == "1 < 2 & 'so'?"


def test_a_process_that_lacked_memory_is_replaced():
    """It may keep what the template left behind, such as large constants of compiled templates."""
    ChatTemplate("{{ 1 }}")
    before = template_renderer._running
    with pytest.raises(ChatTemplateError, match="MemoryError"):
        ChatTemplate("{{ ('x' * 4096).replace('x', 'y' * 400000) }}").render(CHAT)
    assert template_renderer._running is not before


def test_a_fork_starts_another_process(monkeypatch):
    template = ChatTemplate("{{ messages[0].content }}")
    before = template_renderer._running
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        assert template.render(CHAT) == "Be brief."
        assert template_renderer._running is not before
        template_renderer._end()
    monkeypatch.setattr(template_renderer, "_running", before)
    assert template.render(CHAT) == "Be brief."


def test_an_answer_that_is_too_long_is_not_read(monkeypatch):
    template = ChatTemplate("{{ messages[0].content }}")
    with monkeypatch.context() as small:
        small.setattr(template_renderer, "MAX_ANSWER_BYTES", 10)
        with pytest.raises(ChatTemplateError, match="an answer that is too long"):
            template.render(CHAT)
    assert template.render(CHAT) == "Be brief."


def test_texts_of_any_kind_reach_a_template_and_come_back():
    text = "\ud800 \0 \n é 日本 🙂 " + "x" * 1_000_000
    template = ChatTemplate("{{ messages[0].content }}|{{ flag }}|{{ none }}|{{ data.a[0] }}")
    rendered = template.render([{"role": "user", "content": text}], flag=True, none=None, data={"a": (1.5,)})
    assert rendered == text + "|True|None|1.5"
    with pytest.raises(ChatTemplateError, match="must be JSON data"):
        template.render([{"role": "user", "content": object()}])


def test_a_template_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr("workbench.models.tokenizer.MAX_TEMPLATE_SECONDS", 0.05)
    source = "{% for a in range(99999) %}{% for b in range(99999) %}.{% endfor %}{% endfor %}"
    with pytest.raises(ChatTemplateError, match=r"took more than 0\.05 s"):
        ChatTemplate(source).render(CHAT)
    monkeypatch.undo()
    assert ChatTemplate("{{ 1 }}").render(CHAT) == "1"


@pytest.mark.parametrize(
    "probe", ["strftime_now.__globals__", "lipsum.__globals__", "messages.__class__", "''.__doc__"]
)
def test_a_template_cannot_reach_python_objects(probe):
    assert ChatTemplate("[{{ " + probe + " }}]").render(CHAT) == "[]"


def test_files_cannot_be_included():
    for source in ("{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends '/etc/passwd' %}"):
        with pytest.raises(ChatTemplateError):
            ChatTemplate(source).render(CHAT)


# -- the two kinds of tokenizer ------------------------------------------------------------------------------


def test_the_gguf_tokenizer_fills_in_its_tokens():
    metadata = byte_tokenizer(262) | {"tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"}
    tokenizer = GGUFTokenizer(metadata)
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(CHAT) == "<|2|>|<|3|>|"


def test_a_model_without_a_template_says_so(fast_tokenizer):
    plain = PreTrainedTokenizerFast(tokenizer_object=fast_tokenizer.backend_tokenizer)
    for tokenizer in (GGUFTokenizer(byte_tokenizer(262)), HuggingFaceTokenizer(plain)):
        assert not tokenizer.has_chat_template
        with pytest.raises(ChatTemplateError, match="no chat template: give the prompt as text"):
            tokenizer.apply_chat_template(CHAT)


def test_the_wrapper_of_a_hugging_face_tokenizer(fast_tokenizer):
    tokenizer = HuggingFaceTokenizer(fast_tokenizer)
    assert isinstance(tokenizer, Tokenizer)
    assert isinstance(GGUFTokenizer(byte_tokenizer(262)), Tokenizer)
    assert tokenizer.vocab_size == 259
    assert tokenizer.bos_token_id == 256
    assert tokenizer.eos_token_ids == {258}
    text = "<|im_start|>a , b ! it 's\n日本<|im_end|>"
    ids = tokenizer.encode(text)
    assert ids[0] == 257 and ids[-1] == 258 and 256 not in ids
    assert tokenizer.decode(ids) == text
    assert "<|im_start|>assistant\n" in tokenizer.apply_chat_template(CHAT)
    with pytest.raises(ChatTemplateError, match="no tools here"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}])


def wrapped(fast_tokenizer, template):
    """The tokenizer of a model in a folder, with another template, loaded by mlx-lm and by transformers."""
    backend = FastTokenizer.from_str(fast_tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    plain = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", chat_template=template
    )
    return TokenizerWrapper(plain), plain


@pytest.mark.parametrize("attack", ["{{ 'x' * 16777217 }}", "{{ 9 ** 9999 }}"])
def test_a_template_from_a_folder_has_the_same_limits(fast_tokenizer, attack):
    for tokenizer in wrapped(fast_tokenizer, attack):
        with pytest.raises(ChatTemplateError, match=r"SecurityError.*the maximum is (16777216|4096)"):
            HuggingFaceTokenizer(tokenizer).apply_chat_template(CHAT)


def test_a_template_from_a_folder_sees_what_it_would_see_in_transformers(fast_tokenizer):
    """``enable_thinking`` is not defined unless it is asked for, also where mlx-lm sets it."""
    source = (
        "{{ bos_token }}{{ eos_token }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
        "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }}{% endgeneration %}"
        "{{ x }}{% endfor %}{{ documents is none }}{{ tools }}"
    )
    both = wrapped(fast_tokenizer, source)
    expected = both[1].apply_chat_template(CHAT, tokenize=False)
    for tokenizer in both:
        assert HuggingFaceTokenizer(tokenizer).apply_chat_template(CHAT) == expected
    assert "TrueBe" not in expected and "Be brief.1" in expected


def test_a_model_may_have_another_template_for_tools(fast_tokenizer):
    both, _ = wrapped(fast_tokenizer, {"default": "talk", "tool_use": "{{ tools[0].name }}"})
    tokenizer = HuggingFaceTokenizer(both)
    assert tokenizer.apply_chat_template(CHAT) == "talk"
    assert tokenizer.apply_chat_template(CHAT, tools=[{"name": "f"}]) == "f"
    neither, _ = wrapped(fast_tokenizer, {"other": "", "tool_use": ""})
    with pytest.raises(ChatTemplateError, match="multiple chat templates with no default"):
        HuggingFaceTokenizer(neither).apply_chat_template(CHAT)


def test_conversations_that_mlx_lm_renders_by_code_are_left_to_it(fast_tokenizer):
    def render(messages, add_generation_prompt, **variables):
        return f"{len(messages)} messages, thinking {variables['enable_thinking']}"

    tokenizer = HuggingFaceTokenizer(TokenizerWrapper(fast_tokenizer, chat_template=render))
    assert tokenizer.apply_chat_template(CHAT, enable_thinking=True) == "2 messages, thinking True"


def test_no_special_tokens_are_added_even_if_the_tokenizer_would(fast_tokenizer):
    from tokenizers.processors import TemplateProcessing

    backend = FastTokenizer.from_str(fast_tokenizer.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    adding = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>")
    assert adding.encode("a")[0] == 256
    tokenizer = HuggingFaceTokenizer(adding)
    assert tokenizer.adds_bos
    assert 256 not in tokenizer.encode("a")
    assert not HuggingFaceTokenizer(fast_tokenizer).adds_bos
