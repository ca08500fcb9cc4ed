"""`workbench.analysis.intervals`: few draws give intervals as wide as many, and a long run has few."""

from random import Random
from statistics import fmean

import pytest

from workbench import Trace, simulate
from workbench.analysis import predict
from workbench.analysis.intervals import MIN_SPREAD, NUM_DRAWS, RANGES, Interval, interval_of, widened
from workbench.analysis.predict import LONGER_STEPS, Predictor
from workbench.apps.cli import main
from workbench.base.text import duration
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace.window import window


def width(random, count):
    interval = interval_of(100.0, [random.gauss(100.0, 10.0) for _ in range(count)], 0.0)
    low, high = interval.low / (1 - MIN_SPREAD), interval.high / (1 + MIN_SPREAD)
    return high - low


@pytest.mark.parametrize("count", RANGES)
def test_few_draws_span_as_much_as_many(count):
    random = Random(count)
    assert fmean(width(random, count) for _ in range(2000)) == pytest.approx(10.0 * RANGES[NUM_DRAWS], rel=0.06)


def test_a_long_run_is_repeated_less_often(monkeypatch):
    random = Random(1)
    requests = [
        {"id": f"r{n}", "prompt": {"len": random.randrange(20, 300)}, "max_tokens": 9, "arrival_time": 0.4 * n}
        for n in range(60)
    ]
    trace = simulate({"requests": requests}, cost_model=CostModel(fixed=0.02, per_prefill_token=1e-4))
    draws = [len(Predictor(trace).predict(max_num_seqs=4).draws["ttft_mean"])]
    for tokens in (5 * 60 * 9, 1):
        monkeypatch.setattr(predict, "DRAWN_TOKENS", tokens)
        draws.append(len(Predictor(trace).predict(max_num_seqs=4).draws["ttft_mean"]))
    assert draws == [NUM_DRAWS, 5, predict.MIN_DRAWS]


def test_a_window_counts_its_requests_in_a_simulation_of_the_whole_run(tmp_path, capsys):
    requests = [{"id": f"r{n}", "prompt": {"len": 50 + 9 * n}, "max_tokens": 9, "arrival_time": n} for n in range(60)]
    trace = simulate({"requests": requests}, cost_model=CostModel(fixed=0.02, per_prefill_token=1e-4))
    trace.save(tmp_path / "run.jsonl")
    assert main(["trace", "whatif", str(tmp_path / "run.jsonl"), "--set", "max_num_seqs=4", "--last", "20s"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ttft_mean")]
    part, metrics = window(trace, last=20.0), trace.metrics().requests
    assert 15 < len(part.requests) < 25
    assert line.split()[-3] == f"{1000 * fmean(metrics[name].ttft.seconds for name in part.requests):.3g}"


def compute_bound_beyond(rows):
    """A machine on which reading the weights hides the arithmetic of so many rows, and no more."""
    return CostModel(weights=0.1, per_row=0.1 / rows, per_kv_token=2e-6, overlap=30.0)


def long_prompts(seed):
    random, now, requests = Random(seed), 0.0, []
    for number in range(60):
        now += random.expovariate(0.5)
        prompt = {"len": random.randrange(300, 900)}
        output = random.randrange(5, 40)
        requests.append({"id": f"r{number}", "prompt": prompt, "max_tokens": output, "arrival_time": now})
    return {"requests": requests, "config": {"max_num_batched_tokens": 96, "max_num_seqs": 4, "num_blocks": 900}}


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("rows", [120, 200, 1000])
def test_an_interval_holds_the_limit_of_arithmetic_that_no_measured_step_has_met(rows):
    """96 rows take no longer than one on these machines; 512 rows do on the first two."""
    machine, larger = compute_bound_beyond(rows), {"max_num_batched_tokens": 512}
    measured = simulate(long_prompts(rows), cost_model=machine, config=larger).metrics().summary
    prediction = Predictor(simulate(long_prompts(rows), cost_model=machine)).predict(**larger)
    interval = prediction["ttft_mean"]
    assert interval.low <= measured.ttft.mean <= interval.high
    assert LONGER_STEPS in prediction.notes
    within = Predictor(simulate(long_prompts(rows), cost_model=machine)).predict(max_num_batched_tokens=64)
    assert LONGER_STEPS not in within.notes
    if rows == 120:  # without it the truth is far outside
        assert interval.value * 1.3 < measured.ttft.mean


def test_a_time_that_is_zero_is_widened_too():
    """No request waits in one simulation, and all do in the other."""
    intervals = {"queue_p50": Interval(0.0, 0.0, 0.0), "ttft_mean": Interval(2.0, 1.9, 2.1)}
    wider = widened(intervals, {"queue_p50": 3.0, "ttft_mean": 1.5})
    assert wider == {"queue_p50": Interval(0.0, 0.0, 3.0), "ttft_mean": Interval(2.0, 1.5, 2.1)}


def test_a_prediction_is_one_readable_line():
    trace = Trace.load("docs/data/run.jsonl.gz")
    predicted = Predictor(trace, num_draws=2).predict(max_num_seqs=2)
    said = repr(predicted)
    assert said.startswith(f"Prediction(max_num_seqs=2: ttft_mean {duration(predicted['ttft_mean'].value)} (")
    assert len(said) < 300 and "\n" not in said
