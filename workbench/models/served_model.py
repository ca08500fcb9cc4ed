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
from workbench.models.latents import Forms, forms_of
from workbench.models.layer_cache import LayerKV
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
        forms = forms_of(metadata, layers[0])
        launch = self._described(metadata, layers[0]) if forms is None else self._described_in_forms(forms)
        return msgspec.structs.replace(launch, windows=same.windows, details={**launch.details, **details})

    def _described(self, metadata: AttentionMetadata, layer: LayerKV) -> KernelLaunch:
        """The launch of a batch for layers that are like one."""
        return self.backend.describe(
            metadata,
            # Backends count a window as flash-attn does: the tokens to the left, without the token itself.
            windows=tuple(one.kernel_reach for one in self.preflight.layers[: len(self._launch.windows)]),
            num_heads=self.preflight.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.key_dim,
            dtype=dtype_name(layer.dtype),
            value_dim=layer.value_dim,
        )

    def _described_in_forms(self, forms: Forms) -> KernelLaunch:
        """The launches of a batch whose latents are expanded for some sequences, as one.

        Sizes are those of the latents, if any rows attend to them. The work items are those of all launches.
        """
        layer, part = self.preflight.layers[0], forms.expanded
        made = layer.expanded
        assert made is not None
        described = [(part, self._described(part.compact[1], made))]
        if len(forms.absorbed.rows):
            described.insert(0, (forms.absorbed, self._described(forms.absorbed.metadata, layer)))
        items = [
            msgspec.structs.replace(item, seq=int(of.sequences[item.seq]), q_start=int(of.rows[item.q_start]))
            for of, launch in described
            for item in launch.work_items
        ]
        return msgspec.structs.replace(
            described[0][1],
            block_q=max(launch.block_q for _, launch in described),
            work_items=tuple(sorted(items, key=lambda item: (item.seq, item.q_start, item.split))),
            details={
                **described[0][1].details,
                "expanded_sequences": len(part.sequences),
                "expanded_rows": len(part.rows),
            },
        )
