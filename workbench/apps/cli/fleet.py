"""``workbench fleet``: how many replicas a load needs, and which router serves it best; simulated exactly."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from workbench.apps.cli.options import (
    Commands,
    add_command,
    add_hit_rate_option,
    add_out_option,
    add_unit_options,
    check_folder,
    check_suffix,
    load_trace,
    plot,
    say_written,
    writing,
)
from workbench.apps.cli.say import say, say_text
from workbench.apps.cli.settings import add_settings_option, add_slo_option, complete_list, completed_by
from workbench.base.field_checks import integer, number
from workbench.base.keyword_fields import RouterName
from workbench.base.tables import terminal_width
from workbench.base.text import counted

if TYPE_CHECKING:
    from workbench.analysis.fleet.demand import Demand

ROUTER_NAMES: tuple[str, ...] = get_args(RouterName)
_ROUTERS = ", ".join(ROUTER_NAMES)

_RUN_EXAMPLES = """\
  workbench fleet run workload.json --replicas 4 --router cache_aware --out fleet
  workbench trace watch fleet
"""
_SIZE_EXAMPLES = """\
  workbench fleet size workload.json --slo ttft_p99=2s,tpot_p99=50ms
  workbench fleet size recording.jsonl.gz --slo ttft_p99=2s --load 1x,1.5x,2x,3x     replicas over the load
  workbench fleet size access.csv --cost-from measured.jsonl --slo ttft_p99=2s --load 2x --router cache_aware
"""
_COMPARE_EXAMPLES = """\
  workbench fleet compare workload.json --replicas 4
  workbench fleet compare measured.jsonl --replicas 2,4,8 --routers round_robin,cache_aware,prefix --slo ttft_p99=2s
"""
_SPLIT_EXAMPLES = """\
  workbench fleet split workload.json --kv-bytes-per-token 131072 --bandwidth 25e9 --lengths 100,1000 --plot split.svg
"""


def add_parser(commands: Commands) -> None:
    """Add ``fleet`` and its commands."""
    parser = commands.add_parser("fleet", help="size a fleet of replicas, and compare routers")
    below = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = add_command(below, "run", _run, "one fleet, whose traces can be watched", examples=_RUN_EXAMPLES)
    run.add_argument("--replicas", type=int, default=2, metavar="N", help="number of replicas (default 2)")
    _add_router_option(run)
    add_out_option(run, "DIR", "save the trace of each replica in this folder")
    run.add_argument("--plot", type=Path, metavar="OUT.svg", help="replicas as rows of one time axis")
    size = add_command(below, "size", _size, "the smallest number of replicas for a target", examples=_SIZE_EXAMPLES)
    _add_router_option(size)
    size.add_argument("--max-replicas", type=int, default=256, metavar="N", help="largest fleet to try (default 256)")
    size.add_argument(
        "--repeats", type=int, default=4, metavar="N", help="runs of the answer with other seeds and fits (default 4)"
    )
    compare = add_command(
        below, "compare", _compare, "numbers of replicas with several routers", examples=_COMPARE_EXAMPLES
    )
    compare.add_argument("--replicas", default="2", metavar="N,...", help="numbers of replicas (default 2)")
    routers = compare.add_argument("--routers", metavar="NAME,...", help=f"routers: {_ROUTERS} (default: all)")
    completed_by(routers, _complete_routers)
    compare.add_argument("--plot", type=Path, metavar="OUT.svg", help="Pareto plot of all layouts")
    compare.add_argument(
        "--rows", type=Path, metavar="OUT.jsonl", help="keep each layout's numbers here, and continue from them"
    )
    split = add_command(
        below,
        "split",
        _split,
        "prompt lengths for which prefill and decode apart are worth it",
        examples=_SPLIT_EXAMPLES,
    )
    split.add_argument("--prefill", type=int, default=1, metavar="N", help="replicas that prefill (default 1)")
    split.add_argument("--decode", type=int, default=1, metavar="N", help="replicas that decode (default 1)")
    for name, text in (("kv-bytes-per-token", "bytes of KV of a token"), ("bandwidth", "bytes a second to a replica")):
        split.add_argument(f"--{name}", type=float, required=True, metavar="BYTES", help=text)
    split.add_argument("--latency", type=float, default=0.0, metavar="S", help="seconds of a move beside its bytes")
    split.add_argument("--lengths", default="100,300,1000,3000,10000", metavar="N,...", help="prompt lengths")
    split.add_argument("--output", type=int, default=100, metavar="N", help="tokens of an answer (default 100)")
    split.add_argument(
        "--tokens-per-second", type=float, default=4000.0, metavar="N", help="load of each replica (default 4000)"
    )
    split.add_argument("--plot", type=Path, metavar="OUT.svg", help="plot of the latencies over the prompt length")
    for one in (run, size, compare, split):
        one.add_argument("file", type=Path, help="a workload, a recording, an access log or a public trace")
        one.add_argument(
            "--cost-from", type=Path, metavar="TRACE.jsonl", help="fit the duration of a step to this recording"
        )
        one.add_argument("--seed", type=int, default=0, metavar="N", help="seed of what is left to chance (default 0)")
        add_settings_option(one, "change a field of the configuration")
        add_unit_options(one)
        add_hit_rate_option(one)
    for one, required in ((size, True), (compare, False)):
        add_slo_option(one, "target, such as ttft_p99=2s,tpot_p99=50ms", required=required)
        one.add_argument("--jobs", type=int, metavar="N", help="processes (default: one per core)")
        one.add_argument("--price", type=float, metavar="COST", help="price of a replica for an hour, in any currency")
    for one in (run, size, compare):
        help = "keep the recorded arrival times of requests that contain the answer to another one"
        one.add_argument("--open-loop", action="store_true", help=help)
        several = "; several are sized one by one, such as 1x,2x,4x" if one is size else ""
        one.add_argument("--load", default="1x", metavar="2x", help=f"multiple of the load (default 1x){several}")
        one.add_argument(
            "--load-how",
            default="repeated",
            choices=("repeated", "compressed"),
            help="repeated: more users like these; compressed: these users, faster (default repeated)",
        )


def _complete_routers(prefix: str, **_: object) -> list[str]:
    """Completions of a list of routers."""
    return complete_list(prefix, ROUTER_NAMES)


def _add_router_option(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument(
        "--router", default="round_robin", metavar="NAME", help=f"router: {_ROUTERS} (default round_robin)"
    )
    completed_by(option, _complete_routers)


def _loads(text: str, several: bool) -> list[float]:
    """The value of ``--load``: a multiple, or several of them."""
    found = [re.fullmatch(r"(\d+(?:\.\d+)?)x?", each) for each in text.split(",")]
    loads = [float(match[1]) for match in found if match]
    if len(loads) < len(found) or not all(loads) or (len(loads) > 1 and not several):
        more = ", or several, such as 1x,2x,4x" if several else ""
        raise ValueError(f"--load must be a multiple > 0 such as 2x or 0.5x{more}, got {text!r}")
    return loads


def _demand(options: argparse.Namespace, load: float = 1.0) -> Demand:
    from workbench.analysis.fleet.demand import Demand
    from workbench.analysis.sweep import read_settings

    demand = Demand.read(
        options.file,
        cost_from=load_trace(options.cost_from) if options.cost_from else None,
        config=read_settings(options.set),
        load=load,
        how=getattr(options, "load_how", "repeated"),
        seed=options.seed,
        time_unit=options.time_unit,
        block_size=options.block_size,
        ignore_columns=options.ignore_columns,
        open_loop=getattr(options, "open_loop", False),
        hit_rate=options.hit_rate,
    )
    say(*str(demand.summary).splitlines())
    return demand


def _check_routers(*names: str) -> None:
    """Refuse an unknown router before a log of any size is read."""
    from workbench.analysis.fleet.routers import make_router

    for name in names:
        make_router(name)


def _serving(demand: Demand, names: Sequence[str], asked: bool = True) -> list[str]:
    """The routers that can serve replicas like these, before anything is simulated.

    One that cannot is refused if it was ``asked`` for, or else left out with a line that says why.
    """
    from workbench.analysis.fleet.routers import why_not

    problems = {name: problem for name in names if (problem := why_not(name, demand.config))}
    remedy = "" if demand.config.enable_prefix_caching else " (--set enable_prefix_caching=true)"
    for problem in problems.values():
        if asked:
            raise ValueError(problem + remedy)
        say(f"left out: {problem}{remedy}")
    return [name for name in names if name not in problems]


def _run(options: argparse.Namespace) -> int:
    check_suffix("--plot", options.plot, ".svg")
    check_folder("--out", options.out)
    _check_routers(options.router)
    replicas = integer("--replicas", options.replicas, 1)
    demand = _demand(options, *_loads(options.load, several=False))
    _serving(demand, [options.router])
    from workbench.analysis.hit_rates import hit_rates

    run = demand.run(replicas, options.router, options.seed)
    traces = (options.out, run.save, counted(replicas, "trace"))
    with writing((options.plot, plot(run.to_svg), ""), traces):
        say_text(run)
        if any(trace.config.get("enable_prefix_caching") for trace in run.traces):
            say_text(hit_rates(run.traces, {each.request_id: each.after for each in demand.arrivals if each.after}))
        say(f"steps are simulated; their durations come from {demand.source}")
    return 0


def _size(options: argparse.Namespace) -> int:
    from workbench.analysis.fleet.load_curve import load_curve
    from workbench.analysis.fleet.sizing import size

    _check_routers(options.router)
    loads, jobs, price = _loads(options.load, several=True), _jobs(options), _price(options)
    layout = {"router": options.router, "max_replicas": options.max_replicas}
    if len(loads) > 1:
        demand = _demand(options)
        _serving(demand, [options.router])
        curve = load_curve(demand, loads, options.slo, **layout)
        say_text(curve.text(terminal_width()))
        return 0 if all(point.row is not None for point in curve.points) else 1
    demand = _demand(options, *loads)
    _serving(demand, [options.router])
    table = size(demand, options.slo, **layout, repeats=options.repeats, jobs=jobs, highest=True, price=price)
    say_text(table.text(terminal_width()))
    return 0 if table.best is not None else 1


def _compare(options: argparse.Namespace) -> int:
    from workbench.analysis.fleet.routers import ROUTERS
    from workbench.analysis.fleet.sizing import compare

    check_suffix("--plot", options.plot, ".svg")
    replicas = _numbers("--replicas", options.replicas)
    routers = options.routers.split(",") if options.routers else list(ROUTERS)
    _check_routers(*routers)
    slo, jobs, price = options.slo or "", _jobs(options), _price(options)
    demand = _demand(options, *_loads(options.load, several=False))
    routers = _serving(demand, routers, asked=bool(options.routers))
    table = compare(demand, replicas, routers, slo, out=options.rows, jobs=jobs, progress=True, price=price)
    with writing((options.plot, plot(table.to_svg), "")):
        say_text(table.text(terminal_width()))
        if options.rows:
            say_written(options.rows, counted(len(table.rows), "row"))
    return 0


def _split(options: argparse.Namespace) -> int:
    from workbench.analysis.fleet.crossover import crossover
    from workbench.analysis.fleet.split import Split

    check_suffix("--plot", options.plot, ".svg")
    lengths = _numbers("--lengths", options.lengths)
    demand = _demand(options)
    found = crossover(
        lengths,
        Split(options.decode, options.kv_bytes_per_token, options.bandwidth, options.latency),
        replicas=options.prefill,
        config=demand.config,
        cost_model=demand.cost_model,
        output=options.output,
        tokens_per_second=options.tokens_per_second,
        seed=options.seed,
    )
    with writing((options.plot, plot(found.to_svg), "")):
        say_text(found)
        say(f"steps are simulated; their durations come from {demand.source}")
    return 0


def _jobs(options: argparse.Namespace) -> int | None:
    return None if options.jobs is None else integer("--jobs", options.jobs, 1)


def _price(options: argparse.Namespace) -> float | None:
    return None if options.price is None else number("--price", options.price, 0.0)


def _numbers(option: str, given: str) -> list[int]:
    if re.fullmatch(r"0*[1-9]\d*(,0*[1-9]\d*)*", given) is None:
        raise ValueError(f"{option} must be numbers >= 1 such as 2,4,8, got {given!r}")
    return [int(word) for word in given.split(",")]
