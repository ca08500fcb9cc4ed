"""The interface of the ways through a model, and what all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import mlx.nn as nn
import msgspec

from workbench.attention.backend import AttentionBackend
from workbench.attention.dtypes import dtype_name
from workbench.config import EngineConfig
from workbench.engine.packed_batch import PackedBatch
from workbench.engine.sampler import Logits
from workbench.models.final_norm import FinalNorm
from workbench.models.paged_cache import PagedKVCache
from workbench.models.preflight import PreflightResult
from workbench.models.remembered import NOTHING, Remembered
from workbench.trace.records import KernelLaunch

ForwardOutput = tuple[Logits, KernelLaunch]
"""Logits of the rows that sample, evaluated, and the launch of the attention kernel."""


class ForwardPath(ABC):
    """A way through the model.

    Attributes:
        name: Its name, in records and in `Engine.describe`.
    """

    name: ClassVar[str]

    @abstractmethod
    def run(self, packed: PackedBatch) -> ForwardOutput:
        """Run the model once on a packed batch; its keys and values are in the pool afterwards.

        Returns:
            Logits of ``packed.logits_rows`` in their order, and the launch, whose ``details`` have the path's name as
            "forward"; or, if a slower one was taken in this step, that one's, and the reason as "forward_reason".
        """


class ChosenPath(ForwardPath):
    """A way through the model that an engine may choose at load."""

    @classmethod
    @abstractmethod
    def make(cls, served: ServedModel) -> Self | str:
        """The path for a model, or why the model cannot take it."""

    def check(self, packed: PackedBatch) -> None:
        """Refuse a batch that this path cannot run, before anything is changed.

        Raises:
            ValueError: The message says what to lower.
        """


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
        computes_all: Compute the whole model in a step that samples nothing too, for a model whose layers wait for
            other processes.
    """

    model: nn.Module
    preflight: PreflightResult
    kv_cache: PagedKVCache
    backend: AttentionBackend
    final_norm: FinalNorm | None
    config: EngineConfig
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
            head_dim=layers[0].k_head_dim if layers else 0,
            dtype=dtype_name(layers[0].dtype) if layers else "",
        )

    def launch(self, packed: PackedBatch, details: Mapping[str, str]) -> KernelLaunch:
        """The launch of a step's attention, for its record."""
        same = self._launch
        if self.preflight.mode == "gather" or not self.preflight.layers:
            return msgspec.structs.replace(same, details={"reason": self.preflight.reason, **details})
        launch = self.backend.describe(
            packed.metadata[0],
            # Backends count a window as flash-attn does: the tokens to the left, without the token itself.
            windows=tuple(window - 1 if window > 0 else -1 for window in same.windows),
            num_heads=same.num_heads,
            num_kv_heads=same.num_kv_heads,
            head_dim=same.head_dim,
            dtype=same.dtype,
        )
        return msgspec.structs.replace(launch, windows=same.windows, details={**launch.details, **details})
