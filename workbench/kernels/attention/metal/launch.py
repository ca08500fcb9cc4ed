"""Launch the Metal kernels through ``mx.fast.metal_kernel`` or a function with its signature."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from workbench.kernels.attention.dtypes import dtype_name
from workbench.kernels.attention.metadata import check_filled_up
from workbench.kernels.attention.metal.plan import LaunchPlan, RowPart, plan_launch, row_parts
from workbench.kernels.attention.metal.tile_shape import TileShape
from workbench.kernels.attention.stored import STORED_DTYPES, value_dim_of

if TYPE_CHECKING:
    from workbench.kernels.attention.metadata import AttentionMetadata
    from workbench.kernels.attention.options import AttentionOptions

V1_SIMDGROUPS = 4
"""Number of simdgroups that share the context of a row in ``paged_varlen_v1``."""

MAX_DISPATCH_FLOP = 2.0**37
"""Multiplications and additions of one dispatch, about 50 ms of an M1's stated 2.6 TFLOP/s.

MLX cannot end a command buffer inside a dispatch, and macOS ends those that keep the GPU from drawing for seconds:
2,048 rows at 128k positions, 32 heads of 128, are 4.4 TFLOP."""

UNSPLIT = 2**30
"""A length that no context has, as ``kv_split`` of a part of a batch that is not split."""

MAX_WINDOW = 2**30
"""Wider windows are cut to this one: no context is longer, and positions minus it do not overflow."""


@cache
def metal_source(name: str) -> str:
    """The text of a .metal file of this package, by name without suffix."""
    return files(__package__).joinpath(f"{name}.metal").read_text()


class LaunchKey(NamedTuple):
    """Layers with equal keys share a launch.

    Attributes:
        kernels: The maker of the launch.
        q_shape: Shape of the queries, [T, num_heads, head_dim].
        cache_shape: Shape of a cache.
        dtype: Element type of the caches.
        arguments: Scale, reach and soft cap.
        kv_split: Maximum number of KV positions in a work item; None chooses by the amount of work.
        value_dim: Elements of a value per head.
        latent: Whether values are the first elements of keys.
    """

    kernels: PagedVarlenKernels
    q_shape: tuple[int, ...]
    cache_shape: tuple[int, ...]
    dtype: mx.Dtype
    arguments: tuple[float, int, float]
    kv_split: int | None
    value_dim: int
    latent: bool


@dataclass(frozen=True)
class PreparedLaunch:
    """Everything of a launch but q and the caches: made once per step and shared by all layers that agree in it.

    Attributes:
        dtype: Element type of the queries, see `launch_dtype`.
        tables: The inputs work_items and block_table.
        merging: The rows to merge and their places in the packed batch; None when no context is split.
        num_partial_rows: Number of rows of partial results.
        scores: The inputs sinks, scoring and window for a layer without sinks.
        attend: The tiled kernel with all of its arguments but the inputs.
        merge: The merge kernel in the same way; None when no context is split.
        parts: Runs of rows that are dispatched one after another instead; none if one dispatch is short enough.
        kv_split: Maximum number of KV positions in a work item of the parts.
    """

    dtype: mx.Dtype
    tables: tuple[mx.array, mx.array]
    merging: tuple[mx.array, mx.array] | None
    num_partial_rows: int
    scores: tuple[mx.array, mx.array, mx.array]
    attend: Callable[..., list[mx.array]]
    merge: Callable[..., list[mx.array]] | None
    parts: Sequence[RowPart] = ()
    kv_split: int = UNSPLIT

    @property
    def batch(self) -> LaunchArrays:
        """All that differs between launches of one shape."""
        return self.tables, self.merging or (), self.num_partial_rows

    def with_batch(self, batch: LaunchArrays) -> PreparedLaunch:
        """The same launch of another batch, given its `batch`."""
        tables, merging, _ = batch
        return replace(self, tables=tables, merging=merging or None)


LaunchArrays = tuple[tuple[mx.array, mx.array], tuple[()] | tuple[mx.array, mx.array], int]
"""See `PreparedLaunch.batch`."""


class PagedVarlenKernels:
    """The kernels of this package, all compiled by one function.

    Args:
        metal_kernel: ``mx.fast.metal_kernel``, ``workbench.kernels.msl.metal_kernel``, or another function of that
            signature.
        **launch_options: Extra keyword arguments of every launch, such as ``order=1`` for msl.
    """

    max_dispatch_flop = MAX_DISPATCH_FLOP

    def __init__(self, metal_kernel: Callable[..., Any], **launch_options: Any):
        self.metal_kernel = metal_kernel
        self.launch_options = launch_options
        self._kernels: dict[str, Any] = {}

    def attend(
        self,
        q: mx.array,
        k_cache: mx.array,
        v_cache: mx.array,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        *,
        kv_split: int | None = None,
    ) -> mx.array:
        """See `AttentionBackend.attend`; the tiled kernel, followed by the merge kernel when contexts are split.

        ``kv_split`` is the maximum number of KV positions in a work item; None chooses by the amount of work.

        Raises:
            ValueError: The kernel does not support the head_dim, the block size or the dtype.
        """
        value_dim = value_dim_of(v_cache, options)
        if v_cache.shape[:3] != k_cache.shape[:3]:
            raise ValueError(
                f"k_cache is {k_cache.shape} and v_cache is {v_cache.shape}; only their last axes may differ"
            )
        latent = options.value_dim > 0
        launch = self._prepared(
            q.shape, k_cache.shape, k_cache.dtype, metadata, options, kv_split, value_dim=value_dim, latent=latent
        )
        if launch is None:
            return mx.zeros((0, q.shape[1], value_dim), q.dtype)
        if launch.parts:
            split = launch.kv_split
            runs = ((q[begin:end], part) for begin, end, part in launch.parts)
            return mx.concatenate(
                [self.attend(rows, k_cache, v_cache, part, options, kv_split=split) for rows, part in runs]
            )
        queries = q if q.dtype == launch.dtype else q.astype(launch.dtype)
        sinks, *scores = launch.scores
        if options.sinks is not None:
            sinks = options.sinks.astype(mx.float32)
        out, *partials = launch.attend(inputs=[queries, k_cache, v_cache, *launch.tables, sinks, *scores])
        if launch.merge is not None and launch.merging is not None:
            merge_rows, merged_rows = launch.merging
            (merged,) = launch.merge(inputs=[*partials, merge_rows])
            out[merged_rows] = merged
        return out if q.dtype == launch.dtype else out.astype(q.dtype)

    def _prepared(
        self,
        q_shape: tuple[int, ...],
        cache_shape: tuple[int, ...],
        dtype: mx.Dtype,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        kv_split: int | None,
        value_dim: int,
        latent: bool,
    ) -> PreparedLaunch | None:
        """The launch of a batch for layers of one shape, made on first use; None when the batch has no rows."""
        key = LaunchKey(self, q_shape, cache_shape, dtype, options.arguments, kv_split, value_dim, latent)
        if key not in metadata.derived:
            if metadata.num_tokens == 0:
                return None
            metadata.derived[key] = self.prepare(key, metadata)
        return metadata.derived[key]

    def keys(self, metadata: AttentionMetadata) -> list[LaunchKey]:
        """Keys of the launches that have been prepared for a batch."""
        return [key for key in metadata.derived if isinstance(key, LaunchKey) and key.kernels is self]

    def prepare(self, key: LaunchKey, metadata: AttentionMetadata) -> PreparedLaunch:
        """Prepare the launch of a batch for the layers of a key.

        Raises:
            ValueError: The kernel does not support the head_dim, the block size or the dtype.
        """
        _, q_shape, (_, _, num_kv_heads, _), dtype, arguments, kv_split, value_dim, latent = key
        num_tokens, num_heads, head_dim = q_shape
        check_supported(head_dim, metadata.block_size, dtype, value_dim)
        stored, dtype = dtype, launch_dtype(dtype)
        shape = TileShape.choose(head_dim, dtype.size, value_dim)
        plan = self.plan(
            metadata, num_heads, num_kv_heads, head_dim, dtype.size, arguments[1], kv_split, value_dim=value_dim
        )
        outputs = [((num_tokens, num_heads, value_dim), dtype)]
        if plan.num_partial_rows:
            outputs.append(((plan.num_partial_rows, num_heads, value_dim), mx.float32))
            outputs.append(((plan.num_partial_rows, num_heads, 2), mx.float32))
        grid, threadgroup = self.geometry(plan, shape, num_heads, num_kv_heads)
        attend = self._launcher(
            "paged_varlen_split" if plan.num_partial_rows else "paged_varlen",
            outputs=outputs,
            grid=grid,
            threadgroup=threadgroup,
            template=[
                ("T", dtype),
                ("HEAD_DIM", head_dim),
                ("VALUE_DIM", value_dim),
                ("LATENT", latent),
                ("BLOCK_SIZE", metadata.block_size),
                ("TILE_KV", shape.tile_kv),
                ("NUM_SIMDGROUPS", shape.num_simdgroups),
                ("WIDTH", shape.width),
                ("S", stored),
            ],
        )
        merge = merging = None
        if plan.num_partial_rows:
            merging = plan.mlx_merge_rows, plan.mlx_merged_rows
            merge = self._launcher(
                "merge_splits",
                outputs=[((len(plan.merged_rows), num_heads, value_dim), dtype)],
                grid=(32 * num_heads, len(plan.merged_rows), 1),
                threadgroup=(32, 1, 1),
                template=[("T", dtype), ("HEAD_DIM", value_dim)],
            )
        tables = plan.mlx_items, metadata.mlx_block_table
        check_filled_up(*tables, *(merging or ())[:1])
        scores = score_inputs(*arguments, num_heads=num_heads, in_log2=True)
        parts: Sequence[RowPart] = ()
        if int(metadata.query_lens.max()) > 1:  # decodes read, and hardly compute
            block_q = shape.block_q(num_heads // num_kv_heads)
            whole = metadata.work_list(block_q, arguments[1])
            costs = whole[:, 2] * (whole[:, 4] - whole[:, 3]) * (2.0 * num_heads * (head_dim + value_dim))
            parts = row_parts(metadata, whole, costs, self.max_dispatch_flop)
        split = plan.kv_split or UNSPLIT
        return PreparedLaunch(dtype, tables, merging, plan.num_partial_rows, scores, attend, merge, parts, split)

    def attend_v1(
        self, q: mx.array, k_cache: mx.array, v_cache: mx.array, metadata: AttentionMetadata, options: AttentionOptions
    ) -> mx.array:
        """Attention by ``paged_varlen_v1``: one row and head per threadgroup, any head_dim and block size."""
        num_tokens, num_heads, head_dim = q.shape
        out_shape = num_tokens, num_heads, value_dim_of(v_cache, options)
        if num_tokens == 0:
            return mx.zeros(out_shape, q.dtype)
        dtype = launch_dtype(k_cache.dtype)
        launch = self._launcher(
            "paged_varlen_v1",
            outputs=[(out_shape, dtype)],
            grid=(32 * V1_SIMDGROUPS * num_heads, num_tokens, 1),
            threadgroup=(32 * V1_SIMDGROUPS, 1, 1),
            template=[
                ("T", dtype),
                ("HEAD_DIM", head_dim),
                ("VALUE_DIM", out_shape[2]),
                ("LATENT", options.value_dim > 0),
                ("BLOCK_SIZE", metadata.block_size),
                ("NUM_SIMDGROUPS", V1_SIMDGROUPS),
            ],
        )
        tables = metadata.mlx_cu_seqlens_q, metadata.mlx_seqused_k, metadata.mlx_block_table
        sinks, *scores = score_inputs(*options.arguments, num_heads=num_heads, in_log2=False)
        if options.sinks is not None:
            sinks = options.sinks.astype(mx.float32)
        (out,) = launch(inputs=[q.astype(dtype), k_cache, v_cache, *tables, sinks, *scores])
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
        value_dim: int = 0,
    ) -> LaunchPlan:
        """The plan of a batch, made once and shared by all layers with the same window."""
        block_q = TileShape.choose(head_dim, itemsize, value_dim).block_q(num_heads // num_kv_heads)
        key = (LaunchPlan, block_q, window, num_kv_heads, kv_split)
        if key not in metadata.derived:
            metadata.derived[key] = plan_launch(
                metadata, block_q=block_q, window=window, num_kv_heads=num_kv_heads, kv_split=kv_split
            )
        return metadata.derived[key]

    @staticmethod
    def geometry(
        plan: LaunchPlan, shape: TileShape, num_heads: int, num_kv_heads: int
    ) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Grid in threads, as ``mx.fast.metal_kernel`` counts it, and threads per threadgroup."""
        slices = shape.head_slices(num_heads // num_kv_heads)
        return (len(plan.items) * shape.threads, num_kv_heads * slices, 1), (shape.threads, 1, 1)

    def kernel(self, name: str) -> Any:
        """The kernel of that name ("paged_varlen_v1", "paged_varlen", ...), compiled on first use."""
        if name not in self._kernels:
            self._kernels[name] = self.metal_kernel(name=name, **kernel_text(name))
        return self._kernels[name]

    def _launcher(
        self, name: str, *, outputs: Sequence[tuple[Sequence[int], mx.Dtype]], **launch: Any
    ) -> Callable[..., list[mx.array]]:
        """A kernel with all of its arguments but ``inputs``."""
        shapes, dtypes = zip(*outputs)
        return partial(self.kernel(name), output_shapes=shapes, output_dtypes=dtypes, **launch, **self.launch_options)


def kernel_text(name: str) -> dict[str, Any]:
    """Arguments of ``mx.fast.metal_kernel`` for a kernel of this package: names of inputs and outputs, and text."""
    cache_inputs = ["q", "k_cache", "v_cache"]
    scoring_inputs = ["sinks", "scoring", "window"]
    if name == "paged_varlen_v1":
        return {
            "input_names": [*cache_inputs, "cu_seqlens_q", "seqused_k", "block_table", *scoring_inputs],
            "output_names": ["out"],
            "header": metal_source("find_seq_idx") + metal_source("stored"),
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
        "header": ("#define HAS_SPLITS\n" if has_splits else "") + metal_source("stored") + metal_source("tile"),
        "source": metal_source("paged_varlen"),
    }


def launch_dtype(stored: mx.Dtype) -> mx.Dtype:
    """Element type of a launch's queries and tiles, by that of the caches; codes become float16."""
    return mx.float16 if stored == mx.int8 else stored


def check_supported(head_dim: int, block_size: int, dtype: mx.Dtype, value_dim: int = 0) -> None:
    """Raise ValueError when the tiled kernel does not support the sizes of heads, a block size or a dtype."""
    if dtype not in STORED_DTYPES.values():
        taken = ", ".join(map(dtype_name, STORED_DTYPES.values()))
        raise ValueError(f"the KV cache is {dtype}; the Metal kernel takes {taken}")
    TileShape.choose(head_dim, launch_dtype(dtype).size, value_dim)
    if block_size % 8:
        raise ValueError(
            f"block_size is {block_size}; the Metal kernel takes multiples of 8: "
            'choose 8, 16 or 32, or use attention_backend="gather"'
        )


@lru_cache(maxsize=256)
def score_inputs(
    softmax_scale: float, reach: int, softcap: float, *, num_heads: int, in_log2: bool
) -> tuple[mx.array, mx.array, mx.array]:
    """The inputs ``sinks`` (none), ``scoring`` and ``window`` of a kernel, the same in every step.

    They are arrays with their values in them, not operations, which every step would compute again.

    Args:
        softmax_scale: Factor on q · k.
        reach: The positions that a row sees: a left window, -1 for all, or -n for chunks of n.
        softcap: Soft cap, 0 for none.
        num_heads: Number of query heads.
        in_log2: Whether the kernel takes scores in units of log2, as the tiled one does.
    """
    scoring = [softmax_scale, softcap]
    if in_log2:
        log2_e = math.log2(math.e)
        scoring = [softmax_scale / softcap, softcap * log2_e] if softcap else [softmax_scale * log2_e, 0.0]
    return (
        mx.array(np.full(num_heads, -np.inf, np.float32)),
        mx.array(scoring, mx.float32),
        mx.array([min(max(reach, -MAX_WINDOW), MAX_WINDOW)], mx.int32),
    )
