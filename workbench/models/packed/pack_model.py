"""Put packed layers into an mlx-lm model, in place of its linear layers and embeddings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import llvmlite.binding
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from tqdm import tqdm

from workbench.attention.cpu.simd import LANES
from workbench.models.cpu.formats import ScaleKind
from workbench.models.packed import matrix
from workbench.models.packed.check import ProductChecks
from workbench.models.packed.layers import PackedEmbedding, PackedLinear, Product
from workbench.models.remembered import NOTHING, Remembered

_SHARING = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that have the same input."""

_SHOWN_BYTES = 2**28
"""Size of a model from which a progress bar is shown."""

_DTYPE_NAMES: dict[mx.Dtype, ScaleKind] = {mx.float16: "float16", mx.bfloat16: "bfloat16", mx.float32: "float32"}

Rows = Any
"""The stored rows of a layer: one kind per source."""


def why_not_packed() -> str:
    """Why this processor cannot compute with packed weights; empty if it can."""
    features = llvmlite.binding.get_host_cpu_features()
    if "x86" not in llvmlite.binding.get_default_triple() and LANES == 4:
        return ""  # Arm: its vector instructions are part of the architecture
    missing = [name for name in ("avx2", "fma", "f16c") if not features.get(name)]
    return f"this processor lacks {', '.join(missing)}" if missing or LANES < 8 else ""


def sharing_layers(paths: Iterable[str]) -> list[tuple[str, ...]]:
    """Layers by the input they share: tuples of paths, in the order of ``paths``."""
    known = dict.fromkeys(paths)
    groups: list[tuple[str, ...]] = []
    while known:
        path = next(iter(known))
        parent, _, name = path.rpartition(".")
        names = next((group for group in _SHARING if name in group), (name,))
        group = tuple(f"{parent}.{other}" if parent else other for other in names)
        group = group if all(member in known for member in group) else (path,)
        for member in group:
            del known[member]
        groups.append(group)
    return groups


def put_packed(model: nn.Module, packed: Iterable[tuple[Sequence[str], matrix.PackedMatrix]], dtype: mx.Dtype) -> None:
    """Replace layers of a model by packed ones; their biases stay.

    Args:
        model: The model.
        packed: Paths of the layers that share a matrix, and the matrix.
        dtype: Element type of activations.
    """
    modules = dict(model.named_modules())
    replacements: list[tuple[str, nn.Module]] = []
    for paths, packed_matrix in packed:
        sizes = [modules[path].weight.shape[0] for path in paths]
        product = Product(packed_matrix, sizes)
        for index, path in enumerate(paths):
            old = modules[path]
            new: nn.Module
            if isinstance(old, nn.Embedding | nn.QuantizedEmbedding):
                new = PackedEmbedding(product, dtype)
            else:
                new = PackedLinear(product, index, old.bias.astype(dtype) if "bias" in old else None)
            replacements.append((path, new))
    model.update_modules(tree_unflatten(replacements))


def pack_model(model: nn.Module, dtype: mx.Dtype = mx.float32, remembered: Remembered = NOTHING) -> None:
    """Pack every linear layer and embedding of a model that mlx-lm has loaded, one after another.

    Weights that are quantised affinely keep their bits, weights of 16 bits stay so, and float32 stays float32. Layers
    of other kinds are left as they are.

    Args:
        model: The model, changed in place; its weights may be lazy.
        dtype: Element type of activations.
        remembered: Products that passed their check in an earlier start are not checked again.
    """
    sources = {path: rows for path, module in model.named_modules() if (rows := _stored_rows(module)) is not None}
    size = sum(array.nbytes for _, arrays in sources.values() for array in arrays)
    with progress(size) as bar:
        put_packed(model, _packed_layers(model, sources, bar, remembered), dtype)


def _packed_layers(
    model: nn.Module,
    sources: dict[str, tuple[tuple[str, int, str], list[mx.array]]],
    bar: tqdm[Any],
    remembered: Remembered,
) -> Iterator[tuple[Sequence[str], matrix.PackedMatrix]]:
    modules = dict(model.named_modules())
    checks = ProductChecks(remembered)
    for paths in split_by(sharing_layers(sources), lambda path: sources[path][0]):
        (kind, bits, scales), _ = sources[paths[0]]
        parts = [[_bits_of(array) for array in sources[path][1]] for path in paths]
        if kind == "affine":
            packed = matrix.from_affine(bits, [(p[0], p[1], p[2]) for p in parts], scales)  # type: ignore[arg-type]
        else:
            packed = matrix.from_ggml(kind, [part[0] for part in parts])
        checks.check(packed, partial(_dequantised_rows, [modules[path] for path in paths]), paths[0])
        yield paths, packed
        for path in paths:
            bar.update(sum(array.nbytes for array in sources[path][1]))
            sources[path][1].clear()
            for name in {"weight", "scales", "biases"} & modules[path].keys():
                modules[path][name] = mx.zeros((0,))  # frees the stored array: the packed one has taken its place
    checks.keep()


def split_by(groups: Iterable[tuple[str, ...]], key: Callable[[str], Any]) -> Iterator[tuple[str, ...]]:
    """Split groups of layers whose stored types differ."""
    for group in groups:
        by_key: dict[Any, list[str]] = defaultdict(list)
        for path in group:
            by_key[key(path)].append(path)
        yield from map(tuple, by_key.values())


def _stored_rows(module: nn.Module) -> tuple[tuple[str, int, str], list[mx.array]] | None:
    """The kind of a layer's stored weights, and its arrays; None if it cannot be packed."""
    if type(module) in (nn.QuantizedLinear, nn.QuantizedEmbedding):
        if getattr(module, "mode", "affine") != "affine" or module.weight.ndim != 2:
            return None
        kind = ("affine", int(module.bits), _DTYPE_NAMES[module.scales.dtype])
        return kind, [module.weight, module.scales, module.biases]
    if type(module) in (nn.Linear, nn.Embedding) and module.weight.ndim == 2:
        names = {mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32"}
        name = names.get(module.weight.dtype)
        return None if name is None else ((name, 0, ""), [module.weight])
    return None


def _dequantised_rows(layers: Sequence[nn.Module], rows: np.ndarray) -> np.ndarray:
    """Some rows of the weights of layers that lie one below the other, as MLX dequantises them."""
    bounds = np.cumsum([0, *(len(layer.weight) for layer in layers)])
    owners = np.searchsorted(bounds, rows, side="right") - 1
    parts = []
    for owner in range(len(layers)):
        layer, index = layers[owner], mx.array(rows[owners == owner] - bounds[owner])
        weight = layer.weight[index]
        if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
            scales, biases = (layer[name][index].astype(mx.float32) for name in ("scales", "biases"))
            weight = mx.dequantize(weight, scales, biases, layer.group_size, layer.bits)
        parts.append(np.array(weight.astype(mx.float32)))
    return np.concatenate(parts)


def _bits_of(array: mx.array) -> np.ndarray:
    """An array's bits in memory: uint16 or uint32."""
    if array.dtype in (mx.float16, mx.bfloat16):
        array = array.view(mx.uint16)
    elif array.dtype == mx.float32:
        array = array.view(mx.uint32)
    mx.eval(array)
    return np.ascontiguousarray(np.asarray(array))


def progress(size: int) -> tqdm[Any]:
    """A progress bar over the bytes of a model's weights, shown for large models."""
    return tqdm(total=size, unit="B", unit_scale=True, desc="packing weights", disable=size < _SHOWN_BYTES)
