"""A fork repeats the past exactly, changes only the future, and rejects impossible changes."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from msgspec import structs
from tiers import examples

from workbench import Engine, EngineConfig, SamplingParams, simulate
from workbench.analysis.fork import Past, fork
from workbench.analysis.rerun import RecordedRun
from workbench.simulation.costs.cost_model import CostModel

WORKLOAD = {
    "config": {"max_num_batched_tokens": 32, "block_size": 4, "num_blocks": 40, "max_num_seqs": 4},
    "requests": [
        {"id": "a", "prompt": {"len": 70}, "max_tokens": 9, "arrival_step": 0},
        {"id": "b", "prompt": {"len": 9}, "max_tokens": 5, "arrival_step": 1},
        {"id": "c", "prompt": {"len": 30}, "max_tokens": 7, "arrival_step": 2, "abort_step": 6},
        {"id": "d", "prompt": {"len": 40}, "max_tokens": 6, "arrival_step": 2},
    ],
}


def same_steps(a, b):
    return all(x == y and x.block_tables == y.block_tables for x, y in zip(a, b, strict=True))


def sampled(trace):
    tokens = {}
    for record in trace:
        for chunk in record.chunks:
            if chunk.sampled is not None:
                tokens.setdefault(chunk.request_id, []).append(chunk.sampled)
    return tokens


def test_a_fork_without_changes_is_the_same_run():
    trace = simulate(WORKLOAD)
    again = fork(trace)
    assert len(again) == len(trace) and same_steps(trace, again)
    assert again.meta.source == "simulation, forked at step 0"


@pytest.mark.parametrize("seed", range(8))
def test_requests_that_stop_early_are_scheduled_once_too_often_in_a_fork_too(seed):
    """An asynchronous scheduler does not foresee a stop token: its chunk too many is in the fork as well."""
    rng = random.Random(seed)
    requests = [
        {"id": f"r{i}", "prompt": {"len": rng.randint(1, 60)}, "max_tokens": 9, "stop_at": rng.randint(1, 8)}
        | {"arrival_step": rng.randint(0, 9), "accepts": [rng.randint(0, 2)]}
        for i in range(6)
    ]
    config = WORKLOAD["config"] | {"async_scheduling": True, "num_speculative_tokens": 2 * (seed % 2)}
    trace = simulate({"config": config, "requests": requests})
    assert any(chunk.discarded for record in trace for chunk in record.chunks)
    assert same_steps(trace, fork(trace)) and same_steps(trace, fork(trace, rng.randrange(len(trace))))


def test_a_fork_says_what_was_changed():
    forked = fork(simulate(WORKLOAD), 3, max_num_batched_tokens=8, max_num_seqs=2)
    assert forked.meta.source == "simulation, forked at step 3 with max_num_batched_tokens=8, max_num_seqs=2"


def test_a_fork_keeps_the_steps_before_it_and_changes_the_rest():
    trace = simulate(WORKLOAD)
    forked = fork(trace, 3, max_num_batched_tokens=8)
    assert same_steps(trace[:3], forked[:3])
    assert max(record.num_tokens for record in forked[3:]) <= 8 < max(record.num_tokens for record in trace[3:])
    kept = {name: tokens for name, tokens in sampled(trace).items() if name != "c"}
    assert {name: tokens for name, tokens in sampled(forked).items() if name != "c"} == kept


def test_the_pool_may_change_only_at_the_start():
    trace = simulate(WORKLOAD)
    small = fork(trace, num_blocks=30)
    assert max(len(record.preempted) for record in small) >= 1
    with pytest.raises(ValueError, match="num_blocks cannot change"):
        fork(trace, 2, num_blocks=30)


@pytest.mark.parametrize(
    ("at_step", "changes", "words"),
    [(-1, {}, "at_step"), (10**6, {}, "at_step"), (0, {"budget": 3}, "budget"), (0, {"block_size": 0}, "block_size")],
)
def test_impossible_changes_are_rejected(at_step, changes, words):
    with pytest.raises(ValueError, match=words):
        fork(simulate(WORKLOAD), at_step, **changes)


def test_an_engine_forks_its_own_run(tiny_llama):
    engine = Engine(tiny_llama, EngineConfig(max_num_batched_tokens=16, block_size=4, num_blocks=64, max_model_len=64))
    for n, length in enumerate((30, 5, 12)):
        engine.add_request(list(range(3, 3 + length)), SamplingParams(max_tokens=4 + n))
        engine.step()
    engine.run(progress=False)
    same = engine.fork()
    assert [r.chunks for r in same] == [
        tuple(type(c)(**{f: getattr(c, f) for f in c.__struct_fields__ if f != "text"}) for c in r.chunks)
        for r in engine.trace
    ]
    assert sampled(engine.fork(at_step=2, max_num_batched_tokens=64)) == sampled(engine.trace)


def decisions(trace):
    """The decisions of the scheduler in each step; a simulation knows neither texts nor wrong drafts."""
    unknown = ("time", "timings", "end", "kernel", "phase_starts", "chunks")
    for record in trace:
        chunks = [structs.replace(chunk, text="", drafts=(0,) * len(chunk.drafts)) for chunk in record.chunks]
        yield chunks, {name: value for name, value in structs.asdict(record).items() if name not in unknown}


def now_and_then(token_ids, num_drafts):
    """Drafts in some steps, which are right by chance."""
    return [3 + token_ids[-1] % 5] * random.Random(str(token_ids)).choice([0, 0, 1, num_drafts])


def run_with_drafts(model, rng, kind, **config):
    """A random run in a small pool, in which requests are aborted."""
    lookup = {"speculative": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": kind == "adaptive"}}
    ways = {"function": {"proposer": now_and_then}, "draft model": {"draft_model": model}}
    drawn = {"num_speculative_tokens": rng.randint(1, 4), "block_size": rng.choice([2, 4]), "num_blocks": 20}
    drawn |= {"max_num_seqs": 4, "max_num_batched_tokens": rng.choice([8, 12, 64]), "max_model_len": 34}
    config = drawn | {"policy": rng.choice(["fcfs", "priority"])} | ({} if kind in ways else lookup) | config
    requests = sorted((rng.randint(0, 9), f"q{i}") for i in range(6))
    aborts = {rng.randint(3, 20): f"q{i}" for i in range(6) if rng.random() < 0.4}
    with Engine(model, EngineConfig(**config), **ways.get(kind, {})) as engine:
        for step in range(200):
            while requests and requests[0][0] <= step:
                prompt = [rng.randint(3, 8) for _ in range(rng.randint(1, 12))]
                params = SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=True)
                engine.add_request(prompt, params, request_id=requests.pop(0)[1], priority=rng.randint(0, 2))
            if aborts.get(step) in engine.trace.requests:
                engine.abort(aborts[step])
            engine.step()
        return engine.trace


@pytest.mark.parametrize(
    ("kind", "asynchronous"),
    # An adaptive number of drafts has no asynchronous steps: their rows are reserved before the number is known.
    [*itertools.product(["ngram", "function", "draft model"], [False, True]), ("adaptive", False)],
)
def test_a_fork_proposes_drafts_where_the_engine_did(tiny_llama, kind, asynchronous):
    """Steps without a proposal, drafts that a limit cut and those that a preemption left unverified included."""
    met = dict.fromkeys(("none", "some", "accepted", "preempted", "aborted"), 0)
    for seed in range(examples(40)):
        trace = run_with_drafts(tiny_llama, random.Random(seed), kind, async_scheduling=asynchronous)
        assert list(decisions(fork(trace))) == list(decisions(trace)), seed
        for record in trace:
            met["preempted"] += len(record.preempted)
            met["aborted"] += len(record.aborted)
            for chunk in record.chunks:
                met["some" if chunk.drafts else "none"] += chunk.is_decode
                met["accepted"] += chunk.num_accepted
    assert all(met.values()) or asynchronous, met


@pytest.mark.parametrize("seed", [0, 9, 17, 27])
def test_a_draft_model_has_nothing_to_do_for_a_request_that_has_ended(tiny_llama, caplog, seed):
    """An asynchronous step has rows of it; a failure would take the drafts of all others too."""
    trace = run_with_drafts(tiny_llama, random.Random(seed), "draft model", async_scheduling=True)
    assert not [record.message for record in caplog.records if "the proposer failed" in record.message]
    assert any(chunk.num_accepted for record in trace for chunk in record.chunks)


def test_a_fork_without_asynchronous_steps_has_the_drafts_that_were_found(tiny_llama):
    """In asynchronous steps the rows of every request are filled up with placeholders."""

    def found(trace):
        """The number of drafts at each place of the outputs; those of a last step may be thrown away."""
        places, numbers = Counter(), {}
        for chunk in [chunk for record in trace for chunk in record.chunks]:
            if chunk.accepted and chunk.is_decode:
                numbers[chunk.request_id, places[chunk.request_id]] = sum(draft >= 0 for draft in chunk.drafts)
            places[chunk.request_id] += len(chunk.accepted)
        return numbers

    roomy = {"num_blocks": 99, "max_num_batched_tokens": 64, "max_model_len": 99, "async_scheduling": True}
    trace = run_with_drafts(tiny_llama, random.Random(1), "function", **roomy)
    known, again = found(trace), found(fork(trace, async_scheduling=False))
    assert set(known.values()) > {0, 1} and len(known.keys() & again.keys()) > 30
    assert all(again.get(place, number) == number for place, number in known.items())


def with_one_draft(trace, request_id):
    """Whether each draft is accepted if a step has one: it is if its token was accepted, or followed accepted ones."""
    right, accepted = {0: False}, []
    for chunk in [chunk for record in trace for chunk in record.chunks if chunk.request_id == request_id][1:]:
        place = len(right)
        for index in range(chunk.num_accepted + 1):
            right[place + index] = index < chunk.num_accepted or 0 < index == len(chunk.drafts)
    place, num_tokens = 1, trace.requests[request_id].max_tokens
    while place < num_tokens:
        accepted.append(int(right[place]))
        place += 1 + accepted[-1]
    return accepted


def test_drafts_keep_their_recorded_acceptance_and_more_of_them_are_refused():
    accepts = [[2, 0, 1, 2], [0, 0, 2], [1]]
    requests = [
        {"id": f"r{i}", "prompt": {"len": 20 + i}, "max_tokens": 24, "accepts": each} for i, each in enumerate(accepts)
    ]
    trace = simulate({"config": {"num_speculative_tokens": 2}, "requests": requests})
    again = fork(trace)
    assert same_steps(trace, again)
    assert sum(len(chunk.accepted) for record in again for chunk in record.chunks) == 72
    for drafts in (0, 1):
        fewer = fork(trace, num_speculative_tokens=drafts)
        assert sampled(fewer).keys() == sampled(trace).keys()
        now = [c.num_accepted for r in fewer for c in r.chunks if c.request_id == "r0" and c.drafts]
        assert now == (with_one_draft(trace, "r0") if drafts else [])
    with pytest.raises(ValueError, match="from 0 to 2, got 4: the recording has 2 drafts per request and step"):
        fork(trace, num_speculative_tokens=4)
    with pytest.raises(ValueError, match="from 0 to 0, got 1: the recording has no drafts"):
        fork(fork(trace, num_speculative_tokens=0), num_speculative_tokens=1)


def test_a_run_that_ends_before_a_request_arrives_has_no_times_of_it():
    requests = [{"id": "a", "prompt": {"len": 9}}, {"id": "b", "prompt": {"len": 9}, "arrival_time": 100.0}]
    trace = simulate({"requests": requests}, cost_model=CostModel(fixed=0.01))
    run = RecordedRun.of(trace, Past(trace), CostModel(fixed=0.01))
    times = run.times_of("b", EngineConfig())
    assert times is not None and times.e2e.seconds == pytest.approx(trace.metrics().requests["b"].e2e.seconds)
    assert replace(run, max_steps=0).times_of("b", EngineConfig()) is None


def test_a_recorded_run_is_small_for_other_processes():
    requests = [{"id": f"r{i}", "prompt": {"len": 900}, "max_tokens": 100} for i in range(8)]
    trace = simulate({"requests": requests})
    run = RecordedRun.of(trace, Past(trace), CostModel(fixed=0.01))
    assert all(list(a.prompt_token_ids) == list(trace.requests[a.request_id].prompt_token_ids) for a in run.arrivals)
    kept = [run.tokens[each.request_id] for each in run.arrivals] + [each.prompt_token_ids for each in run.arrivals]
    assert sum(tokens.itemsize * len(tokens) for tokens in kept) == 4 * 8 * 1000
