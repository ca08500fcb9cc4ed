"""Concurrent partial prefills against plain first-come-first-served chunked prefill, simulated.

The starving case needs no clock. The others use a cost model that stands for one data-centre GPU. Its coefficients are
below; only the ratios to "off" matter. Every case runs with several seeds, and ratios are taken seed by seed.

    python benchmarks/bench_partial_prefills.py
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from _common import save

from workbench import EngineConfig, Trace, simulate
from workbench.simulation.arrivals import Arrival, poisson, timed_arrival
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.simulate import simulate_requests

COST_MODEL = CostModel(fixed=0.004, per_sequence=2e-5, per_prefill_token=5e-5, per_kv_token=2e-8)
CONFIG = EngineConfig(
    max_num_batched_tokens=2048, max_num_seqs=256, block_size=64, num_blocks=12_000, enable_prefix_caching=False
)
THRESHOLD = 512
LOAD = 0.9
"""Arrival rate as a fraction of the cost model's capacity."""

Limits = tuple[int | None, int | None]


def limited(limits: Limits, threshold: int = THRESHOLD, config: EngineConfig = CONFIG) -> EngineConfig:
    """The configuration with (max_num_partial_prefills, max_long_partial_prefills); "off" also has no threshold."""
    num, long = limits
    if num is None:
        return config
    return config.replace(
        max_num_partial_prefills=num, max_long_partial_prefills=long, long_prefill_token_threshold=threshold
    )


def name(limits: Limits) -> str:
    return "off" if limits[0] is None else f"num={limits[0]} long={limits[1]}"


# -- the starving case ------------------------------------------------------------------------------------------------


def starving_case() -> dict[str, Any]:
    """Four prompts of 100,000 tokens and one of 5 behind them, all at step 0, budget 2048."""
    requests = [{"id": f"L{i}", "prompt": {"len": 100_000}, "max_tokens": 8} for i in range(4)]
    requests.append({"id": "short", "prompt": {"len": 5}, "max_tokens": 8})
    cases = {
        "off": CONFIG,
        "off, threshold 512 (vLLM's chunk cap)": CONFIG.replace(long_prefill_token_threshold=THRESHOLD),
        "num=1 long=1": limited((1, 1)),
        "num=2 long=1": limited((2, 1)),
        "num=4 long=2": limited((4, 2)),
    }
    results = {}
    print("starving case: step of the first token, and use of the budget until the last prompt is in")
    for case, config in cases.items():
        trace = simulate({"requests": requests}, config=config)
        steps = {rid: request.token_steps[0] for rid, request in trace.metrics().requests.items()}
        used = [record.num_tokens / record.token_budget for record in trace[: max(steps.values())]]
        results[case] = {"first_token_step": steps, "mean_budget_use": statistics.mean(used)}
        print(f"  {case:40} {steps}  {statistics.mean(used):.1%}")
    return results


# -- in time ----------------------------------------------------------------------------------------------------------


def capacity(lengths: list[int], output: int, config: EngineConfig = CONFIG) -> float:
    """Requests per second that the cost model can serve at full load."""
    trace = run(config, [timed_arrival(f"r{i}", [i] * n, output, 0.0) for i, n in enumerate(lengths)])
    return len(lengths) / trace.metrics().summary.duration


def workload(groups: dict[str, tuple[int, int]], output: int, seed: int, rate: float) -> list[Arrival]:
    """Requests of several groups (count, prompt tokens) in random order, with Poisson arrivals."""
    rng = random.Random(seed)
    kinds = [group for group, (count, _) in groups.items() for _ in range(count)]
    rng.shuffle(kinds)
    times = poisson(rate, rng)
    return [timed_arrival(f"{kind}.{i}", [i] * groups[kind][1], output, next(times)) for i, kind in enumerate(kinds)]


def run(config: EngineConfig, arrivals: list[Arrival]) -> Trace:
    return simulate_requests(config, arrivals, lambda request: 0, cost_model=COST_MODEL)


def measure(config: EngineConfig, arrivals: list[Arrival]) -> dict[str, float]:
    """Times to first token in seconds, of all requests and by group, and output tokens per second."""
    metrics = run(config, arrivals).metrics()
    ttft = {rid: request.ttft.seconds for rid, request in metrics.requests.items()}
    everyone = np.array(list(ttft.values()))
    result = {
        "mean_ttft": float(everyone.mean()),
        "median_ttft": float(np.median(everyone)),
        "p99_ttft": float(np.percentile(everyone, 99)),
    }
    for group in dict.fromkeys(rid.split(".")[0] for rid in ttft):
        values = [seconds for rid, seconds in ttft.items() if rid.split(".")[0] == group]
        result[f"{group}_mean_ttft"] = float(np.mean(values))
        result[f"{group}_p99_ttft"] = float(np.percentile(values, 99))
    return result | {"output_throughput": metrics.summary.output_throughput}


def compare(
    title: str,
    groups: dict[str, tuple[int, int]],
    output: int,
    limits: list[Limits],
    seeds: int,
    threshold: int,
    config: EngineConfig = CONFIG,
) -> dict[str, Any]:
    """Measure every setting on the same arrivals; medians over seeds, and ratios to "off" with their maximum."""
    lengths = [length for count, length in groups.values() for _ in range(count)]
    rate = LOAD * capacity(lengths, output, config)
    print(f"{title}: {groups}, output {output}, Poisson {rate:.1f} requests/s, threshold {threshold}, {seeds} seeds")
    runs: dict[Limits, list[dict[str, float]]] = {setting: [] for setting in limits}
    for seed in range(seeds):
        arrivals = workload(groups, output, seed, rate)
        for setting in limits:
            runs[setting].append(measure(limited(setting, threshold, config), arrivals))
    result: dict[str, Any] = {"groups": groups, "output": output, "rate": rate, "threshold": threshold, "seeds": seeds}
    for setting, values in runs.items():
        ratios = [{key: v[key] / off[key] for key in off} for v, off in zip(values, runs[(None, None)])]

        def over(rows: list[dict[str, float]], reduce: Callable[[list[float]], float]) -> dict[str, float]:
            return {key: round(reduce([row[key] for row in rows]), 4) for key in rows[0]}

        result[name(setting)] = {
            "median": over(values, statistics.median),
            "ratio_to_off": over(ratios, statistics.median),
            "worst_ratio_to_off": over(ratios, max),
            "least_ratio_to_off": over(ratios, min),
        }
        shown = result[name(setting)]["ratio_to_off"]
        worst = result[name(setting)]["worst_ratio_to_off"]
        print(f"  {name(setting):14} " + "  ".join(f"{key} {shown[key]:.2f} (max {worst[key]:.2f})" for key in shown))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    off: Limits = (None, None)
    mix = {"short": (800, 100), "medium": (150, 1000), "long": (50, 8000)}
    groups = {"small": (100, 50), "medium": (100, 1000), "large": (100, 6000)}
    one_long: list[Limits] = [off, (1, 1), (4, 1), (16, 1)]
    results = {
        "starving": starving_case(),
        "mix": compare("mix", mix, 64, [off, (1, 1), (4, 1), (8, 1), (8, 2)], seeds, THRESHOLD),
        "groups_output_128": compare("groups", groups, 128, one_long, seeds, THRESHOLD),
        "groups_output_1": compare("groups", groups, 1, one_long, seeds, THRESHOLD),
        "uniform": compare("uniform", {"uniform": (300, 2048)}, 128, one_long, seeds, THRESHOLD),
        "uniform_none_long": compare(
            "uniform, none long", {"uniform": (300, 2048)}, 128, [off, (1, 1), (4, 4), (16, 16)], seeds, 4096
        ),
        **{
            f"seats_{seats}": compare(
                f"{seats} seats, prompts of 16,384 to 65,536",
                {"short": (400, 200), "long_16k": (12, 16_384), "long_32k": (8, 32_768), "long_64k": (4, 65_536)},
                128,
                [off, (4, 1)],
                seeds,
                CONFIG.max_num_batched_tokens,
                CONFIG.replace(max_num_seqs=seats, num_blocks=24_000),
            )
            for seats in (128, 1024)
        },
    }
    save("partial_prefills", {"cost_model": COST_MODEL.to_dict(), "config": CONFIG.to_dict(), "cases": results})


if __name__ == "__main__":
    main()
