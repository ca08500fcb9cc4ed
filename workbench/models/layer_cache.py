"""The cache that each layer of an unmodified mlx-lm model is given.

Every token of the packed batch is a batch row: the model is called on tokens [T, 1], so ``mx.fast.rope`` takes one
position per row (``offset``) and any mix of prompt chunks and decodes is one call. A layer hands its new keys and
values, [T, num_kv_heads, 1, head_dim], to ``update_and_fetch``; the metadata of the step says where the pool keeps
them.

Two kinds of layer cache share that protocol. `PagedLayerCache` leaves reading and writing to an attention backend,
which it calls in `attend` (see `workbench.models.patch`). `workbench.models.gathered_layer` needs no change in the
model at all: it writes the rows and returns each row's whole context, gathered. That takes T times the longest context
of memory, and is for models whose attention does arithmetic that `workbench.models.fetched` does not know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from workbench.kernels.attention.backend import AttentionBackend
from workbench.kernels.attention.metadata import AttentionMetadata
from workbench.kernels.attention.options import AttentionOptions
from workbench.kernels.attention.stored import stored_dim
from workbench.kernels.attention.work_list import first_visible
from workbench.models.fetched import Fetched, RowPositions, Scores


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
        masked: Whether the model passes masks of its own; they say what the kernel does anyway, as the preflight has
            checked.
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


class PagedLayerCache(LayerCache):
    """A layer cache whose attention is computed by a backend, straight from the block pool.

    Attributes:
        backend: Writes, reads and computes.
        taps: Called in order after each attention call with new keys and values.
        reads_arithmetic: Whether the model's own arithmetic is read, see `workbench.models.patch.patch_model`.
        checks_masks: Compare every mask that the model passes with what the kernel lets a row see.
        wants_latent: Whether the model has asked for attention over latents.
        wants_masks: Whether it has passed a mask.
    """

    def __init__(self, layer: LayerKV, memory: Memory, backend: AttentionBackend, group: int = 0) -> None:
        super().__init__(layer, memory, group)
        self.backend = backend
        self.taps: list[Tap] = []
        self.reads_arithmetic = self.checks_masks = self.wants_latent = self.wants_masks = False
        self.start_position = 0
        self._options: AttentionOptions | None = None
        self._fetched: tuple[Fetched, Fetched] | None = None

    def end_step(self) -> None:
        """Drop everything that belongs to the step."""
        super().end_step()
        self._fetched = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the new keys and values, which know their layer; attention writes them before it reads."""
        self._fetched = Fetched(keys, self, True), Fetched(values, self, False)
        return self._fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` has returned in this step, for a layer that shares it."""
        if self._fetched is None:
            raise RuntimeError("a layer reads keys and values of another one that has not run in this step")
        return self._fetched

    def make_mask(self, *_args: object, **_kwargs: object) -> None:
        """No mask: the backend knows every row's causal range and window."""

    def maybe_trim_front(self) -> None:
        """Nothing to trim: the backend knows the chunk of every row."""

    @property
    def offset(self) -> mx.array:
        """Position of every packed row, int32 [T]: what RoPE reads."""
        step = self._current
        if not self.reads_arithmetic:
            return step.positions
        return RowPositions(step.positions, step.metadata.block_table.shape[1] * step.metadata.block_size)

    def attention(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        softmax_scale: float,
        softcap: float = 0.0,
        mask: Any = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention as the model asks for it.

        Args:
            queries: [T, num_heads, 1, head_dim].
            keys: Those of this layer, or others made of them, [T, num_kv_heads, 1, head_dim].
            values: Likewise.
            softmax_scale: Scale of the logits.
            softcap: Soft cap of the logits, 0 for none.
            mask: The model's mask; for latents, the `Scores` of the rotary part.
            sinks: One logit per head that counts in the softmax's sum and has no value, [num_heads], or None.

        Returns:
            [T, num_heads, 1, value_dim].

        Raises:
            NotImplementedError: The model asks for something that a paged kernel does not do.
        """
        own = isinstance(keys, Fetched) and isinstance(values, Fetched) and keys.layer is values.layer is self
        if isinstance(mask, Scores):
            if not own:
                raise NotImplementedError("the model's attention adds scores of keys that are not its own layer's")
            return self._attend_to_latents(queries, keys, values, mask, softmax_scale)
        if mask is not None:
            self._check_mask(mask)
        if self.layer.latent:
            raise NotImplementedError("the model's attention is not over latents in all calls of a layer")
        asked = {"softmax_scale": softmax_scale, "softcap": softcap, "sinks": sinks}
        if not own or not isinstance(keys, Fetched) or self._fetched is None:
            return self.attend(queries, keys, values, **asked)
        if keys.transposed or not keys.are_keys or not isinstance(values, Fetched) or values.are_keys:
            raise NotImplementedError("the model's attention does not take a layer's keys as keys and values as values")
        if keys.tiles != values.tiles or (keys.tiles > 1 and sinks is not None):
            raise NotImplementedError("the model repeats the heads of keys and values in a way that a kernel cannot")
        out = self.attend(_with_neighbours(queries, keys.tiles), *self._fetched, **asked)
        return out if keys.tiles == 1 else _with_neighbours(out, out.shape[1] // keys.tiles)

    def _attend_to_latents(
        self, queries: mx.array, keys: mx.array, values: mx.array, rotary: Scores, softmax_scale: float
    ) -> mx.array:
        """Attention over latents: keys are latents and rotary parts side by side, and values are latents."""
        if self._fetched is None or keys is not self._fetched[0] or values is not keys:
            raise NotImplementedError("the model adds scores to those of keys that are not the latents it attends to")
        if rotary.keys.layer is not self or rotary.keys.are_keys or rotary.capped:
            raise NotImplementedError("the scores that the model adds are not products with its rotary keys")
        self.wants_latent = True
        if not self.layer.latent:
            raise NotImplementedError("the model's attention is over latents, and the pool keeps keys and values")
        latents, rotary_keys = self._fetched
        whole = mx.concatenate([queries * softmax_scale, rotary.queries * rotary.scale], axis=-1)
        rows = mx.concatenate([latents, rotary_keys], axis=-1)
        return self.attend(whole, rows, rows, softmax_scale=1.0)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        softmax_scale: float,
        softcap: float = 0.0,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Write this step's keys and values if that has not been done, then attend over each row's own sequence.

        Args:
            queries: [T, num_heads, 1, head_dim].
            keys: [T, num_kv_heads, 1, head_dim].
            values: [T, num_kv_heads, 1, value_dim].
            softmax_scale: Scale of the logits.
            softcap: Soft cap of the logits, 0 for none.
            sinks: One logit per head that counts in the softmax's sum and has no value, [num_heads], or None.

        Returns:
            [T, num_heads, 1, value_dim].
        """
        options = self._options_for(softmax_scale, softcap, sinks)
        if self.num_reads and isinstance(keys, Fetched):
            out = self.backend.attend(queries.squeeze(2), self.k_cache, self.v_cache, self.metadata, options)
            return mx.expand_dims(out, 2)
        self.num_reads += 1
        self.num_heads = queries.shape[1]
        rows = queries.squeeze(2), keys.squeeze(2), values.squeeze(2)
        out = self.backend.write_and_attend(*rows, self.k_cache, self.v_cache, self.metadata, options)
        if self.taps:
            value_rows = rows[2][..., : self.layer.value_dim]
            call = AttentionCall(*rows[:2], value_rows, out, self.k_cache, self.v_cache, self.metadata, options)
            for tap in list(self.taps):
                tap(call)
        return mx.expand_dims(out, 2)

    def _options_for(self, softmax_scale: float, softcap: float, sinks: mx.array | None) -> AttentionOptions:
        """The layer's options; those of the last call if nothing has changed, because checking them takes a while."""
        options = self._options
        if (
            options is None
            or options.softmax_scale != softmax_scale
            or options.softcap != softcap
            or options.sinks is not sinks
        ):
            layer = self.layer
            options = AttentionOptions(
                softmax_scale,
                (max(layer.kernel_reach, -1), 0),
                softcap,
                sinks,
                layer.chunk_size,
                layer.value_dim if layer.latent else 0,
            )
            self._options = options
        return options

    def _check_mask(self, mask: Any) -> None:
        """Check that a mask of the model says what the kernel does anyway.

        Raises:
            NotImplementedError: It does not, or the preflight has not seen the model pass one.
        """
        self.wants_masks = True
        if not self.layer.masked or not isinstance(mask, mx.array):
            raise NotImplementedError("the model's attention passes a mask, which a paged kernel does not take")
        if not self.checks_masks:
            return
        positions = np.array(self._current.positions)
        visible = np.array(mask if mask.dtype == mx.bool_ else mask > mx.finfo(mask.dtype).min / 2)
        if visible.size % len(positions) or visible.size // len(positions) != visible.shape[-1]:
            raise NotImplementedError(f"the model's attention passes a mask of shape {mask.shape}, not one row of keys")
        keys, rows = np.arange(visible.shape[-1]), positions[:, None]
        expected = (keys <= rows) & (keys >= first_visible(rows, self.layer.kernel_reach))
        if not np.array_equal(visible.reshape(len(positions), -1), expected) or keys.size <= positions.max():
            raise NotImplementedError(
                "the model's attention passes a mask that is not causal, of a window or of chunks"
            )


def _with_neighbours(rows: mx.array, count: int) -> mx.array:
    """Rows whose heads h, h + num_heads / count, ... become neighbours, [T, num_heads, 1, dim]."""
    if count == 1:
        return rows
    num_rows, num_heads, one, dim = rows.shape
    return rows.reshape(num_rows, count, num_heads // count, one, dim).swapaxes(1, 2).reshape(rows.shape)
