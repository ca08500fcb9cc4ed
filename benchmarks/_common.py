"""Shared parts of the benchmark scripts: the machine, medians and ratios, and the folder of the results."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
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


def machine() -> dict[str, Any]:
    """The processor, the number of cores, the current load, and the versions in use."""
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
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
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
