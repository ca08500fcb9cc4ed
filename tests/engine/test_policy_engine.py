"""Limits and policies in the real engine: the order changes, the tokens do not."""

import numpy as np
import pytest

from workbench import Engine, EngineConfig, SamplingParams
from workbench.analysis.fork import fork
from workbench.scheduler.policies import Deadline, DecodeFirst, ShortestRemainingFirst

CONFIG = EngineConfig(max_num_batched_tokens=12, max_num_seqs=6, block_size=4, num_blocks=40, max_model_len=64)
LIMITS = {"max_num_partial_prefills": 3, "max_long_partial_prefills": 1, "long_prefill_token_threshold": 10}


def serve(model, config=CONFIG, policy=None):
    engine = Engine(model, config, policy=policy)
    lengths = {"long0": 40, "long1": 40, **{f"short{i}": 3 + i for i in range(4)}}
    for index, (name, length) in enumerate(lengths.items()):
        prompt = np.random.default_rng(index).integers(3, 60, size=length).tolist()
        engine.add_request(prompt, SamplingParams(max_tokens=6, ignore_eos=True), request_id=name)
    tokens = {output.request_id: list(output.token_ids) for output in engine.run(progress=False)}
    ttft = {rid: request.ttft.steps for rid, request in engine.trace.metrics().requests.items()}
    trace = engine.trace
    engine.close()
    return tokens, ttft, trace


def short_ttft(ttft):
    return sum(steps for name, steps in ttft.items() if name.startswith("short"))


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        (CONFIG.replace(**LIMITS), None),
        (CONFIG, ShortestRemainingFirst()),
        (CONFIG, DecodeFirst(max_prefill_tokens=4)),
        (CONFIG, Deadline(base=0.0, per_prompt_token=0.01)),
        (CONFIG.replace(**LIMITS), DecodeFirst(max_prefill_tokens=4)),
    ],
    ids=["limits", "shortest", "decode first", "deadline", "limits and decode first"],
)
def test_tokens_are_those_of_the_plain_engine(tiny_llama, config, policy):
    plain_tokens, plain_ttft, plain_trace = serve(tiny_llama)
    tokens, ttft, trace = serve(tiny_llama, config, policy)
    assert tokens == plain_tokens
    order = [[(c.request_id, c.num_tokens) for c in record.chunks] for record in trace]
    assert order != [[(c.request_id, c.num_tokens) for c in record.chunks] for record in plain_trace]
    assert trace.meta.config.get("scheduling_policy") == (repr(policy) if policy else None)
    if not isinstance(policy, DecodeFirst):
        assert short_ttft(ttft) < 0.6 * short_ttft(plain_ttft)


def test_what_a_limit_would_have_done(tiny_llama):
    """fork(): the same arrivals and tokens under other limits, from a live engine's trace."""
    _, ttft, trace = serve(tiny_llama)
    forked = fork(trace, **LIMITS)
    assert forked.end == "done"
    now = {rid: request.ttft.steps for rid, request in forked.metrics().requests.items()}
    assert short_ttft(now) < 0.6 * short_ttft(ttft)


def test_what_is_no_policy_is_refused(tiny_llama):
    with pytest.raises(ValueError, match="policy must be one of 'fcfs', 'priority', got 'shortest'"):
        Engine(tiny_llama, CONFIG, policy="shortest")
    with pytest.raises(ValueError, match="policy must be a workbench"):
        Engine(tiny_llama, CONFIG, policy=5)
