"""`workbench.kernels.cpu.attention.kernel`, compiled."""

from __future__ import annotations

from workbench.kernels.cpu.attention.calls import call_by_address, types_of
from workbench.kernels.cpu.attention.chunk import attend_chunk
from workbench.kernels.cpu.attention.decode import attend_decode
from workbench.kernels.cpu.attention.kernel import CACHE_TYPES, example_of
from workbench.kernels.cpu.attention.simd import LANES


def run_work_list(q, k_cache, v_cache, out, work_list, block_table, shapes, scoring, scratch, thread, num_threads):
    """Run a thread's items of a work list: every ``num_threads``-th, from ``thread`` on.

    Args:
        q: Queries, float32 [T * num_heads * head_dim].
        k_cache: Cached keys, [num_blocks * block_size * num_kv_heads * stored_dim], of a type of `CACHE_TYPES`.
        v_cache: Cached values, likewise with ``stored_value_dim``; they may be the same memory.
        out: The result, float32 [T * num_heads * value_dim]; written.
        work_list: int32 [num_items, 7] without KV splits and with at most PAIRS_PER_ITEM pairs in an item.
        block_table: int32 [num_seqs, max_blocks].
        shapes: Sizes of the launch, `Shapes`.
        scoring: Scale, soft cap, window and sinks, `Scoring`.
        scratch: Working memory of this thread alone, `Scratch`.
        thread: Number of the thread.
        num_threads: Number of threads that share the work list.
    """
    group = shapes.num_heads // shapes.num_kv_heads
    is_even = (
        shapes.head_dim % LANES == 0
        and shapes.head_dim == shapes.value_dim
        and shapes.stored_dim == shapes.stored_value_dim
    )
    for index in range(thread, len(work_list), num_threads):
        item = work_list[index]
        table = block_table[item[0]]
        if item[2] == 1 and group <= shapes.max_decode_group and is_even:
            attend_decode(q, k_cache, v_cache, out, table, item, shapes, scoring, scratch)
        else:
            for kv_head in range(shapes.num_kv_heads):
                attend_chunk(q, k_cache, v_cache, out, table, item, kv_head, shapes, scoring, scratch)


call_work_list = call_by_address(*(types_of(*example_of(dtype)) for dtype in CACHE_TYPES))
"""Calls `run_work_list` by its address, so that other compiled code need not contain a copy of it."""
