"""Files of adapters (LoRA): those of mlx-lm and of PEFT.

Both are a folder with ``adapter_config.json`` and one file of safetensors. mlx-lm: ``adapters.safetensors``, matrices
``LAYER.lora_a`` [inputs, rank] and ``LAYER.lora_b`` [rank, outputs], and a scale. PEFT: ``adapter_model.safetensors``,
``base_model.model.LAYER.lora_A.weight`` [rank, inputs] and ``.lora_B.weight`` [outputs, rank], and ``lora_alpha``,
which is divided by the rank, or by its root with ``use_rslora``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from workbench.base.field_checks import shown

Factors = tuple[np.ndarray, np.ndarray]
"""The matrices of a layer, float32 [rank, inputs] and [rank, outputs]; the second one holds the scale."""

_CONFIG, _MAX_CONFIG_BYTES, _MAX_TENSORS = "adapter_config.json", 2**20, 100_000
_FORMS = {
    "mlx-lm": ("adapters.safetensors", ".lora_a", ".lora_b", ""),
    "PEFT": ("adapter_model.safetensors", ".lora_A.weight", ".lora_B.weight", "base_model.model."),
}


class AdapterError(ValueError):
    """An adapter cannot be used; the message names it, the file and the cause."""


def read_adapter(name: str, folder: Path) -> dict[str, Factors]:
    """The matrices of an adapter by the dotted name of their layer.

    Args:
        name: The adapter, for messages.
        folder: Its folder.

    Raises:
        AdapterError: A file is missing, damaged, or holds something else than an adapter of linear layers.
    """
    prefix = f"adapter {name!r} ({folder})"
    if not folder.is_dir():
        raise AdapterError(f"{prefix}: there is no such folder; it has {_CONFIG} and a file of safetensors")
    config = _read_config(prefix, folder / _CONFIG)
    form = "PEFT" if "peft_type" in config else "mlx-lm"
    file, first, second, start = _FORMS[form]
    scale_of = (_peft_scale if form == "PEFT" else _mlx_scale)(f"{prefix}: {_CONFIG}", config)
    tensors = _read_tensors(f"{prefix}: {file}", folder / file)
    found: dict[str, dict[str, np.ndarray]] = {}
    for key, tensor in tensors.items():
        ending = next((ending for ending in (first, second) if key.endswith(ending)), None)
        if ending is None or not key.startswith(start):
            raise AdapterError(
                f"{prefix}: {file} holds {shown(key)}; only matrices of linear layers are supported, whose names end "
                f"in {first} and {second}{f' and begin with {start}' if start else ''}"
            )
        if tensor.ndim != 2 or not tensor.size:
            raise AdapterError(f"{prefix}: {key} must be a matrix, its shape is {list(tensor.shape)}")
        if not np.isfinite(tensor).all():
            raise AdapterError(f"{prefix}: {key} holds values that are not finite numbers")
        path = key.removeprefix(start).removesuffix(ending)
        found.setdefault(path, {})[ending] = tensor.T if (form == "mlx-lm") is (ending == first) else tensor
    if not found:
        raise AdapterError(f"{prefix}: {file} is empty")
    factors: dict[str, Factors] = {}
    for path, pair in found.items():
        if len(pair) < 2:
            (present,), (absent,) = pair, {first, second} - set(pair)
            raise AdapterError(f"{prefix}: {path} has {present} and no {absent}")
        a, b = pair[first], pair[second]
        if len(a) != len(b):
            raise AdapterError(f"{prefix}: the matrices of {path} have the ranks {len(a)} and {len(b)}")
        factors[path] = np.ascontiguousarray(a), np.ascontiguousarray(b * np.float32(scale_of(len(a))))
    return factors


def _read_config(prefix: str, path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as stream:
            text = stream.read(_MAX_CONFIG_BYTES + 1)
        if len(text) > _MAX_CONFIG_BYTES:
            raise AdapterError(f"{prefix}: {path.name} is larger than {_MAX_CONFIG_BYTES:,} bytes")
        config = json.loads(text)
    except OSError as problem:
        raise AdapterError(f"{prefix}: {path.name} cannot be read ({problem.strerror})") from None
    except (ValueError, RecursionError) as problem:
        if isinstance(problem, AdapterError):
            raise
        raise AdapterError(f"{prefix}: {path.name} is not a JSON file ({problem})") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{prefix}: {path.name} must hold an object, got {shown(config)}")
    return config


def _mlx_scale(place: str, config: Mapping[str, Any]) -> Callable[[int], float]:
    if (kind := config.get("fine_tune_type", "lora")) != "lora":
        raise AdapterError(f"{place}: fine_tune_type {shown(kind)} is not supported, only 'lora'")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise AdapterError(f"{place}: lora_parameters must be an object, got {shown(parameters)}")
    scale = _finite(place, "lora_parameters.scale", parameters.get("scale"))
    return lambda rank: scale


def _peft_scale(place: str, config: Mapping[str, Any]) -> Callable[[int], float]:
    if (kind := config["peft_type"]) != "LORA":
        raise AdapterError(f"{place}: peft_type {shown(kind)} is not supported, only 'LORA'")
    for field in ("use_dora", "alpha_pattern", "modules_to_save", "fan_in_fan_out", "lora_bias", "layer_replication"):
        if config.get(field):
            raise AdapterError(f"{place}: {field} {shown(config[field])} is not supported")
    if (bias := config.get("bias", "none")) != "none":
        raise AdapterError(f"{place}: bias {shown(bias)} is not supported, only 'none'")
    alpha = _finite(place, "lora_alpha", config.get("lora_alpha", 8))
    by_root = config.get("use_rslora", False)
    if not isinstance(by_root, bool):
        raise AdapterError(f"{place}: use_rslora must be true or false, got {shown(by_root)}")
    return lambda rank: alpha / (math.sqrt(rank) if by_root else rank)


def _finite(place: str, field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e6:
        raise AdapterError(f"{place}: {field} must be a number between -1000000 and 1000000, got {shown(value)}")
    return float(value)


def _read_tensors(place: str, path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file of safetensors as float32; the library checks the header against the file's size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            num_tensors = len(file.keys())
        if num_tensors > _MAX_TENSORS:
            raise AdapterError(f"{place} has {num_tensors:,} tensors, {_MAX_TENSORS:,} are allowed")
        tensors: Any = mx.load(str(path))  # NumPy knows no bfloat16
        return {name: _as_float32(place, name, tensor) for name, tensor in tensors.items()}
    except AdapterError:
        raise
    except FileNotFoundError:
        raise AdapterError(f"{place} is missing") from None
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as problem:
        raise AdapterError(f"{place} cannot be read as safetensors ({problem})") from None


def _as_float32(place: str, name: str, tensor: mx.array) -> np.ndarray:
    if not mx.issubdtype(tensor.dtype, mx.floating):
        raise AdapterError(f"{place}: {name} must hold floating-point numbers, its type is {tensor.dtype}")
    return np.array(tensor.astype(mx.float32))
