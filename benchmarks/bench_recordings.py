"""CPU time and memory of every command on an hour of a vLLM server: 22,000 steps, 1,100 requests, without token ids.

Each checkout reads the same run in a file that it wrote itself (`recording_of_an_hour`), in processes that take turns.
CPU time is that of a command with its processes, memory the peak of the largest of them. Without another checkout,
recordings of several lengths are compared: "growth" is 1 if a command takes time or memory in proportion to the steps.

    git worktree add /tmp/base 9ba21ee
    python benchmarks/bench_recordings.py /tmp/base
    python benchmarks/bench_recordings.py --requests 1100 10000 --repeats 1 --save recordings_growth
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
trace = generate({requests})
trace.save({file!r})
print(len(trace), list(trace.requests)[len(trace.requests) // 4])
"""
READ = """
from workbench import Trace
trace = Trace.load({file!r})
print(len(trace), list(trace.requests)[len(trace.requests) // 4])
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


def measure(checkout: Path, arguments: list[str], bytecode: Path) -> tuple[float, float, float]:
    """CPU seconds, wall seconds and peak memory in MB of a command; it must succeed.

    Python keeps its bytecode in a folder, as for an installed package, although the environment may tell it not to.
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONPYCACHEPREFIX": str(bytecode)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
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
    parser.add_argument("other", type=Path, nargs="?", help="the checkout to compare with; none for several lengths")
    help = "lengths of the recording (default 1100), the first of which the others are compared with"
    parser.add_argument("--requests", type=int, nargs="+", default=[1100], help=help)
    parser.add_argument("--file", type=Path, help="a recording that all read, in place of one of that length")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each measurement (default 3)")
    default = [name for name in COMMANDS if name != "tune"]
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=default, help="some of them (default: not tune)")
    parser.add_argument("--save", default="recordings", metavar="NAME", help="name of the result")
    options = parser.parse_args()
    arms = {f"{count} requests": (HERE, count) for count in options.requests}
    what = "CPU time and memory of commands on recordings of two lengths, interleaved"
    if options.other:
        other, count = options.other.resolve(), options.requests[0]
        arms = {"this": (HERE, count), "other": (other, count)}
        command = ["git", "-C", str(other), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        what = f"CPU time and memory of commands on a recording of {count} requests, against {commit}, interleaved"
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = {arm: Path(folder) / f"{arm.split()[0]}.jsonl.gz" for arm in arms}
        if options.file:
            files = dict.fromkeys(files, options.file.resolve())
        sizes = {arm: prepare(*arms[arm], file, is_written=bool(options.file)) for arm, file in files.items()}
        num_steps = {arm: steps for arm, (steps, _) in sizes.items()}
        for arm, (checkout, _) in arms.items():
            measure(checkout, ["trace", "info", str(files[arm])], Path(folder, "bytecode"))  # writes the bytecode
        for name in options.only:
            found: dict[str, list[tuple[float, float, float]]] = {arm: [] for arm in arms}
            for repeat in range(options.repeats):
                for arm in sorted(arms, reverse=repeat % 2 == 1):
                    if arm == "other" and name == "why":  # it has no such command
                        continue
                    places = {"FILE": str(files[arm]), "REQUEST": sizes[arm][1], "PAGE": f"{folder}/page.html"}
                    left_out = FLAGS_OF_THIS if arm == "other" else ()
                    words = [places.get(word, word) for word in COMMANDS[name] if word not in left_out]
                    found[arm].append(measure(arms[arm][0], words, Path(folder, "bytecode")))
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
            row["ratio"] = ratio = round(medians[0] / medians[1], 3) if len(medians) > 1 else None
            if not options.other and ratio:
                first, *_, last = arms
                row["growth"] = growth(found[first], found[last], num_steps[last] / num_steps[first])
            results[name] = row
            save(options.save, {"what": what, "num_steps": num_steps, "commands": results})
            print(f"{name:12} CPU s {medians}  ratio {ratio}  {row.get('growth', '')}", flush=True)


def prepare(checkout: Path, requests: int, file: Path, *, is_written: bool = False) -> tuple[int, str]:
    """Let a checkout write a recording, if it is not there; its number of steps, and a request in its first half."""
    program = (READ if is_written else GENERATE).format(
        benchmarks=str(HERE / "benchmarks"), requests=requests, file=str(file)
    )
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True, text=True)
    steps, request = done.stdout.split()
    return int(steps), request


def growth(short: list[tuple[float, float, float]], long: list[tuple[float, float, float]], times: float) -> dict:
    """CPU time and memory of the long recording over those of the short one, each over the ratio of their steps."""
    cpu = min(run[0] for run in long) / min(run[0] for run in short)
    memory = max(run[2] for run in long) / max(run[2] for run in short)
    return {"cpu": round(cpu / times, 3), "memory": round(memory / times, 3)}


if __name__ == "__main__":
    main()
