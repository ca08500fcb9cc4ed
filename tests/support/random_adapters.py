"""Random adapters (LoRA) for models of any kind, in mlx-lm's files and in PEFT's."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from workbench.models.packed.layers import PackedLinear

RANK, SCALE = 4, 3.0


def linear_sizes(model):
    """Inputs and outputs of the linear layers inside the blocks of a model, by name."""
    sizes = {}
    for path, module in model.named_modules():
        if not any(part.isdigit() for part in path.split(".")):
            continue
        if isinstance(module, PackedLinear):
            sizes[path] = module.weight.shape[::-1]
        elif isinstance(module, nn.QuantizedLinear):
            sizes[path] = (module.weight.shape[1] * 32 // module.bits, module.weight.shape[0])
        elif isinstance(module, nn.Linear):
            sizes[path] = module.weight.shape[::-1]
    return sizes


def make_adapter(folder, sizes, *, seed, form="mlx-lm", rank=RANK, scale=SCALE, strength=0.3):
    """Write an adapter with random matrices, none of them zero, for layers of these sizes; returns its folder."""
    rng, folder = np.random.default_rng(seed), Path(folder)
    folder.mkdir(parents=True)
    tensors = {}
    for path, (num_columns, num_outputs) in sizes.items():
        a = rng.standard_normal((num_columns, rank)).astype(np.float32) / num_columns**0.5
        b = rng.standard_normal((rank, num_outputs)).astype(np.float32) * strength / rank**0.5
        if form == "mlx-lm":
            tensors |= {f"{path}.lora_a": mx.array(a), f"{path}.lora_b": mx.array(b)}
        else:
            name = f"base_model.model.{path}"
            tensors |= {f"{name}.lora_A.weight": mx.array(a.T), f"{name}.lora_B.weight": mx.array(b.T)}
    if form == "mlx-lm":
        config = {
            "fine_tune_type": "lora",
            "num_layers": 0,
            "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0, "keys": list(sizes)},
        }
        mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    else:
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "bias": "none"}
        mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
