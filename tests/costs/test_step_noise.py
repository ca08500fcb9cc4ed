"""Noise of steps: a simulation has the noise of its recording, and the waits that come from it."""

import random

import numpy as np
import pytest

from workbench import simulate
from workbench.analysis.fork import fork
from workbench.analysis.predict import Predictor, values_of
from workbench.simulation.costs.cost_model import CostModel, step_costs
from workbench.simulation.costs.drift import Drift
from workbench.simulation.costs.step_model import StepCosts
from workbench.simulation.costs.step_noise import Replayed, StepNoise

TRUE = CostModel(fixed=0.012, per_sequence=0.002, per_prefill_step=0.006, per_prefill_token=2e-4)
PIECE = 0.004


class Machine:
    """TRUE, but one step in ten takes 3.5 times as long as the others."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def step_seconds(self, chunks):
        return TRUE.step_seconds(chunks) * (2.8 if self.rng.random() < 0.1 else 0.8)


def workload(count=150):
    rng, now, requests = random.Random(5), 0.0, []
    for i in range(count):
        now += rng.expovariate(10)
        requests.append({"id": f"r{i}", "prompt": {"len": rng.randint(1, 20)}, "max_tokens": 8, "arrival_time": now})
    return {"config": {"async_scheduling": True, "num_blocks": 4000}, "requests": requests}


@pytest.mark.parametrize("seconds", [0.02, 0.5])
def test_long_steps_vary_like_many_short_ones(seconds):
    rng = np.random.default_rng(0)
    short = rng.gamma(0.02 / PIECE, PIECE, 2_000)
    steps = StepCosts([(1, 0, 0, 0)] * 2_000, short.tolist(), [(0, 0)] * 2_000, [0.0] * 2_000)
    noise = StepNoise.of(CostModel(fixed=0.02), steps)
    replayed = Replayed(CostModel(fixed=seconds), Drift(), noise, seed=3)
    drawn = np.array([replayed.step_seconds([]) for _ in range(4_000)])
    assert drawn.mean() == pytest.approx(seconds, rel=0.02)
    assert drawn.std() == pytest.approx((seconds * PIECE) ** 0.5, rel=0.1)
    assert drawn.min() > 0


def test_an_arrival_meets_long_steps_more_often_than_short_ones():
    recording = simulate(workload(), cost_model=Machine(0))
    noise = StepNoise.of(TRUE, step_costs(recording))
    again = [fork(recording, cost_model=Replayed(TRUE, Drift(), noise, seed)) for seed in range(6)]
    measured = [simulate(workload(), cost_model=Machine(seed)) for seed in range(1, 7)]
    with_noise, true = (np.mean([values_of(run)["ttft_mean"] for run in runs]) for runs in (again, measured))
    without_noise = values_of(fork(recording, cost_model=TRUE))["ttft_mean"]
    assert without_noise < 0.95 * true
    assert with_noise == pytest.approx(true, rel=0.03)


def test_a_predicted_value_is_that_of_one_run_and_its_interval_has_the_noise():
    predictor = Predictor(simulate(workload(60), cost_model=Machine(0)), num_draws=3)
    draws, values = predictor.unchanged.draws["ttft_mean"], predictor.unchanged["ttft_mean"]
    assert len(set(draws)) == 3 and values.value == values_of(predictor.simulate())["ttft_mean"] not in draws
    assert values.low < min(draws) and values.high > max(draws)
    exact = Predictor(predictor.trace, TRUE, num_draws=2)  # nothing is known about the noise of a given model
    assert exact.unchanged["ttft_mean"].value == pytest.approx(values_of(exact.simulate())["ttft_mean"])


def test_equal_seeds_draw_equal_noise():
    noise = StepNoise.of(TRUE, step_costs(simulate(workload(30), cost_model=Machine(0))))
    one, same, other = (Replayed(TRUE, Drift(), noise, seed) for seed in (1, 1, 2))
    times = [[each.step_seconds([]) for _ in range(20)] for each in (one, same, other)]
    assert times[0] == times[1] != times[2]
    assert {Replayed(TRUE, Drift()).step_seconds([]) for _ in range(20)} == {TRUE.step_seconds([])}


def test_ctrl_c_computes_the_first_simulation_that_is_missing(monkeypatch):
    """Processes end in any order: three simulations may be there, and the first of one setting not."""
    trace = simulate(workload(60), cost_model=Machine(0))
    settings = [{"max_num_seqs": 2}]
    whole = Predictor(trace, num_draws=3).predict_all(settings)[0]
    predictor = Predictor(trace, num_draws=3)
    outcomes, asked = predictor.outcomes, []

    def in_another_order(tasks):
        asked.append(len(tasks))
        if len(asked) > 1:
            yield from outcomes(tasks)
            return
        found = list(outcomes(tasks))
        yield from sorted(found, key=lambda each: each[0])[1:4]
        predictor._known.clear()
        raise KeyboardInterrupt

    monkeypatch.setattr(predictor, "outcomes", in_another_order)
    try:
        (partial,) = predictor.predict_all(settings)
    except KeyboardInterrupt:  # which would end the test run
        pytest.fail("there is no answer")
    assert asked == [8, 1] and whole["ttft_mean"].low < partial["ttft_mean"].value < whole["ttft_mean"].high

    def at_once(tasks):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(predictor, "outcomes", at_once)
    with pytest.raises(KeyboardInterrupt):
        predictor.predict_all(settings)
