"""Put packed layers into an mlx-lm model, in place of its linear layers and embeddings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import llvmlite.binding
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from workbench.base.progress import progress_bar
from workbench.kernels.cpu.attention.processor import LANES, cpu_features
from workbench.models.packed.check import ProductChecks
from workbench.models.packed.experts import PackedExperts
from workbench.models.packed.layers import PackedEmbedding, PackedLayer, PackedLinear, Product
from workbench.models.packed.matrix import PackedMatrix
from workbench.models.packed.stored import Source, pack, stored_weights
from workbench.models.remembered import NOTHING, Remembered

_SHARING = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that have the same input."""

_NEEDED = ("avx2", "fma", "f16c")
"""Instructions of x86 that compiled code needs, by LLVM's names; AVX-512 includes them."""

_SHOWN_BYTES = 2**28
"""Size of a model from which a progress bar is shown."""


def why_not_packed() -> str:
    """Why this processor cannot compute with packed weights; empty if it can."""
    if "x86" not in llvmlite.binding.get_default_triple() and LANES == 4:
        return ""  # Arm: its vector instructions are part of the architecture
    present = llvmlite.binding.get_host_cpu_features()
    if missing := [name for name in _NEEDED if not present.get(name)]:
        return f"this processor lacks {', '.join(missing)}"
    left_out = [] if LANES == 16 else [name for name in _NEEDED if name not in cpu_features()]
    return f"NUMBA_CPU_NAME and NUMBA_CPU_FEATURES leave out {', '.join(left_out)}" if left_out else ""


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


Packed = tuple[Sequence[str], PackedMatrix | PackedExperts]
"""Paths of the layers that share a matrix, and the matrix; or the path of a layer of experts, and that layer packed."""


def put_packed(model: nn.Module, packed: Iterable[Packed], dtype: mx.Dtype) -> None:
    """Replace layers of a model by packed ones; their biases stay.

    Args:
        model: The model.
        packed: The packed layers.
        dtype: Element type of activations.
    """
    modules = dict(model.named_modules())
    replacements: list[tuple[str, nn.Module]] = []
    for paths, weights in packed:
        if isinstance(weights, PackedMatrix):
            product = Product(weights, [modules[path].weight.shape[0] for path in paths])
        for index, path in enumerate(paths):
            old = modules[path]
            new: PackedLayer
            if isinstance(weights, PackedExperts):
                new = weights
            elif isinstance(old, nn.Embedding | nn.QuantizedEmbedding):
                new = PackedEmbedding(product, dtype)
            else:
                new = PackedLinear(product, index)
            if "bias" in old:
                new.bias = old.bias.astype(dtype)
            replacements.append((path, new))
    model.update_modules(tree_unflatten(replacements))


def pack_model(model: nn.Module, dtype: mx.Dtype = mx.float32, remembered: Remembered = NOTHING) -> None:
    """Pack every linear layer, embedding and mixture of experts that mlx-lm has loaded, one after another.

    Weights that are quantised affinely or in mxfp4 keep their bits, weights of 16 bits stay so, and float32 stays
    float32. Layers of other kinds are left as they are.

    Args:
        model: The model, changed in place; its weights may be lazy.
        dtype: Element type of activations.
        remembered: Products that passed their check in an earlier start are not checked again.
    """
    modules = dict(model.named_modules())
    sources = {path: stored for path, module in modules.items() if (stored := stored_weights(module)) is not None}

    def layers() -> Iterator[Packed]:
        for paths, weights in packed_layers(sources, pack, remembered):
            yield paths, weights
            for path in paths:
                _free(modules[path], sources[path])

    put_packed(model, layers(), dtype)


def packed_layers(
    sources: Mapping[str, Source], pack: Callable[[Sequence[Any]], PackedMatrix], remembered: Remembered
) -> Iterator[Packed]:
    """Pack and check layers one after another, and the experts of a mixture one by one.

    Args:
        sources: The stored weights of each layer, by path. Layers that have the same input and key share a matrix.
        pack: Makes a packed matrix of sources that lie one below the other.
        remembered: Products that passed their check in an earlier start are not checked again.
    """
    experts = [path for path, source in sources.items() if source.num_experts]
    groups = sharing_layers(path for path in sources if path not in experts)
    checks = ProductChecks(remembered)
    size = sum(source.nbytes for source in sources.values())
    with progress_bar(size, "packing weights", "B", shown=size >= _SHOWN_BYTES, unit_scale=True) as bar:
        for paths in _split_by(groups, lambda path: sources[path].key):
            parts = [sources[path] for path in paths]
            packed = pack(parts)
            checks.check(packed, partial(_dequantised_rows, parts), paths[0])
            bar.update(sum(part.nbytes for part in parts))
            yield paths, packed
        for path in experts:
            source = sources[path]
            layer = PackedExperts([pack([source.expert(index)]) for index in range(source.num_experts)])
            checks.check_experts(layer, source.rows_of_expert, path)
            bar.update(source.nbytes)
            yield (path,), layer
    checks.keep()


def _free(module: nn.Module, stored: Source) -> None:
    """Let go of a layer's stored arrays: the packed ones have taken their place."""
    stored.arrays.clear()
    for name in {"weight", "scales", "biases"} & module.keys():
        module[name] = mx.zeros((0,))


def _split_by(groups: Iterable[tuple[str, ...]], key: Callable[[str], Any]) -> Iterator[tuple[str, ...]]:
    """Split groups of layers whose stored types differ."""
    for group in groups:
        by_key: dict[Any, list[str]] = defaultdict(list)
        for path in group:
            by_key[key(path)].append(path)
        yield from map(tuple, by_key.values())


def _dequantised_rows(parts: Sequence[Source], rows: np.ndarray) -> np.ndarray:
    """Some rows of the weights of layers that lie one below the other."""
    bounds = np.cumsum([0, *(part.num_outputs for part in parts)])
    owners = np.searchsorted(bounds, rows, side="right") - 1
    # Only of layers that have some: MLX dequantises no empty array.
    return np.concatenate([parts[i].dequantised(rows[owners == i] - bounds[i]) for i in np.unique(owners)])
