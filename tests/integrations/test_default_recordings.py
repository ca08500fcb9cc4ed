"""Two recordings of one run of vLLM 0.33.0, with token ids and without: explain, misses and whatif answer the same.

``make record-vllm`` makes them: sessions of several turns behind shared prompts, with preemptions and stop tokens,
with a prefix cache and without.
"""

import re
from pathlib import Path

import pytest
from private_traces import without_tokens

from workbench.analysis.fork import fork, recorded_requests
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.summary import summary_of
from workbench.trace import Trace

DATA = Path(__file__).parents[1] / "data" / "vllm-private"
RUNS = [f"{workload}-{mode}" for workload in ("sessions", "sessions_uncached") for mode in ("sync", "async")]
COST = CostModel(fixed=0.01, per_prefill_token=1e-4, per_sequence=1e-4)


@pytest.fixture(params=RUNS)
def pair(request):
    tokens, default = (Trace.load(DATA / f"{request.param}-{kind}.jsonl.gz") for kind in ("tokens", "default"))
    assert not tokens.problems and not default.problems
    return tokens, default


def decisions(trace):
    return [(_chunks(record), record.preempted, record.finished) for record in trace]


def _chunks(record):
    return [(c.request_id, c.start, c.num_tokens, c.new_block_ids, c.num_cached_tokens) for c in record.chunks]


def test_both_are_of_one_run_and_only_one_has_tokens(pair):
    tokens, default = pair
    assert decisions(tokens) == decisions(default)
    assert all(info.prompt_token_ids for info in tokens.requests.values())
    assert not any(info.prompt_token_ids for info in default.requests.values())
    assert tokens.meta.prefix_hashes.key_id != default.meta.prefix_hashes.key_id
    assert any(record.preempted for record in tokens)


def test_the_summary_says_the_same(pair):
    tokens, default = (summary_of(recorded_requests(trace)[0]) for trace in pair)
    assert tokens == default
    assert re.search(r"; [1-9]\d*% of [\d,]+ prompt tokens repeat the beginning", default)


CHANGES = [
    {},
    {"num_blocks": 400},
    {"num_blocks": 40},
    {"max_num_batched_tokens": 32, "max_num_seqs": 3},
    {"block_size": 16},
    {"block_size": 24, "num_blocks": 16},
    {"enable_prefix_caching": True},
    {"enable_prefix_caching": False},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_whatif_answers_the_same(pair, change):
    tokens, default = (fork(trace, **change) for trace in pair)
    assert decisions(tokens) == decisions(default)
    if not change:  # the simulation repeats vLLM's run
        assert decisions(tokens) == decisions(pair[0])
    # On a clock, with the times of one run: two runs of vLLM take different times.
    same_run = without_tokens(pair[0])
    timed = [trace.whatif(COST, **change) for trace in (pair[0], same_run)]
    assert [(r.time, _chunks(r)) for r in timed[0]] == [(r.time, _chunks(r)) for r in timed[1]]


def test_hits_after_evictions_are_the_same_with_larger_blocks(pair):
    tokens, default = (fork(trace, block_size=24, num_blocks=16, enable_prefix_caching=True) for trace in pair)
    evicting = next(record.step for record in tokens if record.pool.evicted)
    assert any(chunk.num_cached_tokens for record in tokens[evicting + 1 :] for chunk in record.chunks)
    assert decisions(tokens) == decisions(default)


def test_misses_answer_the_same(pair):
    tokens, default = pair
    compared = 0
    for request_id in tokens.requests:
        for miss, truth in zip(default.why_missed(request_id), tokens.why_missed(request_id), strict=True):
            assert (miss.admitted, miss.found, miss.looked_up, miss.step) == (
                truth.admitted,
                truth.found,
                truth.looked_up,
                truth.step,
            )
            inside_a_block = truth.reason == "not full" and not truth.is_own_end
            assert miss.reason == ("never computed" if inside_a_block else truth.reason)
            compared += 1
    assert compared > len(tokens.requests) or not tokens.config["enable_prefix_caching"]


def test_explain_answers_the_same(pair):
    tokens = pair[0]
    default = without_tokens(tokens)  # the same file, without its tokens: the times of two runs differ
    for request_id in tokens.requests:
        one, other = tokens.explain(request_id), default.explain(request_id)
        assert one.total == other.total
        assert [tuple(part)[:2] for part in one.parts] == [tuple(part)[:2] for part in other.parts]


def test_the_comparison_is_able_to_fail(pair):
    tokens = pair[0]
    bare = without_tokens(tokens, hashes=False)
    if tokens.config["enable_prefix_caching"]:
        assert decisions(fork(bare, num_blocks=400)) != decisions(fork(tokens, num_blocks=400))
    else:
        with pytest.raises(ValueError, match="enable_prefix_caching=True has no answer"):
            fork(bare, enable_prefix_caching=True)
