"""Attention on a CPU: hands the KV cache's own memory to a compiled kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from workbench.attention.backend import AttentionBackend
from workbench.attention.cpu_kernel import run_work_list
from workbench.attention.cpu_layout import BLOCK_KV, PAIRS_PER_ITEM, Scoring, Shapes, make_scratch

if TYPE_CHECKING:
    from workbench.attention.metadata import AttentionMetadata

_LOG2_E = 1.4426950408889634


class CpuBackend(AttentionBackend):
    """A numba kernel that runs the work list on one core, in float32.

    float16 and bfloat16 caches are served by widening the blocks a step reads to float32 first: right, but not
    fast. A CPU is fastest with float32 weights and caches.
    """

    name = "cpu"

    def tile_shape(self, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
        """As many rows as fill the kernel's panels: fewer when more query heads share a KV head."""
        return max(1, PAIRS_PER_ITEM // (num_heads // num_kv_heads)), BLOCK_KV

    def write(
        self, k: mx.array, v: mx.array, k_cache: mx.array, v_cache: mx.array, metadata: AttentionMetadata
    ) -> None:
        """See `AttentionBackend.write`; the rows are copied into the memory that the caches live in."""
        if metadata.slot_mapping is None:
            raise ValueError("slot_mapping is None: this batch has nothing to write; pass int64 [T]")
        k, v = k.astype(k_cache.dtype), v.astype(v_cache.dtype)
        mx.eval(k, v, k_cache, v_cache)
        for name, rows, cache in (("k_cache", k, k_cache), ("v_cache", v, v_cache)):
            memory = shared_memory(cache)
            if not (memory.flags.c_contiguous and memory.flags.writeable):
                raise ValueError(f"{name} is not contiguous in memory: use an array of its own, not a view of another")
            memory.reshape(-1, *memory.shape[2:])[metadata.slot_mapping] = shared_memory(rows)

    def write_and_attend(
        self, q: mx.array, k: mx.array, v: mx.array, k_cache: mx.array, v_cache: mx.array, *args: Any, **options: Any
    ) -> mx.array:
        """See `AttentionBackend.write_and_attend`; everything MLX has to compute is waited for once."""
        mx.eval(q, k, v)
        return super().write_and_attend(q, k, v, k_cache, v_cache, *args, **options)

    def attend(
        self,
        q: mx.array,
        k_cache: mx.array,
        v_cache: mx.array,
        metadata: AttentionMetadata,
        *,
        softmax_scale: float,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """See `AttentionBackend.attend`."""
        num_tokens, num_heads, head_dim = q.shape
        shapes = Shapes(num_heads, k_cache.shape[2], head_dim, metadata.block_size)
        block_table = metadata.block_table
        if k_cache.dtype != mx.float32:
            used_blocks, block_table = metadata.used_blocks
            k_cache, v_cache = (cache[used_blocks].astype(mx.float32) for cache in (k_cache, v_cache))
        if sinks is None:
            first_maximum, first_total = np.full(num_heads, -np.inf), np.zeros(num_heads)
        else:
            first_maximum, first_total = np.array(sinks, np.float64) * _LOG2_E, np.ones(num_heads)
        q32 = q.astype(mx.float32)
        mx.eval(q32, k_cache, v_cache)
        out = np.empty((num_tokens, num_heads, head_dim), np.float32)
        run_work_list(
            shared_memory(q32).reshape(-1),
            shared_memory(k_cache).reshape(-1),
            shared_memory(v_cache).reshape(-1),
            out.reshape(-1),
            metadata.work_list(self.tile_shape(num_heads, shapes.num_kv_heads, head_dim)[0], window_size[0]),
            block_table,
            shapes,
            Scoring(
                np.float32(softmax_scale * _LOG2_E),
                np.float32(softcap * _LOG2_E),
                window_size[0],
                first_maximum.astype(np.float32),
                first_total.astype(np.float32),
            ),
            make_scratch(shapes),
        )
        return mx.array(out).astype(q.dtype)


def shared_memory(array: mx.array) -> np.ndarray:
    """The memory of an evaluated MLX array as a numpy array; what is written there is in the MLX array.

    bfloat16 is unknown to numpy and comes as the uint16 of the same bits.
    """
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.asarray(array)
