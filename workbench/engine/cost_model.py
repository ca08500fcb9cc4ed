"""How long a step takes: a linear model of what the step holds, fitted by least squares to a recorded trace.

    seconds = fixed + per_sequence * sequences + per_prefill_token * prefill tokens
            + per_kv_token * KV positions read + per_attention_cell * (prompt row, KV position) pairs

Sequences stand for the work of a decode row and for what the host does per request; KV positions read are the sum of
the sequences' context lengths, which is what a decode reads from memory; attention cells are what makes the end of a
long prompt dearer than its beginning. Coefficients are never negative: a step does not get faster by doing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import numpy as np

from workbench.engine.field_checks import number
from workbench.trace import Trace
from workbench.trace.records import Arm

HELD_OUT_EVERY = 5
"""Every fifth step is kept out of a fit, to measure the error on it."""

MIN_STEPS = 20
"""Steps with a measured duration that a fit asks for."""


class _Chunk(Protocol):
    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def arm(self) -> Arm: ...


def step_features(chunks: Sequence[_Chunk]) -> tuple[int, int, int, int]:
    """What a step holds, in the order of the model's coefficients after the fixed one.

    Args:
        chunks: The chunks of a StepRecord or of a ScheduledBatch.

    Returns:
        Sequences, prefill tokens, KV positions read, attention cells of prompt rows.
    """
    # Comprehensions over all chunks, arithmetic only over prompts: a simulation does this for every step.
    kv_tokens = sum([chunk.start for chunk in chunks]) + len(chunks)
    num_prefill_tokens = cells = 0
    for chunk in [chunk for chunk in chunks if chunk.arm != "decode"]:
        count = chunk.num_tokens
        num_prefill_tokens += count
        kv_tokens += count - 1
        cells += count * chunk.start + count * (count + 1) // 2
    return len(chunks), num_prefill_tokens, kv_tokens, cells


@dataclass(frozen=True)
class FitReport:
    """How well a cost model describes steps that it was not fitted to.

    Attributes:
        num_fitted: Steps the coefficients come from.
        num_held_out: Steps the errors are measured on.
        median_error: Median of |predicted - measured| / measured.
        p90_error: 90th percentile of the same.
        total_error: |sum of predicted - sum of measured| / sum of measured: what a simulated run is off by.
        r_squared: Share of the variance explained, on the steps held out.
    """

    num_fitted: int
    num_held_out: int
    median_error: float
    p90_error: float
    total_error: float
    r_squared: float


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step from what it holds.

    Attributes:
        fixed: Seconds of any step.
        per_sequence: Seconds per scheduled request.
        per_prefill_token: Seconds per prompt row.
        per_kv_token: Seconds per KV position read.
        per_attention_cell: Seconds per (prompt row, KV position) pair.

    Raises:
        ValueError: A coefficient is negative or not finite, or all are 0.

    Example:
        >>> CostModel(fixed=0.01, per_prefill_token=1e-4).seconds((1, 100, 100, 5050))
        0.02
    """

    fixed: float = 0.0
    per_sequence: float = 0.0
    per_prefill_token: float = 0.0
    per_kv_token: float = 0.0
    per_attention_cell: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, number(field.name, getattr(self, field.name), 0.0))
        if not any(asdict(self).values()):
            raise ValueError("all coefficients of the cost model are 0: a step has to take time; give at least fixed")

    def seconds(self, features: tuple[int, int, int, int]) -> float:
        """Duration of a step with these features."""
        sequences, prefill_tokens, kv_tokens, cells = features
        return (
            self.fixed
            + self.per_sequence * sequences
            + self.per_prefill_token * prefill_tokens
            + self.per_kv_token * kv_tokens
            + self.per_attention_cell * cells
        )

    def step_seconds(self, chunks: Sequence[_Chunk]) -> float:
        """Duration of a step that holds these chunks."""
        return self.seconds(step_features(chunks))

    def to_dict(self) -> dict[str, float]:
        """The coefficients by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> CostModel:
        """A model from coefficients by name; those left out are 0.

        Raises:
            ValueError: Not a mapping, an unknown name, or a value outside its range.
        """
        known = [field.name for field in fields(cls)]
        if not isinstance(values, dict) or set(values) - set(known):
            raise ValueError(f"cost_model must map some of {', '.join(known)} to seconds, got {values!r}")
        return cls(**values)

    @classmethod
    def fit(cls, *traces: Trace) -> tuple[CostModel, FitReport]:
        """Fit the coefficients to the measured steps of one or more traces.

        Errors are made small relative to each step's duration, so that short decode steps count as much as long
        prefills. The first step, which compiles and warms up, is left out.

        Args:
            *traces: Traces of an engine, or recorded from another one, with timings.

        Returns:
            The model, and its errors on every fifth step, which the fit has not seen.

        Raises:
            ValueError: Too few steps have timings.
        """
        rows: list[tuple[float, ...]] = []
        measured: list[float] = []
        for trace in traces:
            for record in trace[1:]:
                duration = sum(record.timings.values())
                if record.chunks and duration > 0:
                    rows.append((1.0, *map(float, step_features(record.chunks))))
                    measured.append(duration)
        if len(rows) < MIN_STEPS:
            raise ValueError(f"a fit needs at least {MIN_STEPS} steps with timings, the traces have {len(rows)}")
        features, seconds = np.array(rows), np.array(measured)
        held_out = np.arange(len(rows)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        weights = 1 / seconds[~held_out]
        coefficients = _non_negative_least_squares(features[~held_out] * weights[:, None], np.ones(len(weights)))
        predicted, actual = features[held_out] @ coefficients, seconds[held_out]
        errors = np.abs(predicted - actual) / actual
        spread = float(((actual - actual.mean()) ** 2).sum())
        report = FitReport(
            num_fitted=int((~held_out).sum()),
            num_held_out=int(held_out.sum()),
            median_error=float(np.median(errors)),
            p90_error=float(np.percentile(errors, 90)),
            total_error=float(abs(predicted.sum() - actual.sum()) / actual.sum()),
            r_squared=1 - float(((predicted - actual) ** 2).sum()) / spread if spread else 0.0,
        )
        return cls(*map(float, coefficients)), report


def _non_negative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimises |matrix @ x - target|, by trying every set of columns: there are five of them.

    The optimum is the least-squares solution on the columns where it is positive, so the best non-negative one among
    the 31 sets is it.
    """
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)  # columns differ by ten orders of magnitude
    scaled, count = matrix / scale, matrix.shape[1]
    best, smallest = np.zeros(count), np.inf
    for subset in range(1, 1 << count):
        columns = [index for index in range(count) if subset >> index & 1]
        solution = np.linalg.lstsq(scaled[:, columns], target, rcond=None)[0]
        residual = float(((scaled[:, columns] @ solution - target) ** 2).sum())
        if (solution >= 0).all() and residual < smallest:
            smallest, best = residual, np.zeros(count)
            best[columns] = solution
    return best / scale
