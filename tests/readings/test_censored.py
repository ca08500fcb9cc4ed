"""Waits that had not ended: they count as long as they are known to be, and never as short."""

import math
import random
import statistics

import pytest
from tiers import examples

from workbench import CostModel, Trace, simulate
from workbench.analysis.fleet.ranks import RanksPredictor
from workbench.analysis.incident import incident
from workbench.analysis.predict import Predictor
from workbench.analysis.values import values_of
from workbench.apps.cli import main
from workbench.trace.readings.censored import Times
from workbench.trace.readings.metrics import Distribution, percentile
from workbench.trace.readings.metrics_collector import metrics


def survival(ended, open):
    """Kaplan and Meier's estimate by its definition: the share that is longer than each time at which one ended."""
    left, found = 1.0, {}
    for time in sorted(set(ended)):
        at_risk = sum(other >= time for other in (*ended, *open))
        left *= 1 - ended.count(time) / at_risk
        found[time] = left
    return found


@pytest.mark.parametrize("seed", range(examples(40)))
def test_open_times_weigh_as_kaplan_and_meier_say(seed):
    rng = random.Random(f"censored {seed}")
    ended = [float(rng.randint(1, 30)) for _ in range(rng.randint(1, 30))]
    open = [float(rng.randint(1, 40)) for _ in range(rng.randint(1, 15))]
    times = Times(ended, open)
    curve = survival(ended, open)
    for percent in (1, 25, 50, 75, 90, 99, 100):
        reached = [time for time, left in curve.items() if 1 - left >= percent / 100 - 1e-9]
        if reached:
            assert times.percentile(percent) == min(reached)
        else:
            assert times.percentile(percent) == max(open)
    steps = [(0.0, 1.0), *sorted(curve.items())]
    ends = [time for time, _ in steps[1:]] + [max(*ended, *open)]
    area = math.fsum(left * (end - begin) for (begin, left), end in zip(steps, ends))
    assert times.mean == pytest.approx(area)
    assert Times(ended).mean == pytest.approx(statistics.fmean(ended))
    assert min(ended) <= Times(ended).percentile(50) <= max(ended) and len(times) == len(ended) + len(open)
    assert abs(Times(ended).percentile(99) - percentile(sorted(ended), 99)) <= max(ended)


@pytest.mark.parametrize("seed", range(examples(40)))
def test_what_is_marked_as_a_bound_is_one(seed):
    rng = random.Random(f"bounds {seed}")
    ended = [float(rng.randint(1, 30)) for _ in range(rng.randint(0, 30))]
    open = [float(rng.randint(1, 40)) for _ in range(rng.randint(1, 15))]
    found = Distribution.of(ended, open)
    assert found.mean == pytest.approx(statistics.fmean([*ended, *open])) and found.num_open == len(open)
    for _ in range(10):
        later = Distribution.of([*ended, *(time + rng.choice([0, 0, rng.randint(0, 50)]) for time in open)])
        for name in ("mean", "p50", "p95", "p99", "max"):
            now, then = getattr(found, name), getattr(later, name)
            assert now <= then + 1e-9 if name in found.bounds else now == pytest.approx(then)


def test_five_requests_without_a_first_token_have_the_median_of_their_times_so_far(capsys):
    assert main(["trace", "info", "docs/data/run.jsonl.gz", "--to", "14s"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("time to first token"))
    assert ">=12" in line and line.count(">=14") == 3
    part = Trace.load("docs/data/run.jsonl.gz")[:5]
    whole = metrics(Trace.load("docs/data/run.jsonl.gz")).summary.ttft
    so_far = metrics(part).summary.ttft
    assert so_far.mean == pytest.approx(10.3, abs=0.1) and so_far.mean < whole.mean and so_far.p50 < whole.p50


def one_seat(tmp_path):
    """One request holds the only seat for two minutes, and two wait for it."""
    requests = [{"id": "long", "prompt": {"len": 20}, "max_tokens": 3500}]
    requests += [{"id": f"waits{i}", "prompt": {"len": 20}, "max_tokens": 5, "arrival_time": 10.0 + i} for i in (0, 1)]
    config = {"max_num_seqs": 1, "num_blocks": 400}
    cost = CostModel(fixed=0.03, per_prefill_token=0.005)
    trace = simulate({"config": config, "requests": requests}, cost_model=cost, max_steps=4000)
    path = tmp_path / "one-seat.jsonl"
    trace.save(path)
    return path


def test_two_that_wait_for_the_only_seat_are_in_every_answer(tmp_path, capsys):
    path = one_seat(tmp_path)
    trace = Trace.load(path)[:3300]
    now = trace[-1].end
    ttft = metrics(trace).summary.ttft
    assert (ttft.count, ttft.num_open, ttft.p99) == (3, 2, pytest.approx(now - 10.02))
    assert {"p50", "p95", "p99", "max", "mean"} == set(ttft.bounds)
    assert f">={now - 10.0:.4g}" in repr(trace.metrics()) and "2 requests have no first token" in repr(trace.metrics())
    assert values_of(trace)["ttft_p99"] == pytest.approx(now - 10.0)
    slow = incident(trace).slow
    assert [one.request_id for one in slow] == ["waits0", "waits1", "long"]
    assert slow[0].ttft.startswith("at least") and slow[0].cause == "waiting for a seat (max_num_seqs)"
    assert slow[0].culprits == ("long",) and slow[0].share > 0.95
    explanation = trace.explain("waits1")
    assert explanation.ttft is None and explanation.span("ttft").is_open
    assert explanation.span("ttft").total == pytest.approx(now - 11.0)
    assert repr(explanation).startswith("waits1: 88") and "the end of the trace, without a token\n" in repr(explanation)
    assert main(["trace", "explain", str(path), "--to", "100s"]) == 0
    said = capsys.readouterr().out
    assert "of 3 requests, at least 5" in said and "waiting for a seat" in said.splitlines()[3]
    assert main(["trace", "explain", str(path), "--to", "100s", "--slowest", "2"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:]] == ["waits0", "waits1"] and ">=" in rows[1]


def test_requests_that_have_just_arrived_make_nobody_fast():
    requests = [{"id": f"r{i}", "prompt": {"len": 30}, "max_tokens": 9, "arrival_time": i * 0.05} for i in range(40)]
    trace = simulate({"config": {"max_num_seqs": 2}, "requests": requests}, cost_model=CostModel(fixed=0.05))
    whole = metrics(trace).summary.ttft
    part = metrics(trace[:40]).summary.ttft
    ended = [each.ttft.seconds for each in metrics(trace[:40]).requests.values() if each.ttft]
    assert part.num_open > 20 and part.mean <= whole.mean and part.p50 <= whole.p50
    assert values_of(trace[:40])["ttft_mean"] >= statistics.fmean(ended)


def test_a_recording_that_ends_with_waiting_requests_passes_its_check():
    """The prediction is compared up to the end of the recording; to their end, the requests wait much longer."""
    requests = [
        {"id": f"r{i}", "prompt": {"len": 20 + i % 7}, "max_tokens": 30 + i % 5, "arrival_time": 0.7 * i}
        for i in range(20)
    ]
    requests += [{"id": "long", "prompt": {"len": 20}, "max_tokens": 4000, "arrival_time": 14.0}]
    requests += [{"id": f"late{i}", "prompt": {"len": 20}, "max_tokens": 5, "arrival_time": 15.0 + i} for i in range(3)]
    cost = CostModel(fixed=0.02, per_prefill_token=0.001, per_kv_token=1e-6)
    whole = simulate({"config": {"max_num_seqs": 1, "num_blocks": 400}, "requests": requests}, cost_model=cost)
    cut = Trace(whole.meta)
    for info in whole.requests.values():
        cut.add_request(info)
    for record in whole[:2600]:
        cut.append(record)
    check = Predictor(cut, cost, num_draws=2).check
    assert check.holds and abs(check.errors["ttft_mean"]) < 0.01 and abs(check.errors["e2e_mean"]) < 0.01
    ranks = RanksPredictor({"rank 0": cut}, fit_from=[whole], num_draws=2)
    assert ranks.check.holds and abs(ranks.check.errors["ttft_mean"]) < 0.05
    assert any(
        "no first token in what was recorded" in note or "no first token" in note for note in ranks.unchanged.notes
    )
