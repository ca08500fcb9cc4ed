"""Two checkouts of this repository side by side: CPU time of their parts, and latencies of requests.

Each repeat runs both checkouts, each measurement in a process of that checkout with its own benchmark modules, so that
drift of a shared machine meets both alike. The result is the ratio of medians, this checkout over the other. With
``--only``, it is saved under the names of those measurements.

    git worktree add /tmp/base v0.1.0
    python benchmarks/bench_checkouts.py /tmp/base
    python benchmarks/bench_checkouts.py /tmp/base --only serving --repeats 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _common import before_arm, save, summarise

HERE = Path(__file__).parents[1]
MEASUREMENTS = {
    "scheduler": """
import bench_scheduler as bench
found = {f"scheduler, {scene.name}, us": bench.measure(scene, 300)["total"] for scene in bench.SCENES}
""",
    "runner": """
import bench_runner as bench
saved = {}
bench.save = lambda name, results: saved.update(results)
sys.argv[1:] = ["--repeats", "3"]
with contextlib.redirect_stdout(io.StringIO()):
    bench.main()
found = {f"forward, {name}, ms": next(iter(saved[name].values()))["median"] for name in bench.SCENES}
packing = saved["pack 256 decodes at 512, us"]
found |= {f"pack 256 decodes {how}, us": packing[how]["median"] for how in packing}
""",
    "engine": """
import bench_engine as bench
command = [sys.executable, bench.__file__, "--arm", "workbench", "--budget", "512"]
answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
found = {"engine, 16 requests, s": answer["cpu_s"]}
""",
    "serving": """
import time
from dataclasses import replace
from serving import arm
from serving.metrics import serving_metrics
from serving.replay import replay
from serving.workloads import SMALL, make_workload
arm.WEIGHTS = "packed"
shape = replace(SMALL["random"], rate=0.0)
workload = make_workload("random", shape, range(1000, 9000))
engine = arm.make_arm("workbench", workload, "")
replay(arm.warm_up(workload), engine)
start = time.process_time()
rows = serving_metrics(workload, replay(workload, engine))
found = {"serving, CPU time, s": time.process_time() - start}
found["serving, output tokens per s"] = rows["output_tokens_per_s"]
for name in ("mean_ttft", "p99_ttft", "mean_tpot", "median_itl", "p99_itl"):
    found[f"serving, {name.replace('_', ' ')}, ms"] = 1000 * rows[f"{name}_s"]
engine.close()
""",
    "simulation": """
import bench_simulation as bench
found = {f"simulation, 20,000 requests, {case}, s": bench.run(case, 20_000)["cpu_seconds"] for case in bench.CASES}
""",
}
PROGRAM = """
import contextlib, io, json, subprocess, sys
sys.path.insert(0, {benchmarks!r})
{measurement}
print(json.dumps(found))
"""


def measure(checkout: Path, name: str) -> dict[str, float]:
    """One measurement in a process of a checkout: CPU time by what was measured."""
    program = PROGRAM.format(benchmarks=str(checkout / "benchmarks"), measurement=MEASUREMENTS[name])
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--repeats", type=int, default=7, help="repeats of each measurement (default 7)")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=[], help="some of them")
    options = parser.parse_args()
    checkouts = {"this": HERE, "other": options.other.resolve()}
    times: dict[str, dict[str, list[float]]] = {}
    for name in options.only or MEASUREMENTS:
        for repeat in range(options.repeats):
            for arm in sorted(checkouts, reverse=repeat % 2 == 1):
                before_arm(f"{name}, {arm}")
                for what, value in measure(checkouts[arm], name).items():
                    times.setdefault(what, {"this": [], "other": []})[arm].append(value)
    results = {}
    for what, arms in times.items():
        if not all(arms.values()):
            continue  # a scene that one of the checkouts does not have
        medians = [statistics.median(values) for values in arms.values()]
        ratio = medians[0] / medians[1]
        results[what] = {**{arm: summarise(values) for arm, values in arms.items()}, "ratio": round(ratio, 4)}
        print(f"{what:55} {medians[0]:9.3f} {medians[1]:9.3f}  ratio {ratio:.3f}")
    command = ["git", "-C", str(checkouts["other"]), "rev-parse", "--short", "HEAD"]
    other = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    what = f"this checkout over another ({other}), interleaved"
    save("_".join(["checkouts", *options.only]), {"other": other, "what": what, "measurements": results})


if __name__ == "__main__":
    main()
