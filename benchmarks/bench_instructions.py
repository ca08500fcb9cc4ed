"""Two checkouts of this repository side by side: processor instructions of the scheduler and of packing.

Callgrind counts the instructions, so a busy machine changes nothing. CPU times of a few microseconds, by contrast,
differ by tens of percent from one process to the next. Each count is the difference between a long and a short run,
which takes the imports out of it; the garbage collector is off, and so is the BLAS, whose threads spin for as long as
the process runs. The result is the ratio, this checkout over the other.
Needs valgrind.

    git worktree add /tmp/base v0.1.0
    python benchmarks/bench_instructions.py /tmp/base
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _common import save
from bench_scheduler import SCENES

HERE = Path(__file__).parents[1]
SHORT, LONG = 20, 70
SCHEDULER = """
import bench_scheduler as bench
bench.measure(bench.SCENES[{scene}], num)
"""
PACKING = """
from bench_runner import BLOCK_SIZE, segments
from workbench.engine.packed_batch import pack
decodes = segments(256, 512, 0)
first = pack(decodes, BLOCK_SIZE)
for _ in range(num):
    pack(decodes, BLOCK_SIZE{previous})
"""
PROGRAM = "import gc, sys; sys.path.insert(0, {benchmarks!r}); gc.disable(); num = {num}\n{measurement}"


def count(checkout: Path, measurement: str, num: int) -> int:
    """Instructions of a whole process."""
    program = PROGRAM.format(benchmarks=str(checkout / "benchmarks"), num=num, measurement=measurement)
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0", "WORKBENCH_BLAS": "0"}
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, "-c", program]
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, stderr=subprocess.PIPE, text=True)
    collected = re.search(r"Collected : (\d+)", done.stderr)
    assert collected is not None, done.stderr
    return int(collected[1])


def main() -> None:
    """Count, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not installed: apt-get install valgrind")
    measurements = {f"scheduler, {scene.name}": SCHEDULER.format(scene=index) for index, scene in enumerate(SCENES)} | {
        "pack 256 decodes from scratch": PACKING.format(previous=""),
        "pack 256 decodes after a step": PACKING.format(previous=", previous=first"),
    }
    results = {}
    for what, measurement in measurements.items():
        counts = {
            arm: (count(checkout, measurement, LONG) - count(checkout, measurement, SHORT)) // (LONG - SHORT)
            for arm, checkout in {"this": HERE, "other": options.other.resolve()}.items()
        }
        ratio = counts["this"] / counts["other"]
        results[what] = {**counts, "ratio": round(ratio, 4)}
        print(f"{what:55} {counts['this']:11,} {counts['other']:11,}  ratio {ratio:.3f}", flush=True)
    save("instructions", {"what": "instructions per step of this checkout over another", "measurements": results})


if __name__ == "__main__":
    main()
