"""CPU time and memory of every command on an hour of a vLLM server: 22,000 steps, 1,100 requests, without token ids.

Each checkout reads the same run in a file that it wrote itself (`recording_of_an_hour`), in processes that take turns.
CPU time is that of a command with its processes, memory the peak of the largest of them.

    git worktree add /tmp/base 9ba21ee
    python benchmarks/bench_recordings.py /tmp/base
    python benchmarks/bench_recordings.py /tmp/base --requests 10000 --only info explain --save recordings_large
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import save, summarise

HERE = Path(__file__).parents[1]
GENERATE = """
import sys
sys.path.insert(0, {benchmarks!r})
from recording_of_an_hour import generate
generate({requests}).save({file!r})
"""
COMMANDS = {
    "info": ("trace", "info", "FILE"),
    "explain one": ("trace", "explain", "FILE", "REQUEST"),
    "slowest 10": ("trace", "explain", "FILE", "--slowest", "10"),
    "misses": ("trace", "misses", "FILE"),
    "diff": ("trace", "diff", "FILE", "FILE"),
    "html": ("trace", "html", "FILE", "PAGE"),
    "why": ("why", "FILE"),
    "whatif": ("trace", "whatif", "FILE", "--set", "max_num_batched_tokens=256", "--force"),
    "tune": ("trace", "tune", "FILE", "--slo", "ttft_p99=2s", "--force"),
}
FLAGS_OF_THIS = ("--force",)
"""Flags that the other checkout does not have, and does not need."""


def measure(checkout: Path, arguments: list[str]) -> tuple[float, float, float]:
    """CPU seconds, wall seconds and peak memory in MB of a command; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "workbench", *arguments]
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(command, cwd=checkout, env=environment, stdout=said, stderr=said)
        _, status, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)} failed: {said.read()[-2000:].decode(errors='replace')}")
    return used.ru_utime + used.ru_stime, wall, used.ru_maxrss / 1024


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--requests", type=int, default=1100, help="length of the recording (default 1100)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each measurement (default 3)")
    default = [name for name in COMMANDS if name != "tune"]
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=default, help="some of them (default: not tune)")
    parser.add_argument("--save", default="recordings", metavar="NAME", help="name of the result")
    options = parser.parse_args()
    checkouts = {"this": HERE, "other": options.other.resolve()}
    command = ["git", "-C", str(checkouts["other"]), "rev-parse", "--short", "HEAD"]
    other = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    what = (
        f"CPU time and memory of commands on a recording of {options.requests} requests, against {other}, interleaved"
    )
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        request = ""
        for arm, checkout in checkouts.items():
            file = str(Path(folder) / f"{arm}.jsonl.gz")
            program = GENERATE.format(benchmarks=str(HERE / "benchmarks"), requests=options.requests, file=file)
            environment = {**os.environ, "PYTHONPATH": str(checkout)}
            subprocess.run([sys.executable, "-c", program], cwd=checkout, env=environment, check=True)
        program = (
            "import sys; from workbench import Trace\n"
            "names = list(Trace.load(sys.argv[1]).requests); print(names[len(names) // 4])"
        )
        command = [sys.executable, "-c", program, str(Path(folder) / "this.jsonl.gz")]
        request = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        for name in options.only:
            found: dict[str, list[tuple[float, float, float]]] = {"this": [], "other": []}
            for repeat in range(options.repeats):
                for arm in sorted(checkouts, reverse=repeat % 2 == 1):
                    if arm == "other" and name == "why":  # it has no such command
                        continue
                    places = {"FILE": f"{folder}/{arm}.jsonl.gz", "REQUEST": request, "PAGE": f"{folder}/page.html"}
                    left_out = FLAGS_OF_THIS if arm == "other" else ()
                    words = [places.get(word, word) for word in COMMANDS[name] if word not in left_out]
                    found[arm].append(measure(checkouts[arm], words))
            row: dict[str, object] = {}
            for arm, runs in found.items():
                if runs:
                    cpu, wall, memory = zip(*runs)
                    row[arm] = {
                        "cpu_s": summarise(list(cpu)),
                        "wall_s": summarise(list(wall)),
                        "peak_mb": round(max(memory)),
                    }
            medians = [statistics.median(run[0] for run in runs) for runs in found.values() if runs]
            row["ratio"] = round(medians[0] / medians[1], 3) if len(medians) > 1 else None
            results[name] = row
            save(options.save, {"what": what, "requests": options.requests, "commands": results})
            print(f"{name:12} CPU s {medians}  ratio {row['ratio']}", flush=True)


if __name__ == "__main__":
    main()
