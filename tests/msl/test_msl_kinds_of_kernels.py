"""Kernels of the kinds that others write, in a few lines each: elementwise over strides, sampling, and its gradient."""

import mlx.core as mx
import numpy as np
import pytest
from msl_runs import skip_without_compiler

from workbench import msl

skip_without_compiler()

RNG = np.random.default_rng(4)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_elementwise_over_an_array_with_gaps(dtype, order):
    """A float goes into a half without a cast, as Metal allows."""
    x = mx.array(RNG.standard_normal((6, 10)).astype(np.float32)).astype(dtype)[::2, ::3]
    kernel = msl.metal_kernel(
        "squares",
        ["x"],
        ["y"],
        "uint i = thread_position_in_grid.x;\nfloat v = x[elem_to_loc(i, x_shape, x_strides, x_ndim)];\ny[i] = v * v;",
        ensure_row_contiguous=False,
    )
    launch = {"output_shapes": [x.shape], "output_dtypes": [dtype], "grid": (x.size, 1, 1), "threadgroup": (256, 1, 1)}
    (y,) = kernel(inputs=[x], order=order, **launch)
    assert mx.allclose(y, x * x, rtol=1e-3)


SAMPLE = """
uint i = thread_position_in_grid.x;
float at = place[i];
int left = floor(at), n = x_shape[0];
float part = at - left;
#if GUARDED
float a = left >= 0 && left < n ? x[left] : 0.0f, b = left + 1 >= 0 && left + 1 < n ? x[left + 1] : 0.0f;
#else
float a = x[left], b = x[left + 1];
a = left >= 0 && left < n ? a : 0.0f;
b = left + 1 >= 0 && left + 1 < n ? b : 0.0f;
#endif
y[i] = (1 - part) * a + part * b;
"""
GRADIENT = """
uint i = thread_position_in_grid.x;
int left = floor(place[i]), n = x_shape[0];
float part = place[i] - left;
if (left >= 0 && left < n) atomic_fetch_add_explicit(&dx[left], (1 - part) * dy[i], memory_order_relaxed);
if (left + 1 >= 0 && left + 1 < n) atomic_fetch_add_explicit(&dx[left + 1], part * dy[i], memory_order_relaxed);
"""


def weights(place, n):
    """[places, n]: the part of each element in each sample."""
    return np.maximum(0, 1 - np.abs(place[:, None] - np.arange(n)))


@pytest.mark.parametrize("order", [0, 1])
def test_samples_between_elements_and_beyond_the_ends(order):
    x, place = RNG.standard_normal(9).astype(np.float32), RNG.uniform(-1.9, 9.9, 40).astype(np.float32)
    launch = {"inputs": [mx.array(x), mx.array(place)], "output_shapes": [(40,)], "output_dtypes": [mx.float32]}
    launch |= {"grid": (40, 1, 1), "threadgroup": (32, 1, 1), "order": order}
    guarded, late = (
        msl.metal_kernel("sample", ["x", "place"], ["y"], f"#define GUARDED {int(is_guarded)}{SAMPLE}#undef GUARDED\n")
        for is_guarded in (True, False)
    )
    (y,) = guarded(**launch)
    np.testing.assert_allclose(np.array(y), weights(place, 9) @ x, rtol=1e-4, atol=1e-5)
    with pytest.raises(msl.MslError, match=r"out-of-bounds read of 4 bytes at x\["):
        late(**launch)  # a mask after the read is too late


@pytest.mark.parametrize("order", [0, 1])
def test_a_gradient_that_threads_add_up_by_atomics(order):
    place, dy = RNG.uniform(-1.9, 9.9, 70).astype(np.float32), RNG.standard_normal(70).astype(np.float32)
    kernel = msl.metal_kernel("gradient", ["x", "place", "dy"], ["dx"], GRADIENT, atomic_outputs=True)
    (dx,) = kernel(
        inputs=[mx.zeros(9), mx.array(place), mx.array(dy)],
        output_shapes=[(9,)],
        output_dtypes=[mx.float32],
        grid=(70, 1, 1),
        threadgroup=(32, 1, 1),
        init_value=0,
        order=order,
    )
    np.testing.assert_allclose(np.array(dx), weights(place, 9).T @ dy, rtol=1e-4, atol=1e-4)
