"""The CPU attention kernel: runs a work list over a paged KV cache. All arithmetic is in float32.

The online softmax follows one rule everywhere: the running maximum starts at -inf and stays there, with weights of 0,
as long as nothing was visible; the only division comes at the end, and only if something was summed. There is no
epsilon and no clamp, because both turn small logits into wrong numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.cpu.attention.chunk import attend_chunk
from workbench.cpu.attention.compiled import call_by_address, entry_point, types_of
from workbench.cpu.attention.decode import attend_decode
from workbench.cpu.attention.layout import Scoring, Shapes, make_scratch
from workbench.cpu.attention.object_code import Signature
from workbench.cpu.attention.simd import LANES


@entry_point
def run_work_list(q, k_cache, v_cache, out, work_list, block_table, shapes, scoring, scratch, thread, num_threads):
    """Run a thread's items of a work list: every ``num_threads``-th, from ``thread`` on.

    Args:
        q: Queries, float32 [T * num_heads * head_dim].
        k_cache: Cached keys, [num_blocks * block_size * num_kv_heads * stored_dim], of a type of `CACHE_TYPES`.
        v_cache: Cached values, like ``k_cache``.
        out: The result, like ``q``; written.
        work_list: int32 [num_items, 7] without KV splits and with at most PAIRS_PER_ITEM pairs in an item.
        block_table: int32 [num_seqs, max_blocks].
        shapes: Sizes of the launch, `Shapes`.
        scoring: Scale, soft cap, window and sinks, `Scoring`.
        scratch: Working memory of this thread alone, `Scratch`.
        thread: Number of the thread.
        num_threads: Number of threads that share the work list.
    """
    group = shapes.num_heads // shapes.num_kv_heads
    for index in range(thread, len(work_list), num_threads):
        item = work_list[index]
        table = block_table[item[0]]
        if item[2] == 1 and group <= shapes.max_decode_group and shapes.head_dim % LANES == 0:
            attend_decode(q, k_cache, v_cache, out, table, item, shapes, scoring, scratch)
        else:
            for kv_head in range(shapes.num_kv_heads):
                attend_chunk(q, k_cache, v_cache, out, table, item, kv_head, shapes, scoring, scratch)


CACHE_TYPES: dict[str, type[Any]] = {"float32": np.float32, "float16": np.int16, "bfloat16": np.uint16, "int8": np.int8}
"""The type of the array that holds keys or values, by the type of its numbers."""


def _signature(cache_type: type[Any]) -> Signature:
    """The types of the arguments of `run_work_list`."""
    shapes, heads = Shapes(1, 1, LANES, 1, LANES), np.zeros(1, np.float32)
    floats, items, cache = np.zeros(LANES, np.float32), np.zeros((1, 7), np.int32), np.zeros(LANES, cache_type)
    scoring = Scoring(np.float32(1.0), np.float32(0.0), -1, heads, heads)
    return types_of(floats, cache, cache, floats, items, items, shapes, scoring, make_scratch(shapes), 0, 1)


_SIGNATURES = {dtype: _signature(cache_type) for dtype, cache_type in CACHE_TYPES.items()}

call_work_list = call_by_address(*_SIGNATURES.values())
"""Calls `run_work_list` by its address, so that other compiled code need not contain a copy of it."""


def work_list_address(dtype: str) -> int:
    """Address of `run_work_list` for a cache of numbers of a type, such as "float16"."""
    return run_work_list.address(_SIGNATURES[dtype])
