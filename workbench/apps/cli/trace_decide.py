"""``workbench trace explain``, ``misses``, ``whatif`` and ``tune``: from a recording to a decision."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.apps.cli.options import (
    TRACE_OR_RANKS,
    TRACE_SUFFIXES,
    Commands,
    add_command,
    add_hit_rate_option,
    add_list,
    add_out_option,
    add_unit_options,
    add_window_options,
    check_suffix,
    check_table_and_plot,
    has_window,
    load_ranks,
    load_trace,
    parts_of,
    plot,
    writing,
)
from workbench.apps.cli.say import say, say_text
from workbench.apps.cli.settings import add_settings_option, add_slo_option, add_sweep_option, tuned_fields, vllm_fields
from workbench.base.field_checks import integer
from workbench.base.tables import table_lines, terminal_width
from workbench.base.text import counted, printable

if TYPE_CHECKING:
    from workbench.analysis.causes import Explanation
    from workbench.analysis.predict import Predictor
    from workbench.trace import Trace

_WHATIF = """\
  workbench trace whatif run.jsonl.gz --set max_num_batched_tokens=2048
  workbench trace whatif run.jsonl.gz --set max_num_seqs=64 --set enable_prefix_caching=false --out predicted.jsonl
  workbench trace whatif /var/log/vllm-traces --set data_parallel_size=4         all ranks, and two more
"""

_TUNE = """\
  workbench trace tune run.jsonl.gz --slo ttft_p99=1s,itl_p99=100ms
  workbench trace tune access.csv --cost-from run.jsonl.gz --slo ttft_p99=1s
  workbench trace tune run.jsonl.gz --slo ttft_p99=1s --sweep max_num_batched_tokens=512,1024,2048 --plot front.svg
"""

_EXPLAIN = """\
  workbench trace explain run.jsonl.gz r17
  workbench trace explain run.jsonl.gz --slowest 10
  workbench trace explain run.jsonl.gz --by e2e        where the time of all requests went
"""

_MISSES = """\
  workbench trace misses run.jsonl.gz
  workbench trace misses run.jsonl.gz r17
"""


def add_parsers(actions: Commands) -> None:
    """Add the commands to ``workbench trace``."""
    explain = add_command(actions, "explain", _explain, "say why requests took as long as they did", examples=_EXPLAIN)
    explain.add_argument("trace", type=Path, help=TRACE_OR_RANKS)
    explain.add_argument(
        "request_id",
        nargs="*",
        default=[],
        help="requests, by id or its beginning, to explain in full; none for a table of all causes",
    )
    explain.add_argument("--slowest", type=int, metavar="N", help="a table of the N slowest requests")
    help = "slowest by this latency (default: ttft)"
    explain.add_argument("--by", choices=("ttft", "e2e"), default="ttft", help=help)

    help = "say why prefixes were not found in the cache, and what would have saved how many tokens"
    misses = add_command(actions, "misses", _misses, help, examples=_MISSES)
    misses.add_argument("trace", type=Path, help=TRACE_OR_RANKS)
    help = "requests, by id or its beginning, whose admissions to explain one by one"
    misses.add_argument("request_id", nargs="*", default=[], help=help)

    for parser in (explain, misses):
        add_window_options(parser)

    whatif = add_command(actions, "whatif", _whatif, "predict a recorded run under other settings", examples=_WHATIF)
    _add_sources(whatif)
    add_settings_option(whatif, "a changed setting of vLLM's", vllm_fields)
    add_out_option(whatif, "OUT.jsonl", "file to save the predicted trace to", before=["--save"])

    tune = add_command(actions, "tune", _tune, "find the setting that meets a target on a recorded run", examples=_TUNE)
    _add_sources(tune)
    add_slo_option(tune, "target, such as ttft_p99=1s,itl_p99=100ms", required=True)
    add_sweep_option(tune, "values to try", tuned_fields)
    add_out_option(tune, "OUT.csv", "table of all settings (.csv, .parquet)")
    tune.add_argument("--plot", type=Path, metavar="OUT.svg", help="Pareto plot of all settings")


def _add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the recordings that `_sources` loads."""
    help = f"{TRACE_OR_RANKS}, or an access log (.csv, .jsonl) with --cost-from"
    parser.add_argument("trace", type=Path, help=help)
    add_list(parser, "--also", "TRACE", "another recording to fit the durations of steps to", Path)
    help = "fit the durations of steps to this recording instead"
    parser.add_argument("--cost-from", type=Path, metavar="TRACE", help=help)
    add_unit_options(parser)
    add_hit_rate_option(parser)
    add_window_options(parser, "the whole run is simulated, and the latencies of requests in this part count")
    help = "give seconds even if the prediction of the recorded setting is far from what was measured"
    parser.add_argument("--force", action="store_true", help=help)
    help = "keep the recorded arrival times of requests that contain the answer to another one"
    parser.add_argument("--open-loop", action="store_true", help=help)


def _explain(options: argparse.Namespace) -> int:
    from workbench.analysis.apart import apart
    from workbench.analysis.causes import misfit_words, none_has, tabulate
    from workbench.analysis.explain import Explainer, slowest
    from workbench.trace.readings.fleet import by_settings

    if options.request_id and options.slowest is not None:
        raise ValueError("name the requests to explain, or give --slowest N, not both")
    if options.slowest is not None:
        integer("--slowest", options.slowest, 1)
    traces, width = load_ranks(options.trace, options), terminal_width()
    if options.request_id:
        for request_id, trace in _named(traces, options.request_id):
            print(Explainer(trace).explain(request_id).text(width))
        return 0
    found = [(name, each) for name, trace in traces.items() for each in slowest(trace, options.slowest, options.by)]
    if options.slowest is None:
        servers = by_settings(traces)
        for names in servers:
            if len(servers) > 1:
                say(f"{', '.join(names)} (the others have other settings):")
            print(tabulate([each for name, each in found if name in names], options.by).text(width))
        for name, problem in {name: each.misfit for name, each in found if each.misfit}.items():
            say(f"{name}: {misfit_words(problem)}" if name else misfit_words(problem))
        return 0
    found.sort(key=lambda named: -getattr(named[1].span(options.by), "total", 0.0))
    found = found[: options.slowest]
    if not found:
        say(none_has(options.by))
        return 0
    print("\n".join(table_lines(_slowest_table(found, options.by), width=width, left=(0, 3, 4))))
    for name, trace in traces.items():
        num_shown = sum(other == name for other, _ in found)
        for difference in apart(trace, options.by, num_shown):
            say(f"{name}: {difference}" if name else str(difference))
    return 0


def _slowest_table(found: Sequence[tuple[str, Explanation]], by: str) -> list[list[str]]:
    """The rows of a table of requests, each by the name of its rank and its explanation, under their headings."""
    rows = [["request", by, "share", "arrived", "biggest part"]]
    for name, explanation in found:
        span = explanation.span(by)
        assert span is not None  # it has this latency
        part = span.biggest
        amount = span.amount(explanation.unit).replace("at least ", ">=")
        share = f"{part.amount / span.total:.0%}" if part is not None else "-"
        cause = "-" if part is None else ": ".join(filter(None, (part.words, ", ".join(part.culprits[:3]))))
        shown = f"{name}: {explanation.request_id}" if name else explanation.request_id
        rows.append([printable(shown), amount, share, explanation.arrived, printable(cause)])
    return rows if any(row[3] for row in rows[1:]) else [[*row[:3], row[4]] for row in rows]


def _named(traces: Mapping[str, Trace], names: Sequence[str]) -> Iterator[tuple[str, Trace]]:
    """Requests by their names, each with the trace that it is in."""
    from workbench.trace.window import find_in

    for name in names:
        request_id = find_in(traces.values(), name)
        yield request_id, next(trace for trace in traces.values() if request_id in trace.requests)


def _misses(options: argparse.Namespace) -> int:
    from workbench.analysis.misses import misses_table, why_missed

    traces = load_ranks(options.trace, options)
    for request_id, trace in _named(traces, options.request_id):
        say_text(why_missed(trace, request_id))
    for rank, trace in () if options.request_id else traces.items():
        say_text(f"{rank}: {misses_table(trace)}" if rank else misses_table(trace))
    return 0


def _predictor(options: argparse.Namespace, changes: Collection[str] = ()) -> Predictor:
    """The run to predict: of one scheduler, or of all ranks, those in a folder or another number of them.

    Args:
        options: The options of `_add_sources`.
        changes: The fields that change.
    """
    from workbench.analysis.fleet.ranks import RANKS, RanksPredictor
    from workbench.analysis.predict import Predictor

    ranks = load_ranks(options.trace) if options.trace.is_dir() else {}
    if len(ranks) > 1:
        others = [load_trace(path) for path in options.also]
        fit_from = [load_trace(options.cost_from)] if options.cost_from else []
    else:
        trace, others, fit_from = _sources(options, next(iter(ranks.values()), None))
        ranks = {"": trace}
    _print_when(ranks)
    chosen: dict[str, Any] = {
        "others": others,
        "fit_from": fit_from,
        "counted": _counted(ranks, options),
        "open_loop": options.open_loop,
        "measured": _measured(options.trace, options.ignore_columns),
        "rough": True,
    }
    return RanksPredictor(ranks, **chosen) if len(ranks) > 1 or RANKS in changes else Predictor(ranks[""], **chosen)


def _print_when(traces: Mapping[str, Trace]) -> None:
    """Print the time of day of each recording that has one."""
    from workbench.trace.readings.recorded_when import recorded_when

    for name, trace in traces.items():
        if when := recorded_when(trace):
            say(f"{name}: recorded {when}" if name else f"recorded {when}")


def _measured(path: Path, ignored: Collection[str]) -> dict[str, float] | None:
    """The latencies that spans or a recording of vllm-vcr have; None for other files."""
    from workbench.simulation.request_log import read_request_log
    from workbench.trace.formats.otlp import is_otlp
    from workbench.trace.formats.vcr import is_vcr

    if path.is_dir() or not (is_otlp(path) or is_vcr(path)):
        return None
    return {
        f"{name}_{key}": value
        for name, found in read_request_log(path, ignored).latencies.items()
        for key in ("mean", "p50", "p95", "p99", "max")
        if (value := getattr(found, key)) is not None
    }


def _counted(traces: Mapping[str, Trace], options: argparse.Namespace) -> set[str] | None:
    """The requests in the chosen part of the run, whose number is printed; None for all."""
    from workbench.analysis.predict import whose_latencies

    if not has_window(options):
        return None
    counted_ids = {request_id for part in parts_of(traces, options).values() for request_id in part.requests}
    say(whose_latencies(len(counted_ids)))
    return counted_ids


def _sources(options: argparse.Namespace, only: Trace | None) -> tuple[Trace, list[Trace], list[Trace]]:
    """The run to predict, which may be the only one in a folder, recordings to merge with it, and others to fit to."""
    from workbench.analysis.assumed_hits import AssumedHits
    from workbench.analysis.fork import recorded_config
    from workbench.analysis.log_run import simulate_log
    from workbench.simulation.access_log import is_access_log, read_log, refuse_units
    from workbench.simulation.costs.cost_model import CostModel

    others = [load_trace(path) for path in options.also]
    if options.cost_from is None:
        if is_access_log(options.trace):
            raise ValueError(f"{options.trace} is an access log, without durations: give --cost-from RECORDING")
        refuse_units(options.trace, options.time_unit, options.block_size, options.ignore_columns)
        return only or load_trace(options.trace), others, []
    if others:
        raise ValueError("--also merges recordings with the trace, --cost-from replaces it: give one of the two")
    costs = load_trace(options.cost_from)
    if not is_access_log(options.trace):
        refuse_units(options.trace, options.time_unit, options.block_size, options.ignore_columns)
        return only or load_trace(options.trace), [], [costs]
    log = read_log(options.trace, options.time_unit, options.block_size, ignore_columns=options.ignore_columns)
    say_text(log)
    if log.block_size is None:
        hits, config = AssumedHits.of(costs, options.hit_rate), recorded_config(costs)
        say_text(hits)
        log = replace(log, arrivals=hits.apply(log.arrivals, config.block_size))
    elif options.hit_rate is not None:
        raise ValueError(f"--hit-rate is for a log without contents; {options.trace} says which prompts begin alike")
    trace = simulate_log(log, recorded_config(costs), CostModel.fit(costs)[0])
    say(f"{counted(len(trace.requests), 'request')} of {options.trace} under the configuration of {options.cost_from}")
    return trace, [], [costs]


def _whatif(options: argparse.Namespace) -> int:
    from workbench.analysis.flags import VLLM_FIELDS
    from workbench.analysis.sweep import read_settings

    check_suffix("--out", options.out, *TRACE_SUFFIXES)
    changes = read_settings(options.set, VLLM_FIELDS)
    answer = _predictor(options, changes).whatif(force=options.force, progress=True, **changes)
    prediction = answer.prediction
    num_steps = counted(round(prediction.outcome.values["num_steps"]), "predicted step")
    with writing((options.out, lambda path: prediction.trace.save(path), num_steps)):  # simulated for a file
        print(answer)
    return 0


def _tune(options: argparse.Namespace) -> int:
    from workbench.analysis.sweep import read_grid, save_table
    from workbench.analysis.tune import tune
    from workbench.analysis.tuning import read_slo
    from workbench.viz.pareto import pareto_svg

    check_table_and_plot(options)
    read_slo(options.slo)
    grid = read_grid(options.sweep, [*tuned_fields()]) if options.sweep else None
    predictor = _predictor(options, grid or ())
    tuning = tune(predictor.trace, options.slo, grid=grid, predictor=predictor, force=options.force, progress=True)
    rows = list(tuning.rows)
    drawn = (options.plot, plot(lambda: pareto_svg(rows, tuning.settings)), "")
    with writing((options.out, partial(save_table, rows), ""), drawn):
        say_text(tuning)
    return 0
