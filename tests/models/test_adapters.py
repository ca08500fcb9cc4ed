"""Adapters (LoRA) against mlx-lm, alone and mixed in a batch."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_adapters
from random_adapters import linear_sizes, make_adapter
from tiny_models import tiny_loaded_model, tiny_model

from workbench import Engine, EngineConfig, SamplingParams
from workbench.models.packed.pack_model import pack_model, why_not_packed

ARCHITECTURES = [
    "granitemoehybrid",  # with recurrent layers
    *("deepseek_v2", "deepseek_v3", "gemma2"),  # values of another size, latents, attention that the model writes out
    *("llama", "qwen2", "gemma3_text", "starcoder2", "phi3", "olmo2", "cohere2", "qwen3_moe"),  # our attention
]
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
NAMES = ["a", "", "b", "c", "a", ""]
PROMPTS = [[5, 9, 3 + index, 7, 11, 2, 8] for index in range(len(NAMES))]


def sizes_of(model):
    """The linear layers that an adapter may change: those of recurrent layers it may not."""
    return {path: size for path, size in linear_sizes(model).items() if ".mamba." not in path}


def made(model, folder):
    """Adapters a, b and c for a model: a and c as mlx-lm's files, b as PEFT's; and b as mlx-lm's, to compare with."""
    sizes = sizes_of(model)
    for seed, (name, form) in enumerate((("a", "mlx-lm"), ("b", "PEFT"), ("c", "mlx-lm"))):
        make_adapter(folder / name, sizes, seed=seed, form=form, rank=2 + seed)
    make_adapter(folder / "mlx-b", sizes, seed=1, rank=3)


def engine_for(loaded, folder, **fields):
    engine = Engine(loaded, EngineConfig(num_blocks=64, max_num_batched_tokens=16, max_num_seqs=8, **fields))
    for name in "abc":
        engine.add_adapter(name, folder / name)
    return engine


def generate(engine, names, prompts=PROMPTS, sampling=GREEDY):
    ids = [engine.add_request(prompt, sampling, adapter=name) for prompt, name in zip(prompts, names)]
    engine.run(progress=False)
    return [list(engine.output(request_id).token_ids) for request_id in ids]


def by_mlx_lm(model, prompt):
    model.eval()
    steps = generate_step(mx.array(prompt), model, max_tokens=GREEDY.max_tokens)
    return [token for token, _ in steps]


def expected(architecture, folder):
    tokens = []
    for name, prompt in zip(NAMES, PROMPTS):
        model = tiny_model(architecture)
        if name:
            load_adapters(model, str(folder / ("mlx-b" if name == "b" else name)))
        tokens.append(by_mlx_lm(model, prompt))
    return tokens


@pytest.mark.repeats(step=6)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_equal_mlx_lm_alone_and_mixed(architecture, tmp_path):
    loaded = tiny_loaded_model(architecture)
    made(loaded.model, tmp_path)
    wanted = expected(architecture, tmp_path)
    plain = Engine(tiny_loaded_model(architecture), EngineConfig(num_blocks=64, max_num_batched_tokens=16))
    without = generate(plain, [""] * len(NAMES))
    plain.close()
    assert [tokens for tokens, name in zip(wanted, NAMES) if name] != [
        tokens for tokens, name in zip(without, NAMES) if name
    ]
    with engine_for(loaded, tmp_path, max_loras=3) as engine:
        assert generate(engine, NAMES) == wanted
        for name, prompt, tokens in zip(NAMES[:4], PROMPTS, wanted):
            assert generate(engine, [name], [prompt]) == [tokens]
        swapped = [{"a": "b", "b": "a"}.get(name, name) for name in NAMES]
        assert generate(engine, swapped) != wanted  # the control
        assert [info.adapter for info in engine.trace.requests.values()][: len(NAMES)] == NAMES
    with engine_for(tiny_loaded_model(architecture), tmp_path, max_loras=1) as engine:
        assert generate(engine, NAMES) == wanted  # one after another, each in the place of the last
        assert len(engine.runner.adapters.loaded) == 1
        assert any(reason.kind == "adapter" for record in engine.trace for reason in record.not_scheduled.values())
        assert not engine.trace.check()


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize(
    "fields",
    [
        {"async_scheduling": True},
        {"num_speculative_tokens": 2},
        {"num_speculative_tokens": 3, "async_scheduling": True},
        {"enable_prefix_caching": False},
        {"attention_backend": "gather"},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_other_ways_of_serving_give_the_same_tokens(fields, tmp_path):
    loaded = tiny_loaded_model("llama")
    made(loaded.model, tmp_path)
    with engine_for(loaded, tmp_path, max_loras=2, **fields) as engine:
        assert generate(engine, NAMES) == expected("llama", tmp_path)


def test_preemption_gives_the_same_tokens_and_hits_stay_with_their_adapter(tmp_path):
    loaded = tiny_loaded_model("llama")
    made(loaded.model, tmp_path)
    with Engine(loaded, EngineConfig(num_blocks=10, block_size=4, max_loras=3, max_model_len=32)) as engine:
        for name in "abc":
            engine.add_adapter(name, tmp_path / name)
        same = [PROMPTS[0]] * len(NAMES)
        tokens = generate(engine, NAMES, same)
        assert any(record.preempted for record in engine.trace)
        again = generate(engine, NAMES, same)
        assert again == tokens
        assert any(chunk.num_cached_tokens for record in engine.trace for chunk in record.chunks)
        assert len({tuple(one) for one in tokens}) == 4


@pytest.mark.repeats(step=2)
@pytest.mark.skipif(bool(why_not_packed()), reason="packed weights need another processor")
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen2"])
def test_compiled_code_has_the_logits_of_the_layers_and_of_mlx_lm(architecture, tmp_path):
    loaded = tiny_loaded_model(architecture, hidden_size=64)
    made(loaded.model, tmp_path)
    wanted = expected(architecture, tmp_path)
    pack_model(loaded.model)
    sampling = GREEDY.replace(logprobs=5)

    def logprobs(engine):
        ids = [engine.add_request(prompt, sampling, adapter=name) for prompt, name in zip(PROMPTS, NAMES)]
        engine.run(progress=False)
        outputs = [engine.output(request_id) for request_id in ids]
        return [list(output.token_ids) for output in outputs], outputs

    with engine_for(loaded, tmp_path, max_loras=3) as engine:
        assert engine.runner.path.name == "compiled"
        tokens, compiled = logprobs(engine)
        assert tokens == wanted
        assert {record.kernel.details["forward"] for record in engine.trace if record.kernel} == {"compiled"}
        engine.runner.path = engine.runner.watched_path
        tokens, by_layer = logprobs(engine)
        assert tokens == wanted
        _assert_close(compiled, by_layer)


def _assert_close(outputs, others):
    for output, other in zip(outputs, others):
        for one, two in zip(output.logprobs, other.logprobs):
            assert one.keys() == two.keys()
            np.testing.assert_allclose([*one.values()], [two[token] for token in one], atol=1e-3)


def test_a_request_without_an_adapter_is_unchanged_beside_them(tmp_path):
    sampling = GREEDY.replace(logprobs=5)
    plain = tiny_loaded_model("llama")
    made(plain.model, tmp_path)
    results = []
    for names in ([""], ["", "a", "b"]):
        with engine_for(tiny_loaded_model("llama"), tmp_path, max_loras=2) as engine:
            ids = [engine.add_request(PROMPTS[0], sampling, adapter=name) for name in names]
            engine.run(progress=False)
            results.append(engine.output(ids[0]))
    assert results[0].token_ids == results[1].token_ids
    _assert_close([results[0]], [results[1]])


def test_a_model_is_as_before_when_its_engine_is_closed(tmp_path):
    loaded = tiny_loaded_model("llama")
    made(loaded.model, tmp_path)
    classes = [type(module) for module in loaded.model.modules()]
    with engine_for(loaded, tmp_path) as engine:
        generate(engine, NAMES)
        assert [type(module) for module in loaded.model.modules()] != classes
        engine.runner.close()
    assert [type(module) for module in loaded.model.modules()] == classes


def test_names_that_do_not_exist_are_refused_with_those_that_do(tmp_path):
    loaded = tiny_loaded_model("llama")
    with Engine(loaded, EngineConfig(num_blocks=64)) as engine:
        with pytest.raises(ValueError, match=r"there is no adapter 'x': add_adapter"):
            engine.add_request([1, 2], adapter="x")
        made(loaded.model, tmp_path)
        engine.add_adapter("french", tmp_path / "a")
        with pytest.raises(ValueError, match=r"there is no adapter 'frech': there is 'french'"):
            engine.add_request([1, 2], adapter="frech")
        for name, reason in (("french", "is in use"), ("", "must not be empty"), ("a\0b", "printable")):
            with pytest.raises(ValueError, match=reason):
                engine.add_adapter(name, tmp_path / "b")
        with pytest.raises(ValueError, match="is the model's"):
            engine.add_adapter(engine.name, tmp_path / "b")
        assert engine.adapters == ["french"]


def test_what_does_not_fit_the_model_is_refused(tmp_path):
    loaded = tiny_loaded_model("llama")
    sizes = linear_sizes(loaded.model)
    make_adapter(tmp_path / "rank", sizes, seed=0, rank=17)
    make_adapter(tmp_path / "size", {path: (a, b + 1) for path, (a, b) in sizes.items()}, seed=0)
    make_adapter(tmp_path / "layer", {"model.layers.9.mlp.up_proj": (64, 96)}, seed=0)
    make_adapter(tmp_path / "embedding", {"model.embed_tokens": (260, 64)}, seed=0)
    with Engine(loaded, EngineConfig(num_blocks=64)) as engine:
        for name, reason in (
            ("rank", "has rank 17 .*max_lora_rank=16"),
            ("size", "made for another model"),
            ("layer", "is not a linear layer"),
            ("embedding", "is not a linear layer"),
            ("absent", "no such folder"),
        ):
            with pytest.raises(ValueError, match=reason):
                engine.add_adapter(name, tmp_path / name)
        assert engine.adapters == []
    with Engine(tiny_loaded_model("mamba2"), EngineConfig(num_blocks=64)) as engine:
        make_adapter(tmp_path / "state", linear_sizes(engine.runner.model), seed=0)
        with pytest.raises(ValueError, match="is not applied row by row"):
            engine.add_adapter("state", tmp_path / "state")


def test_the_head_may_have_one_too(tmp_path):
    loaded = tiny_loaded_model("llama")
    sizes = {**linear_sizes(loaded.model), "lm_head": (64, 260)}
    make_adapter(tmp_path / "head", sizes, seed=3)
    model = tiny_model("llama")
    load_adapters(model, str(tmp_path / "head"))
    with Engine(loaded, EngineConfig(num_blocks=64, max_num_batched_tokens=4)) as engine:
        engine.add_adapter("head", tmp_path / "head")
        assert generate(engine, ["head"], [PROMPTS[0]]) == [by_mlx_lm(model, PROMPTS[0])]
