"""A log without contents gets the hit rate of the recording that its costs come from, and says so."""

import random

import pytest
from closed_loops import COST, run

from workbench.analysis.assumed_hits import AssumedHits
from workbench.analysis.fleet.demand import Demand
from workbench.apps.cli import main
from workbench.simulation.arrivals import timed_arrival


@pytest.fixture
def files(tmp_path):
    """A recording whose prompts share most of their tokens, and its access log."""
    rng, arrivals, now = random.Random("hits"), [], 0.0
    for number in range(80):
        now += rng.expovariate(6.0)
        arrivals.append(timed_arrival(f"r{number}", [7] * 300 + [9000 + number] * rng.randint(60, 140), 12, now))
    trace = run(arrivals, block_size=16, num_blocks=900)
    trace.save(tmp_path / "run.jsonl")
    rows = [f"{each.arrives_at},{len(each.prompt_token_ids)},12" for each in arrivals]
    (tmp_path / "access.csv").write_text("\n".join(["timestamp,input_tokens,output_tokens", *rows]))
    return trace, tmp_path / "run.jsonl", tmp_path / "access.csv"


def test_a_log_is_predicted_with_the_hit_rate_of_the_recording(files, capsys):
    trace, recording, log = files
    assert main(["trace", "whatif", str(log), "--cost-from", str(recording)]) == 0
    said = capsys.readouterr().out
    hits = AssumedHits.of(trace)
    assert hits.rate > 0.6 and hits.low < hits.rate < hits.high and str(hits) in said
    predicted = next(line for line in said.splitlines() if line.startswith("hit_rate")).split()
    assert float(predicted[2].rstrip("%")) == pytest.approx(100 * hits.rate, abs=4)
    assert main(["trace", "whatif", str(log), "--cost-from", str(recording), "--hit-rate", "0.2"]) == 0
    said = capsys.readouterr().out
    assert "a hit rate of 20.0% is assumed, as given" in said
    assert main(["trace", "whatif", str(log), "--cost-from", str(recording), "--hit-rate", "20"]) == 2
    assert "--hit-rate" in capsys.readouterr().err


def test_a_fleet_takes_it_too(files, capsys):
    trace, _, log = files
    ttft = trace.metrics().summary.ttft.mean
    demand = Demand.read(log, cost_from=trace, config={"num_blocks": 900, "max_num_batched_tokens": 256})
    assert "is assumed" in demand.summary
    row = demand.run(1, "round_robin").metrics().summary
    assert row.ttft.mean == pytest.approx(ttft, rel=0.35)
    cold = Demand.read(log, cost_from=trace, config={"num_blocks": 900, "max_num_batched_tokens": 256}, hit_rate=0.0)
    assert cold.run(1, "round_robin").metrics().summary.ttft.mean > 1.5 * row.ttft.mean
    assert COST.fixed
