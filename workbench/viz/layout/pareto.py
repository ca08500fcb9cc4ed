"""The Pareto plot of a sweep: its axes, a point for each row, and the settings on the front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from workbench.base.text import settings_text
from workbench.viz.layout.axis import MOST_LINEAR, Axis

_TIMES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "queue": "time in the queue",
    "e2e": "end-to-end latency",
}
_COUNTS = {"output_throughput": "output tokens per second", "replicas": "replicas"}


MAX_PANELS = 2
"""Maximum number of panels of the settings of an answer."""


class ParetoPoint(NamedTuple):
    """A row of a sweep.

    Attributes:
        x: Its value on the horizontal axis, in the unit of the plot.
        y: Its value on the vertical axis.
        number: Its number on the front, "" if numbers are left out; None if it is not on the front.
        ring: The word of the ring around it, "" for a ring without one; None without a ring.
    """

    x: float
    y: float
    number: str | None
    ring: str | None


@dataclass(frozen=True)
class ParetoPanel:
    """One panel.

    Attributes:
        titles: Titles of the horizontal and the vertical axis.
        axes: The axes.
        points: The rows in drawing order: those on the front last, on top of the others.
        limits: The limits of a target on both axes; None for none, or for one that is far from all points.
    """

    titles: tuple[str, str]
    axes: tuple[Axis, Axis]
    points: list[ParetoPoint]
    limits: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class ParetoMarks:
    """The plot.

    Attributes:
        panels: The panels, from left to right.
        num_points: Number of rows that are shown.
        num_front: Number of rows on the front.
        front: The number and the settings of each row on the front; empty if numbers are left out.
    """

    panels: list[ParetoPanel]
    num_points: int
    num_front: int
    front: list[tuple[str, str]]


def pareto_marks(
    rows: Sequence[Mapping[str, Any]],
    settings: Sequence[str],
    ringed: Sequence[tuple[str, Mapping[str, Any]]],
    across: tuple[str, str],
    upwards: str,
    unit: str,
) -> ParetoMarks:
    """The marks of `workbench.viz.pareto.pareto_svg`, which says what the arguments are.

    Raises:
        ValueError: No row has all three results.
    """
    return _marks(rows, settings, ringed, [(name, upwards) for name in across], dict.fromkeys((*across, upwards), unit))


def _marks(
    rows: Sequence[Mapping[str, Any]],
    settings: Sequence[str],
    ringed: Sequence[tuple[str, Mapping[str, Any]]],
    axes: Sequence[tuple[str, str]],
    units: Mapping[str, str],
    slo: Mapping[str, float] | None = None,
) -> ParetoMarks:
    """The same with the horizontal and the vertical axis of each panel, the unit of each time, and a target."""
    needed = tuple(dict.fromkeys(name for pair in axes for name in reversed(pair)))
    shown = [row for row in rows if all(row.get(name) is not None for name in needed)]
    if not shown:
        raise ValueError(f"nothing to plot: no row of the sweep has all of {', '.join(needed)}")
    front = [row for row in shown if row.get("pareto")]
    numbers = {id(row): str(number) if settings else "" for number, row in enumerate(front, start=1)}
    rings = {id(row): word for word, row in ringed}
    ordered = sorted(shown, key=lambda row: id(row) in numbers)
    has_idle = any(row.get("idle") for row in shown)

    def panel(name: str, upwards: str) -> ParetoPanel:
        points = [
            ParetoPoint(_value(row, name, units), _value(row, upwards, units), numbers.get(id(row)), rings.get(id(row)))
            for row in ordered
        ]
        of_x, of_y = (_value(slo, each, units) if slo and each in slo else None for each in (name, upwards))
        across, limit_x = _with_limit([point.x for point in points], of_x)
        along, limit_y = _with_limit([point.y for point in points], of_y)
        titles = _title(name, units, has_idle), _title(upwards, units, has_idle)
        return ParetoPanel(titles, (across, along), points, (limit_x, limit_y))

    lines = [(numbers[id(row)], settings_text({name: row[name] for name in settings})) for row in front]
    return ParetoMarks([panel(*pair) for pair in axes], len(shown), len(front), lines if settings else [])


def tuning_marks(tuning: Any) -> ParetoMarks:
    """The marks of a ``workbench.analysis.tuning.Tuning``: the settings of its table, each with its word.

    The axes are those of its front: throughput, and the one or two values of the target that are worst in the answer.
    """
    rows, slo, values = tuning.points, tuning.slo, tuning.best.values
    times = [name for name in slo if name not in _COUNTS and name in values] or ["ttft_mean"]
    worst = sorted(times, key=lambda name: -values.get(name, 0.0) / slo.get(name, 1.0))[:MAX_PANELS]
    largest = {name: max((row[name] for row in rows if row.get(name) is not None), default=0.0) for name in worst}
    units = {name: "s" if seconds >= 1 else "ms" for name, seconds in largest.items()}
    axes = [("output_throughput", name) for name in worst]
    return _marks(rows, (), [(row["word"], row) for row in rows], axes, units, slo)


def _with_limit(values: Sequence[float], limit: float | None) -> tuple[Axis, float | None]:
    """The axis of some values, which reaches a limit near them, and the limit if the axis does."""
    near = limit is not None and max(*values, limit) <= MOST_LINEAR * min(*values, limit)
    axis = Axis.around([*values, limit] if near and limit is not None else values)
    return axis, limit if limit is not None and axis.begin <= limit <= axis.end else None


def _value(row: Mapping[str, Any], name: str, units: Mapping[str, str]) -> float:
    return float(row[name]) * (1000.0 if name not in _COUNTS and units[name] == "ms" else 1.0)


def _title(name: str, units: Mapping[str, str], has_idle: bool) -> str:
    """The title of an axis, such as "P99 time to first token (s)"; that of a rate says how it counts idle time."""
    if name in _COUNTS:
        return _COUNTS[name] + (" without idle time" if has_idle and name == "output_throughput" else "")
    kind, _, which = name.rpartition("_")
    if kind not in _TIMES:
        return f"{name} ({units[name]})"
    return f"{which.replace('p', 'P') if which != 'mean' else which} {_TIMES[kind]} ({units[name]})"
