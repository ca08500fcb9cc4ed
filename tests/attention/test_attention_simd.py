"""The vector functions of the CPU kernel against float64, on every processor that numba can compile for here."""

from __future__ import annotations

import os
import subprocess
import sys

import llvmlite.binding
import mlx.core as mx
import numba
import numpy as np
import pytest

from workbench.kernels.attention.cpu_ops import swiglu
from workbench.kernels.cpu.attention.layout import TILE_ROWS
from workbench.kernels.cpu.attention.matmul_tiles import dot_tile, matmul_tile, weighted_tile
from workbench.kernels.cpu.attention.simd import LANES, exp, exp2, load, store, tanh


def elementwise(function):
    """A compiled loop over whole vectors."""

    @numba.njit(nogil=True, error_model="numpy")
    def apply(x, out):
        for at in range(0, x.size, LANES):
            store(out, at, function(load(x, at)))

    def call(x: np.ndarray) -> np.ndarray:
        padded = np.zeros(-(-x.size // LANES) * LANES, np.float32)
        padded[: x.size] = x
        out = np.empty_like(padded)
        apply(padded, out)
        return out[: x.size]

    return call


@pytest.mark.repeats(step=4)
@pytest.mark.parametrize(
    ("function", "exact", "low", "high", "tolerance"),
    [
        (exp2, np.exp2, -126.0, 127.4, 1e-7),
        (exp, np.exp, -87.3, 88.3, 2e-7),
        (tanh, np.tanh, -20.0, 20.0, 3e-7),
        (tanh, np.tanh, -1e-3, 1e-3, 1e-7),
    ],
)
def test_relative_error(function, exact, low, high, tolerance):
    x = np.random.default_rng(0).uniform(low, high, 200_001).astype(np.float32)
    expected = exact(x.astype(np.float64))
    assert np.abs(elementwise(function)(x) / expected - 1).max() < tolerance


def test_the_ends_of_the_range():
    x = np.array([0.0, -0.0, -127.0, -1e30, -np.inf, 128.0, 1e30, np.inf, np.nan], np.float32)
    zero, inf = np.float32(0), np.float32(np.inf)
    np.testing.assert_array_equal(elementwise(exp2)(x), [1, 1, zero, zero, zero, inf, inf, inf, np.nan])
    np.testing.assert_array_equal(elementwise(exp)(x), [1, 1, zero, zero, zero, inf, inf, inf, np.nan])
    np.testing.assert_array_equal(elementwise(tanh)(x), [0, 0, -1, -1, -1, 1, 1, 1, np.nan])


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("vectors", [1, 2])
def test_a_matmul_tile_touches_its_tile_only(vectors, accumulate):
    rng = np.random.default_rng(vectors)
    rows, width, depth = TILE_ROWS, vectors * LANES, 13
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((depth, rows + 3), (depth, 40), (20, 50)))
    tile = matmul_tile(rows, vectors, accumulate)

    @numba.njit(nogil=True, error_model="numpy")
    def run(c, a, b):
        tile(c, 52, 50, a, 2, 1, rows + 3, b, 4, 40, depth)  # a is read as its transpose

    expected = c.astype(np.float64)
    product = a[:, 2 : 2 + rows].T.astype(np.float64) @ b[:, 4 : 4 + width]
    expected[1 : 1 + rows, 2 : 2 + width] = product + expected[1 : 1 + rows, 2 : 2 + width] * accumulate
    run(c, a, b)
    np.testing.assert_allclose(c, expected, rtol=0, atol=2e-6)


PLACES = np.array([5, 2, 9, 0, 7, 1, 8, 3, 6, 4], np.int64)
"""Rows that lie anywhere in memory, as blocks of a KV cache do."""


@pytest.mark.parametrize("dtype", [np.float32, np.int8])  # AVX2's registers hold the sums of 2 keys of codes
def test_a_dot_tile_reads_four_rows_in_lockstep(dtype):
    rng = np.random.default_rng(0)
    vectors, keys, step = 3, 4, 2
    width = vectors * LANES
    a = rng.standard_normal((3, width)).astype(np.float32)
    b = (rng.standard_normal((10, width + 7)) * 20).astype(dtype)
    c = np.zeros((3, 10), np.float32)
    tile = dot_tile(3, keys)

    @numba.njit(nogil=True, error_model="numpy")
    def run(c, a, b, places):
        tile(c, 1, 10, a, 0, width, b, places, 2, step, 7, vectors)

    run(c, a, b, PLACES * (width + 7))
    expected = np.zeros(c.shape)
    expected[:, 1 : 1 + keys * step : step] = a.astype(np.float64) @ b[PLACES[2::step][:keys], 7:].T
    np.testing.assert_allclose(c, expected, rtol=0, atol=1e-4)


def test_a_weighted_tile_touches_its_tile_only():
    rng = np.random.default_rng(0)
    rows, vectors, depth, step = 3, 2, 5, 2 * LANES + 7
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, 8), (10, step), (5, 50)))
    places = np.concatenate([PLACES * step, np.zeros(64, np.int64)])
    tile = weighted_tile(rows, vectors)

    @numba.njit(nogil=True, error_model="numpy")
    def run(c, a, b, places):
        tile(c, 52, 50, a, 1, 8, b, places, 2, 7, depth, b, 10)

    expected = c.astype(np.float64)
    expected[1 : 1 + rows, 2 : 2 + vectors * LANES] += a[:, 1 : 1 + depth].astype(np.float64) @ b[PLACES[2:7], 7:]
    run(c, a, b, places)
    np.testing.assert_allclose(c, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", [(1,), (7,), (16,), (3, 11), (5, 1, 96)])
def test_swiglu(shape):
    rng = np.random.default_rng(len(shape))
    gate, up = (rng.standard_normal(shape).astype(np.float32) * 20 for _ in range(2))
    result = swiglu(mx.array(gate), mx.array(up))
    expected = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    assert result.shape == shape and result.dtype == mx.float32
    np.testing.assert_allclose(np.array(result), expected, rtol=2e-6, atol=1e-37)


def test_swiglu_over_the_whole_range():
    gate = np.linspace(-87, 120, 100_000).astype(np.float32)
    expected = gate / (1 + np.exp(-gate.astype(np.float64)))
    np.testing.assert_allclose(np.array(swiglu(mx.array(gate), mx.ones(len(gate)))), expected, rtol=2e-6, atol=1e-37)
    ends = np.array([-1e30, -200.0, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(np.array(swiglu(mx.array(ends), mx.ones(4))), [0, 0, np.inf, np.nan])


def test_swiglu_refuses_other_dtypes_and_shapes():
    with pytest.raises(ValueError, match="both must be float32 and have the same shape"):
        swiglu(mx.ones(4, mx.float16), mx.ones(4, mx.float16))
    with pytest.raises(ValueError, match="both must be float32 and have the same shape"):
        swiglu(mx.ones(4), mx.ones(5))


HASWELL = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+avx,+avx2,+fma"


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize(("cpu", "features", "lanes"), [("generic", "", 4), ("haswell", HASWELL, 8)])
def test_narrower_processors(cpu, features, lanes):
    """The kernel's tiles depend on the width of the vector registers; the numbers must not.

    numba keeps the code of each processor beside the others.
    """
    if not {name[1:] for name in features.split(",") if name} <= {
        name for name, present in llvmlite.binding.get_host_cpu_features().items() if present
    }:
        pytest.skip(f"this processor cannot run code for {cpu}")
    program = (
        "from kernel_cases import Case, as_float64, build\n"
        "from workbench.kernels.attention import get_backend\n"
        "from workbench.kernels.cpu.attention.simd import LANES\n"
        f"assert LANES == {lanes}, LANES\n"
        "batch = build(Case(((1, 100), (70, 133), (3, 5)), 9, 3, left=60, softcap=5.0, sinks=True))\n"
        "result, expected = as_float64(get_backend('cpu').attend(*batch.inputs, batch.options)), batch.reference()\n"
        "assert abs(result - expected).max() <= 2e-6 * abs(expected).max()\n"
    )
    environment = os.environ | {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": features,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "WORKBENCH_BLAS": "0",
    }
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=300)
