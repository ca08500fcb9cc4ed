"""The CPU attention kernel: runs a work list over a paged float32 KV cache on one core.

The softmax is the online one and follows one rule everywhere: the running maximum starts at -inf and stays there
while nothing was visible, the weights are 0 there, and the one division comes at the end, only where something was
summed. No epsilon, no clamp: both turn small logits into wrong numbers.
"""

from __future__ import annotations

from workbench.attention.compiled import entry_point
from workbench.attention.cpu_chunk import attend_chunk
from workbench.attention.cpu_decode import attend_decode
from workbench.attention.cpu_layout import MAX_DECODE_GROUP
from workbench.attention.simd import LANES


@entry_point
def run_work_list(q, k_cache, v_cache, out, work_list, block_table, shapes, scoring, scratch):
    """Run every item of a work list.

    Args:
        q: float32 [T * num_heads * head_dim].
        k_cache: float32 [num_blocks * block_size * num_kv_heads * head_dim].
        v_cache: Like ``k_cache``.
        out: Like ``q``; written.
        work_list: int32 [num_items, 7] without KV splits, at most PAIRS_PER_ITEM pairs per item.
        block_table: int32 [num_seqs, max_blocks].
        shapes: Sizes, `Shapes`.
        scoring: Rules, `Scoring`.
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
