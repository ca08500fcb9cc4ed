"""A captured layer explains its output: the weights, read back through the block table, reproduce it."""

import numpy as np
import pytest

from workbench import Engine, EngineConfig, SamplingParams


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


@pytest.mark.parametrize("layer", [-1, 30, 1.5])
def test_a_layer_that_is_not_there_is_refused(smollm2, layer):
    engine = Engine(smollm2, EngineConfig(num_blocks=8))
    with pytest.raises(ValueError, match="from 0 to 29"):
        engine.capture(layer)
