"""The noise of recorded steps around a cost model, and its part in a simulation of the same period.

Steps with equal contents do not take equal times. A simulation in which they do lets requests wait too briefly: an
arrival meets a long step more often than a short one, and waits for its rest; under asynchronous scheduling it waits
for one more step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Any

from workbench.simulation.costs.at_worst import AtWorst
from workbench.simulation.costs.cost_model import CostModel, step_features
from workbench.simulation.costs.drift import Drift
from workbench.simulation.costs.step_model import Features, StepCosts

NUM_DEVIATIONS = 4096
"""Number of deviations that a simulation draws before it begins again with the first."""


@dataclass(frozen=True, eq=False)
class StepNoise:
    """The deviations of recorded steps from a cost model.

    The variance of a step is proportional to its duration, as in the fit: a step of 1 s consists of ten of 0.1 s. The
    deviations of short steps, times the duration of a long one, would make it far too long.

    Attributes:
        deviations: (measured - predicted) / sqrt(predicted) of each step, with mean 0.
        smallest: Smallest ratio of a measured duration to the predicted one.
    """

    deviations: list[float]
    smallest: float

    @classmethod
    def of(cls, model: CostModel, steps: StepCosts) -> StepNoise:
        """The noise of measured steps around a model."""
        predicted = [model.seconds(row) for row in steps.features]
        deviations = [(seconds - one) / math.sqrt(one) for seconds, one in zip(steps.seconds, predicted)]
        mean = fmean(deviations)
        smallest = min(seconds / one for seconds, one in zip(steps.seconds, predicted))
        return cls([one - mean for one in deviations], smallest)


class Replayed:
    """A cost model for one simulation of a recorded period, with the trend and the noise of its recording.

    Args:
        model: The cost model.
        drift: The trend.
        noise: Deviations of recorded steps, of which each step draws one; None for the model's time.
        seed: Seed of the draws; two simulations with one seed draw the same deviations.
    """

    def __init__(self, model: CostModel | AtWorst, drift: Drift, noise: StepNoise | None = None, seed: int = 0) -> None:
        self._model = model
        self._drift = drift
        self._deviations, self._smallest = [0.0], 1.0
        if noise is not None:
            self._deviations = Random(seed).choices(noise.deviations, k=NUM_DEVIATIONS)
            self._smallest = noise.smallest
        self._num_steps = 0
        self._num_rows = 0

    def step_seconds(self, chunks: Sequence[Any]) -> float:
        """Duration of the next step, by its chunks."""
        return self.seconds(step_features(chunks))

    def seconds(self, features: Features) -> float:
        """Duration of the next step, by its features."""
        self._num_steps += 1
        seconds = self._model.seconds(features)
        deviation = self._deviations[self._num_steps % len(self._deviations)]
        seconds = max(self._smallest * seconds, seconds + deviation * math.sqrt(seconds))
        if self._drift.change:
            self._num_rows += int(features[0] + features[1])
            seconds *= self._drift.factor(self._num_rows)
        return seconds
