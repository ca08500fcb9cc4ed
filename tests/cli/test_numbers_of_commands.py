"""Numbers of the command line: thousands apart, no more digits than a person reads, and no share of nothing."""

import pytest

from workbench import CostModel, simulate
from workbench.analysis.check import shown
from workbench.analysis.sweep import rows_text, sweep
from workbench.apps.cli import main
from workbench.trace.readings.metrics import number

COST = CostModel(fixed=0.0001, per_sequence=2e-6)
WORKLOAD = {
    "config": {"enable_prefix_caching": True, "max_num_seqs": 8, "num_blocks": 400},
    "requests": [{"id": f"r{n}", "prompt": {"len": 1500}, "max_tokens": 200, "arrival_time": 0.0} for n in range(4)],
}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("output_throughput", 25270.24, "25,270 tokens/s"),
        ("output_throughput", 450.63, "450.6 tokens/s"),
        ("num_steps", 12345.0, "12,345"),
        ("ttft_p99", 1.0143, "1.01 s"),
        ("hit_rate", 0.25, "25.0%"),
    ],
)
def test_a_value_of_a_run_has_the_digits_that_people_read(name, value, text):
    assert shown(name, value) == text


def test_a_sweep_and_a_prediction_write_a_rate_alike():
    (row,) = sweep({**WORKLOAD, "cost_model": COST.to_dict()}, {"max_num_seqs": [8]}, jobs=1)
    rate = row["output_throughput"]
    assert rate > 1000 and f"  {rate:,.0f}  " in rows_text([row], ["max_num_seqs"])
    assert f"{number(rate)} tokens/s" == shown("output_throughput", rate)


def test_a_part_without_an_admission_has_no_share_of_nothing(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    simulate(WORKLOAD, cost_model=COST).save(path)
    assert main(["trace", "info", str(path), "--last", "5ms"]) == 0
    said = capsys.readouterr().out
    assert "of 0 " not in said and "hit rate of prompt tokens: none, as no request was admitted" in said
