"""Launches in which paged attention kernels easily go wrong, each by name."""

import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import Batch, Case, as_float64, assert_close, build
from msl_runs import skip_without_compiler

from workbench import msl
from workbench.kernels.attention.metal.launch import PagedVarlenKernels, kernel_text

skip_without_compiler()

KERNELS = [PagedVarlenKernels(msl.metal_kernel, order=order) for order in (0, 1)]


def check(batch: Batch, kv_split: int | None = None, slack: float = 1.0) -> None:
    """Both kernels, in both orders, against float64."""
    expected = batch.reference()
    for kernels in KERNELS:
        assert_close(kernels.attend_v1(*batch.inputs, batch.options), expected, batch.case.dtype, slack)
        tiled = kernels.attend(*batch.inputs, batch.options, kv_split=kv_split)
        assert_close(tiled, expected, batch.case.dtype, slack)


def with_mean_logit(case: Case, mean: float) -> Batch:
    """A batch whose logits are ``mean`` plus or minus 1: all queries and keys share a component."""
    batch = build(case)
    common = (abs(mean) / batch.scale / case.head_dim) ** 0.5
    batch.q = batch.q + mx.array(common).astype(batch.q.dtype)
    batch.k_cache = batch.k_cache + mx.array(np.sign(mean) * common).astype(batch.k_cache.dtype)
    return batch


def clamped_reference(batch: Batch, tile: int) -> np.ndarray:
    """Deliberately wrong: a running maximum that a fully masked first tile leaves at 0, and an epsilon."""
    q, k_cache, v_cache = (as_float64(x) for x in (batch.q, batch.k_cache, batch.v_cache))
    case, metadata = batch.case, batch.metadata
    out = np.zeros_like(q)
    for seq, kv_len in enumerate(metadata.seqused_k):
        for row in range(metadata.cu_seqlens_q[seq], metadata.cu_seqlens_q[seq + 1]):
            position = kv_len - (metadata.cu_seqlens_q[seq + 1] - row)
            visible = np.arange(max(0, position - case.left), position + 1)
            blocks = metadata.block_table[seq][visible // case.block_size]
            for head in range(case.num_heads):
                slots = blocks, visible % case.block_size, head * case.num_kv_heads // case.num_heads
                scores = k_cache[slots] @ q[row, head] * batch.scale
                weights = np.exp(scores - max(scores.max(), 0.0 if visible[0] >= tile else -np.inf))
                out[row, head] = weights @ v_cache[slots] / (weights.sum() + 1e-6)
    return out


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("mean", [-14.0, -20.0, -30.0])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("sequences", [((1, 512),), ((48, 512),)], ids=["decode", "chunk"])
def test_negative_logits_in_a_window(sequences, dtype, mean):
    batch = with_mean_logit(Case(sequences, 4, 2, 64, 16, dtype, left=127), mean)
    slack = max(1.0, abs(mean) / 15)  # a float32 logit of 30 is known to 2e-6 at best, and so are the weights
    check(batch, slack=slack)
    check(batch, kv_split=64, slack=slack)
    wrong = np.abs(clamped_reference(batch, tile=32) - batch.reference()).max() / np.abs(batch.reference()).max()
    assert wrong > (0.05 if mean <= -20 else 1e-3), "the case must tell the fault it is here for"


def test_fully_masked_first_tile():
    """Rows whose window begins after the first tile of their work item: the maximum stays -inf through a tile."""
    batch = with_mean_logit(Case(((32, 132),), 2, 2, 64, 8, left=8), -25.0)
    check(batch)


@pytest.mark.repeats(every="value")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kv_split", [None, 16])
@pytest.mark.parametrize("left", [-1, 20])
def test_not_finite_in_masked_slots(value, kv_split, left):
    """Positions after row r or before its window must not affect it, although its tile reads them."""
    case = Case(((40, 60), (1, 30), (3, 50)), 6, 2, 64, 16, left=left)
    batch = build(case)
    k, v = (np.array(x) for x in (batch.k_cache, batch.v_cache))
    blocks = batch.metadata.block_table[0]
    for position in (2, 37, 59):
        slot = blocks[position // case.block_size], position % case.block_size
        v[slot] = value
        v[slot][:, 1::2] = 1.0  # half of the dimensions stay finite, even in rows that see the position
        if position > 50:
            k[slot] = value
    batch.k_cache, batch.v_cache = mx.array(k), mx.array(v)
    expected = batch.reference()
    assert np.isfinite(expected).any() and not np.isfinite(expected).all()
    check(batch, kv_split)


def test_long_decode_beside_a_chunk():
    """One row of 8,192 positions and a chunk of 256 rows: the decode is split, the chunk is not."""
    batch = build(Case(((1, 8192), (256, 256)), 2, 1, 64, 16, "float16"))
    items = KERNELS[0].plan(batch.metadata, 2, 1, 64, 2).items
    assert (items[items[:, 0] == 0][:, 6] == 32).all() and (items[items[:, 0] == 1][:, 6] == 1).all()
    check(batch)


@pytest.mark.repeats(step=6)
@pytest.mark.parametrize("num_seqs", [1, 6, 7, 8, 9])
def test_inputs_of_fewer_than_8_elements(num_seqs):
    """MLX passes them as `constant` pointers: cu_seqlens_q for up to 6 sequences, seqused_k for up to 7."""
    check(build(Case(tuple((2, 5 + seq) for seq in range(num_seqs)), 1, 1, 16, 16)))


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("kv_split", [None, 8, 24])
def test_sinks_count_once(kv_split):
    batch = build(Case(((1, 100), (9, 90), (40, 40)), 4, 2, 32, 8, sinks=True))
    for sinks in ([3.0, -40.0, -np.inf, 40.0], [0.0] * 4):
        batch.sinks = mx.array(sinks, dtype=mx.float32)
        check(batch, kv_split)


def test_window_of_one():
    """left = 0: every row sees itself alone, so it returns its own value."""
    batch = build(Case(((20, 50), (1, 33)), 2, 2, 32, 16, left=0))
    check(batch)
    positions = np.r_[30:50, 32]
    blocks = batch.metadata.block_table[np.r_[[0] * 20, 1], positions // 16]
    own = np.array(batch.v_cache)[blocks, positions % 16]
    assert np.abs(np.array(KERNELS[0].attend(*batch.inputs, batch.options)) - own).max() < 1e-6


def test_more_heads_than_a_tile_has_rows():
    check(build(Case(((1, 40), (3, 30)), 71, 1, 32, 16)))
    check(build(Case(((1, 40), (3, 30)), 20, 1, 256, 16)))


def test_strided_queries():
    batch = build(Case(((7, 20), (1, 9)), 4, 2, 32, 8))
    twice = mx.concatenate([batch.q, batch.q], axis=2)
    batch.q = twice.transpose(1, 0, 2).transpose(1, 0, 2)[:, :, :32]
    check(batch)


def test_queries_of_another_dtype_than_the_cache():
    """Computed in the cache's dtype, returned in the queries'."""
    batch = build(Case(((7, 20), (1, 9)), 4, 2, 32, 8))
    batch.q = batch.q.astype(mx.float16)
    result = KERNELS[0].attend(*batch.inputs, batch.options)
    assert result.dtype == mx.float16
    assert_close(result, batch.reference(), "float16")


def test_nothing_to_do():
    batch = build(Case(((0, 20), (0, 9)), 4, 2, 32, 8))
    assert KERNELS[0].attend(*batch.inputs, batch.options).shape == (0, 4, 32)
    assert KERNELS[0].attend_v1(*batch.inputs, batch.options).shape == (0, 4, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 72}, "head_dim is 72; .* multiples of 16"),
        ({"head_dim": 656}, "head_dim is 656; .* from 16 to 640"),
        ({"head_dim": 528}, "value_dim is 528; .* from 16 to 512"),
        ({"head_dim": 64, "value_dim": 40}, "value_dim is 40; .* multiples of 16"),
        ({"block_size": 12}, "block_size is 12; .* multiples of 8"),
    ],
)
def test_unsupported_variants_are_rejected(changes, message):
    batch = build(Case(((2, 5),), **changes))
    with pytest.raises(ValueError, match=message):
        KERNELS[0].attend(*batch.inputs, batch.options)


def test_a_bad_block_id_is_reported_not_read():
    """msl finds a block outside the cache, which validation would have rejected, and names the buffer."""
    batch = build(Case(((2, 40), (1, 5)), 4, 2, 32, 8))
    batch.metadata.block_table[0, 1] = 10_000
    for attend in (KERNELS[0].attend, KERNELS[0].attend_v1):
        with pytest.raises(msl.MslError, match="k_cache"):
            attend(*batch.inputs, batch.options)


def test_merging_a_part_that_saw_nothing_gives_no_nan():
    """A part without a visible key has maximum -inf and sum 0; -inf - -inf is NaN."""
    rng = np.random.default_rng(3)
    parts = rng.normal(size=(3, 2, 32)).astype(np.float32)
    sums = np.stack([rng.normal(size=(3, 2)), rng.uniform(1, 4, size=(3, 2))], axis=-1).astype(np.float32)
    sums[1] = (-np.inf, 0.0)
    parts[1] = 0.0
    kernel = msl.metal_kernel(name="merge_splits", **kernel_text("merge_splits"))

    def merge(first, count):
        (out,) = kernel(
            inputs=[mx.array(parts), mx.array(sums), mx.array([[first, 1, count]], mx.int32)],
            output_shapes=[(1, 2, 32)],
            output_dtypes=[mx.float32],
            grid=(64, 1, 1),
            threadgroup=(32, 1, 1),
            template=[("T", mx.float32), ("HEAD_DIM", 32)],
        )
        return np.array(out)[0]

    merged, seen = merge(0, 3), [0, 2]
    rescale = np.exp2(sums[seen, :, 0])
    expected = (parts[seen] * rescale[..., None]).sum(axis=0) / (rescale * sums[seen, :, 1]).sum(axis=0)[:, None]
    assert np.isfinite(merged).all()
    np.testing.assert_allclose(merged, expected, rtol=1e-5)
    assert not merge(1, 1).any()  # nothing seen by any part: zeros, not NaN
