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
    sizes = case.num_heads, case.num_kv_heads, case.head_dim, 2
    return KERNELS.plan(batch.metadata, *sizes, batch.options.reach, value_dim=case.size_of_values)


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


LATENTS = {"num_kv_heads": 1, "head_dim": 576, "value_dim": 512, "latent": True}


def test_a_tile_of_latents_is_read_once_for_keys_and_values():
    """Sixteen heads fill a tile. The rotary part is never read as a value, nor anything for a second time."""
    case = Case(((1, 600), (2, 90)), 16, block_size=16, dtype="float16", **LATENTS)
    traffic = run(build(case)).buffers
    assert traffic["k_cache"].bytes_read == kv_bytes(600 + 90 + 89, case)
    assert traffic["v_cache"].bytes_read == 0


def test_a_few_heads_read_latents_as_values_without_their_rotary_part():
    case = Case(((1, 600),), 8, block_size=16, dtype="float16", **LATENTS)
    traffic = run(build(case)).buffers
    assert traffic["k_cache"].bytes_read <= 1.05 * kv_bytes(600, case)
    assert traffic["v_cache"].bytes_read <= 1.05 * 600 * 512 * 2


def test_a_chunk_bounds_the_reads():
    """A row at position 1,999 is in the chunk that begins at 1,920."""
    case = Case(((1, 2000), (8, 1000)), 4, 2, 64, 16, "float16", chunk_size=128)
    traffic = run(build(case)).buffers
    assert traffic["k_cache"].bytes_read == traffic["v_cache"].bytes_read == kv_bytes(80 + 1000 - 896, case)


@pytest.mark.parametrize(("head_dim", "value_dim", "latent"), [(192, 128, False), (512, 512, False), (576, 512, True)])
def test_threadgroup_memory_of_other_sizes(head_dim, value_dim, latent):
    heads = (2, 1) if latent else (2, 2)
    statistics = run(
        build(Case(((20, 30), (1, 10)), *heads, head_dim, 16, "float16", value_dim=value_dim, latent=latent))
    )
    assert statistics.threadgroup_memory == TileShape.choose(head_dim, 2, value_dim).threadgroup_bytes
