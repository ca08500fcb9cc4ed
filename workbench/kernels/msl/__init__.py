"""Runs Metal Shading Language on the CPU, with every access checked.

`metal_kernel` has the signature of `mlx.core.fast.metal_kernel` and runs exactly the same source on a machine without a
GPU:

    from workbench import msl

    kernel = msl.metal_kernel("double", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = 2 * x[i];")
    (y,) = kernel(inputs=[x], output_shapes=[x.shape], output_dtypes=[x.dtype], grid=(x.size, 1, 1),
                  threadgroup=(32, 1, 1))

Faults that a GPU ignores silently are errors here: reads and writes out of bounds, races, missing barriers,
uninitialised memory, and more (`report.DESCRIPTIONS` lists them all).
"""

from workbench.kernels.msl.compiler import why_unavailable
from workbench.kernels.msl.errors import MslCompileError, MslCompilerMissing, MslError
from workbench.kernels.msl.kernel import MetalKernel, metal_kernel
from workbench.kernels.msl.recording import KernelRun
from workbench.kernels.msl.statistics import BufferTraffic, LaunchStatistics

__all__ = [
    "BufferTraffic",
    "KernelRun",
    "LaunchStatistics",
    "MetalKernel",
    "MslCompileError",
    "MslCompilerMissing",
    "MslError",
    "metal_kernel",
    "why_unavailable",
]
