"""Short ways to run a kernel in the tests of `workbench.kernels.msl`."""

import mlx.core as mx
import numpy as np
import pytest

from workbench import msl
from workbench.kernels.msl.compiler import find_compiler

THREADS = 64
THREAD = "const uint i = thread_position_in_grid.x;\n"


def skip_without_compiler():
    try:
        find_compiler()
    except msl.MslCompilerMissing as missing:
        pytest.skip(str(missing), allow_module_level=True)


def ramp(count=THREADS, dtype=mx.float32):
    """1, 2, 3 ...: no zeros, and no element twice."""
    return mx.arange(1, count + 1).astype(dtype)


def run(
    source,
    *,
    inputs=None,
    header="",
    threads=THREADS,
    threadgroup=THREADS,
    shape=None,
    dtype=mx.float32,
    name="k",
    template=None,
    atomic_outputs=False,
    **options,
):
    """Run a source over inputs x, z ... and the output y, after a line that defines ``i``; y as NumPy."""
    inputs = [ramp()] if inputs is None else inputs
    kernel = msl.metal_kernel(
        name, ["x", "z", "w"][: len(inputs)], ["y"], THREAD + source, header, atomic_outputs=atomic_outputs
    )
    (y,) = kernel(
        inputs=inputs,
        output_shapes=[shape or (threads,)],
        output_dtypes=[dtype],
        grid=(threads, 1, 1),
        threadgroup=(threadgroup, 1, 1),
        template=template,
        **options,
    )
    return np.array(y.astype(mx.float32) if dtype == mx.bfloat16 else y)


def everywhere(source, **options):
    """The result, the same in both orders, with checks and without."""
    results = [
        run(source, order=order, checks=checks, **options) for order, checks in ((0, True), (1, True), (0, False))
    ]
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)
    return results[0]


def fault_of(source, **options) -> msl.MslError:
    """The error of a source that must not run."""
    with pytest.raises(msl.MslError) as raised:
        run(source, **options)
    return raised.value
