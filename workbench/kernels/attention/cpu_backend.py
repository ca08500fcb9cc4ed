"""The CPU backend: runs a compiled kernel on the memory of the KV cache itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from workbench.base.threads import num_threads
from workbench.kernels.attention.backend import AttentionBackend
from workbench.kernels.attention.dtypes import dtype_name
from workbench.kernels.attention.stored import to_stored, value_dim_of
from workbench.kernels.cpu.attention.kernel import CACHE_TYPES, run_work_list
from workbench.kernels.cpu.attention.layout import BLOCK_KV, PAIRS_PER_ITEM, Scoring, Shapes, make_scratch
from workbench.kernels.cpu.threads import share, thread_pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from workbench.kernels.attention.metadata import AttentionMetadata
    from workbench.kernels.attention.options import AttentionOptions

_LOG2_E = 1.4426950408889634
_ITEMS_WORTH_THREADS = 4  # a shorter work list takes less time than waking threads


class CpuBackend(AttentionBackend):
    """A numba kernel that runs the work list in float32, shared by `num_threads` threads.

    Elements of narrower caches are widened as they are read.
    """

    name = "cpu"

    def tile_shape(self, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int = 0) -> tuple[int, int]:
        """As many rows as fill the kernel's panels; fewer when more query heads share a KV head."""
        return max(1, PAIRS_PER_ITEM // (num_heads // num_kv_heads)), BLOCK_KV

    def write(
        self, k: mx.array, v: mx.array, k_cache: mx.array, v_cache: mx.array, metadata: AttentionMetadata
    ) -> None:
        """See `AttentionBackend.write`; the rows are copied into the memory of the caches."""
        slots = metadata.write_slots
        written = [("k_cache", to_stored(k, k_cache.dtype), k_cache)]
        if v_cache is not k_cache:
            written.append(("v_cache", to_stored(v, v_cache.dtype), v_cache))
        mx.eval([rows for _, rows, _ in written], k_cache, v_cache)
        for name, rows, cache in written:
            memory = shared_memory(cache)
            if not (memory.flags.c_contiguous and memory.flags.writeable):
                raise ValueError(f"{name} is not contiguous in memory; pass a whole array instead of a view of another")
            memory.reshape(-1, *memory.shape[2:])[slots] = shared_memory(rows)

    def wait_for(self, *arrays: mx.array) -> None:
        """See `AttentionBackend.wait_for`."""
        mx.eval(*arrays)

    def in_shares(
        self, first: int, end: int, compute: Callable[[int, int], tuple[mx.array, mx.array]]
    ) -> list[tuple[int, int, tuple[mx.array, mx.array]]]:
        """See `AttentionBackend.in_shares`: a share per thread, because MLX multiplies matrices with one."""
        size = min(num_threads(), end - first)
        made: dict[int, tuple[int, int, tuple[mx.array, mx.array]]] = {}

        def work(thread: int) -> None:
            begin, stop = (first + bound for bound in share(end - first, thread, size))
            made[thread] = begin, stop, compute(begin, stop)
            mx.eval(made[thread][2])

        thread_pool(size).run(work)
        return [made[thread] for thread in range(size)]

    def attend(
        self, q: mx.array, k_cache: mx.array, v_cache: mx.array, metadata: AttentionMetadata, options: AttentionOptions
    ) -> mx.array:
        """See `AttentionBackend.attend`."""
        num_tokens, num_heads, head_dim = q.shape
        value_dim = value_dim_of(v_cache, options)
        stored_dims = k_cache.shape[3], v_cache.shape[3]
        shapes = Shapes(num_heads, k_cache.shape[2], head_dim, value_dim, metadata.block_size, *stored_dims)
        if options.sinks is None:
            first_maximum, first_total = np.full(num_heads, -np.inf), np.zeros(num_heads)
        else:
            first_maximum, first_total = np.array(options.sinks, np.float64) * _LOG2_E, np.ones(num_heads)
        q32 = q.astype(mx.float32)
        mx.eval(q32, k_cache, v_cache)
        out = np.empty((num_tokens, num_heads, value_dim), np.float32)
        work_list = metadata.work_list(self.tile_shape(num_heads, shapes.num_kv_heads, head_dim)[0], options.reach)
        threads = min(num_threads(), len(work_list)) if len(work_list) >= _ITEMS_WORTH_THREADS else 1
        arguments = (
            shared_memory(q32).reshape(-1),
            kernel_memory(k_cache).reshape(-1),
            kernel_memory(v_cache).reshape(-1),
            out.reshape(-1),
            work_list,
            metadata.block_table,
            shapes,
            Scoring(
                np.float32(options.softmax_scale * _LOG2_E),
                np.float32(options.softcap * _LOG2_E),
                options.reach,
                first_maximum.astype(np.float32),
                first_total.astype(np.float32),
            ),
        )
        thread_pool(threads).run(lambda thread: run_work_list(*arguments, make_scratch(shapes), thread, threads))
        return mx.array(out).astype(q.dtype)


def shared_memory(array: mx.array) -> np.ndarray:
    """The memory of an evaluated MLX array as a NumPy array; writes to it change the MLX array.

    NumPy has no bfloat16, so such an array comes as uint16 with the same bits.
    """
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.asarray(array)


def kernel_memory(array: mx.array) -> np.ndarray:
    """`shared_memory` with the type that stands for its elements in the kernel's `CACHE_TYPES`."""
    return shared_memory(array).view(CACHE_TYPES[dtype_name(array.dtype)])
