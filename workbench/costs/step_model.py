"""The form of the cost model for many steps at once: the terms of a step, and how memory and arithmetic overlap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from workbench.ground.on_demand import np

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


def columns(features: np.ndarray) -> dict[str, np.ndarray]:
    """The columns that coefficients multiply, by name, float64 [steps].

    Args:
        features: Sequences, prefill tokens, KV positions and attention cells, float64 [steps, 4].
    """
    sequences, prefill, kv_tokens, cells = features.T
    ones = np.ones(len(features))
    return {
        "fixed": ones,
        "weights": ones,
        "per_sequence": sequences,
        "per_prefill_token": prefill,
        "per_row": sequences + prefill,
        "per_kv_token": kv_tokens,
        "per_attention_cell": cells,
        "per_prefill_step": (prefill > 0).astype(float),
    }


def overlapped(memory: np.ndarray, compute: np.ndarray, overlap: float) -> np.ndarray:
    """The time that reading memory and arithmetic take together: the p-norm of the two, with p = ``overlap``."""
    larger = np.maximum(np.maximum(memory, compute), 1e-12)
    return larger * (1 + (np.minimum(memory, compute) / larger) ** overlap) ** (1 / overlap)


def shares(memory: np.ndarray, compute: np.ndarray, overlap: float) -> tuple[np.ndarray, np.ndarray]:
    """The partial derivatives of the overlapped time."""
    joined = overlapped(memory, compute, overlap)
    return (memory / joined) ** (overlap - 1), (compute / joined) ** (overlap - 1)


def predicted_seconds(coefficients: Mapping[str, float], features: np.ndarray) -> np.ndarray:
    """The durations that coefficients give to steps, float64 [steps]."""
    parts = columns(features)
    memory, compute = summed(coefficients, parts, MEMORY), summed(coefficients, parts, ALL_COMPUTE)
    return summed(coefficients, parts, ADDED) + overlapped(memory, compute, coefficients["overlap"])


def slopes(coefficients: Mapping[str, float], features: np.ndarray) -> np.ndarray:
    """The derivatives of the durations with respect to each positive coefficient, float64 [steps, coefficients].

    Times the coefficients they add up to the durations, because the overlapped time is homogeneous in its two parts.
    """
    parts = columns(features)
    memory, compute = summed(coefficients, parts, MEMORY), summed(coefficients, parts, ALL_COMPUTE)
    memory_share, compute_share = shares(memory, compute, coefficients["overlap"])
    share = dict.fromkeys(MEMORY, memory_share) | dict.fromkeys(ALL_COMPUTE, compute_share)
    positive = [name for name, value in coefficients.items() if value > 0 and name in parts]
    return np.column_stack([parts[name] * share.get(name, 1.0) for name in positive])


def summed(coefficients: Mapping[str, float], parts: Mapping[str, np.ndarray], names: Iterable[str]) -> np.ndarray:
    """The sum of some terms of the model; a coefficient that it lacks is 0."""
    return np.sum([coefficients.get(name, 0.0) * parts[name] for name in names], axis=0)
