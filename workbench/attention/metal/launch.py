"""Launching the Metal kernels through ``mx.fast.metal_kernel`` or whatever has its signature."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from workbench.attention.dtypes import DTYPES
from workbench.attention.metal.plan import LaunchPlan, plan_launch
from workbench.attention.metal.tile_shape import TileShape

if TYPE_CHECKING:
    from workbench.attention.metadata import AttentionMetadata

V1_SIMDGROUPS = 4
"""Simdgroups that share the context of a row in ``paged_varlen_v1``."""

MAX_WINDOW = 2**30
"""Wider windows are as good as this one, and positions minus it do not overflow."""


@cache
def metal_source(name: str) -> str:
    """The text of a .metal file of this package, by name without suffix."""
    return files(__package__).joinpath(f"{name}.metal").read_text()


class PagedVarlenKernels:
    """The kernels of this package, made by one maker of kernels.

    Args:
        metal_kernel: ``mx.fast.metal_kernel``, ``workbench.msl.metal_kernel``, or another function of that signature.
        **launch_options: Further keyword arguments of every launch, such as ``order=1`` under msl.
    """

    def __init__(self, metal_kernel: Callable[..., Any], **launch_options: Any):
        self.metal_kernel = metal_kernel
        self.launch_options = launch_options
        self._kernels: dict[str, Any] = {}
        self._plans: weakref.WeakKeyDictionary[AttentionMetadata, dict[tuple, LaunchPlan]]
        self._plans = weakref.WeakKeyDictionary()

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
        kv_split: int | None = None,
    ) -> mx.array:
        """Attention by the tiled kernel, and by the merge kernel where contexts are split.

        Args:
            q: [T, num_heads, head_dim].
            k_cache: [num_blocks, block_size, num_kv_heads, head_dim].
            v_cache: Like ``k_cache``.
            metadata: The batch.
            softmax_scale: Factor on q · k.
            window_size: (left, right) as in flash-attn.
            softcap: Scores become ``softcap * tanh(score / softcap)``; 0 turns it off.
            sinks: [num_heads] or None.
            kv_split: KV positions per work item at most; None chooses by the work there is.

        Returns:
            [T, num_heads, head_dim] in q's dtype.

        Raises:
            ValueError: A head_dim, block size or dtype that the kernel does not take.
        """
        if metadata.num_tokens == 0:
            return mx.zeros_like(q)
        num_heads, head_dim = q.shape[1:]
        check_supported(head_dim, metadata.block_size, k_cache.dtype)
        if v_cache.shape != k_cache.shape:
            raise ValueError(
                f"k_cache is {k_cache.shape} and v_cache is {v_cache.shape}; the Metal kernel needs one shape"
            )
        dtype = k_cache.dtype
        shape = TileShape.choose(head_dim, dtype.size)
        plan = self.plan(metadata, num_heads, k_cache.shape[2], head_dim, dtype.size, window_size[0], kv_split)
        log2_e = math.log2(math.e)
        scoring = [softmax_scale / softcap, softcap * log2_e] if softcap else [softmax_scale * log2_e, 0.0]
        outputs = [(q.shape, dtype)]
        if plan.num_partial_rows:
            outputs.append(((plan.num_partial_rows, num_heads, head_dim), mx.float32))
            outputs.append(((plan.num_partial_rows, num_heads, 2), mx.float32))
        grid, threadgroup = self.geometry(plan, shape, num_heads, k_cache.shape[2])
        out, *partials = self._launch(
            "paged_varlen_split" if plan.num_partial_rows else "paged_varlen",
            inputs=[
                q.astype(dtype),
                k_cache,
                v_cache,
                plan.mlx_items,
                metadata.mlx_block_table,
                _sinks_or_minus_infinity(sinks, num_heads),
                mx.array(scoring, mx.float32),
                mx.array([min(window_size[0], MAX_WINDOW)], mx.int32),
            ],
            outputs=outputs,
            grid=grid,
            threadgroup=threadgroup,
            template=[
                ("T", dtype),
                ("HEAD_DIM", head_dim),
                ("BLOCK_SIZE", metadata.block_size),
                ("TILE_KV", shape.tile_kv),
                ("NUM_SIMDGROUPS", shape.num_simdgroups),
                ("WIDTH", shape.width),
            ],
        )
        if partials:
            (merged,) = self._launch(
                "merge_splits",
                inputs=[*partials, plan.mlx_merge_rows],
                outputs=[((len(plan.merge_rows), num_heads, head_dim), dtype)],
                grid=(32 * num_heads, len(plan.merge_rows), 1),
                threadgroup=(32, 1, 1),
                template=[("T", dtype), ("HEAD_DIM", head_dim)],
            )
            out[plan.mlx_merged_rows] = merged
        return out.astype(q.dtype)

    def attend_v1(
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
        """The same by ``paged_varlen_v1``: one row and head per threadgroup, any head_dim and block size."""
        num_tokens, num_heads, head_dim = q.shape
        if num_tokens == 0:
            return mx.zeros_like(q)
        dtype = k_cache.dtype
        (out,) = self._launch(
            "paged_varlen_v1",
            inputs=[
                q.astype(dtype),
                k_cache,
                v_cache,
                metadata.mlx_cu_seqlens_q,
                metadata.mlx_seqused_k,
                metadata.mlx_block_table,
                _sinks_or_minus_infinity(sinks, num_heads),
                mx.array([softmax_scale, softcap], mx.float32),
                mx.array([min(window_size[0], MAX_WINDOW)], mx.int32),
            ],
            outputs=[(q.shape, dtype)],
            grid=(32 * V1_SIMDGROUPS * num_heads, num_tokens, 1),
            threadgroup=(32 * V1_SIMDGROUPS, 1, 1),
            template=[
                ("T", dtype),
                ("HEAD_DIM", head_dim),
                ("BLOCK_SIZE", metadata.block_size),
                ("NUM_SIMDGROUPS", V1_SIMDGROUPS),
            ],
        )
        return out.astype(q.dtype)

    def plan(
        self,
        metadata: AttentionMetadata,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        itemsize: int,
        window: int = -1,
        kv_split: int | None = None,
    ) -> LaunchPlan:
        """The plan of a batch, made once and shared by all layers with the same window."""
        block_q = TileShape.choose(head_dim, itemsize).block_q(num_heads // num_kv_heads)
        plans = self._plans.setdefault(metadata, {})
        key = (block_q, window, num_kv_heads, kv_split)
        if key not in plans:
            plans[key] = plan_launch(
                metadata, block_q=block_q, window=window, num_kv_heads=num_kv_heads, kv_split=kv_split
            )
        return plans[key]

    @staticmethod
    def geometry(
        plan: LaunchPlan, shape: TileShape, num_heads: int, num_kv_heads: int
    ) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Grid in threads, as ``mx.fast.metal_kernel`` counts it, and threads per threadgroup."""
        slices = shape.head_slices(num_heads // num_kv_heads)
        return (len(plan.items) * shape.threads, num_kv_heads * slices, 1), (shape.threads, 1, 1)

    def kernel(self, name: str) -> Any:
        """The kernel of that name, made at first use: "paged_varlen_v1", "paged_varlen", ..."""
        if name not in self._kernels:
            self._kernels[name] = self.metal_kernel(name=name, **kernel_text(name))
        return self._kernels[name]

    def _launch(self, name: str, *, outputs: Sequence[tuple[Sequence[int], mx.Dtype]], **launch: Any) -> list[mx.array]:
        shapes, dtypes = zip(*outputs)
        return self.kernel(name)(output_shapes=shapes, output_dtypes=dtypes, **launch, **self.launch_options)


def kernel_text(name: str) -> dict[str, Any]:
    """Arguments of ``mx.fast.metal_kernel`` for a kernel of this package: its names of inputs and outputs, its text."""
    cache_inputs = ["q", "k_cache", "v_cache"]
    scoring_inputs = ["sinks", "scoring", "window"]
    if name == "paged_varlen_v1":
        return {
            "input_names": [*cache_inputs, "cu_seqlens_q", "seqused_k", "block_table", *scoring_inputs],
            "output_names": ["out"],
            "header": metal_source("find_seq_idx"),
            "source": metal_source(name),
        }
    if name == "merge_splits":
        return {
            "input_names": ["partial_out", "partial_sums", "merge_rows"],
            "output_names": ["out"],
            "source": metal_source(name),
        }
    has_splits = name == "paged_varlen_split"
    return {
        "input_names": [*cache_inputs, "work_items", "block_table", *scoring_inputs],
        "output_names": ["out", "partial_out", "partial_sums"] if has_splits else ["out"],
        "header": ("#define HAS_SPLITS\n" if has_splits else "") + metal_source("tile"),
        "source": metal_source("paged_varlen"),
    }


def check_supported(head_dim: int, block_size: int, dtype: mx.Dtype) -> None:
    """Raise ValueError when the tiled kernel has no variant for these."""
    TileShape.choose(head_dim, dtype.size)
    if block_size % 8:
        raise ValueError(
            f"block_size is {block_size}; the Metal kernel takes multiples of 8: "
            'choose 8, 16 or 32, or use attention_backend="gather"'
        )
    if dtype not in DTYPES.values():
        raise ValueError(f"the KV cache is {dtype}; the Metal kernel takes float32, float16 and bfloat16")


def _sinks_or_minus_infinity(sinks: mx.array | None, num_heads: int) -> mx.array:
    if sinks is None:
        return mx.full((num_heads,), -math.inf, mx.float32)
    return sinks.astype(mx.float32)
