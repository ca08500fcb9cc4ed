"""Memory: MLX's limits, the size of the pool, and errors that name the knob."""

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams, simulate
from workbench.engine import memory
from workbench.models import paged_cache
from workbench.models.packed.pack_model import pack_model

GIB = 2**30


@pytest.fixture
def mac(monkeypatch):
    """A Mac with a working set of 12 of its 16 GiB, 2 of them taken by weights; the limits that were set."""
    limits = {}
    monkeypatch.setattr(memory, "runs_on_gpu", lambda: True)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    info = {"max_recommended_working_set_size": 12 * GIB, "memory_size": 16 * GIB}
    monkeypatch.setattr(mx, "device_info", lambda *_: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 2 * GIB)
    for name in ("wired_limit", "cache_limit"):
        monkeypatch.setattr(mx, f"set_{name}", lambda size, name=name: limits.update({name: size}))
    return limits


def test_the_limits_are_those_of_the_working_set(mac):
    assert memory.usable_memory() == 12 * GIB
    assert memory.limit_memory() == mac == {"wired_limit": 12 * GIB, "cache_limit": 12 * GIB // 8}


@pytest.mark.parametrize(("on_gpu", "metal"), [(False, True), (True, False)])
def test_no_limits_on_another_gpu_and_on_the_cpu_of_a_mac(mac, monkeypatch, on_gpu, metal):
    monkeypatch.setattr(memory, "runs_on_gpu", lambda: on_gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    assert memory.limit_memory() == mac == {}


def test_without_a_gpu_mlx_keeps_little_of_what_is_freed(mac, monkeypatch):
    monkeypatch.setattr(memory, "runs_on_gpu", lambda: False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert memory.limit_memory() == mac == {"cache_limit": memory.CPU_CACHE_BYTES}


@pytest.mark.skipif(mx.metal.is_available() or memory.runs_on_gpu(), reason="MLX's cache is not limited like this")
def test_freed_logits_are_not_kept():
    engine = Engine(tiny_loaded_model("llama"), EngineConfig(num_blocks=8))
    logits = mx.zeros((16, 49_152))
    mx.eval(logits)
    del logits
    assert mx.get_cache_memory() <= memory.CPU_CACHE_BYTES
    engine.close()


def test_auto_takes_a_share_of_what_is_free(mac):
    config = EngineConfig(num_blocks="auto", max_num_seqs=256, block_size=16, max_model_len=8192)
    assert memory.choose_num_blocks(config, 2**20) == int(0.6 * 10 * GIB) // 2**20
    few = config.replace(max_num_seqs=2, max_model_len=100)
    assert memory.choose_num_blocks(few, 2**20) == 1 + 2 * 7  # more could never be used
    with pytest.raises(ValueError, match=r"num_blocks='auto' takes 6.00 of the free 10.00 GiB.*lower block_size=16"):
        memory.choose_num_blocks(config, 4 * GIB)


def test_gpu_memory_utilization_is_vllms_on_a_gpu_and_of_free_memory_on_a_cpu(mac, monkeypatch):
    config = EngineConfig(gpu_memory_utilization=0.5)
    assert config.num_blocks == "auto"
    assert memory.choose_num_blocks(config, 2**20) == (6 - 2) * 1024  # half of 12 GiB, the model's 2 included
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=0.1 takes 0.00 of the free 10.00 GiB"):
        memory.choose_num_blocks(config.replace(gpu_memory_utilization=0.1), 2**20)
    monkeypatch.setattr(memory, "runs_on_gpu", lambda: False)
    assert memory.choose_num_blocks(config, 2**20) == 5 * 1024  # half of the 10 GiB that are free


def test_a_small_share_of_memory_forces_preemptions(monkeypatch):
    model = tiny_loaded_model("llama")
    with Engine(model, EngineConfig(num_blocks=8, block_size=4)) as engine:
        bytes_per_block = engine.runner.bytes_per_block
    monkeypatch.setattr(memory, "usable_memory", lambda: mx.get_active_memory() + 100 * bytes_per_block)
    config = {"block_size": 4, "max_model_len": 64, "attention_backend": "gather"}
    for share, preempts in ((0.09, True), (0.9, False)):
        with Engine(model, EngineConfig(gpu_memory_utilization=share, **config)) as engine:
            assert engine.config.num_blocks == int(share * 100)
            for first in (3, 4):
                engine.add_request([first] * 9, max_tokens=12)
            engine.run(progress=False)
            assert any(step.preempted for step in engine.trace) == preempts


def test_a_pool_beside_the_model(mac):
    memory.check_pool_fits(10, GIB, memory.usable_memory(), mx.get_active_memory())
    with pytest.raises(
        ValueError,
        match=r"num_blocks=11 needs 11.0 GiB .* has 12.0 GiB, of which 2.0 GiB hold the model: use at most 5",
    ):
        memory.check_pool_fits(11, GIB, memory.usable_memory(), mx.get_active_memory())


def test_auto_in_an_engine():
    config = EngineConfig(
        num_blocks="auto",
        max_num_seqs=3,
        block_size=8,
        max_model_len=40,
        max_num_batched_tokens=24,
        attention_backend="gather",
    )
    with Engine(tiny_loaded_model("llama"), config) as engine:
        assert engine.config.num_blocks == engine.runner.kv_cache.num_blocks == 1 + 3 * 5
        assert engine.trace.meta.config["num_blocks"] == 16
        engine.add_request([5, 6, 7], SamplingParams(max_tokens=3))
        assert len(engine.run(progress=False)[0].token_ids) == 3


def test_auto_without_a_model():
    with pytest.raises(ValueError, match='num_blocks is "auto", which needs a model'):
        _ = EngineConfig(num_blocks="auto").num_usable_blocks
    with pytest.raises(ValueError, match=r"num_blocks must be an integer from 1 .* 'auto'"):
        simulate({"config": {"num_blocks": "auto"}, "requests": [{"id": "a", "prompt": {"len": 3}}]})
    with pytest.raises(ValueError, match=r'num_blocks must be an integer from 2 .* or "auto"'):
        EngineConfig(num_blocks="all")


def test_an_allocation_that_fails_names_the_knobs(monkeypatch):
    """MLX raises a RuntimeError that says nothing about what to change; the request ends with the explanation."""
    config = EngineConfig(num_blocks=64, block_size=8, max_num_batched_tokens=24, attention_backend="gather")
    with Engine(tiny_loaded_model("llama"), config) as engine:
        engine.add_request([5, 6, 7], SamplingParams(max_tokens=3))

        def fails(*_):
            raise RuntimeError("[metal::malloc] Unable to allocate 123 bytes.")

        with monkeypatch.context() as patch:
            patch.setattr(mx, "eval", fails)
            engine.step()
        (output,) = engine.outputs.values()
        assert output.finish_reason == "error"
        assert "3 tokens" in output.error and "lower max_num_batched_tokens=24 or num_blocks=64" in output.error
        engine.add_request([5, 6, 7], SamplingParams(max_tokens=3), request_id="next")
        assert engine.run(progress=False)[-1].finish_reason == "length"


def test_other_errors_stay_as_they_are():
    problem = RuntimeError("shapes differ")
    assert memory.explained(problem, EngineConfig(), 3) is problem


@pytest.mark.parametrize("kind", ["compiled", "cpu", "gather"])
def test_a_pool_takes_memory_as_blocks_are_handed_out(kind, monkeypatch):
    """With chunks, preemption and blocks that are handed out again; the memory grows in the middle of requests."""

    def run():
        loaded = tiny_loaded_model("gemma3_text")
        if kind == "compiled":
            pack_model(loaded.model)
        limits = {"num_blocks": 290, "block_size": 4, "max_num_batched_tokens": 40, "max_num_seqs": 24}
        backend = "auto" if kind == "compiled" else kind
        with Engine(loaded, attention_backend=backend, **limits) as engine:
            first = {array.shape[0] for array in engine.runner.kv_cache.arrays}
            assert engine.runner.path.name == ("compiled" if kind == "compiled" else "layer by layer")
            random = np.random.default_rng(3)
            for length in random.integers(3, 50, 40).tolist():
                prompt = random.integers(1, 200, length).tolist()
                engine.add_request(prompt, max_tokens=9, ignore_eos=True)
            tokens = [output.token_ids for output in engine.run(progress=False)]
            last = {array.shape[0] for array in engine.runner.kv_cache.arrays}
            assert engine.runner.kv_cache.nbytes == 290 * engine.runner.bytes_per_block
        return first, last, tokens

    whole = run()
    assert whole[:2] == ({290}, {290}), "a small pool is taken whole"
    monkeypatch.setattr(paged_cache, "SMALL_POOL", 0)
    assert run() == ({64}, {290}, whole[2])


def test_growing_holds_no_second_pool():
    loaded = tiny_loaded_model("llama", num_key_value_heads=4, head_dim=64)
    pack_model(loaded.model)
    with Engine(loaded, num_blocks=2000, block_size=16) as engine:
        engine.generate([[1, 2, 3]], max_tokens=2)
        engine.runner.reserve(1000)
        engine.generate([[1, 2, 3]], max_tokens=2)
        mx.clear_cache()
        mx.reset_peak_memory()
        before, arrays = mx.get_active_memory(), engine.runner.kv_cache.arrays
        size, number = arrays[0].nbytes, len(arrays)
        del arrays
        engine.runner.reserve(2000)
        assert number > 3
        assert mx.get_peak_memory() - before < (number + 2.5) * size  # twice the memory, and one array more
