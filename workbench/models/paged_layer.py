"""A layer cache whose attention is computed by a backend, straight from the block pool."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from workbench.kernels.attention.backend import AttentionBackend
from workbench.kernels.attention.options import AttentionOptions
from workbench.kernels.attention.work_list import first_visible
from workbench.models.fetched import Fetched, RowPositions, Scores
from workbench.models.latents import Forms, HeadMatrices, LatentOutput, LatentQueries, Part, attend_expanded, forms_of
from workbench.models.layer_cache import AttentionCall, LayerCache, LayerKV, Memory, Tap


class PagedLayerCache(LayerCache):
    """A layer cache whose attention is computed by a backend, straight from the block pool.

    Attributes:
        backend: Writes, reads and computes.
        taps: Called in order after each attention call with new keys and values.
        reads_arithmetic: Whether the model's own arithmetic is read, see `workbench.models.patch.patch_model`.
        checks_masks: Compare every mask that the model passes with what the kernel lets a row see.
        wants_latent: Whether the model has asked for attention over latents.
        wants_masks: Whether it has passed a mask.
        expandable: The keys and values that the model could expand latents to, as its calls have shown them; None if
            they have not.
        expands_all: Expand the latents of every chunk, not only of those for which it pays.
    """

    def __init__(self, layer: LayerKV, memory: Memory, backend: AttentionBackend, group: int = 0) -> None:
        super().__init__(layer, memory, group)
        self.backend = backend
        self.taps: list[Tap] = []
        self.reads_arithmetic = self.checks_masks = self.wants_latent = self.wants_masks = False
        self.expandable: LayerKV | None = None
        self.expands_all = False
        self.start_position = 0
        self._options: AttentionOptions | None = None
        self._fetched: tuple[Fetched, Fetched] | None = None
        self._shapes: tuple[tuple[int, ...], tuple[int, ...]] = (), ()

    def end_step(self) -> None:
        """Drop everything that belongs to the step."""
        super().end_step()
        self._fetched = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the new keys and values, which know their layer; attention writes them before it reads."""
        self._shapes = keys.shape, values.shape
        self._fetched = Fetched(keys, self, True), Fetched(values, self, False)
        return self._fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Keys and values of this layer in this step, for a layer that shares them; written ones have no rows."""
        if self._fetched is None and not self.num_reads:
            raise RuntimeError("a layer reads keys and values of another one that has not run in this step")
        if self._fetched is not None:
            return self._fetched
        keys, values = (mx.broadcast_to(mx.zeros(1), shape) for shape in self._shapes)
        return Fetched(keys, self, True), Fetched(values, self, False)

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
        options = self._options_for(softmax_scale, softcap, sinks)
        if not own or not isinstance(keys, Fetched):
            return self.attend(queries, keys, values, options)
        if keys.transposed or not keys.are_keys or not isinstance(values, Fetched) or values.are_keys:
            raise NotImplementedError("the model's attention does not take a layer's keys as keys and values as values")
        if keys.tiles != values.tiles or (keys.tiles > 1 and sinks is not None):
            raise NotImplementedError("the model repeats the heads of keys and values in a way that a kernel cannot")
        out = self.attend(_with_neighbours(queries, keys.tiles), *(self._fetched or (keys, values)), options)
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
        rotated = rotary.queries * rotary.scale
        rows, options = mx.concatenate([latents, rotary_keys], axis=-1), self._options_for(1.0, 0.0, None)
        made_of = queries if isinstance(queries, LatentQueries) else None
        if made_of is not None and (forms := forms_of(self.metadata, self.layer, every_chunk=self.expands_all)):
            return self._attend_in_forms(forms, made_of, rotated, rows, softmax_scale, options)
        out = self.attend(mx.concatenate([queries * softmax_scale, rotated], axis=-1), rows, rows, options)
        if made_of is None:
            return out

        def values_by(matrices: HeadMatrices) -> mx.array:
            values, key_dim = matrices(out), made_of.rows.shape[-1] + rotated.shape[-1]
            self.expandable = LayerKV(self.num_heads, key_dim, values.shape[-1], made_of.rows.dtype)
            return values

        return LatentOutput(out, values_by)

    def _attend_in_forms(
        self,
        forms: Forms,
        queries: LatentQueries,
        rotated: mx.array,
        rows: mx.array,
        softmax_scale: float,
        options: AttentionOptions,
    ) -> mx.array:
        """Attention over latents of which those of some sequences are expanded, once the model asks for values."""
        absorbed, expanded = forms.absorbed, forms.expanded

        def query(part: Part) -> mx.array:
            latent = queries.matrices(queries.rows[part.mlx_rows]) * softmax_scale
            return mx.concatenate([latent, rotated[part.mlx_rows]], axis=-1).squeeze(2)

        if self.taps:  # they see all rows in the space of latents
            self.attend(mx.concatenate([queries * softmax_scale, rotated], axis=-1), rows, rows, options)
        else:
            self.num_reads += 1
            self.num_heads = queries.shape[1]
            self.backend.wait_for(queries.rows, rotated, rows)
            stored = rows.squeeze(2)
            self.backend.write(stored, stored, self.k_cache, self.v_cache, self.metadata)
            self._fetched = None

        def values_by(matrices: HeadMatrices) -> mx.array:
            chunk = mx.concatenate([queries.rows * softmax_scale, rotated], axis=-1)[expanded.mlx_rows].squeeze(2)
            by = self.backend, queries.matrices, matrices
            values = mx.expand_dims(attend_expanded(chunk, self.k_cache, expanded, self.layer, *by), 2)
            if not len(absorbed.rows):
                return forms.joined(values, values)
            out = self.backend.attend(query(absorbed), self.k_cache, self.v_cache, absorbed.metadata, options)
            return forms.joined(matrices(mx.expand_dims(out, 2)), values)

        # The model hands it to its matrices, as the preflight has seen. Anything else that it does gives no number.
        return LatentOutput(mx.full(queries.shape, mx.nan, queries.dtype), values_by)

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, options: AttentionOptions) -> mx.array:
        """Write this step's keys and values if that has not been done, then attend over each row's own sequence."""
        if self.num_reads and isinstance(keys, Fetched):
            out = self.backend.attend(queries.squeeze(2), self.k_cache, self.v_cache, self.metadata, options)
            return mx.expand_dims(out, 2)
        self.num_reads += 1
        self.num_heads = queries.shape[1]
        rows = queries.squeeze(2), keys.squeeze(2), values.squeeze(2)
        out = self.backend.write_and_attend(*rows, self.k_cache, self.v_cache, self.metadata, options)
        self._fetched = None  # the rows are in the pool: a step must not hold those of all layers
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
