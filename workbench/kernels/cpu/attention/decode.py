"""Decodes in the CPU attention kernel, with the head dimension along the lanes of vector registers.

A decode has one row and so only a few (row, head) pairs per KV head; along the lanes, they would leave most of them
empty. Here each key is multiplied with the few queries that share it, and K and V are read straight from the cache,
once.

A tile of keys spans several blocks, which lie anywhere in memory. Its four quarters are read in lockstep: a processor
follows a few streams of reads at once, and what it loses where one stream begins, the others make up for. Values are
prefetched in the same order while keys are read, and the next tile's keys while values are added.
"""

from __future__ import annotations

import numpy as np

from workbench.kernels.cpu.attention.layout import BLOCK_KV, LOCKSTEP
from workbench.kernels.cpu.attention.matmul_tiles import dot_tile, weighted_tile
from workbench.kernels.cpu.attention.simd import (
    LANES,
    exp2,
    has_scales,
    jit,
    larger,
    largest_of,
    load,
    prefetch_row,
    scale_at,
    splat,
    store,
    tanh,
    total_of,
)

_ZERO, _ONE, _NEG_INF = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)
_MANY = 3 if LANES == 8 else 4  # query heads per register tile: AVX2 has 16 registers, AVX-512 and Arm 32
_QUARTERS = 4  # keys per register tile of scores, one of each quarter of a tile
_VECTORS = 4  # vectors per register tile of values
_RUN = LOCKSTEP  # values that are summed before they are added to an output

_score_many, _score_2_heads, _score_1_head = (dot_tile(heads, _QUARTERS) for heads in (_MANY, 2, 1))
_score_1_head_1_key = dot_tile(1, 1)
_add_many, _add_2_heads, _add_1_head = (weighted_tile(heads, _VECTORS) for heads in (_MANY, 2, 1))
_add_1_head_1_vector = weighted_tile(1, 1)


@jit
def attend_decode(q, k_cache, v_cache, out, table, item, shapes, scoring, scratch):
    """A work item of one row, for all heads; keys and values have the same size, a multiple of LANES."""
    head_dim, num_heads = shapes.head_dim, shapes.num_heads
    row_at = np.int64(item[1]) * num_heads * head_dim
    kv_end = item[4]
    for at in range(0, num_heads * head_dim, LANES):
        store(scratch.q, at, load(q, row_at + at) * splat(scoring.scale))
        store(scratch.out, at, splat(_ZERO))
    for head in range(num_heads):
        scratch.maximum[head] = scoring.first_maximum[head]
        scratch.total[head] = scoring.first_total[head]

    now, later = 0, BLOCK_KV
    _find_places(now, item[3], kv_end, table, shapes, scratch)
    for start in range(item[3], kv_end, BLOCK_KV):
        count = min(BLOCK_KV, kv_end - start)
        _find_places(later, min(start + BLOCK_KV, kv_end - 1), kv_end, table, shapes, scratch)
        _score_tile(now, count, k_cache, v_cache, shapes, scratch)
        _soften_tile(count, k_cache, shapes, scoring.softcap, scratch)
        _add_tile(now, later, count, k_cache, v_cache, shapes, scratch)
        now, later = later, now

    for head in range(num_heads):
        total = scratch.total[head]
        factor = splat(_ZERO if total == _ZERO else _ONE / total)
        for at in range(head * head_dim, (head + 1) * head_dim, LANES):
            store(out, row_at + at, load(scratch.out, at) * factor)


@jit
def _find_places(first, start, stop, table, shapes, scratch):
    """Find where a tile's tokens, from position ``start`` on, lie in a cache; the last one is repeated to its end."""
    places, block_size, row_size = scratch.places, shapes.block_size, shapes.num_kv_heads * shapes.stored_dim
    block, offset = start // block_size, start % block_size
    place = (np.int64(table[block]) * block_size + offset) * row_size
    for at in range(first, first + min(BLOCK_KV, stop - start)):
        if offset == block_size:
            block, offset = block + 1, 0
            place = np.int64(table[block]) * block_size * row_size
        places[at] = place
        offset += 1
        place += row_size
    for at in range(first + min(BLOCK_KV, stop - start), first + BLOCK_KV):
        places[at] = place - row_size


@jit
def _score_tile(now, count, k_cache, v_cache, shapes, scratch):
    """Scores of a tile for all heads; prefetches its values."""
    scores, q, places, scales = scratch.scores, scratch.q, scratch.places, scratch.scales
    head_dim, stored_dim, num_kv_heads = shapes.head_dim, shapes.stored_dim, shapes.num_kv_heads
    group, vectors = shapes.num_heads // num_kv_heads, head_dim // LANES
    quarter = count // _QUARTERS
    for key in range(quarter):
        at = now + key
        for kv_head in range(num_kv_heads):
            offset, head = kv_head * stored_dim, kv_head * group
            for number in range(_QUARTERS):
                prefetch_row(v_cache, places[at + number * quarter] + offset, stored_dim)
            while head < (kv_head + 1) * group:
                left, score_at, q_at = (kv_head + 1) * group - head, head * BLOCK_KV + key, head * head_dim
                if left >= _MANY:
                    _score_many(
                        scores, score_at, BLOCK_KV, q, q_at, head_dim, k_cache, places, at, quarter, offset, vectors
                    )
                    head += _MANY
                elif left >= 2:
                    _score_2_heads(
                        scores, score_at, BLOCK_KV, q, q_at, head_dim, k_cache, places, at, quarter, offset, vectors
                    )
                    head += 2
                else:
                    _score_1_head(
                        scores, score_at, BLOCK_KV, q, q_at, head_dim, k_cache, places, at, quarter, offset, vectors
                    )
                    head += 1
    for key in range(quarter * _QUARTERS, count):
        for head in range(shapes.num_heads):
            offset = head // group * stored_dim
            score_at, q_at = head * BLOCK_KV + key, head * head_dim
            _score_1_head_1_key(scores, score_at, 0, q, q_at, 0, k_cache, places, now + key, 0, offset, vectors)
    if has_scales(k_cache):
        for kv_head in range(num_kv_heads):
            keys_at = kv_head * BLOCK_KV
            values_at = keys_at + num_kv_heads * BLOCK_KV
            for key in range(count):
                place = places[now + key] + kv_head * stored_dim + head_dim
                scales[keys_at + key], scales[values_at + key] = scale_at(k_cache, place), scale_at(v_cache, place)


@jit
def _soften_tile(count, cache, shapes, softcap, scratch):
    """One step of the online softmax for all heads: scores become weights relative to the largest score so far.

    Scales of codes become part of them: those of the keys before, and those of the values afterwards.
    """
    scores, scales, out, head_dim = scratch.scores, scratch.scales, scratch.out, shapes.head_dim
    maxima, totals = scratch.maximum, scratch.total
    group = shapes.num_heads // shapes.num_kv_heads
    whole = -(-count // LANES) * LANES
    for head in range(shapes.num_heads):
        scores_at, keys_at = head * BLOCK_KV, head // group * BLOCK_KV
        values_at = keys_at + shapes.num_kv_heads * BLOCK_KV
        if has_scales(cache):
            for at in range(0, whole, LANES):
                store(scores, scores_at + at, load(scores, scores_at + at) * load(scales, keys_at + at))
        if softcap > _ZERO:
            inverse = splat(_ONE / softcap)
            for at in range(0, whole, LANES):
                store(scores, scores_at + at, splat(softcap) * tanh(load(scores, scores_at + at) * inverse))
        for at in range(count, whole):
            scores[scores_at + at] = _NEG_INF
        largest = load(scores, scores_at)
        for at in range(LANES, whole, LANES):
            largest = larger(largest, load(scores, scores_at + at))
        old_maximum = maxima[head]
        maximum = largest_of(largest)
        maximum = maximum if maximum > old_maximum else old_maximum
        shift = maximum if maximum > _NEG_INF else _ZERO  # -inf stays, and 0 is subtracted instead: see chunk.py
        total = splat(_ZERO)
        for at in range(0, whole, LANES):
            weight = exp2(load(scores, scores_at + at) - splat(shift))
            total = total + weight
            if has_scales(cache):
                weight = weight * load(scales, values_at + at)
            store(scores, scores_at + at, weight)
        rescale = exp2(splat(old_maximum - shift))
        if maximum != old_maximum:
            for at in range(head * head_dim, (head + 1) * head_dim, LANES):
                store(out, at, load(out, at) * rescale)
        maxima[head] = maximum
        totals[head] = totals[head] * largest_of(rescale) + total_of(total)


@jit
def _add_tile(now, later, count, k_cache, v_cache, shapes, scratch):
    """Add a tile's weighted values for all heads; prefetches the keys of the next tile."""
    out, weights, places, head_dim = scratch.out, scratch.scores, scratch.places, shapes.head_dim
    group = shapes.num_heads // shapes.num_kv_heads
    whole = head_dim - head_dim % (_VECTORS * LANES)
    for run_at in range(0, count, _RUN):
        run, first, next_first = min(_RUN, count - run_at), now + run_at, later + run_at // _QUARTERS
        for kv_head in range(shapes.num_kv_heads):
            head = kv_head * group
            while head < (kv_head + 1) * group:
                left, weight_at, out_at = (kv_head + 1) * group - head, head * BLOCK_KV + run_at, head * head_dim
                heads = _MANY if left >= _MANY else min(left, 2)
                for d in range(0, whole, _VECTORS * LANES):
                    at, offset = out_at + d, kv_head * shapes.stored_dim + d
                    source = (v_cache, places, first, offset, run, k_cache, next_first)
                    if heads == _MANY:
                        _add_many(out, at, head_dim, weights, weight_at, BLOCK_KV, *source)
                    elif heads == 2:
                        _add_2_heads(out, at, head_dim, weights, weight_at, BLOCK_KV, *source)
                    else:
                        _add_1_head(out, at, head_dim, weights, weight_at, BLOCK_KV, *source)
                for d in range(whole, head_dim, LANES):
                    offset = kv_head * shapes.stored_dim + d
                    for own in range(heads):
                        at, own_at = out_at + own * head_dim + d, weight_at + own * BLOCK_KV
                        _add_1_head_1_vector(
                            out, at, 0, weights, own_at, 0, v_cache, places, first, offset, run, k_cache, next_first
                        )
                head += heads
