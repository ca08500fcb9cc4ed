"""Arguments of the CPU attention kernel and the sizes of its tiles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.kernels.cpu.attention.processor import LANES

TILE_ROWS = 8 if LANES == 16 else 4
"""Number of rows of a tile of two vectors: enough independent sums to hide the latency of a multiply-add, few enough to
leave registers for the operands (AVX-512 and Arm have 32 registers, AVX2 has 16)."""

BLOCK_KV = 64
"""KV positions per inner tile: a tile of keys, one of values and a panel of scores fit into the first-level cache."""

LOCKSTEP = BLOCK_KV // 4
"""Distance of keys that are read one after another in a decode: each quarter of a tile is a stream of reads."""

PANEL = 2 * LANES
"""(row, head) pairs of a chunk that are computed together: two vectors, one lane for each pair."""

PAIRS_PER_ITEM = 96
"""(row, head) pairs of a work item: with AVX-512, three panels share each tile of keys and values that is loaded."""

MAX_DECODE_GROUP = 16
"""Maximum number of query heads per KV head for which a single row is faster in decode.py than in chunk.py."""

_LINE = 16  # float32 numbers per cache line


class Shapes(NamedTuple):
    """Sizes of a launch.

    Attributes:
        num_heads: Number of query heads.
        num_kv_heads: Number of KV heads.
        head_dim: Elements of a query or key per head.
        value_dim: Elements of a value or output per head.
        block_size: Tokens per KV block.
        stored_dim: Elements of a head's key in its cache: ``head_dim``, and the scale if there is one.
        stored_value_dim: Elements of a head's row in the cache of values; in latent attention, more than ``value_dim``.
        max_decode_group: Maximum number of query heads per KV head for which a single row is computed as a decode; 0 to
            compute it as a chunk, which gives the same bits in every batch.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    block_size: int
    stored_dim: int
    stored_value_dim: int
    max_decode_group: int = MAX_DECODE_GROUP


class Scoring(NamedTuple):
    """Scale, soft cap, window and sinks of a launch. Scores are float32 in units of log2, so that exp2 applies.

    Attributes:
        scale: Factor on q · k.
        softcap: Soft cap, 0 for none.
        left: The reach of rows: a left window, -1 for all, or -n for chunks of n.
        first_maximum: [num_heads], running maximum before any key: the attention sink, or -inf.
        first_total: [num_heads], running sum of weights before any key: 1 for an attention sink, else 0.
    """

    scale: np.float32
    softcap: np.float32
    left: int
    first_maximum: np.ndarray
    first_total: np.ndarray


class Scratch(NamedTuple):
    """Working memory: flat arrays on cache-line boundaries, float32 unless stated otherwise.

    The layouts are those of a chunk; the layout in a decode, for all heads at once, follows in parentheses.

    Attributes:
        q: Scaled queries, [panel, head_dim, PANEL] ([head, head_dim]).
        keys: One tile of keys, [BLOCK_KV, head_dim] (not used).
        values: One tile of values, [BLOCK_KV, padded value_dim] (not used).
        scores: Scores, then weights, [BLOCK_KV, PANEL] ([head, BLOCK_KV]).
        scales: Not used ([keys or values, KV head, BLOCK_KV], scales of codes).
        out: Sums of weighted values, [panel, padded value_dim, PANEL] ([head, head_dim]).
        maximum: Largest score so far, [panel, PANEL] ([head]).
        total: Sum of weights so far, [panel, PANEL] ([head]).
        rescale: Factor on earlier sums after the maximum has grown, [PANEL] (not used).
        low: First KV position a pair may see, int32 [panel, PANEL] (not used).
        high: Last KV position a pair may see, int32 [panel, PANEL] (not used).
        places: Not used (first elements of tokens in a cache, int64 [this tile or the next, BLOCK_KV]).
    """

    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    scores: np.ndarray
    scales: np.ndarray
    out: np.ndarray
    maximum: np.ndarray
    total: np.ndarray
    rescale: np.ndarray
    low: np.ndarray
    high: np.ndarray
    places: np.ndarray


def padded_dim(value_dim: int) -> int:
    """``value_dim`` rounded up to whole register tiles."""
    return -(-value_dim // TILE_ROWS) * TILE_ROWS


def make_scratch(shapes: Shapes) -> Scratch:
    """Working memory for one launch: a few hundred KB, which stay in the second-level cache."""
    group = shapes.num_heads // shapes.num_kv_heads
    pairs = -(-max(PAIRS_PER_ITEM, group, shapes.num_heads) // PANEL) * PANEL
    depth = padded_dim(shapes.value_dim)
    sizes = {
        "q": pairs * shapes.head_dim,
        "keys": BLOCK_KV * shapes.head_dim,
        "values": BLOCK_KV * depth,
        "scores": BLOCK_KV * max(PANEL, shapes.num_heads),
        "scales": 2 * BLOCK_KV * shapes.num_kv_heads,
        "out": pairs * depth,
        "maximum": pairs,
        "total": pairs,
        "rescale": PANEL,
        "low": pairs,
        "high": pairs,
        "places": 4 * BLOCK_KV,
    }
    # A vector load across two cache lines costs twice as much, so every array starts on a line.
    spans = {name: -(-size // _LINE) * _LINE for name, size in sizes.items()}
    memory = np.empty(sum(spans.values()) + _LINE, np.float32)
    at = -memory.ctypes.data // memory.itemsize % _LINE
    arrays = {}
    for name, span in spans.items():
        arrays[name] = memory[at : at + span]
        at += span
    arrays["low"], arrays["high"] = arrays["low"].view(np.int32), arrays["high"].view(np.int32)
    arrays["places"] = arrays["places"].view(np.int64)
    return Scratch(**arrays)
