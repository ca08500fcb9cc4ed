"""Requests that get no first token, or are aborted, count in predictions by the rule of recorded values."""

import json
from random import Random
from statistics import fmean

import pytest

from workbench import simulate
from workbench.analysis.fleet.ranks import _seen
from workbench.analysis.predict import Predictor
from workbench.analysis.tune import tune
from workbench.analysis.values import values_of, values_until
from workbench.base.text import duration
from workbench.trace.readings.compare import compare
from workbench.trace.readings.metrics_collector import metrics
from workbench.viz.changed_run import changed_run
from workbench.viz.duel import settled
from workbench.viz.layout.comparison import encode_other, verdict

COST = {"fixed": 0.01, "per_prefill_token": 0.0004, "per_kv_token": 0.00001}


def run_with_timeouts(impatient=2, max_tokens=(20, 40), patience=1.2):
    """Requests of which every so many is aborted when its client has waited long enough."""
    random = Random(5)
    requests = [
        {
            "id": f"u{index}",
            "prompt": {"len": random.randint(100, 300), "seed": index},
            "max_tokens": random.randint(*max_tokens),
            "arrival_time": index * 0.12,
        }
        for index in range(24)
    ]
    config = {"max_num_batched_tokens": 256, "num_blocks": 400, "max_num_seqs": 6}
    workload = {"config": config, "requests": requests, "cost_model": COST}
    trace = simulate(workload)
    for index, request in enumerate(requests):
        if index % impatient == impatient - 1:
            late = (record.step for record in trace if record.time >= request["arrival_time"] + patience)
            request["abort_step"] = next(late, len(trace))
    return simulate(workload)


def spans(trace, what):
    """The times of all requests as the steps tell them: of those that ended, and of those that were aborted before."""
    arrivals = {name: info.arrival_time for name, info in trace.requests.items()}
    ended, aborted = {}, {}
    for record in trace:
        for name in record.aborted:
            aborted[name] = record.time - arrivals[name]
        if what == "ttft":
            for name in (chunk.request_id for chunk in record.chunks if chunk.accepted):
                ended.setdefault(name, record.end - arrivals[name])
        else:
            ended |= {name: record.end - arrivals[name] for name in record.finished}
    return list(ended.values()), [time for name, time in aborted.items() if name not in ended]


def firsts(trace):
    """The time to first token of each request that has one."""
    found = {}
    for record in trace:
        for name in (chunk.request_id for chunk in record.chunks if chunk.accepted):
            found.setdefault(name, record.end - trace.requests[name].arrival_time)
    return found.items()


def product_limit_mean(ended, cut):
    """The area under the curve of Kaplan and Meier, up to the longest time."""
    area, share, before = 0.0, 1.0, 0.0
    for time in sorted({*ended, *cut}):
        area += share * (time - before)
        at_risk = sum(each >= time for each in (*ended, *cut))
        share *= 1 - ended.count(time) / at_risk
        before = time
    return area


@pytest.fixture(scope="module")
def recording():
    return run_with_timeouts()


@pytest.fixture(scope="module")
def predictor(recording):
    return Predictor(recording, num_draws=0)


@pytest.mark.parametrize("seats", [6, 3, 2, 1])
def test_an_aborted_request_has_waited_for_at_least_as_long(predictor, seats):
    """In values with and without records, of the recorded setting and of those that starve requests."""
    prediction = predictor.predict(max_num_seqs=seats)
    values, trace = prediction.outcome.values, prediction.trace
    known = values_of(trace)
    starved = [spans(trace, "ttft"), spans(trace, "e2e")]
    assert values["num_no_first_token"] == known["num_no_first_token"] == len(starved[0][1])
    assert values["num_aborted"] == known["num_aborted"] == sum(len(record.aborted) for record in trace)
    assert (len(starved[0][1]) > 0) == (seats < 6)
    for what, (ended, cut) in zip(("ttft", "e2e"), starved):
        expected = product_limit_mean(ended, cut)
        assert values[f"{what}_mean"] == pytest.approx(expected) == known[f"{what}_mean"]
        assert expected >= fmean([*ended, *cut]) - 1e-9
        assert values[f"{what}_max"] == pytest.approx(max(*ended, *cut))


def test_recorded_values_follow_the_same_rule(recording, predictor):
    assert spans(recording, "e2e")[1]
    assert predictor.check.measured["e2e_mean"] == pytest.approx(product_limit_mean(*spans(recording, "e2e")))
    assert abs(predictor.check.errors["e2e_mean"]) < 1e-3
    summary = metrics(recording).summary  # whose meaning is another: an abort ends a request
    assert summary.e2e.count == 24 and summary.e2e.mean == pytest.approx(
        fmean([time for times in spans(recording, "e2e") for time in times])
    )


def test_the_requests_of_ranks_follow_it_too(recording):
    arrivals = {name: info.arrival_time for name, info in recording.requests.items()}
    seen = [_seen(arrivals, request) for request in metrics(recording).requests.values()]
    for until in (1.8, 60.0):
        values = values_until([each for each in seen if each.arrival <= until], until)
        ended, cut = [], []
        for each in seen:
            is_ended = each.end <= until and not each.is_aborted
            (ended if is_ended else cut).append(min(each.end, until) - each.arrival)
        ended, cut = [time for time in ended if time > 0], [time for time in cut if time >= 0]
        assert values["e2e_mean"] == pytest.approx(product_limit_mean(ended, cut))
    assert sum(each.is_aborted for each in seen) == sum(len(record.aborted) for record in recording)


def test_no_request_that_ended_means_no_latency():
    recording = run_with_timeouts(impatient=1, max_tokens=(60, 60))
    assert not spans(recording, "e2e")[0]
    values = Predictor(recording, num_draws=0).unchanged.outcome.values
    assert "e2e_mean" not in values and "e2e_mean" not in values_of(recording) and values["ttft_mean"] > 0


def test_a_comparison_has_those_who_get_nothing_first(recording, predictor):
    trace = predictor.predict(max_num_seqs=2).trace
    starved = sorted(recording.requests.keys() - dict(firsts(trace)).keys())
    assert len(starved) == 8
    for one, other, word in ((recording, trace, "pay"), (trace, recording, "gain")):
        found = compare(one, other)
        assert sorted(request.request_id for request in found.requests[:8]) == starved
        assert sorted(request.request_id for request in found.sorted_by("ttft")[:8]) == starved
        (line,) = [line for line in str(found).splitlines() if line.startswith("mean TTFT")]
        before, after = dict(firsts(one)), dict(firsts(other))
        both = before.keys() & after.keys()
        longer = sum(after[name] > before[name] + 1e-9 for name in both)
        shorter = sum(after[name] < before[name] - 1e-9 for name in both)
        gain, pay = (shorter, longer + 8) if word == "pay" else (shorter + 8, longer)
        assert line.endswith(f"{gain} request{'s' * (gain != 1)} gain{'s' * (gain == 1)}, {pay} pay{'s' * (pay == 1)}")
        counts = ("0", "8") if word == "pay" else ("8", "0")
        assert f"requests without a first token: {' -> '.join(counts)}\n" in str(found)
        assert f"mean and P99 TTFT are those of the {len(both)} requests" in str(found)
        assert verdict(found).startswith(f"requests without a first token {' -> '.join(counts)}; aborted requests ")


def test_a_page_and_a_duel_tell_of_those_who_get_nothing(recording):
    changed = changed_run(recording, None, 0, {"max_num_seqs": 2})
    facts = changed.facts["measures"]
    assert ["requests without a first token", "0", "8", "0 before"] in facts["measures"]
    assert facts["verdict"].startswith("requests without a first token 0 -> 8; aborted requests 10 -> 9; worse: ")
    told = settled(recording, changed, "mean time to first token", "s")
    assert "Requests without a first token: A 0, B 8; aborted requests: A 10, B 9." in told.notes
    packet = encode_other(recording, changed.trace, {"at_step": 0, **changed.facts}, changed.unchanged)
    start = packet.index(b'"mean":') + len(b'"mean":')
    means = json.loads(packet[start : packet.index(b"]", start) + 1])[:2]
    shown = next(row for row in facts["measures"] if row[0] == "mean TTFT")
    assert [duration(mean) for mean in means] == [shown[1], shown[2].partition(" (")[0]]
    assert means == pytest.approx(
        [product_limit_mean(*spans(run, "ttft")) for run in (recording, changed.trace)], rel=0.01
    )


def test_tune_advises_no_setting_that_leaves_more_requests_without_an_answer(recording):
    """The sweep's other settings are fast for those that they serve."""
    grid = {"max_num_seqs": [1, 2, 3, 6]}
    found = tune(recording, "itl_p99=120ms", grid=grid, num_draws=2)
    unserving = [row for row in found.rows if row["num_no_first_token"] or row["num_aborted"] > 10]
    assert [row["max_num_seqs"] for row in unserving] == [1, 2, 3] and min(row["itl_p99"] for row in unserving) < 0.12
    assert found.best is found.current and found.verdict == "misses" and not found.runners_up
    assert "not advised: 3 settings of the sweep with more requests than now that get no answer" in str(found)
    headings, *rows = found._table()
    assert [row[headings.index("num_aborted")] for row in rows] == ["10", "10"]
    assert "num_no_first_token" not in headings  # none of these settings has such a request


def test_a_target_is_not_met_by_the_time_of_an_abort():
    """Few seats give two answers; the other times only say how long clients waited."""
    recording = run_with_timeouts(impatient=1, max_tokens=(60, 60), patience=1.5)
    found = tune(recording, "e2e_p99=2.5s", grid={"max_num_seqs": [3, 6]}, num_draws=2)
    outcome = found.best.prediction.outcome
    ended, cut = spans(found.best.prediction.trace, "e2e")
    assert ended and max(cut) == pytest.approx(outcome.values["e2e_p99"]) and max(cut) > max(ended)
    assert outcome.values["e2e_p99"] < 2.3 and found.verdict == "cannot tell"
    assert (
        "e2e_p99 is at least that, as aborted requests had lasted longer than any that ended" in found.verdict_sentence
    )
    assert sorted(outcome.e2e.values()) == pytest.approx(sorted(ended))
