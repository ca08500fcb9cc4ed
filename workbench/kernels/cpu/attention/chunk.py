"""Chunk tiles of the CPU attention kernel, with (row, head) pairs along the lanes of vector registers.

A *panel* of PANEL pairs is multiplied with one tile of keys at a time::

    scores[key, pair] = K[key, :] @ Q[:, pair]        one register tile: some keys x one panel
    weights = exp2(scores - maximum)                  maximum and sum run down the keys, lane by lane
    out[d, pair] += V[:, d] @ weights[:, pair]        one register tile: some d x one panel

No lane reads its neighbour, elements of K and V are broadcast in the order of the cache, and the heads that share a KV
head (GQA) are lanes of the same panel, so K and V are read once for all of them.
"""

from __future__ import annotations

import numpy as np

from workbench.kernels.cpu.attention.layout import BLOCK_KV, PANEL, TILE_ROWS
from workbench.kernels.cpu.attention.matmul_tiles import matmul_tile
from workbench.kernels.cpu.attention.simd import (
    LANES,
    exp2,
    get,
    jit,
    larger,
    load,
    scale_at,
    splat,
    store,
    tanh,
    total_of,
    where_less,
)

_ZERO, _ONE, _NEG_INF = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)

_SCORE_DEPTH = 16  # number of products that are summed before they are added to a score

_product_tile = matmul_tile(TILE_ROWS, 2, accumulate=False)
_half_product_tile = matmul_tile(TILE_ROWS, 1, accumulate=False)
_sum_tile = matmul_tile(TILE_ROWS, 2, accumulate=True)
_half_sum_tile = matmul_tile(TILE_ROWS, 1, accumulate=True)


@jit
def attend_chunk(q, k_cache, v_cache, out, table, item, kv_head, shapes, scoring, scratch):
    """One work item for the query heads of one KV head."""
    head_dim, value_dim = shapes.head_dim, shapes.value_dim
    depth = -(-value_dim // TILE_ROWS) * TILE_ROWS
    kv_start, kv_end = item[3], item[4]
    num_pairs = item[2] * (shapes.num_heads // shapes.num_kv_heads)
    num_panels = -(-num_pairs // PANEL)
    _pack_queries(q, item, kv_head, num_panels, shapes, scoring, scratch)
    scratch.out[: num_panels * depth * PANEL] = _ZERO

    for start in range(kv_start, kv_end, BLOCK_KV):
        stop = min(start + BLOCK_KV, kv_end)
        num_keys = -(-(stop - start) // TILE_ROWS) * TILE_ROWS
        keys_of, values_of = (head_dim, shapes.stored_dim, head_dim), (value_dim, shapes.stored_value_dim, depth)
        _load_tile(scratch.keys, keys_of, k_cache, table, start, stop, num_keys, kv_head, shapes)
        _load_tile(scratch.values, values_of, v_cache, table, start, stop, num_keys, kv_head, shapes)
        for panel in range(num_panels):
            first = panel * PANEL
            last = min(first + PANEL, num_pairs) - 1
            half = last - first < LANES
            if start > scratch.high[last] or stop <= scratch.low[first]:
                continue
            _score_keys(panel, num_keys, half, head_dim, scratch)
            if scoring.softcap > _ZERO:
                _cap_scores(scratch.scores, num_keys * PANEL, scoring.softcap)
            masked = start + num_keys - 1 > scratch.high[first] or start < scratch.low[last]
            if masked:
                _mask_scores(panel, start, num_keys, scratch)
            _soften_scores(panel, num_keys, scratch)
            _rescale_sums(panel, depth, scratch)
            if masked and not _all_finite(scratch.values, num_keys * depth):
                _add_visible_values(panel, start, stop, depth, scratch)
            else:
                _add_values(panel, num_keys, half, depth, scratch)
    _unpack_output(out, item, kv_head, shapes, scratch)


@jit
def _pack_queries(q, item, kv_head, num_panels, shapes, scoring, scratch):
    """Lay the item's scaled queries out with the pairs along the lanes, and note the positions each pair may see."""
    q_start, num_rows, kv_end = item[1], item[2], item[4]
    head_dim, group = shapes.head_dim, shapes.num_heads // shapes.num_kv_heads
    for panel in range(num_panels):
        base = panel * head_dim * PANEL
        for lane in range(PANEL):
            pair = panel * PANEL + lane
            row, head = pair // group, kv_head * group + pair % group
            if row < num_rows:
                source = ((q_start + row) * shapes.num_heads + head) * head_dim
                for d in range(head_dim):
                    scratch.q[base + d * PANEL + lane] = q[source + d] * scoring.scale
                position = kv_end - num_rows + row
                scratch.high[pair] = position
                if scoring.left < -1:
                    scratch.low[pair] = position - position % -scoring.left
                else:
                    scratch.low[pair] = max(position - scoring.left, 0) if scoring.left >= 0 else 0
                scratch.maximum[pair] = scoring.first_maximum[head]
                scratch.total[pair] = scoring.first_total[head]
            else:  # a lane without a pair is computed but never written
                for d in range(head_dim):
                    scratch.q[base + d * PANEL + lane] = _ZERO
                scratch.high[pair], scratch.low[pair] = kv_end - 1, 0
                scratch.maximum[pair], scratch.total[pair] = _NEG_INF, _ZERO


@jit
def _load_tile(tile, sizes, cache, table, start, stop, num_keys, kv_head, shapes):
    """Copy KV positions [start, stop) of one head out of the cache; zeros up to ``num_keys`` and ``tile_row``.

    ``sizes`` are the elements of a row that are copied, those of a row in the cache, whose last ones are the scale of
    codes, and those of a row of the tile. Only positions of the range are read, so the contents of a stale slot stay
    out of every sum.
    """
    dim, stored_dim, tile_row = sizes
    block_size, num_vectors = shapes.block_size, dim // LANES
    scale_place = stored_dim - (shapes.stored_dim - shapes.head_dim)
    at, position = 0, start
    while position < stop:
        offset = position % block_size
        run = min(block_size - offset, stop - position)
        slot = np.int64(table[position // block_size]) * block_size + offset
        for key in range(run):
            source = ((slot + key) * shapes.num_kv_heads + kv_head) * stored_dim
            scale = scale_at(cache, source + scale_place)
            for vector in range(num_vectors):
                store(tile, at + vector * LANES, load(cache, source + vector * LANES) * splat(scale))
            for d in range(num_vectors * LANES, dim):
                tile[at + d] = get(cache, source + d) * scale
            for d in range(dim, tile_row):
                tile[at + d] = _ZERO
            at += tile_row
        position += run
    for index in range(at, num_keys * tile_row):
        tile[index] = _ZERO


@jit
def _score_keys(panel, num_keys, half, head_dim, scratch):
    """``scores = K @ Q`` for one tile of keys and one panel.

    The head dimension is summed in pieces; with large logits, the rounding of one long sum would show.
    """
    scores, keys, q = scratch.scores, scratch.keys, scratch.q
    for key in range(0, num_keys, TILE_ROWS):
        at = key * PANEL
        for d in range(0, head_dim, _SCORE_DEPTH):
            key_at, q_at = key * head_dim + d, (panel * head_dim + d) * PANEL
            depth = min(_SCORE_DEPTH, head_dim - d)
            if half and d == 0:
                _half_product_tile(scores, at, PANEL, keys, key_at, head_dim, 1, q, q_at, PANEL, depth)
            elif half:
                _half_sum_tile(scores, at, PANEL, keys, key_at, head_dim, 1, q, q_at, PANEL, depth)
            elif d == 0:
                _product_tile(scores, at, PANEL, keys, key_at, head_dim, 1, q, q_at, PANEL, depth)
            else:
                _sum_tile(scores, at, PANEL, keys, key_at, head_dim, 1, q, q_at, PANEL, depth)


@jit
def _cap_scores(scores, count, softcap):
    """``softcap * tanh(score / softcap)``."""
    inverse = splat(_ONE / softcap)
    for at in range(0, count, LANES):
        store(scores, at, splat(softcap) * tanh(load(scores, at) * inverse))


@jit
def _mask_scores(panel, start, num_keys, scratch):
    """Set the scores of positions that a pair may not see to -inf, the tile's padding included."""
    first = panel * PANEL
    for key in range(num_keys):
        position = start + key
        for lane in range(PANEL):
            if position < scratch.low[first + lane] or position > scratch.high[first + lane]:
                scratch.scores[key * PANEL + lane] = _NEG_INF


@jit
def _soften_scores(panel, num_keys, scratch):
    """One step of the online softmax: scores become weights relative to the largest score so far."""
    scores = scratch.scores
    for half_at in range(0, PANEL, LANES):
        pair_at = panel * PANEL + half_at
        old_maximum = load(scratch.maximum, pair_at)
        maximum = old_maximum
        for at in range(half_at, num_keys * PANEL, PANEL):
            maximum = larger(maximum, load(scores, at))
        # The maximum stays -inf while a pair has seen nothing. Then 0 is subtracted instead, so that -inf - (-inf) is
        # never formed and the weights are exp2(-inf) = 0.
        shift = where_less(splat(_NEG_INF), maximum, maximum, splat(_ZERO))
        rescale = exp2(old_maximum - shift)
        total = load(scratch.total, pair_at) * rescale
        for at in range(half_at, num_keys * PANEL, PANEL):
            weight = exp2(load(scores, at) - shift)
            store(scores, at, weight)
            total = total + weight
        store(scratch.maximum, pair_at, maximum)
        store(scratch.total, pair_at, total)
        store(scratch.rescale, half_at, rescale)


@jit
def _rescale_sums(panel, depth, scratch):
    """Rescale the sums of earlier tiles to the new maximum."""
    for half_at in range(0, PANEL, LANES):
        rescale = load(scratch.rescale, half_at)
        base = panel * depth * PANEL + half_at
        for at in range(base, base + depth * PANEL, PANEL):
            store(scratch.out, at, load(scratch.out, at) * rescale)


@jit
def _add_values(panel, num_keys, half, depth, scratch):
    """``out += V.T @ weights`` for one tile of keys and one panel."""
    out, values, weights, base = scratch.out, scratch.values, scratch.scores, panel * depth * PANEL
    for d in range(0, depth, TILE_ROWS):
        at = base + d * PANEL
        if half:
            _half_sum_tile(out, at, PANEL, values, d, 1, depth, weights, 0, PANEL, num_keys)
        else:
            _sum_tile(out, at, PANEL, values, d, 1, depth, weights, 0, PANEL, num_keys)


@jit
def _all_finite(values, count):
    """Whether a tile of values holds neither NaN nor infinity."""
    total = splat(_ZERO)
    whole = count - count % LANES
    for at in range(0, whole, LANES):
        total = total + load(values, at) * splat(_ZERO)
    rest = _ZERO
    for at in range(whole, count):
        rest += values[at] * _ZERO
    return total_of(total) + rest == _ZERO


@jit
def _add_visible_values(panel, start, stop, depth, scratch):
    """`_add_values` pair by pair, for the rare tile in which a weight of 0 may meet a value that is not finite."""
    first, base = panel * PANEL, panel * depth * PANEL
    for lane in range(PANEL):
        low, high = max(scratch.low[first + lane], start), min(scratch.high[first + lane] + 1, stop)
        for position in range(low, high):
            key = position - start
            for d in range(depth):
                value = scratch.values[key * depth + d]
                scratch.out[base + d * PANEL + lane] += scratch.scores[key * PANEL + lane] * value


@jit
def _unpack_output(out, item, kv_head, shapes, scratch):
    """Divide by the sum of weights unless it is 0, and write the item's rows."""
    value_dim, group = shapes.value_dim, shapes.num_heads // shapes.num_kv_heads
    depth = -(-value_dim // TILE_ROWS) * TILE_ROWS
    for pair in range(item[2] * group):
        source = pair // PANEL * depth * PANEL + pair % PANEL
        target = ((item[1] + pair // group) * shapes.num_heads + kv_head * group + pair % group) * value_dim
        total = scratch.total[pair]
        factor = _ZERO if total == _ZERO else _ONE / total
        for d in range(value_dim):
            out[target + d] = scratch.out[source + d * PANEL] * factor
