"""The cost model: exact where steps are exactly linear, honest about steps it has not seen."""

import random
from itertools import pairwise

import numpy as np
import pytest

from workbench import simulate
from workbench.engine.cost_model import CostModel, _non_negative_least_squares, step_features
from workbench.trace.records import Chunk

TRUE = CostModel(fixed=0.004, per_sequence=3e-5, per_prefill_token=6e-5, per_kv_token=4e-8, per_attention_cell=2e-10)


def workload(seed: int = 0, count: int = 60) -> dict:
    rng = random.Random(seed)
    requests = [
        {
            "id": f"r{i}",
            "prompt": {"len": rng.choice([5, 40, 300, 900])},
            "max_tokens": rng.randint(1, 30),
            "arrival_time": i * 0.02,
        }
        for i in range(count)
    ]
    return {"config": {"max_num_batched_tokens": 256, "num_blocks": 2000, "max_num_seqs": 32}, "requests": requests}


class Noisy(CostModel):
    """Steps that take 10 % more or less than the model says, at random."""

    def seconds(self, features):
        return super().seconds(features) * (1 + 0.1 * random.Random(str(features)).gauss(0, 1))


class Unrelated(CostModel):
    """Steps whose time has nothing to do with what they hold."""

    def seconds(self, features):
        return random.Random(str(features)).uniform(0.001, 0.05)


def test_features_are_what_their_names_say():
    chunks = [
        Chunk("a", 100, 1, False, "decode", 1, "complete"),
        Chunk("b", 20, 3, True, "intermediate", None, "token_budget"),
    ]
    # cells: the rows at positions 20, 21, 22 read 21, 22, 23 positions
    assert step_features(chunks) == (2, 3, 101 + 23, 21 + 22 + 23)


def test_fit_finds_the_model_that_timed_the_trace():
    trace = simulate(workload(), cost_model=TRUE)
    model, report = CostModel.fit(trace)
    assert list(model.to_dict().values()) == pytest.approx(list(TRUE.to_dict().values()), rel=1e-6)
    assert report.median_error < 1e-9 and report.total_error < 1e-9 and report.r_squared > 1 - 1e-9
    assert report.num_held_out == pytest.approx(report.num_fitted / 4, abs=1)


def test_errors_are_measured_on_steps_the_fit_has_not_seen():
    _, report = CostModel.fit(simulate(workload(), cost_model=Noisy(**TRUE.to_dict())))
    assert 0.03 < report.median_error < 0.12  # the median of |N(0, 0.1)| is 0.067
    assert report.total_error < 0.06
    _, unrelated = CostModel.fit(simulate(workload(), cost_model=Unrelated(fixed=1)))
    assert unrelated.median_error > 3 * report.median_error and unrelated.r_squared < 0.5


def test_coefficients_are_never_negative_and_optimal():
    rng = np.random.default_rng(2)
    for _ in range(30):
        matrix = np.abs(rng.normal(size=(50, 5))) * 10.0 ** rng.integers(-3, 6, 5)
        target = matrix @ (rng.normal(size=5) / np.abs(matrix).max(axis=0)) + rng.normal(size=50)
        solution = _non_negative_least_squares(matrix, target)
        gradient = matrix.T @ (matrix @ solution - target) / np.abs(matrix).max(axis=0)
        # Karush-Kuhn-Tucker: no descent by raising a coefficient, none by moving a positive one
        assert (solution >= 0).all() and (gradient > -1e-6).all()
        assert np.abs(gradient[solution > 0]).max(initial=0) < 1e-6


def test_simulated_time_follows_the_model():
    trace = simulate(workload(), cost_model=TRUE)
    for before, after in pairwise(trace):
        duration = TRUE.step_seconds(before.chunks)
        assert sum(before.timings.values()) == pytest.approx(duration)
        assert after.time >= before.time + duration - 1e-12
    infos = trace.requests.values()
    assert all(info.arrival_time == pytest.approx(0.02 * i) for i, info in enumerate(infos))
    first_seen = {rid: record for record in reversed(trace) for rid in record.arrived}
    assert all(first_seen[info.request_id].time >= info.arrival_time - 1e-12 for info in infos)
    assert trace.metrics().summary.unit == "s"


def test_without_a_cost_model_a_simulation_has_no_clock():
    requests = [{"id": "a", "prompt": {"len": 9}, "arrival_time": 5.0}]
    trace = simulate({"requests": requests})
    assert trace[0].time == 0 and not trace[0].timings and trace[0].admitted == ("a",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CostModel(), "all coefficients of the cost model are 0"),
        (lambda: CostModel(fixed=-1), "fixed must be >= 0 and finite, got -1"),
        (lambda: CostModel.from_dict({"speed": 1}), "cost_model must map some of fixed, per_sequence"),
        (lambda: CostModel.fit(simulate(workload(count=2))), "at least 20 steps with timings, the traces have 0"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
