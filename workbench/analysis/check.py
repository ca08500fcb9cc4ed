"""A prediction's own check: the setting that was recorded, predicted like any other, beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from workbench.simulation.costs.fit import FitReport, NoSeconds
from workbench.trace.readings.metrics import amount, percent

MAX_ERROR = 0.2
"""Largest relative error of the unchanged setting, in any of ``BOUNDED``, at which seconds are given."""

BOUNDED = ("ttft_mean", "tpot_mean", "e2e_mean")
"""Latencies that decide whether seconds are given."""

SHARES = ("hit_rate", "mean_kv_use", "peak_kv_use")
COUNTS = ("num_steps", "num_preemptions", *SHARES)
"""Values of a run that are not times: they follow from the scheduler's rules alone."""

SHOWN = (*BOUNDED, "output_throughput", *COUNTS)

UNKNOWN_PREFIXES = 0.02
"""A predicted hit rate that differs by more than this from the recorded one shows that prefixes are not known."""


@dataclass(frozen=True, eq=False)
class Check:
    """The prediction of the recorded setting, beside what was measured.

    Attributes:
        fit: Errors of the cost model on steps that it has not seen; None if the model was given.
        recorded: Measured values by name; empty if nothing was measured.
        unchanged: The same values, predicted.
    """

    fit: FitReport | None
    recorded: Mapping[str, float] = field(default_factory=dict)
    unchanged: Mapping[str, float] = field(default_factory=dict)

    @property
    def errors(self) -> dict[str, float]:
        """Relative error of each predicted time: 0.1 if the prediction is 10% too high."""
        return {
            name: self.unchanged[name] / recorded - 1
            for name, recorded in self.recorded.items()
            if recorded and name in self.unchanged and name not in COUNTS
        }

    @property
    def worst(self) -> tuple[str, float] | None:
        """The latency of ``BOUNDED`` with the largest error, and this error; None if none was measured."""
        known = [(name, error) for name, error in self.errors.items() if name in BOUNDED and math.isfinite(error)]
        return max(known, key=lambda pair: abs(pair[1]), default=None)

    @property
    def holds(self) -> bool:
        """Whether the error of the unchanged setting allows seconds."""
        return self.worst is None or abs(self.worst[1]) <= MAX_ERROR

    @property
    def refusal(self) -> str:
        """The reason for which there are no seconds; "" if the check holds."""
        if self.worst is None or self.holds:
            return ""
        name, error = self.worst
        return (
            f"no seconds: for the recorded setting the prediction of {name} is off by {error:+.0%} "
            f"({shown(name, self.unchanged[name])}, recorded are {shown(name, self.recorded[name])}; allowed are "
            f"{MAX_ERROR:.0%})"
        )

    def require(self) -> None:
        """Refuse seconds that cannot be trusted.

        Raises:
            NoSeconds: The check does not hold; the message names what gives an answer all the same.
        """
        if not self.holds:
            raise NoSeconds(
                f"{self.refusal}; force=True (--force) gives them all the same, and fork() answers in steps and blocks"
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """The quality of the fit, and the limits of the check, in sentences."""
        notes = [self.fit.sentence] if self.fit is not None else []
        if not self.recorded:
            notes.append("nothing was measured that the prediction of the recorded setting could be compared with")
        hits = self.recorded.get("hit_rate", 0.0), self.unchanged.get("hit_rate", 0.0)
        if self.recorded and abs(hits[0] - hits[1]) > UNKNOWN_PREFIXES:
            notes.append(
                f"the recording had a hit rate of {percent(hits[0])}, its prediction {percent(hits[1])}: shared "
                "prefixes are not in the recording, or the engine has other rules, so hits and blocks of a prediction "
                "are not those of the engine"
            )
        return tuple(notes)

    def __str__(self) -> str:
        pairs = [
            f"{name} {shown(name, self.unchanged[name])} (recorded {shown(name, self.recorded[name])})"
            for name in SHOWN
            if name in self.recorded and name in self.unchanged
        ]
        check = [f"check, the recorded setting predicted: {', '.join(pairs)}"] if pairs else []
        return "\n".join([*check, *self.notes])


def shown(name: str, value: float) -> str:
    """A value of a run with its unit."""
    if name in SHARES:
        return percent(value)
    if name in COUNTS:
        return f"{value:.0f}"
    return f"{value:,.1f} tokens/s" if name == "output_throughput" else amount(value, "s")
