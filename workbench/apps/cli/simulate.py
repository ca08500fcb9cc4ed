"""``workbench simulate``: one run with its trace, one run at scale, or a sweep over configurations."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.apps.cli.options import (
    TRACE_SUFFIXES,
    Commands,
    add_command,
    add_out_option,
    check_suffix,
    check_table_and_plot,
    load_trace,
    plot,
    writing,
)
from workbench.apps.cli.say import say, say_text
from workbench.apps.cli.settings import add_settings_option, add_sweep_option, config_fields
from workbench.base.field_checks import integer, json_object
from workbench.base.tables import terminal_width
from workbench.base.text import counted

if TYPE_CHECKING:
    from workbench.trace import Trace

_EXAMPLES = """\
  workbench simulate workload.json --out run.jsonl
  workbench simulate workload.json --set max_num_seqs=4 --set policy=priority
  workbench simulate workload.json --cost-from measured.jsonl
  workbench simulate million.json --record 5000:5200 --out stretch.jsonl
  workbench simulate million.json --sweep max_num_batched_tokens=512,2048 --sweep max_num_partial_prefills=none,4 \\
      --out sweep.csv --plot sweep.svg
"""

_TRACE_SUFFIX = re.compile(r"\.jsonl(\.gz)?$")


def add_parser(commands: Commands) -> None:
    """Add ``simulate`` to the commands."""
    parser = add_command(
        commands, "simulate", run, "run a workload through the scheduler without a model", examples=_EXAMPLES
    )
    parser.add_argument("workload", type=Path, help="workload file (JSON)")
    help = "file to write: the trace (.jsonl, .jsonl.gz), or the table of a sweep (.csv, .parquet)"
    add_out_option(parser, "FILE", help, before=["--trace"])
    parser.add_argument(
        "--cost-from", type=Path, metavar="TRACE.jsonl", help="fit the duration of a step to the timings of this trace"
    )
    parser.add_argument("--record", metavar="FIRST:LAST", help="steps of a generated workload that --out saves")
    add_settings_option(parser, "a field of the configuration, in place of the workload's")
    help = "values of a configuration field or of rate to try"
    add_sweep_option(parser, help, lambda: {**config_fields(), "rate": ()})
    parser.add_argument("--jobs", type=int, metavar="N", help="processes of a sweep (default: one per core)")
    parser.add_argument("--plot", type=Path, metavar="OUT.svg", help="Pareto plot of a sweep")


def run(options: argparse.Namespace) -> int:
    """Simulate the workload and print latencies.

    Raises:
        ValueError: A file or an option is malformed, or options contradict each other.
        OSError: A file cannot be read or written.
    """
    from workbench.simulation.costs.cost_model import CostModel
    from workbench.simulation.simulate import next_token, simulate_requests
    from workbench.simulation.summary import summary_of, summary_of_generated
    from workbench.simulation.workload import read_json_workload, read_simulation
    from workbench.trace.readings.metrics_collector import metrics

    _check_options(options)
    workload = _configured(read_json_workload(options.workload), options)
    config, arrivals, cost_model = read_simulation({**workload, **_clock(workload, options)})
    if "generate" in workload:
        summary = summary_of_generated(workload["generate"])
    else:
        summary = summary_of(arrivals := list(arrivals), config.block_size)
    say(*f"{options.workload.name}: {summary}".splitlines())
    if options.cost_from:
        model, report = CostModel.fit(load_trace(options.cost_from))
        cost_model, workload["cost_model"] = model, model.to_dict()
        say(
            f"cost model fitted to {counted(report.num_fitted, 'step')} of {options.cost_from}; on "
            f"{report.num_held_out:,} others the median error is {report.median_error:.1%}, of their sum "
            f"{report.total_error:.1%}"
        )
    if options.sweep:
        return _run_sweep(workload, options)
    if "generate" in workload and (options.record or not options.out):
        return _run_at_scale(workload, options)
    trace = simulate_requests(config, arrivals, next_token, cost_model=cost_model)
    saved = _recorded(trace, options.record) if options.record else trace
    with _saving(saved, options.out):
        say_text(metrics(trace))
    return 0


def _configured(workload: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The workload with the fields of ``--set`` in its configuration."""
    from workbench.analysis.sweep import read_grid, read_settings

    settings = read_settings(options.set)
    if twice := [name for name in read_grid(options.sweep) if name in settings]:
        raise ValueError(f"--set and --sweep both give {twice[0]}; leave one of them out")
    config = json_object("config", workload.get("config") or {})
    return {**workload, "config": {**config, **settings}} if settings else dict(workload)


def _clock(workload: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """A clock for a workload that gets its own from a recording, which is read later."""
    return {"cost_model": {"fixed": 1.0}} if options.cost_from and "cost_model" not in workload else {}


def _check_options(options: argparse.Namespace) -> None:
    for name in ("jobs", "plot"):
        if getattr(options, name) is not None and not options.sweep:
            raise ValueError(f"--{name} belongs to a sweep: give --sweep FIELD=A,B,... as well")
    is_table = options.out is not None and options.out.suffix in (".csv", ".parquet")
    if is_table and not options.sweep:
        raise ValueError(f"--out belongs to a sweep if it is a table such as {options.out}: give --sweep FIELD=A,B,...")
    if options.sweep and (options.record or (options.out is not None and _TRACE_SUFFIX.search(options.out.name))):
        raise ValueError("--sweep keeps no steps: leave --record out, and give --out a table (.csv, .parquet)")
    if options.jobs is not None:
        integer("--jobs", options.jobs, 1)
    if options.record and not options.out:
        raise ValueError("--record needs --out OUT.jsonl to save the steps to")
    if options.record:
        _read_range(options.record)
    if options.out and not options.out.parent.exists():
        raise ValueError(f"--out {options.out}: there is no folder {options.out.parent}")
    if options.sweep:
        check_table_and_plot(options)
    else:
        check_suffix("--out", options.out, *TRACE_SUFFIXES)


def _run_at_scale(workload: Mapping[str, Any], options: argparse.Namespace) -> int:
    from workbench.simulation.at_scale import simulate_at_scale
    from workbench.simulation.workload import read_simulation

    config, arrivals, cost_model = read_simulation(workload)
    assert cost_model is not None  # read_simulation requires one for generated requests
    steps = _read_range(options.record) if options.record else range(0)
    total = workload["generate"].get("num_requests")
    summary = simulate_at_scale(config, arrivals, cost_model, record_steps=steps, total=total, progress=True)
    if options.record and summary.recorded is None:
        raise ValueError(f"--record {options.record}: the run has only {counted(summary.num_steps, 'step')}")
    with _saving(summary.recorded, options.out):
        say_text(summary)
    return 0


def _recorded(trace: Trace, text: str) -> Trace:
    """The steps of a run that ``--record`` names.

    Raises:
        ValueError: It names no steps, or none of this run.
    """
    steps = _read_range(text)
    if steps.start >= len(trace):
        raise ValueError(f"--record {text}: the run has only {counted(len(trace), 'step')}")
    return trace[steps.start : steps.stop]


def _read_range(text: str) -> range:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise ValueError(f"--record must be FIRST:LAST with FIRST below LAST, such as 5000:5200, got {text!r}")
    return range(int(match[1]), int(match[2]))


def _run_sweep(workload: Mapping[str, Any], options: argparse.Namespace) -> int:
    from workbench.analysis.sweep import read_grid, rows_text, save_table, sweep
    from workbench.viz.pareto import pareto_svg

    grid = read_grid(options.sweep)
    rows = sweep(workload, grid, jobs=options.jobs, progress=True)
    table = (options.out, partial(save_table, rows), "")
    with writing(table, (options.plot, plot(lambda: pareto_svg(rows, list(grid))), "")):
        print(rows_text(rows, grid, terminal_width()))
    return 0


def _saving(trace: Trace | None, path: Path | None) -> AbstractContextManager[None]:
    return writing((path, trace.save, counted(len(trace), "step"))) if trace is not None else nullcontext()
