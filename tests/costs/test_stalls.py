"""Planted stalls are found and nobody is blamed for them; runs without a stall have none."""

import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace
from viz_traces import pictures

from tests.support.tiers import examples
from workbench import Trace, simulate
from workbench.analysis.explain import Explainer, slowest
from workbench.simulation.costs.coefficients import relative_coefficients
from workbench.simulation.costs.cost_model import CostModel, step_costs
from workbench.trace.readings.durations import leaves_work

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
        if why.biggest_avoidable is part:
            assert why.confirmation is None
    if seed % 10 == 0:
        _, report = CostModel.fit(trace)
        assert report.stalls == (step,)


def test_a_run_without_a_stall_has_none():
    for seed in range(examples(200)):
        rng = random.Random(seed)
        trace = simulate(workload(rng), cost_model=Machine(rng, rng.uniform(0, 0.4)))
        assert trace.stalls() == (), seed
        assert seed or 'class="stall"' not in "".join(pictures(trace._repr_html_()))
        if seed % 10 == 0:
            assert not any(part.kind == "stall" for why in slowest(trace, 3) for part in why.parts)


def test_recordings_of_vllm():
    trace = Trace.load(DATA / "notebooks" / "data" / "vllm_served.jsonl.gz")
    assert [str(stall) for stall in trace.stalls()] == ["step 387 took 6.08 s; its 1 token explains 215 ms"]
    shown = trace._repr_html_()
    assert "".join(pictures(shown)).count('class="stall"') == 1 and "stall: step 387 took 6.08 s" in shown
    for path in (DATA / "tests" / "data" / "vllm-recorded").rglob("*.jsonl.gz"):
        assert Trace.load(path).stalls() == (), path


def test_without_a_clock_or_with_few_steps_there_is_none():
    requests = [{"id": "a", "prompt": {"len": 9}, "max_tokens": 10}]
    assert simulate({"requests": requests}).stalls() == ()
    assert simulate({"requests": requests}, cost_model=Machine(random.Random(0), 0.0, 5, 50.0)).stalls() == ()


def paused(trace, pauses, source="vllm 0.33.0"):
    """The trace as another engine's, with a pause before some of its steps."""
    late, moved = 0.0, Trace(replace(trace.meta, source=source))
    infos = iter(trace.arrivals())
    info = next(infos, None)
    for index, record in enumerate(trace):
        late += pauses.get(record.step, 0.0)
        while info is not None and info[0] <= index:
            moved.add_request(replace(info[1], arrival_time=info[1].arrival_time + late))
            info = next(infos, None)
        moved.append(replace(record, time=record.time + late, end=record.end + late))
    return moved


def test_a_pause_between_two_steps_is_a_stall():
    for seed in range(examples(40)):
        rng = random.Random(seed)
        trace = simulate(workload(rng), cost_model=Machine(rng, rng.uniform(0, 0.15)))
        busy = [after.step for before, after in pairwise(trace) if leaves_work(before) and after.chunks][2:]
        at, length = rng.choice(busy), rng.uniform(0.5, 2.0)
        late = paused(trace, {at: length})
        (found,) = late.stalls()
        assert (found.step, found.excess) == (at, pytest.approx(length, rel=0.01)), seed
        assert str(found).startswith("no step ran for ") and found.time + found.before == late[at].time
        for request_id in late[at].running:
            why = Explainer(late, CostModel(fixed=0.01)).explain(request_id)
            if request_id not in late[at].arrived:
                (part,) = [part for part in why.parts if part.kind == "stall"]
                assert part.amount == pytest.approx(length, rel=0.01) and not part.culprits
        assert paused(trace, {at: length}, "engine").stalls() == ()  # its user may have paused


def test_pauses_before_many_steps_are_no_stalls():
    trace = simulate(workload(random.Random(1)), cost_model=Machine(random.Random(1), 0.05))
    assert paused(trace, {step: 0.5 for step in range(5, len(trace), 5)}).stalls() == ()


def test_a_stall_among_many_late_steps_is_named():
    """A busy machine is often late by some times a short step's duration."""
    for seed in range(examples(40)):
        rng = random.Random(seed)
        machine = Machine(rng, 0.1, 40, 300.0)
        trace = simulate(workload(rng), cost_model=machine)
        late = {step: 0.03 + 0.05 * rng.random() for step in rng.sample(range(2, len(trace)), 8)}
        named = [stall.excess for stall in paused(trace, late).stalls() if stall.excess > 0.1]
        assert named == [pytest.approx(machine.stalled, abs=0.1)], seed


@pytest.mark.parametrize("seconds", [1e300, 1e-200])
def test_a_duration_whose_square_no_float_holds_is_fitted(seconds):
    requests = [{"id": f"r{n}", "prompt": {"len": 40 + n}, "max_tokens": 9, "arrival_time": 0.3 * n} for n in range(9)]
    trace = simulate({"requests": requests}, cost_model=CostModel(fixed=0.1))
    steps = step_costs(trace)
    steps.seconds[3] = seconds
    relative_coefficients(steps)
