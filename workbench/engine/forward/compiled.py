"""The whole model in compiled code, on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from workbench.engine.forward.path import ChosenPath, ForwardOutput
from workbench.engine.packed_batch import PackedBatch
from workbench.engine.sampler import Logits
from workbench.models.served_model import ServedModel

if TYPE_CHECKING:
    from workbench.models.packed.compiled_step import CompiledStep


class CompiledPath(ChosenPath):
    """Runs packed weights in compiled code, if its logits equal those of the model's own layers.

    Args:
        served: The model.
        step: Its compiled code.
    """

    name = "compiled"

    def __init__(self, served: ServedModel, step: CompiledStep) -> None:
        self._served, self.step = served, step

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

    def run(self, packed: PackedBatch) -> ForwardOutput:
        """See `ForwardPath.run`."""
        values = self.step.run(packed.token_ids, packed.positions, packed.logits_rows, *packed.metadata)
        return Logits.of(values), self._served.launch(packed.metadata[0], {"forward": self.name})
