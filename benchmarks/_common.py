"""Shared parts of the benchmark scripts: the machine, medians and ratios, and the folder of the results."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import statistics
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Every arm computes on one thread, unless a script or its caller says otherwise.
os.environ.setdefault("WORKBENCH_THREADS", "1")
os.environ.setdefault("WORKBENCH_WAIT_FOR_COMPILED", "1")

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "inference-workbench",
    "mlx",
    "mlx-lm",
    "numpy",
    "numba",
    "msgspec",
    "scipy-openblas32",
    "panel",
    "bokeh",
    "vllm",
)


QUIET_SECONDS = 3.0
"""Time before an arm in which the CPU time of other processes is measured."""

MAX_OTHERS = 0.2
"""Number of cores that other processes may take meanwhile."""

BUSY = "WORKBENCH_BENCH_BUSY"
"""Environment variable: "1" measures beside any other processes, and says so in the result."""

others_before: list[float] = []
"""Number of cores that other processes took before each arm."""


class BusyMachineError(RuntimeError):
    """Other processes take more of the machine than a measurement bears."""


def before_arm(name: str) -> None:
    """Measure the CPU time of other processes; called before each arm of each repeat.

    Args:
        name: The arm, for the message.

    Raises:
        BusyMachineError: It is more than MAX_OTHERS allows, and BUSY is not set.
    """
    others = others_cpu(QUIET_SECONDS)
    if others is None:  # this system does not tell
        return
    others_before.append(round(others, 2))
    if others > MAX_OTHERS and os.environ.get(BUSY) != "1":
        raise BusyMachineError(
            f"other processes took {others:.2f} cores in the {QUIET_SECONDS:g} s before {name!r}, allowed are "
            f"{MAX_OTHERS:g}: wait until the machine is quiet, or set {BUSY}=1, which the result will tell"
        )


def others_cpu(seconds: float) -> float | None:
    """Number of cores that processes other than this one and its children take for a while; None if not known."""
    before = _busy_seconds(), _own_seconds()
    time.sleep(seconds)
    after = _busy_seconds(), _own_seconds()
    if before[0] is None or after[0] is None:
        return None
    return max(0.0, after[0] - before[0] - (after[1] - before[1])) / seconds


def _busy_seconds() -> float | None:
    """CPU time of all processes since the system started; None if the system does not tell."""
    try:
        numbers = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, softirq, _steal = map(int, numbers)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system


def chromium() -> str:
    """Path of a Chromium, with or without windows; a script that lacks one ends."""
    sys.path.append(str(Path(__file__).parents[1] / "scripts"))
    from browsers import CHROMIUM_PROGRAM, CHROMIUM_PROGRAMS

    if found := shutil.which(CHROMIUM_PROGRAM):
        return found
    raise SystemExit(f"{Path(sys.argv[0]).stem} needs one of {', '.join(CHROMIUM_PROGRAMS)} on the PATH")


def machine() -> dict[str, Any]:
    """The processor, the number of cores, the date, the current load, that of others, and the versions in use."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    others = {"largest": max(others_before), "each": list(others_before)} if others_before else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "processor": model,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        **({"other_processes": others} if others else {}),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "note": "a shared machine without a GPU: quote ratios and CPU time, not single wall times"
        if platform.system() == "Linux"
        else "not the Linux machine of the other results: compare within this file only",
    }


def summarise(values: list[float]) -> dict[str, float]:
    """Median, minimum and maximum of repeated measurements."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "repeats": len(values),
    }


def save(name: str, results: dict[str, Any]) -> Path:
    """Write a result with the machine's description to benchmarks/results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"benchmark": name, "machine": machine(), **results}, indent=2) + "\n")
    print(f"saved {path}")
    return path


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
