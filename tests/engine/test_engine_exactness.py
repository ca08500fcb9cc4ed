"""The text must not depend on how the work was cut up.

Logits of every step against the plain mlx-lm model run unchunked and alone; the same tokens for any chunk budget,
company, order of arrival and preemption.
"""

import itertools

import numpy as np
import pytest
from exactness import compare_every_step, plain_logits

from workbench import Engine, EngineConfig, SamplingParams

NEAR_TIE = 1e-3


def plain_margin(loaded, token_ids):
    """Top-2 margin of the next token, by mlx-lm alone."""
    best = np.sort(plain_logits(loaded.model, token_ids)[-1])[-2:]
    return float(best[1] - best[0])


def assert_same_tokens(loaded, prompts, ours, reference):
    """Equal token by token; where not, the top-2 margin at the first difference is printed and must be a near tie."""
    for request_id, tokens in ours.items():
        expected = reference[request_id]
        if tokens == expected:
            continue
        at = next(i for i, (a, b) in enumerate(itertools.zip_longest(tokens, expected)) if a != b)
        margin = plain_margin(loaded, [*prompts[request_id], *expected[:at]])
        print(f"{request_id} differs at output token {at}, top-2 margin {margin:.2e}")
        assert margin <= NEAR_TIE, f"{request_id}: token {at} differs with a top-2 margin of {margin:.2e}"


def run(loaded, prompts, params, *, order=None, arrivals=None, **config):
    """Tokens by request id, and the engine."""
    settings = {"max_num_batched_tokens": 64, "block_size": 8, "num_blocks": 128, "max_model_len": 256, **config}
    engine = Engine(loaded, EngineConfig(**settings))
    pending = [(arrivals or {}).get(name, 0) for name in order or prompts]
    names = list(order or prompts)
    while names or engine.scheduler.has_unfinished_requests() or engine._step.inbox:
        while names and pending[0] <= engine.scheduler.step:
            name = names.pop(0)
            pending.pop(0)
            engine.add_request(prompts[name], params, request_id=name)
        if engine.step() is None:
            break
    engine.close()
    return {o.request_id: list(o.token_ids) for o in engine.outputs.values()}, engine


def random_prompts(lengths, seed=0, high=60):
    rng = np.random.default_rng(seed)
    return {f"q{i}": rng.integers(3, high, size=n).tolist() for i, n in enumerate(lengths)}


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("backend", ["cpu", "gather", "dense"])
def test_every_step_of_smollm2_has_the_logits_of_the_plain_model(smollm2, backend):
    texts = ["The capital of France is", "def fibonacci(n):\n    ", "Once upon a time there was a " * 12]
    prompts = {f"q{i}": smollm2.tokenizer.encode(text) for i, text in enumerate(texts)}
    worst, spread = compare_every_step(smollm2, prompts, backend, SamplingParams(max_tokens=5))
    assert worst < 1e-3, f"largest difference {worst:.2e} (logits spread over {spread:.1f})"


@pytest.mark.parametrize("budget", [1, 7, 64, 2048])
def test_greedy_tokens_do_not_depend_on_the_chunk_budget(tiny_llama, budget):
    prompts = random_prompts([37, 5, 61, 18])
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    reference = {
        name: run(tiny_llama, {name: p}, params, max_num_batched_tokens=2048)[0][name] for name, p in prompts.items()
    }
    ours, _ = run(tiny_llama, prompts, params, max_num_batched_tokens=budget)
    assert_same_tokens(tiny_llama, prompts, ours, reference)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, top_p=0.95, seed=5),
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, repetition_penalty=1.2),
    ],
    ids=["greedy", "seeded", "engine-seed"],
)
def test_tokens_do_not_depend_on_company_or_order_of_arrival(tiny_llama, params):
    prompts = random_prompts([29, 4, 46, 11, 23])
    reference = {
        name: run(tiny_llama, {name: p}, params, max_num_batched_tokens=2048)[0][name] for name, p in prompts.items()
    }
    assert len({tuple(tokens) for tokens in reference.values()}) > 1
    rng = np.random.default_rng(2)
    for budget in (7, 64):
        for _ in range(3):
            order = rng.permutation(list(prompts)).tolist()
            arrivals = {name: int(step) for name, step in zip(order, np.sort(rng.integers(0, 15, 5)), strict=True)}
            ours, _ = run(tiny_llama, prompts, params, order=order, arrivals=arrivals, max_num_batched_tokens=budget)
            assert_same_tokens(tiny_llama, prompts, ours, reference)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_survive_a_preemption_at_every_possible_step(tiny_llama, temperature):
    prompts = random_prompts([21, 9])
    params = SamplingParams(max_tokens=10, ignore_eos=True, temperature=temperature, seed=1)
    settings = {"max_num_batched_tokens": 13, "enable_prefix_caching": False}
    reference, plain = run(tiny_llama, prompts, params, **settings)
    preempted = 0
    for at in range(1, len(plain.trace)):
        for victim in prompts:
            engine = Engine(tiny_llama, EngineConfig(block_size=8, num_blocks=128, max_model_len=256, **settings))
            for name, tokens in prompts.items():
                engine.add_request(tokens, params, request_id=name)
            for _ in range(at):
                engine.step()
            request = next((r for r in engine.scheduler.running if r.request_id == victim), None)
            if request is not None:
                engine.scheduler._preempt(request)
                preempted += 1
            ours = {o.request_id: list(o.token_ids) for o in engine.run(progress=False)}
            engine.close()
            assert_same_tokens(tiny_llama, prompts, ours, reference)
    assert preempted > 15


def test_tokens_survive_preemption_by_pressure(tiny_llama):
    prompts = random_prompts([15, 14, 13, 16])
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    reference, _ = run(tiny_llama, prompts, params)
    for caching in (True, False):
        ours, engine = run(tiny_llama, prompts, params, num_blocks=12, enable_prefix_caching=caching)
        assert sum(len(record.preempted) for record in engine.trace) >= 2
        assert_same_tokens(tiny_llama, prompts, ours, reference)


def test_tokens_do_not_depend_on_prefix_caching(tiny_llama):
    shared = random_prompts([32])["q0"]
    prompts = {f"q{i}": shared + tail for i, tail in enumerate([[5, 9], [7], [], [5, 9, 11, 4]])}
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    off, _ = run(tiny_llama, prompts, params, enable_prefix_caching=False)
    for arrivals in (None, {"q0": 0, "q1": 1, "q2": 4, "q3": 9}):
        on, engine = run(tiny_llama, prompts, params, enable_prefix_caching=True, arrivals=arrivals)
        assert sum(chunk.num_cached_tokens for record in engine.trace for chunk in record.chunks) >= 64
        assert_same_tokens(tiny_llama, prompts, on, off)


def test_the_comparison_catches_shifted_positions(tiny_llama):
    """Negative control: positions 3 too large must not pass as equal."""
    prompts = random_prompts([30, 6])
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    good, _ = compare_every_step(tiny_llama, prompts, "gather", params)
    bad, _ = compare_every_step(tiny_llama, prompts, "gather", params, shift=3)
    assert good < 1e-4 < bad
