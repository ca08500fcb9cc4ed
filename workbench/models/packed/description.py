"""A llama-like model as data, read from the modules of an mlx-lm model whose layers are packed.

Nothing here decides whether the description is right: `workbench.models.packed.compiled_step` compares logits. A model
with an unknown part is refused, and then runs layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from workbench.kernels.attention.dtypes import dtype_name
from workbench.kernels.cpu.attention.kernel import work_list_address
from workbench.kernels.cpu.inputs import code_bits, factors
from workbench.kernels.cpu.layer_loop import GELU, NUM_FACTORED, NUM_PARTS, SILU, FactorField, Field, Model
from workbench.models.model_code import position_limit
from workbench.models.packed.layers import PackedEmbedding, PackedLinear
from workbench.models.paged_layer import PagedLayerCache

_LOG2_E = 1.4426950408889634
_ROPE_PROBE = 96
"""Positions at which two RoPE modules are compared, from the start and far from it."""


class Place(NamedTuple):
    """The place of the outputs of a linear layer.

    Attributes:
        layer: Index of its layer.
        field: Index of its products among those of the layer, half of `Field`.
        part: Its place among the linear layers whose outputs lie side by side.
        first_output: The first of its outputs among theirs.
    """

    layer: int
    field: int
    part: int
    first_output: int


def table_of_adapter(
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]], places: Mapping[str, Place]
) -> np.ndarray | None:
    """An adapter's row of ``Batch.adapters`` in `layer_loop`; None if it changes a layer without a place.

    Args:
        factors: Its matrices by layer, float32 [rank, inputs] and [rank, outputs], which have to stay in memory.
        places: The layers of the model.
    """
    if not set(factors) <= set(places):
        return None
    num_layers = 1 + max(place.layer for place in places.values())
    table = np.zeros((num_layers, NUM_FACTORED, NUM_PARTS, len(FactorField)), np.int64)
    for path, (a, b) in factors.items():
        layer, field, part, first_output = places[path]
        table[layer, field, part] = a.ctypes.data, b.ctypes.data, len(a), a.shape[1], first_output, b.shape[1]
    return table


class NotDescribed(Exception):
    """The model has a part that compiled code does not know; the message names it."""


class Description:
    """The parts of a model that `run_layers` needs, and their owners, which keep the memory alive.

    Args:
        model: The mlx-lm model, its layers packed.
        caches: The layers of the pool.
        num_heads: Number of query heads.

    Attributes:
        model: The tables.
        embedding: Gives the embeddings of tokens.
        embedding_scales: Factors on embeddings that the model may use; the right one is found by comparing logits.
        ropes: The different RoPE modules.
        qkv_size: Width of queries, keys and values together.
        vocab_size: Number of logits of a row.
        places: The places of the outputs of linear layers, by their dotted names; the head's is not among them.

    Raises:
        NotDescribed: Compiled code does not know a part of the model.
    """

    def __init__(self, model: nn.Module, caches: Sequence[PagedLayerCache], num_heads: int) -> None:
        outer = getattr(model, "language_model", model)
        inner = _part(outer, "model")
        layers = list(_part(inner, "layers"))
        first = caches[0].layer
        if len(layers) != len(caches) or any(cache.layer.dtype != first.dtype for cache in caches):
            raise NotDescribed("layers without keys and values, or with caches of different types")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, first.num_kv_heads, first.k_head_dim
        for cache in caches:
            if (cache.layer.num_kv_heads, cache.layer.k_head_dim, cache.layer.v_head_dim) != (
                first.num_kv_heads,
                first.k_head_dim,
                first.k_head_dim,
            ):
                raise NotDescribed("layers whose keys and values differ in shape")
        self.embedding = _part(inner, "embed_tokens")
        if not isinstance(self.embedding, PackedEmbedding):
            raise NotDescribed("an embedding that is not packed")
        self.hidden_size = self.embedding.product.matrix.num_columns
        self.vocab_size = self.embedding.product.matrix.num_outputs
        self.qkv_size = (num_heads + 2 * self.num_kv_heads) * self.head_dim
        self._end = max(0, position_limit(model) - _ROPE_PROBE)
        self.ropes: list[Any] = []
        self._rope_tables: list[bytes] = []
        self._numbers: list[np.ndarray] = []
        self._num_numbers = 0
        self._products: list[list[int]] = []
        self._factors: list[np.ndarray] = []
        self.hidden = 0
        self.places: dict[str, Place] = {}
        self._paths = {id(module): path for path, module in model.named_modules()}
        scaled = float(np.array(mx.array(self.hidden_size**0.5, mx.bfloat16).astype(mx.float32)))
        self.embedding_scales = (1.0, scaled)

        epsilons = {float(_part(inner, "norm").eps)}
        table = np.zeros((len(layers), Field.NUM_FIELDS), np.int64)
        softmax_scales = []
        for index, (row, layer, cache) in enumerate(zip(table, layers, caches)):
            attention, mlp = _part(layer, "self_attn"), _part(layer, "mlp")
            self._fill_products(index, row, attention, mlp)
            self._fill_norms(row, layer, attention, epsilons)
            row[Field.ROPE] = self._rope_index(attention)
            row[Field.LEFT] = cache.layer.window - 1 if cache.layer.window > 0 else -1
            softmax_scales.append(float(_part(attention, "scale")) * _LOG2_E)
        if len(epsilons) > 1:
            raise NotDescribed("norms with different epsilons")
        final_norm = self._norm(_part(inner, "norm"))
        head = outer.get("lm_head", self.embedding)
        if not isinstance(head, PackedLinear | PackedEmbedding):
            raise NotDescribed("a head that is not packed")
        self._add_product([head], 0)
        self.model = Model(
            layers=table,
            products=np.array(self._products, np.int64),
            factors=np.stack(self._factors),
            numbers=np.concatenate(self._numbers),
            scales=np.array(softmax_scales, np.float32),
            final_norm=final_norm,
            epsilon=np.float32(epsilons.pop()),
            activation=SILU,
            hidden=self.hidden,
            attention=work_list_address(dtype_name(first.dtype)),
        )

    def variants(self) -> Iterator[tuple[Model, float]]:
        """The tables and the factor on embeddings, for each activation and factor that the model may use."""
        for activation in (SILU, GELU):
            for scale in self.embedding_scales:
                yield self.model._replace(activation=activation), scale

    def _fill_products(self, index: int, row: np.ndarray, attention: nn.Module, mlp: nn.Module) -> None:
        known = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "rope"}
        if unknown := attention.children().keys() - known:
            raise NotDescribed(f"attention with {', '.join(sorted(unknown))}")
        if unknown := mlp.children().keys() - {"gate_proj", "up_proj", "gate_up_proj", "down_proj"}:
            raise NotDescribed(f"an MLP with {', '.join(sorted(unknown))}")
        qkv = ["qkv_proj"] if "qkv_proj" in attention else ["q_proj", "k_proj", "v_proj"]
        gate_up = ["gate_up_proj"] if "gate_up_proj" in mlp else ["gate_proj", "up_proj"]
        for field, owner, names, size in (
            (Field.QKV, attention, qkv, self.qkv_size),
            (Field.OUT, attention, ["o_proj"], self.hidden_size),
            (Field.GATE_UP, mlp, gate_up, 0),
            (Field.DOWN, mlp, ["down_proj"], self.hidden_size),
        ):
            row[field] = len(self._products)
            members = [_part(owner, name) for name in names]
            width = self._add_product(members, 0)
            first_output = 0
            for part, member in enumerate(members):
                if isinstance(member, PackedLinear):
                    self.places[self._paths[id(member)]] = Place(index, field // 2, part, first_output)
                    first_output += member.product.sizes[member.index]
            row[field + 1] = len(self._products)
            if field == Field.GATE_UP:
                if self.hidden and width != 2 * self.hidden:
                    raise NotDescribed("MLPs of different widths")
                self.hidden = width // 2
            elif width != size:
                raise NotDescribed(f"a projection to {width} features instead of {size}")

    def _add_product(self, layers: Sequence[Any], first_output: int) -> int:
        """Add the products of layers whose outputs lie side by side; return the output after the last."""
        done: set[int] = set()
        for layer in layers:
            if not isinstance(layer, PackedLinear | PackedEmbedding):
                raise NotDescribed(f"a {type(layer).__name__} among its layers")
            product = layer.product
            if id(product) in done:
                continue
            done.add(id(product))
            members = [member for member in layers if member.product is product]
            if len(members) != len(product.sizes):
                raise NotDescribed("layers that share a product with others")
            matrix, bias = product.matrix, -1
            if any("bias" in member for member in members):
                parts = [
                    np.array(member.bias.astype(mx.float32)) if "bias" in member else np.zeros(size, np.float32)
                    for member, size in zip(members, product.sizes)
                ]
                bias = self._number(np.concatenate(parts))
            self._products.append(
                [
                    matrix.kernel,
                    matrix.data.ctypes.data,
                    matrix.num_columns,
                    matrix.num_units,
                    matrix.form.group,
                    matrix.num_outputs,
                    first_output,
                    matrix.num_tiles,
                    bias,
                    code_bits(matrix.form, matrix.activations),
                    matrix.form.middle,
                ]
            )
            self._factors.append(factors(matrix.form))
            first_output += matrix.num_outputs
        return first_output

    def _fill_norms(self, row: np.ndarray, layer: nn.Module, attention: nn.Module, epsilons: set[float]) -> None:
        sandwich = "pre_feedforward_layernorm" in layer
        after = "post_attention_layernorm"
        names = {
            Field.INPUT_NORM: (layer, "input_layernorm"),
            Field.ATTENTION_NORM: (layer, after if sandwich else ""),
            Field.MLP_NORM: (layer, "pre_feedforward_layernorm" if sandwich else after),
            Field.DOWN_NORM: (layer, "post_feedforward_layernorm" if sandwich else ""),
            Field.Q_NORM: (attention, "q_norm" if "q_norm" in attention else ""),
            Field.K_NORM: (attention, "k_norm" if "k_norm" in attention else ""),
        }
        if unknown := layer.children().keys() - {"self_attn", "mlp", *(name for _, name in names.values())}:
            raise NotDescribed(f"layers with {', '.join(sorted(unknown))}")
        for field, (owner, name) in names.items():
            row[field] = -1
            if name:
                norm = _part(owner, name)
                row[field] = self._norm(norm)
                epsilons.add(float(norm.eps))

    def _norm(self, norm: nn.Module) -> int:
        """Index of the factors of an RMS norm: its weights, or 1 + its weights."""
        weight = np.array(_part(norm, "weight").astype(mx.float32))
        probe = _uneven(len(weight))
        result = np.array(norm(mx.array(probe)[None])[0])
        plain = probe / np.sqrt(np.mean(probe * probe) + np.float32(norm.eps))
        for candidate in (weight, weight + np.float32(1.0)):
            if np.allclose(result, plain * candidate, rtol=1e-4, atol=1e-5):
                return self._number(candidate)
        raise NotDescribed(f"a norm of type {type(norm).__name__}")

    def _number(self, values: np.ndarray) -> int:
        """Add numbers; return the index of the first."""
        at = self._num_numbers
        self._numbers.append(values.astype(np.float32))
        self._num_numbers += len(values)
        return at

    def _rope_index(self, attention: nn.Module) -> int:
        rope = _part(attention, "rope")
        table = rope_table(rope, self.head_dim, _ROPE_PROBE)
        x = _uneven(_ROPE_PROBE * self.head_dim).reshape(_ROPE_PROBE, self.head_dim)
        first, second = np.split(x, 2, axis=1)
        cosines, sines = table
        expected = np.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=1)
        if not np.allclose(np.array(rope(mx.array(x)[None, None]))[0, 0], expected, rtol=1e-4, atol=1e-4):
            raise NotDescribed("RoPE that does not turn the halves of a head")
        far = [rope_table(rope, self.head_dim, _ROPE_PROBE, offset) for offset in (self._end // 2, self._end)]
        key = np.stack([table, *far]).tobytes()
        if key not in self._rope_tables:
            self._rope_tables.append(key)
            self.ropes.append(rope)
        return self._rope_tables.index(key)


def _uneven(count: int) -> np.ndarray:
    """Numbers of both signs without a pattern, float32: ``numpy.random`` takes 25 ms to import."""
    return np.sin(np.square(np.arange(1.0, count + 1))).astype(np.float32)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a described model, their attention and their MLPs, by dotted names."""
    layers = _part(_part(getattr(model, "language_model", model), "model"), "layers")
    return {
        f"layer {index}{name and '.' + name}": _part(layer, name) if name else layer
        for index, layer in enumerate(layers)
        for name in ("", "self_attn", "mlp")
    }


def rope_table(rope: Any, head_dim: int, length: int, offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of a RoPE module from a position on, float32 [length, head_dim / 2] each.

    They are read off what the module does to a vector of ones and zeros, so any scaling of wavelengths is in them.
    """
    half = head_dim // 2
    probe = np.concatenate([np.ones((length, half), np.float32), np.zeros((length, half), np.float32)], axis=1)
    turned = np.array(rope(mx.array(probe)[None, None], offset=offset))[0, 0]
    return np.ascontiguousarray(turned[:, :half]), np.ascontiguousarray(turned[:, half:])


def _part(module: Any, name: str) -> Any:
    part = getattr(module, name, None)
    if part is None:
        raise NotDescribed(f"a {type(module).__name__} without {name}")
    return part
