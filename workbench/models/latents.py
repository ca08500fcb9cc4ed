"""Latent attention in two forms, and the sequences of a step that take each.

A model with latent attention multiplies with two matrices per head: queries on their way to the latents, and outputs on
their way back. In the *absorbed* form, attention runs over the latents themselves: a pair of row and position costs
``2 * rank + rotary`` multiplications per head. In the *expanded* form, keys and values of every head are made of the
latents of a context first; then a pair costs ``key + value``, a fraction of it. So a long chunk is cheaper expanded,
and a decode, or a few rows behind a long context, absorbed.

Keys and values that are made so live in a pool for one launch. It has the blocks of the context, numbered from 0 on,
and the backend attends over it as over any other.

The two matrices are found by what the model does: the module whose result is the query of attention over latents, and
the one that is given its output. Both are modules of `mlx_lm.models.mla`, which multiply with a matrix or its
transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from workbench.kernels.attention.metadata import AttentionMetadata, mlx_copy
from workbench.kernels.attention.options import AttentionOptions
from workbench.kernels.attention.stored import from_stored
from workbench.models.class_patch import ClassPatch, subclass_that_calls

if TYPE_CHECKING:
    from workbench.kernels.attention.backend import AttentionBackend
    from workbench.models.layer_cache import LayerKV

MIN_ROWS = 32
"""Rows from which a sequence may take the expanded form: those of a tile of the Metal kernel. Query heads do not share
keys there, so fewer rows leave a tile partly empty, while heads fill tiles of latents."""

MATRIX_COST = 1.5
"""Time of a multiplication by the two matrices, in units of one of attention, as `benchmarks/bench_latents.py` has it
on a CPU: these products are written to memory, and put in another order."""

MAX_BYTES = 2**28
"""Bytes of the expanded keys and values of a launch (256 MiB); more heads than fit are launched one after another."""


class HeadMatrices:
    """A module of a model that multiplies each head with a matrix.

    Args:
        module: A `MultiLinear` or a quantised one.
        call: The ``__call__`` of its class, before it was patched.
    """

    def __init__(self, module: nn.Module, call: Callable[..., mx.array]) -> None:
        self._module, self._call = module, call

    def __call__(self, rows: mx.array, **options: Any) -> mx.array:
        """The product with rows [..., heads or 1, count, dim].

        Rows of a packed batch, [T, heads, 1, dim], are multiplied together, head by head: one by one, each of them
        would read all matrices.
        """
        if rows.ndim != 4 or rows.shape[2] != 1:
            return self._call(self._module, rows, **options)
        return self._call(self._module, rows.swapaxes(0, 2), **options).swapaxes(0, 2)

    @property
    def arrays(self) -> list[mx.array]:
        """The matrices, and their scales if they are quantised."""
        return [array for array in self._module.values() if isinstance(array, mx.array)]

    def of_heads(self, first: int, end: int) -> HeadMatrices:
        """The matrices of some heads."""
        part = copy(self._module)
        for name, array in self._module.items():
            if isinstance(array, mx.array):
                part[name] = array[first:end]
        return HeadMatrices(part, self._call)


class LatentQueries(mx.array):
    """Queries of latents, [T, num_heads, 1, rank], which know what they were made of.

    Attributes:
        rows: The queries before, [T, num_heads, 1, dim].
        matrices: The matrices that they were multiplied with.
    """

    def __init__(self, array: mx.array, rows: mx.array, matrices: HeadMatrices) -> None:
        super().__init__(array)
        self.rows, self.matrices = rows, matrices


class LatentOutput(mx.array):
    """The output of attention over latents, [T, num_heads, 1, rank], before the model makes values of it.

    Attributes:
        values_by: Gives the values by the model's matrices, [T, num_heads, 1, value_dim].
    """

    def __init__(self, array: mx.array, values_by: Callable[[HeadMatrices], mx.array]) -> None:
        super().__init__(array)
        self.values_by = values_by


class LatentPatch(ClassPatch):
    """A hold on the modules of a model that multiply each head with a matrix: their results know them."""

    def __init__(self, model: nn.Module) -> None:
        kinds = MultiLinear, QuantizedMultiLinear
        super().__init__([module for module in model.modules() if isinstance(module, kinds)], _remembering)


@cache
def _remembering(module_class: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, rows: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        matrices = HeadMatrices(self, module_class.__call__)
        if isinstance(rows, LatentOutput):
            return rows.values_by(matrices)
        made = matrices(rows, *args, **kwargs)
        return made if args or kwargs else LatentQueries(made, rows, matrices)

    return subclass_that_calls(module_class, call)


@dataclass(frozen=True)
class Part:
    """The sequences of a batch that take one form.

    Attributes:
        rows: Their rows in the batch, int32.
        sequences: Their indices in the batch.
        metadata: The batch that they are.
    """

    rows: np.ndarray
    sequences: np.ndarray
    metadata: AttentionMetadata

    mlx_rows = mlx_copy("rows")

    @classmethod
    def of(cls, metadata: AttentionMetadata, chosen: np.ndarray) -> Part:
        """Those for which ``chosen`` is True, bool [num_seqs]."""
        lens = metadata.query_lens
        part = replace(
            metadata,
            cu_seqlens_q=np.concatenate([[0], np.cumsum(lens[chosen])]).astype(np.int32),
            seqused_k=metadata.seqused_k[chosen],
            block_table=metadata.block_table[chosen],
            slot_mapping=None,
            derived={},
        )
        return cls(np.flatnonzero(np.repeat(chosen, lens)).astype(np.int32), np.flatnonzero(chosen), part)

    @cached_property
    def compact(self) -> tuple[mx.array, AttentionMetadata]:
        """Ids of the blocks that hold context, and the batch over a pool of these blocks alone."""
        blocks, table = self.metadata.used_blocks
        return blocks, replace(self.metadata, block_table=table, derived={})


@dataclass(frozen=True)
class Forms:
    """The forms of a step's sequences, if some are expanded.

    Attributes:
        absorbed: Sequences whose rows attend to latents; may have no rows.
        expanded: Sequences whose latents are expanded.
    """

    absorbed: Part
    expanded: Part

    @cached_property
    def order(self) -> mx.array | None:
        """Places of the batch's rows among those of both parts, absorbed ones first; None if they are in order."""
        order = np.argsort(np.concatenate([self.absorbed.rows, self.expanded.rows]))
        return None if np.array_equal(order, np.arange(len(order))) else mx.array(order.astype(np.int32))

    def joined(self, absorbed: mx.array, expanded: mx.array) -> mx.array:
        """Rows of both parts in the order of the batch."""
        rows = mx.concatenate([absorbed, expanded]) if len(self.absorbed.rows) else expanded
        return rows if self.order is None else rows[self.order]


def forms_of(metadata: AttentionMetadata, layer: LayerKV, *, every_chunk: bool = False) -> Forms | None:
    """The forms of a step's sequences, the same for all layers of a kind; None if all of them are absorbed.

    A sequence is expanded if that saves multiplications, those by the two matrices weighted by `MATRIX_COST`, and if
    one head of it, and of those before it in the batch, fits into `MAX_BYTES`. So forms depend on nothing but the step.

    Args:
        metadata: The batch.
        layer: The layer's latents and, if it has an expanded form, its keys and values.
        every_chunk: Expand every sequence of two or more rows, to try it.
    """
    made = layer.expanded
    if made is None or layer.kernel_reach != -1:
        return None
    key = forms_of, layer.key_dim, layer.value_dim, made.key_dim, made.value_dim, made.dtype, every_chunk
    if key not in metadata.derived:
        rows, context = metadata.query_lens.astype(np.int64), metadata.seqused_k.astype(np.int64)
        chosen = (
            rows >= 2
            if every_chunk
            else (rows >= MIN_ROWS) & (saved_multiplications(rows, context, layer, MATRIX_COST) > 0)
        )
        chosen &= np.cumsum(np.where(chosen, context, 0)) * made.bytes_per_token // made.num_kv_heads <= MAX_BYTES
        parts = (Part.of(metadata, ~chosen), Part.of(metadata, chosen)) if chosen.any() else None
        metadata.derived[key] = parts and Forms(*parts)
    return cast("Forms | None", metadata.derived[key])


def saved_multiplications(
    rows: np.ndarray, context: np.ndarray, layer: LayerKV, matrix_cost: float = 1.0
) -> np.ndarray:
    """Multiplications per head that the expanded form saves, negative if it takes more.

    Args:
        rows: Rows of each sequence, the last of its context.
        context: Positions of each sequence.
        layer: The layer.
        matrix_cost: Weight of a multiplication by the two matrices.
    """
    made, rank = layer.expanded, layer.value_dim
    assert made is not None
    rotary = layer.key_dim - rank
    pairs = rows * (context - rows) + rows * (rows + 1) // 2
    absorbed = pairs * (layer.key_dim + rank)
    expanded = pairs * (made.key_dim + made.value_dim)
    one_row = rank * (made.key_dim - rotary + made.value_dim)  # through both matrices, in either direction
    return absorbed - expanded - (context - rows) * one_row * matrix_cost


def heads_per_launch(part: Part, made: LayerKV, num_heads: int) -> int:
    """Heads whose expanded keys and values fit into `MAX_BYTES`, at least one; launches are about equal.

    Args:
        part: The sequences whose latents are expanded.
        made: Their keys and values.
        num_heads: Number of query heads.
    """
    blocks, metadata = part.compact
    of_a_head = blocks.size * metadata.block_size * made.bytes_per_token // made.num_kv_heads
    most = max(1, MAX_BYTES // of_a_head)
    num_launches = -(-num_heads // most)
    return -(-num_heads // num_launches)


def attend_expanded(
    queries: mx.array,
    k_cache: mx.array,
    part: Part,
    layer: LayerKV,
    backend: AttentionBackend,
    to_latents: HeadMatrices,
    to_values: HeadMatrices,
) -> mx.array:
    """Attention of sequences over keys and values that are made of their latents.

    Args:
        queries: Both parts of queries, scaled, [rows, num_heads, key_dim].
        k_cache: The pool's latents and rotary keys.
        part: The sequences.
        layer: The layer.
        backend: The attention backend.
        to_latents: The matrices that turn queries into those of latents.
        to_values: The matrices that turn latents into values.

    Returns:
        [rows, num_heads, value_dim].
    """
    (blocks, metadata), made = part.compact, layer.expanded
    assert made is not None
    rank, num_heads = layer.value_dim, queries.shape[1]
    stored = from_stored(k_cache[blocks]).astype(queries.dtype)  # [num_blocks, block_size, 1, key_dim]
    # A part of rows, which all heads read, would be copied for each of them.
    latents, rotary = mx.contiguous(stored[..., :rank]).reshape(1, 1, -1, rank), stored[..., rank:].flatten(0, 1)
    slots, options = stored.shape[:2], AttentionOptions(1.0)
    step, outputs = heads_per_launch(part, made, num_heads), list[mx.array]()
    backend.wait_for(latents, rotary, *to_latents.arrays, *to_values.arrays)

    def pool_of(first: int, end: int) -> tuple[mx.array, mx.array]:
        up, down = (one if end - first == num_heads else one.of_heads(first, end) for one in (to_latents, to_values))
        keys, values = (rows.squeeze(0).swapaxes(0, 1) for rows in (up(latents, transpose=False), down(latents)))
        rotary_keys = mx.broadcast_to(rotary, (*keys.shape[:2], rotary.shape[-1]))
        keys = mx.concatenate([keys, rotary_keys], axis=-1)
        return keys.reshape(*slots, *keys.shape[1:]), values.reshape(*slots, *values.shape[1:])

    def attend(begin: int, stop: int) -> list[mx.array]:
        shares = backend.in_shares(begin, stop, pool_of)
        return [backend.attend(queries[:, first:end], *pool, metadata, options) for first, end, pool in shares]

    for begin in range(0, num_heads, step):
        outputs += attend(begin, min(begin + step, num_heads))
        if step < num_heads:
            mx.eval(outputs)  # so that one launch's keys and values are in memory
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
