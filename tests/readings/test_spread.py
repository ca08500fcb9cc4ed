"""A latency that changed between two real runs is told from one that differs as two runs of one server do."""

import itertools
import random
from pathlib import Path

import msgspec
import pytest

from workbench import Trace, simulate
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace.readings.compare import compare
from workbench.trace.readings.spread import PARTS, Change, typical_change

RECORDED = Path(__file__).parents[1] / "data" / "vllm-versions"
UNCHANGED = "no change beyond the spread of the runs"


class Busy:
    """A machine whose steps vary by 5%, and are up to 30% slower while another program runs."""

    def __init__(self, seed):
        self.rng, self.slow = random.Random(seed), 0.0

    def step_seconds(self, chunks):
        if self.rng.random() < 0.02:
            self.slow = self.rng.choice([0.0, self.rng.uniform(0, 0.3)])
        model = CostModel(fixed=0.02, per_sequence=5e-4, per_prefill_token=1e-4)
        return model.step_seconds(chunks) * (1 + self.slow) * self.rng.gauss(1, 0.05)


def run(seed, **config):
    """The same 80 requests on a busy machine, as a recording of another engine."""
    rng, now, requests = random.Random(0), 0.0, []
    for i in range(80):
        now += rng.expovariate(6)
        length = 600 if i % 10 == 3 else rng.randint(20, 150)
        requests.append({"id": f"r{i}", "prompt": {"len": length}, "max_tokens": rng.randint(10, 40)})
        requests[-1]["arrival_time"] = now
    work = {"config": {"max_num_batched_tokens": 512, "num_blocks": 4000, **config}, "requests": requests}
    simulated = simulate(work, cost_model=Busy(seed))
    recording = Trace(msgspec.structs.replace(simulated.meta, source="vllm 0.33.0"))
    for info in simulated.requests.values():
        recording.add_request(info)
    for record in simulated:
        recording.append(record)
    recording.end = simulated.end
    return recording


def changes(a, b):
    """The lines on TTFT and ITL."""
    return [line for line in str(compare(a, b)).splitlines() if line.startswith("mean ")]


def test_two_runs_of_one_server_did_not_change():
    runs = [run(seed) for seed in range(4)]
    said = [line for a, b in itertools.combinations(runs, 2) for line in changes(a, b)]
    assert len(said) == 12 and sum(UNCHANGED in line for line in said) >= 11


def test_another_setting_is_a_change_whoever_ran_first():
    before, after = run(1), run(2, max_num_batched_tokens=64, max_num_seqs=6)
    for a, b, words in ((before, after, "pay"), (after, before, "gain")):
        ttft = changes(a, b)[0]
        assert UNCHANGED not in ttft and "per request" in ttft and words in ttft


def test_simulations_have_no_spread():
    work = {"requests": [{"id": f"r{i}", "prompt": {"len": 40}, "max_tokens": 3} for i in range(20)]}
    model = CostModel(fixed=0.1)
    for line in changes(simulate(work, cost_model=model), simulate(work, cost_model=CostModel(fixed=0.101))):
        assert "per request" not in line and "20 pay" in line


def test_a_recording_has_its_spread_against_a_simulation_as_well():
    recording = run(1)
    predicted = recording.whatif(CostModel(fixed=0.03, per_sequence=5e-4, per_prefill_token=1e-4))
    for a, b in ((recording, predicted), (predicted, recording)):
        assert all("per request" in line for line in changes(a, b))


def test_the_typical_change_is_the_geometric_mean_over_the_whole_run():
    growing = [(1.0, 2.0 ** (1 + i // 10)) for i in range(80)]  # 2 in the first part, 256 in the last
    assert typical_change(growing) == pytest.approx((2**4.5, PARTS))
    assert typical_change([(b, a) for a, b in growing]) == pytest.approx((2**-4.5, PARTS))


def test_few_requests_have_no_spread_either():
    assert typical_change([(1.0, 2.0)] * 15) is None and typical_change([(1.0, 2.0)] * 16) is not None
    assert typical_change([(0.0, 1.0)] * 20) is None


def test_a_change_that_only_a_part_of_the_run_has_is_not_certain():
    calm, burst = [(1.0, 1.01), (1.0, 0.98)] * 35, [(1.0, 1.5)] * 10
    assert typical_change(calm + burst).num_agreeing < PARTS
    assert typical_change([(1.0, 1.2), (1.0, 1.9)] * 40).is_certain
    assert not Change(ratio=1.01, num_agreeing=PARTS).is_certain  # two runs of one server differ as much


@pytest.mark.parametrize("first", ["0.30.0", "0.32.0-again"])
def test_two_recordings_of_real_vllm_differ_in_their_schedules_but_not_in_latency(first):
    a, b = (Trace.load(RECORDED / f"{name}.jsonl.gz") for name in (first, "0.32.0"))
    found = compare(a, b)
    assert [UNCHANGED in line for line in changes(a, b)] == [True, True]
    assert found.first_divergence is not None and "30 requests matched by id" in str(found)
    assert f"A: vllm {first.removesuffix('-again')}, " in str(found) and "B: vllm 0.32.0, 159 steps" in str(found)
