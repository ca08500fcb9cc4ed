"""Cost of simulating fleets: against one engine, with looking routers, and spread over processes.

    python benchmarks/bench_fleet.py                                     # generated requests
    python benchmarks/bench_fleet.py --mooncake conversation_trace.jsonl --requests 12031      # all of Mooncake's trace
    python benchmarks/bench_fleet.py --spread 100000 --ways one two dask --rounds 3
    python benchmarks/bench_fleet.py --spread 1000000 --ways two

"Cost" is CPU time per scheduled request and step. ``--spread`` runs 200 replicas behind consistent hashing in this
process, in two processes and on a Dask cluster of two, in turn. Their wall times need a quiet machine; half of the CPU
time of two processes is their wall time if each has a core for itself.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _common import RESULTS, machine, save, summarise

from workbench import EngineConfig
from workbench.analysis.fleet.at_scale import simulate_fleet_at_scale
from workbench.simulation.arrivals import Arrival, read_generated, read_mooncake
from workbench.simulation.at_scale import simulate_at_scale
from workbench.simulation.costs.cost_model import CostModel

MODEL = CostModel(fixed=0.008, per_row=2e-5, per_sequence=5e-5)
SETTINGS: dict[str, Any] = {"num_blocks": 4000, "block_size": 16, "max_num_batched_tokens": 2048, "max_num_seqs": 128}
REPLICAS = 8
ROUTERS = ("round_robin", "least_loaded", "cache_aware", "prefix")


def generated(count: int, rate: float) -> Iterator[Arrival]:
    """Requests of drawn lengths that share nothing."""
    lengths = {"prompt": {"lognormal": {"median": 300, "sigma": 1, "max": 4000}}, "output": {"uniform": [20, 150]}}
    return read_generated(lengths | {"num_requests": count, "arrivals": {"process": "poisson", "rate": rate}})


def mooncake(path: Path, count: int) -> Iterator[Arrival]:
    """The first requests of a trace."""
    return islice(read_mooncake(path), count)


def cost(
    arrivals: Callable[[], Iterable[Arrival]], config: EngineConfig, routers: Iterable[str]
) -> list[dict[str, Any]]:
    """CPU time of one engine with the load of one replica, and of a fleet with each router."""
    rows = []

    def add(name: str, replicas: int, started: float, chunks: int, steps: int) -> None:
        seconds = time.process_time() - started
        row = {"router": name, "replicas": replicas, "cpu_seconds": seconds, "steps": steps, "chunks": chunks}
        row["microseconds"] = seconds / chunks * 1e6
        row["cost"] = row["microseconds"] / (rows[0]["microseconds"] if rows else row["microseconds"])
        rows.append(row)
        print(f"{name:12s} {replicas} replicas: {seconds:.1f} s CPU, {row['microseconds']:.2f} us, {row['cost']:.2f}")

    started = time.process_time()
    found = simulate_at_scale(config, islice(arrivals(), 0, None, REPLICAS), MODEL)
    add("one engine", 1, started, found.num_scheduled, found.num_steps)
    for router in routers:
        started = time.process_time()
        fleet = simulate_fleet_at_scale(arrivals, config, MODEL, replicas=REPLICAS, router=router)
        add(router, REPLICAS, started, fleet.total("num_scheduled"), fleet.total("num_steps"))
    return rows


def short(count: int, rate: float) -> Iterator[Arrival]:
    """Requests with short answers, so that a million of them take minutes."""
    lengths = {"prompt": {"uniform": [64, 256]}, "output": {"uniform": [4, 16]}}
    return read_generated(lengths | {"num_requests": count, "arrivals": {"process": "poisson", "rate": rate}})


@contextmanager
def executor_of(way: str) -> Iterator[Executor | None]:
    """Two workers that are there, or None."""
    if way == "one":
        yield None
    elif way == "two":
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            list(pool.map(abs, range(2)))
            yield pool
    else:
        from distributed import Client, LocalCluster

        with (
            LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
            Client(cluster) as dask,
        ):
            yield dask.get_executor()


def cpu_seconds() -> float:
    """CPU time of this process, and of those that it has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + used.ru_utime + used.ru_stime


def spread(count: int, replicas: int, ways: list[str], rounds: int) -> dict[str, Any]:
    """Wall and CPU times of a large fleet behind consistent hashing, by way; and whether all results were equal."""
    run = partial(
        simulate_fleet_at_scale,
        partial(short, count, 150.0 * replicas),
        EngineConfig(**SETTINGS, enable_prefix_caching=False),  # no two prompts begin alike
        MODEL,
        replicas=replicas,
        router="consistent_hash",
    )
    found: list[dict[str, Any]] = []
    times: dict[str, dict[str, list[float]]] = {way: {"wall": [], "cpu": []} for way in ways}
    for _ in range(rounds):
        for way in ways:
            cpu = cpu_seconds()
            with executor_of(way) as executor:
                started = time.perf_counter()
                found.append(run(executor=executor).to_row())
                times[way]["wall"].append(time.perf_counter() - started)
            times[way]["cpu"].append(cpu_seconds() - cpu)
            print(way, {name: f"{values[-1]:.1f} s" for name, values in times[way].items()}, flush=True)
    row: dict[str, Any] = {"requests": count, "replicas": replicas, "times": times, "fleet": found[0]}
    row["equal"] = all(one == found[0] for one in found) if len(found) > 1 else None
    for way in ways if "one" in ways else ():
        shares = [spent / alone for spent, alone in zip(times[way]["wall"], times["one"]["wall"])]
        row[f"{way}_share"] = summarise(shares)
    print({name: value for name, value in row.items() if name != "fleet"})
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mooncake", type=Path, help="a copy of Mooncake's conversation trace")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--routers", default=",".join(ROUTERS), help="routers, separated by commas")
    parser.add_argument("--spread", type=int, help="measure only this number of requests, spread over processes")
    parser.add_argument("--replicas", type=int, default=200, help="replicas that are spread over processes")
    parser.add_argument("--ways", nargs="+", choices=("one", "two", "dask"), default=["one", "two"])
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    if options.spread:
        row = spread(options.spread, options.replicas, options.ways, options.rounds) | {"machine": machine()}
        path = RESULTS / "fleet_spread.json"
        others = json.loads(path.read_text())["rows"] if path.exists() else []
        save("fleet_spread", {"rows": [*(one for one in others if one["requests"] != options.spread), row]})
        return
    if options.mooncake:
        arrivals: Callable[[], Iterable[Arrival]] = partial(mooncake, options.mooncake, options.requests)
        config = EngineConfig(
            block_size=512, num_blocks=3000, max_num_batched_tokens=8192, max_num_seqs=64, max_model_len=200_000
        )
    else:
        arrivals = partial(generated, options.requests, 20.0)
        config = EngineConfig(**SETTINGS)
    rows = cost(arrivals, config, options.routers.split(","))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    facts = {"workload": "mooncake" if options.mooncake else "generated", "requests": options.requests}
    save("fleet", facts | {"rows": rows, "peak_mib": peak})


if __name__ == "__main__":
    main()
