"""A trend in the speed of a machine: found, kept out of the costs, and repeated by a prediction of the same period."""

import random

import numpy as np
import pytest

from workbench import simulate
from workbench.analysis.predict import Predictor, values_of
from workbench.simulation.costs.cost_model import CostModel, step_costs
from workbench.simulation.costs.drift import MIN_CHANGE, Drift, find_drift
from workbench.simulation.costs.step_model import predicted_seconds, slopes

TRUE = CostModel(fixed=0.02, per_sequence=5e-4, per_prefill_token=6e-5)


class Machine:
    """TRUE, whose steps become slower with each step, and vary by 5%."""

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


@pytest.mark.repeats(step=2)
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
    slopes = [predicted]
    planted = Drift(0.3, find_drift(rows, predicted, predicted, slopes).center, float(rows.sum()))
    measured = predicted * planted.factors(rows)
    assert measured.sum() == pytest.approx(predicted.sum())
    assert find_drift(rows, measured, predicted, slopes).change == pytest.approx(0.3, rel=0.02)
    assert Drift(-9.0, 0.0, 100.0).factor(100) > 0  # a steep line never makes a step take no time


def independent(rng, count):
    """Every step is disturbed by itself, by 10%."""
    return 1 + 0.1 * rng.standard_normal(count)


def correlated(rng, count, memory=30):
    """Neighbours are slow together: noise of 10% that lasts for 30 steps, and 3% on each step."""
    keep, slow = np.exp(-1 / memory), rng.standard_normal(count)
    for i in range(1, count):
        slow[i] = keep * slow[i - 1] + np.sqrt(1 - keep**2) * slow[i]
    return np.maximum(0.5, 1 + 0.1 * slow + 0.03 * rng.standard_normal(count))


def bursts(rng, count):
    """Another program comes and goes, and makes about 60 steps up to 30% slower each time."""
    factors, at = 1 + 0.05 * rng.standard_normal(count), 0
    while at < count:
        at += int(rng.exponential(150))
        length = int(rng.exponential(60))
        factors[at : at + length] += rng.uniform(0.05, 0.3)
        at += length
    return factors


@pytest.fixture(scope="module")
def recording():
    """The contents of the steps of a run under growing load, with their true durations and slopes."""
    steps = step_costs(simulate(workload(200), cost_model=TRUE))
    coefficients = TRUE.to_dict()
    predicted = predicted_seconds(coefficients, steps.features)
    return np.array(steps.rows), np.array(predicted), slopes(coefficients, steps.features)


def share_with_a_trend(recording, disturb, planted=0.0, count=200, rule=lambda drift: drift.is_certain):
    """Share of simulated recordings that are said to have a trend."""
    rows, predicted, gradients = recording
    trend = 1 + planted * (np.cumsum(rows) / rows.sum() - 0.5)
    rng = np.random.default_rng(7)
    found = [
        rule(
            find_drift(
                rows.tolist(), (predicted * trend * disturb(rng, len(rows))).tolist(), predicted.tolist(), gradients
            )
        )
        for _ in range(count)
    ]
    return np.mean(found)


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("disturb", [independent, correlated, bursts])
def test_disturbed_steps_are_said_to_have_a_trend_in_at_most_2_percent_of_the_recordings(recording, disturb):
    assert share_with_a_trend(recording, disturb) <= 0.02


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("disturb", [correlated, bursts])
def test_without_its_error_a_trend_would_be_seen_in_many_of_them(recording, disturb):
    assert share_with_a_trend(recording, disturb, rule=lambda drift: abs(drift.change) >= MIN_CHANGE) > 0.3


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize(("disturb", "planted"), [(independent, 0.15), (independent, -0.15), (bursts, 0.8)])
def test_a_planted_trend_is_found_in_at_least_95_percent_of_the_recordings(recording, disturb, planted):
    assert share_with_a_trend(recording, disturb, planted) >= 0.95
