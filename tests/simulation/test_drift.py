"""A trend in the speed of a machine: found, kept out of the costs, and repeated by a prediction of the same period."""

import random

import numpy as np
import pytest

from workbench import simulate
from workbench.simulation.cost_model import CostModel
from workbench.simulation.drift import Drift, find_drift
from workbench.simulation.predict import Predictor, values_of

TRUE = CostModel(fixed=0.02, per_sequence=5e-4, per_prefill_token=6e-5)


class Machine:
    """TRUE, whose steps become slower with each step, and vary by 5 %."""

    def __init__(self, slower_per_step: float) -> None:
        self.slower_per_step, self.num_steps, self.rng = slower_per_step, 0, random.Random(1)

    def step_seconds(self, chunks):
        self.num_steps += 1
        factor = (1 + self.slower_per_step * self.num_steps) * self.rng.gauss(1, 0.05)
        return TRUE.step_seconds(chunks) * factor


def workload(count=120):
    """Requests that arrive faster and faster, so that the load grows with the trend."""
    rng, now, requests = random.Random(0), 0.0, []
    for i in range(count):
        now += rng.expovariate(2 + 10 * i / count)
        requests.append({"id": f"r{i}", "prompt": {"len": rng.randint(10, 300)}, "max_tokens": 25, "arrival_time": now})
    return {"config": {"max_num_batched_tokens": 256, "max_num_seqs": 32, "num_blocks": 4000}, "requests": requests}


@pytest.mark.parametrize("slower_per_step", [0.0005, -0.0002])
def test_a_trend_is_found_and_is_not_taken_for_the_cost_of_the_load(slower_per_step):
    trace = simulate(workload(), cost_model=Machine(slower_per_step))
    model, report = CostModel.fit(trace)
    total = slower_per_step * len(trace)
    assert report.drift.change == pytest.approx(total / (1 + total / 2), rel=0.35)
    middle = 1 + total / 2
    assert model.seconds((20, 0, 4000, 0)) == pytest.approx(TRUE.seconds((20, 0, 4000, 0)) * middle, rel=0.1)


def test_noise_is_no_trend():
    _, report = CostModel.fit(simulate(workload(), cost_model=Machine(0.0)))
    assert report.drift == Drift() and report.notes == ()


def test_a_prediction_of_the_same_period_has_the_trend():
    changes = {"max_num_seqs": 12}
    predictor = Predictor(simulate(workload(), cost_model=Machine(0.0005)), num_draws=0)
    real = values_of(simulate(workload(), config=changes, cost_model=Machine(0.0005)))
    predicted = values_of(predictor.simulate(**changes))
    for name in ("duration", "e2e_mean", "tpot_mean"):
        assert predicted[name] == pytest.approx(real[name], rel=0.06)


def test_only_the_counted_requests_make_the_values():
    trace = simulate(workload(20), cost_model=TRUE)
    counted = [f"r{i}" for i in range(10, 20)]
    values = Predictor(trace, TRUE, num_draws=0, counted=counted).recorded
    assert values == values_of(trace, counted) != values_of(trace)


def test_the_factors_of_a_recording_have_mean_one_over_its_time():
    rng = np.random.default_rng(0)
    rows, predicted = rng.integers(1, 500, 400).astype(float), rng.uniform(0.01, 0.1, 400)
    planted = Drift(0.3, find_drift(rows, predicted, predicted).center, float(rows.sum()))
    measured = predicted * planted.factors(rows)
    assert measured.sum() == pytest.approx(predicted.sum())
    assert find_drift(rows, measured, predicted).change == pytest.approx(0.3)
    assert Drift(-9.0, 0.0, 100.0).factor(100) > 0  # a steep line never makes a step take no time
