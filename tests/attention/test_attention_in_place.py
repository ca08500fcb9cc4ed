"""Writing to a KV cache touches the written rows and copies nothing."""

from __future__ import annotations

import time

import mlx.core as mx
import numpy as np
import pytest

from workbench.kernels.attention import AttentionMetadata, AttentionOptions, get_backend

NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 16384, 16, 4, 64
CACHE_BYTES = NUM_BLOCKS * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM * 4
NUM_ROWS = 64


def make_step(seed: int) -> tuple[mx.array, mx.array, AttentionMetadata]:
    """Keys and values of 64 decodes, each in a separate block."""
    rng = np.random.default_rng(seed)
    blocks = rng.choice(NUM_BLOCKS, NUM_ROWS, replace=False).astype(np.int32)
    metadata = AttentionMetadata(
        cu_seqlens_q=np.arange(NUM_ROWS + 1, dtype=np.int32),
        seqused_k=np.ones(NUM_ROWS, np.int32),
        block_table=blocks[:, None],
        slot_mapping=blocks.astype(np.int64) * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
    )
    k, v = (mx.array(rng.standard_normal((NUM_ROWS, NUM_KV_HEADS, HEAD_DIM), np.float32)) for _ in range(2))
    mx.eval(k, v)
    return k, v, metadata


def make_caches() -> tuple[mx.array, mx.array]:
    caches = tuple(mx.zeros((NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)) for _ in range(2))
    mx.eval(*caches)
    return caches


def cost(step) -> tuple[float, int]:
    """Median CPU seconds of a step after the first, and the peak of its additional memory in bytes."""
    seconds, extra = [], 0
    for index in range(6):
        k, v, metadata = make_step(index)
        metadata.write_index  # noqa: B018 (made once per step, not once per layer)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        start = time.process_time()
        step(k, v, metadata)
        seconds.append(time.process_time() - start)
        extra = max(extra, mx.get_peak_memory() - before)
    return float(np.median(seconds[1:])), extra


@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_a_write_is_in_place(backend):
    assert CACHE_BYTES >= 256 * 2**20
    backend = get_backend(backend)
    k_cache, v_cache = make_caches()

    def step(k, v, metadata):
        q = mx.concatenate([k, k], axis=1)
        mx.eval(backend.write_and_attend(q, k, v, k_cache, v_cache, metadata, AttentionOptions(0.1)))

    seconds, extra = cost(step)
    k, _, metadata = make_step(5)
    block = int(metadata.block_table[7, 0])
    np.testing.assert_array_equal(np.array(k_cache[block, 0]), np.array(k[7]))
    assert extra < CACHE_BYTES / 16

    # The control: a view of each cache is alive, so MLX must preserve the old data.
    def copying_step(k, v, metadata):
        views = k_cache.reshape(-1), v_cache.reshape(-1)
        mx.eval(*views)
        get_backend("gather").write(k, v, k_cache, v_cache, metadata)
        mx.eval(k_cache, v_cache)
        del views

    copying_seconds, copying_extra = cost(copying_step)
    assert copying_extra >= CACHE_BYTES
    assert seconds < copying_seconds / 3, f"{seconds * 1e3:.2f} ms in place, {copying_seconds * 1e3:.2f} ms copying"


@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_a_chain_of_layers_and_steps_stays_in_place(backend):
    """Four layers, three steps: no cache is copied when steps follow each other."""
    backend = get_backend(backend)
    shape = (1024, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    caches = [(mx.zeros(shape), mx.zeros(shape)) for _ in range(4)]
    mx.eval(caches)
    cache_bytes = caches[0][0].nbytes
    rng = np.random.default_rng(0)
    for step in range(3):
        blocks = np.arange(8, dtype=np.int32)
        metadata = AttentionMetadata(
            np.arange(9, dtype=np.int32), np.full(8, step + 1, np.int32), blocks[:, None],
            blocks.astype(np.int64) * BLOCK_SIZE + step, BLOCK_SIZE,
        )  # fmt: skip
        x = mx.array(rng.standard_normal((8, NUM_KV_HEADS, HEAD_DIM), np.float32))
        mx.eval(x)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        for k_cache, v_cache in caches:
            x = x + backend.write_and_attend(x, x, x, k_cache, v_cache, metadata, AttentionOptions(0.1))
        mx.eval(x)
        assert mx.get_peak_memory() - before < cache_bytes / 2
