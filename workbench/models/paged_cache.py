"""What a layer of an unmodified mlx-lm model gets as its KV cache.

Every token of the packed batch is a batch row: the model is called on tokens [T, 1], so ``mx.fast.rope`` takes one
position per row (``offset``) and any mix of prompt chunks and decodes is one call. A layer hands its new keys and
values, [T, num_kv_heads, 1, head_dim], to ``update_and_fetch``; where the pool keeps them is the step's business.

Two kinds of layer cache share that protocol. `PagedLayerCache` leaves reading and writing to an attention backend,
which it meets in `attend` (see `workbench.models.swap`). `GatheredLayerCache` needs no change in the model at all: it
writes the rows and returns each row's whole context, gathered. That takes T times the longest context of memory, and
is for models whose attention does its own arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from workbench.attention.backend import AttentionBackend
from workbench.attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class LayerKV:
    """What one layer keeps per token.

    Attributes:
        num_kv_heads: KV heads.
        k_head_dim: Elements of a key per head.
        v_head_dim: Elements of a value per head; differs from the keys' in latent attention.
        dtype: Element type.
        window: Sliding window in tokens, the token itself included; -1 for full attention.
    """

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: mx.Dtype
    window: int = -1

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value."""
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim) * self.dtype.size

    def with_window(self, window: int) -> LayerKV:
        """The same layer under another sliding window."""
        return replace(self, window=window)


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention in a step, seen by a tap while the arrays are as the backend left them.

    Attributes:
        queries: [T, num_heads, head_dim].
        keys: [T, num_kv_heads, head_dim].
        values: [T, num_kv_heads, head_dim].
        out: [T, num_heads, head_dim].
        k_cache: Keys of every slot; do not keep it.
        v_cache: Values of every slot; do not keep it.
        metadata: The packed batch.
        softmax_scale: Factor of the logits.
        window: Sliding window, -1 for full attention.
        sinks: One logit per head, or None.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    out: mx.array
    k_cache: mx.array
    v_cache: mx.array
    metadata: AttentionMetadata
    softmax_scale: float
    window: int
    sinks: mx.array | None


class _LayerPool:
    """One layer's part of the KV pool and the step it serves; what both kinds of layer cache share.

    K and V are one array each, [num_blocks, block_size, num_kv_heads, head_dim], and nothing else may refer to
    their memory (no view is kept, nothing is passed to ``mx.async_eval``): MLX copies a whole array on a write
    when anything else holds its buffer.

    Attributes:
        layer: Shapes, element type and window.
        k_cache: Keys of every slot.
        v_cache: Values of every slot.
        num_reads: Attention calls that went through this layer since the step began.
        num_heads: Query heads of the last attention call, 0 before the first.
    """

    def __init__(self, layer: LayerKV, num_blocks: int, block_size: int) -> None:
        slots = (num_blocks, block_size, layer.num_kv_heads)
        self.layer = layer
        self.k_cache = mx.zeros((*slots, layer.k_head_dim), dtype=layer.dtype)
        self.v_cache = mx.zeros((*slots, layer.v_head_dim), dtype=layer.dtype)
        self.num_reads = 0
        self.num_heads = 0
        self._step: tuple[mx.array, AttentionMetadata] | None = None

    def begin_step(self, positions: mx.array, metadata: AttentionMetadata) -> None:
        """Serve the packed batch that ``metadata`` describes until `end_step`; ``positions`` is int32 [T]."""
        self.num_reads = 0
        self._step = (positions, metadata)

    def end_step(self) -> None:
        """Let go of everything that belongs to the step."""
        self._step = None

    @property
    def offset(self) -> mx.array:
        """Position of every packed row, int32 [T]: what RoPE reads."""
        return self._in_step()[0]

    @property
    def metadata(self) -> AttentionMetadata:
        """The packed batch in progress."""
        return self._in_step()[1]

    def _in_step(self) -> tuple[mx.array, AttentionMetadata]:
        if self._step is None:
            raise RuntimeError("no step is in progress: call the model through ModelRunner.forward")
        return self._step

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """The arrays of this layer, for ``mx.eval``."""
        return self.k_cache, self.v_cache


class PagedLayerCache(_LayerPool):
    """A layer cache whose attention is computed by a backend, straight from the block pool.

    Attributes:
        backend: Writes, reads and computes.
        taps: Called after each attention call, for whoever wants to see it.
    """

    def __init__(self, layer: LayerKV, num_blocks: int, block_size: int, backend: AttentionBackend) -> None:
        super().__init__(layer, num_blocks, block_size)
        self.backend = backend
        self.taps: list[Callable[[AttentionCall], None]] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Hand the new keys and values on; `attend` writes them before it reads."""
        return keys, values

    def make_mask(self, *_args: object, **_kwargs: object) -> None:
        """No mask: the backend knows every row's causal range and window."""
        return None

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
            softmax_scale: Factor of the logits.
            sinks: One logit per head that takes part in the softmax's sum and has no value.

        Returns:
            [T, num_heads, 1, head_dim].
        """
        self.num_reads += 1
        self.num_heads = queries.shape[1]
        window = self.layer.window
        rows = queries.squeeze(2), keys.squeeze(2), values.squeeze(2)
        out = self.backend.write_and_attend(
            *rows,
            self.k_cache,
            self.v_cache,
            self.metadata,
            softmax_scale=softmax_scale,
            window_size=(-1, -1) if window < 0 else (window - 1, 0),
            sinks=sinks,
        )
        if self.taps:
            caches = self.k_cache, self.v_cache
            call = AttentionCall(*rows, out, *caches, self.metadata, softmax_scale, window, sinks)
            for tap in list(self.taps):
                tap(call)
        return mx.expand_dims(out, 2)


class GatheredLayerCache(_LayerPool):
    """A layer cache that returns each row's context as plain arrays, for any model, slowly."""

    def __init__(self, layer: LayerKV, num_blocks: int, block_size: int, mask_ndim: int) -> None:
        super().__init__(layer, num_blocks, block_size)
        self.mask_ndim = mask_ndim

    def begin_step(self, positions: mx.array, metadata: AttentionMetadata) -> None:
        """Serve a packed batch; give every row its sequence's block table."""
        super().begin_step(positions, metadata)
        row_seq = np.repeat(np.arange(len(metadata.seqused_k)), np.diff(metadata.cu_seqlens_q))
        self._row_table = mx.array(metadata.block_table[row_seq])

    def end_step(self) -> None:
        """Let go of everything that belongs to the step."""
        super().end_step()
        self._row_table = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [T, num_kv_heads, 1, head_dim], return [T, num_kv_heads, longest context, head_dim]."""
        self.num_reads += 1
        self.k_cache[self.metadata.write_index] = keys.squeeze(2)
        self.v_cache[self.metadata.write_index] = values.squeeze(2)
        return self._fetch(self.k_cache), self._fetch(self.v_cache)

    def make_mask(self, _num_tokens: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        """Which gathered keys each row may see, bool [T, 1, ..., 1, longest context] of ``mask_ndim`` axes."""
        visible = self._visible(window_size if window_size is not None else self.layer.window)
        return mx.expand_dims(visible, tuple(range(1, self.mask_ndim - 1)))

    def _visible(self, window: int) -> mx.array:
        row = self.offset[:, None]
        column = mx.arange(self._row_table.shape[1] * self.metadata.block_size)[None, :]
        seen = column <= row
        return seen if window < 0 else seen & (column > row - window)

    def _fetch(self, cache: mx.array) -> mx.array:
        rows = cache[self._row_table].flatten(1, 2).swapaxes(1, 2)
        # Slots past a row's position may hold anything, NaN included, and 0 * NaN is NaN.
        return mx.where(self._visible(-1)[:, None, :, None], rows, mx.zeros((), rows.dtype))


class PagedKVCache:
    """The block pool of a whole model: one layer cache per layer.

    Attributes:
        layers: What to pass to the model as ``cache``.
        num_blocks: Blocks in the pool.
        block_size: Tokens per block.
        backend: What attends, None where the model does so itself.
    """

    def __init__(
        self,
        layers: Sequence[PagedLayerCache] | Sequence[GatheredLayerCache],
        backend: AttentionBackend | None = None,
    ) -> None:
        """See `for_kernel` and `for_gathering`."""
        self.layers = list(layers)
        self.backend = backend
        self.num_blocks, self.block_size = self.layers[0].k_cache.shape[:2]
        mx.eval(self.arrays)

    @classmethod
    def for_kernel(
        cls, layers: Sequence[LayerKV], num_blocks: int, block_size: int, backend: AttentionBackend
    ) -> PagedKVCache:
        """A pool that an attention backend reads and writes; needs `workbench.models.swap`."""
        return cls([PagedLayerCache(layer, num_blocks, block_size, backend) for layer in layers], backend)

    @classmethod
    def for_gathering(
        cls, layers: Sequence[LayerKV], num_blocks: int, block_size: int, mask_ndim: int = 4
    ) -> PagedKVCache:
        """A pool whose context is gathered for the model's own attention.

        Args:
            layers: One entry per cache the model uses.
            num_blocks: Blocks in the pool.
            block_size: Tokens per block.
            mask_ndim: Axes of the masks: 4 for MLX's attention, 5 where the model groups its query heads itself.
        """
        return cls([GatheredLayerCache(layer, num_blocks, block_size, mask_ndim) for layer in layers])

    @property
    def arrays(self) -> list[mx.array]:
        """Every K and V array, for ``mx.eval`` (never for ``mx.async_eval``)."""
        return [array for layer in self.layers for array in layer.state]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return bytes_per_block([layer.layer for layer in self.layers], self.block_size)

    def begin_step(self, positions: np.ndarray, metadata: AttentionMetadata) -> None:
        """Serve a packed batch: ``positions`` int32 [T]."""
        offset = mx.array(positions)
        for layer in self.layers:
            layer.begin_step(offset, metadata)

    def end_step(self) -> None:
        """Drop what the step left in the layers."""
        for layer in self.layers:
            layer.end_step()

    @property
    def reads(self) -> list[int]:
        """How often each layer was attended to in this step; 1 everywhere in a model that is served right."""
        return [layer.num_reads for layer in self.layers]


def bytes_per_block(layers: Sequence[LayerKV], block_size: int) -> int:
    """Bytes one block takes over all layers, keys and values."""
    return block_size * sum(layer.bytes_per_token for layer in layers)
