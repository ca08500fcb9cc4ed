"""The attention backends that run the Metal source: on an Apple GPU, on an NVIDIA GPU, and on any CPU."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from workbench.kernels.attention.backend import AttentionBackend
from workbench.kernels.attention.metal.launch import PagedVarlenKernels, check_supported, launch_dtype
from workbench.kernels.attention.metal.tile_shape import TileShape

if TYPE_CHECKING:
    import numpy as np

    from workbench.kernels.attention.metadata import AttentionMetadata
    from workbench.kernels.attention.options import AttentionOptions


class MetalSourceBackend(AttentionBackend):
    """Runs the kernels of this package; a subclass provides the function that compiles them.

    Attributes:
        kernels: The kernels, compiled on first use.
    """

    def __init__(self, **launch_options: Any) -> None:
        """Make the backend.

        Args:
            **launch_options: Extra keyword arguments of every launch, such as ``order=1`` for msl.
        """
        self.kernels = PagedVarlenKernels(self.kernel_maker(), **launch_options)

    @staticmethod
    @abstractmethod
    def kernel_maker() -> Callable[..., Any]:
        """A function with the signature of ``mx.fast.metal_kernel``."""

    @property
    def replayable_kernels(self) -> PagedVarlenKernels | None:
        """See `AttentionBackend.replayable_kernels`."""
        return self.kernels

    def check_supported(self, head_dim: int, block_size: int, dtype: str, value_dim: int = 0) -> None:
        """See `AttentionBackend.check_supported`."""
        check_supported(head_dim, block_size, getattr(mx, dtype), value_dim)

    def attend(
        self, q: mx.array, k_cache: mx.array, v_cache: mx.array, metadata: AttentionMetadata, options: AttentionOptions
    ) -> mx.array:
        """See `AttentionBackend.attend`."""
        return self.kernels.attend(q, k_cache, v_cache, metadata, options)

    def tile_shape(self, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int = 0) -> tuple[int, int]:
        """Query rows per work item and KV positions per inner tile, for elements of 2 bytes."""
        shape = TileShape.choose(head_dim, 2, value_dim)
        return shape.block_q(num_heads // num_kv_heads), shape.tile_kv

    def _plan(
        self, metadata: AttentionMetadata, sizes: tuple[int, int, int, int], dtype: str, window: int
    ) -> tuple[np.ndarray, tuple[int, int], dict[str, Any]]:
        """See `AttentionBackend`; includes the launch grid and the splits that were chosen."""
        num_heads, num_kv_heads, head_dim, value_dim = sizes
        itemsize = launch_dtype(getattr(mx, dtype)).size
        shape = TileShape.choose(head_dim, itemsize, value_dim)
        plan = self.kernels.plan(metadata, num_heads, num_kv_heads, head_dim, itemsize, window, value_dim=value_dim)
        grid, threadgroup = self.kernels.geometry(plan, shape, num_heads, num_kv_heads)
        details = {"threadgroup_bytes": shape.threadgroup_bytes, "merged_rows": len(plan.merged_rows)}
        tile = shape.block_q(num_heads // num_kv_heads), shape.tile_kv
        return plan.work_list, tile, {"grid": grid, "threadgroup": threadgroup, "details": details}


class MetalBackend(MetalSourceBackend):
    """The kernels on an Apple GPU."""

    name = "metal"

    @staticmethod
    def kernel_maker() -> Callable[..., Any]:
        """``mx.fast.metal_kernel`` with safe mathematics: the kernels rely on exp2(-inf) being 0 and on NaN."""
        return partial(mx.fast.metal_kernel, compile_options={"math_mode": "safe"})


class CudaBackend(MetalSourceBackend):
    """The kernels on an NVIDIA GPU, see `workbench.kernels.attention.metal.cuda`."""

    name = "cuda"

    @staticmethod
    def kernel_maker() -> Callable[..., Any]:
        """``mx.fast.cuda_kernel`` after a translation of the text."""
        from workbench.kernels.attention.metal.cuda import metal_kernel_on_cuda

        return metal_kernel_on_cuda


class MslBackend(MetalSourceBackend):
    """The kernels on any CPU with every access checked, see `workbench.kernels.msl`; slow."""

    name = "msl"
    replayable_kernels = None

    @staticmethod
    def kernel_maker() -> Callable[..., Any]:
        """``workbench.kernels.msl.metal_kernel``."""
        from workbench.kernels.msl import metal_kernel

        return metal_kernel
