"""Stalls planted into real processes: how many are named, who is blamed, and what is claimed without one.

Each case is a process that serves made-up requests and records itself with vLLM's recorder (tests/support). It sleeps,
collects garbage, or is stopped by a signal, for 0.3 to 0.8 s in one of about 110 steps of 5 to 35 ms: between two
steps, in the scheduler, in the model, or when the output is taken in. As many cases have no planted stall. The
process's clock says which steps were late: on a busy machine some are without being planted.

    python benchmarks/bench_stalls.py [--cases 200]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from _common import save
from planted_stalls import judge, run
from stalled_process import KINDS


def main() -> None:
    """Run all cases, print what differs, and save the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200, help="cases with a stall, and as many without (default 200)")
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in (*KINDS, "none")}
    places: Counter[str] = Counter()
    for number in range(2 * options.cases):
        seed, is_planted = number // 2, number % 2 == 0
        kind = KINDS[seed % len(KINDS)] if is_planted else "none"
        with tempfile.TemporaryDirectory() as folder:
            said, trace = run(seed, kind, Path(folder))
        judged, count = judge(said, trace), counts[kind]
        count["cases"] += 1
        count["steps"] += len(trace)
        count["named"] += is_planted and judged.named
        count["garbage collection named"] += "garbage was collected" in judged.cause
        count["requests hit"] += judged.num_hit
        count["requests blamed"] += len(judged.blamed)
        count["claimed, and late by the process's clock"] += sum(is_real for _, is_real in judged.claimed)
        count["claimed, and not late"] += sum(not is_real for _, is_real in judged.claimed)
        if is_planted:
            places[said["planted"]["place"]] += 1
        if not judged.named or judged.blamed or not all(is_real for _, is_real in judged.claimed):
            print(seed, kind, said["planted"], judged, flush=True)
        if number % 40 == 39:
            print(number + 1, {name: dict(each) for name, each in counts.items()}, flush=True)
    what = "stalls planted into processes that record themselves, and as many processes without"
    save("stalls", {"what": what, "places": places, "kinds": counts})


if __name__ == "__main__":
    main()
