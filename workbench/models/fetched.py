"""Keys and values that remember the layer they belong to, and what a model makes of them.

The context of a row lies in the block pool, so a model cannot compute with it. A paged layer cache gives the model the
keys and values of its new rows instead, as arrays that know their layer. Its use of them says how attention is
computed, and the layer computes it from the pool:

- a call of an attention function: with the keys of the same layer, or with those of an earlier one, which it shares;
- ``queries @ keys.swapaxes(-1, -2)`` are `Scores`, which may be multiplied, soft-capped, and added to other scores as
  the mask of a latent attention;
- their softmax are `Weights`, and ``weights @ values`` is the output.

Everything else that a model computes with such an array uses the new rows alone and gives other logits than the plain
model, which the preflight sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx
import numpy as np


class AttendingLayer(Protocol):
    """The layer that keys and values belong to, see `workbench.models.paged_layer.PagedLayerCache`."""

    reads_arithmetic: bool

    @property
    def offset(self) -> mx.array:
        """Position of every packed row."""

    def attention(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, softmax_scale: float, softcap: float = 0.0
    ) -> mx.array:
        """Attention over the layer's context."""


class Fetched(mx.array):
    """New keys or values of a layer, [T, num_kv_heads, 1, dim], or a view of them that a model has made.

    Attributes:
        layer: The cache that they belong to.
        are_keys: Whether they are keys.
        transposed: Whether the last two axes are exchanged.
        tiles: Number of times that all heads are repeated, one after another: query head h then uses head
            h % num_kv_heads instead of neighbouring heads sharing one.
    """

    def __init__(
        self, array: mx.array, layer: AttendingLayer, are_keys: bool, transposed: bool = False, tiles: int = 1
    ) -> None:
        super().__init__(array)
        self.layer, self.are_keys, self.transposed, self.tiles = layer, are_keys, transposed, tiles

    def _with(self, array: mx.array, **changes: Any) -> Fetched:
        same = {"transposed": self.transposed, "tiles": self.tiles}
        return Fetched(array, self.layer, self.are_keys, **{**same, **changes})

    @property
    def shape(self) -> Any:
        """Sizes of the axes; that of the positions is an array, the length of each row's context.

        A number would not be true of all rows. A model that decides by it fails, and is not served so.
        """
        sizes: list[Any] = list(super().shape)
        if self.layer.reads_arithmetic:
            sizes[-1 if self.transposed else -2] = self.layer.offset + 1
        return tuple(sizes)

    def swapaxes(self, axis1: int, axis2: int, **options: Any) -> mx.array:
        """See `mx.swapaxes`; exchanging the last two axes keeps the layer."""
        swapped = super().swapaxes(axis1, axis2, **options)
        last_two = {axis1 % self.ndim, axis2 % self.ndim} == {self.ndim - 2, self.ndim - 1}
        return self._with(swapped, transposed=not self.transposed) if last_two else swapped

    def transpose(self, *axes: Any, **options: Any) -> mx.array:
        """See `mx.transpose`; exchanging the last two axes keeps the layer."""
        order = [axis % self.ndim for axis in (axes[0] if axes and isinstance(axes[0], list | tuple) else axes)]
        if order == [*range(self.ndim - 2), self.ndim - 1, self.ndim - 2]:
            return self.swapaxes(-1, -2)
        return super().transpose(*axes, **options)

    def astype(self, dtype: mx.Dtype, stream: Any = None) -> mx.array:
        """See `mx.array.astype`: rows are stored in the pool's type whatever the model computes in."""
        return self._with(super().astype(dtype, stream=stream))

    def as_rows(self) -> Fetched:
        """The same keys or values as the layer gave them, without the views that a model has made."""
        return self._with(mx.array(self), transposed=False)

    def expand_dims(self, axis: Any, **options: Any) -> mx.array:
        """See `mx.expand_dims`; an axis that broadcasts over the query heads of a KV head keeps the layer."""
        expanded = mx.expand_dims(mx.array(self), axis, **options)
        grouped = isinstance(axis, int) and self.ndim == 4 and axis in (2, -3) and self.tiles == 1
        return self._with(expanded) if grouped else expanded

    def tile(self, reps: Any, **options: Any) -> mx.array:
        """See `mx.tile`; repeating all heads keeps the layer."""
        tiled = mx.tile(mx.array(self), reps, **options)
        heads = isinstance(reps, list | tuple) and self.ndim == 4 and list(reps) == [1, reps[1], 1, 1]
        return self._with(tiled, tiles=self.tiles * reps[1]) if heads else tiled

    def __rmatmul__(self, queries: Any) -> Any:
        """``queries @ keys``: scores if the keys are transposed, and there is one query per row."""
        if self.transposed and isinstance(queries, mx.array) and queries.shape[-2] == 1:
            return Scores(queries, self)
        return mx.matmul(queries, mx.array(self))


@dataclass(frozen=True)
class Scores:
    """The scores of some queries: ``outer * cap(inner * queries @ keys)``, where ``cap`` is tanh or nothing.

    Attributes:
        queries: [T, num_heads, 1, dim], or grouped by KV head, [T, num_kv_heads, heads, 1, dim].
        keys: The layer's keys, or its values.
        inner: Factor before the cap.
        outer: Factor after it, 1 without a cap.
        capped: Whether tanh was applied.
    """

    queries: mx.array
    keys: Fetched
    inner: float = 1.0
    outer: float = 1.0
    capped: bool = False

    @property
    def dtype(self) -> mx.Dtype:
        """Element type of the scores."""
        return self.queries.dtype

    @property
    def scale(self) -> float:
        """Factor on the products."""
        return self.inner * self.outer

    @property
    def softcap(self) -> float:
        """The soft cap, 0 for none."""
        return self.outer if self.capped else 0.0

    def __mul__(self, factor: Any) -> Scores:
        """Scores times a number."""
        factor = _number(factor)
        if self.capped:
            return replace(self, outer=self.outer * factor)
        return replace(self, inner=self.inner * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Scores:
        """Scores divided by a number."""
        return self * (1.0 / _number(divisor))

    def __add__(self, mask: Any) -> Scores:
        """Scores plus a mask."""
        raise NotImplementedError("the model adds a mask to its scores, which a paged kernel does not take")

    __radd__ = __add__

    def astype(self, _dtype: mx.Dtype) -> Scores:
        """The same scores: the kernel sums in float32."""
        return self

    def tanh(self) -> Scores:
        """``tanh(scores)``, the middle of a soft cap."""
        if self.capped:
            raise NotImplementedError("the model caps its scores twice, which a paged kernel does not do")
        return replace(self, capped=True)

    def softmax(self, axis: Any = None, **_options: Any) -> Weights:
        """``softmax(scores)`` over all keys."""
        if axis not in (-1, [-1], (-1,), self.queries.ndim - 1):
            raise NotImplementedError(f"the model's softmax is over axis {axis}; that of a paged kernel over the last")
        return Weights(self)


def _number(value: Any) -> float:
    """A factor of scores as a number.

    Raises:
        NotImplementedError: It is not one number that is finite and positive.
    """
    if isinstance(value, int | float | np.floating) and math.isfinite(value) and value > 0:
        return float(value)
    raise NotImplementedError(f"the model multiplies its scores by {value!r}; a paged kernel takes a positive number")


@dataclass(frozen=True)
class Weights:
    """The softmax of scores.

    Attributes:
        scores: The scores.
    """

    scores: Scores

    @property
    def dtype(self) -> mx.Dtype:
        """Element type of the weights."""
        return self.scores.dtype

    def astype(self, _dtype: mx.Dtype) -> Weights:
        """The same weights: the kernel sums in float32."""
        return self

    def __matmul__(self, values: Any) -> mx.array:
        """``weights @ values``: the attention of the layer that the values belong to.

        Raises:
            NotImplementedError: They are not the values of the layer whose keys gave the scores.
        """
        scores, keys = self.scores, self.scores.keys
        if not isinstance(values, Fetched) or values.layer is not keys.layer or values.transposed or values.are_keys:
            raise NotImplementedError("the model's weights are not multiplied by the values of the same layer")
        if not keys.are_keys:
            raise NotImplementedError("the model's scores are products with values, which a paged kernel does not take")
        queries = scores.queries
        rows = queries.flatten(1, -3), keys.as_rows(), values.as_rows()
        out = keys.layer.attention(*rows, softmax_scale=scores.scale, softcap=scores.softcap)
        return out.reshape(*queries.shape[:-1], out.shape[-1])


class RowPositions(mx.array):
    """The position of each packed row, int32 [T], or a sum of it and a number."""

    def __init__(self, array: mx.array, num_positions: int) -> None:
        super().__init__(array)
        self.num_positions = num_positions

    def __add__(self, number: Any) -> Any:
        """Positions moved by a number."""
        moved = mx.array(self) + number
        return RowPositions(moved, self.num_positions) if isinstance(number, int) else moved

    __radd__ = __add__

    def __sub__(self, number: Any) -> Any:
        """Positions moved back by a number."""
        moved = mx.array(self) - number
        return RowPositions(moved, self.num_positions) if isinstance(number, int) else moved


def positions_between(start: Any, stop: Any, num_axes: int) -> mx.array:
    """``arange(start, stop)`` for a model that has one sequence in mind, where one of them is `RowPositions`.

    From a row's position to the next, it is the position, with the rows as the first of some axes. From 0, it is all
    positions that the pool's tables hold, [num_positions], of which the model masks what it must not see.

    Args:
        start: First position.
        stop: End of the positions.
        num_axes: Number of axes: 2 for [T, 1], as tokens have; 3 for [T, 1, 1], from which ``[:, None]`` makes a factor
            of queries, [T, 1, 1, 1].
    """
    if isinstance(start, RowPositions):
        return mx.array(start).reshape(-1, *[1] * (num_axes - 1))
    return mx.arange(start, stop.num_positions)
