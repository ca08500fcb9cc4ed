"""The CPU attention kernel: runs a work list over a paged float32 KV cache on one core.

The online softmax follows one rule everywhere: the running maximum starts at -inf and stays there, with weights of 0,
as long as nothing was visible; the only division comes at the end, and only if something was summed. There is no
epsilon and no clamp, because both turn small logits into wrong numbers.
"""

from __future__ import annotations

from workbench.attention.cpu.chunk import attend_chunk
from workbench.attention.cpu.compiled import entry_point
from workbench.attention.cpu.decode import attend_decode
from workbench.attention.cpu.layout import MAX_DECODE_GROUP
from workbench.attention.cpu.simd import LANES


@entry_point
def run_work_list(q, k_cache, v_cache, out, work_list, block_table, shapes, scoring, scratch):
    """Run every item of a work list.

    Args:
        q: Queries, float32 [T * num_heads * head_dim].
        k_cache: Cached keys, float32 [num_blocks * block_size * num_kv_heads * head_dim].
        v_cache: Cached values, like ``k_cache``.
        out: The result, like ``q``; written.
        work_list: int32 [num_items, 7] without KV splits and with at most PAIRS_PER_ITEM pairs in an item.
        block_table: int32 [num_seqs, max_blocks].
        shapes: Sizes of the launch, `Shapes`.
        scoring: Scale, soft cap, window and sinks, `Scoring`.
        scratch: Working memory, `Scratch`.
    """
    group = shapes.num_heads // shapes.num_kv_heads
    for index in range(len(work_list)):
        item = work_list[index]
        table = block_table[item[0]]
        if item[2] == 1 and group <= MAX_DECODE_GROUP and shapes.head_dim % LANES == 0:
            attend_decode(q, k_cache, v_cache, out, table, item, shapes, scoring, scratch)
        else:
            for kv_head in range(shapes.num_kv_heads):
                attend_chunk(q, k_cache, v_cache, out, table, item, kv_head, shapes, scoring, scratch)
