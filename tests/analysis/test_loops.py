"""Closed loops: who waits for an answer is found by contents alone, and waits for it under every other setting."""

import random
from dataclasses import replace

import pytest
from closed_loops import COST, conversations, run
from private_traces import without_tokens
from tiers import examples

from workbench import simulate
from workbench.analysis.fork import fork
from workbench.analysis.loops import loops_of
from workbench.analysis.predict import Predictor, whatif
from workbench.analysis.values import values_of
from workbench.apps.cli import main

OTHERS = ({"enable_prefix_caching": False}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 48}, {"num_blocks": 260})


def truth(arrivals):
    return {arrival.request_id: arrival.after for arrival in arrivals if arrival.after}


def found_in(trace):
    return {request_id: found.after for request_id, found in loops_of(trace).follow_ups.items()}


@pytest.mark.parametrize("seed", range(examples(12)))
def test_follow_ups_are_found_by_tokens_and_by_hashes(seed):
    arrivals = conversations(random.Random(f"loops {seed}"))
    trace = run(arrivals)
    assert found_in(trace) == truth(arrivals)
    assert found_in(without_tokens(trace)) == truth(arrivals)
    thinks = {arrival.request_id: arrival.think for arrival in arrivals if arrival.after}
    for request_id, found in loops_of(trace).follow_ups.items():
        assert found.think == pytest.approx(thinks[request_id])


@pytest.mark.parametrize("seed", range(examples(12)))
def test_short_answers_in_large_blocks_are_followed_without_a_mistake(seed):
    """Blocks of 64 hold few whole answers: what is found is right, and nearly all is."""
    arrivals = conversations(random.Random(f"large {seed}"), count=12)
    found, known = found_in(without_tokens(run(arrivals, block_size=64, num_blocks=900))), truth(arrivals)
    assert found.items() <= known.items()
    assert not found or len(found) >= 0.6 * len(known)


@pytest.mark.parametrize("seed", range(examples(8)))
def test_requests_that_wait_for_nothing_are_left_alone(seed):
    """Shared system prompts, the same question twice, and prompts that repeat a whole earlier prompt by chance."""
    rng = random.Random(f"open {seed}")
    system = [rng.randrange(3, 30_000) for _ in range(64)]
    requests, prompts = [], []
    for i in range(40):
        prompt = rng.choice(prompts) if prompts and rng.random() < 0.2 else system + [i] * rng.randint(1, 50)
        prompt = prompt + [5] * rng.randint(0, 30) if rng.random() < 0.2 else prompt
        prompts.append(prompt)
        requests.append({"id": f"r{i}", "prompt": prompt, "max_tokens": rng.randint(1, 30), "arrival_time": 0.2 * i})
    trace = simulate({"config": {"num_blocks": 3000}, "requests": requests}, cost_model=COST)
    assert not loops_of(trace).follow_ups and not loops_of(without_tokens(trace)).follow_ups
    assert str(loops_of(trace)) == ""


@pytest.mark.parametrize("changes", OTHERS, ids=str)
@pytest.mark.parametrize("kind", ["tokens", "hashes"])
def test_a_prediction_is_the_closed_loop_under_the_other_setting(kind, changes):
    arrivals = conversations(random.Random(f"predict {kind}"), count=10)
    trace, measured = run(arrivals), run(arrivals, **changes)
    trace = without_tokens(trace) if kind == "hashes" else trace
    predictor = Predictor(trace, COST, num_draws=2)
    assert predictor.check.holds and abs(predictor.check.errors["ttft_mean"]) < 1e-6
    expected = values_of(measured)
    for values in (predictor.predict(**changes).outcome.values, values_of(whatif(trace, COST, **changes))):
        assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert any(str(loops_of(trace)) in note for note in predictor.unchanged.notes)


@pytest.mark.parametrize("changes", OTHERS[1:], ids=str)
def test_a_fork_without_a_clock_waits_for_answers_too(changes):
    arrivals = conversations(random.Random("steps"), count=8, clock=False)
    trace, expected = run(arrivals, cost=None), run(arrivals, cost=None, **changes)
    forked = fork(trace, **changes)
    assert [step.chunks for step in forked] == [step.chunks for step in expected]
    assert [step.chunks for step in fork(trace)] == [step.chunks for step in trace]
    assert [step.chunks for step in fork(trace, open_loop=True, **changes)] != [step.chunks for step in forked]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("at_step", [0, 20, 60])
def test_an_unchanged_fork_is_the_recording(async_scheduling, at_step):
    arrivals = conversations(random.Random("same"), clock=False)
    trace = run(arrivals, cost=None, async_scheduling=async_scheduling)
    assert [step.chunks for step in fork(trace, at_step)] == [step.chunks for step in trace]


def test_what_cannot_be_is_not_predicted(tmp_path, capsys):
    arrivals = conversations(random.Random("impossible"), count=10, think=0.05)
    trace = run(arrivals)
    with pytest.raises(ValueError, match="would arrive before the answer that they contain has ended"):
        Predictor(trace, COST, num_draws=2, open_loop=True).predict(max_num_seqs=1)
    with pytest.raises(ValueError, match="--open-loop"):
        whatif(trace, COST, open_loop=True, max_num_seqs=1)
    lazy = run([replace(arrival, think=500.0 * bool(arrival.after)) for arrival in arrivals])
    assert len(whatif(lazy, COST, open_loop=True, max_num_seqs=5))  # nobody is in a hurry
    path = tmp_path / "agents.jsonl"
    trace.save(path)
    assert main(["trace", "whatif", str(path), "--set", "max_num_seqs=1", "--force", "--open-loop"]) == 2
    assert "follow-ups would arrive before" in capsys.readouterr().err
    assert main(["trace", "whatif", str(path), "--set", "max_num_seqs=1", "--force"]) == 0
    assert "are follow-ups: their prompts contain the answer to an earlier request" in capsys.readouterr().out
