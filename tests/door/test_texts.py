"""Texts: what a tokenizer puts around them, templates that want parts, thinking, and templates that the user gives."""

import pytest
from door_folders import byte_tokenizer, fields_of, write_folder
from gguf_files import byte_tokenizer as metadata_of_tokenizer
from gguf_files import random_model, tiny_config, write_model
from tokenizers import processors
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from workbench.engine.input_processor import tokenize_prompt
from workbench.models import load_model
from workbench.models.gguf.other_keys import judge_other_keys
from workbench.models.gguf.tokenizer import GGUFTokenizer
from workbench.models.tokenizer import ChatTemplate, ChatTemplateError, with_special_tokens


@pytest.fixture
def folder(tmp_path):
    def make(name="m", **options):
        return write_folder(tmp_path / name, fields_of("llama"), **options)

    return make


@pytest.mark.parametrize(
    "around", ["[gMASK] <sop> $A", "<|bos|> $A", "<|bos|> $A <|im_end|>", "$A <|im_end|>", "$A", "<sop> <|bos|> $A"]
)
def test_plain_texts_get_what_the_tokenizer_puts_around_them(around, folder):
    tokenizer = byte_tokenizer()
    special = [(token, tokenizer.token_to_id(token)) for token in around.split() if token != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
    path = folder(tokenizer=tokenizer)
    expected = AutoTokenizer.from_pretrained(str(path))("ab c").input_ids
    ours = load_model(path).tokenizer
    assert tokenize_prompt("ab c", ours) == ("ab c", expected)
    assert with_special_tokens(ours, ours.encode("ab c")) == expected
    message = [{"role": "user", "content": "ab"}]  # a template writes its own
    assert tokenize_prompt(message, ours)[1] == ours.encode(ours.apply_chat_template(message))


PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %};{% endfor %}"
)
SELECTED = (
    "{% for m in messages %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}"
    "{% endfor %}|{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}, a part"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "text"),
    [(PARTS, "system:Be brief.;user:Hi;"), (SELECTED, "Be brief.|Hi|"), (EITHER, "Be brief.Hi")],
)
def test_templates_that_want_parts_show_the_words(template, text, folder):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert load_model(folder(template=template)).tokenizer.apply_chat_template(messages) == text
    assert ChatTemplate(template).render(messages) == text


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("calls", [None, []])
def test_reasoning_has_the_names_that_transformers_gives_it(name, calls):
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.content }};{% endfor %}"
    answer = {"role": "assistant", "content": "b", name: "so"} | ({} if calls is None else {"tool_calls": calls})
    messages = [{"role": "user", "content": "a"}, answer]
    expected = render_jinja_template([messages], chat_template=template, add_generation_prompt=True)[0][0]
    assert ChatTemplate(template).render(messages) == expected == "||a;so|so|b;"


THINKS = (
    "{{ messages[0].content }}{% if enable_thinking is not defined %} unset{% elif enable_thinking %} on"
    "{% else %} off{% endif %}"
)


def test_enable_thinking_is_undefined_unless_it_is_asked_for(folder, tmp_path):
    """The same from a folder whose vocabulary has <think>, where mlx-lm sets it, and from a GGUF file."""
    config, path = tiny_config("llama"), tmp_path / "m.gguf"
    write_model(path, "llama", config, random_model(config))
    tokenizers = [load_model(folder(template=THINKS)).tokenizer, load_model(path, chat_template=THINKS).tokenizer]
    for tokenizer in tokenizers:
        said = [
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}], **kw)
            for kw in ({}, {"enable_thinking": True}, {"enable_thinking": False})
        ]
        assert said == ["a unset", "a on", "a off"]


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        ("{{ messages[0].content }}", "the template decides alone"),
        ("{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}", "no, as with enable_thinking false"),
        ("{{ messages[0].content }}{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}",
         "yes, as with enable_thinking true"),
        (THINKS, "neither as with true nor with false"),
    ],
)  # fmt: skip
def test_what_decides_about_thinking_is_said(template, answer):
    assert ChatTemplate(template).thinking().startswith(answer)


def test_a_template_of_one_s_own(folder, tmp_path):
    path, message = folder(template="theirs"), [{"role": "user", "content": "a"}]
    file = tmp_path / "mine.jinja"
    file.write_text("mine: {{ messages[0].content }}")
    assert load_model(path, chat_template=file).tokenizer.apply_chat_template(message) == "mine: a"
    assert load_model(path, chat_template="{{ 'inline' }}").tokenizer.apply_chat_template(message) == "inline"
    assert load_model(path).tokenizer.apply_chat_template(message) == "theirs"
    with pytest.raises(ChatTemplateError, match="not valid"):
        load_model(path, chat_template="{{ (((")
    with pytest.raises(ValueError, match=r"chat_template 'nowhere.jinja' cannot be read \(No such file"):
        load_model(path, chat_template="nowhere.jinja")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokenizer.ggml.precompiled_charsmap", [1, 2, 3], "precompiled_charsmap"),
        ("tokenizer.ggml.add_space_prefix", True, "add_space_prefix"),
        ("tokenizer.ggml.add_sep_token", True, "add_sep_token"),
        ("tokenizer.ggml.normalizer.lowercase", True, "normalizer.lowercase True is not supported: it is unknown"),
    ],
)
def test_keys_of_a_gguf_tokenizer_are_read_or_refused(key, value, words):
    metadata = metadata_of_tokenizer(300)
    assert GGUFTokenizer(metadata).encode("the")
    with pytest.raises(ValueError, match=words):
        GGUFTokenizer(metadata | {key: value})
    assert GGUFTokenizer(metadata | {key: value}, ignored=[key]).findings


def test_a_gguf_tokenizer_ends_texts_with_eos_if_it_says_so():
    metadata = metadata_of_tokenizer(300)
    both = GGUFTokenizer(metadata | {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.add_bos_token": True})
    assert with_special_tokens(both, both.encode("the")) == [298, *both.encode("the"), 299]
    plain = GGUFTokenizer(metadata)
    assert with_special_tokens(plain, plain.encode("the")) == plain.encode("the")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.type", "adapter", "only a file of a whole model"),
        ("general.type", "mmproj", "only a file of a whole model"),
        ("adapter.type", "lora", "it is an adapter"),
        ("clip.has_vision_encoder", True, "encoder of images"),
        ("diffusion.shift_logits", True, "left to right"),
    ],
)
def test_keys_of_other_kinds_of_gguf_files_are_refused(key, value, words):
    metadata = {"general.architecture": "llama", "llama.block_count": 2, "tokenizer.ggml.model": "gpt2"}
    labels = {"general.name": "x", "general.type": "model", "vendor.note": "y", "split.count": 1}
    found = {each.key: each.verdict for each in judge_other_keys("m.gguf", metadata | labels)}
    assert found == {"general.architecture": "read", "split.count": "read"} | dict.fromkeys(
        ("general.name", "general.type", "vendor.note"), "harmless"
    )
    with pytest.raises(ValueError, match=f"m.gguf: {key} .*{words}.*--ignore-config-key"):
        judge_other_keys("m.gguf", metadata | {key: value})
    assert judge_other_keys("m.gguf", metadata | {key: value}, [key])
