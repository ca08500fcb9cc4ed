"""GGUF files with a wrong value anywhere are loaded or refused by name: no crash, no hang, no other error."""

import struct

import pytest
from gguf_bytes import gguf_bytes, pack_string, tensors_of
from gguf_files import random_model, tiny_config, write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import examples

from workbench.models.gguf.file import GGUFError, GGUFFile
from workbench.models.load import load_model
from workbench.models.tokenizer import ChatTemplateError

FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)

SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁ab"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.chat_template": "x",
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Metadata and tensors of one file per architecture, and of one file with another kind of tokenizer."""
    found = []
    for architecture in ("llama", "gemma3", "lfm2"):
        path = tmp_path_factory.mktemp("gguf") / f"{architecture}.gguf"
        layers = {"num_hidden_layers": 2, "full_attn_idxs": [1]} if architecture == "lfm2" else {"num_hidden_layers": 1}
        config = tiny_config(architecture) | layers
        write_model(path, architecture, config, random_model(config))
        file = GGUFFile(path)
        found.append((file.metadata, tensors_of(file)))
    metadata, tensors = found[0]
    found.append(({key: value for key, value in metadata.items() if "tokenizer" not in key} | SENTENCEPIECE, tensors))
    return found


def load(folder, data):
    """Load a file: True if it is a model, False if it is refused as documented."""
    path = folder / "fuzzed.gguf"
    path.write_bytes(data)
    try:
        load_model(path)
    except (GGUFError, ChatTemplateError, FileNotFoundError):
        return False
    return True


STRANGE = st.one_of(
    st.sampled_from([0, 1, -1, 3, 7, 255, 2**24, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, True, False]),
    st.sampled_from([0.0, -1.0, 0.5, 1e300, float("nan"), float("inf"), "", "llama", "yarn", "\0", "a" * 2000]),
    st.sampled_from([[], [0], [[]], [[[]]], [""], ["a", "a"], [1.5, 2.5], [7] * 3, [True], ["a b", "c"]]),
    st.integers(-(2**63), 2**64 - 1),
    st.text(max_size=8),
)


@settings(FUZZ, max_examples=examples(150))
@given(data=st.data())
def test_any_metadata_value_of_any_type(tmp_path_factory, sources, data):
    metadata, tensors = data.draw(st.sampled_from(range(len(sources))).map(lambda index: sources[index]))
    metadata = dict(metadata)
    for _ in range(data.draw(st.integers(1, 2))):
        key = data.draw(
            st.sampled_from([*sorted(metadata), "llama.rope.scaling.type", "llama.expert_count", "split.count"])
        )
        if data.draw(st.integers(0, 9)) == 0:
            metadata.pop(key, None)
        else:
            metadata[key] = data.draw(STRANGE)
    load(tmp_path_factory.mktemp("fuzz"), gguf_bytes(metadata, tensors))


@settings(FUZZ, max_examples=examples(80))
@given(data=st.data())
def test_any_entry_of_the_tensor_table(tmp_path_factory, sources, data):
    metadata, tensors = sources[0]
    tensors = list(tensors)
    index = data.draw(st.integers(0, len(tensors) - 1))
    sizes = st.one_of(st.integers(0, 70), st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1]))
    change = data.draw(
        st.one_of(
            st.fixed_dictionaries({"shape": st.lists(sizes, max_size=5).map(tuple)}),
            st.fixed_dictionaries({"type_number": st.one_of(st.integers(0, 45), st.sampled_from([2**32 - 1]))}),
            st.fixed_dictionaries({"offset": st.one_of(st.integers(0, 10**6), st.sampled_from([2**63, 2**64 - 1]))}),
            st.fixed_dictionaries(
                {"name": st.sampled_from(["", "blk", "blk..", "blk.999999999.attn_q.weight", "rope_freqs.weight"])}
            ),
        )
    )
    tensors[index] = tensors[index]._replace(**change)
    load(tmp_path_factory.mktemp("fuzz"), gguf_bytes(metadata, tensors))


def test_the_files_that_are_fuzzed_are_models(tmp_path, sources):
    """A negative control: without a change they load."""
    for metadata, tensors in sources:
        assert load(tmp_path, gguf_bytes(metadata, tensors))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.alignment", "a", "must be an integer"),
        ("general.alignment", 0, "must be an integer from 1"),
        ("split.count", [2], "must be an integer"),
        ("general.architecture", ["llama"], "must be a text"),
        ("llama.block_count", 2**31, "from 1 to 12"),
        ("llama.attention.head_count", 0, "must be an integer from 1"),
        ("llama.rope.freq_base", "x", "must be a finite number"),
        ("llama.rope.freq_base", -5.0, r"llama\.rope\.freq_base=-5\.0 must be above 0"),
        ("llama.rope.scaling.factor", -2.0, "must not be negative"),
        ("llama.attention.layer_norm_rms_epsilon", 0.0, "must be above 0"),
        ("llama.embedding_length", [[1]], "must be an integer"),
        ("tokenizer.ggml.tokens", 7, "must be a list of texts"),
        ("tokenizer.ggml.merges", ["th"], "must be two tokens"),
        ("tokenizer.ggml.token_type", ["1"], "must be a list of int"),
        ("tokenizer.ggml.bos_token_id", "1", "must be an integer"),
        ("tokenizer.chat_template", 5, "must be a text"),
    ],
)
def test_wrong_values_are_named(tmp_path, sources, key, value, words):
    metadata, tensors = sources[0]
    path = tmp_path / "wrong.gguf"
    path.write_bytes(gguf_bytes({**metadata, key: value}, tensors))
    with pytest.raises(ValueError, match=words):
        load_model(path)


def test_deeply_nested_arrays_are_refused(tmp_path):
    levels = struct.pack("<IQ", 9, 1) * 100_000  # each one is an array of one array
    path = tmp_path / "deep.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pack_string("a") + struct.pack("<I", 9) + levels)
    with pytest.raises(GGUFError, match="arrays within arrays"):
        GGUFFile(path)


def test_a_template_that_is_not_valid_leaves_a_model_without_chat(tmp_path, sources):
    metadata, tensors = sources[0]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(metadata | {"tokenizer.chat_template": "{{" + "(" * 3000}, tensors))
    tokenizer = load_model(path).tokenizer
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match=r"not valid.*--chat-template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    assert load_model(path, chat_template="{{ messages[0].content }}!").tokenizer.has_chat_template
