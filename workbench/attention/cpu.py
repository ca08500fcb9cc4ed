"""Attention on a CPU: hands the KV cache's own memory to a compiled kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from workbench.attention.backend import AttentionBackend
from workbench.attention.cpu_kernel import run_work_list
from workbench.attention.cpu_layout import BLOCK_KV, PAIRS_PER_ITEM, Scoring, Shapes, make_scratch

if TYPE_CHECKING:
    from workbench.attention.metadata import AttentionMetadata

_LOG2_E = 1.4426950408889634


class CpuBackend(AttentionBackend):
    """A numba kernel that runs the work list on one core, in float32."""

    name = "cpu"

    def tile_shape(self, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
        """As many rows as fill the kernel's panels, so few when many query heads share a KV head."""
        return max(1, PAIRS_PER_ITEM // (num_heads // num_kv_heads)), BLOCK_KV

    def attend(self, q, k_cache, v_cache, metadata, *, softmax_scale, window_size=(-1, -1), softcap=0.0, sinks=None):
        """See `AttentionBackend.attend`."""
        num_tokens, num_heads, head_dim = q.shape
        shapes = Shapes(num_heads, k_cache.shape[2], head_dim, metadata.block_size)
        mx.eval(q)
        kc, vc = np.asarray(k_cache).reshape(-1), np.asarray(v_cache).reshape(-1)
        block_q, _ = self.tile_shape(num_heads, shapes.num_kv_heads, head_dim)
        out = np.empty((num_tokens, num_heads, head_dim), np.float32)
        if sinks is None:
            first = np.full(num_heads, -np.inf, np.float32), np.zeros(num_heads, np.float32)
        else:
            first = np.asarray(sinks).astype(np.float32) * np.float32(_LOG2_E), np.ones(num_heads, np.float32)
        scoring = Scoring(np.float32(softmax_scale * _LOG2_E), np.float32(softcap * _LOG2_E), window_size[0], *first)
        run_work_list(
            np.asarray(q).reshape(-1),
            kc,
            vc,
            out.reshape(-1),
            metadata.work_list(block_q, window_size[0]),
            metadata.block_table,
            shapes,
            scoring,
            make_scratch(shapes),
        )
        return mx.array(out)
