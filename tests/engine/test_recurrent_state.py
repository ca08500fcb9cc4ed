"""Models with recurrent layers in the engine: every request has its state, and the tokens are mlx-lm's."""

import logging

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from plain_model import greedy, random_prompts
from tiny_models import RECURRENT, VOCAB_SIZE, tiny_loaded_model, tiny_model

from workbench import Engine, EngineConfig, SamplingParams
from workbench.engine.model_runner import ModelRunner
from workbench.models.mixers import find_mixers
from workbench.models.state_cache import State, StateBatch, StateLayerCache, States, StateStep

pytestmark = pytest.mark.usefixtures("no_compilation")
NUM_OUTPUT = 10
PARAMS = SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True)
LENGTHS = (29, 3, 41, 17, 1)
KINDS = ("lfm2", "mamba", "mamba2", "qwen3_next", "recurrent_gemma", "rwkv7")
"""One architecture for each kind of mixer."""


@pytest.fixture(scope="module")
def models():
    made = {}

    def model(architecture):
        if architecture not in made:
            loaded = tiny_loaded_model(architecture)
            greedy(loaded.model, [1, 2], 1)  # makes arrays that are not parameters, on this thread
            made[architecture] = loaded
        return made[architecture]

    return model


def engine_for(loaded, chunk=64, **changes):
    settings = {"block_size": 4, "num_blocks": 90, "max_model_len": 100, "attention_backend": "cpu", **changes}
    settings |= {"max_num_batched_tokens": max(chunk, 8), "long_prefill_token_threshold": chunk}
    proposer = settings.pop("proposer", None)
    return Engine(loaded, EngineConfig(**({"enable_prefix_caching": False} | settings)), proposer=proposer)


def outputs(engine, requests):
    for name, tokens in requests.items():
        engine.add_request(tokens, PARAMS, request_id=name)
    return {output.request_id: list(output.token_ids) for output in engine.run(progress=False)}


@pytest.mark.repeats(step=5)
@pytest.mark.parametrize("architecture", RECURRENT)
def test_tokens_equal_the_plain_models(models, architecture):
    loaded, requests = models(architecture), random_prompts(LENGTHS, VOCAB_SIZE)
    expected = {name: greedy(loaded.model, tokens, NUM_OUTPUT) for name, tokens in requests.items()}
    for chunk in (7, 64):
        with engine_for(loaded, chunk) as engine:
            assert outputs(engine, requests) == expected
            assert any(len({chunk.arm for chunk in record.chunks}) > 1 for record in engine.trace), (
                "no step mixes chunks and decodes"
            )


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("architecture", KINDS)
def test_chunks_of_one_token(models, architecture):
    loaded, requests = models(architecture), random_prompts([13, 2, 9], VOCAB_SIZE)
    with engine_for(loaded, 1) as engine:
        assert outputs(engine, requests) == {
            name: greedy(loaded.model, tokens, NUM_OUTPUT) for name, tokens in requests.items()
        }


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("architecture", KINDS)
def test_tokens_survive_a_preemption_at_every_step(models, architecture):
    loaded, requests = models(architecture), random_prompts([11, 5], VOCAB_SIZE)
    expected = {name: greedy(loaded.model, tokens, NUM_OUTPUT) for name, tokens in requests.items()}
    preempted, at = 0, 1
    while True:
        with engine_for(loaded, 7) as engine:
            for name, tokens in requests.items():
                engine.add_request(tokens, PARAMS, request_id=name)
            for _ in range(at):
                last = engine.step()
            if last is None:
                break
            for victim in list(engine.scheduler.running)[at % 2 :][:1]:
                engine.scheduler._preempt(victim)
                preempted += 1
            assert {output.request_id: list(output.token_ids) for output in engine.run(progress=False)} == expected
        at += 1
    assert preempted >= 8


def test_tokens_under_pressure_and_with_steps_ahead(models):
    loaded, requests = models("falcon_h1"), random_prompts([15, 24, 13, 26], VOCAB_SIZE)
    expected = {name: greedy(loaded.model, tokens, NUM_OUTPUT) for name, tokens in requests.items()}
    with engine_for(loaded, num_blocks=23) as engine:
        assert outputs(engine, requests) == expected
        assert sum(len(record.preempted) for record in engine.trace) > 0
    with engine_for(loaded, async_scheduling=True) as engine:
        assert outputs(engine, requests) == expected


def test_a_fork_replays_the_blocks_of_every_group(models):
    with engine_for(models("qwen3_next"), 7) as engine:
        outputs(engine, random_prompts(LENGTHS, VOCAB_SIZE))
        forked = engine.fork()
        assert len(forked) == len(engine.trace) > 10
        assert len(engine.trace[3].block_tables_by_group["r0"]) == 4
        for ours, theirs in zip(engine.trace, forked, strict=True):
            assert ours.block_tables_by_group == theirs.block_tables_by_group
            assert ours.free_blocks_end == theirs.free_blocks_end


# -- prefix caching and drafts ------------------------------------------------------------------------------------


def prompts_that_share():
    """Prompts of which five begin alike, two of them are the same, and two end with the last shared token's block."""
    begin = random_prompts([33], VOCAB_SIZE)["r0"]
    ends = random_prompts([7, 1, 9, 30, 13], VOCAB_SIZE, seed=2)
    prompts = {name: begin + end for name, end in ends.items()}
    return {**prompts, "r4": ends["r4"], "again": prompts["r0"], "short": begin[:32], "middle": begin[:20] + ends["r3"]}


def half_right(expected, prompts):
    """A proposer that knows what comes, and is wrong in every third place."""
    texts = [prompts[name] + expected[name] for name in prompts]

    def propose(token_ids, num_drafts):
        text = next(text for text in texts if text[: len(token_ids)] == list(token_ids))
        drafts = (text[len(token_ids) :] + [1] * num_drafts)[:num_drafts]
        return [token if (len(token_ids) + i) % 3 else (token + 1) % VOCAB_SIZE for i, token in enumerate(drafts)]

    return propose


def num_cached_tokens(engine):
    return sum(chunk.num_cached_tokens for record in engine.trace for chunk in record.chunks)


WAYS = {
    "caching": {},
    "chunks": {"chunk": 7},
    "dense": {"prefix_cache_retention_interval": "dense"},
    "drafts alone": {"enable_prefix_caching": False, "num_speculative_tokens": 3},
    "drafts": {"num_speculative_tokens": 3},
    "more drafts than a block has tokens": {"num_speculative_tokens": 6, "prefix_cache_retention_interval": "dense"},
    "steps ahead": {"async_scheduling": True, "num_speculative_tokens": 3},
}


@pytest.mark.repeats(step=45)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", RECURRENT)
def test_a_shared_prompt_continues_from_its_state(models, architecture, way):
    loaded, prompts = models(architecture), prompts_that_share()
    expected = {name: greedy(loaded.model, tokens, NUM_OUTPUT) for name, tokens in prompts.items()}
    settings = {"enable_prefix_caching": True, "num_blocks": 250, **WAYS[way]}
    if "num_speculative_tokens" in settings:
        settings["proposer"] = half_right(expected, prompts)
    with engine_for(loaded, **settings) as engine:
        one_by_one: dict = {}
        for name, tokens in prompts.items():
            one_by_one |= outputs(engine, {name: tokens})
        assert one_by_one == expected
        hits = num_cached_tokens(engine)
        together = outputs(engine, {f"{name} again": tokens for name, tokens in prompts.items()})
        assert {name.removesuffix(" again"): tokens for name, tokens in together.items()} == expected
        if settings["enable_prefix_caching"]:  # at least the whole blocks of a prompt that was there before
            assert hits >= 36 and num_cached_tokens(engine) - hits >= 7 * 32
        else:
            assert num_cached_tokens(engine) == 0
        accepted = [len(chunk.accepted) - 1 for record in engine.trace for chunk in record.chunks if chunk.drafts]
        assert not accepted or (max(accepted) > 1 and min(accepted) <= 0)


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("architecture", KINDS)
def test_hits_survive_a_full_pool(models, architecture):
    loaded, prompts = models(architecture), prompts_that_share()
    expected = {name: greedy(loaded.model, tokens, NUM_OUTPUT) for name, tokens in prompts.items()}
    with engine_for(loaded, enable_prefix_caching=True, num_blocks=66, max_num_seqs=3) as engine:
        for turn in "ab":
            made = outputs(engine, {f"{turn}{name}": tokens for name, tokens in prompts.items()})
            assert {name[1:]: tokens for name, tokens in made.items()} == expected
        assert num_cached_tokens(engine) > 0


def test_states_are_kept_for_the_blocks_that_can_be_found(models):
    with engine_for(models("falcon_h1"), enable_prefix_caching=True, num_blocks=60) as engine:
        most = 0
        for name, tokens in random_prompts([31] * 12, VOCAB_SIZE).items():
            outputs(engine, {name: tokens})
            kept = [states._of_block for states in engine.runner.kv_cache._kept.values()]
            cached = engine.scheduler.kv_cache.block_pool.cached_blocks
            most = max(most, *map(len, kept))
        assert most > 4  # one of each request that has ended, as long as its block was not taken
        for states in engine.runner.kv_cache._kept.values():
            assert len(set(states._of_block) - set(cached)) <= 1  # the latest end of a block, until the next step
            assert set(states._of_request) == {"r11"}


def test_caching_is_off_if_its_states_do_not_fit(models, monkeypatch, caplog):
    monkeypatch.setattr("workbench.engine.memory.usable_memory", lambda: 600 * 1024)
    with (
        caplog.at_level(logging.WARNING, "workbench"),
        engine_for(models("mamba"), enable_prefix_caching=True, max_num_seqs=2) as engine,
    ):
        assert not engine.config.enable_prefix_caching and not engine.trace.config["enable_prefix_caching"]
        outputs(engine, random_prompts([5, 9], VOCAB_SIZE))
    assert "enable_prefix_caching becomes False: the recurrent states of num_blocks=90" in caplog.text


def test_random_histories_of_states():
    """A state that was kept for a length is found for that length, and for no other."""
    rng = np.random.default_rng(0)
    states, of_request, of_block = States(), {}, {}
    for _ in range(500):
        running = {name for name in "abcdefgh" if rng.random() < 0.8}
        cached = {block for block in range(1, 30) if rng.random() < 0.7}
        states.forget(running, cached.__contains__)
        of_request = {name: kept for name, kept in of_request.items() if name in running}
        of_block = {block: state for block, state in of_block.items() if block in cached}
        for name in running:
            first = int(rng.integers(1, 50))
            kept = {length: State(StateBatch(), length) for length in range(first, first + rng.integers(1, 4))}
            block = int(rng.integers(1, 30))
            states.keep(name, kept, {first: block})
            of_request[name], of_block[block] = kept, kept[first]
        for name in "abcdefgh":
            for length in range(1, 53):
                assert states.find(name, length, None) is of_request.get(name, {}).get(length)
        for block in range(1, 30):
            assert states.find("none", 4, block) is of_block.get(block)


def test_a_missing_state_is_an_error(models):
    with engine_for(models("lfm2")) as engine:
        engine.add_request([1, 2, 3], PARAMS)
        engine.step()
        for states in engine.runner.kv_cache._kept.values():
            states._of_request.clear()
        (output,) = engine.run(progress=False)
        assert output.finish_reason == "error" and "no recurrent state after its first 3 tokens" in output.error


def test_memory_for_states_is_that_of_running_requests(models):
    with engine_for(models("mamba"), max_num_seqs=5) as engine:
        facts = engine.runner.describe()
        assert engine.runner.bytes_per_block == 0 and facts["num_recurrent_layers"] == 4
        for tokens in random_prompts([5, 9, 7], VOCAB_SIZE).values():
            engine.add_request(tokens, PARAMS)
        engine.step()
        engine.step()
        assert engine.runner.kv_cache.nbytes == 3 * facts["state_bytes_per_request"]


# -- the model ------------------------------------------------------------------------------------------------


def test_mixers_are_found_by_watching():
    model = tiny_model("rwkv7")
    caches = make_prompt_cache(model)
    classes = [type(module) for module in model.modules()]
    with find_mixers(model, caches) as found:
        model(mx.array([[1, 2, 3]]), cache=caches)
    assert found == [[f"model.layers.{i}.attn", f"model.layers.{i}.ffn"] for i in range(4)]
    assert classes == [type(module) for module in model.modules()]


def test_the_model_works_beside_the_engine_and_is_restored(models):
    loaded = models("lfm2")
    classes = [type(module) for module in loaded.model.modules()]
    alone = greedy(loaded.model, [5, 6, 7], NUM_OUTPUT)
    first, second = engine_for(loaded), engine_for(loaded)
    first.add_request([5, 6, 7], PARAMS)
    first.step()
    assert greedy(loaded.model, [5, 6, 7], NUM_OUTPUT) == alone
    first.close()
    assert list(outputs(second, {"a": [5, 6, 7]})["a"]) == alone
    second.close()
    assert classes == [type(module) for module in loaded.model.modules()]


def test_views_of_a_model_without_attention(models):
    with engine_for(models("mamba2")) as engine:
        outputs(engine, random_prompts([5, 9], VOCAB_SIZE))
        assert "mamba2" in repr(engine) and engine._repr_html_()
        assert all(str(record) for record in engine.trace)
        with pytest.raises(ValueError, match="no attention layer"):
            engine.capture(layer=0)


# -- what cannot be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_speculative_tokens": 2, "speculative": {"method": "draft_model", "num_layers": 1}},
            'draft_model.* recurrent layers.*use the method "ngram"',
        ),
        (
            {"max_num_partial_prefills": 2},
            "max_num_partial_prefills=2 .* recurrent layers.*set it to None",
        ),
        ({"kv_cache_groups": [{"kind": "full_attention"}]}, r"kv_cache_groups=.*leave it out"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(models, changes, message):
    with pytest.raises(ValueError, match=message):
        engine_for(models("lfm2"), **changes)


def test_one_block_table_is_refused(models):
    with pytest.raises(ValueError, match=r"recurrent layers.*several ranks"):
        ModelRunner(models("lfm2"), EngineConfig(num_blocks=8))


# -- planted faults -------------------------------------------------------------------------------------------


def is_noticed(models, architecture="lfm2"):
    """Whether a log-probability differs from the plain model's for the same tokens."""
    loaded = models(architecture)
    requests = random_prompts([29, 13, 17, 11, 9], VOCAB_SIZE)
    requests |= {f"{name} again": [*tokens, 5] for name, tokens in requests.items()}
    worst = 0.0
    with engine_for(loaded, 7, max_num_seqs=2, enable_prefix_caching=True, num_blocks=200) as engine:
        for name, tokens in requests.items():
            engine.add_request(tokens, PARAMS, request_id=name, logprobs=1)
        for output in engine.run(progress=False):
            prompt, chosen = requests[output.request_id], list(output.token_ids)
            logits = loaded.model(mx.array([prompt + chosen]), cache=make_prompt_cache(loaded.model))[0]
            plain = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[len(prompt) - 1 :]
            for row, token, given in zip(plain, chosen, output.logprobs):
                worst = max(worst, abs(row[token] - given[token]))
        assert num_cached_tokens(engine) > 60
    return worst > 1e-3


@pytest.mark.repeats(step=6)
@pytest.mark.parametrize("architecture", KINDS)
def test_nothing_is_noticed_without_a_fault(models, architecture):
    assert not is_noticed(models, architecture)


@pytest.mark.repeats(step=6)
@pytest.mark.parametrize("architecture", KINDS)
def test_a_neighbours_state_is_noticed(models, monkeypatch, architecture):
    read = StateLayerCache._read
    monkeypatch.setattr(StateLayerCache, "_read", lambda self, states, place: read(self, states[::-1], place))
    assert is_noticed(models, architecture)


@pytest.mark.repeats(step=6)
@pytest.mark.parametrize("architecture", KINDS)
def test_the_state_of_the_step_before_is_noticed(models, monkeypatch, architecture):
    find, before = States.find, {}

    def stale(self, name, num_tokens, block):
        found = find(self, name, num_tokens, block)
        previous, before[id(self), name] = before.get((id(self), name), found), found
        return previous

    monkeypatch.setattr(States, "find", stale)
    assert is_noticed(models, architecture)


@pytest.mark.repeats(step=6)
@pytest.mark.parametrize("architecture", KINDS)
def test_the_state_of_another_block_is_noticed(models, monkeypatch, architecture):
    """A request with a hit begins with the state of another prompt."""
    find = States.find

    def other(self, name, num_tokens, block):
        blocks = sorted(self._of_block)
        if name not in self._of_request and block in blocks:
            block = blocks[blocks.index(block) - 1]
        return find(self, name, num_tokens, block)

    monkeypatch.setattr(States, "find", other)
    assert is_noticed(models, architecture)


@pytest.mark.repeats(step=6)
@pytest.mark.parametrize("architecture", KINDS)
def test_a_state_that_is_not_reset_is_noticed(models, monkeypatch, architecture):
    made, left = StateStep.__init__, {}

    def without_beginnings(self, metadata, states, *args):
        made(self, metadata, states, *args)
        before = left.get(id(states))
        self.calls = [call._replace(reads=before) if call.reads is None else call for call in self.calls]
        left[id(states)] = [State(self.calls[-1].writes, 0)]

    monkeypatch.setattr(StateStep, "__init__", without_beginnings)
    assert is_noticed(models, architecture)


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("architecture", ["lfm2", "mamba", "mamba2", "qwen3_next"])
def test_a_convolution_that_is_off_by_one_is_noticed(models, monkeypatch, architecture):
    engine_for(models(architecture)).close()  # its preflight, which would refuse the model afterwards
    read = StateLayerCache._read

    def late(self, states, place):
        state = read(self, states, place)
        return mx.roll(state, 1, axis=1) if place == 0 else state

    monkeypatch.setattr(StateLayerCache, "_read", late)
    assert is_noticed(models, architecture)


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("architecture", KINDS)
def test_the_state_after_a_rejected_draft_is_noticed(models, monkeypatch, architecture):
    loaded, prompts = models(architecture), random_prompts([9, 14], VOCAB_SIZE)
    expected = {name: greedy(loaded.model, tokens, NUM_OUTPUT) for name, tokens in prompts.items()}
    keep = States.keep

    def last(self, name, states, blocks):
        keep(self, name, dict.fromkeys(states, states[max(states)]), blocks)

    monkeypatch.setattr(States, "keep", last)
    with engine_for(loaded, num_speculative_tokens=3, proposer=half_right(expected, prompts)) as engine:
        assert outputs(engine, prompts) != expected
