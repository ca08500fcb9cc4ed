"""A model over its pool, and the launch of its attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import mlx.nn as nn
import msgspec

from workbench.config import EngineConfig
from workbench.kernels.attention.backend import AttentionBackend
from workbench.kernels.attention.dtypes import dtype_name
from workbench.kernels.attention.metadata import AttentionMetadata
from workbench.models.adapters import Adapters
from workbench.models.final_norm import FinalNorm
from workbench.models.paged_cache import PagedKVCache
from workbench.models.preflight_result import PreflightResult
from workbench.models.remembered import NOTHING, Remembered
from workbench.trace.records import KernelLaunch


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model over its pool, as all ways through it need it.

    Attributes:
        model: The mlx-lm model, patched for the pool.
        preflight: The way in which its attention is served.
        kv_cache: The block pool.
        backend: The attention backend.
        final_norm: Selects the rows before the head; None to project all rows.
        config: The configuration of the pool.
        remembered: Comparisons that were passed in an earlier start.
        adapters: The adapters (LoRA) of requests.
        computes_all: Compute the whole model in a step that samples nothing too, for a model whose layers wait for
            other processes.
    """

    model: nn.Module
    preflight: PreflightResult
    kv_cache: PagedKVCache
    backend: AttentionBackend
    final_norm: FinalNorm | None
    config: EngineConfig
    adapters: Adapters
    remembered: Remembered = NOTHING
    computes_all: bool = False

    @cached_property
    def _launch(self) -> KernelLaunch:
        """The part of a launch that is the same in every step."""
        layers, windows = self.preflight.layers, self.preflight.windows
        return KernelLaunch(
            backend="model",
            windows=windows if len(set(windows)) > 1 else windows[:1],
            num_heads=self.preflight.num_heads,
            num_kv_heads=layers[0].num_kv_heads if layers else 0,
            head_dim=layers[0].key_dim if layers else 0,
            dtype=dtype_name(layers[0].dtype) if layers else "",
        )

    def launch(self, metadata: AttentionMetadata, details: Mapping[str, str]) -> KernelLaunch:
        """The launch of a step's attention, for its record."""
        same, layers = self._launch, self.preflight.layers
        if self.preflight.mode == "gather" or not self.preflight.layers:
            return msgspec.structs.replace(same, details={"reason": self.preflight.reason, **details})
        launch = self.backend.describe(
            metadata,
            # Backends count a window as flash-attn does: the tokens to the left, without the token itself.
            windows=tuple(layer.kernel_reach for layer in layers[: len(same.windows)]),
            num_heads=same.num_heads,
            num_kv_heads=same.num_kv_heads,
            head_dim=same.head_dim,
            dtype=same.dtype,
            value_dim=layers[0].value_dim,
        )
        return msgspec.structs.replace(launch, windows=same.windows, details={**launch.details, **details})
