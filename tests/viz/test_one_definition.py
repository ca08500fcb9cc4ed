"""One definition of each latency: every view of a run has the same means and percentiles, here counted by hand."""

import random
from dataclasses import asdict
from itertools import pairwise

import pytest

from workbench import compare, simulate
from workbench.analysis.predict import Predictor
from workbench.analysis.values import values_of
from workbench.apps.playground import session
from workbench.simulation.at_scale import simulate_at_scale
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.workload import read_simulation
from workbench.trace.readings.metrics_collector import metrics
from workbench.viz import duel
from workbench.viz.layout.comparison import comparison_facts

COST = {"fixed": 0.01, "per_sequence": 1e-3, "per_prefill_token": 5e-4}
CHANGES = {"max_num_batched_tokens": 32, "max_num_seqs": 3}


def workload(seed):
    """Requests of which some have a token more than the first and some have sixty: means of means differ from means."""
    rng = random.Random(seed)
    requests = [
        {
            "id": f"r{n}",
            "prompt": {"len": rng.randint(5, 300)},
            "max_tokens": rng.choice([1, 2, 3, 25, 60]),
            "arrival_time": 0.2 * n * rng.random(),
        }
        for n in range(rng.randint(6, 14))
    ]
    config = {"max_num_batched_tokens": rng.choice([64, 128, 512]), "max_num_seqs": rng.randint(2, 8)}
    return {"config": config, "requests": requests, "cost_model": COST}


def at(values, percent):
    """A percentile, interpolated."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)


def by_hand(trace):
    """Mean and P99 of the times to first token and of all times between two tokens of a request, from the records."""
    tokens = {name: [] for name in trace.requests}
    for record in trace:
        for chunk in record.chunks:
            tokens[chunk.request_id] += [record.end] * len(chunk.accepted)
    firsts = [times[0] - trace.requests[name].arrival_time for name, times in tokens.items()]
    of_each = [[after - before for before, after in pairwise(times)] for times in tokens.values() if len(times) > 1]
    gaps = [gap for each in of_each for gap in each]
    of_requests = [sum(each) / len(each) for each in of_each]
    assert sum(gaps) / len(gaps) != pytest.approx(sum(of_requests) / len(of_requests), rel=1e-3), "another definition"
    return {
        "ttft_mean": sum(firsts) / len(firsts),
        "ttft_p99": at(firsts, 99),
        "itl_mean": sum(gaps) / len(gaps),
        "itl_p99": at(gaps, 99),
    }


def of_summary(summary):
    return {f"{name}_{key}": summary[name][key] for name in ("ttft", "itl") for key in ("mean", "p99")}


@pytest.mark.parametrize("seed", range(6))
def test_every_view_has_the_same_means(seed):
    content = workload(seed)
    runs = simulate(content), simulate(content, config=CHANGES)
    known = [by_hand(run) for run in runs]
    sides = zip(*[(measure.a, measure.b) for measure in compare(*runs).measures[:4]])
    assert [list(side) for side in sides] == [pytest.approx(list(each.values())) for each in known]
    mean = comparison_facts(*runs)["mean"]
    assert mean[:4] == pytest.approx([each[name] for name in ("ttft_mean", "itl_mean") for each in known])

    config, arrivals, cost = read_simulation(content)
    swept = simulate_at_scale(config, arrivals, cost).to_row()
    assert [swept["ttft_mean"], swept["itl_mean"]] == pytest.approx([known[0]["ttft_mean"], known[0]["itl_mean"]])
    for run, expected in zip(runs, known):
        summary = of_summary(asdict(metrics(run).summary))
        found = [
            summary,
            of_summary(session._summary(run)),
            values_of(run),
            Predictor(run, CostModel(**COST)).unchanged_values,
        ]
        for each in found:
            assert {name: each[name] for name in expected} == pytest.approx(expected)
        for name, key in (("mean time to first token", "ttft_mean"), ("P99 of the time to first token", "ttft_p99")):
            assert duel.MEASURES[name].value([run], "s") == pytest.approx(expected[key])
