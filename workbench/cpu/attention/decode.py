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
    has_scales,
    jit,
    larger,
    largest_of,
    load,
    prefetch,
    scale_at,
    splat,
    store,
    tanh,
    total_of,
)

_ZERO, _ONE, _NEG_INF = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)
_LINE = 64  # bytes of a cache line
_MANY = 3 if LANES == 8 else 4  # query heads per register tile: AVX2 has 16 registers, AVX-512 and Arm 32
_KEYS = 4  # keys per register tile of scores
_VECTORS = 4  # vectors per register tile of values

_score_many, _score_2_heads, _score_1_head = dot_tile(_MANY, _KEYS), dot_tile(2, _KEYS), dot_tile(1, 2 * _KEYS)
_score_1_head_1_key = dot_tile(1, 1)
_add_many, _add_2_heads = matmul_tile(_MANY, _VECTORS, accumulate=True), matmul_tile(2, _VECTORS, accumulate=True)
_add_1_head, _add_1_head_1_vector = matmul_tile(1, _VECTORS, accumulate=True), matmul_tile(1, 1, accumulate=True)


@jit
def _tile_heads(left):
    """Query heads of the next tile if some are left."""
    return _MANY if left >= _MANY else min(left, 2)


@jit
def _score_run(scores, q, first_head, group, head_dim, at, k_cache, key_at, key_row, count):
    """Scores of ``count`` keys, ``key_row`` apart, for the ``group`` query heads from ``first_head`` on."""
    vectors = head_dim // LANES
    head = first_head
    while head < first_head + group:
        heads = _tile_heads(first_head + group - head)
        score_at, q_at = head * BLOCK_KV + at, head * head_dim
        whole = count - count % (2 * _KEYS if heads == 1 else _KEYS)
        if heads == _MANY:
            for key in range(0, whole, _KEYS):
                place = key_at + key * key_row
                _score_many(scores, score_at + key, BLOCK_KV, q, q_at, head_dim, k_cache, place, key_row, vectors)
        elif heads == 2:
            for key in range(0, whole, _KEYS):
                place = key_at + key * key_row
                _score_2_heads(scores, score_at + key, BLOCK_KV, q, q_at, head_dim, k_cache, place, key_row, vectors)
        else:
            for key in range(0, whole, 2 * _KEYS):
                place = key_at + key * key_row
                _score_1_head(scores, score_at + key, BLOCK_KV, q, q_at, head_dim, k_cache, place, key_row, vectors)
        for key in range(whole, count):
            place = key_at + key * key_row
            for own in range(heads):
                own_at, own_q_at = score_at + own * BLOCK_KV + key, q_at + own * head_dim
                _score_1_head_1_key(scores, own_at, 0, q, own_q_at, 0, k_cache, place, 0, vectors)
        head += heads


@jit
def _value_run(out, weights, first_head, group, head_dim, at, v_cache, value_at, value_row, count):
    """Add the weighted values of ``count`` keys to the sums of the ``group`` heads from ``first_head`` on."""
    whole = head_dim - head_dim % (_VECTORS * LANES)
    head = first_head
    while head < first_head + group:
        heads = _tile_heads(first_head + group - head)
        weight_at, out_at = head * BLOCK_KV + at, head * head_dim
        for d in range(0, whole, _VECTORS * LANES):
            place = value_at + d
            if heads == _MANY:
                _add_many(out, out_at + d, head_dim, weights, weight_at, BLOCK_KV, 1, v_cache, place, value_row, count)
            elif heads == 2:
                _add_2_heads(
                    out, out_at + d, head_dim, weights, weight_at, BLOCK_KV, 1, v_cache, place, value_row, count
                )
            else:
                _add_1_head(
                    out, out_at + d, head_dim, weights, weight_at, BLOCK_KV, 1, v_cache, place, value_row, count
                )
        for d in range(whole, head_dim, LANES):
            for own in range(heads):
                own_out_at, own_weight_at = out_at + own * head_dim + d, weight_at + own * BLOCK_KV
                _add_1_head_1_vector(
                    out, own_out_at, 0, weights, own_weight_at, 0, 1, v_cache, value_at + d, value_row, count
                )
        head += heads


@jit
def _prefetch_run(cache, at, row, count, head_dim):
    """Prefetch the keys or values of a run while others are computed; blocks lie anywhere in memory."""
    for key in range(count):
        for d in range(0, head_dim, _LINE // cache.itemsize):
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
            _soften_row(head, stop - start, k_cache, shapes, scoring.softcap, scratch)
        _add_tile(start, stop, kv_end, k_cache, v_cache, table, shapes, scratch)

    for head in range(num_heads):
        total = scratch.total[head]
        factor = splat(_ZERO if total == _ZERO else _ONE / total)
        for at in range(head * head_dim, (head + 1) * head_dim, LANES):
            store(out, row_at + at, load(scratch.out, at) * factor)


@jit
def _run_from(position, stop, table, shapes):
    """The positions from one to the end of its block or to ``stop``: their number, and their place in a cache."""
    block_size, row_size = shapes.block_size, shapes.num_kv_heads * shapes.stored_dim
    offset = position % block_size
    place = (np.int64(table[position // block_size]) * block_size + offset) * row_size
    return min(block_size - offset, stop - position), place


@jit
def _score_tile(start, stop, k_cache, v_cache, table, shapes, scratch):
    """Scores of KV positions [start, stop) for all heads; prefetches the values of the same positions."""
    head_dim, row_size = shapes.head_dim, shapes.num_kv_heads * shapes.stored_dim
    group = shapes.num_heads // shapes.num_kv_heads
    position = start
    while position < stop:
        run, run_at = _run_from(position, stop, table, shapes)
        at = position - start
        for kv_head in range(shapes.num_kv_heads):
            key_at, head = run_at + kv_head * shapes.stored_dim, kv_head * group
            _prefetch_run(v_cache, key_at, row_size, run, head_dim)
            _score_run(scratch.scores, scratch.q, head, group, head_dim, at, k_cache, key_at, row_size, run)
            if has_scales(k_cache):
                keys_at = kv_head * BLOCK_KV + at
                values_at = keys_at + shapes.num_kv_heads * BLOCK_KV
                for key in range(run):
                    place = key_at + key * row_size + head_dim
                    scratch.scales[keys_at + key] = scale_at(k_cache, place)
                    scratch.scales[values_at + key] = scale_at(v_cache, place)
        position += run


@jit
def _add_tile(start, stop, kv_end, k_cache, v_cache, table, shapes, scratch):
    """Add the weighted values of [start, stop) for all heads; prefetches the keys of the next tile."""
    head_dim, block_size, row_size = shapes.head_dim, shapes.block_size, shapes.num_kv_heads * shapes.stored_dim
    group = shapes.num_heads // shapes.num_kv_heads
    position = start
    while position < stop:
        run, run_at = _run_from(position, stop, table, shapes)
        later = min(position + BLOCK_KV, kv_end - 1)
        later_at = (np.int64(table[later // block_size]) * block_size + position % block_size) * row_size
        at = position - start
        for kv_head in range(shapes.num_kv_heads):
            value_at, head = run_at + kv_head * shapes.stored_dim, kv_head * group
            _prefetch_run(k_cache, later_at + kv_head * shapes.stored_dim, row_size, run, head_dim)
            _value_run(scratch.out, scratch.scores, head, group, head_dim, at, v_cache, value_at, row_size, run)
        position += run


@jit
def _soften_row(head, count, cache, shapes, softcap, scratch):
    """One step of the online softmax for one head: scores become weights relative to the largest score so far.

    Scales of codes become part of them: those of the keys before, and those of the values afterwards.
    """
    scores, scores_at, head_dim = scratch.scores, head * BLOCK_KV, shapes.head_dim
    whole = -(-count // LANES) * LANES
    keys_at = head // (shapes.num_heads // shapes.num_kv_heads) * BLOCK_KV
    values_at = keys_at + shapes.num_kv_heads * BLOCK_KV
    if has_scales(cache):
        for at in range(0, whole, LANES):
            store(scores, scores_at + at, load(scores, scores_at + at) * load(scratch.scales, keys_at + at))
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
        total = total + weight
        if has_scales(cache):
            weight = weight * load(scratch.scales, values_at + at)
        store(scores, scores_at + at, weight)
    rescale = exp2(splat(old_maximum - shift))
    if maximum != old_maximum:
        for at in range(head * head_dim, (head + 1) * head_dim, LANES):
            store(scratch.out, at, load(scratch.out, at) * rescale)
    scratch.maximum[head] = maximum
    scratch.total[head] = scratch.total[head] * largest_of(rescale) + total_of(total)
