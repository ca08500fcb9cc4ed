"""Folders with weights in other tools' forms: read right, or refused with the key, its value and what to do."""

import json
import struct

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from door_folders import fields_of, write_folder
from mlx_lm.models.bitlinear_layers import BitLinear

from workbench.models import load_model
from workbench.models.other_weights import check_numbers

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
TOKENS = mx.array([[1, 2, 3, 4, 5]])
GROUP = 32


def packed(codes, order, axis):
    """Codes of 4 bits, eight in a number along an axis."""
    codes = np.moveaxis(codes, axis, -1)
    codes = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    return np.moveaxis(sum(codes[..., i] << np.uint32(4 * place) for i, place in enumerate(order)), -1, axis)


def quantise(folder, method, **settings):
    """Replace the linear layers of a folder by random codes, as AutoAWQ or GPTQ write them; what they stand for."""
    kept, plain, rng = {}, {}, np.random.default_rng(1)
    for name, array in mx.load(str(folder / "model.safetensors")).items():
        if not name.endswith("proj.weight"):
            kept[name] = plain[name] = array
            continue
        outputs, inputs = array.shape
        codes, zeros = rng.integers(0, 16, (inputs, outputs)), rng.integers(1, 16, (inputs // GROUP, outputs))
        scales = (rng.random((inputs // GROUP, outputs)) * 0.02 + 0.01).astype(np.float32)
        plain[name] = mx.array(((codes - zeros.repeat(GROUP, 0)) * scales.repeat(GROUP, 0)).T.astype(np.float32))
        layer, interleaved = name.removesuffix(".weight"), (0, 4, 1, 5, 2, 6, 3, 7)
        along = (1, interleaved) if method == "awq" else (0, range(8))
        kept |= {
            f"{layer}.qweight": mx.array(packed(codes, along[1], along[0])), f"{layer}.scales": mx.array(scales),
            f"{layer}.qzeros": mx.array(packed(zeros - (method == "gptq"), interleaved, 1)),
        }  # fmt: skip
        if settings.get("desc_act") is not None:
            kept[f"{layer}.g_idx"] = mx.array((np.arange(inputs) // GROUP).astype(np.int32))
    mx.save_safetensors(str(folder / "model.safetensors"), kept, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": GROUP, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return plain


@pytest.mark.parametrize("settings", [{}, {"version": "gemm", "zero_point": True, "modules_to_not_convert": None}])
def test_awq_is_read_as_its_codes_say(settings, tmp_path):
    quantised = write_folder(tmp_path / "awq", fields_of("llama", **SIZES))
    plain = write_folder(tmp_path / "plain", fields_of("llama", **SIZES))
    weights = quantise(quantised, "awq", **settings)
    mx.save_safetensors(str(plain / "model.safetensors"), weights, metadata={"format": "mlx"})
    expected = np.array(load_model(plain).model(TOKENS))
    np.testing.assert_allclose(np.array(load_model(quantised).model(TOKENS)), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        (
            "gptq",
            {},
            r"quant_method 'gptq' \(bits 4, group_size 32\) is not supported: GPTQ packs weights along",
        ),
        ("gptq", {"desc_act": False}, "GPTQ packs weights along the inputs"),
        ("awq", {"bits": 8}, r"quant_method 'awq' \(bits 8, group_size 32\) is not supported: of AWQ, 4 bits"),
        (
            "bitsandbytes",
            {"load_in_4bit": True},
            r"quant_method 'bitsandbytes' \(.*load_in_4bit True\) is not",
        ),
        ("compressed-tensors", {"format": "float-quantized"}, "format 'float-quantized'.* nvfp4-pack-quantized and"),
        ("modelopt", {"quant_algo": "FP8"}, "quant_algo 'FP8'.*of this tool, NVFP4 is read"),
        ("fp8", {"weight_block_size": [128, 128]}, "quant_method 'fp8'.* by some architectures"),
        ("frobnicated", {}, "quant_method 'frobnicated'.* its packed weights are not read"),
        (None, {}, "quant_method None.* its packed weights are not read"),
    ],
)
def test_other_forms_are_refused_with_the_key_and_what_to_do(method, settings, words, tmp_path):
    folder = write_folder(tmp_path / "m", fields_of("llama", **SIZES))
    quantise(folder, method, **settings)
    with pytest.raises(ValueError, match=words) as refused:
        load_model(folder)
    message = str(refused.value)
    assert message.startswith(f"{folder}/config.json: quantization_config") and "a conversion to MLX" in message


def test_a_key_that_plain_weights_contradict_is_not_in_the_way(tmp_path):
    """Merged models keep the key of the model that they were trained from."""
    folder = write_folder(tmp_path / "m", fields_of("llama", **SIZES))
    expected = np.array(load_model(folder).model(TOKENS))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    np.testing.assert_array_equal(np.array(load_model(folder).model(TOKENS)), expected)


@pytest.mark.parametrize("method", ["bitsandbytes", "mxfp4", None])
def test_another_fault_is_not_that_of_a_key(method, tmp_path):
    """Plain weights with the key load, so what is wrong is the tokenizer, or a weight."""
    folder = write_folder(tmp_path / "m", fields_of("llama", **SIZES))
    (folder / "tokenizer.json").write_text('{"added": []}')
    if method is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(ValueError, match=r"the tokenizer of the folder '.*' cannot be loaded: .*tokenizer\.json"):
        load_model(folder)


@pytest.mark.parametrize(
    ("method", "settings"),
    [("mxfp4", {}), ("mxfp8", {}), ("compressed-tensors", {"format": "nvfp4-pack-quantized"}),
     ("modelopt", {"quant_algo": "NVFP4"}), ("fp8", {"scale_fmt": "ue8m0", "weight_block_size": [32, 32]})],
)  # fmt: skip
def test_forms_that_are_read_are_not_blamed_for_a_missing_weight(method, settings, tmp_path):
    folder = write_folder(tmp_path / "m", fields_of("llama", **SIZES))
    weights = mx.load(str(folder / "model.safetensors"))
    weights.pop("model.norm.weight")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"Missing 1 parameters:\s+model\.norm\.weight\. The config\.json") as refused:
        load_model(folder)
    assert "not supported" not in str(refused.value)


def test_a_file_of_settings_that_is_not_json_is_named(tmp_path):
    folder = write_folder(tmp_path / "m", fields_of("llama", **SIZES))
    (folder / "hf_quant_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"hf_quant_config\.json is not a JSON file"):
        load_model(folder)


def stored_as(folder, kind, itemsize):
    """Write the linear layers of a folder as bytes of another type."""
    header, data = {}, b""
    for name, array in mx.load(str(folder / "model.safetensors")).items():
        is_other = name.endswith("proj.weight")
        bytes_ = bytes(array.size * itemsize) if is_other else np.array(array).tobytes()
        place = [len(data), len(data) + len(bytes_)]
        header[name] = {"dtype": kind if is_other else "F32", "shape": list(array.shape), "data_offsets": place}
        data += bytes_
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(("kind", "itemsize"), [("F8_E4M3", 1), ("U8", 1), ("I8", 1), ("I32", 4), ("BOOL", 1)])
def test_whole_numbers_without_scales_are_not_weights(kind, itemsize, tmp_path):
    folder = write_folder(tmp_path / "m", fields_of("llama"))
    stored_as(folder, kind, itemsize)
    with pytest.raises(ValueError, match=r"the weights model\S+proj.weight are of the type .*no scales"):
        load_model(folder)


def test_fields_that_are_missing_are_named(tmp_path):
    config = fields_of("bailing_moe")  # which transformers has no defaults for
    folder = write_folder(tmp_path / "m", config)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "rms_norm_eps"}))
    with pytest.raises(ValueError, match=r"config\.json: 'rms_norm_eps' missing, which mlx-lm's bailing_moe"):
        load_model(folder)


def test_layers_of_two_bits_are_whole_numbers_by_design():
    """mlx-lm's layer for BitNet packs four weights in a byte, and has a scale of another name."""
    model = nn.Module()
    model.layer = BitLinear(32, 32, bias=False)
    check_numbers("m", model)
    model.layer = nn.Linear(32, 32)
    model.layer.weight = model.layer.weight.astype(mx.uint8)
    with pytest.raises(ValueError, match=r"weights layer\.weight are of the type uint8"):
        check_numbers("m", model)
