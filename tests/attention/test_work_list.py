"""The work list covers everything that the mask allows exactly once, and nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from workbench.kernels.attention.metadata import AttentionMetadata, filled_up
from workbench.kernels.attention.metal.plan import LaunchPlan
from workbench.kernels.attention.work_list import WORK_ITEM_COLUMNS, build_work_list
from workbench.trace.records import WorkItem

sequences = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=0, max_size=6)


def arrays(lengths: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(query_len, earlier context) pairs as cu_seqlens_q and seqused_k."""
    query_lens = [query_len for query_len, _ in lengths]
    cu_seqlens_q = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    return cu_seqlens_q, np.array([sum(pair) for pair in lengths], np.int32)


def visible(cu_seqlens_q, seqused_k, seq: int, row: int, window: int) -> range:
    """The KV positions that a packed row may see, by definition."""
    position = int(seqused_k[seq] - (cu_seqlens_q[seq + 1] - row))
    return range(max(0, position - window) if window >= 0 else 0, position + 1)


def test_columns_are_the_fields_of_a_work_item():
    assert WorkItem.__struct_fields__ == WORK_ITEM_COLUMNS


def test_a_mixed_batch():
    cu_seqlens_q, seqused_k = arrays([(1, 9), (0, 4), (5, 2)])
    assert build_work_list(cu_seqlens_q, seqused_k, block_q=4).tolist() == [
        [0, 0, 1, 0, 10, 0, 1],
        [2, 1, 4, 0, 6, 0, 1],
        [2, 5, 1, 0, 7, 0, 1],
    ]


def test_a_window_bounds_both_ends():
    cu_seqlens_q, seqused_k = arrays([(1, 99), (8, 92)])
    items = build_work_list(cu_seqlens_q, seqused_k, block_q=4, window=10)
    assert items[:, 3:5].tolist() == [[89, 100], [82, 96], [86, 100]]


def test_splits_are_cut_at_multiples_of_the_split_size():
    cu_seqlens_q, seqused_k = arrays([(2, 20)])
    items = build_work_list(cu_seqlens_q, seqused_k, block_q=2, window=15, kv_split=8)
    assert items[:, 3:].tolist() == [[5, 8, 0, 3], [8, 16, 1, 3], [16, 22, 2, 3]]


def test_each_batch_has_work_lists_of_its_own():
    table = np.ones((1, 4), np.int32)
    batches = [AttentionMetadata(*arrays([(length, 0)]), table, None, 4) for length in (3, 9)]
    assert [batch.work_list(16)[:, 2].tolist() for batch in batches] == [[3], [9]]


@pytest.mark.parametrize(("shape", "filled"), [((1, 1), (8, 1)), ((2, 3), (3, 3)), ((1, 8), (1, 8)), ((5, 2), (5, 2))])
def test_a_small_table_is_filled_up_with_rows_of_0(shape, filled):
    """MLX compiles another variant of a kernel for an input of fewer than 8 elements."""
    table = np.full(shape, 7, np.int32)
    result = filled_up(table)
    assert result.shape == filled and result.dtype == np.int32
    assert (result[: shape[0]] == 7).all() and not result[shape[0] :].any()
    metadata = AttentionMetadata(*arrays([(1, 0)] * shape[0]), table, None, 4)
    assert metadata.mlx_block_table.shape == filled
    plan = LaunchPlan(table, table, table, table[:, 0], 0)
    assert plan.mlx_merge_rows.shape == filled


@settings(max_examples=examples(150), deadline=None)
@given(
    lengths=sequences,
    block_q=st.integers(1, 20),
    window=st.sampled_from([-1, 0, 1, 7, 30, 1000]),
    kv_split=st.sampled_from([None, 1, 8, 32]),
)
def test_items_cover_the_mask_exactly_once(lengths, block_q, window, kv_split):
    cu_seqlens_q, seqused_k = arrays(lengths)
    items = build_work_list(cu_seqlens_q, seqused_k, block_q=block_q, window=window, kv_split=kv_split)
    assert items.dtype == np.int32 and items.shape == (len(items), 7)
    covered: dict[tuple[int, int], int] = {}
    for seq, q_start, num_rows, kv_start, kv_end, split, num_splits in items.tolist():
        assert 1 <= num_rows <= block_q and 0 <= split < num_splits and kv_start < kv_end
        assert cu_seqlens_q[seq] <= q_start and q_start + num_rows <= cu_seqlens_q[seq + 1]
        assert kv_split is None or kv_end - kv_start <= kv_split
        rows = range(q_start, q_start + num_rows)
        seen = [visible(cu_seqlens_q, seqused_k, seq, row, window) for row in rows]
        # Every column is visible to at least one row of the item, and no column occurs twice for the same row.
        assert kv_start >= min(keys.start for keys in seen) and kv_end <= max(keys.stop for keys in seen)
        for row, keys in zip(rows, seen):
            for key in range(max(kv_start, keys.start), min(kv_end, keys.stop)):
                covered[row, key] = covered.get((row, key), 0) + 1
    expected = {
        (row, key): 1
        for seq in range(len(lengths))
        for row in range(cu_seqlens_q[seq], cu_seqlens_q[seq + 1])
        for key in visible(cu_seqlens_q, seqused_k, seq, row, window)
    }
    assert covered == expected


@settings(max_examples=50, deadline=None)
@given(lengths=sequences, block_q=st.integers(1, 20), kv_split=st.sampled_from([1, 8, 32]))
def test_splits_of_the_same_rows_are_neighbours_and_counted(lengths, block_q, kv_split):
    items = build_work_list(*arrays(lengths), block_q=block_q, kv_split=kv_split).tolist()
    at = 0
    while at < len(items):
        num_splits = items[at][6]
        group = items[at : at + num_splits]
        assert [item[5] for item in group] == list(range(num_splits))
        assert len({tuple(item[:3]) for item in group}) == 1
        assert all(left[4] == right[3] for left, right in itertools.pairwise(group))
        at += num_splits


def test_the_cut_of_a_context_does_not_depend_on_the_batch():
    alone = build_work_list(*arrays([(1, 200)]), block_q=8, kv_split=64)
    batched = build_work_list(*arrays([(8, 500), (1, 200), (3, 0)]), block_q=8, kv_split=64)
    assert alone[:, 3:].tolist() == batched[batched[:, 0] == 1][:, 3:].tolist()


@pytest.mark.parametrize(("name", "value"), [("block_q", 0), ("kv_split", 0)])
def test_sizes_below_one_are_refused(name, value):
    options = {"block_q": 4, name: value}
    with pytest.raises(ValueError, match=f"{name} is 0"):
        build_work_list(*arrays([(1, 1)]), **options)


def test_layers_share_a_work_list():
    cu_seqlens_q, seqused_k = arrays([(3, 4)])
    metadata = AttentionMetadata(cu_seqlens_q, seqused_k, np.zeros((1, 1), np.int32), None, 16)
    assert metadata.work_list(4) is metadata.work_list(4)
    assert metadata.work_list(4, window=2) is not metadata.work_list(4)
