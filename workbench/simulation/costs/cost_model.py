"""The duration of a step as a function of its contents, fitted to recorded traces.

    seconds = fixed + per_sequence * sequences + per_prefill_step (if the step has prefill tokens)
            + memory and compute together, where
    memory  = weights + per_kv_token * KV positions read
    compute = per_prefill_token * prefill tokens + per_row * rows + per_attention_cell * (prompt row, KV position) pairs

Sequences stand for the host's work per request. Prefill tokens are all rows beyond one per decoding sequence: prompts,
and drafts that are verified; rows are sequences and prefill tokens. KV positions read are the sum of the sequences'
context lengths, which a decode reads from memory. Attention cells make the end of a long prompt more expensive than its
beginning.

``overlap`` says how the two times join: 1 adds them, a large number takes the larger one, and others are in between
(their p-norm). With overlap a step has a knee: below it the weights are read and rows cost nearly nothing, above it
each row costs its arithmetic. Coefficients are never negative: more work does not make a step faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from random import Random
from typing import Any, Protocol

from workbench.base.field_checks import number
from workbench.base.text import shown
from workbench.simulation.costs.coefficients import SEARCHED_ON, Regression
from workbench.simulation.costs.drift import stretches
from workbench.simulation.costs.fit import MIN_STEPS, Fit, FitReport
from workbench.simulation.costs.step_model import Features, StepCosts
from workbench.trace import Trace
from workbench.trace.readings.durations import measured_steps
from workbench.trace.records import Arm

STRETCHES = 20
"""Number of stretches of a recording that a bootstrap draws from."""


class _Chunk(Protocol):
    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def arm(self) -> Arm: ...


class StepCost(Protocol):
    """Gives the duration of a step: a CostModel, or anything else with its method."""

    def step_seconds(self, chunks: Sequence[Any], /) -> float:
        """Duration of a step with these chunks."""


def as_step_cost(given: Any) -> Any:
    """The ``cost_model`` that a caller gave, with coefficients by name as a CostModel.

    Raises:
        ValueError: It is nothing that gives the duration of a step.

    Example:
        >>> as_step_cost({"fixed": 0.01}).fixed
        0.01
    """
    if isinstance(given, Mapping):
        return CostModel.from_dict(dict(given))
    if given is not None and not hasattr(given, "step_seconds"):
        raise ValueError(
            "cost_model must be a CostModel, such as CostModel(fixed=0.01) or the first of CostModel.fit(trace), or a "
            f"mapping of its coefficients to seconds, got {shown(given)}"
        )
    return given


def step_features(chunks: Sequence[_Chunk]) -> tuple[int, int, int, int]:
    """The features of a step, in the order of the model's coefficients after the fixed one.

    Args:
        chunks: The chunks of a StepRecord or of a ScheduledBatch.

    Returns:
        Sequences, prefill tokens, KV positions read, attention cells of prompt rows.
    """
    # Comprehensions over all chunks, arithmetic only over prompts, because a simulation does this for every step.
    kv_tokens = sum([chunk.start for chunk in chunks]) + len(chunks)
    num_prefill_tokens = cells = 0
    for chunk in [chunk for chunk in chunks if chunk.arm != "decode" or chunk.num_tokens > 1]:
        count = chunk.num_tokens
        kv_tokens += count - 1
        if chunk.arm == "decode":
            num_prefill_tokens += count - 1  # the rows of its drafts
        else:
            num_prefill_tokens += count
            cells += count * chunk.start + count * (count + 1) // 2
    return len(chunks), num_prefill_tokens, kv_tokens, cells


@dataclass(frozen=True, repr=False)
class CostModel:
    """Seconds of a step, computed from its features.

    Attributes:
        fixed: Seconds of every step.
        per_sequence: Seconds per scheduled request.
        per_prefill_token: Seconds per prompt row, and per row of a draft.
        per_kv_token: Seconds per KV position read.
        per_attention_cell: Seconds per (prompt row, KV position) pair.
        per_prefill_step: Seconds that a step takes longer because it has prompt rows.
        weights: Seconds for reading the model's weights.
        per_row: Seconds of arithmetic per row, of a prompt or a decode.
        overlap: 1 if memory and arithmetic take their time one after the other; larger if they overlap.

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
    per_prefill_step: float = 0.0
    weights: float = 0.0
    per_row: float = 0.0
    overlap: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            low = 1.0 if field.name == "overlap" else 0.0
            object.__setattr__(self, field.name, number(field.name, getattr(self, field.name), low))
        if not any(value for name, value in asdict(self).items() if name != "overlap"):
            raise ValueError("all coefficients of the cost model are 0: a step has to take time; give at least fixed")

    def __repr__(self) -> str:
        """The coefficients that are not at their defaults."""
        given = [(field.name, getattr(self, field.name)) for field in fields(self)]
        shown = ", ".join(f"{name}={value!r}" for name, value in given if value != (1.0 if name == "overlap" else 0.0))
        return f"CostModel({shown})"

    @property
    def knee(self) -> float | None:
        """Number of rows above which arithmetic takes longer than reading the weights; None without overlap."""
        return self.weights / self.per_row if self.overlap > 1 and self.weights and self.per_row else None

    def seconds(self, features: Features) -> float:
        """Duration of a step with these features."""
        sequences, prefill_tokens, kv_tokens, cells = features
        added = self.fixed + self.per_sequence * sequences + (self.per_prefill_step if prefill_tokens else 0.0)
        memory = self.weights + self.per_kv_token * kv_tokens
        compute = (
            self.per_prefill_token * prefill_tokens
            + self.per_row * (sequences + prefill_tokens)
            + self.per_attention_cell * cells
        )
        if self.overlap == 1 or not memory or not compute:
            return added + memory + compute
        larger, smaller = (memory, compute) if memory > compute else (compute, memory)
        return added + larger * (1 + (smaller / larger) ** self.overlap) ** (1 / self.overlap)

    def step_seconds(self, chunks: Sequence[_Chunk]) -> float:
        """Duration of a step with these chunks."""
        return self.seconds(step_features(chunks))

    def to_dict(self) -> dict[str, float]:
        """The coefficients by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> CostModel:
        """A model from coefficients by name; the default is 0.

        Raises:
            ValueError: The argument is not a mapping, a name is unknown, or a value is outside its range.
        """
        known = [field.name for field in fields(cls)]
        if not isinstance(values, dict) or set(values) - set(known):
            raise ValueError(f"cost_model must map some of {', '.join(known)} to seconds, got {shown(values)}")
        return cls(**values)

    @classmethod
    def fit(cls, *traces: Trace, steps: StepCosts | None = None, rough: bool = False) -> tuple[CostModel, FitReport]:
        """Fit the coefficients to the measured steps of one or more traces.

        The predictions add up to the measured time. The first step of each trace that was not simulated, which
        compiles and warms up, is left out; overlapping steps are counted once (`workbench.trace.readings.durations`).

        Args:
            *traces: Traces with timings, of an engine or recorded from another engine.
            steps: The `step_costs` of these traces, if somebody has read them.
            rough: Accept a fit that is only good enough to compare two predictions.

        Returns:
            The model, and its errors on every fifth step, which is held out of the fit that the errors belong to.

        Raises:
            ValueError: Too few steps have timings, or their durations do not follow from their contents.
        """
        return cls.of_fit(Fit(step_costs(*traces) if steps is None else steps, len(traces)), rough=rough)

    @classmethod
    def of_fit(cls, fit: Fit, *, rough: bool = False) -> tuple[CostModel, FitReport]:
        """The same for steps that have been fitted.

        Raises:
            ValueError: Their durations do not follow from their contents.
        """
        coefficients, report = fit.model(rough=rough)
        return cls(**coefficients), report

    @classmethod
    def bootstrap(cls, steps: StepCosts, count: int, seed: int = 0) -> list[CostModel]:
        """Models fitted to stretches of a recording, drawn with replacement: their spread is the fit's uncertainty.

        A draw without a prompt would make prompts free, so it also gets the first stretch that has one. The same holds
        for the other features of a step.

        Args:
            steps: The measured steps.
            count: Number of models.
            seed: Seed of the draws.
        """
        rng, regression, indices = Random(seed), Regression(), range(len(steps))
        parts = stretches(len(steps), min(STRETCHES, len(steps)))
        has = [{k for one in steps.features[part] for k, amount in enumerate(one) if amount} for part in parts]
        drawn = []
        for _ in range(count):
            chosen = rng.choices(range(len(parts)), k=len(parts))
            for feature in sorted(set().union(*has)):
                if not any(feature in has[part] for part in chosen):
                    chosen.append(next(part for part, features in enumerate(has) if feature in features))
            drawn.append([i for part in chosen for i in indices[parts[part]]])
        return [cls(**regression.coefficients(steps.take(index).thinned(SEARCHED_ON))) for index in drawn]


def step_costs(*traces: Trace) -> StepCosts:
    """The contents and durations of all measured steps of some traces, one trace after another.

    Steps that are known to be disturbed are left out, unless they are too many to be an exception.
    """
    steps = StepCosts([], [], [], [])
    quiet: list[int] = []
    for index, trace in enumerate(traces):
        disturbed = trace.disturbed
        for step in measured_steps(trace):  # one after the other: a list of them is as large as the result
            if step.record.step not in disturbed:
                quiet.append(len(steps))
            steps.features.append(step_features(step.record.chunks))
            steps.places.append((index, step.record.step))
            steps.pauses.append(step.pause)
            steps.seconds.append(step.seconds)
    if len(quiet) == len(steps) or len(quiet) < max(MIN_STEPS, len(steps) / 2):
        return steps
    return replace(steps.take(quiet), num_disturbed=len(steps) - len(quiet))
