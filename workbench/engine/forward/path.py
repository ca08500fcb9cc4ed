"""The interface of the ways through a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Self

import mlx.core as mx

from workbench.engine.packed_batch import PackedBatch
from workbench.engine.sampler import Logits
from workbench.models.served_model import ServedModel
from workbench.trace.records import KernelLaunch

ForwardOutput = tuple[Logits, KernelLaunch]
"""Logits of the rows that sample, evaluated, and the launch of the attention kernel."""

SLICE_BYTES = 64 << 20
"""Size of a slice of logits; two are in memory at a time."""


@dataclass(frozen=True, eq=False)
class SlicedLogits(Logits):
    """Logits of the rows of prompts, which are projected when they are read, once.

    Attributes:
        slices: The rows in order.
    """

    slices: Iterator[mx.array] = field(default_factory=lambda: iter(()))


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
    """A way through the model that an engine may choose at load.

    Attributes:
        projects_in_slices: It projects the rows of a prompt in slices, so that their number has no limit.
    """

    projects_in_slices: ClassVar[bool] = False

    def let_go_of_memory(self) -> None:
        """Hold no array of the pool until the next step: it gets others."""

    @classmethod
    @abstractmethod
    def make(cls, served: ServedModel) -> Self | str:
        """The path for a model, or why the model cannot take it."""
