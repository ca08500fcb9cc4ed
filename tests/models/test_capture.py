"""A captured layer explains its output: the weights, read back through the block table, reproduce it."""

import mlx.core as mx
import numpy as np
import pytest
from test_compiled_step import packed_model
from tiny_models import tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams
from workbench.kernels.attention.stored import STORED_DTYPES, from_stored, to_stored
from workbench.models.packed.pack_model import why_not_packed


@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_weights_times_values_are_the_output(smollm2, backend):
    config = EngineConfig(max_num_batched_tokens=24, block_size=8, num_blocks=64, attention_backend=backend)
    engine = Engine(smollm2, config)
    engine.add_request("The capital of France is", SamplingParams(max_tokens=8))
    engine.add_request("One, two, three, four, five, six, seven, eight, nine, ten", SamplingParams(max_tokens=4))
    engine.step()
    capture = engine.capture(layer=7)
    with pytest.raises(ValueError, match="run a step first"):
        capture.weights(0)
    record = engine.step()
    assert capture.step == record.step and capture.cu_seqlens_q == record.cu_seqlens_q
    assert capture.seqused_k == record.seqused_k and {c.arm for c in record.chunks} >= {"decode"}
    for row in range(record.num_tokens):
        seq = np.searchsorted(record.cu_seqlens_q, row, side="right") - 1
        weights = capture.weights(row)
        assert weights.sum(axis=1) == pytest.approx(1.0)
        assert not weights[:, record.positions[row] + 1 :].any()
        values = capture.values[seq].repeat(3, axis=1)
        np.testing.assert_allclose(np.einsum("hk,khd->hd", weights, values), capture.out[row], atol=2e-5)
        # This step's own key is the last one the row may see.
        np.testing.assert_array_equal(capture.keys[seq][record.positions[row]], capture.k[row])
    engine.step()
    assert capture.step == record.step  # one step, not every step


@pytest.mark.parametrize("kv_cache_dtype", STORED_DTYPES)
def test_a_capture_has_the_numbers_that_the_pool_stands_for(kv_cache_dtype):
    """Rounded to the pool's type, and of the shape of a head: codes and scales are the pool's affair."""
    config = EngineConfig(max_num_batched_tokens=24, block_size=8, num_blocks=64, kv_cache_dtype=kv_cache_dtype)
    engine = Engine(tiny_loaded_model("llama") if why_not_packed() else packed_model("llama"), config)
    assert engine.describe()["forward"] == "compiled" or why_not_packed()
    engine.add_request([5 + i for i in range(25)], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    captures = [engine.capture(layer=2)]
    engine.step()
    while captures[-1].step < 2:  # the same arrays when the step is taken layer by layer
        name, made = engine.step_into()
        captures += [made] if name == "layer 2" else []
    stored = STORED_DTYPES[kv_cache_dtype]
    for capture in captures:
        first, last = capture.seqused_k[0] - len(capture.k), capture.seqused_k[0]
        for own, read in ((capture.k, capture.keys[0]), (capture.v, capture.values[0])):
            assert read.shape == (last, 2, 16)
            expected = np.array(from_stored(to_stored(mx.array(own), stored)).astype(mx.float32))
            np.testing.assert_allclose(read[first:], expected, rtol=1e-6)
        for row in range(len(capture.q)):
            weights = capture.weights(row)
            assert weights.sum(axis=1) == pytest.approx(1.0)
            out = np.einsum("hk,khd->hd", weights, capture.values[0].repeat(2, axis=1))
            np.testing.assert_allclose(out, capture.out[row], atol=2e-3)
    engine.close()


@pytest.mark.parametrize("layer", [-1, 30, 1.5])
def test_a_layer_that_is_not_there_is_refused(smollm2, layer):
    engine = Engine(smollm2, EngineConfig(num_blocks=8))
    with pytest.raises(ValueError, match="from 0 to 29"):
        engine.capture(layer)
