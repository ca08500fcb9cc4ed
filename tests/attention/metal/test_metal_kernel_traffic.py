"""Reads and writes of the kernels, counted by msl, against the minimum that a launch needs."""

import numpy as np
import pytest
from kernel_cases import Batch, Case, build
from msl_runs import skip_without_compiler

from workbench import msl
from workbench.kernels.attention.metal.launch import PagedVarlenKernels
from workbench.kernels.attention.metal.plan import LaunchPlan
from workbench.kernels.attention.metal.tile_shape import TileShape

skip_without_compiler()

KERNELS = PagedVarlenKernels(msl.metal_kernel, statistics=True)


def run(batch: Batch) -> msl.LaunchStatistics:
    """Counts of the tiled kernel's launch."""
    KERNELS.attend(*batch.inputs, batch.options)
    return KERNELS.kernel("paged_varlen_split" if plan_of(batch).num_partial_rows else "paged_varlen").last_statistics


def plan_of(batch: Batch) -> LaunchPlan:
    """The plan that the launch used."""
    case = batch.case
    return KERNELS.plan(batch.metadata, case.num_heads, case.num_kv_heads, case.head_dim, 2, case.left)


def kv_bytes(positions: int, case: Case) -> int:
    """Bytes of K (or of V) of this many positions in all KV heads."""
    return positions * case.num_kv_heads * case.head_dim * 2


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("case", [
    Case(tuple((1, int(kv)) for kv in np.linspace(300, 1500, 24)), 9, 3, 64, 16, "float16"),
    Case(((1, 3000), (1, 40)), 8, 2, 128, 32, "float16"),
], ids=["24 decodes", "split"])  # fmt: skip
def test_decodes_read_the_cache_once(case):
    """They read it once, not once for each of the 3 or 4 query heads that share a KV head."""
    traffic = run(build(case)).buffers
    minimum = kv_bytes(sum(kv for _, kv in case.sequences), case)
    assert traffic["k_cache"].bytes_read <= 1.05 * minimum
    assert traffic["v_cache"].bytes_read <= 1.05 * minimum


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("start", [0, 500])
def test_a_chunk_of_512_rows_reads_each_tile_once(start):
    """The minimum of a tile is every position that one of its rows may see, once for all of them."""
    case = Case(((512, start + 512),), 9, 3, 64, 16, "float16")
    batch = build(case)
    statistics = run(batch)
    block_q = TileShape.choose(64, 2).block_q(3)
    tile_ends = [start + min(512, first + block_q) for first in range(0, 512, block_q)]
    minimum = kv_bytes(sum(tile_ends), case)
    traffic = statistics.buffers
    for cache in ("k_cache", "v_cache"):
        assert traffic[cache].bytes_read <= 1.3 * minimum
        assert traffic[cache].distinct_bytes_read == minimum
    rows_of_items = int(plan_of(batch).items[:, 2].sum())  # a split tile reads its queries once per split
    assert traffic["q"].bytes_read == rows_of_items * 9 * 64 * 2
    assert traffic["out"].bytes_written == batch.q.nbytes


def test_a_window_bounds_the_reads_at_both_ends():
    case = Case(((1, 2000), (30, 1000)), 4, 2, 64, 16, "float16", left=127)
    traffic = run(build(case)).buffers
    block_q = TileShape.choose(64, 2).block_q(2)
    minimum = kv_bytes(128 + sum(127 + min(block_q, 30 - first) for first in range(0, 30, block_q)), case)
    assert traffic["k_cache"].bytes_read == traffic["v_cache"].bytes_read == minimum


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_threadgroup_memory_is_what_the_kernel_uses(head_dim):
    statistics = run(build(Case(((20, 30), (1, 10)), 2, 2, head_dim, 16, "float16")))
    assert statistics.threadgroup_memory == TileShape.choose(head_dim, 2).threadgroup_bytes
