"""The sixteen puzzles about kernels, from one thread per element to attention over a paged KV cache.

Each makes its launches from random numbers. Expected outputs are computed with numpy, in float64 where sums are long.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from workbench.apps.course.puzzles import Case, Puzzle, Work, most_barriers, most_memory, most_reads, needs

LANES = 32

Rng = np.random.Generator


def _floats(rng: Rng, *shape: int) -> np.ndarray:
    """Numbers with few digits, so that sums of a few are exact."""
    return (rng.integers(-64, 65, shape) / 8).astype(np.float32)


def _across(n: int) -> int:
    """The smallest whole number of simdgroups' threads for n elements."""
    return -(-n // LANES) * LANES


# -- one thread per element ------------------------------------------------------------------------------------------


def _map(rng: Rng, size: int) -> Case:
    x = _floats(rng, LANES * (size + 1))
    return Case({"x": x}, {"y": x + 10}, (x.size, 1, 1), (LANES, 1, 1))


def _zip(rng: Rng, size: int) -> Case:
    a, b = _floats(rng, LANES * (size + 1)), _floats(rng, LANES * (size + 1))
    return Case({"a": a, "b": b}, {"y": a * b}, (a.size, 1, 1), (LANES, 1, 1))


def _guard(rng: Rng, size: int) -> Case:
    x = _floats(rng, (5, 45, 97)[size % 3])
    return Case({"x": x}, {"y": x + 10}, (_across(x.size), 1, 1), (LANES, 1, 1))


def _two_dimensions(rng: Rng, size: int) -> Case:
    rows, columns = ((3, 5), (9, 4), (7, 21))[size % 3]
    x = _floats(rng, rows, columns)
    return Case({"x": x}, {"y": x + 10}, (-(-columns // 8) * 8, -(-rows // 4) * 4, 1), (8, 4, 1))


def _broadcast(rng: Rng, size: int) -> Case:
    rows, columns = ((3, 5), (9, 4), (7, 21))[size % 3]
    a, b = _floats(rng, rows), _floats(rng, columns)
    return Case({"a": a, "b": b}, {"y": a[:, None] + b}, (-(-columns // 8) * 8, -(-rows // 4) * 4, 1), (8, 4, 1))


# -- threads together ------------------------------------------------------------------------------------------------


def _reverse(rng: Rng, size: int) -> Case:
    x = _floats(rng, 64 * (size + 1))
    return Case({"x": x}, {"y": x.reshape(-1, 64)[:, ::-1].reshape(-1)}, (x.size, 1, 1), (64, 1, 1))


def _pooling(rng: Rng, size: int) -> Case:
    x = _floats(rng, (64, 100, 250)[size % 3])
    padded = np.concatenate([np.zeros(2, np.float32), x])
    y = padded[2:] + padded[1:-1] + padded[:-2]
    return Case({"x": x}, {"y": y}, (-(-x.size // 64) * 64, 1, 1), (64, 1, 1))


def _dot(rng: Rng, size: int) -> Case:
    n = (64, 500, 1000)[size % 3]
    a, b = _floats(rng, n), _floats(rng, n)
    dot = np.array([a.astype(np.float64) @ b], np.float32)
    return Case({"a": a, "b": b}, {"y": dot}, (256, 1, 1), (256, 1, 1), tolerance=1e-4)


def _scan(rng: Rng, size: int) -> Case:
    n = (64, 128, 256)[size % 3]
    x = _floats(rng, n)
    return Case(
        {"x": x}, {"y": np.cumsum(x, dtype=np.float64).astype(np.float32)}, (n, 1, 1), (n, 1, 1), {"N": n}, 1e-4
    )


def _matmul(rng: Rng, size: int) -> Case:
    rows, inner, columns = ((8, 8, 16), (16, 24, 8), (24, 40, 16))[size % 3]
    a, b = _floats(rng, rows, inner), _floats(rng, inner, columns)
    y = (a.astype(np.float64) @ b).astype(np.float32)
    return Case({"a": a, "b": b}, {"y": y}, (LANES * columns // 8, rows // 8, 1), (LANES, 1, 1), tolerance=1e-4)


def _transpose(rng: Rng, size: int) -> Case:
    rows, columns = ((32, 64), (64, 32), (96, 64))[size % 3]
    x = _floats(rng, rows, columns)
    return Case({"x": x}, {"y": np.ascontiguousarray(x.T)}, (columns, rows, 1), (LANES, LANES, 1))


# -- softmax ---------------------------------------------------------------------------------------------------------


def _softmax(rng: Rng, size: int) -> Case:
    rows, n = ((2, 40), (3, 100), (4, 500))[size % 3]
    x = (rng.normal(0, 4, (rows, n)) + rng.integers(-200, 200, (rows, 1))).astype(np.float32)
    weights = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    y = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return Case({"x": x}, {"y": y}, (LANES, rows, 1), (LANES, 1, 1), tolerance=1e-5)


# -- the paged KV cache ----------------------------------------------------------------------------------------------


def _find_seq_idx(rng: Rng, size: int) -> Case:
    lengths = rng.integers(0, 4, (5, 40, 300)[size % 3])
    lengths[rng.integers(0, len(lengths))] = 0  # a sequence without rows
    lengths[-1] = 3
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    owners = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    return Case({"cu_seqlens_q": starts}, {"y": owners}, (_across(owners.size), 1, 1), (LANES, 1, 1))


def _blocks(rng: Rng, lengths: Sequence[int], block_size: int, num_caches: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Caches of sequences with NaN wherever no position is, and the block tables, whose blocks are in no order."""
    used = [-(-length // block_size) for length in lengths]
    blocks = rng.permutation(np.arange(1, sum(used) + 3))
    tables = np.zeros((len(lengths), max(used)), np.int32)
    caches = [np.full((sum(used) + 3, block_size, LANES), np.nan, np.float32) for _ in range(num_caches)]
    for sequence, length in enumerate(lengths):
        own, blocks = blocks[: used[sequence]], blocks[used[sequence] :]
        tables[sequence, : len(own)] = own
        for position, cache in itertools.product(range(length), caches):
            cache[own[position // block_size], position % block_size] = rng.normal(0, 1, LANES)
    return caches, tables


def _gather(rng: Rng, size: int) -> Case:
    num_positions, block_size = ((10, 4), (37, 8), (50, 16))[size % 3]
    (cache,), (table,) = _blocks(rng, [num_positions], block_size, 1)
    y = np.stack([cache[table[p // block_size], p % block_size] for p in range(num_positions)])
    inputs = {"cache": cache, "block_table": table}
    return Case(inputs, {"y": y}, (LANES, num_positions, 1), (LANES, 1, 1), {"BLOCK_SIZE": block_size})


def _paged_row(rng: Rng, size: int) -> Case:
    lengths, block_size = (([3], 4), ([9, 1], 4), ([70, 33, 5], 16))[size % 3]
    (keys, values), tables = _blocks(rng, lengths, block_size, 2)
    q = rng.normal(0, 1, (len(lengths), LANES)).astype(np.float32)
    y = np.stack([_attention(q[i], keys, values, tables[i], length) for i, length in enumerate(lengths)])
    inputs = {"q": q, "keys": keys, "values": values, "block_table": tables, "lengths": np.array(lengths, np.int32)}
    template = {"BLOCK_SIZE": block_size}
    return Case(inputs, {"y": y}, (LANES, len(lengths), 1), (LANES, 1, 1), template, tolerance=1e-4)


def _attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray, table: np.ndarray, length: int) -> np.ndarray:
    """Attention of one query over the positions of a sequence, in float64."""
    size = keys.shape[1]
    slots = [(table[p // size], p % size) for p in range(length)]
    k, v = (np.stack([cache[slot] for slot in slots]).astype(np.float64) for cache in (keys, values))
    scores = k @ q / np.sqrt(len(q))
    weights = np.exp(scores - scores.max())
    return (weights @ v / weights.sum()).astype(np.float32)


def _looks_swapped(case: Case, result: np.ndarray) -> bool:
    """Whether rows and columns were taken for each other."""
    expected = next(iter(case.expected.values()))
    return (
        result.ndim == 2 and result.size == expected.size and np.array_equal(result.reshape(-1), expected.T.reshape(-1))
    )


def _is_one_behind(case: Case, result: np.ndarray) -> bool:
    """Whether each number is the one before the right one."""
    expected = next(iter(case.expected.values()))
    return result.ndim == 1 and np.allclose(result[1:], expected[:-1], atol=1e-3)


def _is_not_finite(case: Case, result: np.ndarray) -> bool:
    return not np.isfinite(result).all()


def _always(case: Case, result: np.ndarray) -> bool:
    return True


_COALESCED = "the threads of a simdgroup touch neighbouring elements"


def _steps_of_search(case: Case) -> float:
    """Reads of a binary search by all threads, per entry of the array."""
    entries, rows = case.inputs["cu_seqlens_q"].size, case.grid[0]
    return (np.ceil(np.log2(entries)) + 2) * rows / entries


def _held(name: str) -> Callable[[Case], float]:
    """The part of a cache that positions hold: NaN is everywhere else."""
    return lambda case: float(np.isfinite(case.inputs[name]).mean())


def _uses_simd(work: Work) -> bool:
    return work.counts.simd_operations > 0


def _least_products(work: Work) -> bool:
    a, b = work.case.inputs["a"], work.case.inputs["b"]
    return work.counts.matrix_multiplications == a.shape[0] * a.shape[1] * b.shape[1] // 512


def _access(name: str, array: str, most: float) -> Callable[[Work], bool]:
    return lambda work: work.run is None or work.run.number(name, array) <= most


def _no_conflicts(work: Work) -> bool:
    arrays = [] if work.run is None else [array.name for array in work.run.arrays if array.role == "threadgroup"]
    return all(work.run.number("bank conflicts", name) <= 1 for name in arrays if work.run is not None)


def _puzzle(name: str, task: str, make: Callable[[Rng, int], Case], *limits: Any, **more: Any) -> Puzzle:
    return Puzzle(name, task, make, limits, **more)


_ALL = [
    _puzzle(
        "map",
        "y[i] = x[i] + 10, with one thread for each element.",
        _map,
        most_reads("x", 1, "each thread needs one element"),
        hints=((_always, "Which number has to be added?"),),
    ),
    _puzzle(
        "zip",
        "y[i] = a[i] * b[i].",
        _zip,
        most_reads("a", 1, "each thread needs one element"),
        most_reads("b", 1, "each thread needs one element"),
        hints=((_always, "The product of both elements of the same place?"),),
    ),
    _puzzle(
        "guard",
        "y[i] = x[i] + 10, where more threads run than x has elements; x_shape[0] is their number.",
        _guard,
        most_reads("x", 1, "each thread needs one element"),
        hints=((_always, "Does every element have a thread that writes it?"),),
    ),
    _puzzle(
        "two_dimensions",
        "y[row][column] = x[row][column] + 10; x has x_shape[0] rows and x_shape[1] columns.",
        _two_dimensions,
        most_reads("x", 1, "each thread needs one element"),
        hints=((_always, "An element's place is row * number of columns + column; .x of the thread is the column."),),
    ),
    _puzzle(
        "broadcast",
        "y[row][column] = a[row] + b[column]; a has a_shape[0] elements, b has b_shape[0].",
        _broadcast,
        most_reads("a", lambda case: case.inputs["b"].size, "each thread needs one element of a"),
        most_reads("b", lambda case: case.inputs["a"].size, "each thread needs one element of b"),
        hints=((_always, "a belongs to the row, which is .y of the thread, and b to the column."),),
    ),
    _puzzle(
        "threadgroup_memory",
        "y is x with each 64 elements in reverse order, where each thread loads x at its own place only.",
        _reverse,
        most_reads("x", 1, "load it once, into threadgroup memory"),
        needs(
            lambda work: work.counts.threadgroup_memory > 0,
            "a thread loads x at another thread's place: put your element into threadgroup memory, and read the "
            "other one there",
        ),
        most_barriers(1, "one between all writes and all reads"),
        most_memory(256, "64 floats"),
        hints=((_always, "The partner of place i is 63 - i."),),
    ),
    _puzzle(
        "pooling",
        "y[i] = x[i - 2] + x[i - 1] + x[i], with 0 before the first element; 64 threads to a threadgroup.",
        _pooling,
        most_reads("x", lambda case: 1.2, "share elements in threadgroup memory, two before the first thread too"),
        most_barriers(1, "one between all writes and all reads"),
        most_memory(4 * 66, "66 floats"),
        hints=((_always, "The first threads of a threadgroup need elements of the threadgroup before."),),
    ),
    _puzzle(
        "dot",
        "y[0] is the sum of a[i] * b[i], with one threadgroup of 256 threads; a_shape[0] may be any number.",
        _dot,
        most_reads("a", 1, "each element belongs to one thread"),
        most_reads("b", 1, "each element belongs to one thread"),
        needs(_uses_simd, "no lane adds for the others: simd_sum adds 32 lanes at once"),
        most_barriers(1, "one between the sums of the simdgroups and their sum"),
        most_memory(4 * 8, "one float for each of 8 simdgroups"),
        hints=((_always, "Thread i takes the elements i, i + 256, ...; then the sums of all 8 simdgroups are added."),),
    ),
    _puzzle(
        "scan",
        "y[i] = x[0] + ... + x[i], with one threadgroup of N threads (N is a template parameter).",
        _scan,
        most_reads("x", 1, "load it once, and add partial sums"),
        most_barriers(lambda case: 2 * np.log2(case.template["N"]) + 1, "two for each doubling of the distance"),
        most_memory(4 * 512, "two floats for each thread"),
        hints=((_is_one_behind, "The sum includes x[i] itself."), (_always, "A sum of 2 * d neighbours is two of d.")),
    ),
    _puzzle(
        "matrix_product",
        "y = a b, with a threadgroup of one simdgroup for each 8 x 8 tile of y; use simdgroup_float8x8.",
        _matmul,
        needs(
            lambda work: work.counts.matrix_multiplications > 0,
            "no matrix product is used: simdgroup_multiply_accumulate multiplies 8 x 8 tiles",
        ),
        needs(_least_products, "it multiplies a pair of tiles twice"),
        header="#include <metal_simdgroup_matrix>\n",
        hints=((_always, "Tile (r, c) of y is the sum over k of tile (r, k) of a and tile (k, c) of b."),),
    ),
    _puzzle(
        "transpose",
        "y[column][row] = x[row][column], with threadgroups of 32 x 32 threads.",
        _transpose,
        needs(
            _access("lines per access", "x", 1.01), f"the loads of x are scattered: {_COALESCED} if .x is its column"
        ),
        needs(
            _access("lines per access", "y", 1.01),
            f"the stores to y are scattered: go through threadgroup memory, so that {_COALESCED} there, too",
        ),
        needs(
            _no_conflicts,
            "the lanes of a simdgroup meet in one bank of threadgroup memory: make its rows 33 elements long",
        ),
        most_barriers(1, "one between all writes and all reads"),
        most_memory(4 * 32 * 33, "a tile of 32 x 33 floats"),
        recorded=True,
        hints=((_always, "The tile moves: its corner (x, y) becomes (y, x)."),),
    ),
    _puzzle(
        "softmax",
        "each row of y is the softmax of that row of x, with one simdgroup for each row.",
        _softmax,
        most_reads("x", 3, "once for the maximum, once for the sum, once for the result"),
        needs(_uses_simd, "each lane works alone: simd_max and simd_sum join the lanes"),
        most_barriers(0, "the lanes of a simdgroup need none"),
        hints=(
            (_is_not_finite, "exp overflows beyond 88: subtract the row's maximum first."),
            (_always, "The sum runs over all columns of the row, those of other lanes too."),
        ),
    ),
    _puzzle(
        "online_softmax",
        "the same softmax, with two loads of each element of x: one for maximum and sum together.",
        _softmax,
        most_reads("x", 2, "keep a running maximum and a running sum, and rescale the sum when the maximum grows"),
        needs(_uses_simd, "each lane works alone: simd_max and simd_sum join the lanes"),
        hints=(
            (_is_not_finite, "Begin with the maximum -INFINITY, and subtract it before exp."),
            (
                _always,
                "When the maximum grows from m to M, the sum so far shrinks by exp(m - M), between lanes too.",
            ),
        ),
    ),
    _puzzle(
        "find_seq_idx",
        "y[row] is the sequence s that owns the row, cu_seqlens_q[s] <= row < cu_seqlens_q[s + 1].",
        _find_seq_idx,
        most_reads("cu_seqlens_q", _steps_of_search, "halve the range with each load"),
        hints=((_always, "Of sequences that begin at the same row, the last one owns it."),),
    ),
    _puzzle(
        "gather",
        "y[position][d] is the cache's element d of the position's slot, found through block_table.",
        _gather,
        most_reads("cache", _held("cache"), "each element is needed once"),
        most_reads(
            "block_table",
            lambda case: case.grid[0] * case.grid[1] / case.inputs["block_table"].size,
            "each thread needs one entry",
        ),
        hints=(
            (_is_not_finite, "NaN stands in blocks of others: block_table[position / BLOCK_SIZE] is the block."),
            (_always, "The slot is block * BLOCK_SIZE + position % BLOCK_SIZE."),
        ),
    ),
    _puzzle(
        "paged_row",
        "y[i] is the attention of q[i] over lengths[i] positions, with a lane for each of 32 dimensions.",
        _paged_row,
        most_reads("keys", _held("keys"), "each key is needed once"),
        most_reads("values", _held("values"), "each value is needed once"),
        needs(_uses_simd, "a score is the sum over 32 lanes: simd_sum"),
        hints=(
            (_is_not_finite, "NaN stands behind the last position and in blocks of others."),
            (_always, "Rescale both the sum and the output when the maximum grows, and divide at the end."),
        ),
    ),
]

PUZZLES = {puzzle.name: puzzle for puzzle in _ALL}
"""The puzzles by name, in the order of the course."""
