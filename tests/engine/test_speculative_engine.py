"""Speculative decoding and asynchronous steps in the engine: the same tokens as one at a time, in every situation."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from exactness import plain_logits
from law_runs import assert_laws

from workbench import Engine, EngineConfig, SamplingParams
from workbench.scheduler.cache_groups import CacheGroups
from workbench.scheduler.policies import ShortestRemainingFirst
from workbench.scheduler.scheduler import Scheduler
from workbench.trace import Trace

SETTINGS = {"max_num_batched_tokens": 64, "block_size": 8, "num_blocks": 128, "max_model_len": 256}
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.6, top_p=0.95, seed=5, repetition_penalty=1.1)


def half_right(token_ids, num_drafts):
    """Drafts without a model: some are right by chance, some are outside the vocabulary's used part."""
    return [(token_ids[-1] * 7 + index) % 110 for index in range(num_drafts)]


def modes(loaded):
    """Every way to take steps ahead, as arguments of an Engine."""
    ngram = {"num_speculative_tokens": 4, "speculative": {"method": "ngram", "prompt_lookup_min": 1}}
    own = {"num_speculative_tokens": 3, "draft_model": loaded}
    layers = {"num_speculative_tokens": 2, "speculative": {"method": "draft_model", "num_layers": 1}}
    function = {"num_speculative_tokens": 3, "proposer": half_right}
    ahead = {"async_scheduling": True}
    return {
        "ngram": ngram,
        "adaptive": {**ngram, "speculative": {**ngram["speculative"], "adaptive": True}},
        "draft model": own,
        "first layer": layers,
        "function": function,
        "async": ahead,
        "async ngram": ahead | ngram,
        "async draft model": ahead | own,
        "async function": ahead | function,
    }


MODES = tuple(modes(None))


def make_engine(loaded, mode=None, **changes):
    fields = {**SETTINGS, **(modes(loaded)[mode] if mode else {}), **changes}
    options = {name: fields.pop(name) for name in ("draft_model", "proposer", "policy") if name in fields}
    return Engine(loaded, EngineConfig(**fields), **options)


def run(loaded, prompts, params, mode=None, *, arrivals=None, preempt_at=None, **changes):
    """Tokens by request, and the trace, whose chunks are checked."""
    with make_engine(loaded, mode, **changes) as engine:
        waiting = sorted(prompts, key=lambda name: (arrivals or {}).get(name, 0))
        for number in itertools.count():
            while waiting and (arrivals or {}).get(waiting[0], 0) <= number:
                engine.add_request(prompts[waiting[0]], params, request_id=waiting.pop(0))
            if preempt_at is not None and number == preempt_at[0]:
                victims = [request for request in engine.scheduler.running if request.request_id == preempt_at[1]]
                for request in victims:
                    engine.scheduler._preempt(request)
            if engine.step() is None and not waiting:
                break
        assert_laws(engine.scheduler)
        assert_chunks_follow(engine.trace)
        return {name: engine.output(name).token_ids for name in prompts}, engine.trace


def assert_chunks_follow(trace):
    """Each chunk begins behind the last row of its request whose token was accepted, neither before nor after."""
    computed = {}
    for record in trace:
        for request_id in record.preempted:
            computed.pop(request_id, None)
        for chunk in record.chunks:
            known = computed.get(chunk.request_id)
            if known is not None and chunk.request_id not in (*record.admitted, *record.resumed):
                assert chunk.first_position == known, f"{chunk.request_id} in step {record.step}"
            num_rejected = len(chunk.drafts) - chunk.num_accepted
            computed[chunk.request_id] = chunk.first_position + chunk.num_tokens - num_rejected
            if chunk.discarded:
                computed.pop(chunk.request_id)


def random_prompts(lengths, seed=0):
    """Prompts in which n-grams occur again."""
    rng = np.random.default_rng(seed)
    return {f"q{i}": rng.integers(3, 9, size=n).tolist() for i, n in enumerate(lengths)}


def accepted(trace):
    """Number of drafts and of accepted ones."""
    chunks = [chunk for record in trace for chunk in record.chunks]
    return sum(len(chunk.drafts) for chunk in chunks), sum(chunk.num_accepted for chunk in chunks)


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_equal_the_plain_engine_for_any_budget_and_order(tiny_llama, mode):
    prompts = random_prompts([37, 5, 21, 18])
    rng = np.random.default_rng(3)
    num_drafts = num_accepted = 0
    for params in (GREEDY, SEEDED):
        reference, _ = run(tiny_llama, prompts, params, max_num_batched_tokens=2048)
        for budget in (6, 64):
            arrivals = {name: int(step) for name, step in zip(prompts, rng.integers(0, 12, 4), strict=True)}
            ours, trace = run(tiny_llama, prompts, params, mode, arrivals=arrivals, max_num_batched_tokens=budget)
            assert ours == reference
            drafts, right = accepted(trace)
            num_drafts, num_accepted = num_drafts + drafts, num_accepted + right
    if mode != "async":
        assert 0 < num_accepted < num_drafts


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_survive_a_preemption_at_every_step(tiny_llama, mode):
    prompts = random_prompts([13, 6], seed=4)
    params = SEEDED.replace(max_tokens=9)
    reference, _ = run(tiny_llama, prompts, params)
    _, trace = run(tiny_llama, prompts, params, mode, max_num_batched_tokens=12)
    for at in range(1, len(trace)):
        ours, _ = run(tiny_llama, prompts, params, mode, max_num_batched_tokens=12, preempt_at=(at, f"q{at % 2}"))
        assert ours == reference, at


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", ["ngram", "draft model", "async", "async draft model"])
def test_tokens_survive_pressure_and_prefix_hits(tiny_llama, mode, caching):
    prompts = {name: [9] * 8 + tokens for name, tokens in random_prompts([7, 6, 5, 8], seed=7).items()}
    params = GREEDY.replace(max_tokens=20)
    reference, _ = run(tiny_llama, prompts, params, enable_prefix_caching=False)
    ours, trace = run(tiny_llama, prompts, params, mode, num_blocks=11, enable_prefix_caching=caching)
    assert ours == reference
    assert sum(len(record.preempted) for record in trace) > 0
    hits = sum(chunk.num_cached_tokens for record in trace for chunk in record.chunks)
    assert (hits > 0) is caching


@pytest.mark.parametrize("mode", ["function", "async function", "async"])
def test_ends_in_the_middle_of_accepted_drafts(tiny_llama, mode):
    """max_tokens, max_model_len, stop tokens, stop strings: text, tokens, reason and log-probabilities agree."""
    prompt = random_prompts([7])["q0"]
    with make_engine(tiny_llama) as plain:
        plain.add_request(prompt, GREEDY)
        (whole,) = plain.run(progress=False)

    def oracle(token_ids, num_drafts):
        done = len(token_ids) - len(prompt)
        return whole.token_ids[done : done + num_drafts]

    cases = [SamplingParams(max_tokens=n, logprobs=2, ignore_eos=True) for n in (1, 2, 3, 6)]
    cases += [GREEDY.replace(stop_token_ids=[whole.token_ids[n]]) for n in (1, 4)]
    cases += [GREEDY.replace(stop=whole.text[n : n + 4]) for n in (3, 14)]
    cases += [GREEDY.replace(stop=f"w{whole.token_ids[2]}", max_tokens=3)]
    changes = {"proposer": oracle} if "function" in mode else {}
    for max_model_len in (256, 12):
        for params in cases:
            with make_engine(tiny_llama, max_model_len=max_model_len) as plain:
                plain.add_request(prompt, params)
                (expected,) = plain.run(progress=False)
            with make_engine(tiny_llama, mode, max_model_len=max_model_len, **changes) as engine:
                engine.add_request(prompt, params)
                (ours,) = engine.run(progress=False)
                num_texts = "".join(chunk.text for record in engine.trace for chunk in record.chunks)
            assert (ours.token_ids, ours.text, ours.finish_reason) == (
                expected.token_ids,
                expected.text,
                expected.finish_reason,
            )
            if params.logprobs:
                assert [list(row) for row in ours.logprobs] == [list(row) for row in expected.logprobs]
                ours_p, expected_p = ([list(row.values()) for row in out.logprobs] for out in (ours, expected))
                np.testing.assert_allclose(ours_p, expected_p, atol=1e-4)
            if not params.stop:
                assert num_texts == expected.text


def test_every_verified_row_has_the_logits_of_the_plain_model(smollm2):
    """Rows of accepted drafts, on SmolLM2, by n-gram lookup in a text that repeats."""
    tokens = smollm2.tokenizer.encode("red, green, blue, white, black, " * 3 + "red, green")
    config = EngineConfig(num_blocks=32, num_speculative_tokens=4, speculative={"prompt_lookup_min": 2})
    rows, logits = [], np.zeros(0)
    with Engine(smollm2, config) as engine:
        engine.add_request(tokens, SamplingParams(max_tokens=12))
        while (phase := engine.step_into(layers=False)) is not None:
            if not isinstance(phase, tuple):
                (chunk,) = phase.chunks
                start = chunk.end - 1 - len(chunk.drafts)
                rows += [(start + row, logits[row]) for row in range(len(chunk.accepted))]
            elif phase[0] == "forward":
                logits = np.array(phase[1])
        assert accepted(engine.trace)[1] >= 4
        whole = tokens + list(engine.output("r0").token_ids)
    reference = plain_logits(smollm2.model, whole)
    assert [position for position, _ in rows] == list(range(len(tokens) - 1, len(whole) - 1))
    worst = max(float(np.abs(row - reference[position]).max()) for position, row in rows)
    assert worst < 1e-3


def test_drafts_drawn_by_a_draft_model_keep_the_distribution(tiny_llama):
    """Two tokens of 500 requests that differ in nothing but their random numbers, against mlx-lm's probabilities."""
    prompt, count = random_prompts([11])["q0"], 500
    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=1.5, top_k=3)

    def probabilities(tokens):
        logits = plain_logits(tiny_llama.model, tokens)[-1] / params.temperature
        best = np.argsort(-logits)[: params.top_k]
        weights = np.exp(logits[best] - logits[best].max())
        return dict(zip(best.tolist(), (weights / weights.sum()).tolist(), strict=True))

    expected = {
        (first, second): count * p * q
        for first, p in probabilities(prompt).items()
        for second, q in probabilities([*prompt, first]).items()
    }
    speculative = {"method": "draft_model", "num_layers": 1, "draft_sample_method": "probabilistic"}
    settings = {"num_speculative_tokens": 2, "speculative": speculative, "num_blocks": 1024}
    with make_engine(tiny_llama, max_num_seqs=128, max_num_batched_tokens=512, **settings) as engine:
        for _ in range(count):
            engine.add_request(prompt, params)
        texts = [output.token_ids for output in engine.run(progress=False)]
        drafts, right = accepted(engine.trace)
    assert 0 < right < drafts
    assert set(texts) <= set(expected)
    statistic = sum((texts.count(text) - number) ** 2 / number for text, number in expected.items())
    assert statistic < 8 + 5 * np.sqrt(16)


# -- planted faults -------------------------------------------------------------------------------------------


def wrong(token_ids, num_drafts):
    return [119] * num_drafts


def test_publishing_before_acceptance_is_caught(tiny_llama, monkeypatch):
    """Another request asks for the very text that the first one's rejected drafts would have made."""
    first = random_prompts([14])["q0"]

    def tokens_of_second():
        with make_engine(tiny_llama, "function", proposer=wrong) as engine:
            engine.add_request(first, GREEDY.replace(max_tokens=6))
            (output,) = engine.run(progress=False)
            second = [*first, output.token_ids[0], 119, 119, 119, 5]
            engine.add_request(second, GREEDY)
            hits = 0
            while record := engine.step():
                hits += sum(chunk.num_cached_tokens for chunk in record.chunks)
            return engine.output("r1").token_ids, hits, second

    right, hits, second = tokens_of_second()
    assert hits == 8
    assert right == run(tiny_llama, {"q": second}, GREEDY)[0]["q"]

    advance = Scheduler._advance

    def publish_drafts(self, chunk):
        chunk.request.token_ids += chunk.drafts
        self.kv_cache.cache_full_blocks(chunk.request, chunk.start + chunk.num_tokens)
        del chunk.request.token_ids[len(chunk.request.token_ids) - len(chunk.drafts) :]
        advance(self, chunk)

    monkeypatch.setattr(Scheduler, "_advance", publish_drafts)
    faulty, hits, _ = tokens_of_second()
    assert hits == 16 and faulty != right


@pytest.mark.parametrize(("fault", "by"), [("keep KV of a rejected row", 1), ("off by one in the roll-back", -1)])
def test_a_wrong_roll_back_is_caught(tiny_llama, monkeypatch, fault, by):
    prompts = random_prompts([9])
    update = Scheduler.update

    def faulty(self, batch, sampled, **options):
        done = update(self, batch, sampled, **options)
        for chunk in batch.chunks:
            if len(chunk.drafts) > chunk.num_accepted and chunk.request.status == "running":
                chunk.request.num_kv_computed += by
        return done

    run(tiny_llama, prompts, GREEDY, "function")
    monkeypatch.setattr(Scheduler, "update", faulty)
    with pytest.raises(AssertionError):
        ours, _ = run(tiny_llama, prompts, GREEDY, "function")
        assert ours == run(tiny_llama, prompts, GREEDY)[0]


# -- memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "async draft model"])
def test_kv_is_written_in_place_with_two_steps_in_flight(tiny_llama, mode):
    """The pool is large beside everything else, so that a copy of one layer's keys would show."""
    with make_engine(tiny_llama, mode, num_blocks=4096) as engine:
        engine.add_request([5, 6, 7] * 10, GREEDY)
        engine.step()
        layer = engine.runner.kv_cache.layers[0].k_cache.nbytes
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        engine.run(progress=False)
        assert mx.get_peak_memory() - before < layer


# -- what does not work together, and is said before anything happens ---------------------------------------------


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, {"proposer": wrong}, "proposer needs num_speculative_tokens"),
        ({"num_speculative_tokens": 2}, {"proposer": 5}, "must be a function"),
        ({"num_speculative_tokens": 2, "speculative": {"method": "custom"}}, {}, "needs a function"),
        ({"num_speculative_tokens": 2, "speculative": {"method": "draft_model"}}, {}, "needs a model"),
        ({"num_speculative_tokens": 2, "speculative": {"method": "eagle"}}, {}, "no EAGLE head"),
        ({"num_speculative_tokens": 2, "speculative": {"method": "ngram"}}, {"proposer": wrong}, "proposer is for"),
        (
            {"num_speculative_tokens": 2, "speculative": {"method": "draft_model", "num_layers": 9}},
            {},
            r'speculative\["num_layers"\] must be from 1 to 1',
        ),
        (
            {"num_speculative_tokens": 2, "speculative": {"adaptive": True}, "async_scheduling": True},
            {},
            "adaptive.*does not work with async_scheduling=True",
        ),
        (
            {"async_scheduling": True, "shadow_metal": {"layer": 0}},
            {},
            "shadow_metal=.*with async_scheduling=True: it copies",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(tiny_llama, config, options, message):
    with pytest.raises(ValueError, match=message):
        Engine(tiny_llama, EngineConfig(**SETTINGS, **config), **options)


def test_asynchronous_steps_have_no_phases(tiny_llama):
    with make_engine(tiny_llama, "async") as engine:
        engine.add_request([5, 6, 7], GREEDY)
        with pytest.raises(ValueError, match="step_into"):
            engine.step_into()
        assert len(engine.run(progress=False)) == 1


@pytest.mark.parametrize("mode", ["ngram", "async ngram"])
def test_a_policy_decides_on_steps_ahead_too(tiny_llama, mode):
    prompts = random_prompts([37, 5, 21, 18])
    reference, _ = run(tiny_llama, prompts, GREEDY)
    with make_engine(tiny_llama, mode, policy=ShortestRemainingFirst(), max_num_seqs=2) as engine:
        for name, tokens in prompts.items():
            engine.add_request(tokens, GREEDY, request_id=name)
        engine.run(progress=False)
        assert {name: engine.output(name).token_ids for name in prompts} == reference
        forked = engine.fork(2, max_num_batched_tokens=12)
    tokens = {name: () for name in prompts}
    for record in forked:
        for chunk in record.chunks:
            tokens[chunk.request_id] += chunk.accepted
    assert tokens == reference


def test_a_layer_of_an_asynchronous_step_is_captured(tiny_llama):
    with make_engine(tiny_llama, "async") as engine:
        engine.add_request([5, 6, 7], GREEDY)
        engine.step()
        capture = engine.capture(layer=1)
        engine.step()
        engine.step()
        assert list(capture.request_ids) == ["r0"] and capture.q.shape[0] == 1
        assert engine.trace[capture.step].chunks[0].num_tokens == 1


# -- the rest of the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ngram", "async", "async ngram"])
def test_a_failed_forward_pass_ends_its_requests_and_no_others(tiny_llama, mode):
    prompts = random_prompts([9, 8])
    reference, _ = run(tiny_llama, prompts, GREEDY)
    with make_engine(tiny_llama, mode) as engine:
        engine.add_request(prompts["q0"], GREEDY, request_id="lost")
        engine.step()
        forward = engine.runner.forward

        def fail(packed):
            engine.runner.forward = forward
            raise RuntimeError("out of memory")

        engine.runner.forward = fail
        (lost,) = engine.run(progress=False)
        assert lost.finish_reason == "error" and "out of memory" in lost.error
        assert engine.scheduler.num_free_blocks == SETTINGS["num_blocks"] - 1
        for name, tokens in prompts.items():
            engine.add_request(tokens, GREEDY, request_id=name)
        assert {output.request_id: output.token_ids for output in engine.run(progress=False)} == reference
        assert_laws(engine.scheduler)


@pytest.mark.parametrize("mode", ["ngram", "async", "async ngram"])
def test_a_trace_is_saved_and_loaded_and_an_abort_takes_effect(tiny_llama, mode, tmp_path):
    prompts = random_prompts([9, 8])
    with make_engine(tiny_llama, mode) as engine:
        for name, tokens in prompts.items():
            engine.add_request(tokens, GREEDY, request_id=name)
        for _ in range(3):
            engine.step()
        engine.abort("q0")
        engine.run(progress=False)
        assert engine.output("q0").finish_reason == "abort" and len(engine.output("q1").token_ids) == 16
        engine.trace.save(tmp_path / "trace.jsonl")
        assert list(Trace.load(tmp_path / "trace.jsonl")) == list(engine.trace)
        tokens = [token for record in engine.trace for chunk in record.chunks for token in chunk.accepted]
        assert len(tokens) == sum(len(engine.output(name).token_ids) for name in prompts)
        metrics = engine.trace.metrics()
        assert metrics.speculation.num_tokens == len(tokens) == metrics.summary.num_output_tokens
        drafts, right = accepted(engine.trace)
        assert metrics.speculation.num_accepted == right and ("drafts:" in repr(metrics)) is (drafts > 0)


def test_a_proposer_that_raises_costs_only_its_drafts(tiny_llama):
    def broken(token_ids, num_drafts):
        raise RuntimeError("no drafts today")

    prompts = random_prompts([9])
    reference, _ = run(tiny_llama, prompts, GREEDY)
    ours, trace = run(tiny_llama, prompts, GREEDY, "function", proposer=broken)
    assert ours == reference and accepted(trace) == (0, 0)
    with make_engine(tiny_llama, "draft model") as engine:
        engine._step.speculator.proposer.runner.forward = broken
        engine.add_request(prompts["q0"], GREEDY)
        assert engine.run(progress=False)[0].token_ids == reference["q0"]


def test_blocks_are_hashed_by_known_tokens_alone(tiny_llama, monkeypatch):
    """Whenever blocks are published, their tokens are the request's."""
    cache_full_blocks, seen = CacheGroups.cache_full_blocks, []

    def checked(self, request, num_computed):
        cache_full_blocks(self, request, num_computed)
        (num_cached_blocks,) = request.num_cached_blocks
        assert num_cached_blocks * self.block_size <= len(request.token_ids)
        seen.append(num_cached_blocks)

    monkeypatch.setattr(CacheGroups, "cache_full_blocks", checked)
    run(tiny_llama, random_prompts([9, 30]), GREEDY, "function")
    assert max(seen) >= 5
