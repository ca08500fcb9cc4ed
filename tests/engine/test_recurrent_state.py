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
from workbench.models.state_cache import StateLayerCache, StateSlots, StateStep, find_mixers

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
    settings |= {"max_num_batched_tokens": max(chunk, 6), "long_prefill_token_threshold": chunk}
    return Engine(loaded, EngineConfig(**({"enable_prefix_caching": False} | settings)))


def outputs(engine, requests):
    for name, tokens in requests.items():
        engine.add_request(tokens, PARAMS, request_id=name)
    return {output.request_id: list(output.token_ids) for output in engine.run(progress=False)}


@pytest.mark.repeats(step=3)
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


# -- slots ----------------------------------------------------------------------------------------------------


def test_slots_come_back(models, monkeypatch):
    """From requests that finish, are aborted, fail, or lose their blocks."""
    with engine_for(models("lfm2"), max_num_seqs=2, num_blocks=30) as engine:
        slots = engine.runner.kv_cache._slots[0]
        for name, tokens in random_prompts([9, 8, 7, 6, 5, 4], VOCAB_SIZE).items():
            engine.add_request(tokens, PARAMS, request_id=name)
        engine.step()
        assert slots.num_free == 0
        engine.abort("r0")
        forward = ModelRunner.forward
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "forward", lambda self, packed: 1 / 0)
            engine.step()
        assert forward is ModelRunner.forward
        finished = engine.run(progress=False)
        reasons = {output.request_id: output.finish_reason for output in finished}
        assert reasons["r0"] == "abort" and "error" in reasons.values() and "length" in reasons.values()
        engine.add_request([1, 2, 3], PARAMS)
        engine.step()
        assert slots.num_free == 1


def test_random_histories_of_slots():
    rng = np.random.default_rng(0)
    slots, held = StateSlots(6), {}
    for _ in range(500):
        for block in [block for block in held if rng.random() < 0.2]:
            del held[block]
        while len(held) < 6 and rng.random() < 0.7:
            held[int(rng.choice([b for b in range(1, 40) if b not in held]))] = None
        blocks = [block for block in held if rng.random() < 0.6]
        for block, slot in zip(blocks, slots.place(blocks, list(held)).tolist(), strict=True):
            assert held[block] in (None, slot)
            held[block] = slot
        given = [slot for slot in held.values() if slot is not None]
        assert len(set(given)) == len(given) and slots.num_free >= 6 - len(held)


def test_memory_for_states_is_that_of_running_requests(models):
    with engine_for(models("mamba"), max_num_seqs=5) as engine:
        assert {array.shape[0] for state in engine.runner.kv_cache.states for array in state.arrays} == {5}
        facts = engine.runner.describe()
        assert facts["state_bytes_per_request"] * 5 == engine.runner.kv_cache.nbytes
        assert engine.runner.bytes_per_block == 0 and facts["num_recurrent_layers"] == 4


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
            {"num_speculative_tokens": 2},
            "num_speculative_tokens=2 .* recurrent layers.*num_speculative_tokens to 0",
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


def test_prefix_caching_is_turned_off_and_says_so(models, caplog):
    with (
        caplog.at_level(logging.WARNING, "workbench"),
        engine_for(models("lfm2"), enable_prefix_caching=True) as engine,
    ):
        assert not engine.config.enable_prefix_caching and not engine.trace.config["enable_prefix_caching"]
    assert "enable_prefix_caching becomes False" in caplog.text


# -- planted faults -------------------------------------------------------------------------------------------


def is_noticed(models, architecture="lfm2"):
    """Whether a log-probability differs from the plain model's for the same tokens."""
    loaded, requests = models(architecture), random_prompts([29, 13, 17, 11, 9], VOCAB_SIZE)
    worst = 0.0
    with engine_for(loaded, 7, max_num_seqs=2) as engine:
        for name, tokens in requests.items():
            engine.add_request(tokens, PARAMS, request_id=name, logprobs=1)
        for output in engine.run(progress=False):
            prompt, chosen = requests[output.request_id], list(output.token_ids)
            logits = loaded.model(mx.array([prompt + chosen]), cache=make_prompt_cache(loaded.model))[0]
            plain = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[len(prompt) - 1 :]
            for row, token, given in zip(plain, chosen, output.logprobs):
                worst = max(worst, abs(row[token] - given[token]))
    return worst > 1e-3


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("architecture", KINDS)
def test_nothing_is_noticed_without_a_fault(models, architecture):
    assert not is_noticed(models, architecture)


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("architecture", KINDS)
def test_a_neighbours_state_is_noticed(models, monkeypatch, architecture):
    place = StateSlots.place
    rng = np.random.default_rng(0)
    monkeypatch.setattr(StateSlots, "place", lambda self, *args: place(self, *args)[:: rng.choice([1, -1])])
    assert is_noticed(models, architecture)


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("architecture", KINDS)
def test_a_state_that_is_not_reset_is_noticed(models, monkeypatch, architecture):
    made = StateStep.__init__

    def without_beginnings(self, *args):
        made(self, *args)
        self.chunks = [(start, stop, slot, False) for start, stop, slot, _ in self.chunks]

    monkeypatch.setattr(StateStep, "__init__", without_beginnings)
    assert is_noticed(models, architecture)


@pytest.mark.parametrize("architecture", ["lfm2", "mamba", "mamba2", "qwen3_next"])
def test_a_convolution_that_is_off_by_one_is_noticed(models, monkeypatch, architecture):
    call = StateLayerCache._call

    def late(self, mixer, args, kwargs, part, states, slots):
        moved = [None if state is None else mx.roll(state, 1, axis=1) for state in states[:1]]
        return call(self, mixer, args, kwargs, part, [*moved, *states[1:]], slots)

    monkeypatch.setattr(StateLayerCache, "_call", late)
    assert is_noticed(models, architecture)
