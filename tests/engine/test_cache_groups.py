"""Windowed layers give blocks back: a model with several KV cache groups in the engine."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from plain_model import greedy, random_prompts
from tiny_configurations import VOCAB_SIZE, WINDOW
from tiny_models import tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams
from workbench.engine.cache_groups import _split
from workbench.engine.step import Step

pytestmark = pytest.mark.usefixtures("no_compilation")
LENGTHS = (29, 3, 41, 17, 60)
NUM_OUTPUT = 12
PARAMS = SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True)


@pytest.fixture(scope="module")
def models():
    made = {}

    def model(architecture):
        if architecture not in made:
            made[architecture] = tiny_loaded_model(architecture)
        return made[architecture]

    return model


def engine_for(loaded, chunk=64, **changes):
    """An engine whose null block holds NaN: a row that reads it has no number for logits."""
    settings = {"block_size": 4, "num_blocks": 160, "max_model_len": 120, "attention_backend": "cpu", **changes}
    settings |= {"max_num_batched_tokens": max(chunk, 5), "long_prefill_token_threshold": chunk}
    engine = Engine(loaded, EngineConfig(**settings))
    for layer in engine.runner.kv_cache.layers:
        for cache in (layer.k_cache, layer.v_cache):
            cache[0] = mx.full(cache.shape[1:], mx.nan)
            mx.eval(cache)
    return engine


def outputs(engine, requests):
    for name, tokens in requests.items():
        engine.add_request(tokens, PARAMS, request_id=name)
    return {output.request_id: list(output.token_ids) for output in engine.run(progress=False)}


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("backend", ["cpu", "gather", "dense"])
@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss"])
def test_tokens_equal_the_plain_models(models, architecture, backend, chunk):
    loaded = models(architecture)
    requests = random_prompts(LENGTHS, VOCAB_SIZE)
    with engine_for(loaded, chunk, attention_backend=backend) as engine:
        assert [group.kind for group in engine.runner.groups] == ["sliding_window", "full_attention"]
        ours = outputs(engine, requests)
        holes = [
            record.block_tables_by_group["r4"][0] for record in engine.trace if "r4" in record.block_tables_by_group
        ]
    assert ours == {name: greedy(loaded.model, tokens, NUM_OUTPUT) for name, tokens in requests.items()}
    assert holes[-1][:8].count(0) == 8 and 0 not in holes[-1][-2:]


@pytest.mark.parametrize("architecture", ["gemma4_text", "plamo3"])
def test_windows_beside_keys_that_are_shared_and_masks_that_are_wider(models, architecture):
    loaded = models(architecture)
    greedy(loaded.model, [1, 2], 1)  # makes arrays that are not parameters, on this thread
    with engine_for(loaded, num_blocks=200) as engine:
        assert engine.runner.mode == "kernel" and len(engine.runner.groups) > 1
        requests = random_prompts(LENGTHS, VOCAB_SIZE)
        ours = outputs(engine, requests)
    with engine_for(loaded, kv_cache_groups=[{"kind": "full_attention"}]) as engine:
        assert ours == outputs(engine, requests)


def test_tokens_survive_a_preemption_at_every_step(models):
    loaded = models("gemma3_text")
    requests = random_prompts([21, 9], VOCAB_SIZE)
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
    assert preempted > 10


def test_tokens_survive_pressure_and_prefix_hits(models):
    loaded = models("gemma3_text")
    requests = random_prompts([15, 24, 13, 26], VOCAB_SIZE)
    shared = random_prompts([24], VOCAB_SIZE, seed=9)["r0"]
    requests |= {f"s{i}": shared + tail for i, tail in enumerate([[5], [7, 8], [5, 9, 11]])}
    expected = {name: greedy(loaded.model, tokens, NUM_OUTPUT) for name, tokens in requests.items()}
    with engine_for(loaded, num_blocks=28, max_num_batched_tokens=40) as engine:
        assert outputs(engine, requests) == expected
        assert sum(len(record.preempted) for record in engine.trace) > 0
        cached = outputs(engine, {f"again {name}": tokens for name, tokens in requests.items()})
        assert {name.removeprefix("again "): tokens for name, tokens in cached.items()} == expected
        assert sum(chunk.num_cached_tokens for record in engine.trace for chunk in record.chunks) > 40


@pytest.mark.parametrize("changes", [{"async_scheduling": True}, {"num_speculative_tokens": 3}])
def test_tokens_with_steps_ahead(models, changes):
    loaded = models("gpt_oss")
    requests = random_prompts([29, 3, 41], VOCAB_SIZE)
    requests["r3"] = [5, 6, 7, 8] * 9
    with engine_for(loaded, **changes) as engine:
        assert len(engine.runner.groups) == 2
        assert outputs(engine, requests) == {
            name: greedy(loaded.model, tokens, NUM_OUTPUT) for name, tokens in requests.items()
        }


def test_a_fork_replays_the_blocks_of_every_group(models):
    with engine_for(models("gemma3_text"), 7, num_blocks=40) as engine:
        outputs(engine, random_prompts(LENGTHS, VOCAB_SIZE))
        forked = engine.fork()
        assert len(forked) == len(engine.trace) > 20
        for ours, theirs in zip(engine.trace, forked, strict=True):
            assert ours.block_tables_by_group == theirs.block_tables_by_group
            assert (ours.free_blocks, ours.free_blocks_end) == (theirs.free_blocks, theirs.free_blocks_end)


# -- the pool -------------------------------------------------------------------------------------------------


def peak_blocks(engine, num_tokens):
    usable = engine.scheduler.num_free_blocks
    engine.add_request(random_prompts([num_tokens], VOCAB_SIZE, seed=3)["r0"], max_tokens=1, ignore_eos=True)
    engine.run(progress=False)
    assert engine.trace[-1].free_blocks_end == usable
    return usable - min(record.free_blocks for record in engine.trace)


def test_a_windowed_layer_holds_what_its_window_and_a_chunk_need():
    """Over 8,000 tokens; 5 of 6 layers have windows: 5 groups of windows and one of full attention."""
    num_tokens, chunk, size = 8000, 320, 16
    loaded = tiny_loaded_model(
        "gemma3_text", num_hidden_layers=6, sliding_window_pattern=6, max_position_embeddings=8192
    )
    loaded = dataclasses.replace(loaded, max_position=8192)
    settings = {"block_size": size, "num_blocks": 700, "max_model_len": 8192, "max_num_batched_tokens": chunk}
    settings["attention_backend"] = "cpu"
    with Engine(loaded, EngineConfig(**settings)) as engine:
        kinds = [group.kind for group in engine.runner.groups]
        assert kinds == ["sliding_window"] * 5 + ["full_attention"]
        peak, block_bytes = peak_blocks(engine, num_tokens), engine.runner.bytes_per_block
    full = -(-num_tokens // size)
    # A chunk of 320 tokens begins and ends on block boundaries here; the window adds 5 tokens, in one block.
    window = chunk // size + -(-(WINDOW - 1) // size)
    assert peak == full + 5 * window
    with Engine(loaded, EngineConfig(kv_cache_groups=[{"kind": "full_attention"}], **settings)) as engine:
        assert peak_blocks(engine, num_tokens) == full
        assert engine.runner.bytes_per_block == 6 * block_bytes


def test_layers_of_different_groups_share_memory(models):
    with engine_for(models("gemma3_text")) as engine:
        layers = engine.runner.kv_cache.layers
        assert [layer.group for layer in layers] == [0, 1, 0, 1]
        assert layers[0].k_cache is layers[1].k_cache and layers[2].k_cache is layers[3].k_cache
        assert layers[0].k_cache is not layers[2].k_cache
        assert engine.runner.bytes_per_block * 160 == sum(layers[i].k_cache.nbytes * 2 for i in (0, 2))


@pytest.mark.parametrize(
    ("kinds", "sizes"),
    [
        ("swwwwf", [1] * 6),  # as the comment in vLLM: the kind with the fewest layers sets the size
        ("ffwww", [3, 2]),  # 3 < 1.5 * 2 is false
        ("f" * 12 + "w" * 13, [12, 13]),
        ("w" * 15 + "f" * 3, [3] * 6),
        ("ffffffff", [8]),
    ],
)
def test_sizes_of_groups(kinds, sizes):
    groups = _split([(kind, 0) for kind in kinds])
    if kinds == "ffwww":
        sizes = [2, 2, 1]  # (f, f), (w, w), (w)
    assert sorted(len(members) for _, members in groups) == sorted(sizes)
    assert sorted(index for _, members in groups for index in members) == list(range(len(kinds)))


# -- what cannot be -------------------------------------------------------------------------------------------


def test_groups_of_another_model_are_refused(models):
    groups = [{"kind": "sliding_window", "sliding_window": 5}, {"kind": "full_attention"}]
    with pytest.raises(ValueError, match=r"kv_cache_groups.*not the groups of this model.*leave it out"):
        engine_for(models("gemma3_text"), kv_cache_groups=groups)
    own = [{"kind": "sliding_window", "sliding_window": WINDOW}, {"kind": "full_attention"}]
    engine_for(models("gemma3_text"), kv_cache_groups=own).close()


def test_limits_on_partial_prefills_keep_one_table(models):
    with engine_for(models("gemma3_text"), max_num_partial_prefills=2) as engine:
        assert engine.config.kv_cache_groups is None and len(engine.runner.groups) == 1


def test_a_batch_with_one_table_is_refused(models):
    with engine_for(models("gemma3_text")) as engine:
        engine.add_request([1, 2, 3], PARAMS)
        engine.step_into()
        _, packed = engine.step_into()
        with pytest.raises(ValueError, match="tables of 1 KV cache groups, the model has 2"):
            engine.runner.forward(dataclasses.replace(packed, by_group=()))


# -- planted faults -------------------------------------------------------------------------------------------


def differs(models, monkeypatch, change):
    loaded, requests = models("gemma3_text"), random_prompts([41, 60], VOCAB_SIZE)
    prepare = Step.prepare
    monkeypatch.setattr(Step, "prepare", lambda self, *args: change(prepare(self, *args)))
    with engine_for(loaded, 7) as engine:
        ours = outputs(engine, requests)
    return any(tokens != greedy(loaded.model, requests[name], NUM_OUTPUT) for name, tokens in ours.items())


def with_tables(packed, change, group=0):
    by_group = list(packed.by_group)
    by_group[group] = dataclasses.replace(by_group[group], block_table=change(by_group[group].block_table.copy()))
    return dataclasses.replace(packed, by_group=tuple(by_group))


def test_the_comparison_accepts_what_is_right(models, monkeypatch):
    assert not differs(models, monkeypatch, lambda packed: with_tables(packed, lambda table: table))


@pytest.mark.parametrize("group", [0, 1])
def test_the_comparison_catches_a_neighbours_blocks(models, monkeypatch, group):
    assert differs(models, monkeypatch, lambda packed: with_tables(packed, lambda table: table[::-1], group))


def test_the_comparison_catches_a_block_given_back_too_early(models, monkeypatch):
    def empty_first_held(table):
        first = (table != 0).argmax(axis=1)
        table[np.arange(len(table)), first] = 0
        return table

    def change(packed):
        return with_tables(packed, empty_first_held) if packed.positions.min() > 3 * WINDOW else packed

    assert differs(models, monkeypatch, change)


def test_the_comparison_catches_a_window_that_is_off_by_one(models):
    loaded, requests = models("gemma3_text"), random_prompts([41, 60], VOCAB_SIZE)
    with engine_for(loaded, 7) as engine:
        for layer in engine.runner.kv_cache.layers:
            if layer.layer.window > 0:
                layer.layer = layer.layer.with_window(layer.layer.window - 1)
        ours = outputs(engine, requests)
    assert any(tokens != greedy(loaded.model, requests[name], NUM_OUTPUT) for name, tokens in ours.items())
