"""The cache that each layer of an unmodified mlx-lm model is given.

Every token of the packed batch is a batch row: the model is called on tokens [T, 1], so ``mx.fast.rope`` takes one
position per row (``offset``) and any mix of prompt chunks and decodes is one call. A layer hands its new keys and
values, [T, num_kv_heads, 1, head_dim], to ``update_and_fetch``; the metadata of the step says where the pool keeps
them.

Two kinds of layer cache share that protocol. `PagedLayerCache` leaves reading and writing to an attention backend,
which it calls in `attend` (see `workbench.models.patch`). `GatheredLayerCache` needs no change in the model at all: it
writes the rows and returns each row's whole context, gathered. That takes T times the longest context of memory, and
is for models whose attention does its own arithmetic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx
import numpy as np

from workbench.kernels.attention.backend import AttentionBackend
from workbench.kernels.attention.metadata import AttentionMetadata
from workbench.kernels.attention.options import AttentionOptions
from workbench.kernels.attention.stored import from_stored, stored_dim, to_stored


@dataclass(frozen=True)
class LayerKV:
    """Shape and type of the keys and values that one layer keeps per token.

    Attributes:
        num_kv_heads: Number of KV heads.
        k_head_dim: Elements of a key per head.
        v_head_dim: Elements of a value per head; differs from the keys' in latent attention.
        dtype: Element type in the pool; int8 stands for codes with a scale, see `workbench.kernels.attention.stored`.
        window: Sliding window in tokens, the token itself included; -1 for full attention.
        mask_excess: Tokens by which the masks that the model asks for are wider than the window.
    """

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: mx.Dtype
    window: int = -1
    mask_excess: int = 0

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
        """Elements of a key and of a value per head, as the pool stores them."""
        return stored_dim(self.k_head_dim, self.dtype), stored_dim(self.v_head_dim, self.dtype)

    def with_window(self, window: int) -> LayerKV:
        """The same layer under another sliding window."""
        return replace(self, window=window)


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention in a step, as a tap sees it right after the backend has run.

    Attributes:
        queries: [T, num_heads, head_dim].
        keys: [T, num_kv_heads, head_dim].
        values: [T, num_kv_heads, head_dim].
        out: [T, num_heads, head_dim].
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
"""Keys and values of every slot, [num_blocks, block_size, num_kv_heads, stored_dim] each."""

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
        num_reads: Attention calls of this layer since the step began.
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


class PagedLayerCache(LayerCache):
    """A layer cache whose attention is computed by a backend, straight from the block pool.

    Attributes:
        backend: Writes, reads and computes.
        taps: Called in order after each attention call.
    """

    def __init__(self, layer: LayerKV, memory: Memory, backend: AttentionBackend, group: int = 0) -> None:
        super().__init__(layer, memory, group)
        self.backend = backend
        self.taps: list[Tap] = []
        self._options: AttentionOptions | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the new keys and values as they are; `attend` writes them before it reads."""
        return keys, values

    def make_mask(self, *_args: object, **_kwargs: object) -> None:
        """No mask: the backend knows every row's causal range and window."""

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        softmax_scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Write this step's keys and values, then attend over each row's own sequence.

        Args:
            queries: [T, num_heads, 1, head_dim].
            keys: [T, num_kv_heads, 1, head_dim].
            values: [T, num_kv_heads, 1, head_dim].
            softmax_scale: Scale of the logits.
            sinks: One logit per head that counts in the softmax's sum and has no value, [num_heads], or None.

        Returns:
            [T, num_heads, 1, head_dim].
        """
        self.num_reads += 1
        self.num_heads = queries.shape[1]
        options = self._options_for(softmax_scale, sinks)
        rows = queries.squeeze(2), keys.squeeze(2), values.squeeze(2)
        out = self.backend.write_and_attend(*rows, self.k_cache, self.v_cache, self.metadata, options)
        if self.taps:
            call = AttentionCall(*rows, out, self.k_cache, self.v_cache, self.metadata, options)
            for tap in list(self.taps):
                tap(call)
        return mx.expand_dims(out, 2)

    def _options_for(self, softmax_scale: float, sinks: mx.array | None) -> AttentionOptions:
        """The layer's options; those of the last call if nothing has changed, because checking them takes a while."""
        options = self._options
        if options is None or options.softmax_scale != softmax_scale or options.sinks is not sinks:
            window = self.layer.window
            options = AttentionOptions(softmax_scale, (-1, -1) if window < 0 else (window - 1, 0), sinks=sinks)
            self._options = options
        return options


class GatheredLayerCache(LayerCache):
    """A layer cache that returns each row's context as plain arrays: slow, but any model can use it.

    Attributes:
        mask_ndim: Axes of the masks that the model takes.
    """

    def __init__(self, layer: LayerKV, memory: Memory, mask_ndim: int, group: int = 0) -> None:
        super().__init__(layer, memory, group)
        self.mask_ndim = mask_ndim

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [T, num_kv_heads, 1, head_dim], return [T, num_kv_heads, longest context, head_dim]."""
        self.num_reads += 1
        self.k_cache[self.metadata.write_index] = to_stored(keys.squeeze(2), self.k_cache.dtype)
        self.v_cache[self.metadata.write_index] = to_stored(values.squeeze(2), self.v_cache.dtype)
        return self._fetch(self.k_cache).astype(keys.dtype), self._fetch(self.v_cache).astype(values.dtype)

    def make_mask(self, _num_tokens: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        """True for the gathered keys that a row may see, bool [T, 1, ..., 1, longest context] of ``mask_ndim`` axes."""
        visible = self._visible(window_size if window_size is not None else self.layer.window)
        return mx.expand_dims(visible, tuple(range(1, self.mask_ndim - 1)))

    def _visible(self, window: int) -> mx.array:
        row = self.offset[:, None]
        column = mx.arange(self._current.row_table.shape[1] * self.metadata.block_size)[None, :]
        seen = column <= row
        return seen if window < 0 else seen & (column > row - window)

    def _fetch(self, cache: mx.array) -> mx.array:
        rows = from_stored(cache[self._current.row_table].flatten(1, 2)).swapaxes(1, 2)
        # Slots past a row's position, and before its window, may hold anything, even NaN, and 0 * NaN is NaN.
        return mx.where(self._visible(self.layer.reach)[:, None, :, None], rows, mx.zeros((), rows.dtype))
