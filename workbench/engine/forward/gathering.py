"""The model's own layers and its own attention, over keys and values that are gathered for it."""

from __future__ import annotations

from typing import Self

from workbench.engine.forward.layer_by_layer import LayerByLayer
from workbench.engine.memory import usable_memory
from workbench.engine.packed_batch import PackedBatch
from workbench.models.served_model import ServedModel


class GatheringPath(LayerByLayer):
    """For a model whose attention does its own arithmetic; nothing can look at its layers."""

    name = "gathering"

    @classmethod
    def make(cls, served: ServedModel) -> Self | str:
        """See `ChosenPath.make`; every model that is served can take it."""
        return cls(served)

    def check(self, packed: PackedBatch) -> None:
        """Refuse a batch whose gathered keys and values do not fit into memory, before anything is changed.

        Raises:
            ValueError: The message says what to lower.
        """
        served, context = self._served, packed.block_table.shape[1] * packed.block_size
        largest = max((layer.bytes_per_token for layer in served.preflight.layers), default=0)
        gathered = packed.num_tokens * context * largest
        if 2 * gathered > usable_memory():
            raise ValueError(
                f"{packed.num_tokens} tokens with a context of {context} need {gathered / 2**30:.1f} GiB of "
                f"gathered keys and values per layer ({served.preflight.reason}): lower "
                f"max_num_batched_tokens={served.config.max_num_batched_tokens}"
            )
