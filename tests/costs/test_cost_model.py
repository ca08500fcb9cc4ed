"""The cost model: exact if steps are exactly linear, honest about steps that it has not seen."""

import math
import random
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from workbench import Predictor, simulate
from workbench.base.text import duration as words
from workbench.simulation.costs import coefficients
from workbench.simulation.costs.coefficients import Regression
from workbench.simulation.costs.cost_model import STRETCHES, CostModel, step_costs, step_features
from workbench.simulation.costs.step_model import StepCosts
from workbench.trace import Chunk, RequestInfo, StepRecord, Trace, TraceMeta
from workbench.trace.readings.durations import measured_steps

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
    """Steps whose duration differs from the model by about 10%, at random."""

    def seconds(self, features):
        return super().seconds(features) * (1 + 0.1 * random.Random(str(features)).gauss(0, 1))


class Unrelated(CostModel):
    """Steps whose duration is unrelated to their chunks."""

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
    assert model.knee is None and report.notes == () and report.largest["sequences"] == 20
    assert report.median_error < 1e-9 and report.total_error < 1e-9 and report.r_squared > 1 - 1e-9
    assert report.num_held_out == pytest.approx(report.num_fitted / 4, abs=1)


def test_errors_are_measured_on_steps_the_fit_has_not_seen():
    _, report = CostModel.fit(simulate(workload(), cost_model=Noisy(**TRUE.to_dict())))
    assert 0.03 < report.median_error < 0.12  # the median of |N(0, 0.1)| is 0.067
    assert report.total_error < 0.06


def test_a_fit_that_does_not_hold_is_refused_with_the_step_that_shows_it():
    trace = simulate(workload(), cost_model=Unrelated(fixed=1))
    with pytest.raises(ValueError, match="do not follow from their contents") as refused:
        CostModel.fit(trace)
    step = int(re.search(r"Step (\d+) shows", str(refused.value))[1])
    assert f"took {words(sum(trace[step].timings.values()))}, " in str(refused.value)
    for word in ("trace 0", "the fit has not seen", "held out"):
        assert word not in str(refused.value)
    with pytest.raises(ValueError, match=r"of recording [12] shows"):
        CostModel.fit(trace, trace)


def test_no_draw_of_a_bootstrap_makes_prompts_free():
    """All prompts come in the first twentieth of this run: a third of the draws have none of its steps."""
    requests = [{"id": f"r{i}", "prompt": {"len": 300}, "max_tokens": 190} for i in range(3)]
    steps = step_costs(simulate({"requests": requests, "config": {"max_num_batched_tokens": 200}}, cost_model=TRUE))
    assert max(place for place, one in enumerate(steps.features) if one[1]) < len(steps) / STRETCHES
    for model in CostModel.bootstrap(steps, 30):
        cost = model.step_seconds([Chunk("a", 0, 200, True, "intermediate", None, "token_budget")])
        assert cost == pytest.approx(TRUE.fixed + 3e-5 + 200 * 6e-5 + 20100 * 2e-10 + 200 * 4e-8, rel=0.3)


def test_every_draw_of_a_recording_is_near_what_was_recorded():
    """Its six steps with large prompts lie in a tenth of it."""
    recording = Trace.load(Path(__file__).parents[2] / "docs" / "data" / "run.jsonl.gz")
    predicted = Predictor(recording).unchanged
    for name in ("ttft_p50", "ttft_mean", "e2e_mean"):
        low, high = predicted[name].low, predicted[name].high
        recorded = Predictor(recording).recorded[name]
        assert recorded * 0.8 < low <= high < recorded * 1.2


def test_steps_that_a_page_disturbed_are_left_out():
    """Their cause is known, so nothing is guessed from their times."""

    class Disturbed(CostModel):
        number = 0

        def step_seconds(self, chunks):
            self.number += 1
            return super().step_seconds(chunks) * (1.9 if 3 <= self.number <= 12 else 1)

    trace = simulate(workload(), cost_model=Disturbed(**TRUE.to_dict()))
    trace.mark_disturbed(range(2, 12))
    model, report = CostModel.fit(trace)
    assert list(model.to_dict().values()) == pytest.approx(list(TRUE.to_dict().values()), rel=1e-6)
    assert report.notes == ("left out: 10 steps during which a page was loading",)
    trace.mark_disturbed(range(len(trace) - 10))
    assert CostModel.fit(trace)[1].notes[-1:] != report.notes, "more than half of the steps stay in"


class Roofline:
    """Reading memory and arithmetic at the same time, with the soft corner of a real machine; not the model's form."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise
        self.rng = random.Random(1)

    def step_seconds(self, chunks):
        sequences, prefill, kv_tokens, cells = step_features(chunks)
        memory, compute = 0.016 + 1e-6 * kv_tokens, 13e-5 * (sequences + prefill) + 2e-8 * cells
        joined = memory + 0.002 * math.log1p(math.exp((compute - memory) / 0.002))
        return (0.003 + 6e-5 * sequences + joined) * (1 + self.noise * self.rng.gauss(0, 1))


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.03), (0.1, 0.1)])
def test_a_model_with_a_knee_predicts_other_settings(noise, tolerance):
    work = workload(count=150)
    for request in work["requests"]:
        request["arrival_time"] *= 5  # far below what the machine can do, where chance decides little
    model, _ = CostModel.fit(simulate(work, cost_model=Roofline(noise)))
    assert model.overlap > 1 and 80 < model.knee < 170  # the corner is at 16 ms / 0.13 ms = 123 rows
    for change in ({"max_num_batched_tokens": 512}, {"max_num_batched_tokens": 128}, {"max_num_seqs": 8}):
        real = simulate(work, config=change, cost_model=Roofline(noise)).metrics().summary
        predicted = simulate(work, config=change, cost_model=model).metrics().summary
        assert predicted.duration == pytest.approx(real.duration, rel=tolerance / 3)
        for name in ("ttft", "itl", "e2e"):
            assert getattr(predicted, name).mean == pytest.approx(getattr(real, name).mean, rel=tolerance)


def test_predictions_add_up_to_the_measured_time():
    trace = simulate(workload(), cost_model=Roofline(0.3))
    model, _ = CostModel.fit(trace)
    steps = list(measured_steps(trace))
    assert sum(model.step_seconds(step.record.chunks) for step in steps) == pytest.approx(
        sum(step.seconds for step in steps), rel=1e-3
    )


def test_several_recordings_make_one_model():
    small = simulate(workload(count=20), config={"max_num_batched_tokens": 32}, cost_model=TRUE)
    large = simulate(workload(seed=1), config={"max_num_batched_tokens": 512}, cost_model=TRUE)
    model, report = CostModel.fit(small, large)
    assert model.to_dict() == pytest.approx(TRUE.to_dict(), rel=1e-6)
    assert report.num_traces == 2 and report.largest["rows"] > 500


def test_a_report_points_out_drift_and_leaves_stalls_out():
    class Slower(CostModel):
        num_steps = 0

        def step_seconds(self, chunks):
            Slower.num_steps += 1
            stalls = 100 if Slower.num_steps == 50 else 1
            return super().step_seconds(chunks) * stalls * (1 + Slower.num_steps / 200)

    trace = simulate(workload(count=200), cost_model=Slower(**TRUE.to_dict()))
    _, report = CostModel.fit(trace)
    assert report.drift.change > 0.2 and report.stalls == (49,)
    assert all(any(words in note for note in report.notes) for words in ("% more time at the end", "left out"))


def recorded(steps, source="vllm 0.33.0"):
    """A recording in which one request decodes, with these (start, duration) steps."""
    trace = Trace(TraceMeta(source=source, config={"block_size": 16, "num_blocks": 100}))
    trace.add_request(RequestInfo("a", 1, max_tokens=99))
    for index, (start, duration) in enumerate(steps):
        arm = "decode" if index else "new_final"
        blocks = {"new_block_ids": (index // 16 + 1,)} if index % 16 == 0 else {}
        trace.append(
            StepRecord(
                index,
                time=start,
                arrived=() if index else ("a",),
                admitted=() if index else ("a",),
                running=("a",),
                chunks=(Chunk("a", index, 1, False, arm, 0, "complete", **blocks),),
                timings={"forward": duration},
            )
        )
    return trace


@pytest.mark.parametrize(
    ("steps", "durations"),
    [
        ([(0.0, 0.2), (0.1, 0.2), (0.2, 0.2), (0.3, 0.2)], [0.1, 0.1, 0.1]),  # asynchronous: each overlaps the next
        ([(0.0, 0.1), (0.11, 0.1), (0.22, 0.1), (0.33, 0.1)], [0.11, 0.11, 0.11]),  # the engine worked in between
        ([(0.0, 0.1), (0.11, 0.1), (0.22, 0.1), (9.0, 0.1)], [0.11, 0.11, 0.1]),  # a pause is not work
    ],
)
def test_overlap_counts_once_and_the_time_between_busy_steps_belongs_to_a_step(steps, durations):
    assert [step.seconds for step in measured_steps(recorded(steps))] == pytest.approx(durations)


def test_pauses_of_the_user_are_not_the_engines():
    steps = [(k * 5.0, 0.1) for k in range(4)]
    assert [step.seconds for step in measured_steps(recorded(steps, "engine"))] == pytest.approx([0.1] * 3)


def test_a_fit_that_diverges_is_not_taken():
    """With one exponent of these ten, the iteration runs away until the square of an error overflows."""
    rng = np.random.default_rng(385)
    count = int(rng.integers(6, 120))
    sequences = rng.integers(0, 40, count).astype(float)
    prefill = np.where(rng.random(count) < 0.4, rng.integers(1, 800, count), 0).astype(float)
    sequences = np.maximum(sequences, prefill == 0)
    positions = sequences * rng.integers(10, 3000, count) + prefill
    cells = prefill * rng.integers(1, 1000, count)
    features = list(zip(*(column.tolist() for column in (sequences, prefill, positions, cells))))
    seconds = np.exp(rng.normal(-4, rng.choice([0.1, 1, 3, 6]), count)).tolist()
    model = CostModel(**Regression().coefficients(StepCosts(features, seconds, [(0, 0)] * count, [0.0] * count)))
    assert all(math.isfinite(model.seconds(row)) for row in features)


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
def test_invalid_coefficients_and_fits(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("seed", range(4))
def test_the_exponent_found_near_that_of_fewer_steps_is_that_of_trying_all(seed, monkeypatch):
    rng = random.Random(seed)
    model = CostModel(fixed=0.004, per_sequence=2e-5, weights=0.008, per_row=6e-5, overlap=rng.choice([2.0, 4.0, 10.0]))
    sizes = [(rng.randint(1, 64), rng.choice([0, 0, rng.randint(1, 500)])) for _ in range(1_500)]
    features = [(float(sequences), float(prompt), 300.0 * sequences, 9.0 * prompt) for sequences, prompt in sizes]
    seconds = [model.seconds(row) * rng.lognormvariate(0, 0.05) for row in features]
    steps = StepCosts(features, seconds, [(0, step) for step in range(len(sizes))], [0.0] * len(sizes))
    found = Regression().coefficients(steps)
    monkeypatch.setattr(coefficients, "COMPARED_ON", len(steps))
    assert found == pytest.approx(Regression().coefficients(steps), rel=1e-3, abs=1e-9)
    monkeypatch.setattr(coefficients, "OVERLAPS", (1.5,))  # the control: a search that stays where it began
    assert Regression().coefficients(steps) != pytest.approx(found, rel=1e-3, abs=1e-9)


def test_a_repr_has_the_coefficients_that_were_given():
    model = CostModel(fixed=0.01, per_row=1e-4, overlap=2.5)
    assert repr(model) == "CostModel(fixed=0.01, per_row=0.0001, overlap=2.5)"
    assert eval(repr(model)) == model
