"""Planted slow steps, with a fit that holds and without one: each is named, none is made up, no request is blamed."""

import math
import random
from collections import Counter

import pytest
from tiers import examples

from workbench import CostModel, simulate
from workbench.analysis.explain import Explainer
from workbench.apps.cli import main
from workbench.base.text import significant
from workbench.simulation.costs.slow_steps import slow_steps

MODEL = CostModel(fixed=0.015, per_prefill_token=3e-4, per_sequence=6e-4, per_kv_token=1e-6)
NOISE = 0.04


class Machine:
    """Steps of a model, or of a machine whose time jumps with the number of sequences; one of them is slow."""

    def __init__(self, rng, is_smooth, late=None, factor=1.0):
        self.rng, self.is_smooth, self.late, self.factor, self.step = rng, is_smooth, late, factor, 0
        self.jumps = [math.exp(rng.gauss(0, 0.7)) for _ in range(64)]

    def step_seconds(self, chunks):
        seconds = MODEL.step_seconds(chunks) * math.exp(self.rng.gauss(0, NOISE))
        if not self.is_smooth:
            seconds *= self.jumps[len(chunks)]
        self.step += 1
        return seconds * (self.factor if self.step - 1 == self.late else 1.0)


def run(seed, is_smooth, late=None, factor=1.0):
    rng = random.Random(f"slow {seed}")
    requests, now = [], 0.0
    for number in range(rng.randint(25, 45)):
        now += rng.expovariate(4.0)
        length = rng.randint(10, 250)
        requests.append(
            {"id": f"r{number}", "prompt": {"len": length}, "max_tokens": rng.randint(20, 70), "arrival_time": now}
        )
    machine = Machine(random.Random(f"machine {seed}"), is_smooth, late, factor)
    return simulate({"config": {"num_blocks": 4000, "max_num_seqs": 12}, "requests": requests}, cost_model=machine)


def usual_decodes(trace):
    """Decode steps with others of as many sequences near them."""
    pure = {
        step.step: len(step.chunks) for step in trace if step.chunks and all(chunk.is_decode for chunk in step.chunks)
    }
    near = {
        step: sum(pure.get(other) == count for other in range(step - 30, step + 31)) for step, count in pure.items()
    }
    return [step for step, number in near.items() if number >= 8 and 8 <= step < len(trace) - 8]


def with_others_like_them(trace, steps):
    """Those of some steps that are not the only ones with their number of sequences: no reader can judge such a one."""
    kinds = {step.step: (len(step.chunks), all(chunk.is_decode for chunk in step.chunks)) for step in trace}
    counts = Counter(kinds.values())
    return [step for step in steps if counts[kinds[step]] > 1]


def holds(trace):
    try:
        CostModel.fit(trace)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("is_smooth", [True, False], ids=["fit", "no-fit"])
@pytest.mark.parametrize("seed", range(examples(100)))
def test_a_slow_step_is_named_and_no_request_blamed(seed, is_smooth):
    """And without it, none is named."""
    rng = random.Random(f"plan {seed}")
    plain = run(seed, is_smooth)
    assert slow_steps(plain) == ()
    assert with_others_like_them(plain, [stall.step for stall in plain.stalls()]) == []
    assert not is_smooth or plain.stalls() == ()
    late, factor = rng.choice(usual_decodes(plain)), rng.uniform(1.5, 8.0)
    trace = run(seed, is_smooth, late, factor)
    explainer = Explainer(trace)
    named = {**explainer.stalls, **explainer.slow}
    assert with_others_like_them(trace, named) == [late], (factor, named)
    step = trace[late]
    excess = step.duration * (1 - 1 / factor)
    assert named[late].seconds - named[late].expected == pytest.approx(excess, rel=0.35)
    for chunk in step.chunks:
        explanation = explainer.explain(chunk.request_id)
        part = next(part for part in explanation.parts if part.kind in ("slow", "stall"))
        assert part.steps == (late,) and not part.culprits and part.amount == pytest.approx(excess, rel=0.35)
        assert math.isclose(math.fsum(each.amount for each in explanation.parts), explanation.total)
        if part.kind == "slow":
            assert part.factor == pytest.approx(factor, rel=0.25)
            assert part.words == f"slower than its contents explain (x{significant(part.factor, 2)})"
            assert part.amount < 0.005 * explanation.total or part.words in repr(explanation)
    if not is_smooth and not holds(trace):
        assert explainer.misfit and "times here do not follow from the contents of steps" in repr(explanation)


def test_most_machines_that_jump_have_no_fit():
    assert sum(not holds(run(seed, is_smooth=False)) for seed in range(12)) >= 6


def test_info_and_explain_say_it(tmp_path, capsys):
    seed = next(seed for seed in range(20) if not holds(run(seed, is_smooth=False)))
    plain = run(seed, is_smooth=False)
    late = usual_decodes(plain)[20]
    path = tmp_path / "run.jsonl"
    run(seed, False, late, 2.2).save(path)
    for source in (path, tmp_path):
        assert main(["trace", "info", str(source)]) == 0
        said = capsys.readouterr().out
        assert f"slow: step {late} took" in said and "slow: 1 step lost" in said and "no fit: the durations" in said
    assert main(["trace", "explain", str(path), "--by", "e2e"]) == 0
    said = capsys.readouterr().out
    assert "slower than its contents explain" in said and "no fit: the durations" in said
