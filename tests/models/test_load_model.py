"""Loading folders in MLX and Hugging Face format, offline, and names that cannot be loaded."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf_files import random_model, tiny_config, write_model
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import workbench.models
from workbench.models import load_model

TOKENS = mx.array(np.random.default_rng(8).integers(0, 256, (1, 17)))


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def write_folder(folder, config, model, dtype=None, quantization=None):
    """A folder as mlx-lm saves it, with a byte-level tokenizer."""
    folder.mkdir()
    if dtype:
        model.set_dtype(dtype)
    if quantization:
        nn.quantize(model, **quantization)
        config = {**config, "quantization": quantization}
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    )
    return folder


def test_an_architecture_that_ends_the_process_is_refused(tmp_path, capfd):
    """mlx-lm's module of OLMo 1 calls exit() if a package is missing."""
    config = tiny_config("llama", eos_token_id=256)
    folder = write_folder(tmp_path / "tiny", config | {"model_type": "olmo"}, random_model(config))
    message = r"mlx-lm cannot load the folder .*: SystemExit: 1\. Its module of model_type 'olmo' needs a package that"
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_wavelengths_that_mlx_would_compute_later_are_ready_for_other_threads(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 160}
    config = tiny_config("qwen3", eos_token_id=256, rope_scaling=scaling)
    loaded = load_model(write_folder(tmp_path / "tiny", config, random_model(config)))
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(lambda: np.array(loaded.model(TOKENS))).result()
    np.testing.assert_allclose(elsewhere, np.array(loaded.model(TOKENS)), atol=1e-5)


@pytest.mark.parametrize("dtype", [None, mx.bfloat16, mx.float16])
def test_a_folder_loads_as_float32_on_a_cpu(tmp_path, dtype):
    config = tiny_config("qwen3", eos_token_id=256)
    folder = write_folder(tmp_path / "tiny", config, random_model(config), dtype)
    loaded = load_model(folder)
    reference = random_model(config)
    if dtype:
        reference.set_dtype(dtype)
        reference.set_dtype(mx.float32)
    np.testing.assert_allclose(np.array(loaded.model(TOKENS)), np.array(reference(TOKENS)), atol=1e-5)
    assert {array.dtype for _, array in tree_flatten(loaded.model.parameters())} == {mx.float32}
    assert (loaded.name, loaded.architecture, loaded.dtype) == ("tiny", "qwen3", "float32")
    assert (loaded.max_position, loaded.vocab_size) == (640, 262)
    assert loaded.eos_token_ids == {256}
    assert loaded.num_parameters == sum(array.size for _, array in tree_flatten(reference.parameters()))
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Ünï 日本")) == "Ünï 日本"


def test_a_quantised_folder_is_dequantised_or_kept(tmp_path):
    config = tiny_config("llama")
    folder = write_folder(tmp_path / "q", config, random_model(config), quantization={"group_size": 32, "bits": 4})
    plain = load_model(folder, weights="float32")
    packed = load_model(folder)
    with pytest.deprecated_call(match='use weights="packed" or weights="float32"'):
        kept = load_model(folder, keep_quantized=True)
    assert (plain.quantized, packed.quantized, kept.quantized) == ("", "4 bits", "4 bits")
    assert plain.num_parameters == packed.num_parameters == kept.num_parameters
    for model in (plain.model, packed.model):
        assert not any(isinstance(module, nn.QuantizedLinear) for module in model.modules())
        np.testing.assert_allclose(np.array(model(TOKENS)), np.array(kept.model(TOKENS)), atol=3e-5)
    with pytest.raises(ValueError, match="weights is 'int4'; it must be"):
        load_model(folder, weights="int4")


def test_a_type_can_be_requested(tmp_path):
    config = tiny_config("qwen2")
    folder = write_folder(tmp_path / "t", config, random_model(config))
    assert load_model(folder, dtype="bfloat16").dtype == "bfloat16"
    write_model(tmp_path / "t.gguf", "qwen2", config, random_model(config))
    loaded = load_model(tmp_path / "t.gguf", dtype=mx.float16)
    assert loaded.dtype == "float16"
    assert {array.dtype for _, array in tree_flatten(loaded.model.parameters())} == {mx.float16}
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16 or None, got 'int8'"):
        load_model(folder, dtype="int8")


def test_a_gpu_keeps_what_the_file_holds(tmp_path, monkeypatch):
    """The choice of types on a GPU, tested without one."""
    monkeypatch.setattr("workbench.models.load._runs_on_gpu", lambda: True)
    for architecture, matrix_type, dtype in [
        ("qwen3", "Q8_0", "float16"),
        ("qwen3", "BF16", "bfloat16"),
        ("gemma3", "Q4_0", "bfloat16"),
    ]:
        config = tiny_config(architecture)
        path = tmp_path / "m.gguf"
        write_model(path, architecture, config, random_model(config), matrix_type=matrix_type)
        loaded = load_model(path)
        assert loaded.dtype == dtype
        assert bool(loaded.quantized) == (matrix_type != "BF16")
    config = tiny_config("llama")
    folder = write_folder(
        tmp_path / "q", config, random_model(config), mx.float16, quantization={"group_size": 32, "bits": 8}
    )
    loaded = load_model(folder)
    assert (loaded.dtype, loaded.quantized) == ("float16", "8 bits")


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_gguf_file_without_an_architecture_is_refused(tmp_path, monkeypatch, on_gpu):
    monkeypatch.setattr("workbench.models.load._runs_on_gpu", lambda: on_gpu)
    config, path = tiny_config("llama"), tmp_path / "m.gguf"
    write_model(path, "llama", config, random_model(config))
    path.write_bytes(path.read_bytes().replace(b"general.architecture", b"general.nothing_else"))
    with pytest.raises(ValueError, match="architecture None is not supported; llama"):
        load_model(path)


def test_the_context_length_may_stand_in_the_part_about_text(tmp_path):
    config = tiny_config("gemma3")
    outer = {"model_type": "gemma3", "vocab_size": 262, "text_config": config}
    folder = write_folder(tmp_path / "multi", config, random_model(config))
    weights = mx.load(str(folder / "model.safetensors"))
    mx.save_safetensors(
        str(folder / "model.safetensors"), {f"language_model.{name}": array for name, array in weights.items()}
    )
    (folder / "config.json").write_text(json.dumps(outer))
    loaded = load_model(folder)
    assert (loaded.architecture, loaded.max_position, loaded.vocab_size) == ("gemma3", 640, 262)


def test_a_folder_without_a_context_length_is_refused(tmp_path):
    config = tiny_config("llama")
    del config["max_position_embeddings"]
    folder = write_folder(tmp_path / "m", config, random_model(config))
    with pytest.raises(ValueError, match=r"config\.json does not give the length of the context; add max_position"):
        load_model(folder)


def test_a_name_that_is_not_a_model_is_refused_without_a_download(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_model("missing.gguf")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_model(tmp_path)
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(FileNotFoundError, match=r"name one of its GGUF files: model-q4\.gguf"):
        load_model(tmp_path)
    (tmp_path / "notes.txt").write_text("not a model")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        load_model(tmp_path / "notes.txt")


def test_a_folder_mlx_lm_cannot_load_is_named(tmp_path):
    config = tiny_config("llama")
    folder = write_folder(tmp_path / "m", config, random_model(config))
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "klingon"}))
    with pytest.raises(ValueError, match=r"mlx-lm cannot load the folder .*klingon not supported"):
        load_model(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"config\.json is not JSON"),
        ("[]", r"config\.json holds a list; it must be an object"),
        ("{}", r'config\.json: model_type is None; it must be the name of an architecture of mlx-lm, such as "llama"'),
    ],
)
def test_a_configuration_that_names_no_model_is_refused(tmp_path, content, message):
    config = tiny_config("llama")
    folder = write_folder(tmp_path / "m", config, random_model(config))
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_missing_files_with_weights_are_named(tmp_path):
    config = tiny_config("llama")
    folder = write_folder(tmp_path / "m", config, random_model(config))
    names = {f"tensor{number}": f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "model.safetensors").rename(folder / names["tensor2"])
    with pytest.raises(ValueError, match=r"model-00001-of-00003\.safetensors is missing, like 1 more: "):
        load_model(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / names["tensor2"]).unlink()
    with pytest.raises(ValueError, match=r"m has no weights: there is no model\*\.safetensors"):
        load_model(folder)


def test_a_long_message_of_mlx_lm_is_shortened(tmp_path):
    config = tiny_config("llama")
    folder = write_folder(tmp_path / "m", config, random_model(config))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 50}))
    with pytest.raises(
        ValueError, match=r"\.\.\.\. The config\.json and the weights must be those of one model"
    ) as raised:
        load_model(folder)
    assert len(str(raised.value)) < 700


CODE = "open({0!r}, 'w').write('the code of the folder ran')\nclass Mine:\n    pass\nclass ModelArgs:\n    pass\n"


OWN_CODE = (
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine"}),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "mine.Mine"]}, "tokenizer_class": "Mine"}),
    ("config.json", {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}}),
    ("config.json", {"auto_map": {"AutoConfig": "mine.Mine"}}),
    ("config.json", {"model_file": "mine.py"}),
)
LOAD_ALL = """
import sys
from workbench.models.load import load_model
for folder in sys.argv[1:]:
    try:
        print("loaded", load_model(folder).name)
    except ValueError as problem:
        print("refused", *str(problem).splitlines())
"""


def test_code_that_comes_with_a_folder_is_never_run(tmp_path):
    """In a process whose standard input answers every question with yes."""
    config, marker = tiny_config("llama"), tmp_path / "ran"
    for number, (file, change) in enumerate(OWN_CODE):
        folder = write_folder(tmp_path / str(number), config, random_model(config))
        if file == "config.json":  # then transformers looks there for the tokenizer's class
            (folder / "tokenizer_config.json").write_text("{}")
        (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **change}))
        (folder / "mine.py").write_text(CODE.format(str(marker)))
    run = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, *(str(tmp_path / str(number)) for number in range(len(OWN_CODE)))],
        input="y\n" * 100, capture_output=True, text=True, timeout=240,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
    )  # fmt: skip
    assert not marker.exists(), "the folder's code ran"
    assert "Do you wish" not in run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == len(OWN_CODE), run.stderr
    for line, key in ((lines[0], "auto_map"), (lines[1], "auto_map"), (lines[4], "model_file")):
        assert re.match(rf"refused .*needs Python code that comes with the model .*{key}=.*mine.*never runs", line)
    for line in lines[2:4]:  # transformers has classes for these
        assert line.startswith("loaded"), line


def test_code_is_not_run_by_an_mlx_lm_that_would_trust_it(tmp_path, monkeypatch):
    import mlx_lm.utils

    load, config, marker = mlx_lm.utils.load_model, tiny_config("llama"), tmp_path / "ran"
    folder = write_folder(tmp_path / "folder", config | {"model_file": "mine.py"}, random_model(config))
    (folder / "mine.py").write_text(CODE.format(str(marker)))
    monkeypatch.setattr(
        mlx_lm.utils,
        "load_model",
        lambda *args, trust_remote_code=True, **kw: load(*args, trust_remote_code=trust_remote_code, **kw),
    )
    with pytest.raises(ValueError, match="needs Python code that comes with the model"):
        load_model(folder)
    assert not marker.exists()


def test_an_unreachable_repository_is_one_error_that_says_what_to_do():
    with pytest.raises(
        OSError, match=r"'nobody/nothing' is neither a folder nor a file here, and cannot be .*Check its name and the"
    ):
        load_model("nobody/nothing")


def test_names_of_the_package():
    assert set(workbench.models.__all__) <= set(dir(workbench.models)) | set(workbench.models._HOMES)
    for name in workbench.models.__all__:
        assert getattr(workbench.models, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        workbench.models.nonsense  # noqa: B018
