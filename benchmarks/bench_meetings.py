"""Meetings of events per 10,000 workloads, and the time to known faults: guided by them, and at random.

    python benchmarks/bench_meetings.py pairs [--workloads 10000]
    PYTHONPATH=FOLDER python benchmarks/bench_meetings.py fault VERSION    # in vLLM's environment, a release in FOLDER

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

sys.path.insert(0, str(Path(__file__).parent))
from _common import RESULTS, save

from workbench.analysis.hunt.search import Found, Search
from workbench.analysis.hunt.target import find_target


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


class _End(BaseException):
    """Ends a search."""


def seconds_to(fault: Fault, seed: int, limit: float, *, guided: bool) -> float | None:
    """Seconds of processor time until a fault is found; None if it is not within the limit."""
    began = time.process_time()

    def tell(search: Search, found: Found | None) -> None:
        if found is not None and re.search(fault.place, found.fault.place):
            raise _End(True)
        if time.process_time() - began > limit:
            raise _End(False)

    search = Search(find_target("vllm"), None, None, seed, fault.laws.split("|"), None, tell, guided)
    try:
        search.run()
    except _End as end:
        return round(time.process_time() - began, 1) if end.args[0] else None
    return None


def pairs(workloads: int) -> list[dict[str, Any]]:
    """Distinct pairs and triples after so many workloads of our scheduler."""
    rows = []
    for guided in (False, True):
        search = Search(find_target("workbench"), None, workloads, 0, changes=guided)
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
    parser.add_argument("what", choices=("pairs", "fault"))
    parser.add_argument("version", nargs="?")
    parser.add_argument("--workloads", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=60.0)
    options = parser.parse_args()
    path = RESULTS / "meetings.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    facts: dict[str, Any] = {"pairs": known.get("pairs", []), "faults": known.get("faults", {})}
    if options.what == "pairs":
        facts["pairs"] = pairs(options.workloads)
        save("meetings", facts)
        return
    for name, fault in FAULTS.items():
        if fault.version == options.version:
            found: dict[str, list[float | None]] = {"random": [], "guided": []}
            for seed in range(options.seeds):
                for way in found:
                    found[way].append(seconds_to(fault, seed, options.limit, guided=way == "guided"))
            facts["faults"][name] = {"version": fault.version, **found}
            print(name, found, flush=True)
            save("meetings", facts)


if __name__ == "__main__":
    main()
