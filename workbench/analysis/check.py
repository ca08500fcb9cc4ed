"""A prediction's own check: the setting that was recorded, predicted like any other, beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from workbench.simulation.costs.fit import MAX_MEDIAN_ERROR, MAX_TOTAL_ERROR, FitReport, NoSeconds
from workbench.trace.readings.metrics import amount, number, percent
from workbench.trace.readings.two_sides import UNSERVED

MAX_ERROR = 0.2
"""Largest relative error of the unchanged setting, in any of ``BOUNDED``, at which seconds are given."""

MAX_COMPARED_ERROR = 0.5
"""The same for a comparison of two predictions, of which the sign of a difference counts."""

LITTLE = 0.01
"""Relative error of a predicted value from which on it is told in percent."""

ROUGH_DIFFERENCE = 0.1
"""Relative difference of two predictions with a caution up to which not even its direction counts."""

BOUNDED = ("ttft_mean", "tpot_mean", "e2e_mean")
"""Latencies that decide whether seconds are given."""

COMPARED = ("ttft_mean", "ttft_p99", "itl_mean", "itl_p99")
"""Latencies of a comparison of two runs."""

Grade = Literal["seconds", "comparison", "steps"]
"""The use of predictions of a run: seconds, a comparison of one with another, or nothing, so steps count."""

WORDS = {
    "ttft_mean": "mean TTFT",
    "ttft_p99": "P99 TTFT",
    "itl_mean": "mean ITL",
    "itl_p99": "P99 ITL",
    "tpot_mean": "mean TPOT",
    "e2e_mean": "mean end-to-end latency",
}
"""Words of a reader for the latencies whose error is told."""

SHARES = ("hit_rate", "mean_kv_use", "peak_kv_use")
COUNTS = ("num_steps", "num_preemptions", *UNSERVED, *SHARES)
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
        without_pauses: The measured values without pauses; ``recorded`` if it is empty.
        is_cut: Whether requests had not ended with the recording: the values are of what had happened by then, and a
            prediction that is compared with another one serves all requests to their end.
        common_hit_rates: Recorded and predicted hit rates of the requests that were admitted in both; None for all.
    """

    fit: FitReport | None
    recorded: Mapping[str, float] = field(default_factory=dict)
    unchanged: Mapping[str, float] = field(default_factory=dict)
    without_pauses: Mapping[str, float] = field(default_factory=dict)
    is_cut: bool = False
    common_hit_rates: tuple[float, float] | None = None

    @property
    def measured(self) -> Mapping[str, float]:
        """The measured values that predictions are compared with: without pauses, which no prediction has."""
        return self.without_pauses or self.recorded

    @property
    def errors(self) -> dict[str, float]:
        """Relative error of each predicted time: 0.1 if the prediction is 10% too high."""
        return {
            name: self.unchanged[name] / known - 1
            for name, known in self.measured.items()
            if known and name in self.unchanged and name not in COUNTS
        }

    def unreliable(self, names: Iterable[str]) -> list[str]:
        """Those of the names whose prediction of the recorded setting is off by more than MAX_ERROR."""
        return [name for name in names if abs(self.errors.get(name, 0.0)) > MAX_ERROR]

    @property
    def worst(self) -> tuple[str, float] | None:
        """The latency of ``BOUNDED`` with the largest error, and this error; None if none was measured."""
        known = [(name, error) for name, error in self.errors.items() if name in BOUNDED and math.isfinite(error)]
        return max(known, key=lambda pair: abs(pair[1]), default=None)

    @property
    def grade(self) -> Grade:
        """The use of predictions of this run."""
        error = abs(self.worst[1]) if self.worst is not None else 0.0
        if error <= MAX_ERROR and (self.fit is None or self.fit.holds):
            return "seconds"
        return "comparison" if error <= MAX_COMPARED_ERROR and (self.fit is None or self.fit.compares) else "steps"

    @property
    def holds(self) -> bool:
        """Whether the error of the unchanged setting, and that of the fit, allow seconds."""
        return self.grade == "seconds"

    @property
    def _why(self) -> str:
        """The error for which there are no seconds, as a sentence."""
        if self.fit is not None and self.fit.median_error > MAX_MEDIAN_ERROR:
            return (
                f"Half of the steps of this run take at least {self.fit.median_error:.0%} more or less than predicted"
            )
        if self.fit is not None and self.fit.total_error > MAX_TOTAL_ERROR:
            return f"The sum of this run's steps is off by {self.fit.total_error:.0%} as predicted"
        assert self.worst is not None  # it is what refuses
        name, error = self.worst
        words = "long" if error > 0 else "short"
        return f"The {WORDS[name]} of this run as it was is predicted {abs(error):.0%} too {words}"

    @property
    def caution(self) -> str:
        """The way to read predictions that are good for a comparison alone, as sentences; "" for others."""
        if self.grade != "comparison":
            return ""
        return (
            f"{self._why}: compare the two predictions with each other, not with a clock. Of differences of more than "
            f"{ROUGH_DIFFERENCE:.0%}, rely on the direction, not on the size."
        )

    @property
    def refusal(self) -> str:
        """The reason for which there are no seconds; "" if the check holds."""
        if self.holds:
            return ""
        if self.worst is None or abs(self.worst[1]) <= MAX_ERROR:
            return f"no seconds: {self._why[0].lower()}{self._why[1:]}"
        name, error = self.worst
        return (
            f"no seconds: for the recorded setting the prediction of {name} is off by {error:+z.0%} "
            f"({shown(name, self.unchanged[name])}, recorded are {shown(name, self.measured[name])}; allowed are "
            f"{MAX_ERROR:.0%})"
        )

    def require(self, grade: Grade = "seconds") -> None:
        """Refuse predictions that cannot be trusted.

        Args:
            grade: "comparison" if predictions are only compared with each other.

        Raises:
            NoSeconds: The check does not hold; the message names what gives an answer all the same.
        """
        if self.grade not in ("seconds", grade):
            raise NoSeconds(
                f"{self.refusal}; force=True (--force) gives them all the same, and fork() answers in steps and blocks"
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """The quality of the fit, and the limits of the check, in sentences."""
        notes = [self.fit.sentence] if self.fit is not None else []
        if self.is_cut:
            notes.append(
                "requests had not ended with the recording: errors are those of what had happened by then, other "
                "predictions serve all requests to their end"
            )
        if self.without_pauses:
            notes.append("recorded values are without the pauses in which a person stopped the engine")
        if not self.recorded:
            notes.append("nothing was measured that the prediction of the recorded setting could be compared with")
        hits = self.common_hit_rates or (self.recorded.get("hit_rate", 0.0), self.unchanged.get("hit_rate", 0.0))
        if self.recorded and abs(hits[0] - hits[1]) > UNKNOWN_PREFIXES:
            whose = "for the requests that were admitted in both, " if self.common_hit_rates else ""
            notes.append(
                f"{whose}the recording had a hit rate of {percent(hits[0])}, its prediction {percent(hits[1])}: shared "
                "prefixes are not in the recording, or the engine has other rules, so hits and blocks of a prediction "
                "are not those of the engine"
            )
        return tuple(notes)

    def __str__(self) -> str:
        pairs = [
            f"{name} {shown(name, self.unchanged[name])} (recorded {shown(name, self.measured[name])})"
            for name in SHOWN
            if name in self.measured and name in self.unchanged and is_told(name, self.measured, self.unchanged)
        ]
        until = " until the recording ended" if self.is_cut else ""
        check = [f"check, the recorded setting predicted{until}: {', '.join(pairs)}"] if pairs else []
        return "\n".join([*check, *self.notes])


def off_words(error: float, of: str = "") -> str:
    """A relative error as text, marked if it is too large to rely on the value: "-64% for P99 ITL (do not rely on it)".

    Args:
        error: The error.
        of: The value, to be named behind it.
    """
    off = (f"{error:+z.0%}" if abs(error) >= LITTLE else "less than 1%") + (f" for {of}" if of else "")
    return f"{off} (do not rely on it)" if abs(error) > MAX_ERROR else off


def is_told(name: str, *runs: Mapping[str, float]) -> bool:
    """Whether a value says something about some runs: a number of UNSERVED requests does if it is not 0 everywhere."""
    return name not in UNSERVED or any(values.get(name) for values in runs)


def shown(name: str, value: float) -> str:
    """A value of a run with its unit."""
    if name in SHARES:
        return percent(value)
    if name in COUNTS:
        return f"{value:,.0f}"
    return f"{number(value)} tokens/s" if name == "output_throughput" else amount(value, "s")
