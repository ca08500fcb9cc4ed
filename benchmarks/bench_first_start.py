"""The first start of a newcomer: a clone, a HOME and caches that are empty, and then ``make demo HEADLESS=1``.

Each part is timed by the lines that the demo prints: the installation, the engine, the first step, the end. The CPU
time is that of all processes, the one that compiles included. With ``--other``, another commit takes turns.

    python benchmarks/bench_first_start.py --repeats 5 --other main~10

The packages and the bundled model come from the index that pip is configured for. Changes without a commit are not in a
clone. With ``--installed``, the installation is skipped: the clones run with this Python and its packages.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _common import before_arm, save, summarise

HERE = Path(__file__).parents[1]
MARKS = {"engine": "Engine(", "first step": "step   0", "second step": "step   1", "end": None}
"""The beginning of the line that ends each part."""

KEPT = ("WORKBENCH_THREADS", "WORKBENCH_WAIT_FOR_COMPILED", "WORKBENCH_CACHE", "XDG_CACHE_HOME", "PYTHONPATH")
"""Variables of this process that a newcomer does not have."""


def clone(commit: str, folder: Path) -> Path:
    """A clone of this repository at a commit."""
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(HERE), str(folder)], **quiet)
    subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", commit], **quiet)
    return folder


def start(commit: str, installed: bool) -> dict[str, float]:
    """Install and run the demo once; seconds of each part, and CPU seconds of all processes."""
    place = Path(tempfile.mkdtemp(prefix="first-start-"))
    try:
        checkout, home = clone(commit, place / "clone"), place / "home"
        home.mkdir()
        environment = {name: value for name, value in os.environ.items() if name not in KEPT} | {"HOME": str(home)}
        times: dict[str, float] = {}
        if installed:
            command = [sys.executable, "-m", "workbench", "demo", "--headless"]
            environment["PYTHONPATH"] = str(checkout)
        else:
            begin = time.perf_counter()
            install = ["make", ".venv/.installed-demo"]
            subprocess.run(install, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
            times["installation"] = time.perf_counter() - begin
            command = ["make", "--no-print-directory", "demo", "HEADLESS=1"]
        cpu, begin = children_cpu(), time.perf_counter()
        marks = iter(MARKS.items())
        part, mark = next(marks)
        with subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                if mark is not None and line.startswith(mark):
                    times[f"to {part}"] = time.perf_counter() - begin
                    part, mark = next(marks)
        if process.returncode:
            raise RuntimeError(f"the demo of {commit} ended with status {process.returncode}")
        times["to end"] = time.perf_counter() - begin
        times["cpu"] = children_cpu() - cpu
        return times
    finally:
        shutil.rmtree(place)


def children_cpu() -> float:
    """CPU seconds of all processes that have ended, and were started here or by those."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure, print and save after every repeat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--other", metavar="COMMIT", help="a commit that takes turns with this one")
    parser.add_argument("--installed", action="store_true", help="run with this Python, without an installation")
    options = parser.parse_args()
    arms = {"this": "HEAD"} | ({"other": options.other} if options.other else {})
    commits = {
        arm: subprocess.run(
            ["git", "-C", str(HERE), "rev-parse", "--short", commit], capture_output=True, text=True, check=True
        ).stdout.strip()
        for arm, commit in arms.items()
    }
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for repeat in range(options.repeats):
        for arm in sorted(arms, reverse=repeat % 2 == 0):
            before_arm(arm)
            runs[arm].append(start(commits[arm], options.installed))
            print(arm, {part: round(seconds, 1) for part, seconds in runs[arm][-1].items()}, flush=True)
        results = {
            arm: {part: summarise([run[part] for run in done]) for part in done[0]} for arm, done in runs.items()
        }
        save("first_start", {"installed": options.installed, "commits": commits, "arms": results})


if __name__ == "__main__":
    main()
