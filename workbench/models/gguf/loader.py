"""A GGUF file as an mlx-lm model: with packed weights, float weights, or the quantised types that MLX computes with."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from workbench.models.gguf.architectures import Architecture, find_architecture
from workbench.models.gguf.file import GGUFError, GGUFFile, GGUFTensor
from workbench.models.gguf.hyperparameters import Hyperparameters
from workbench.models.gguf.quantized import QUANTIZED_BITS, QUANTIZED_GROUP_SIZE, pack_quantized
from workbench.models.remembered import NOTHING, Remembered

ROPE_FACTORS = "rope_freqs.weight"


class FactoredRoPE(nn.Module):
    """RoPE whose wavelengths are multiplied by a factor per pair of dimensions (Llama 3.1's ``rope_freqs``).

    Args:
        base: Base of the wavelengths.
        factors: float32 [head_dim / 2].
    """

    def __init__(self, base: float, factors: np.ndarray) -> None:
        super().__init__()
        self.dims = 2 * len(factors)
        exponents = mx.arange(0, self.dims, 2, dtype=mx.float32) / self.dims
        self._freqs = mx.array(factors) * base**exponents

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate x [..., T, head_dim], whose first position is ``offset``."""
        return mx.fast.rope(x, self.dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._freqs)


def rotate_half_row_order(num_heads: int, head_dim: int) -> np.ndarray:
    """Rows of a q or k projection stored for RoPE on neighbouring pairs, in the order for RoPE on halves.

    Pair i of a head is rows (2i, 2i + 1) in the file, and rows (i, i + head_dim / 2) in mlx-lm.

    Returns:
        int64 [num_heads * head_dim]: ``stored[order]`` is what mlx-lm expects.
    """
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The mlx-lm configuration that a file's metadata describes, its architecture as ``model_type``.

    Raises:
        GGUFError: An architecture or a metadata key is unknown.
    """
    architecture = find_architecture(file)
    hyperparameters = Hyperparameters(file)
    config = {"model_type": architecture.model_type, **architecture.config(hyperparameters)}
    hyperparameters.refuse_unread()
    return config


def load_gguf_model(
    file: GGUFFile,
    *,
    dtype: mx.Dtype,
    keep_quantized: bool,
    pack: bool = False,
    remembered: Remembered = NOTHING,
) -> tuple[nn.Module, dict[str, Any]]:
    """Build the mlx-lm model of a GGUF file and load every tensor into it.

    Args:
        file: The file.
        dtype: Element type of the weights, and of the scales of weights that stay quantised.
        keep_quantized: Keep matrices of type Q4_0, Q4_1 and Q8_0 quantised; all other weights become ``dtype``.
        pack: Pack every matrix for this processor instead (`workbench.models.packed`), one tensor after another.
        remembered: Products that passed their check in an earlier start are not checked again.

    Returns:
        The evaluated model and its configuration.

    Raises:
        GGUFError: An architecture, metadata key, tensor name or tensor type is unknown, or a tensor is missing or has
            another shape than the metadata implies.
    """
    architecture, config = find_architecture(file), gguf_config(file)
    module = importlib.import_module(f"mlx_lm.models.{architecture.model_type}")
    try:
        model = module.Model(module.ModelArgs.from_dict(config))
    except Exception as problem:  # mlx-lm does not check its arguments and may raise anything
        reason = f"{type(problem).__name__}: {problem}"
        raise GGUFError(f"{file.path}: mlx-lm cannot build the model its metadata describes: {reason}") from problem
    names = _parameter_names(file, architecture)
    parameters = dict(tree_flatten(model.parameters()))  # some models drop the output matrix for the embedding:
    model.sanitize({name: parameters[name] for name in names.values() if name in parameters})
    shapes = _check_tensors(file, names, model)

    weights: dict[str, mx.array] = {}
    quantized: dict[str, int] = {}
    packed = {}
    if pack:
        from workbench.models.gguf.packed_tensors import pack_tensors, packed_names

        packed = packed_names(file, names, model)
    for tensor_name, parameter in names.items():
        if tensor_name in packed:
            continue
        tensor = file.tensors[tensor_name]
        rows = _row_order(tensor_name, architecture, config)
        path = parameter.removesuffix(".weight")
        if keep_quantized and tensor.type_name in QUANTIZED_BITS and len(shapes[parameter]) == 2:
            quantized[path] = QUANTIZED_BITS[tensor.type_name]
            for part, array in pack_quantized(tensor, rows, dtype).items():
                weights[f"{path}.{part}"] = array
        else:
            weight = _float_weight(tensor, rows, architecture.norm_offset, dtype)
            weights[parameter] = weight.reshape(shapes[parameter])

    if quantized:
        nn.quantize(model, class_predicate=lambda path, _: _quantization_of(path, quantized))
    model.load_weights(list(weights.items()), strict=not packed)  # missing tensors have been refused above
    if packed:
        orders = {path: _row_order(name, architecture, config) for name, path in packed.items()}
        pack_tensors(file, packed, orders, model, dtype, remembered)
    _apply_rope_factors(file, architecture, config, model)
    model.eval()
    mx.eval(model.parameters())
    return model, config


def _parameter_names(file: GGUFFile, architecture: Architecture) -> dict[str, str]:
    """Parameter name by tensor name, for every tensor that holds a parameter."""
    names = {}
    for tensor_name in file.tensors:
        if tensor_name == ROPE_FACTORS and architecture.factored_rope:
            continue
        parameter = architecture.parameter_name(tensor_name)
        if parameter is None:
            raise GGUFError(
                f"{file.path}: tensor {tensor_name!r} is unknown for architecture "
                f"{file.metadata['general.architecture']!r}; ignoring it would give wrong results"
            )
        names[tensor_name] = parameter
    return names


def _check_tensors(file: GGUFFile, names: dict[str, str], model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Refuse missing tensors and wrong shapes, before anything is dequantised.

    Returns:
        The shape of each parameter. A depthwise convolution's [channels, taps, 1] is [channels, taps] in the file.
    """
    expected = {name: tuple(array.shape) for name, array in dict(tree_flatten(model.parameters())).items()}
    missing = sorted(expected.keys() - names.values())
    if missing:
        raise GGUFError(
            f"{file.path}: no tensor for {missing[0]!r}"
            + (f" and {len(missing) - 1} more parameters" if len(missing) > 1 else "")
            + "; the file is not the whole model: download it again, or give the first of its parts"
        )
    for tensor_name, parameter in names.items():
        shape = file.tensors[tensor_name].shape
        if parameter not in expected:
            raise GGUFError(f"{file.path}: tensor {tensor_name!r} has no place in this model ({parameter!r})")
        implied = expected[parameter]
        if len(implied) == 3 and implied[2] == 1:
            implied = implied[:2]
        if shape != implied:
            raise GGUFError(f"{file.path}: tensor {tensor_name!r} has shape {shape}, its metadata implies {implied}")
    return expected


def _row_order(tensor_name: str, architecture: Architecture, config: dict[str, Any]) -> np.ndarray | None:
    """The order of a tensor's rows in the model, None to keep that of the file."""
    if not architecture.interleaved_rope:
        return None
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    part = tensor_name.split(".")[-2]
    return rotate_half_row_order(config[heads[part]], config["head_dim"]) if part in heads else None


def _float_weight(tensor: GGUFTensor, rows: np.ndarray | None, norm_offset: float, dtype: mx.Dtype) -> mx.array:
    values = tensor.float32(rows)
    if norm_offset and tensor.name.endswith("norm.weight"):
        values = values - np.float32(norm_offset)
    weight = mx.array(values).astype(dtype)
    mx.eval(weight)  # so that only one float32 copy exists at a time
    return weight


def _quantization_of(path: str, quantized: dict[str, int]) -> bool | dict[str, int]:
    """The answer to ``nn.quantize`` for a module: its bits and group size, or False to leave it as it is."""
    return {"bits": quantized[path], "group_size": QUANTIZED_GROUP_SIZE} if path in quantized else False


def _apply_rope_factors(file: GGUFFile, architecture: Architecture, config: dict[str, Any], model: nn.Module) -> None:
    """Put the file's wavelength factors, if it has any, into every layer's RoPE."""
    if not architecture.factored_rope or ROPE_FACTORS not in file.tensors:
        return
    factors = file.tensors[ROPE_FACTORS].float32()
    if factors.shape != (config["head_dim"] // 2,) or not np.all(np.isfinite(factors) & (factors > 0)):
        raise GGUFError(f"{file.path}: {ROPE_FACTORS} must hold {config['head_dim'] // 2} positive factors")
    if config["rope_scaling"] is not None:
        raise GGUFError(f"{file.path}: {ROPE_FACTORS} together with rope.scaling is not supported")
    for layer in model.layers:
        layer.self_attn.rope = FactoredRoPE(config["rope_theta"], factors)
