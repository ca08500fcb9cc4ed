"""A GGUF file of LFM2, whose layers are short convolutions and attention: logits, tokens of the engine, refusals."""

import mlx.core as mx
import numpy as np
import pytest
from gguf_bytes import gguf_bytes, tensors_of
from gguf_files import byte_tokenizer, random_model, tiny_config, write_model
from plain_model import greedy, random_prompts

from workbench import Engine, EngineConfig, SamplingParams
from workbench.models import load_model
from workbench.models.gguf.file import GGUFError, GGUFFile
from workbench.models.gguf.loader import load_gguf_model
from workbench.models.gguf.quantized import QUANTIZED_BITS

pytestmark = pytest.mark.usefixtures("no_compilation")
CONFIG = tiny_config("lfm2")
LENGTHS = (29, 3, 41, 17, 1)
NUM_OUTPUT = 10
TOKENS = np.random.default_rng(5).integers(0, 262, (1, 23))


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


def written(folder, model, matrix_type="F32", **changes):
    """A file of the model as Liquid AI's files are, and the model with the values that the file holds."""
    path = folder / "lfm2.gguf"
    tokenizer = byte_tokenizer(262, pre="lfm2")
    values = write_model(path, "lfm2", CONFIG, model, matrix_type=matrix_type, tokenizer=tokenizer, **changes)
    stored = random_model(CONFIG)
    stored.load_weights([(name, mx.array(array)) for name, array in values.items()], strict=False)
    return path, stored


def difference(path, model):
    """The largest difference of a file's logits from a model's."""
    tokens = mx.array(TOKENS)
    return float(mx.abs(load_model(path).model(tokens) - model(tokens)).max())


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("matrix_type", ["F32", "Q8_0", "Q4_0"])
def test_the_engines_tokens_are_those_that_mlx_lm_generates(tmp_path, model, matrix_type):
    path, stored = written(tmp_path, model, matrix_type)
    prompts = random_prompts(LENGTHS, 262)
    expected = {name: greedy(stored, prompt, NUM_OUTPUT) for name, prompt in prompts.items()}
    assert len({token for tokens in expected.values() for token in tokens}) > 10
    for chunk in (1, 7, 64):
        config = EngineConfig(
            block_size=4,
            num_blocks=90,
            max_model_len=100,
            attention_backend="cpu",
            enable_prefix_caching=False,
            max_num_batched_tokens=max(chunk, 6),
            long_prefill_token_threshold=chunk,
        )
        with Engine(str(path), config) as engine:
            for name, prompt in prompts.items():
                engine.add_request(prompt, SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True), request_id=name)
            outputs = {output.request_id: list(output.token_ids) for output in engine.run(progress=False)}
            assert outputs == expected
            parts = [part for record in engine.trace for part in record.chunks if part.request_id == "r0"]
            assert sum(part.arm != "decode" for part in parts) == -(-LENGTHS[0] // chunk)


@pytest.mark.parametrize("matrix_type", ["Q8_0", "Q4_0"])
def test_matrices_that_stay_quantised_as_on_a_gpu(tmp_path, model, matrix_type):
    path, stored = written(tmp_path, model, matrix_type)
    loaded, _ = load_gguf_model(GGUFFile(path), dtype=mx.float32, keep_quantized=True)
    assert loaded.layers[0].conv.in_proj.bits == QUANTIZED_BITS[matrix_type]
    np.testing.assert_allclose(loaded(mx.array(TOKENS)), stored(mx.array(TOKENS)), atol=2e-5, rtol=0)


def rolled(model, part, axis, shift):
    """The stored tensors of all short convolutions with one array moved along an axis."""
    changed = {}
    for layer in (0, 3):
        array = np.array(getattr(model.layers[layer].conv, part).weight)
        array = array[..., 0] if part == "conv" else array
        changed[f"blk.{layer}.shortconv.{part}.weight"] = np.ascontiguousarray(np.roll(array, shift, axis))
    return {"leave_out": tuple(changed), "extra_tensors": changed}


@pytest.mark.parametrize(
    ("part", "axis", "shift"),
    [("in_proj", 0, 64), ("in_proj", 0, -64), ("conv", 1, 1), ("conv", 1, -1), ("conv", 0, 1)],
    ids=["x as B", "B as x", "taps late", "taps early", "channels"],
)
def test_a_convolution_with_swapped_parts_is_seen(tmp_path, model, part, axis, shift):
    path, _ = written(tmp_path, model, **rolled(model, part, axis, 0))
    assert difference(path, model) < 2e-5
    path, _ = written(tmp_path, model, **rolled(model, part, axis, shift))
    assert difference(path, model) > 0.05


def changed_file(path, **changes):
    """Write a file again with other metadata; None removes a key."""
    file = GGUFFile(path)
    metadata = {**file.metadata, **{f"lfm2.{key.replace('__', '.')}": value for key, value in changes.items()}}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    changed = path.with_name("changed.gguf")
    changed.write_bytes(gguf_bytes(metadata, tensors_of(file)))
    return changed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shortconv__l_cache": 3}, r"'blk\.0\.shortconv\.conv\.weight' has shape \(64, 4\), .* implies \(64, 3\)"),
        ({"shortconv__l_cache": 5}, r"'blk\.0\.shortconv\.conv\.weight' has shape \(64, 4\), .* implies \(64, 5\)"),
        ({"shortconv__l_cache": 1}, r"lfm2\.shortconv\.l_cache=1 must be an integer from 2"),
        ({"shortconv__l_cache": None}, r"lfm2\.shortconv\.l_cache is missing"),
        ({"attention__head_count_kv": None}, r"lfm2\.attention\.head_count_kv is missing"),
        ({"attention__head_count_kv": 2}, r"lfm2\.attention\.head_count_kv=2 must be a list of int"),
        ({"attention__head_count_kv": [0, 2, 2]}, "has 3 entries, it must have 4"),
        ({"attention__head_count_kv": [-1] * 4}, r"head_count_kv=-1 must be an integer from 0"),
        ({"attention__head_count_kv": [0, 2, 4, 0]}, "one and the same number for layers with attention"),
        ({"attention__head_count_kv": [0] * 4}, "there must be layers of both kinds"),
        ({"attention__head_count_kv": [2] * 4}, "there must be layers of both kinds"),
        ({"attention__head_count_kv": [2, 2, 0, 0]}, "no tensor for 'model.layers.0.self_attn"),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}, "RoPE scaling is not supported"),
        ({"attention__sliding_window": 128}, r"lfm2\.attention\.sliding_window=128 is unknown"),
        ({"attention__causal": False}, r"lfm2\.attention\.causal=False is unknown"),
        ({"attention__key_length": 32, "attention__value_length": 32}, "lfm2 heads of 32 do not add up"),
    ],
)
def test_what_mlx_lms_lfm2_does_not_compute_is_refused(tmp_path, model, changes, message):
    path, _ = written(tmp_path, model)
    with pytest.raises(GGUFError, match=message):
        load_model(changed_file(path, **changes))


def test_an_output_matrix_apart_from_the_embedding_is_refused(tmp_path, model):
    head = {"output.weight": np.random.default_rng(3).standard_normal((262, 64)).astype(np.float32)}
    path, _ = written(tmp_path, model, extra_tensors=head)
    with pytest.raises(GGUFError, match=r"tensor 'output\.weight' is unknown for architecture 'lfm2'"):
        load_model(path)


@pytest.mark.parametrize(
    "architecture",
    [
        "falcon-h1",
        "granitehybrid",
        "jamba",
        "kimi-linear",
        "lfm2moe",
        "mamba",
        "mamba2",
        "nemotron_h",
        "plamo2",
        "qwen35",
        "qwen3next",
        "rwkv7",
    ],
)
def test_files_of_other_recurrent_architectures_are_refused_by_name(tmp_path, model, architecture):
    path, _ = written(tmp_path, model)
    file = GGUFFile(path)
    metadata = {key.replace("lfm2.", f"{architecture}."): value for key, value in file.metadata.items()}
    path.write_bytes(gguf_bytes({**metadata, "general.architecture": architecture}, tensors_of(file)))
    with pytest.raises(GGUFError, match=f"architecture '{architecture}' is not supported; llama, .*, lfm2 are"):
        load_model(path)
