"""Planted stalls are found and nobody is blamed for them; runs without a stall have none."""

import math
import random
from pathlib import Path

import pytest

from tests.support.tiers import examples
from workbench import Trace, simulate
from workbench.analysis.explain import Explainer, slowest
from workbench.costs.cost_model import CostModel

DATA = Path(__file__).parents[2]


class Machine:
    """Steps that vary around a cost model, and stand still once.

    Args:
        rng: Draws the noise.
        noise: Standard deviation of the logarithm of a step's duration.
        at: Number of the step that stalls; None for none.
        factor: Factor by which it takes longer.
    """

    def __init__(self, rng, noise, at=None, factor=1.0):
        self.model = CostModel(
            fixed=rng.uniform(0.005, 0.03),
            per_sequence=rng.uniform(0, 5e-4),
            per_prefill_token=rng.uniform(2e-5, 2e-4),
            per_kv_token=rng.uniform(0, 5e-7),
            per_attention_cell=rng.uniform(0, 5e-8),
        )
        self.rng, self.noise, self.at, self.factor, self.count = rng, noise, at, factor, 0
        self.stalled = 0.0

    def step_seconds(self, chunks):
        """Duration of the next step."""
        seconds = self.model.step_seconds(chunks) * math.exp(self.rng.gauss(0, self.noise))
        self.count += 1
        if self.count == self.at:
            self.stalled = seconds * (self.factor - 1)
            return seconds * self.factor
        return seconds


def workload(rng):
    count = rng.randint(6, 14)
    return {
        "config": {
            "max_num_batched_tokens": rng.choice([64, 128, 512]),
            "max_num_seqs": rng.choice([3, 8, 32]),
            "num_blocks": 2000,
            "async_scheduling": rng.random() < 0.3,
        },
        "requests": [
            {
                "id": f"r{i}",
                "prompt": {"len": rng.randint(5, 400)},
                "max_tokens": rng.randint(5, 40),
                "arrival_time": rng.uniform(0, 3),
            }
            for i in range(count)
        ],
    }


def test_a_planted_stall_is_named_and_no_request_is_blamed():
    for seed in range(examples(200)):
        check_planted(seed)


def check_planted(seed):
    rng = random.Random(seed)
    load, noise = workload(rng), rng.uniform(0, 0.15)
    num_steps = len(simulate(load, cost_model=Machine(random.Random(seed), 0.0)))
    at = rng.randint(10, int(0.9 * num_steps))
    machine = Machine(random.Random(seed), noise, at, rng.uniform(9, 60))
    trace = simulate(load, cost_model=machine)
    found = trace.stalls()
    assert [stall.excess for stall in found] == [pytest.approx(machine.stalled, rel=0.15)], seed
    step = found[0].step
    assert found[0].num_tokens == trace[step].num_tokens
    hit = [chunk.request_id for chunk in trace[step].chunks] + list(trace[step].waiting)
    explainer = Explainer(trace, machine.model)  # without a fit, which takes most of the time
    for request_id in hit:
        why = explainer.explain(request_id)
        part = next(part for part in why.parts if part.kind == "stall")
        assert part.amount == pytest.approx(found[0].excess, rel=0.01) or request_id in trace[step].arrived
        assert part.culprits == () and part.steps == (step,)
        assert math.fsum(each.amount for each in why.parts) == pytest.approx(why.total)
        assert why.stalls == found and f"stall: step {step} took" in repr(why)
        if why.biggest is part:
            assert why.confirmation is None
    if seed % 10 == 0:
        _, report = CostModel.fit(trace)
        assert report.stalls == (step,)


def test_a_run_without_a_stall_has_none():
    for seed in range(examples(200)):
        rng = random.Random(seed)
        trace = simulate(workload(rng), cost_model=Machine(rng, rng.uniform(0, 0.4)))
        assert trace.stalls() == (), seed
        assert seed or 'class="stall"' not in trace._repr_html_()
        if seed % 10 == 0:
            assert not any(part.kind == "stall" for why in slowest(trace, 3) for part in why.parts)


def test_recordings_of_vllm():
    trace = Trace.load(DATA / "notebooks" / "data" / "vllm_served.jsonl.gz")
    assert [str(stall) for stall in trace.stalls()] == ["step 387 took 6.08 s; its 1 token explains 215 ms"]
    shown = trace._repr_html_()
    assert shown.count('class="stall"') == 1 and "stall: step 387 took 6.08 s" in shown
    for path in (DATA / "tests" / "data" / "vllm-recorded").rglob("*.jsonl.gz"):
        assert Trace.load(path).stalls() == (), path


def test_without_a_clock_or_with_few_steps_there_is_none():
    requests = [{"id": "a", "prompt": {"len": 9}, "max_tokens": 10}]
    assert simulate({"requests": requests}).stalls() == ()
    assert simulate({"requests": requests}, cost_model=Machine(random.Random(0), 0.0, 5, 50.0)).stalls() == ()
