"""Recordings without token ids: what their hashes, or their hits alone, say about equal prefixes."""

import random
from collections import Counter
from pathlib import Path

import pytest
from feature_workloads import random_workload
from private_traces import without_tokens
from tiers import examples

from workbench import Trace, simulate
from workbench.analysis.fork import fork
from workbench.analysis.predict import Predictor, values_of
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace.readings.compare import compare
from workbench.trace.readings.contents import Contents

KINDS = ("async", "spec", "async_spec")


def shared_workload(rng):
    """Sessions of several turns behind system prompts, in a pool that is too small: hits, evictions and preemptions."""
    block_size = rng.choice([2, 4, 8])
    requests = []
    for session in range(rng.randint(2, 6)):
        history = [{"len": rng.randint(1, 40), "seed": rng.choice("AB")}]
        step = rng.randint(0, 10)
        for turn in range(rng.randint(1, 4)):
            name = f"s{session}t{turn}"
            history = [*history, {"len": rng.randint(1, 20), "seed": name}]
            requests.append(
                {
                    "id": name,
                    "prompt": {"parts": history},
                    "max_tokens": rng.randint(1, 12),
                    "arrival_step": step,
                    "priority": rng.randint(0, 2),
                    "cache_salt": rng.choice(["", "", "", "x"]),
                }
            )
            step += rng.randint(3, 25)
    longest = sum(part["len"] for part in max((r["prompt"]["parts"] for r in requests), key=len)) + 60
    return {
        "config": {
            "max_num_batched_tokens": rng.choice([16, 40, 64]),
            "max_num_seqs": rng.choice([2, 4, 6]),
            "block_size": block_size,
            "num_blocks": 2 + longest // block_size + rng.randint(0, 60),
            "policy": rng.choice(["fcfs", "priority"]),
            "enable_prefix_caching": rng.random() < 0.8,
        },
        "requests": requests,
    }


def steps_of(trace):
    """Everything that the scheduler decided, without tokens."""
    return [
        (
            [(c.request_id, c.start, c.num_tokens, c.new_block_ids, c.num_cached_tokens) for c in record.chunks],
            record.preempted,
            record.finished,
            record.free_blocks_end,
            record.cached_block_ids,
        )
        for record in trace
    ]


def changes_of(trace, rng):
    size, blocks = trace.block_size, trace.num_blocks
    yield {}
    yield {"num_blocks": blocks * 3}
    yield {"max_num_seqs": rng.choice([1, 3, 8])}
    yield {"enable_prefix_caching": not trace.config["enable_prefix_caching"]}
    yield {"block_size": size * 2, "num_blocks": blocks}
    yield {"block_size": size * 3, "num_blocks": blocks}


def test_hashes_answer_like_tokens_under_every_setting():
    rng = random.Random(1)
    hits = Counter()
    for _ in range(examples(60)):
        trace = simulate(shared_workload(rng))
        private = without_tokens(trace)
        for change in changes_of(trace, rng):
            with_tokens, with_hashes = fork(trace, **change), fork(private, **change)
            assert steps_of(with_tokens) == steps_of(with_hashes), change
            hits[str(sorted(change))] += sum(c.num_cached_tokens for record in with_tokens for c in record.chunks)
    assert len(hits) == 5 and all(hits.values())


@pytest.mark.parametrize("kind", KINDS)
def test_hashes_answer_like_tokens_with_drafts_and_asynchronous_steps(kind):
    for index in range(examples(20)):
        trace = simulate(random_workload(kind, random.Random(f"contents:{kind}:{index}")), max_steps=400)
        assert steps_of(fork(trace)) == steps_of(fork(without_tokens(trace))) == steps_of(trace)


def test_hashes_give_the_same_misses_as_tokens():
    rng = random.Random(2)
    seen = Counter()
    for _ in range(examples(40)):
        trace = simulate(shared_workload(rng))
        private = without_tokens(trace)
        for request_id in trace.requests:
            for ours, truth in zip(private.why_missed(request_id), trace.why_missed(request_id), strict=True):
                assert (ours.found, ours.looked_up, ours.step) == (truth.found, truth.looked_up, truth.step)
                seen[ours.reason] += 1
                if truth.reason in ("computed and evicted", "last token must be computed", "never computed"):
                    assert ours.reason == truth.reason
                if truth.reason == "not full":  # which of the two it was, no hash of whole blocks says
                    assert ours.reason in ("not full", "never computed")
                if truth.reason in (
                    "cache salt differs",
                    "adapter differs",
                ):  # hashes of different salts have nothing in common
                    assert ours.reason == "never computed"
                assert ours.token_ids is None and ours.reason != "unknown"
    assert seen["computed and evicted"] > 5 and seen["never computed"] > 5, seen


def test_block_sizes_that_hashes_do_not_know_are_refused():
    trace = without_tokens(simulate(shared_workload(random.Random(3)), config={"enable_prefix_caching": True}))
    size = trace.block_size
    with pytest.raises(
        ValueError, match=f"multiple of {size}, tokens per block hash of the recording, got {size // 2}"
    ):
        fork(trace, block_size=size // 2)
    assert len(fork(trace, block_size=size // 2, enable_prefix_caching=False))


def test_hits_alone_repeat_the_recorded_run():
    rng = random.Random(4)
    complete = Counter()
    for _ in range(examples(60)):
        trace = simulate(shared_workload(rng), config={"enable_prefix_caching": True})
        bare = without_tokens(trace, hashes=False)
        assert steps_of(fork(bare)) == steps_of(trace)
        contents = Contents(bare)
        assert contents.kind == "hits"
        complete[contents.is_complete] += 1
        if contents.is_complete:
            assert steps_of(fork(bare, max_num_seqs=1)) == steps_of(fork(trace, max_num_seqs=1))
    assert all(complete[known] > 3 for known in (True, False)), complete


def test_caching_cannot_be_turned_on_where_nothing_shows_what_is_shared():
    bare = without_tokens(
        simulate(shared_workload(random.Random(5)), config={"enable_prefix_caching": False}), hashes=False
    )
    with pytest.raises(ValueError, match="enable_prefix_caching=True has no answer"):
        fork(bare, enable_prefix_caching=True)


def test_another_key_gives_other_hashes_of_the_same_run():
    trace = simulate(shared_workload(random.Random(6)))
    one, other = without_tokens(trace), without_tokens(trace, key=b"another")
    assert one.meta.prefix_hashes.key_id != other.meta.prefix_hashes.key_id
    hashes = [{info.block_hashes for info in run.requests.values()} - {""} for run in (one, other)]
    assert not hashes[0] & hashes[1]
    assert any("different keys" in note for note in compare(one, other).notes)
    assert not any("different keys" in note for note in compare(one, one).notes)


def test_a_recording_without_hashes_widens_its_intervals_after_evictions():
    cost = CostModel(fixed=0.01, per_prefill_token=1e-4)
    rng = random.Random(8)
    requests = [
        {
            "id": f"r{n}",
            "prompt": {"parts": [{"len": 64, "seed": rng.choice("ABCDEF")}, {"len": rng.randint(5, 40)}]},
            "max_tokens": rng.randint(2, 8),
            "arrival_time": n * 0.05,
        }
        for n in range(60)
    ]
    config = {"block_size": 4, "num_blocks": 60, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    trace = simulate({"config": config, "requests": requests}, cost_model=cost)
    bare = without_tokens(trace, hashes=False)
    assert not Contents(bare).is_complete
    known = Predictor(without_tokens(trace), num_draws=1).predict(num_blocks=600)
    wide = Predictor(bare, num_draws=1).predict(num_blocks=600)
    assert any("evicted blocks" in note for note in wide.notes) and not any("evicted" in note for note in known.notes)
    truth = simulate({"config": config | {"num_blocks": 600}, "requests": requests}, cost_model=cost)
    hit_rate = values_of(truth)["hit_rate"]
    assert known["hit_rate"].value == pytest.approx(hit_rate, abs=0.01)
    assert wide["hit_rate"].low <= hit_rate <= wide["hit_rate"].high
    assert wide["hit_rate"].high - wide["hit_rate"].low > 0.05
    assert not any("evicted" in note for note in Predictor(bare, num_draws=1).unchanged.notes)


def test_a_recording_says_why_equal_prefixes_are_unknown():
    """Without a prefix cache no setting finds any, so nothing widens the intervals, and nothing speaks of evictions."""
    cost = CostModel(fixed=0.01, per_prefill_token=1e-4)
    workload = shared_workload(random.Random(3))
    for config, why in (
        ({"enable_prefix_caching": False, "num_blocks": 400}, "its engine had no prefix cache"),
        ({"enable_prefix_caching": True, "num_blocks": 4000}, ""),
    ):
        bare = without_tokens(simulate(workload, config=config, cost_model=cost), hashes=False)
        assert (Contents(bare).why_unknown, Contents(bare).is_complete) == (why, not why)
    off = without_tokens(simulate(workload, config={"enable_prefix_caching": False}, cost_model=cost), hashes=False)
    prediction = Predictor(off, num_draws=1).predict(max_num_seqs=1)
    assert not any("block hashes" in note for note in prediction.notes)
    half = Contents(bare[len(bare) // 2 :])
    assert half.kind == "hits" and half.why_unknown == "it begins in the middle of a run"


def test_the_served_recording_of_the_notebooks_had_no_prefix_cache():
    served = Trace.load(Path(__file__).parents[2] / "notebooks" / "data" / "vllm_served.jsonl.gz")
    assert not served.config["enable_prefix_caching"] and not served.metrics().summary.num_cached_tokens
    prediction = Predictor(served, num_draws=1).predict(max_num_seqs=16)
    assert not any("evicted" in note or "block hashes" in note for note in prediction.notes)
