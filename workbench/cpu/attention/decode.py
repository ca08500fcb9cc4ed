"""Decodes in the CPU attention kernel, with the head dimension along the lanes of vector registers.

A decode has one row and so only a few (row, head) pairs per KV head; along the lanes, they would leave most of them
empty. Here each key is multiplied with the few queries that share it, and K and V are read straight from the cache,
once, in the order of memory.
"""

from __future__ import annotations

import numpy as np

from workbench.cpu.attention.layout import BLOCK_KV
from workbench.cpu.attention.matmul_tiles import dot_tile, matmul_tile
from workbench.cpu.attention.simd import (
    LANES,
    exp2,
    jit,
    larger,
    largest_of,
    load,
    prefetch,
    splat,
    store,
    tanh,
    total_of,
)

_ZERO, _ONE, _NEG_INF = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)
_LINE = 16  # float32 numbers per cache line
_KEYS = 4  # keys per register tile of scores
_VECTORS = 4  # vectors per register tile of values

_score_2_heads, _score_2_heads_1_key = dot_tile(2, _KEYS), dot_tile(2, 1)
_score_1_head, _score_1_head_1_key = dot_tile(1, _KEYS), dot_tile(1, 1)
_add_2_heads, _add_2_heads_1_vector = matmul_tile(2, _VECTORS, accumulate=True), matmul_tile(2, 1, accumulate=True)
_add_1_head, _add_1_head_1_vector = matmul_tile(1, _VECTORS, accumulate=True), matmul_tile(1, 1, accumulate=True)


@jit
def _score_run(scores, q, first_head, group, head_dim, at, k_cache, key_at, key_row, count):
    """Scores of ``count`` keys, ``key_row`` apart, for the ``group`` query heads from ``first_head`` on."""
    vectors = head_dim // LANES
    whole = count - count % _KEYS
    for head in range(first_head, first_head + group, 2):
        score_at, q_at = head * BLOCK_KV + at, head * head_dim
        pair = head + 1 < first_head + group
        for key in range(0, whole, _KEYS):
            place = key_at + key * key_row
            if pair:
                _score_2_heads(scores, score_at + key, BLOCK_KV, q, q_at, head_dim, k_cache, place, key_row, vectors)
            else:
                _score_1_head(scores, score_at + key, BLOCK_KV, q, q_at, head_dim, k_cache, place, key_row, vectors)
        for key in range(whole, count):
            place = key_at + key * key_row
            if pair:
                _score_2_heads_1_key(
                    scores, score_at + key, BLOCK_KV, q, q_at, head_dim, k_cache, place, key_row, vectors
                )
            else:
                _score_1_head_1_key(
                    scores, score_at + key, BLOCK_KV, q, q_at, head_dim, k_cache, place, key_row, vectors
                )


@jit
def _value_run(out, weights, first_head, group, head_dim, at, v_cache, value_at, value_row, count):
    """Add the weighted values of ``count`` keys to the sums of the ``group`` heads from ``first_head`` on."""
    whole = head_dim - head_dim % (_VECTORS * LANES)
    for head in range(first_head, first_head + group, 2):
        weight_at, out_at = head * BLOCK_KV + at, head * head_dim
        pair = head + 1 < first_head + group
        for d in range(0, whole, _VECTORS * LANES):
            if pair:
                _add_2_heads(
                    out, out_at + d, head_dim, weights, weight_at, BLOCK_KV, 1, v_cache, value_at + d, value_row, count
                )
            else:
                _add_1_head(
                    out, out_at + d, head_dim, weights, weight_at, BLOCK_KV, 1, v_cache, value_at + d, value_row, count
                )
        for d in range(whole, head_dim, LANES):
            if pair:
                _add_2_heads_1_vector(
                    out, out_at + d, head_dim, weights, weight_at, BLOCK_KV, 1, v_cache, value_at + d, value_row, count
                )
            else:
                _add_1_head_1_vector(
                    out, out_at + d, head_dim, weights, weight_at, BLOCK_KV, 1, v_cache, value_at + d, value_row, count
                )


@jit
def _prefetch_run(cache, at, row, count, head_dim):
    """Prefetch the keys or values of a run while others are computed; blocks lie anywhere in memory."""
    for key in range(count):
        for d in range(0, head_dim, _LINE):
            prefetch(cache, at + key * row + d)


@jit
def attend_decode(q, k_cache, v_cache, out, table, item, shapes, scoring, scratch):
    """A work item of one row, for all heads; the head dimension is a multiple of LANES.

    All KV heads of a block are computed before the next block, because that is the order of memory.
    """
    head_dim, num_heads = shapes.head_dim, shapes.num_heads
    row_at = np.int64(item[1]) * num_heads * head_dim
    kv_end = item[4]
    for at in range(0, num_heads * head_dim, LANES):
        store(scratch.q, at, load(q, row_at + at) * splat(scoring.scale))
        store(scratch.out, at, splat(_ZERO))
    for head in range(num_heads):
        scratch.maximum[head] = scoring.first_maximum[head]
        scratch.total[head] = scoring.first_total[head]

    for start in range(item[3], kv_end, BLOCK_KV):
        stop = min(start + BLOCK_KV, kv_end)
        _score_tile(start, stop, k_cache, v_cache, table, shapes, scratch)
        for head in range(num_heads):
            _soften_row(head, stop - start, head_dim, scoring.softcap, scratch)
        _add_tile(start, stop, kv_end, k_cache, v_cache, table, shapes, scratch)

    for head in range(num_heads):
        total = scratch.total[head]
        factor = splat(_ZERO if total == _ZERO else _ONE / total)
        for at in range(head * head_dim, (head + 1) * head_dim, LANES):
            store(out, row_at + at, load(scratch.out, at) * factor)


@jit
def _run_from(position, stop, table, shapes):
    """The positions from one to the end of its block or to ``stop``: their number, and their place in a cache."""
    block_size, row_size = shapes.block_size, shapes.num_kv_heads * shapes.head_dim
    offset = position % block_size
    place = (np.int64(table[position // block_size]) * block_size + offset) * row_size
    return min(block_size - offset, stop - position), place


@jit
def _score_tile(start, stop, k_cache, v_cache, table, shapes, scratch):
    """Scores of KV positions [start, stop) for all heads; prefetches the values of the same positions."""
    head_dim, row_size = shapes.head_dim, shapes.num_kv_heads * shapes.head_dim
    group = shapes.num_heads // shapes.num_kv_heads
    position = start
    while position < stop:
        run, run_at = _run_from(position, stop, table, shapes)
        at = position - start
        for kv_head in range(shapes.num_kv_heads):
            key_at, head = run_at + kv_head * head_dim, kv_head * group
            _prefetch_run(v_cache, key_at, row_size, run, head_dim)
            _score_run(scratch.scores, scratch.q, head, group, head_dim, at, k_cache, key_at, row_size, run)
        position += run


@jit
def _add_tile(start, stop, kv_end, k_cache, v_cache, table, shapes, scratch):
    """Add the weighted values of [start, stop) for all heads; prefetches the keys of the next tile."""
    head_dim, block_size, row_size = shapes.head_dim, shapes.block_size, shapes.num_kv_heads * shapes.head_dim
    group = shapes.num_heads // shapes.num_kv_heads
    position = start
    while position < stop:
        run, run_at = _run_from(position, stop, table, shapes)
        later = min(position + BLOCK_KV, kv_end - 1)
        later_at = (np.int64(table[later // block_size]) * block_size + position % block_size) * row_size
        at = position - start
        for kv_head in range(shapes.num_kv_heads):
            value_at, head = run_at + kv_head * head_dim, kv_head * group
            _prefetch_run(k_cache, later_at + kv_head * head_dim, row_size, run, head_dim)
            _value_run(scratch.out, scratch.scores, head, group, head_dim, at, v_cache, value_at, row_size, run)
        position += run


@jit
def _soften_row(head, count, head_dim, softcap, scratch):
    """One step of the online softmax for one head: scores become weights relative to the largest score so far."""
    scores, scores_at = scratch.scores, head * BLOCK_KV
    whole = -(-count // LANES) * LANES
    if softcap > _ZERO:
        inverse = splat(_ONE / softcap)
        for at in range(0, whole, LANES):
            store(scores, scores_at + at, splat(softcap) * tanh(load(scores, scores_at + at) * inverse))
    for at in range(count, whole):
        scores[scores_at + at] = _NEG_INF
    largest = load(scores, scores_at)
    for at in range(LANES, whole, LANES):
        largest = larger(largest, load(scores, scores_at + at))
    old_maximum = scratch.maximum[head]
    maximum = largest_of(largest)
    maximum = maximum if maximum > old_maximum else old_maximum
    shift = maximum if maximum > _NEG_INF else _ZERO  # -inf stays, and 0 is subtracted instead: see chunk.py
    total = splat(_ZERO)
    for at in range(0, whole, LANES):
        weight = exp2(load(scores, scores_at + at) - splat(shift))
        store(scores, scores_at + at, weight)
        total = total + weight
    rescale = exp2(splat(old_maximum - shift))
    for at in range(head * head_dim, (head + 1) * head_dim, LANES):
        store(scratch.out, at, load(scratch.out, at) * rescale)
    scratch.maximum[head] = maximum
    scratch.total[head] = scratch.total[head] * largest_of(rescale) + total_of(total)
