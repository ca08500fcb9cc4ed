"""The whole model in compiled code, on a CPU."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Self

import mlx.core as mx

from workbench.engine.forward.layer_by_layer import LayerByLayer
from workbench.engine.forward.path import SLICE_BYTES, ChosenPath, ForwardOutput, SlicedLogits
from workbench.engine.packed_batch import PackedBatch
from workbench.engine.sampler import Logits
from workbench.models.adapters import AdapterTables
from workbench.models.served_model import ServedModel

if TYPE_CHECKING:
    from workbench.models.packed.compiled_step import CompiledStep


class CompiledPath(ChosenPath):
    """Runs packed weights in compiled code, if its logits equal those of the model's own layers.

    Args:
        served: The model.
        step: Its compiled code.
    """

    name, projects_in_slices = "compiled", True

    def __init__(self, served: ServedModel, step: CompiledStep) -> None:
        self._served, self.step, self._slice_rows = served, step, SLICE_BYTES // (4 * step.vocab_size)

    @classmethod
    def make(cls, served: ServedModel) -> Self | str:
        """See `ChosenPath.make`."""
        if not any(hasattr(module, "num_packed_weights") for module in served.model.modules()):
            return "its weights are not packed"
        if served.preflight.states:
            return "it has recurrent layers"
        from workbench.models.packed.step_check import make_compiled_step

        step, reason = make_compiled_step(served.model, served.preflight, served.kv_cache, served.remembered)
        return cls(served, step) if step is not None else reason

    def let_go_of_memory(self) -> None:
        """See `ChosenPath.let_go_of_memory`."""
        self.step.let_go_of_memory()

    def run(self, packed: PackedBatch, adapters: AdapterTables | None = None) -> ForwardOutput:
        """See `ForwardPath.run`; ``adapters`` are those of the batch, if it has any."""
        if (packed.adapters and adapters is None) or len(packed.logits_rows) > self._slice_rows:
            return self._run_apart(packed, adapters)
        values = self.step.run(
            packed.token_ids, packed.positions, packed.logits_rows, *packed.metadata, adapters=adapters
        )
        return Logits.of(values), self._served.launch(packed.metadata[0], {"forward": self.name})

    def _run_apart(self, packed: PackedBatch, adapters: AdapterTables | None) -> ForwardOutput:
        """A step with adapters; or with many rows, which are projected in slices, unless so many may be sampled."""
        if packed.adapters and adapters is None:
            return self._run_with_adapters(packed)
        rows = packed.logits_rows
        size = max(self._slice_rows, len(packed.seqused_k) * (1 + self._served.config.num_speculative_tokens))
        slices = self.step.run_in_slices(
            size, packed.token_ids, packed.positions, rows, *packed.metadata, adapters=adapters
        )
        first = next(slices)
        if len(first) == len(rows):
            logits = Logits.of(first)
        else:  # chain() keeps its arguments, and a part of an array the whole: neither may hold the first slice
            logits = SlicedLogits(mx.zeros((0, self.step.vocab_size)), [], slices=chain(iter([first]), slices))
        return logits, self._served.launch(packed.metadata[0], {"forward": self.name})

    def _run_with_adapters(self, packed: PackedBatch) -> ForwardOutput:
        tables = self._served.adapters.compiled(packed.adapters, packed.cu_seqlens_q, self.step.places)
        if tables is None:
            return LayerByLayer(self._served, "an adapter changes the head").run(packed)
        return self.run(packed, tables)
