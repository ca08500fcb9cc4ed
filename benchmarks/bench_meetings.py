"""Meetings of events per 10,000 workloads, and the time to known faults: guided by them, and at random.

    python benchmarks/bench_meetings.py pairs [--workloads 10000]
    PYTHONPATH=FOLDER python benchmarks/bench_meetings.py fault VERSION    # in vLLM's environment, a release in FOLDER
    python benchmarks/bench_meetings.py planted                             # faults planted in our scheduler

Guided and random hunts take turns, so that both meet the same load. Seconds are those of the processor, from the first
workload to the first one that breaks the law at the place; shrinking of other findings counts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))
from _common import RESULTS, save

from workbench.analysis.hunt.search import Found, Search
from workbench.analysis.hunt.target import Target, find_target
from workbench.scheduler.in_flight import InFlight
from workbench.scheduler.outputs import expect_drafts, flight_of
from workbench.scheduler.request import Request
from workbench.scheduler.scheduler import Scheduler


class Fault(NamedTuple):
    """A known fault: its release, the laws that are checked, and an expression for its place."""

    version: str
    laws: str
    place: str


FAULTS = {
    "a victim before the cursor (#49097)": Fault("0.25.1", "order|progress", r"skipped|turn"),
    "hashes of a chunk taken back": Fault("0.33.0", "content", r""),
    "a preempted request overtaken (#41951)": Fault("0.33.0", "order", r"preempted_behind_newcomers"),
    "drafts behind a chunk cap": Fault("0.33.0", "crash", r"assert num_new_tokens == 1"),
}


MANY = 1
"""A planted fault shows when a request has been preempted as often before, so that it is rare."""


def _keeps_drafts(self: InFlight, request: Request, plain: Any = InFlight.preempted) -> None:
    drafts = flight_of(request).drafts
    plain(self, request)
    if request.num_preemptions >= MANY:
        expect_drafts(request, drafts)


def _expects_nothing_stale(self: InFlight, request: Request, plain: Any = InFlight.preempted) -> None:
    plain(self, request)
    if request.num_preemptions >= MANY:
        flight_of(request).stale = 0


def _leaves_another_out(self: Scheduler, *args: Any, plain: Any = Scheduler._make_room) -> int:
    refund = int(plain(self, *args))
    batch = args[0]
    if refund and self.queues.requests[batch.preempted[-1]].num_preemptions > MANY:
        del batch.chunks[:1]
    return refund


PLANTED: dict[str, tuple[type, str, Any]] = {
    "a chunk that is taken back takes another one with it": (Scheduler, "_make_room", _leaves_another_out),
    "drafts of a preempted request are kept": (InFlight, "preempted", _keeps_drafts),
    "a preempted request takes the output in flight": (InFlight, "preempted", _expects_nothing_stale),
}
"""Faults planted in our scheduler: a class, its method, and the one in its place."""


class _End(BaseException):
    """Ends a search."""


def seconds_to(target: Target, fault: Fault, seed: int, limit: float, *, guided: bool) -> float | None:
    """Seconds of processor time until a fault is found; None if it is not within the limit."""
    began = time.process_time()
    laws = fault.laws.split("|") if fault.laws else None

    def tell(search: Search, found: Found | None) -> None:
        if found is not None and re.search(fault.place, found.fault.place):
            raise _End(True)
        if time.process_time() - began > limit:
            raise _End(False)

    search = Search(target, None, None, seed, laws, None, tell, guided)
    try:
        search.run()
    except _End as end:
        return round(time.process_time() - began, 1) if end.args[0] else None
    return None


def pairs(workloads: int) -> list[dict[str, Any]]:
    """Distinct pairs and triples after so many workloads of our scheduler."""
    rows = []
    for guided in (False, True):
        search = Search(find_target("workbench"), None, workloads, 0, guided=True, changes=guided)
        began = time.process_time()
        search.run()
        seconds = time.process_time() - began
        found, triples = search.meetings.count()
        rows.append({"guided": guided, "workloads": workloads, "pairs": found, "triples": triples})
        rows[-1] |= {"in_settings": search.meetings.count_in_settings(), "cpu_seconds": round(seconds, 1)}
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure, and save after each fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pairs", "fault", "planted"))
    parser.add_argument("version", nargs="?")
    parser.add_argument("--workloads", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=60.0)
    options = parser.parse_args()
    path = RESULTS / "meetings.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    facts: dict[str, Any] = {"pairs": [], "faults": {}, "planted": {}}
    facts |= {name: known[name] for name in (*facts, "note") if name in known}
    if options.what == "pairs":
        facts["pairs"] = pairs(options.workloads)
        save("meetings", facts)
        return
    if options.what == "planted":
        for name, (owner, method, other) in PLANTED.items():
            with patch.object(owner, method, other):
                facts["planted"][name] = both_ways(find_target("workbench"), Fault("", "", ""), options)
            print(name, facts["planted"][name], flush=True)
            save("meetings", facts)
        return
    for name, fault in FAULTS.items():
        if fault.version == options.version:
            facts["faults"][name] = {"version": fault.version, **both_ways(find_target("vllm"), fault, options)}
            print(name, facts["faults"][name], flush=True)
            save("meetings", facts)


def both_ways(target: Target, fault: Fault, options: argparse.Namespace) -> dict[str, list[float | None]]:
    """The seconds of each seed, at random and guided."""
    found: dict[str, list[float | None]] = {"random": [], "guided": []}
    for seed in range(options.seeds):
        for way in found:
            found[way].append(seconds_to(target, fault, seed, options.limit, guided=way == "guided"))
    return found


if __name__ == "__main__":
    main()
