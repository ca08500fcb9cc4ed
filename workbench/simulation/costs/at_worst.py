"""The most that a step can take which has more rows than all measured ones.

A fit knows nothing of it: up to the largest measured step, reading the weights may have hidden all arithmetic, and
beyond it may not. But what several steps of a measured size compute, one step computes in no longer time.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.costs.step_model import Features

TOLERANCE = 1.05
"""Ratio to the largest measured size up to which a step counts as measured."""


@dataclass(frozen=True)
class AtWorst:
    """Lets a step beyond the measured rows take as long as the steps of measured size into which it can be cut.

    Attributes:
        model: The fitted costs.
        most_rows: Number of rows of the largest measured step.

    Example:
        >>> AtWorst(CostModel(fixed=0.1), 100).seconds((1, 399, 400, 0))
        0.4
    """

    model: CostModel
    most_rows: int

    def seconds(self, features: Features) -> float:
        """Duration of a step with these features."""
        sequences, prefill_tokens, kv_tokens, cells = features
        parts = (sequences + prefill_tokens) / self.most_rows
        if parts <= TOLERANCE:
            return self.model.seconds(features)
        part = (sequences / parts, prefill_tokens / parts, kv_tokens / parts, cells / parts)
        return parts * self.model.seconds(part)  # the model itself says less: costs are at most linear
