"""The cache that each layer of an unmodified mlx-lm model is given.

Every token of the packed batch is a batch row: the model is called on tokens [T, 1], so ``mx.fast.rope`` takes one
position per row (``offset``) and any mix of prompt chunks and decodes is one call. A layer hands its new keys and
values, [T, num_kv_heads, 1, head_dim], to ``update_and_fetch``; the metadata of the step says where the pool keeps
them.

Two kinds of layer cache share that protocol. `workbench.models.paged_layer` leaves reading and writing to an attention
backend (see `workbench.models.patch`). `workbench.models.gathered_layer` needs no change in the
model at all: it writes the rows and returns each row's whole context, gathered. That takes T times the longest context
of memory, and is for models whose attention does arithmetic that `workbench.models.fetched` does not know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx
import numpy as np

from workbench.kernels.attention.metadata import AttentionMetadata
from workbench.kernels.attention.options import AttentionOptions
from workbench.kernels.attention.stored import stored_dim


@dataclass(frozen=True)
class LayerKV:
    """Shape and type of the keys and values that one layer keeps per token.

    Attributes:
        num_kv_heads: Number of KV heads.
        k_head_dim: Elements per head of what the model calls keys.
        v_head_dim: Elements per head of what it calls values; may differ from the keys'.
        dtype: Element type in the pool; int8 stands for codes with a scale, see `workbench.kernels.attention.stored`.
        window: Sliding window in tokens, the token itself included; -1 for full attention.
        mask_excess: Tokens by which the masks that the model asks for are wider than the window.
        chunk_size: Tokens of a chunk that a row cannot look out of, in chunked attention; 0 for none.
        latent: Whether attention is over latents: the model's keys, latents, are the values too, and what it calls
            values are the rotary part of the keys. The pool keeps both as one row, once.
        masked: Whether the model makes masks itself; the preflight has checked that the kernel does what they say.
        expanded: The keys and values that latents are expanded to for long chunks (`workbench.models.latents`), in the
            type that the model computes in; None if they never are.
    """

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: mx.Dtype
    window: int = -1
    mask_excess: int = 0
    chunk_size: int = 0
    latent: bool = False
    masked: bool = False
    expanded: LayerKV | None = None

    @property
    def key_dim(self) -> int:
        """Elements of a key per head, as the kernel reads it."""
        return self.k_head_dim + (self.v_head_dim if self.latent else 0)

    @property
    def value_dim(self) -> int:
        """Elements of a value per head, as the kernel reads it."""
        return self.k_head_dim if self.latent else self.v_head_dim

    @property
    def kernel_reach(self) -> int:
        """The reach of a row in `workbench.kernels.attention.options`: its left window, -1 for all, or -chunk_size."""
        return -self.chunk_size if self.chunk_size else max(self.reach - 1, -1)

    @property
    def reach(self) -> int:
        """Tokens that a row may read, itself included; -1 for all."""
        return self.window + self.mask_excess if self.window > 0 else -1

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value."""
        return self.num_kv_heads * sum(self.stored_dims) * self.dtype.size

    @property
    def stored_dims(self) -> tuple[int, int]:
        """Elements of a key and of a value per head, as the pool stores them; 0 for values that are parts of keys."""
        value = 0 if self.latent else stored_dim(self.v_head_dim, self.dtype)
        return stored_dim(self.key_dim, self.dtype), value

    def with_window(self, window: int) -> LayerKV:
        """The same layer under another sliding window."""
        return replace(self, window=window)


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention in a step, as a tap sees it right after the backend has run.

    Attributes:
        queries: [T, num_heads, head_dim].
        keys: [T, num_kv_heads, head_dim].
        values: [T, num_kv_heads, value_dim].
        out: [T, num_heads, value_dim].
        k_cache: Keys of every slot; a tap must not keep a reference.
        v_cache: Values of every slot; a tap must not keep a reference.
        metadata: The packed batch.
        options: Scale, window, soft cap and sinks of the layer.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    out: mx.array
    k_cache: mx.array
    v_cache: mx.array
    metadata: AttentionMetadata
    options: AttentionOptions


Memory = tuple[mx.array, mx.array]
"""Keys and values of every slot, [num_blocks, block_size, num_kv_heads, stored_dim] each; one array for latents."""

Tap = Callable[[AttentionCall], None]
"""A function that is called with each attention call of a layer."""


@dataclass(frozen=True, eq=False)
class LayerStep:
    """The packed batch that all layers serve at present.

    Attributes:
        positions: Position of every packed row, int32 [T].
        metadata: The packed batch.
    """

    positions: mx.array
    metadata: AttentionMetadata

    @cached_property
    def row_table(self) -> mx.array:
        """The block table of each row's sequence, int32 [T, max_blocks]."""
        row_seq = np.repeat(np.arange(self.metadata.num_seqs), self.metadata.query_lens)
        return mx.array(self.metadata.block_table[row_seq])


class LayerCache(ABC):
    """One layer's part of the KV pool, and the step it serves.

    K and V are one array each, [num_blocks, block_size, num_kv_heads, stored_dim], and nothing else may refer to
    their memory (no view is kept, nothing is passed to ``mx.async_eval``): MLX copies a whole array on a write
    when anything else holds its buffer.

    Attributes:
        layer: Shapes, element type and window.
        k_cache: Keys of every slot; layers of other KV cache groups keep theirs in other blocks of the same array.
        v_cache: Values of every slot, likewise.
        group: Index of the layer's KV cache group.
        num_reads: Attention calls with new keys and values since the step began; calls that read them again, as of
            layers that share them, do not count.
        num_heads: Query heads of the last attention call, 0 before the first.
    """

    def __init__(self, layer: LayerKV, memory: Memory, group: int = 0) -> None:
        self.layer = layer
        self.k_cache, self.v_cache = memory
        self.group = group
        self.num_reads = 0
        self.num_heads = 0
        self._step: LayerStep | None = None

    @abstractmethod
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take the new keys and values, [T, num_kv_heads, 1, head_dim]; return those that the model attends to."""

    @abstractmethod
    def make_mask(self, num_tokens: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:
        """The mask that the model passes to its attention, None for no mask."""

    def begin_step(self, step: LayerStep) -> None:
        """Serve a packed batch until `end_step`."""
        self.num_reads = 0
        self._step = step

    def end_step(self) -> None:
        """Drop everything that belongs to the step."""
        self._step = None

    @property
    def _current(self) -> LayerStep:
        """The step in progress.

        Raises:
            RuntimeError: There is none.
        """
        if self._step is None:
            raise RuntimeError("no step is in progress: call the model through ModelRunner.forward")
        return self._step

    @property
    def offset(self) -> mx.array:
        """Position of every packed row, int32 [T]: what RoPE reads."""
        return self._current.positions

    @property
    def metadata(self) -> AttentionMetadata:
        """The packed batch in progress."""
        return self._current.metadata

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """The arrays of this layer, for ``mx.eval``."""
        return self.k_cache, self.v_cache
