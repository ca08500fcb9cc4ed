"""The work list of an attention kernel launch: rows of integers, built on the host.

A decode row, a tile of a prompt chunk and a piece of a long context are items of one list. The kernels run the list
and the views draw it, so a picture of a step shows exactly what was computed.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

Positions = TypeVar("Positions", int, np.ndarray)

WORK_ITEM_COLUMNS = ("seq", "q_start", "num_rows", "kv_start", "kv_end", "split", "num_splits")
"""Columns of a work list, in the order of the fields of `workbench.trace.records.WorkItem`."""


def build_work_list(
    cu_seqlens_q: np.ndarray,
    seqused_k: np.ndarray,
    *,
    block_q: int,
    window: int = -1,
    kv_split: int | None = None,
) -> np.ndarray:
    """Cut a packed batch into work items.

    Every sequence is cut into tiles of at most ``block_q`` query rows, so a decode is a tile of one row. The KV range
    of a tile runs from the first position its first row may see to the position of its last row: the sliding window
    bounds one end and causality the other. Inside the range a kernel still masks the positions that single rows may
    not see.

    With ``kv_split``, ranges are cut at multiples of ``kv_split``, counted from KV position 0. The cuts in a row's
    context, and with them the order of floating-point additions, therefore depend on its position alone, not on its
    batch mates or on the chunk it came in.

    Args:
        cu_seqlens_q: int [num_seqs + 1], cumulative query lengths; a sequence may have no rows.
        seqused_k: int [num_seqs], KV length of each sequence, its query rows included.
        block_q: Maximum number of query rows in an item, 1 or more.
        window: Left window as in flash-attn: a row at position p sees [p - window, p]; -1 for all of [0, p], and -n for
            chunks of n positions.
        kv_split: Maximum number of KV positions in an item; None leaves ranges whole.

    Returns:
        int32 [num_items, 7] with the columns of ``WORK_ITEM_COLUMNS``, ordered by sequence, row and split.

    Example:
        >>> items = build_work_list(np.array([0, 5, 6]), np.array([5, 40]), block_q=4)
        >>> dict(zip(WORK_ITEM_COLUMNS, items[-1].tolist()))
        {'seq': 1, 'q_start': 5, 'num_rows': 1, 'kv_start': 0, 'kv_end': 40, 'split': 0, 'num_splits': 1}
    """
    if block_q < 1:
        raise ValueError(f"block_q is {block_q}; it must be at least 1 query row")
    if kv_split is not None and kv_split < 1:
        raise ValueError(f"kv_split is {kv_split}; it must be at least 1 KV position, or None for no split")
    cu_seqlens_q = np.asarray(cu_seqlens_q, dtype=np.int64)
    query_lens = np.diff(cu_seqlens_q)
    seq, tile = expand_counts(-(-query_lens // block_q))

    q_start = cu_seqlens_q[seq] + tile * block_q
    num_rows = np.minimum(block_q, cu_seqlens_q[seq + 1] - q_start)
    first_position = np.asarray(seqused_k, dtype=np.int64)[seq] - query_lens[seq] + tile * block_q
    kv_start = first_visible(first_position, window)
    kv_end = first_position + num_rows

    if kv_split is None:
        split, num_splits = np.zeros_like(seq), np.ones_like(seq)
    else:
        first_cut = kv_start // kv_split
        num_splits = -(-kv_end // kv_split) - first_cut
        item, split = expand_counts(num_splits)
        seq, q_start, num_rows, num_splits = seq[item], q_start[item], num_rows[item], num_splits[item]
        cut = (first_cut[item] + split) * kv_split
        kv_start = np.maximum(kv_start[item], cut)
        kv_end = np.minimum(kv_end[item], cut + kv_split)
    columns = (seq, q_start, num_rows, kv_start, kv_end, split, num_splits)
    return np.stack(columns, axis=1).astype(np.int32)


def first_visible(position: Positions, reach: int) -> Positions:
    """The first position that rows at some positions see: see `workbench.kernels.attention.options` for ``reach``."""
    if reach == -1:
        return position * 0
    return position - position % -reach if reach < 0 else np.maximum(position - reach, 0)


def expand_counts(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts [2, 0, 3]: the owner of each item, [0, 0, 2, 2, 2], and its index there, [0, 1, 0, 1, 2]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, index
