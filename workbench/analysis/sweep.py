"""A workload under every configuration of a grid, in parallel processes, and the Pareto front of the results."""

from __future__ import annotations

import copy
import csv
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from workbench.analysis.spread_out import spread_out
from workbench.base.field_checks import did_you_mean
from workbench.base.outside_files import json_value
from workbench.base.progress import progress_bar
from workbench.base.tables import table_lines
from workbench.base.text import duration, settings_text, shown
from workbench.config import EngineConfig
from workbench.simulation.at_scale import simulate_at_scale
from workbench.simulation.workload import read_json_workload, read_simulation
from workbench.trace.readings.metrics import number

OBJECTIVES = {"ttft_mean": "min", "itl_mean": "min", "output_throughput": "max"}
"""The measures of a configuration: latencies should be small, throughput large."""

MAX_RUNS = 10_000
"""Maximum number of combinations in a grid: a misplaced value should not start a million simulations."""

Row = dict[str, Any]


def read_grid(settings: Iterable[str], known: Sequence[str] = ()) -> dict[str, list[Any]]:
    """A grid from arguments such as ``max_num_batched_tokens=256,512`` and ``max_num_partial_prefills=none,4``.

    Args:
        settings: The arguments.
        known: The fields that may be swept; empty for those of EngineConfig, and ``rate``, the arrival rate of a
            generated workload.

    Raises:
        ValueError: An argument has no value, or its field is unknown or given twice.
    """
    found = _by_field(settings, known or [*EngineConfig().to_dict(), "rate"], "--sweep", "FIELD=VALUE,VALUE,...")
    return {name: [_value(text) for text in texts.split(",")] for name, texts in found.items()}


def read_settings(settings: Iterable[str], known: Sequence[str] = ()) -> dict[str, Any]:
    """One value for each field of EngineConfig, from arguments such as ``max_num_seqs=4`` or ``speculative={...}``.

    Args:
        settings: The arguments.
        known: The fields that may be set; empty for all.

    Raises:
        ValueError: An argument has no value, or its field is unknown or given twice.
    """
    found = _by_field(settings, known or [*EngineConfig().to_dict()], "--set", "FIELD=VALUE")
    return {name: _value(text) for name, text in found.items()}


def _by_field(settings: Iterable[str], known: Sequence[str], option: str, form: str) -> dict[str, str]:
    """The texts behind ``FIELD=``, by field; ``form`` says how a value of the option should look."""
    texts: dict[str, str] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in known:
            hint = did_you_mean(name, known, f"{option} help")
            raise ValueError(f"{option} {setting!r}: unknown field {shown(name)}{hint}")
        if not text:
            raise ValueError(f"{option} {setting!r} must be {form}; {option} help lists the fields")
        if name in texts:
            raise ValueError(f"{option} {setting!r}: {name} is given twice")
        texts[name] = text
    return texts


def _value(text: str) -> Any:
    try:
        return json_value({"none": "null", "true": "true", "false": "false"}.get(text.lower(), text))
    except ValueError:
        return text


def sweep(
    workload: Mapping[str, Any] | str | os.PathLike[str],
    grid: Mapping[str, Sequence[Any]],
    *,
    jobs: int | None = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> list[Row]:
    """Simulate a workload under every combination of a grid.

    Args:
        workload: A workload with a cost model, see ``workbench.simulation.workload.read_simulation``.
        grid: Values by EngineConfig field, or by "rate".
        jobs: Number of processes; None for one per core. With 1 the runs take place in this process.
        executor: Runs the simulations instead. Any `concurrent.futures.Executor` will do, such as Dask's
            ``client.get_executor()``.
        progress: Show a progress bar of runs.

    Returns:
        One row per combination, in the order of the grid: its settings, the numbers of its SimulationSummary,
        ``error`` (why the combination is invalid, "" if it ran), and ``pareto`` (no other row is at least as good
        in mean TTFT, mean ITL and throughput, and better in one). After Ctrl-C only those that are known.

    Raises:
        ValueError: The workload is malformed or has no cost model, the grid is empty or too large, or no combination
            with one of its values is possible.
    """
    content = dict(read_json_workload(workload))
    if read_simulation(content)[2] is None:
        raise ValueError('a sweep compares times: give the workload a cost_model, such as {"fixed": 0.01}')
    combinations = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    if not grid or len(combinations) > MAX_RUNS:
        raise ValueError(f"the grid has {len(combinations) if grid else 0} combinations, allowed are 1 to {MAX_RUNS}")
    if "rate" in grid and "generate" not in content:
        raise ValueError("rate can only be swept for a workload that has generate.arrivals")
    without_requests = {name: [] if name == "requests" else value for name, value in content.items()}
    refuse_impossible_values(grid, combinations, lambda settings: read_simulation(_changed(without_requests, settings)))
    rows: list[Row] = [{} for _ in combinations]
    with progress_bar(len(rows), "sweep", "run", shown=progress) as bar:
        try:
            tasks = [(settings,) for settings in combinations]
            for index, row in spread_out(_run, content, tasks, executor=executor, jobs=jobs):
                rows[index] = row
                bar.update()
        except KeyboardInterrupt:
            rows = [row for row in rows if row]
            if not rows:
                raise
    return mark_pareto(rows)


def refuse_impossible_values(
    grid: Iterable[str], combinations: Sequence[Mapping[str, Any]], check: Callable[[dict[str, Any]], object]
) -> None:
    """Refuse a value that no combination of a grid can have, before anything is simulated.

    A value that is possible in some combinations, such as a small budget beside few seats, is allowed.

    Args:
        grid: The fields.
        combinations: Values by field.
        check: Raises a ValueError for an impossible combination.

    Raises:
        ValueError: The first problem of such a value.
    """
    problems: dict[tuple[str, str], ValueError | None] = {}
    for settings in combinations:
        problem = None
        try:
            check(dict(settings))
        except ValueError as found:
            problem = found
        for name in grid:
            key = name, repr(settings[name])
            if key not in problems or problem is None:
                problems[key] = problem
    for impossible in filter(None, problems.values()):
        raise impossible


def _changed(workload: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The workload with other settings; fields that are not changed are shared with it."""
    changes, changed = dict(settings), dict(workload)
    if "rate" in changes:
        generate = changed["generate"]
        arrivals = generate.get("arrivals") or {"process": "poisson"}
        changed["generate"] = {**generate, "arrivals": {**arrivals, "rate": changes.pop("rate")}}
    return {**changed, "config": {**(changed.get("config") or {}), **changes}}


def _run(workload: dict[str, Any], settings: dict[str, Any]) -> Row:
    """Run one combination, in a separate process or in this one."""
    try:
        config, arrivals, cost_model = read_simulation(_changed(copy.deepcopy(workload), settings))
    except ValueError as problem:
        return {**settings, "error": str(problem)}
    assert cost_model is not None  # sweep() has checked it
    return {**settings, **simulate_at_scale(config, arrivals, cost_model).to_row(), "error": ""}


def mark_pareto(rows: list[Row], objectives: Mapping[str, str] = OBJECTIVES) -> list[Row]:
    """Set ``pareto`` in every row: True if no other row beats it by some objectives, each "min" or "max"."""

    def losses(row: Row) -> tuple[float, ...] | None:
        values = [value for name in objectives if (value := row.get(name)) is not None]
        if row.get("end") != "done" or len(values) < len(objectives):
            return None
        return tuple(value if goal == "min" else -value for value, goal in zip(values, objectives.values()))

    points = [losses(row) for row in rows]

    def beaten(point: tuple[float, ...]) -> bool:
        others = (other for other in points if other is not None and other != point)
        return any(all(theirs <= own for theirs, own in zip(other, point)) for other in others)

    return [row | {"pareto": point is not None and not beaten(point)} for row, point in zip(rows, points)]


def rows_text(rows: Sequence[Row], grid: Collection[str], width: int | None = None) -> str:
    """The rows as a table: their settings, latencies and throughput, and their end or why they are invalid.

    Args:
        rows: The rows.
        grid: Names of the settings.
        width: Columns of the terminal; None for any number.
    """
    table = [["", *grid, "TTFT mean", "TTFT p99", "ITL mean", "output tokens/s", "end"]]
    for row in rows:
        settings = [settings_text({name: row[name]}).partition("=")[2] for name in grid]
        times = ["-" if row["error"] else _time(row[name]) for name in ("ttft_mean", "ttft_p99", "itl_mean")]
        rate = "-" if row["error"] else number(row["output_throughput"])
        table.append(["*" if row.get("pareto") else "", *settings, *times, rate, row["error"] or row["end"]])
    title, last = range(len(grid) + 1), len(table[0]) - 1
    notes = ["* on the Pareto front of mean TTFT, mean ITL and throughput"]
    notes += ["output tokens/s are without idle time"] if any(row.get("idle") for row in rows) else []
    return "\n".join([*table_lines(table, width=width, title=title, left=(last,)), *notes])


def _time(seconds: float | None) -> str:
    return "none" if seconds is None else duration(seconds)


def save_table(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Write rows as a table: .csv, or .parquet if pyarrow is installed.

    Raises:
        ValueError: The path has another ending, or is a .parquet file and pyarrow is missing.
        OSError: The file cannot be written.
    """
    target = Path(path)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if target.suffix == ".csv":
        with target.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    elif target.suffix == ".parquet":
        try:
            import pyarrow as pa
            from pyarrow import parquet
        except ImportError as problem:
            raise ValueError(f"{target}: a .parquet file needs pyarrow ({problem}): install it or use .csv") from None
        parquet.write_table(pa.table({name: [row.get(name) for row in rows] for name in columns}), target)
    else:
        raise ValueError(f"{target} must end in .csv or .parquet")
