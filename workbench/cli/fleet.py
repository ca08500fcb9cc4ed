"""``workbench fleet``: how many replicas a load needs, and which router serves it best; simulated exactly."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.options import Commands, add_command, add_settings_option, load_trace

if TYPE_CHECKING:
    from workbench.fleet.sizing import Demand

_SIZE_EXAMPLES = """\
  workbench fleet size workload.json --slo ttft_p99=2s,tpot_p99=50ms
  workbench fleet size access.csv --cost-from measured.jsonl --slo ttft_p99=2s --load 2x --router cache_aware
"""
_COMPARE_EXAMPLES = """\
  workbench fleet compare workload.json --replicas 4
  workbench fleet compare measured.jsonl --replicas 2,4,8 --routers round_robin,cache_aware,prefix --slo ttft_p99=2s
"""


def add_parser(commands: Commands) -> None:
    """Add ``fleet`` and its commands."""
    parser = commands.add_parser("fleet", help="size a fleet of replicas, and compare routers")
    below = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    size = add_command(below, "size", _size, "the smallest number of replicas for a target", examples=_SIZE_EXAMPLES)
    size.add_argument("--router", default="round_robin", metavar="NAME", help="router (default round_robin)")
    size.add_argument("--max-replicas", type=int, default=256, metavar="N", help="largest fleet to try (default 256)")
    compare = add_command(
        below, "compare", _compare, "numbers of replicas with several routers", examples=_COMPARE_EXAMPLES
    )
    compare.add_argument("--replicas", default="2", metavar="N,...", help="numbers of replicas (default 2)")
    compare.add_argument("--routers", metavar="NAME,...", help="routers (default: all)")
    for one, required in ((size, True), (compare, False)):
        one.add_argument("file", type=Path, help="a workload, a recording, an access log or a public trace")
        one.add_argument(
            "--slo", required=required, metavar="NAME=TIME,...", help="target, such as ttft_p99=2s,tpot_p99=50ms"
        )
        one.add_argument(
            "--cost-from", type=Path, metavar="TRACE.jsonl", help="fit the duration of a step to this recording"
        )
        one.add_argument("--load", default="1x", metavar="2x", help="multiple of the load (default 1x)")
        one.add_argument(
            "--load-how",
            default="repeated",
            metavar="HOW",
            help="repeated: more users like these; compressed: these users, faster (default repeated)",
        )
        one.add_argument("--seed", type=int, default=0, metavar="N", help="seed of what is left to chance (default 0)")
        add_settings_option(one, "change a field of the configuration")


def _demand(options: argparse.Namespace) -> Demand:
    from workbench.analysis.sweep import read_settings
    from workbench.fleet.sizing import Demand

    match = re.fullmatch(r"(\d+(?:\.\d+)?)x?", options.load)
    if match is None:
        raise ValueError(f"--load must be a multiple such as 2x or 0.5x, got {options.load!r}")
    return Demand.read(
        options.file,
        cost_from=load_trace(options.cost_from) if options.cost_from else None,
        config=read_settings(options.set),
        load=float(match[1]),
        how=options.load_how,
        seed=options.seed,
    )


def _size(options: argparse.Namespace) -> int:
    from workbench.fleet.sizing import size

    table = size(_demand(options), options.slo, router=options.router, max_replicas=options.max_replicas)
    print(table)
    return 0 if table.best is not None else 1


def _compare(options: argparse.Namespace) -> int:
    from workbench.fleet.routers import ROUTERS
    from workbench.fleet.sizing import compare

    counts = re.fullmatch(r"\d+(,\d+)*", options.replicas)
    if counts is None:
        raise ValueError(f"--replicas must be numbers such as 2,4,8, got {options.replicas!r}")
    routers = options.routers.split(",") if options.routers else list(ROUTERS)
    replicas = [int(count) for count in options.replicas.split(",")]
    print(compare(_demand(options), replicas, routers, options.slo or ""))
    return 0
