"""Mutated adapter files: each gives a clear error or is an adapter, and the engine keeps serving."""

import json
import random
import re
import shutil

import mlx.core as mx
import numpy as np
import pytest
from random_adapters import linear_sizes, make_adapter
from tiers import examples
from tiny_models import tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams
from workbench.models.adapter_files import AdapterError, read_adapter

FILES = {"mlx-lm": "adapters.safetensors", "PEFT": "adapter_model.safetensors"}
VALUES = [None, -1, 0, 1e300, "x", [], {}, True, [[]] * 3, "LORA", {"a": 1}]


def mutate_config(rng, path):
    config = json.loads(path.read_text())
    place = rng.choice([config, config.get("lora_parameters", config)])
    key = rng.choice([*place, "use_dora", "alpha_pattern", "bias", "use_rslora", "fine_tune_type", "peft_type"])
    if rng.random() < 0.3:
        place.pop(key, None)
    else:
        place[key] = rng.choice(VALUES)
    path.write_text(json.dumps(config))


def mutate_bytes(rng, path):
    data = bytearray(path.read_bytes())
    match rng.randrange(4):
        case 0:
            data = data[: rng.randrange(len(data))]
        case 1:
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(min(len(data), rng.choice([8, 400, len(data)])))] = rng.randrange(256)
        case 2:
            data = data[: rng.randrange(len(data))] + rng.randbytes(rng.randint(1, 50))
        case 3:
            at = rng.randrange(len(data))
            data = data[:at] + data[at + rng.randint(1, 20) :]
    path.write_bytes(bytes(data))


def mutate_tensors(rng, path):
    tensors = dict(mx.load(str(path)))
    name = rng.choice(list(tensors))
    match rng.randrange(6):
        case 0:
            del tensors[name]
        case 1:
            tensors[name] = tensors[name].T
        case 2:
            tensors[name] = tensors[name].astype(rng.choice([mx.int32, mx.bool_, mx.float16, mx.bfloat16]))
        case 3:
            tensors[rng.choice([f"{name}.x", name[1:], name.replace("q_proj", "z_proj"), "model.norm.weight"])] = (
                tensors.pop(name)
            )
        case 4:
            tensors[name] = tensors[name] * float(rng.choice(["nan", "inf"]))
        case 5:
            tensors[name] = rng.choice([tensors[name][:0], tensors[name][:-1], tensors[name].reshape(-1)])
    mx.save_safetensors(str(path), tensors)


def test_mutated_files_give_a_clear_error_and_the_engine_keeps_serving(tmp_path):
    loaded = tiny_loaded_model("llama")
    sizes = {path: size for path, size in linear_sizes(loaded.model).items() if ".0." in path or ".3." in path}
    originals = {form: make_adapter(tmp_path / form, sizes, seed=0, form=form) for form in FILES}
    with Engine(loaded, EngineConfig(num_blocks=64)) as engine:
        engine.add_adapter("good", originals["PEFT"])

        def answer():
            request_id = engine.add_request([5, 6, 7], SamplingParams(max_tokens=4, temperature=0.0), adapter="good")
            engine.run(progress=False)
            return engine.output(request_id).token_ids

        expected, refused, number = answer(), 0, examples(200)
        for index in range(number):
            rng = random.Random(f"adapter files:{index}")
            form = rng.choice(list(FILES))
            folder = shutil.copytree(originals[form], tmp_path / f"m{index}")
            mutate = rng.choice([mutate_config, mutate_bytes, mutate_tensors])
            mutate(rng, folder / ("adapter_config.json" if mutate is mutate_config else FILES[form]))
            try:
                engine.add_adapter(f"m{index}", folder)
            except AdapterError as problem:
                refused += 1
                assert f"adapter 'm{index}'" in str(problem) and len(str(problem)) < 700
            shutil.rmtree(folder)
        assert refused > number // 2
        assert answer() == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported, only 'LORA'"),
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number"),
    ],
)
def test_what_is_not_supported_is_named(change, reason, tmp_path):
    folder = make_adapter(tmp_path / "x", {"layers.0.up": (4, 6)}, seed=0, form="PEFT")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(AdapterError, match=re.escape(reason)):
        read_adapter("x", folder)


@pytest.mark.parametrize("by_root", [False, True])
def test_both_forms_hold_the_same_matrices(by_root, tmp_path):
    sizes = {"layers.0.up": (4, 6), "layers.1.down": (6, 4)}
    plain = read_adapter("a", make_adapter(tmp_path / "a", sizes, seed=3))
    folder = make_adapter(tmp_path / "b", sizes, seed=3, form="PEFT")
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | ({"use_rslora": True, "lora_alpha": 3.0 * 2} if by_root else {})
    path.write_text(json.dumps(config))
    for layer, factors in read_adapter("b", folder).items():
        for one, two in zip(factors, plain[layer], strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-6)
