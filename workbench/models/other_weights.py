"""Weights in forms that mlx-lm does not read: quantised by other tools, or bytes whose scales are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from workbench.base.outside_files import read_json
from workbench.base.text import shown
from workbench.models.folder import read_config

_INSTEAD = "use weights of 16 bits, a conversion to MLX (mlx_lm.convert -q), or a GGUF file of the model"
_BECAUSE = {
    "gptq": "GPTQ packs weights along the inputs, and only AWQ's packing along the outputs is read",
    "awq": "of AWQ, 4 bits in groups of 32, 64 or 128 are read",
    "fp8": "blocks of 8 bits with scales are read by some architectures, and not by this one",
    "compressed-tensors": "of this format, nvfp4-pack-quantized and mxfp4-pack-quantized are read",
    "modelopt": "of this tool, NVFP4 is read",
}
_READ: tuple[tuple[str, Mapping[str, Sequence[Any]]], ...] = (
    ("awq", {"bits": (4, None), "group_size": (32, 64, 128, None)}),
    ("bitnet", {}),
    ("mxfp4", {}),
    ("mxfp8", {}),
    ("fp8", {"scale_fmt": ("ue8m0",), "weight_block_size": ([32, 32],)}),
    ("compressed-tensors", {"format": ("nvfp4-pack-quantized", "mxfp4-pack-quantized")}),
    ("modelopt", {"quant_algo": ("NVFP4",)}),
)
"""Quantisations that mlx-lm reads, with the values of their settings."""
_DETAILS = ("bits", "w_bit", "group_size", "version", "format", "quant_algo", "load_in_4bit", "load_in_8bit")


def why_weights_are_not_read(location: str, words: str) -> str | None:
    """The message for a folder whose configuration names a quantisation of another tool; None if it names none.

    Args:
        location: The folder, which could not be loaded.
        words: mlx-lm's message.
    """
    config, place = read_config(location), "config.json"
    text = config.get("text_config")
    found = config.get("quantization_config") or (isinstance(text, dict) and text.get("quantization_config")) or None
    if found is None and (other := Path(location) / "hf_quant_config.json").is_file():
        found, place = read_json(other), other.name
    if not isinstance(found, Mapping) or config.get("quantization"):
        return None
    method = found.get("quant_method", "modelopt" if place != "config.json" else None)
    settings = {**found, **(found["quantization"] if isinstance(found.get("quantization"), dict) else {})}
    if any(method == name and all(settings.get(key) in some for key, some in values.items()) for name, values in _READ):
        return None  # the problem is another
    details = ", ".join(f"{key} {shown(settings[key])}" for key in _DETAILS if settings.get(key))
    named = f"quantization_config with quant_method {shown(method)}" + (f" ({details})" if details else "")
    because = _BECAUSE.get(str(method), "its packed weights are not read")
    return f"{location}/{place}: {named} is not supported: {because}; {_INSTEAD}. mlx-lm says: {words}"


def check_numbers(location: str, model: nn.Module) -> None:
    """Refuse whole numbers in place of weights: layers would compute with them as they are.

    Weights of 8 bits whose scales are missing look like that, such as FP8, whose bytes mlx-lm reads as whole numbers.

    Raises:
        ValueError: A layer that is not quantised has such weights; the message names them.
    """
    from mlx_lm.models.bitlinear_layers import BitLinear

    for path, module in model.named_modules():
        if "scales" in module or isinstance(module, BitLinear):
            continue
        for name, value in module.items():
            # A name with an underscore in front is not that of a parameter in MLX.
            is_weight = isinstance(value, mx.array) and not name.startswith("_")
            if is_weight and not mx.issubdtype(value.dtype, mx.inexact):
                kind = str(value.dtype).removeprefix("mlx.core.")
                raise ValueError(
                    f"{location}: the weights {path}.{name} are of the type {kind}, and no scales belong to them: they "
                    f"are quantised in a form that is not read, as FP8 without scales is; {_INSTEAD}"
                )
