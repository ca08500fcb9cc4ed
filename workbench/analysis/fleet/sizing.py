"""The number of replicas that a load needs for a target, and the router that serves it best."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from workbench.analysis.check import Check, shown
from workbench.analysis.fleet.demand import Demand
from workbench.analysis.fleet.fleet_row import FleetRow
from workbench.analysis.fleet.router import Router
from workbench.analysis.fleet.routers import check_serves
from workbench.analysis.spread_out import spread_out
from workbench.analysis.sweep import mark_pareto
from workbench.analysis.tuning import limits_text, read_slo
from workbench.base.field_checks import integer
from workbench.base.on_demand import find
from workbench.base.outside_files import json_value, read_text
from workbench.base.progress import progress_bar
from workbench.base.tables import table_lines, wrapped_text
from workbench.base.text import counted, significant
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.summary import rate_words
from workbench.trace.readings.metrics import number, percent

MAX_REPLICAS = 256
"""The largest fleet that ``size`` tries by default."""

MAX_FACTOR = 16.0
"""The largest multiple of a load that ``size`` tries for its answer."""

OBJECTIVES = {"replicas": "min", "ttft_mean": "min", "itl_mean": "min"}
"""The measures of a layout: each replica costs, and latencies should be small."""


@dataclass(frozen=True)
class FleetTable:
    """Layouts that were tried.

    Attributes:
        rows: Their numbers, in the order in which they were tried.
        slo: The target by name; empty without one.
        source: The origin of the durations of steps.
        best: The answer: the smallest layout that meets the target; None if none does.
        repeats: The answer's layout with other seeds and other fits of the cost model.
        highest: The answer's layout at the highest load that was found to meet the target.
        price: Price of a replica for an hour.
        check: The recording, predicted with one replica, beside what was measured; None without one.
        note: A sentence about rows that are missing; "" for none.
    """

    rows: list[FleetRow]
    slo: dict[str, float]
    source: str
    best: FleetRow | None = field(default=None)
    repeats: Sequence[FleetRow] = ()
    note: str = ""
    highest: FleetRow | None = None
    price: float | None = None
    check: Check | None = field(default=None, compare=False)

    def pareto(self) -> list[dict[str, Any]]:
        """The rows as plain data, with ``pareto``: no other is at least as good by ``OBJECTIVES`` and better in one."""
        plain = [
            {"router": row.router, "replicas": row.replicas, **row.values, "hit_rate": row.hit_rate, "end": "done"}
            for row in self.rows
        ]
        return mark_pareto(plain, OBJECTIVES)

    def to_svg(self) -> str:
        """The Pareto plot: time to first token against the number of replicas and inter-token latency."""
        svg: str = find("Sizing.to_svg")(self.pareto(), ["router", "replicas"], across=("replicas", "itl_mean"))
        return svg

    def __repr__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The table and the answer.

        Args:
            width: Columns of the terminal; None for any number. If they are too few, the table is split.
        """
        names = list(self.slo) or ["ttft_mean", "ttft_p99", "itl_mean"]
        head = ["", "router", "replicas", *names, *self._goodput, "hit rate", "busiest", "tokens/s"]
        head += ["cost of 1M", ""] if self.price is not None else [""]
        table = [head]
        for plain, row in zip(self.pareto(), self.rows):
            marks = "*" if plain["pareto"] else "", "<" if row is self.best else ""
            table.append([marks[0], *_cells(row, names, bool(self._goodput), self.price), marks[1]])
        lines = table_lines(table, width=width, title=(0, 1, 2, len(head) - 1))
        lines.append("* no other layout has fewer replicas and lower mean TTFT and ITL")
        if self.best is not None:
            lines.append("< the smallest fleet that meets the target")
        if self.slo:
            lines.append(self._answer())
        if self.repeats:
            lines += self._spread()
        if self.highest is not None:
            lines.append(self._limit())
        if self.price is not None:
            lines.append(f"cost of 1M: of a million output tokens, at {self.price:g} for a replica and hour")
        if any(row.idle for row in self.rows):
            lines.append("tokens/s: without idle time, in which no replica has work")
        if self.note:
            lines.append(self.note)
        lines += check_lines(self.check, names)
        lines.append(f"steps are simulated; their durations come from {self.source}")
        return wrapped_text("\n".join(lines), width)

    @property
    def _goodput(self) -> list[str]:
        """The head of the column of goodput, which only a target has."""
        return ["goodput"] if self.slo else []

    def _answer(self) -> str:
        limits = limits_text(self.slo)
        if self.best is not None:
            meets = "meets" if self.best.replicas == 1 else "meet"
            return f"{counted(self.best.replicas, 'replica')} with {self.best.router} {meets} {limits}"
        closest = min(self.rows, key=lambda row: row.score)
        return (
            f"no layout meets {limits}; closest: {counted(closest.replicas, 'replica')} with {closest.router}, whose "
            f"worst value is {significant(closest.score)} times its limit"
        )

    def _limit(self) -> str:
        """The highest load that the answer serves within the target, and the cost there."""
        assert self.best is not None and self.highest is not None
        still = "still meets" if self.best.replicas == 1 else "still meet"
        rate = f", {rate_words(self.highest.rate)} requests/s" if self.highest.rate else ""
        rate = ", all requests together" if self.highest.rate == 0 else rate
        text = (
            f"{counted(self.best.replicas, 'replica')} {still} it at "
            f"{significant(self.highest.load / self.best.load)} times this load{rate}"
        )
        if self.price is not None:
            text += f", where a million output tokens cost {number(self.highest.cost(self.price))}"
        return text

    def _spread(self) -> Iterator[str]:
        """The range of each value of the target over the repeats, and how many of them meet it."""
        assert self.best is not None
        for name in self.slo:
            rows = (self.best, *self.repeats)
            values = [row.values[name] for row in rows]
            low, high = min(row.low[name] for row in rows), max(row.high[name] for row in rows)
            single = (
                f", the first of which is the mean of {self.best.runs} simulations; single simulations lie within "
                f"{shown(name, low)} to {shown(name, high)}"
            )
            first = single if self.best.runs > 1 else ""
            yield f"{name}: {shown(name, min(values))} to {shown(name, max(values))} over {len(values)} runs{first}"
        met = sum(row.meets for row in (self.best, *self.repeats))
        yield f"{met} of {len(self.repeats) + 1} runs, with other seeds and fits of the cost model, meet the target"


def check_lines(check: Check | None, names: Sequence[str]) -> Iterator[str]:
    """The error of the prediction of a recording with one replica, and the way to read predictions of it.

    Args:
        check: The prediction beside what was measured; None for none.
        names: The values that are told.
    """
    known = [name for name in names if check is not None and name in check.errors]
    if check is None or not known:
        return
    values = (
        f"{name} {shown(name, check.unchanged[name])} (recorded {shown(name, check.measured[name])}, "
        f"off by {check.errors[name]:+z.0%})"
        for name in known
    )
    yield f"check, the recording predicted with one replica: {', '.join(values)}"
    if trust := check.caution or check.refusal:
        yield f"! {trust}"


def compare(
    demand: Demand,
    replicas: Sequence[int],
    routers: Sequence[str | Router],
    slo: str | Mapping[str, float] = "",
    *,
    out: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    executor: Executor | None = None,
    progress: bool = False,
    price: float | None = None,
) -> FleetTable:
    """Every number of replicas with every router, spread over processes. Ctrl-C ends it with the rows that are known.

    Args:
        demand: The demand.
        replicas: Numbers of replicas.
        routers: Routers.
        slo: A target, see `workbench.analysis.tuning.read_slo`; none by default.
        out: A JSON Lines file that gets each row when it is known; rows of the same demand that it holds already are
            taken from it, so that a comparison that was interrupted continues.
        jobs: Number of processes; None for one per core, 1 for runs in this process. A router of a notebook runs in
            this process: others cannot import it.
        executor: Runs the layouts instead. Any `concurrent.futures.Executor` will do, such as Dask's
            ``client.get_executor()``.
        progress: Show a progress bar of layouts, with the best so far.
        price: Price of a replica for an hour; None to show no costs.

    Raises:
        ValueError: An argument is malformed, or a request cannot be served.
    """
    limits = read_slo(slo) if slo else {}
    for router in routers:
        check_serves(router, demand.config)
    layouts = list(product([integer("replicas", count, 1) for count in replicas], routers))
    names = " ".join(each.name for each in fields(FleetRow))  # other versions have rows with other numbers
    known = _Known(out, f"{demand.fingerprint()} {sorted(limits.items())} {names}") if out is not None else None
    found = {layout: known.find(*layout) if known is not None else None for layout in layouts}
    left = [layout for layout, row in found.items() if row is None]
    if any(getattr(router, "__module__", "") == "__main__" for _, router in left):
        jobs = jobs if executor else 1
    note = ""
    with progress_bar(len(layouts), "fleets", "layout", shown=progress) as bar:
        bar.update(len(layouts) - len(left))
        try:
            for index, row in spread_out(_row, (demand, limits), left, executor=executor, jobs=jobs):
                found[left[index]] = row
                if known is not None:
                    known.add(row)
                bar.update(1)
                bar.set_postfix_str(_so_far(_best([row for row in found.values() if row is not None], limits)))
        except KeyboardInterrupt:
            rows = [row for row in found.values() if row is not None]
            if not rows:
                raise
            note = f"interrupted: {len(rows)} of {len(layouts)} layouts were simulated"
    rows = [row for row in found.values() if row is not None]
    best = _best(rows, limits)
    best_row = best if limits and best.meets else None
    return FleetTable(rows, limits, demand.source, best_row, note=note, price=price, check=demand.check)


def _row(
    shared: tuple[Demand, Mapping[str, float]],
    replicas: int,
    router: str | Router,
    seed: int = 0,
    model: CostModel | None = None,
) -> FleetRow:
    """The numbers of one layout, in a worker or here."""
    demand, limits = shared
    return demand.row(replicas, router, limits, seed, model)


def _best(rows: Sequence[FleetRow], limits: Mapping[str, float]) -> FleetRow:
    """The smallest layout that meets the target, or else the closest; without a target the lowest mean TTFT."""
    if not limits:
        return min(rows, key=lambda row: row.values["ttft_mean"])
    return min(rows, key=lambda row: (not row.meets, row.replicas if row.meets else 0, row.score))


def _so_far(best: FleetRow) -> str:
    """The best layout so far, for the progress bar."""
    what = f"{best.score:.2f} of the limit" if best.score else f"mean TTFT {best.shown('ttft_mean')}"
    return f"best so far: {best.replicas} with {best.router}, {what}"


class _Known:
    """The rows of a file that belong to one demand."""

    def __init__(self, path: str | os.PathLike[str], demand: str) -> None:
        self._path, self._demand = Path(path), demand
        lines = read_text(self._path).splitlines() if self._path.exists() else []
        rows = [
            json_value(line, f"{path} holds a line that is not JSON") for line in lines if line.endswith("}")
        ]  # the last may have been cut off
        try:
            self._rows = {(row["router"], row["replicas"]): row for row in rows if row.pop("demand") == demand}
        except (KeyError, TypeError, AttributeError) as problem:
            said = f"{type(problem).__name__}: {problem}"
            raise ValueError(f"{path} holds a row that is not of a fleet's size: {said}") from None

    def find(self, replicas: int, router: str | Router) -> FleetRow | None:
        """The row of a layout."""
        row = self._rows.get((router if isinstance(router, str) else router.name, replicas))
        return FleetRow(**row) if row is not None else None

    def add(self, row: FleetRow) -> None:
        """Write a row."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"demand": self._demand, **asdict(row)}) + "\n")


def size(
    demand: Demand,
    slo: str | Mapping[str, float],
    *,
    router: str = "round_robin",
    max_replicas: int = MAX_REPLICAS,
    repeats: int = 0,
    jobs: int | None = None,
    executor: Executor | None = None,
    highest: bool = False,
    price: float | None = None,
) -> FleetTable:
    """The smallest number of replicas that meets a target, by doubling and halving.

    It supposes that a larger fleet is at least as good, and gives up when twice as many replicas change nothing. The
    number below the answer is always tried, so that the answer is the smallest unless a still smaller fleet is better.

    Args:
        demand: The demand.
        slo: The target, such as "ttft_p99=2s,tpot_p99=50ms".
        router: The router.
        max_replicas: The largest fleet to try.
        repeats: Further runs of the answer, each with another seed and, if it was fitted, another cost model: a fit to
            stretches of the recording that are drawn with replacement.
        jobs: Number of processes for the repeats, see `compare`.
        executor: Runs the repeats instead.
        highest: Also search for the highest load that the answer serves within the target, to a sixteenth.
        price: Price of a replica for an hour; None to show no costs.

    Raises:
        ValueError: An argument is malformed, or a request cannot be served.
    """
    limits = read_slo(slo)
    integer("max_replicas", max_replicas, 1)
    integer("repeats", repeats, 0)
    tried: dict[int, FleetRow] = {}

    def meets(count: int) -> bool:
        tried[count] = _row((demand, limits), count, router)
        return tried[count].meets

    low, high = 0, 1  # ``low`` misses the target
    while not meets(high):
        if high == max_replicas or (low and _are_equal(tried[high], tried[low], limits)):
            rows = [tried[count] for count in sorted(tried)]
            return FleetTable(rows, limits, demand.source, price=price, check=demand.check)
        low, high = high, min(2 * high, max_replicas)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    models = demand.models or [demand.cost_model]
    tasks = [(high, router, seed, models[seed % len(models)]) for seed in range(1, repeats + 1)]
    found = dict(spread_out(_row, (demand, limits), tasks, executor=executor, jobs=jobs))
    again = [found[index] for index in sorted(found)]
    return FleetTable(
        rows=[tried[count] for count in sorted(tried)],
        slo=limits,
        source=demand.source,
        best=tried[high],
        repeats=again,
        highest=_highest(demand, limits, tried[high]) if highest else None,
        price=price,
        check=demand.check,
    )


def _are_equal(one: FleetRow, other: FleetRow, limits: Mapping[str, float]) -> bool:
    """Whether two layouts do not differ in the values of a target, but for the noise of steps."""
    tolerance = 0.005 if one.runs > 1 else 0.0
    return all(math.isclose(one.values[name], other.values[name], rel_tol=tolerance) for name in limits)


def _highest(demand: Demand, limits: Mapping[str, float], answer: FleetRow) -> FleetRow:
    """The answer's layout at the highest load that was found to meet the target, by doubling and halving."""
    found, low, high = answer, 1.0, math.inf  # ``high`` misses the target
    while high - low > low / 16 and low < MAX_FACTOR:
        factor = 2 * low if high == math.inf else (low + high) / 2
        row = _row((demand.times(factor), limits), answer.replicas, answer.router)
        if row.meets:
            found, low = row, factor
        else:
            high = factor
    return found


def _cells(row: FleetRow, names: Sequence[str], has_goodput: bool, price: float | None) -> list[str]:
    return [
        row.router,
        str(row.replicas),
        *(row.shown(name) for name in names),
        *([percent(row.goodput)] if has_goodput else []),
        percent(row.hit_rate),
        percent(row.largest_share),
        number(row.values["output_throughput"]),
        *([number(row.cost(price))] if price is not None else []),
    ]
