"""Faults other engines had below the scheduler: causal ranges, shared positions, caches cleared in flight.

The numbers continue those of ``test_scheduler_bugs.py``. b16, the merging of parts, is in test_metal_kernel_cases.py.
"""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from reference import reference_attention

import workbench
from workbench import Engine, EngineConfig, SamplingParams
from workbench.kernels.attention import paged_varlen_attention


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.mark.parametrize("backend", ["cpu", "gather", "dense"])
def test_b17_a_row_sees_up_to_itself_however_the_prompt_is_cut(rng, backend):
    length, heads, kv_heads, dim, block = 37, 4, 2, 32, 8
    table = rng.permutation(np.arange(1, 9))[: -(-length // block)][None].astype(np.int32)
    k_cache, v_cache = (rng.normal(size=(9, block, kv_heads, dim)).astype(np.float32) for _ in range(2))
    q = rng.normal(size=(length, heads, dim)).astype(np.float32)

    def attend(rows, kv_len):
        return np.array(
            paged_varlen_attention(
                mx.array(q[rows]),
                mx.array(k_cache),
                mx.array(v_cache),
                cu_seqlens_q=mx.array([0, len(q[rows])], dtype=mx.int32),
                seqused_k=mx.array([kv_len], dtype=mx.int32),
                block_table=mx.array(table),
                softmax_scale=dim**-0.5,
                backend=backend,
            )
        )

    once = attend(slice(0, length), length)
    expected = reference_attention(
        q, k_cache, v_cache, cu_seqlens_q=[0, length], seqused_k=[length], block_table=table, softmax_scale=dim**-0.5
    )
    np.testing.assert_allclose(once, expected, rtol=2e-5, atol=2e-6)
    for chunk in (1, 5, 8, 16):
        cut = [
            attend(slice(start, min(start + chunk, length)), min(start + chunk, length))
            for start in range(0, length, chunk)
        ]
        np.testing.assert_allclose(np.concatenate(cut), once, rtol=2e-5, atol=2e-6)


def test_b18_positions_handed_to_a_layer_never_change_afterwards(tiny_llama, monkeypatch):
    """mlx-lm's caches once added to their offset in place, and every name bound to it before changed with it."""
    engine = Engine(tiny_llama, EngineConfig(max_num_batched_tokens=8, block_size=4, num_blocks=32, max_model_len=64))
    seen = []
    update = type(engine.runner.kv_cache.layers[0]).update_and_fetch

    def remember(cache, keys, values):
        seen.append((cache.offset, np.array(cache.offset)))
        result = update(cache, keys, values)
        assert seen[-1][0] is cache.offset
        return result

    monkeypatch.setattr(type(engine.runner.kv_cache.layers[0]), "update_and_fetch", remember)
    engine.add_request(list(range(3, 24)), SamplingParams(max_tokens=4, ignore_eos=True))
    engine.run(progress=False)
    assert len({id(offset) for offset, _ in seen}) >= len(engine.trace) > 4
    for offset, then in seen:
        np.testing.assert_array_equal(np.array(offset), then)


def test_b19_mlx_caches_are_never_cleared_while_work_may_be_in_flight():
    """Clearing MLX's buffer cache under running work has brought drivers down; nothing here does it at all."""
    root = Path(workbench.__file__).parent
    callers = [path for path in root.rglob("*.py") if re.search(r"\bclear_cache\(", path.read_text())]
    assert callers == []
