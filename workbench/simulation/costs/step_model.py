"""The form of the cost model for many steps at once: the terms of a step, and how memory and arithmetic overlap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul, truediv

from workbench.simulation.costs.least_squares import Vector, combined

Features = tuple[float, float, float, float]
"""Sequences, prefill tokens, KV positions and attention cells of a step."""

ADDED = ("fixed", "per_sequence", "per_prefill_step")
"""Coefficients of the part of a step that nothing overlaps."""

MEMORY = ("weights", "per_kv_token")
"""Coefficients of the time for reading memory."""

COMPUTE = ("per_row", "per_attention_cell")
"""Coefficients of the time for arithmetic, in a model with overlap."""

ALL_COMPUTE = (*COMPUTE, "per_prefill_token")
"""Coefficients of the time for arithmetic."""

LINEAR = ("fixed", "per_sequence", "per_prefill_token", "per_kv_token", "per_attention_cell", "per_prefill_step")
"""Coefficients of a model without overlap: the weights are then part of ``fixed``."""


@dataclass(frozen=True, eq=False)
class StepCosts:
    """Measured steps.

    Attributes:
        features: Sequences, prefill tokens, KV positions and attention cells of each step.
        seconds: Duration of each step.
        places: Index of the trace, and step.
        pauses: Time before each step in which the engine stood still although it had work; no part of ``seconds``.
        num_disturbed: Number of measured steps that were left out, because something else disturbed them.
    """

    features: list[Features]
    seconds: list[float]
    places: list[tuple[int, int]]
    pauses: list[float]
    num_disturbed: int = 0

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def rows(self) -> list[float]:
        """Sequences and prefill tokens of each step: its rows, and one more for each request that prefills."""
        return [sequences + prefill for sequences, prefill, _, _ in self.features]

    def take(self, index: Iterable[int]) -> StepCosts:
        """Some of the steps, by their indices."""
        kept = list(index)
        return StepCosts(
            [self.features[i] for i in kept],
            [self.seconds[i] for i in kept],
            [self.places[i] for i in kept],
            [self.pauses[i] for i in kept],
        )

    def thinned(self, count: int) -> StepCosts:
        """Every n-th step, so that no more than ``count`` are left."""
        return self.take(range(0, len(self), thinning(len(self), count)))


def thinning(size: int, count: int) -> int:
    """The n for which every n-th of ``size`` steps are no more than ``count``."""
    return -(-size // count)


def columns(features: Sequence[Features]) -> dict[str, Vector]:
    """The columns that coefficients multiply, by name, with one number per step."""
    sequences, prefill, kv_tokens, cells = map(list, zip(*features))
    ones = [1.0] * len(features)
    return {
        "fixed": ones,
        "weights": ones,
        "per_sequence": sequences,
        "per_prefill_token": prefill,
        "per_row": [one + other for one, other in zip(sequences, prefill)],
        "per_kv_token": kv_tokens,
        "per_attention_cell": cells,
        "per_prefill_step": [float(tokens > 0) for tokens in prefill],
    }


def overlapped(memory: Vector, compute: Vector, overlap: float) -> tuple[list[float], list[float], list[float]]:
    """The time that reading memory and arithmetic take together: the p-norm of the two, with p = ``overlap``.

    Returns:
        The time of each step, and its partial derivatives with respect to the two times: their shares.
    """
    # In passes of one operation over all steps: three powers of each step.
    power, unit = overlap - 1, max(*memory, *compute) or 1.0
    if not power:  # a sum, with the same rounding as below
        sums = [(one + other) / unit or 1e-300 for one, other in zip(memory, compute)]
        return [unit * one for one in sums], [1.0] * len(sums), [1.0] * len(sums)
    memory_power = [(one / unit) ** power for one in memory]
    compute_power = [(one / unit) ** power for one in compute]
    sums = [
        (one * part + other * rest) / unit or 1e-300
        for one, part, other, rest in zip(memory, memory_power, compute, compute_power)
    ]
    root = 1 / overlap
    joined = [one**root for one in sums]
    slope = list(map(truediv, joined, sums))
    return [unit * one for one in joined], scaled(memory_power, slope), scaled(compute_power, slope)


def predicted_seconds(coefficients: Mapping[str, float], features: Sequence[Features]) -> list[float]:
    """The durations that coefficients give to steps."""
    parts = columns(features)
    memory, compute = summed(coefficients, parts, MEMORY), summed(coefficients, parts, ALL_COMPUTE)
    joined, _, _ = overlapped(memory, compute, coefficients["overlap"])
    return [one + other for one, other in zip(summed(coefficients, parts, ADDED), joined)]


def slopes(coefficients: Mapping[str, float], features: Sequence[Features]) -> list[Vector]:
    """The derivatives of the durations with respect to each positive coefficient: a column for each.

    Times the coefficients they add up to the durations, because the overlapped time is homogeneous in its two parts.
    """
    parts = columns(features)
    memory, compute = summed(coefficients, parts, MEMORY), summed(coefficients, parts, ALL_COMPUTE)
    _, memory_share, compute_share = overlapped(memory, compute, coefficients["overlap"])
    share = dict.fromkeys(MEMORY, memory_share) | dict.fromkeys(ALL_COMPUTE, compute_share)
    positive = [name for name, value in coefficients.items() if value > 0 and name in parts]
    return [scaled(parts[name], share[name]) if name in share else parts[name] for name in positive]


def scaled(column: Vector, factors: Vector) -> list[float]:
    """A column, each row times its factor."""
    return list(map(mul, column, factors))


def summed(coefficients: Mapping[str, float], parts: Mapping[str, Vector], names: Sequence[str]) -> list[float]:
    """The sum of some terms of the model; a coefficient that it lacks is 0."""
    return combined([parts[name] for name in names], [coefficients.get(name, 0.0) for name in names])
