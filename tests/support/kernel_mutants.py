# ruff: noqa: E501 (a table of one line per mutant)
"""Kernels with one fault each, which the tests must detect.

A mutant replaces a piece of a .metal file. It is caught when msl reports a fault or when a result of one of
`MUTANT_CASES` is further from float64 than allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from kernel_cases import Batch, Case, as_float64, build, error_over_tolerance

from workbench import msl
from workbench.kernels.attention.metal import launch
from workbench.kernels.attention.metal.launch import PagedVarlenKernels
from workbench.kernels.attention.stored import to_stored


class Mutant(NamedTuple):
    """A fault: in ``file``, the ``occurrence``-th ``old`` becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    occurrence: int = 0


CAUGHT = 50.0
"""A result is wrong from this multiple of the tolerance on. The right kernels reach 10, with logits of -150."""

CODES_CAUGHT = 4e-3
"""The same for codes, relative to the largest element of the result."""

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
WEAKER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
V1, TILED, TILE, MERGE, SEARCH = "paged_varlen_v1", "paged_varlen", "tile", "merge_splits", "find_seq_idx"

MUTANTS = (
    # find_seq_idx and paged_varlen_v1
    Mutant("search: first row of a sequence goes to the one before", SEARCH, "[middle] <= row", "[middle] < row"),
    Mutant("search: rounds down and stops too early", SEARCH, "low = middle;", "low = high;"),
    Mutant("v1: barrier dropped", V1, BARRIER, ""),
    Mutant("v1: barrier of the simdgroup only", V1, BARRIER, WEAKER),
    Mutant("v1: a row does not see itself", V1, "kv_position <= position;", "kv_position < position;"),
    Mutant("v1: a row sees the next one", V1, "kv_position <= position;", "kv_position <= position + 1;"),
    Mutant("v1: window one too narrow", V1, "position - window[0])", "position - window[0] + 1)"),
    Mutant("v1: wrong block", V1, "kv_position / BLOCK_SIZE]", "(kv_position + 1) / BLOCK_SIZE]"),
    Mutant("v1: KV heads dealt like cards", V1, "head / (num_heads / num_kv_heads)", "head % num_kv_heads"),
    Mutant("v1: the sink counts in every simdgroup", V1, "simdgroup_id == 0 && sinks", "sinks"),
    Mutant("v1: the total is not rescaled", V1, "total = total * rescale + weight", "total = total + weight"),
    Mutant("v1: the context is taken for the queries", V1, "seqused_k[seq] - (cu_seqlens_q[seq + 1] - row)", "row"),
    # which rows, heads and positions
    Mutant("tiled: a row sees the next one", TILED, "min(kv_end - 1, position);", "min(kv_end - 1, position + 1);"),
    Mutant("tiled: a row does not see itself", TILED, "min(kv_end - 1, position);", "min(kv_end - 1, position - 1);"),
    Mutant("tiled: window one too wide", TILED, "0 : position - window[0])", "0 : position - window[0] - 1)"),
    Mutant("tiled: splits are not masked at their start", TILED, "max(kv_start, window", "max(0, window"),
    Mutant("tiled: one block for all groups of a tile", TILE, "[group_start / BLOCK_SIZE]", "[tile_start / BLOCK_SIZE]"),
    Mutant("tiled: offset within the block forgotten", TILE, " * BLOCK_SIZE + group_start % BLOCK_SIZE;", " * BLOCK_SIZE;"),
    Mutant("tiled: looks up a group past the end", TILE, "min(tile_start + 8 * group, kv_end - 1)", "tile_start + 8 * group"),
    Mutant("tiled: keys taken for values", TILED, "values.cache = v_cache", "values.cache = k_cache"),
    Mutant("tiled: rows and heads of a pair swapped", TILED, "row = item[Q_START] + pair / packed_heads", "row = item[Q_START] + pair % num_rows"),
    Mutant("tiled: heads of the next KV head", TILED, "int head = kv_head * heads_per_kv_head + min(", "int head = (kv_head + 1) % num_kv_heads * heads_per_kv_head + min("),
    Mutant("tiled: the sink counts in every split", TILED, "item[SPLIT] == 0 && (!is", "(!is"),
    Mutant("tiled: the sink counts in every simdgroup of a decode", TILED, "(!is_decode || simdgroup_id == 0) && sinks", "sinks"),
    Mutant("tiled: rows past the last pair are written", TILED, "is_pair && !(is_decode", "!(is_decode"),
    Mutant("tiled: a decode stops a tile early", TILED, "tile_start < kv_end; tile_start += NUM", "tile_start + TILE_KV <= kv_end; tile_start += NUM"),
    Mutant("tiled: a tile too many is skipped", TILED, "tile_start + TILE_KV > any_first", "tile_start >= any_first"),
    Mutant("tiled: a partly masked tile is taken for a whole one", TILED, "tile_start + TILE_KV - 1 > all_last;", "tile_start > all_last;"),
    # sizes, latents and chunks
    Mutant("v1: a row looks out of its chunk", V1, "position % -window[0]", "0"),
    Mutant("v1: a chunk begins with the next position", V1, "position - position % -window[0]", "position - position % -window[0] + 1"),
    Mutant("v1: values lie where keys would", V1, "(slot * num_kv_heads + kv_head) * v_cache_shape[3]", "(slot * num_kv_heads + kv_head) * k_cache_shape[3]"),
    Mutant("v1: the soft cap is left out", V1, "score = scoring[1] * tanh(score / scoring[1]);", ""),
    Mutant("v1: outputs lie where queries would", V1, "(long(row) * num_heads + head) * VALUE_DIM", "(long(row) * num_heads + head) * HEAD_DIM"),
    Mutant("v1: scores of latents without their rotary part", V1, "product += dim < HEAD_DIM ?", "product += dim < VALUE_DIM ?"),
    Mutant("tiled: a row looks out of its chunk", TILED, "if (window[0] < -1)", "if (window[0] < -1000)"),
    Mutant("tiled: a chunk begins with the next position", TILED, "position - position % -window[0]", "position - position % -window[0] + 1"),
    Mutant("tiled: a chunk one position longer", TILED, "position % -window[0]", "position % (1 - window[0])"),
    Mutant("tiled: values lie where keys would", TILED, "LATENT || HEAD_DIM == VALUE_DIM ? stored_dim : v_cache_shape[3]", "stored_dim"),
    Mutant("tiled: values have the distance of keys", TILED, "values.row_stride = num_kv_heads * stored_value_dim", "values.row_stride = num_kv_heads * stored_dim"),
    Mutant("tiled: groups of values have the distance of keys", TILE, "slot * values.row_stride", "slot * keys.row_stride"),
    Mutant("tiled: outputs lie where queries would", TILED, "(row * num_heads + head) * VALUE_DIM", "(row * num_heads + head) * HEAD_DIM"),
    Mutant("tiled: partial outputs lie where queries would", TILED, "partial_row * VALUE_DIM + dim", "partial_row * HEAD_DIM + dim"),
    Mutant("tiled: simdgroups exchange rows of keys", TILED, "shared_output + 8 * column, VALUE_DIM", "shared_output + 8 * column, HEAD_DIM"),
    Mutant("tiled: scores of latents without their rotary part", TILED, "multiply_keys<false, HEAD_DIM>(scores, queries, staged", "multiply_keys<false, VALUE_DIM>(scores, queries, staged"),
    Mutant("tiled: decodes of latents without their rotary part", TILED, "multiply_keys<true, HEAD_DIM>(scores, queries, keys", "multiply_keys<true, VALUE_DIM>(scores, queries, keys"),
    Mutant("tiled: values are not staged", TILED, "} else if (!LATENT) {", "} else if (false) {"),
    Mutant("tiled: a head of the next slice", TILED, "/ num_kv_heads * packed_heads;", "/ num_kv_heads;"),
    Mutant("codes: values take the scale of another place", TILED, "values.head_dim = LATENT ? HEAD_DIM : VALUE_DIM", "values.head_dim = LATENT ? VALUE_DIM : HEAD_DIM"),
    # synchronisation
    Mutant("tiled: no barrier after the queries", TILED, BARRIER, ""),
    Mutant("tiled: no barrier before simdgroups exchange", TILED, BARRIER, "", 1),
    Mutant("tiled: no barrier while simdgroups exchange", TILED, BARRIER, "", 2),
    Mutant("tiled: no barrier after a tile is staged", TILED, BARRIER, "", 3),
    Mutant("tiled: no barrier before a tile is overwritten", TILED, BARRIER, "", 4),
    Mutant("tiled: barrier of the simdgroup only", TILED, BARRIER, WEAKER, 3),
    Mutant("tiled: idle simdgroups leave before the barriers", TILED, "} else {\n  // -- all", "} else {\n  if (!has_pairs) return;\n  // -- all"),
    # softmax
    Mutant("softmax: a maximum that starts at 0", TILED, "M_LOG2E_F : -INFINITY", "M_LOG2E_F : 0.0f"),
    Mutant("softmax: a masked score that is not -inf", TILE, "score = -INFINITY;", "score = -50.0f;"),
    Mutant("softmax: -inf minus -inf", TILE, "maximum == -INFINITY ? 0.0f : maximum;", "maximum;"),
    Mutant("softmax: the total is not rescaled", TILE, "row.total * rescale + total", "row.total + total"),
    Mutant("softmax: the output is not rescaled", TILE, "thread_elements()[1] *= rescale;", "thread_elements()[1] *= 1.0f;"),
    Mutant("softmax: maximum over half of a row", TILE, "simd_shuffle_xor(maximum, 8)", "simd_shuffle_xor(maximum, 1)"),
    Mutant("softmax: sum over lanes of another row", TILE, "simd_shuffle_xor(total, 8)", "simd_shuffle_xor(total, 4)"),
    Mutant("softmax: the cap is left out", TILE, "scoring.softcap * tanh(scores[group].thread_elements()[0])", "scoring.softcap * scores[group].thread_elements()[0]"),
    Mutant("simdgroups of a decode: one maximum for all", TILED, "exp2(other_maximum - base)", "exp2(row_state.maximum - base)"),
    # products
    Mutant("product: keys in another order than queries", TILE, "dim + WIDTH * (place.column + 1)", "dim + WIDTH * place.column + 1"),
    Mutant("product: two lanes share a key", TILE, "place.column + 1, dim + WIDTH * place.row", "place.column, dim + WIDTH * place.row"),
    Mutant("product: columns are not put back in order", TILED, "8 * column + WIDTH * (place.column / 2);", "8 * column + place.column / 2;"),
    Mutant("product: NaN times weight 0", TILE, "isfinite(value) ? value : 0.0f", "value"),
    Mutant("product: what is not finite is lost", TILE, "MASKED && simd_any(has_non_finite)", "MASKED && simd_any(has_non_finite) && WIDTH == 0"),
    Mutant("product: masked rows get what is not finite", TILE, "visible ? factor : 0.0f", "factor"),
    Mutant("product: only the last value of a tile is tested", TILE, "has_non_finite |=", "has_non_finite ="),
    Mutant("product: minus infinity counts as infinity", TILE, "? COUNT_OF_MINUS_INFINITY", "? COUNT_OF_INFINITY"),
    Mutant("product: infinity minus infinity is infinity", TILE, "return positive - negative;", "return positive > 0.0f ? positive : -negative;"),
    Mutant("tiles: a decode takes its last tile for a whole one", TILED, "+ TILE_KV - 1 <= all_last) {", "<= all_last) {"),
    Mutant("tiles: a decode takes its first tile for a whole one", TILED, "tile_start >= all_first &&", "tile_start + 7 >= all_first &&"),
    Mutant("tiles: the first tile at a window's edge is taken for a whole one", TILED, "masked = tile_start < all_first ||", "masked ="),
    # splits
    Mutant("split: partial rows overlap", TILED, "(item[PARTIAL_START] + row_in_item)", "(item[PARTIAL_START])"),
    Mutant("split: a later split fills the row", TILED, "writes_out = item[SPLIT] == 0", "writes_out = item[SPLIT] == 1"),
    Mutant("merge: the last split is left out", MERGE, "split < num_splits", "split < num_splits - 1", 1),
    Mutant("merge: splits of a row taken for neighbours", MERGE, "split * rows_between", "split", 1),
    Mutant("merge: totals are not rescaled", MERGE, "[2 * partial + 1] * rescale", "[2 * partial + 1]"),
    Mutant("merge: a maximum that starts at 0", MERGE, "float maximum = -INFINITY;", "float maximum = 0.0f;"),
)  # fmt: skip


def _not_finite(batch: Batch) -> Batch:
    """NaN and infinity in values that only the last rows of the chunk may see."""
    v, size = np.array(batch.v_cache), batch.case.block_size
    blocks = batch.metadata.block_table[0]
    for position, first, value in ((47, 0, np.nan), (44, 0, np.inf), (45, 1, -np.inf)):
        v[blocks[position // size], position % size, :, first::2] = value
    batch.v_cache = mx.array(v)
    return batch


def _negative(batch: Batch) -> Batch:
    """Logits around -150: exp of them is 0 in float32."""
    common = (150 / batch.scale / batch.case.head_dim) ** 0.5
    batch.q, batch.k_cache = batch.q + mx.array(common), batch.k_cache - mx.array(common)
    return batch


def _as_codes(batch: Batch) -> Batch:
    """Keys and values as codes of 8 bits with a scale, and queries that float16 holds; the reference reads the codes."""
    latent = batch.k_cache is batch.v_cache
    batch.q = batch.q.astype(mx.float16).astype(mx.float32)
    batch.k_cache = to_stored(batch.k_cache, mx.int8)
    batch.v_cache = batch.k_cache if latent else to_stored(batch.v_cache, mx.int8)
    return batch


def mutant_cases() -> Iterator[tuple[Batch, int | None]]:
    """Small launches that together detect every mutant: batch and ``kv_split``."""
    mixed = ((20, 45), (1, 90), (0, 3), (1, 1), (1, 40), (9, 33))
    yield build(Case(mixed, 6, 2, 32, 16, sinks=True)), None
    yield build(Case(mixed, 6, 2, 32, 16, left=12, softcap=2.0, sinks=True)), 16
    yield _negative(build(Case(((30, 130), (1, 70)), 2, 2, 32, 16, left=8))), None
    yield _negative(build(Case(((30, 130), (1, 70)), 2, 2, 32, 16, left=40))), 20
    yield _not_finite(build(Case(((24, 48), (1, 65)), 2, 1, 32, 16))), None
    yield build(Case(((1, 204),), 2, 2, 32, 16, left=130)), None
    yield build(Case(mixed, 6, 2, 48, 16, value_dim=32, softcap=2.0)), 16
    yield build(Case(((12, 40), (1, 70)), 2, 2, 32, 16, value_dim=64)), None
    yield build(Case(mixed, 5, 1, 48, 16, value_dim=32, latent=True)), 32
    yield build(Case(mixed, 4, 2, 32, 16, chunk_size=11)), 16
    yield build(Case(((3, 40), (1, 30)), 40, 1, 48, 16, value_dim=32, latent=True)), None
    yield _as_codes(build(Case(mixed, 4, 2, 48, 16, value_dim=32))), None
    yield _as_codes(build(Case(mixed, 4, 1, 48, 16, value_dim=32, latent=True))), None


def why_caught(mutant: Mutant | None) -> str:
    """The fault by which the mutant was caught, or "". None stands for the unchanged kernels and must give ""."""
    if mutant is None:
        return _run("paged_varlen_v1") or _run("paged_varlen")
    text = launch.metal_source(mutant.file)
    pieces = text.split(mutant.old)
    if len(pieces) <= mutant.occurrence + 1:
        raise ValueError(f"{mutant.name}: {mutant.file}.metal does not contain {mutant.old!r} so often")
    before = mutant.old.join(pieces[: mutant.occurrence + 1])
    changed = before + mutant.new + mutant.old.join(pieces[mutant.occurrence + 1 :])
    original = launch.metal_source
    launch.metal_source = lambda name: changed if name == mutant.file else original(name)
    try:
        return _run(mutant.file)
    finally:
        launch.metal_source = original


def _run(file: str) -> str:
    """The fault found in the kernel of a file, or ""."""
    is_v1 = file in (V1, SEARCH)
    for order in (0, 1):
        kernels = PagedVarlenKernels(msl.metal_kernel, order=order, time_limit=60)
        for batch, kv_split in mutant_cases():
            try:
                if is_v1:
                    result = kernels.attend_v1(*batch.inputs, batch.options)
                else:
                    result = kernels.attend(*batch.inputs, batch.options, kv_split=kv_split)
            except msl.MslCompileError:
                raise  # a mutant must compile
            except msl.MslError as fault:
                return str(fault).splitlines()[0]
            expected = batch.reference()
            if batch.k_cache.dtype == mx.int8:  # widened to float16, which rounds every number
                error = (
                    CAUGHT * float(np.abs(as_float64(result) - expected).max() / np.abs(expected).max()) / CODES_CAUGHT
                )
            else:
                error = error_over_tolerance(as_float64(result), expected, batch.case.dtype)
            if error > CAUGHT:
                return f"the result is off by {error:.3g} times the tolerance"
    return ""


if __name__ == "__main__":
    print(f"{'none':60} {why_caught(None) or 'nothing wrong'}")
    for each in MUTANTS:
        print(f"{each.name:60} {why_caught(each) or 'NOT CAUGHT'}", flush=True)
