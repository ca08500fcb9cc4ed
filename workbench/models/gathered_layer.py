"""A layer cache for models whose attention does its own arithmetic: it returns each row's whole context, gathered."""

from __future__ import annotations

import mlx.core as mx

from workbench.kernels.attention.stored import from_stored, to_stored
from workbench.models.layer_cache import LayerCache, LayerKV, Memory


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
