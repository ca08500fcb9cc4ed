"""Plan a launch: the arrays that the tiled kernel and the merge kernel need for a packed batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from workbench.kernels.attention.metadata import filled_up, mlx_copy
from workbench.kernels.attention.work_list import expand_counts

if TYPE_CHECKING:
    import mlx.core as mx

    from workbench.kernels.attention.metadata import AttentionMetadata

RowPart = tuple[int, int, "AttentionMetadata"]
"""First row, end of the rows, and the batch that they are."""

TARGET_THREADGROUPS = 256
"""Number of threadgroups that a launch aims for: a few on each core of a GPU with 10 to 80 cores."""

MIN_KV_SPLIT = 256
"""Minimum number of KV positions in a split; shorter ones cost more in partial results than they gain."""


def choose_kv_split(kv_lens: np.ndarray, num_kv_heads: int) -> int | None:
    """Choose the maximum number of KV positions in a work item, from the amount of work.

    No threadgroup should still be busy long after the others are done. So the maximum is the share of one threadgroup
    when all the work of the launch is spread over ``TARGET_THREADGROUPS``: a long decode is split, alone or beside a
    chunk, while a batch that fills the GPU anyway is left whole.

    The cuts in a context change the order of additions, and with it the last bits of a result. Pass a fixed
    ``kv_split`` to the kernel to get the same bits in every batch.

    Args:
        kv_lens: KV positions of each unsplit work item; at least one item.
        num_kv_heads: Number of KV heads; every item runs once for each.

    Returns:
        A power of two of at least ``MIN_KV_SPLIT``, or None when no item is longer.
    """
    share = -(-int(kv_lens.sum()) * num_kv_heads // TARGET_THREADGROUPS)
    kv_split = max(MIN_KV_SPLIT, 1 << (share - 1).bit_length())
    return kv_split if kv_lens.max() > kv_split else None


def row_parts(metadata: AttentionMetadata, items: np.ndarray, costs: np.ndarray, limit: float) -> list[RowPart]:
    """Cut a batch into runs of rows that cost at most ``limit`` each, between work items.

    Args:
        metadata: The batch.
        items: Its work list, without splits.
        costs: Cost of each item.
        limit: Largest cost of a run; a single item may cost more.

    Returns:
        The runs, or nothing if there would be one alone.
    """
    parts: list[RowPart] = []
    begin, end, cost = 0, 0, 0.0
    for start, count, own in zip(items[:, 1].tolist(), items[:, 2].tolist(), costs.tolist()):
        if cost and cost + own > limit:
            parts.append(_rows(metadata, begin, start))
            begin, cost = start, 0.0
        cost, end = cost + own, start + count
    return [*parts, _rows(metadata, begin, end)] if parts else []


def _rows(metadata: AttentionMetadata, begin: int, end: int) -> RowPart:
    """The part of a batch with the packed rows [begin, end)."""
    bounds = np.clip(metadata.cu_seqlens_q, begin, end)
    held = np.flatnonzero(np.diff(bounds))
    later = metadata.cu_seqlens_q[1:] - bounds[1:]  # rows of a sequence that are behind this part
    part = replace(
        metadata,
        cu_seqlens_q=np.concatenate([[0], np.cumsum(np.diff(bounds)[held])]).astype(np.int32),
        seqused_k=(metadata.seqused_k - later)[held].astype(np.int32),
        block_table=metadata.block_table[held],
        slot_mapping=None,
        derived={},
    )
    return begin, end, part


@dataclass(frozen=True)
class LaunchPlan:
    """The arrays of one launch.

    Attributes:
        work_list: int32 [num_items, 7], see `workbench.kernels.attention.work_list.build_work_list`.
        items: int32 [num_items, 9], the work list with two more columns: the position of the item's first row in its
            sequence, and the index of its first row of partial results, -1 when it writes none.
        merge_rows: int32 [num_merged_rows, 3], for each split row: its first partial row, the distance between the
            partial rows of its splits, and the number of splits.
        merged_rows: int32 [num_merged_rows], the packed row of each of them.
        num_partial_rows: Number of rows of partial results.
        kv_split: Maximum number of KV positions in an item, None for no split.
    """

    work_list: np.ndarray
    items: np.ndarray
    merge_rows: np.ndarray
    merged_rows: np.ndarray
    num_partial_rows: int
    kv_split: int | None = None

    mlx_items = mlx_copy("items")
    mlx_merged_rows = mlx_copy("merged_rows")

    @cached_property
    def mlx_merge_rows(self) -> mx.array:
        """``merge_rows`` as an MLX array, filled up with rows that no threadgroup reads."""
        import mlx.core as mx

        return mx.array(filled_up(self.merge_rows))


def plan_launch(
    metadata: AttentionMetadata, *, block_q: int, window: int, num_kv_heads: int, kv_split: int | None = None
) -> LaunchPlan:
    """Plan the launches for a batch.

    Args:
        metadata: The batch, with at least one row.
        block_q: Maximum number of query rows in an item.
        window: Left window as in flash-attn, -1 for none.
        num_kv_heads: Number of KV heads.
        kv_split: Maximum number of KV positions in an item; None chooses by the amount of work.
    """
    if kv_split is None:
        whole = metadata.work_list(block_q, window)
        kv_split = choose_kv_split(whole[:, 4] - whole[:, 3], num_kv_heads)
    work_list = metadata.work_list(block_q, window, kv_split)
    seq, q_start, num_rows, _, _, split, num_splits = work_list.T
    first_position = metadata.seqused_k[seq] - (metadata.cu_seqlens_q[seq + 1] - q_start)

    is_split = num_splits > 1
    partial_rows = np.where(is_split, num_rows, 0)
    partial_start = np.where(is_split, np.cumsum(partial_rows) - partial_rows, -1)
    first_splits = np.flatnonzero(is_split & (split == 0))
    owner, row = expand_counts(num_rows[first_splits])
    item = first_splits[owner]
    merge_rows = np.stack([partial_start[item] + row, num_rows[item], num_splits[item]], axis=1)
    return LaunchPlan(
        work_list=work_list,
        items=np.column_stack([work_list, first_position, partial_start]).astype(np.int32),
        merge_rows=merge_rows.astype(np.int32),
        merged_rows=(q_start[item] + row).astype(np.int32),
        num_partial_rows=int(partial_rows.sum()),
        kv_split=kv_split,
    )
