"""The number of replicas over the load: a curve, which does not fall where only chance lets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.analysis.check import Check, shown
from workbench.analysis.fleet.demand import Demand
from workbench.analysis.fleet.fleet_row import FleetRow
from workbench.analysis.fleet.sizing import MAX_REPLICAS, check_lines, size
from workbench.analysis.tuning import read_slo
from workbench.base.field_checks import number
from workbench.base.tables import table_lines, wrapped_text
from workbench.base.text import counted, significant
from workbench.simulation.summary import rate_words
from workbench.trace.readings.metrics import percent


@dataclass(frozen=True)
class Point:
    """A load with its answer.

    Attributes:
        load: Multiple of the load of the file.
        replicas: The number that is given: at least that of every smaller load. None if no fleet meets the target.
        row: The smallest layout that met the target; None if none did.
        closest: The layout closest to the target, if none met it.
        tried: The numbers of replicas that were tried.
        alone: The run with a replica for each request, if it misses the target too; None if that is not known.
    """

    load: float
    replicas: int | None
    row: FleetRow | None
    closest: FleetRow | None = None
    tried: tuple[int, ...] = ()
    alone: FleetRow | None = None


@dataclass(frozen=True)
class LoadCurve:
    """The answers for several loads.

    Attributes:
        points: The loads, the smallest first.
        slo: The target by name.
        source: The origin of the durations of steps.
        check: See `FleetTable`.
    """

    points: tuple[Point, ...]
    slo: Mapping[str, float]
    source: str
    check: Check | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The table, with a block of lines for each load if ``width`` columns of a terminal are too few for it."""
        return wrapped_text("\n".join(self._lines(width)), width)

    def _lines(self, width: int | None) -> Iterator[str]:
        head = ["load", "requests/s", "replicas", *self.slo, "hit rate"]
        yield from table_lines([head, *(self._cells(point) for point in self.points)], width=width)
        for point in self.points:
            if point.row is not None and point.replicas != point.row.replicas:
                yield (
                    f"at {point.load:g}x {counted(point.row.replicas, 'replica')} met the target too, by chance: a "
                    f"smaller load needed {point.replicas}, and runs of this layout lie within "
                    f"{self._ranges(point.row)}"
                )
            elif point.row is None:
                several = f"none of {', '.join(map(str, point.tried))} replicas meets the target"
                tried = several if point.tried[1:] else f"{counted(sum(point.tried), 'replica')} misses the target"
                yield f"at {point.load:g}x {tried}{self._never(point)}{_closest(point)}"
        yield from check_lines(self.check, list(self.slo))
        yield f"steps are simulated; their durations come from {self.source}"

    def _cells(self, point: Point) -> list[str]:
        row = point.row
        if row is None:
            rate = "-" if point.closest is None else rate_words(point.closest.rate)
            return [f"{point.load:g}x", rate, "-", *("-" for _ in self.slo), "-"]
        values = [row.shown(name) for name in self.slo]
        return [f"{point.load:g}x", rate_words(row.rate), str(point.replicas), *values, percent(row.hit_rate)]

    def _never(self, point: Point) -> str:
        """The reason for which no number of replicas meets the target; "" if one might."""
        if point.alone is None:
            return ""
        if point.closest is not None and point.closest.score <= point.alone.score:
            return ", and no number can: a replica for each request is no better"
        values = ", ".join(
            f"{name} {shown(name, point.alone.values[name])}" for name in point.alone.values if name in self.slo
        )
        return f", and no number can: even with a replica for each request it is missed ({values})"

    def _ranges(self, row: FleetRow) -> str:
        return ", ".join(f"{name} {shown(name, row.low[name])} to {shown(name, row.high[name])}" for name in self.slo)


def _closest(point: Point) -> str:
    """The layout that came closest to the target, as `FleetTable` names it."""
    row = point.closest
    if row is None:
        return ""
    return (
        f"; closest: {counted(row.replicas, 'replica')}, whose worst value is {significant(row.score)} times its limit"
    )


def load_curve(
    demand: Demand,
    loads: Sequence[float],
    slo: str | Mapping[str, float],
    *,
    router: str = "round_robin",
    max_replicas: int = MAX_REPLICAS,
    **options: Any,
) -> LoadCurve:
    """The number of replicas that each of some loads needs.

    Args:
        demand: The demand at the load of its file.
        loads: Multiples of that load.
        slo: The target, such as "ttft_p99=2s".
        router: The router.
        max_replicas: The largest fleet to try.
        **options: See `workbench.analysis.fleet.sizing.size`.

    Raises:
        ValueError: An argument is malformed, or a request cannot be served.
    """
    limits = read_slo(slo)
    points: list[Point] = []
    check = demand.check  # before other loads are made, which share it
    most = 0
    for load in sorted({number("a load", load, 0.0, low_open=True) for load in loads}):
        table = size(demand.times(load / demand.load), slo, router=router, max_replicas=max_replicas, **options)
        answer, closest = table.best, min(table.rows, key=lambda row: row.score)
        most = max(most, answer.replicas) if answer is not None else most
        if answer is not None:
            points.append(Point(load, most, answer))
            continue
        tried = tuple(sorted({row.replicas for row in table.rows}))
        points.append(Point(load, None, None, closest, tried, _alone(demand.times(load / demand.load), limits)))
    return LoadCurve(tuple(points), limits, demand.source, check)


def _alone(demand: Demand, slo: Mapping[str, float]) -> FleetRow | None:
    """The demand with a replica for each request, which no other request slows down, if it misses the target too."""
    if demand.sessions is not None or "output_throughput" in slo:
        return None
    row = FleetRow.of(demand.run(len(demand.arrivals), "round_robin"), slo)
    return None if row.meets else row
