"""The backends that need no GPU: their numbers against a float64 reference, and their other promises."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Batch, Case, as_float64, build, normal, random_case
from reference import reference_attention
from tiers import examples

from workbench.kernels.attention import AttentionMetadata, AttentionOptions, dense, get_backend
from workbench.kernels.cpu.attention.layout import BLOCK_KV, PAIRS_PER_ITEM
from workbench.trace.records import WorkItem

BACKENDS = ("cpu", "gather", "dense")
MIXED = ((1, 100), (5, 5), (0, 9), (70, 133), (1, 1), (2, 67))


def relative_error(result: mx.array | np.ndarray, expected: np.ndarray) -> float:
    """Largest error relative to the largest element; infinite if a result is not finite."""
    result = as_float64(result) if isinstance(result, mx.array) else result
    if not np.isfinite(result).all():
        return np.inf
    return float(np.abs(result - expected).max() / np.abs(expected).max())


def tolerance(backend: str, dtype: str) -> float:
    """The kernel's promise for float32; otherwise the rounding of the result, and of every step that MLX computes."""
    half = {"float16": 2**-11, "bfloat16": 2**-8}
    return 2e-6 if dtype == "float32" else half[dtype] * (1.01 if backend == "cpu" else 4)


def poison_unseen(batch: Batch) -> Batch:
    """Put NaN and infinity into the positions before the first row's window too, as in a block that was reused."""
    size, table = batch.metadata.block_size, batch.metadata.block_table
    caches = [np.array(cache.astype(mx.float32)) for cache in (batch.k_cache, batch.v_cache)]
    seen = np.zeros(caches[0].shape[:2], bool)
    chunk_size, latent = batch.case.chunk_size, batch.k_cache is batch.v_cache
    for seq, (rows, kv_len) in enumerate(batch.case.sequences):
        if rows:
            first = max(0, kv_len - rows - batch.case.left) if batch.case.left >= 0 else 0
            first = (kv_len - rows) // chunk_size * chunk_size if chunk_size else first
            positions = np.arange(first, kv_len)
            seen[table[seq, positions // size], positions % size] = True
    poisons = np.array([np.nan, np.inf, -np.inf], np.float32)
    batch.k_cache, batch.v_cache = (
        mx.array(np.where(seen[..., None, None], cache, np.random.default_rng(0).choice(poisons, cache.shape))).astype(
            batch.k_cache.dtype
        )
        for cache in caches
    )
    if latent:
        batch.v_cache = batch.k_cache
    return batch


def attend(backend: str, batch: Batch) -> mx.array:
    result = get_backend(backend).attend(*batch.inputs, batch.options)
    assert result.shape == (*batch.q.shape[:2], batch.case.size_of_values) and result.dtype == batch.q.dtype
    return result


# -- the numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("seed", range(60))
def test_random_batches(seed):
    case = random_case(seed)
    case = replace(case, sequences=tuple((rows, min(kv, 600)) for rows, kv in case.sequences))
    batch = poison_unseen(build(case))
    expected = batch.reference()
    for backend in BACKENDS if seed % 3 == 0 else ("cpu",):
        assert relative_error(attend(backend, batch), expected) <= tolerance(backend, case.dtype), (backend, case)


@pytest.mark.repeats(every="pair")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("left", [-1, 0, 5, 64])
@pytest.mark.parametrize("softcap", [0.0, 2.0, 50.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_every_feature_with_every_other(backend, left, softcap, sinks):
    batch = poison_unseen(build(Case(MIXED, 9, 3, left=left, softcap=softcap, sinks=sinks)))
    assert relative_error(attend(backend, batch), batch.reference()) <= 2e-6


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 112, 128, 192, 256, 20, 72, 3])
@pytest.mark.parametrize("block_size", [8, 16, 32, 1, 7])
def test_cpu_head_dims_and_block_sizes(head_dim, block_size):
    batch = build(Case(MIXED, 6, 2, head_dim=head_dim, block_size=block_size))
    assert relative_error(attend("cpu", batch), batch.reference()) <= 2e-6


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 33, 100])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_cpu_query_heads_per_kv_head(group, num_kv_heads):
    sequences = ((1, 40), (3, 90), (33, 70))
    batch = build(Case(sequences, group * num_kv_heads, num_kv_heads, head_dim=32))
    assert relative_error(attend("cpu", batch), batch.reference()) <= 2e-6


def test_cpu_threads_change_no_bit(monkeypatch):
    batch = build(Case(MIXED * 2, 6, 2, head_dim=64))
    monkeypatch.setenv("WORKBENCH_THREADS", "1")
    alone = np.array(attend("cpu", batch))
    assert relative_error(alone, batch.reference()) <= 2e-6
    for threads in range(2, 9):
        monkeypatch.setenv("WORKBENCH_THREADS", str(threads))
        assert np.array_equal(np.array(attend("cpu", batch)), alone)


SIZES = {
    "values smaller": {"head_dim": 24, "value_dim": 16},
    "values larger": {"head_dim": 48, "value_dim": 80},
    "expanded": {"head_dim": 192, "value_dim": 128},
    "latent": {"num_heads": 20, "num_kv_heads": 1, "head_dim": 576, "value_dim": 512, "latent": True},
    "odd latent": {"num_kv_heads": 1, "head_dim": 23, "value_dim": 17, "latent": True},
    "latent as keys": {"num_kv_heads": 2, "head_dim": 64, "value_dim": 64, "latent": True},
    "512": {"head_dim": 512},
}
REACHES = {"all": {}, "window": {"left": 5}, "chunks": {"chunk_size": 16}, "odd chunks": {"chunk_size": 7}}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_of_keys_and_values(backend, sizes, reach):
    options = {"num_heads": 6, "num_kv_heads": 2} | SIZES[sizes] | REACHES[reach]
    batch = poison_unseen(build(Case(MIXED, **options, softcap=3.0, sinks=True)))
    assert relative_error(attend(backend, batch), batch.reference()) <= 2e-6


@settings(max_examples=examples(60), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 150)), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (3, 1), (8, 2), (5, 1)]),
    block_size=st.sampled_from([8, 16, 32]),
    left=st.sampled_from([-1, 0, 3, 40]),
    seed=st.integers(0, 2**16),
)
def test_cpu_equals_gather(lengths, heads, block_size, left, seed):
    sequences = tuple((rows, rows + earlier) for rows, earlier in lengths)
    if not any(rows for rows, _ in sequences):
        sequences += ((1, 1),)
    batch = build(Case(sequences, *heads, head_dim=32, block_size=block_size, left=left, seed=seed))
    assert relative_error(attend("cpu", batch), as_float64(attend("gather", batch))) <= 4e-6


def test_sharpness_of_the_comparison():
    """A position more or less, or another scale, is far outside the tolerance."""
    batch = build(Case(MIXED, 6, 2))
    expected = batch.reference()
    shifted = build(Case(tuple((rows, kv) for rows, kv in MIXED), 6, 2))
    shifted.metadata.seqused_k[0] -= 1
    assert relative_error(attend("cpu", shifted), expected) > 1e-3
    shifted = build(Case(MIXED, 6, 2))
    shifted.scale *= 1.001
    assert relative_error(attend("cpu", shifted), expected) > 1e-5


# -- a softmax that stays exact ------------------------------------------------------------------------------------


def far_below_zero(batch: Batch, logit: float) -> Batch:
    """Move all scores of a batch by about ``logit``: queries and keys point away from each other."""
    q, k = (np.array(x) for x in (batch.q, batch.k_cache))
    away = np.float32((-logit / batch.scale / batch.case.head_dim) ** 0.5)
    batch.q, batch.k_cache = mx.array(q / 2 + away), mx.array(k / 2 - away)
    return batch


def clamped_attention(batch: Batch, tile: int) -> np.ndarray:
    """A deliberately wrong online softmax: the running maximum is clamped to 0 and the sum gets an epsilon.

    It goes over the KV range of a whole chunk in tiles, so that late rows meet tiles that are masked for them.
    """
    case, metadata = batch.case, batch.metadata
    q, k_cache, v_cache = (as_float64(x) for x in (batch.q, batch.k_cache, batch.v_cache))
    out = np.zeros_like(q)
    for seq, (rows, kv_len) in enumerate(case.sequences):
        first = max(0, kv_len - rows - case.left)
        positions = np.arange(first, kv_len)
        slots = metadata.block_table[seq, positions // case.block_size], positions % case.block_size
        for row in range(rows):
            packed, position = metadata.cu_seqlens_q[seq] + row, kv_len - rows + row
            for head in range(case.num_heads):
                kv_head = head * case.num_kv_heads // case.num_heads
                scores = k_cache[slots][:, kv_head] @ q[packed, head] * batch.scale
                scores[(positions > position) | (positions < position - case.left)] = -np.inf
                maximum, total, sums = -np.inf, 0.0, np.zeros(case.head_dim)
                for at in range(0, len(positions), tile):
                    new_maximum = max(maximum, scores[at : at + tile].max())
                    new_maximum = 0.0 if new_maximum == -np.inf else new_maximum
                    rescale, weights = np.exp(maximum - new_maximum), np.exp(scores[at : at + tile] - new_maximum)
                    total = total * rescale + weights.sum()
                    sums = sums * rescale + weights @ v_cache[slots][at : at + tile, kv_head]
                    maximum = new_maximum
                out[packed, head] = sums / (total + 1e-6)
    return out


@pytest.mark.parametrize("logit", [-20.0, -25.0, -30.0, -200.0])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1)])
def test_scores_far_below_zero_behind_a_window(logit, heads):
    """96 rows of one head are one work item: its late rows see nothing of its first tile of keys."""
    assert PAIRS_PER_ITEM > BLOCK_KV + 8
    sequences = ((96, 500), (1, 400), (40, 40))
    batch = poison_unseen(far_below_zero(build(Case(sequences, *heads, head_dim=32, left=8)), logit))
    expected = batch.reference()
    # A score of -30 is itself rounded, by up to 2**-20, and no later step can correct that.
    allowed = 2e-6 + abs(logit) * 2**-23
    for backend in BACKENDS:
        assert relative_error(attend(backend, batch), expected) <= allowed, backend


def test_a_clamped_maximum_would_be_caught():
    batch = far_below_zero(build(Case(((96, 500),), 1, 1, head_dim=32, left=8)), -20.0)
    assert relative_error(clamped_attention(batch, BLOCK_KV), batch.reference()) > 0.05
    batch = build(Case(((96, 500),), 1, 1, head_dim=32, left=8))
    assert relative_error(clamped_attention(batch, BLOCK_KV), batch.reference()) < 1e-3  # hidden by scores around 0


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sinks", [False, True])
def test_scores_of_minus_infinity(rows, sinks):
    """Keys that score -inf have no weight; a row whose keys all score -inf is 0, not NaN."""
    batch = build(Case(((rows, 70), (5, 80)), 4, 2, sinks=sinks))
    q, k = np.array(batch.q), np.array(batch.k_cache)
    q[..., 0] = 1.0
    positions = np.arange(70)
    slots = batch.metadata.block_table[0, positions // 16], positions % 16
    k[*slots, :, 0] = -np.inf
    batch.q, batch.k_cache = mx.array(q), mx.array(k)
    result = as_float64(attend("cpu", batch))
    assert (result[:rows] == 0).all() and np.isfinite(result).all() and np.abs(result[rows:]).min() > 0


def test_a_row_that_sees_one_key_gets_its_value_exactly():
    """A weight of 1 is divided by a sum of 1, so an epsilon anywhere would show."""
    batch = build(Case(((1, 100), (40, 40), (1, 1)), 6, 2, left=0))
    v, table = np.array(batch.v_cache), batch.metadata.block_table
    positions = [(0, 99), *((1, position) for position in range(40)), (2, 0)]
    values = np.stack([v[table[seq, position // 16], position % 16] for seq, position in positions])
    np.testing.assert_array_equal(np.array(attend("cpu", batch)), np.repeat(values, 3, axis=1))


@pytest.mark.parametrize("backend", ["cpu", "dense"])
@pytest.mark.parametrize("left", [-1, 6])
def test_a_value_that_is_not_finite_reaches_only_rows_that_see_it(backend, left):
    """Row 20 of a chunk computed a NaN; earlier rows must not, nor later rows whose window no longer reaches it."""
    batch = build(Case(((40, 90), (1, 30)), 4, 2, left=left))
    expected = as_float64(attend(backend, batch))
    position = 90 - 40 + 20
    v = np.array(batch.v_cache)
    v[batch.metadata.block_table[0, position // 16], position % 16, :, 3] = np.nan
    batch.v_cache = mx.array(v)
    result = as_float64(attend(backend, batch))
    reached = np.zeros(41, bool)
    reached[20 : 40 if left < 0 else 20 + left + 1] = True
    assert np.isnan(result[reached][..., 3]).all()
    assert relative_error(result[~reached], expected[~reached]) <= 2e-6


def test_nan_in_a_query_or_key_is_not_hidden():
    for poisoned in ("q", "k"):
        batch = build(Case(((1, 50), (20, 50)), 6, 2))
        if poisoned == "q":
            q = np.array(batch.q)
            q[[0, 5]] = np.nan
            batch.q, rows = mx.array(q), [0, 5]
        else:
            k = np.array(batch.k_cache)
            k[batch.metadata.block_table[0, 0], 0] = k[batch.metadata.block_table[1, 0], 0] = np.nan
            batch.k_cache, rows = mx.array(k), list(range(21))
        result = as_float64(attend("cpu", batch))
        assert np.isnan(result[rows]).all() and np.isnan(result).all(axis=(1, 2)).sum() == len(rows)


# -- writing, describing, choosing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_rows_are_written_and_then_read(backend, dtype):
    rng = np.random.default_rng(3)
    shape, size = (12, 8, 2, 32), 8
    caches = [normal(rng, shape) for _ in range(2)]
    k_cache, v_cache = (mx.array(cache).astype(dtype) for cache in caches)
    rows = [normal(rng, (11, heads, 32)) for heads in (6, 2, 2)]
    q, k, v = (mx.array(x).astype(dtype) for x in rows)
    table = np.array([[5, 3, 0], [9, 2, 7]], np.int32)
    positions = [(0, 16), *((1, position) for position in range(10, 20))]
    slots = np.array([table[seq, position // size] * size + position % size for seq, position in positions])
    metadata = AttentionMetadata(np.array([0, 1, 11], np.int32), np.array([17, 20], np.int32), table, slots, size)

    k_object, v_object = k_cache, v_cache
    result = get_backend(backend).write_and_attend(q, k, v, k_cache, v_cache, metadata, AttentionOptions(0.2))

    expected = [as_float64(mx.array(cache).astype(dtype)) for cache in caches]
    for cache, new in zip(expected, (k, v)):
        cache.reshape(-1, 2, 32)[slots] = as_float64(new)
    assert k_cache is k_object and v_cache is v_object
    np.testing.assert_array_equal(as_float64(k_cache), expected[0])
    np.testing.assert_array_equal(as_float64(v_cache), expected[1])
    reference = reference_attention(
        as_float64(q),
        *expected,
        cu_seqlens_q=metadata.cu_seqlens_q,
        seqused_k=metadata.seqused_k,
        block_table=table,
        softmax_scale=0.2,
    )
    assert relative_error(result, reference) <= tolerance(backend, str(dtype).removeprefix("mlx.core."))


@pytest.mark.parametrize("backend", BACKENDS)
def test_writing_needs_a_slot_mapping(backend):
    batch = build(Case(((1, 5),), 2, 1, head_dim=32))
    row = mx.zeros((1, 1, 32))
    with pytest.raises(ValueError, match="slot_mapping is None"):
        get_backend(backend).write(row, row, batch.k_cache, batch.v_cache, batch.metadata)


def test_cpu_refuses_a_cache_that_is_a_view():
    """Its memory could only be reached through a copy, and writes to a copy are lost."""
    cache = mx.zeros((4, 2, 8, 32)).swapaxes(1, 2)
    row = mx.ones((1, 2, 32))
    metadata = AttentionMetadata(np.array([0, 1]), np.array([1]), np.array([[0]]), np.array([0]), 8)
    with pytest.raises(ValueError, match="k_cache is not contiguous"):
        get_backend("cpu").write(row, row, cache, cache, metadata)


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_of_any_layout(backend):
    batch = build(Case(MIXED, 6, 2))
    expected = as_float64(attend(backend, batch))
    batch.q = mx.contiguous(batch.q.swapaxes(0, 1)).swapaxes(0, 1)
    np.testing.assert_array_equal(as_float64(attend(backend, batch)), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_without_rows(backend):
    batch = build(Case(((0, 5), (0, 0)), 4, 2))
    assert attend(backend, batch).shape == (0, 4, 64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_launch_is_described(backend):
    batch = build(Case(((1, 100), (200, 250)), 6, 2))
    launch = get_backend(backend).describe(batch.metadata, 6, 2, 64, "float32", (7, -1))
    assert (launch.backend, launch.num_heads, launch.num_kv_heads, launch.head_dim) == (backend, 6, 2, 64)
    assert (launch.dtype, launch.windows) == ("float32", (7, -1))
    assert launch.work_items[0] == WorkItem(0, 0, 1, 92, 100)
    assert sum(item.num_rows for item in launch.work_items) == 201
    assert max(item.num_rows for item in launch.work_items) <= launch.block_q <= 200


def test_the_cpu_is_the_default_without_a_gpu():
    if mx.default_device() == mx.cpu:
        assert get_backend("auto") is get_backend("cpu")


def test_unknown_and_absent_backends_are_refused_by_name():
    with pytest.raises(ValueError, match="attention backend is 'torch'; it must be one of auto, metal"):
        get_backend("torch")
    if not mx.metal.is_available():
        with pytest.raises(RuntimeError, match="'metal' is not available here: it needs an Apple GPU"):
            get_backend("metal")


@pytest.mark.parametrize("max_rows", [1, 7, 64, 100])
@pytest.mark.parametrize("left", [-1, 5, 64])
def test_dense_computes_a_large_batch_in_parts(max_rows, left, monkeypatch):
    monkeypatch.setattr(dense, "MAX_ROWS", max_rows)
    batch = poison_unseen(build(Case(MIXED, 6, 2, left=left)))
    assert relative_error(attend("dense", batch), batch.reference()) <= 2e-6


def test_dense_takes_more_rows_than_its_largest_mask(monkeypatch):
    sizes, make = [], dense.block_diagonal_mask

    def watched(*given):
        mask = make(*given)
        sizes.append(len(mask))
        return mask

    monkeypatch.setattr(dense, "block_diagonal_mask", watched)
    batch = build(Case(((3796, 4096), (500, 600), (1, 40)), 1, 1, head_dim=8))
    assert relative_error(attend("dense", batch), as_float64(attend("gather", batch))) <= 4e-6
    assert sizes == [4096, 201]
