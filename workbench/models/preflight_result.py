"""The way to serve a model, as the preflight found it, and the errors that rounding explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx

from workbench.models.layer_cache import LayerKV
from workbench.models.paged_cache import CacheSpec, flat_caches
from workbench.models.state_cache import LayerState

TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2, mx.int8: 5e-2}
"""Largest error of a typical row of logits that rounding explains, by the KV cache's dtype: root mean square, relative
to the logits' spread. One row may be ten times worse, because a mixture of experts may choose another expert at a near
tie."""
TOLERANCE_FLOAT32_GPU = 5e-3
"""GPUs multiply float32 matrices in TF32, and differently for a few rows than for many."""


@dataclass(frozen=True)
class PreflightResult:
    """The way to serve a model, and the evidence for it.

    Attributes:
        mode: "kernel" if an attention backend reads the block pool itself, "gather" if the model's own attention is
            given gathered context.
        layers: Shape and type of the keys and values of each layer that keeps some.
        num_heads: Number of query heads, 0 in mode "gather".
        final_norm: Dotted name of the norm that selects the rows for the head; None if there is none, and all rows
            are projected.
        max_error: Error of the worst row of logits against the plain model: root mean square, relative to the
            spread of the logits.
        control_error: Error of a typical row with positions shifted by 3: that of a wrong path.
        reason: Why the mode is not "kernel"; empty if it is.
        mask_ndim: Axes of the masks that the model's own attention takes in mode "gather", 0 in mode "kernel".
        entries: Contents of each entry of the model's cache argument, if some are not one of ``layers``.
        reads_arithmetic: Whether the model's classes compute attention, or positions, by themselves, in a way that mode
            "kernel" reads (`workbench.models.fetched`).
    """

    mode: Literal["kernel", "gather"]
    layers: tuple[LayerKV, ...]
    num_heads: int
    final_norm: str | None
    max_error: float
    control_error: float
    reason: str = ""
    mask_ndim: int = 0
    entries: tuple[CacheSpec, ...] = ()
    reads_arithmetic: bool = False

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """Contents of each entry of the model's cache argument."""
        return self.entries or self.layers

    @property
    def states(self) -> tuple[LayerState, ...]:
        """Shapes and types of the state of each recurrent layer."""
        return tuple(one for one in flat_caches(self.caches) if isinstance(one, LayerState))

    @property
    def expands_latents(self) -> bool:
        """Whether a layer expands the latents of long chunks."""
        return any(layer.expanded is not None for layer in self.layers)

    @property
    def without_expansion(self) -> PreflightResult:
        """The same way, with the latents of no chunk expanded."""

        def plain(spec: Any) -> Any:
            if isinstance(spec, tuple):
                return tuple(map(plain, spec))
            return replace(spec, expanded=None) if isinstance(spec, LayerKV) else spec

        return replace(self, layers=plain(self.layers), entries=plain(self.entries))

    @property
    def bound(self) -> float:
        """Largest error of a typical row of logits that rounding explains, in units of `max_error`."""
        return error_bound(self.caches)

    @property
    def num_layers(self) -> int:
        """Number of layers that keep keys and values."""
        return len(self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """Sliding window of each layer, -1 for full attention."""
        return tuple(layer.window for layer in self.layers)


def error_bound(caches: Sequence[CacheSpec]) -> float:
    """Largest error of a typical row of logits that rounding explains, by the types that the caches store."""
    flat = flat_caches(caches)
    dtypes = [dtype for one in flat for dtype in (one.dtypes if isinstance(one, LayerState) else (one.dtype,))]
    bound = max(TOLERANCE.get(dtype, 0.0) for dtype in dtypes)
    return bound if mx.default_device() == mx.cpu else max(bound, TOLERANCE_FLOAT32_GPU)
