"""Whether the ratio of two predictions is right when the steps of a recording are noisy: simulations, CPU only.

Random workloads run on a clock whose steps follow a known cost model times lognormal noise, some with bursts of steps
that take 2 to 5 times as long. The product fits its model to such a run and predicts it as it was and with another
token budget or number of seats. The ratio of both predictions is compared with that of both runs without noise, and
with the ratio that counting steps gives.

    python benchmarks/bench_compared.py            400 runs, 10 minutes of CPU time
    python benchmarks/bench_compared.py --runs 20
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _common import save
from msgspec.structs import replace

import workbench.simulation.costs.fit as fit_module
from workbench import CostModel, Trace, simulate
from workbench.analysis.check import BOUNDED
from workbench.analysis.predict import Predictor
from workbench.analysis.values import values_of
from workbench.trace.readings.metrics_collector import metrics

MODELS = (
    CostModel(fixed=0.015, per_sequence=0.001, per_prefill_token=0.0012, per_kv_token=2e-6, per_attention_cell=1e-7),
    CostModel(fixed=0.004, per_sequence=0.0002, per_prefill_token=2e-4, per_kv_token=4e-7),
    CostModel(weights=0.02, per_row=1.5e-4, overlap=3.0, fixed=0.002, per_kv_token=3e-7),
    CostModel(fixed=0.03, per_prefill_token=0.004, per_sequence=0.003),
)
VALUES = ("ttft_mean", "ttft_p99", "itl_mean", "itl_p99", "duration")
BUDGETS = (32, 64, 192, 512, 2048)
LARGE, NEAR = 0.1, 0.15
"""A true difference above the first counts; a predicted ratio is near the true one within the second."""

BOUNDS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0, math.inf)
MIN_STEPS = 40


class NoisySteps:
    """A cost model times noise, with bursts of slow steps.

    Args:
        model: The cost model.
        sigma: Standard deviation of the logarithm of the noise.
        burst: Probability that a burst begins in a step.
        rng: Draws all.
    """

    def __init__(self, model: CostModel, sigma: float, burst: float, rng: Random) -> None:
        self._model, self._sigma, self._burst, self._rng = model, sigma, burst, rng
        self._left, self._factor = 0, 1.0

    def step_seconds(self, chunks: Any) -> float:
        """Duration of the next step."""
        seconds = self._model.step_seconds(chunks) * math.exp(self._rng.gauss(0, self._sigma) - self._sigma**2 / 2)
        if not self._left and self._rng.random() < self._burst:
            self._left, self._factor = self._rng.randint(2, 6), self._rng.uniform(2, 5)
        if self._left:
            self._left -= 1
            seconds *= self._factor
        return seconds


class Difference(NamedTuple):
    """A value of a changed run over that of the run as it was: without noise, as predicted, and in steps."""

    value: str
    is_budget: bool
    true: float
    predicted: float
    in_steps: float | None


class Run(NamedTuple):
    """A noisy run: errors of its fit, the worst error of the prediction of this run, and the differences."""

    median_error: float
    total_error: float
    check: float
    differences: list[Difference]


def workload(rng: Random, model: CostModel) -> dict[str, Any]:
    """Requests of one mean length that arrive at once, or with a load from half to one and a half."""
    seats, length = rng.choice((2, 4, 8, 16)), rng.choice((60, 200, 500))
    decode = model.seconds((min(seats, 8), 0, 8 * length, 0)) / min(seats, 8)
    gap = (model.seconds((1, length, length, length**2 // 2)) + 30 * decode) * rng.choice((0.0, 0.5, 1.0, 1.5))
    requests, arrival = [], 0.0
    for number in range(rng.randint(8, 40)):
        prompt = {"len": max(3, int(rng.expovariate(1 / length)))}
        request = {"id": f"r{number}", "prompt": prompt, "max_tokens": rng.randint(2, 60), "arrival_time": arrival}
        requests.append(request)
        arrival += rng.expovariate(1 / gap) if gap else 0.0
    config = {"max_num_batched_tokens": rng.choice((192, 256, 512, 1024, 2048)), "max_num_seqs": seats}
    return {"config": config | {"num_blocks": 4096}, "requests": requests}


def in_steps(trace: Trace) -> dict[str, float]:
    """The values of a run in steps."""
    summary = metrics(trace).summary
    times = {"ttft_mean": summary.ttft.mean, "ttft_p99": summary.ttft.p99, "duration": float(len(trace))}
    times |= {"itl_mean": summary.itl.mean, "itl_p99": summary.itl.p99}
    return {name: value for name, value in times.items() if value}


def ratio(changed: Mapping[str, float], unchanged: Mapping[str, float], name: str) -> float | None:
    """A value over that of the run as it was; None if one is missing."""
    return changed[name] / unchanged[name] if changed.get(name) and unchanged.get(name) else None


def measure(seed: int) -> Run | None:
    """One noisy run; None if it is too short."""
    rng = Random(seed)
    model, sigma, burst = rng.choice(MODELS), rng.uniform(0.05, 1.0), rng.choice((0.0, 0.0, 0.01, 0.03))
    content = workload(rng, model)
    recorded = simulate(content, cost_model=NoisySteps(model, sigma, burst, rng))
    if len(recorded) < MIN_STEPS:
        return None
    trace = Trace(replace(recorded.meta, source="engine"))
    for info in recorded.requests.values():
        trace.add_request(info)
    for record in recorded:
        trace.append(record)
    predictor = Predictor(trace, num_draws=0, rough=True)
    assert predictor.report is not None
    unchanged = predictor.check.plain, values_of(simulate(content, cost_model=model)), in_steps(trace.fork(at_step=0))
    found = []
    for changes in changes_of(content["config"]):
        changed = {**content, "config": content["config"] | changes}
        try:
            predicted = predictor.predict(**changes).outcome.values
            true = values_of(simulate(changed, cost_model=model))
            steps = in_steps(trace.fork(at_step=0, **changes))
        except ValueError:  # no schedule can serve a request
            continue
        for name in VALUES:
            sides = [ratio(*pair, name) for pair in zip((predicted, true, steps), unchanged)]
            if sides[0] is not None and sides[1] is not None:
                is_budget = "max_num_batched_tokens" in changes
                found.append(Difference(name, is_budget, sides[1], sides[0], sides[2]))
    errors = predictor.check.errors
    worst = max(abs(errors.get(name, 0.0)) for name in BOUNDED)
    return Run(predictor.report.median_error, predictor.report.total_error, worst, found)


def changes_of(config: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Other budgets that leave each seat a token, and half or twice the seats."""
    seats = config["max_num_seqs"]
    for budget in BUDGETS:
        if budget != config["max_num_batched_tokens"] and budget >= seats:
            yield {"max_num_batched_tokens": budget}
    yield {"max_num_seqs": max(1, seats // 2)}
    yield {"max_num_seqs": 2 * seats}


def shares(runs: list[Run]) -> dict[str, Any]:
    """Of true differences above LARGE, the shares whose sign, and whose size, is right as predicted and in steps."""
    large = [each for run in runs for each in run.differences if abs(each.true - 1) > LARGE]
    budgets = [each for each in large if each.is_budget and each.in_steps is not None]

    def share(found: list[bool]) -> float | None:
        return round(sum(found) / len(found), 3) if found else None

    return {
        "runs": len(runs),
        "differences": len(large),
        "sign": share([(each.predicted - 1) * (each.true - 1) > 0 for each in large]),
        "size": share([abs(each.predicted / each.true - 1) <= NEAR for each in large]),
        "sign_by_value": {
            name: share([(each.predicted - 1) * (each.true - 1) > 0 for each in large if each.value == name])
            for name in VALUES
        },
        "budgets": len(budgets),
        "budgets_sign": share([(each.predicted - 1) * (each.true - 1) > 0 for each in budgets]),
        "budgets_sign_in_steps": share([((each.in_steps or 0) - 1) * (each.true - 1) > 0 for each in budgets]),
    }


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400)
    options = parser.parse_args()
    fit_module.MAX_COMPARED_MEDIAN_ERROR = fit_module.MAX_COMPARED_TOTAL_ERROR = math.inf  # every fit is measured
    runs = [run for seed in range(options.runs) if (run := measure(seed)) is not None]
    tables: dict[str, list[dict[str, Any]]] = {}
    for name in ("median_error", "total_error", "check"):
        tables[name] = []
        for low, high in pairwise(BOUNDS):
            here = [run for run in runs if low <= getattr(run, name) < high]
            tables[name].append({"from": low, "to": high if high < math.inf else None, **shares(here)})
            print(name, tables[name][-1], flush=True)
    accepted = [run for run in runs if run.median_error <= 0.8 and run.total_error <= 0.5 and run.check <= 0.5]
    refused = [run for run in runs if run not in accepted]
    save("compared", {**tables, "compared": shares(accepted), "refused": shares(refused)})


if __name__ == "__main__":
    main()
