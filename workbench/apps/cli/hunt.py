"""``workbench hunt``: search a scheduler for broken laws."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.apps.cli.options import Commands, add_command, add_out_option, check_folder
from workbench.apps.cli.say import say
from workbench.apps.cli.settings import complete_list, completed_by
from workbench.base.field_checks import integer
from workbench.base.progress import StatusLine
from workbench.base.text import counted, printable

if TYPE_CHECKING:
    from workbench.analysis.hunt.search import Found, Search

_EXAMPLES = """\
  workbench hunt --for 60s --out found
  workbench hunt --policy mine:MyPolicy --workloads 5000 --out found
  workbench hunt --scheduler vllm -j 2 --out found
  workbench hunt --scheduler mine:make_scheduler --only progress,blocks --out found
  workbench hunt --between 0.32.0 0.33.0 --for 10m --out found
  workbench hunt --between .venv-vllm mine/scheduler.py --out found
  workbench hunt replay found/crash-scheduler-py-assert
"""

_REPLAYS = """\
  workbench hunt replay found/crash-scheduler-py-assert
  workbench hunt replay found/limits-more-run --scheduler mine:make_scheduler
  workbench hunt replay found/*/ --against 0.32.0..0.33.0
"""


_POLICY = "a policy for Workbench's scheduler"


SCHEDULERS = ("workbench", "engine", "vllm")
"""Schedulers with a name; others are given as module:factory."""

FOUND = Path("found")
"""Folder for the findings."""


def add_parser(commands: Commands) -> None:
    """Add ``hunt`` to the commands."""
    parser = add_command(
        commands, "hunt", run, "search a scheduler for deadlocks, stale caches and crashes", examples=_EXAMPLES
    )
    schedulers = "workbench, engine, vllm, vllm:module:Class or module:factory"
    named = parser.add_argument("--scheduler", metavar="NAME", help=f"{schedulers} (default: workbench)")
    completed_by(named, lambda **_: SCHEDULERS)
    compared = "compare two: one of those, a release, a folder or environment with vLLM, a checkout, a changed file"
    parser.add_argument("--between", nargs=2, metavar=("A", "B"), help=compared)
    python = "interpreter of vLLM's environment for a side of --between that names none (default: this one)"
    parser.add_argument("--python", default="", metavar="PATH", help=python)
    parser.add_argument("--policy", metavar="module:Class", help=_POLICY)
    parser.add_argument("--for", dest="seconds", metavar="TIME", help="time limit, such as 60s or 10m (default: 60s)")
    parser.add_argument("--workloads", type=int, metavar="N", help="number of workloads, instead of --for")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="chooses the workloads (default: 0)")
    parser.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")
    only = parser.add_argument("--only", metavar="LAW,...", help="laws to check (default: all)")
    completed_by(only, _complete_laws)
    allowed = "exceptions that are not findings (default: each of Workbench's, none of others)"
    parser.add_argument("--allow", metavar="NAME,...", help=allowed)
    add_out_option(parser, "DIR", f"folder for the findings (default: {FOUND})")
    _add_replay(parser.add_subparsers(title="after a hunt", metavar="COMMAND"), schedulers)


def _complete_laws(prefix: str, **_: object) -> list[str]:
    from workbench.trace.laws import LAWS

    return complete_list(prefix, [law.name for law in LAWS])


def _add_replay(commands: Commands, schedulers: str) -> None:
    parser = add_command(commands, "replay", _replay, "run the cases of findings again", examples=_REPLAYS)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="the folder of a finding")
    against = "replay on a release, or on the packages in a folder; A..B: name the first release of the fault"
    parser.add_argument("--against", metavar="VERSION|FOLDER|A..B", help=against)
    chosen = f"{schedulers}; the first three are taken from the finding"
    kept = argparse.SUPPRESS  # an option before "replay" counts too
    named = parser.add_argument("--scheduler", metavar="NAME", default=kept, help=chosen)
    completed_by(named, lambda **_: SCHEDULERS)
    parser.add_argument("--policy", metavar="module:Class", default=kept, help=_POLICY)


def run(options: argparse.Namespace) -> int:
    """Hunt.

    Raises:
        ValueError: An option is wrong.
    """
    from workbench.analysis.hunt import hunt
    from workbench.trace.window import read_time

    if options.workloads is not None:
        integer("--workloads", options.workloads, 1)
    seconds = read_time("--for", options.seconds) if options.seconds else (60.0 if options.workloads is None else None)
    jobs = integer("--jobs", options.jobs, 1)
    check_folder("--out", options.out)
    if options.between:
        return _between(options, seconds)
    if options.python:
        raise ValueError("--python is for --between A B")
    progress = _Progress()
    _import_from_here(options)
    findings = hunt(
        options.scheduler or "workbench",
        seconds=seconds,
        workloads=options.workloads,
        seed=options.seed,
        policy=options.policy,
        laws=options.only.split(",") if options.only else None,
        allow=None if options.allow is None else [name for name in options.allow.split(",") if name],
        out=options.out or FOUND,
        jobs=jobs,
        tell=progress,
    )
    progress.end()
    names = [finding.folder for finding in findings]
    print(json.dumps({"workloads": progress.num_workloads, "seconds": round(progress.seconds, 1), "findings": names}))
    return 1 if names else 0


_NOT_BETWEEN = {"scheduler": None, "policy": None, "only": None, "allow": None, "jobs": 1}
"""Options that `--between` does not take, with their defaults."""


def _between(options: argparse.Namespace, seconds: float | None) -> int:
    """Compare two schedulers; the exit status is 1 if they differ."""
    from workbench.analysis.hunt.between import compare_schedulers
    from workbench.analysis.hunt.between.search import Comparison

    if given := [name for name, default in _NOT_BETWEEN.items() if getattr(options, name) != default]:
        raise ValueError(f"--{given[0]} does not go with --between A B, which compares schedules and checks no law")

    progress = StatusLine()

    def tell(comparison: Comparison) -> None:
        differ = f"{comparison.num_different} differ, {counted(len(comparison.found), 'distinct difference')}"
        progress.show(f"{counted(comparison.num_workloads, 'workload')}, {differ}, {comparison.elapsed:.0f} s")

    comparison, names = compare_schedulers(
        *options.between,
        seconds=seconds,
        workloads=options.workloads,
        seed=options.seed,
        python=options.python,
        out=options.out or FOUND,
        tell=tell,
    )
    progress.end()
    for apart in comparison.found:
        say(f"{apart.difference.kind}, {apart.decided.place}: {apart.difference.message}")
    elapsed = round(comparison.elapsed, 1)
    print(json.dumps({"workloads": comparison.num_workloads, "seconds": elapsed, "findings": names}))
    return 1 if names else 0


def _import_from_here(options: argparse.Namespace) -> None:
    """Look for a module named on the command line in the current folder too, behind every installed package.

    The folder of a finding is left out: it is data from others. A replay never does this.
    """
    here = Path.cwd()
    is_named = options.policy is not None or ":" in (options.scheduler or "")
    if is_named and str(here) not in sys.path and not (here / "finding.json").exists():
        sys.path.append(str(here))


def _replay(options: argparse.Namespace) -> int:
    """Run the cases of findings again; the exit status is 1 if one of them still breaks a law."""
    from workbench.analysis.hunt.replay import replay, replay_against

    if options.against:
        return replay_against(options.folders, options.against, options.scheduler, options.policy)
    num_faults = 0
    for folder in options.folders:
        finding, fault, scheduler = replay(folder, options.scheduler, options.policy)
        happens = fault is not None and fault.law == finding["law"]
        said = f"still happens: {fault.message}" if fault is not None and happens else "does not happen"
        if fault is not None and not happens:
            said += f"; the law of {fault.law} is broken instead: {fault.message}"
        say(f"{scheduler}: {finding['law']} {said}")
        num_faults += fault is not None
    return int(num_faults > 0)


class _Progress:
    """A line on standard error with rate, pairs of features seen and findings; above it what the scheduler lacks."""

    def __init__(self) -> None:
        self.num_workloads, self.seconds = 0, 0.0
        self._shown = 0.0
        self._shares = ""
        self._dropped: set[str] = set()
        self._line = StatusLine()

    def __call__(self, search: Search, found: Found | None) -> None:
        self.num_workloads, self.seconds = search.num_workloads, search.elapsed
        if whole := search.tally.whole:
            runs, laws = search.tally.seconds, search.tally.in_laws
            shares = {"generation": whole - runs, "scheduler": runs - laws, "laws": laws}
            told = ", ".join(f"{name} {share / whole:.0%}" for name, share in shares.items())
            self._shares = f"{self.num_workloads / whole:.0f} workloads per second and core: {told}"
        if new := sorted(search.tally.dropped - self._dropped):
            self._dropped.update(new)
            self._line.above(f"not in {search.target.name} {search.target.version}: {', '.join(new)}")
        if found is not None:
            self._line.above(f"{found.fault.law}: {printable(found.fault.message)}")
            for line in found.fault.traceback.splitlines():
                self._line.above(printable(line))
        if found is not None or time.monotonic() - self._shown > 0.5:
            self._shown = time.monotonic()
            rate = self.num_workloads / max(0.001, self.seconds)
            seen = f"{counted(len(search.pairs), 'pair')} of features, {counted(len(search.found), 'finding')}"
            line = f"{counted(self.num_workloads, 'workload')}, {rate:.0f}/s, {seen}, {self.seconds:.0f} s"
            self._line.show(line)

    def end(self) -> None:
        """End the line, and tell the shares of the processor time; shrinking counts where it runs."""
        self._line.end()
        if self._shares:
            print(self._shares, file=sys.stderr)
