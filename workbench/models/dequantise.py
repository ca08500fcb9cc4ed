"""Quantised layers of a model that mlx-lm has loaded, turned into layers of floating-point numbers."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import dequantize_model


def dequantise(model: nn.Module, dtype: mx.Dtype | None) -> nn.Module:
    """Dequantise every layer in float32, and round the weights once.

    Args:
        model: The model, changed in place; its weights may be lazy.
        dtype: Element type of the weights. None keeps those of the model, and dequantises to the types of scales.

    Returns:
        The model.
    """
    if dtype is not None:
        model.set_dtype(mx.float32)  # scales too: MLX rounds what it dequantises to their type
    experts = [
        (path, _with_scales_of_experts(module, None if dtype is None else mx.float32))
        for path, module in model.named_modules()
        if isinstance(module, QuantizedSwitchLinear) and module.global_scale is not None
    ]
    model.update_modules(tree_unflatten(experts))
    model = dequantize_model(model)
    if dtype is not None:
        model.set_dtype(dtype)
    return model


def _with_scales_of_experts(layer: QuantizedSwitchLinear, dtype: mx.Dtype | None) -> SwitchLinear:
    """Experts in nvfp4 with a scale per expert, which mlx-lm leaves out when it dequantises."""
    size, bits, mode = layer.group_size, layer.bits, layer.mode
    weights = [
        mx.dequantize(weight, scales, None, size, bits, mode, global_scale=scale, dtype=dtype)
        for weight, scales, scale in zip(layer.weight, layer.scales, layer.global_scale)
    ]
    new = SwitchLinear(1, 1, 1, bias=False)
    new.weight = mx.stack(weights)
    if "bias" in layer:
        new.bias = layer.bias
    return new
