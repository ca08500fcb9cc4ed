"""A million requests through the scheduler on one core: scheduled requests per second of CPU, and memory.

Every size runs in a separate process; its peak memory is the operating system's number.

    python benchmarks/bench_simulation.py
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TARGET_PER_SECOND = 250_000
COST_MODEL = {"fixed": 0.005, "per_sequence": 2e-5, "per_prefill_token": 4e-5, "per_kv_token": 1e-8}
WORKLOAD = {
    "prompt": {"lognormal": {"median": 100, "sigma": 0.8, "max": 4000}},
    "output": {"uniform": [1, 60]},
    "arrivals": {"process": "poisson", "rate": 135},
}
CASES = {
    "no prefix caching": {"enable_prefix_caching": False},
    "prefix caching": {"enable_prefix_caching": True},
    "partial prefills 4, long 1": {
        "enable_prefix_caching": False,
        "max_num_partial_prefills": 4,
        "max_long_partial_prefills": 1,
        "long_prefill_token_threshold": 512,
    },
}


def run(case: str, num_requests: int) -> dict[str, Any]:
    """Simulate, and report time and memory."""
    from workbench import EngineConfig
    from workbench.simulation.arrivals import read_generated
    from workbench.simulation.at_scale import simulate_at_scale
    from workbench.simulation.costs.cost_model import CostModel

    config = EngineConfig(max_num_batched_tokens=2048, max_num_seqs=256, num_blocks=20_000, **CASES[case])
    arrivals = read_generated({**WORKLOAD, "num_requests": num_requests})
    begin = time.process_time()
    summary = simulate_at_scale(config, arrivals, CostModel(**COST_MODEL))
    seconds = time.process_time() - begin
    assert summary.end == "done" and summary.num_finished == num_requests
    return {
        "num_requests": num_requests,
        "num_steps": summary.num_steps,
        "num_scheduled": summary.num_scheduled,
        "cpu_seconds": round(seconds, 2),
        "scheduled_per_cpu_second": round(summary.num_scheduled / seconds),
        "peak_memory_mib": round(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10), 1
        ),
        "mean_ttft": summary.ttft.total / summary.ttft.count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", type=int, default=1_000_000)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run(options.case, options.size)))
        return
    sys.path.insert(0, str(Path(__file__).parent))
    from _common import save

    first = next(iter(CASES))
    plan = [(case, 100_000) for case in CASES] + [(first, options.largest)]
    results: dict[str, Any] = {}
    for case, size in plan:
        command = [sys.executable, __file__, "--case", case, "--size", str(size)]
        result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        results[f"{case}, {size} requests"] = result
        print(
            f"{case:28} {size:>9} requests: {result['scheduled_per_cpu_second']:>8} scheduled requests per CPU second, "
            f"{result['cpu_seconds']} s, {result['peak_memory_mib']} MiB"
        )
    save(
        "simulation",
        {
            "target_scheduled_per_cpu_second": TARGET_PER_SECOND,
            "workload": WORKLOAD,
            "cost_model": COST_MODEL,
            "cases": results,
        },
    )


if __name__ == "__main__":
    main()
