"""The arguments of attention that belong to a layer of the model rather than to the batch of a step.

The positions that a row sees are one number, its *reach*, in all that follows from the options (work lists, plans,
kernels): -1 for all positions, a left window as in flash-attn from 0 on, and -n for chunks of n positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Scale, window, soft cap, sinks and sizes of a layer, under the names that flash-attn and vLLM have for them.

    >>> AttentionOptions(0.125, window_size=(4095, 0)).left_window
    4095

    Attributes:
        softmax_scale: Factor on q · k.
        window_size: (left, right) as in flash-attn. A row at position p sees [p - left, p], or [0, p] when left is -1.
            Attention is causal, so right is 0 or -1 and both mean the same.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0 turns it off.
        sinks: Attention sinks, [num_heads]: a score per head that takes part in the softmax but has no value. None for
            a layer without sinks.
        chunk_size: Chunked attention: a row at position p sees [p - p % chunk_size, p]; 0 turns it off.
        value_dim: Latent attention: a value is the first value_dim elements of its key, and both caches are the same
            array; 0 if values are stored by themselves.

    Raises:
        ValueError: A number is outside its range.
    """

    softmax_scale: float
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: mx.array | None = None
    chunk_size: int = 0
    value_dim: int = 0

    def __post_init__(self) -> None:
        if not _is_finite(self.softmax_scale):
            raise ValueError(f"softmax_scale is {self.softmax_scale!r}; it must be finite")
        if not (_is_finite(self.softcap) and self.softcap >= 0):
            raise ValueError(f"softcap is {self.softcap}; it must be finite and at least 0 (0 turns it off)")
        if len(self.window_size) != 2 or not all(isinstance(side, int | np.integer) for side in self.window_size):
            raise ValueError(f"window_size is {self.window_size!r}; it must be two integers, (left, right)")
        left, right = self.window_size
        if left < -1:
            raise ValueError(f"window_size has left {left}; it must be at least 0, or -1 for no window")
        if right not in (0, -1):
            raise ValueError(f"window_size has right {right}; it must be 0 or -1: attention is causal")
        if not isinstance(self.chunk_size, int | np.integer) or self.chunk_size < 0 or self.chunk_size == 1:
            raise ValueError(f"chunk_size is {self.chunk_size!r}; it must be at least 2, or 0 for no chunks")
        if self.chunk_size and left >= 0:
            raise ValueError(f"chunk_size is {self.chunk_size} and the window {left}; only one of them can be given")
        if not isinstance(self.value_dim, int | np.integer) or self.value_dim < 0:
            raise ValueError(
                f"value_dim is {self.value_dim!r}; it must be at least 1, or 0 if values are stored by themselves"
            )
        object.__setattr__(self, "softmax_scale", float(self.softmax_scale))
        object.__setattr__(self, "softcap", float(self.softcap))

    @cached_property
    def arguments(self) -> tuple[float, int, float]:
        """Scale, reach and soft cap: layers in which they are equal can share all of a launch but its arrays."""
        return self.softmax_scale, self.reach, self.softcap

    @property
    def reach(self) -> int:
        """The positions that a row sees: a left window, -1 for all, or -n for chunks of n."""
        return -self.chunk_size if self.chunk_size else self.left_window

    @property
    def left_window(self) -> int:
        """Number of positions before its own that a row sees; -1 for all of them."""
        return self.window_size[0]


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):  # not a number, or an integer that no float can hold
        return False
