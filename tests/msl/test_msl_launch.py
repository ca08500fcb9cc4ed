"""Arguments, results and rejections of a launch."""

import mlx.core as mx
import numpy as np
import pytest
from msl_runs import THREADS, everywhere, ramp, run, skip_without_compiler

from workbench import msl

skip_without_compiler()

LANES = np.arange(THREADS)
RANDOM = np.random.default_rng(8)
FLOATS = RANDOM.uniform(0.2, 0.95, THREADS).astype(np.float32)


@pytest.mark.parametrize("order", [0, 1])
def test_positions_of_threads_in_a_grid_that_does_not_divide(order):
    """Threadgroups at the far edges are smaller, as with dispatchThreads."""
    grid, threadgroup = (7, 5, 3), (4, 2, 2)
    uint3s = ["thread_position_in_threadgroup", "threadgroup_position_in_grid", "threads_per_threadgroup",
              "dispatch_threads_per_threadgroup", "threadgroups_per_grid", "threads_per_grid"]  # fmt: skip
    uints = ["thread_index_in_threadgroup", "thread_index_in_simdgroup", "simdgroups_per_threadgroup",
             "threads_per_simdgroup", "quadgroup_index_in_threadgroup"]  # fmt: skip
    columns = [f"{name}.{axis}" for name in uint3s for axis in "xyz"] + uints
    source = "const uint3 p = thread_position_in_grid;\n"
    source += f"device uint* out = y + ((p.z * 5 + p.y) * 7 + p.x) * {len(columns)};\n"
    source += "\n".join(f"out[{n}] = {column};" for n, column in enumerate(columns))
    kernel = msl.metal_kernel("positions", [], ["y"], source)
    (y,) = kernel(
        inputs=[], output_shapes=[(3, 5, 7, len(columns))], output_dtypes=[mx.uint32], grid=grid,
        threadgroup=threadgroup, order=order,
    )  # fmt: skip
    y = np.array(y)
    for z, row, x in np.ndindex(3, 5, 7):
        position = np.array([x, row, z])
        group = position // threadgroup
        local = position - group * threadgroup
        size = np.minimum(np.array(grid) - group * threadgroup, threadgroup)
        index = (local[2] * size[1] + local[1]) * size[0] + local[0]
        expected = [*local, *group, *size, *threadgroup, 2, 3, 2, *grid, index, index % 32, 1, 32, index // 4]
        assert y[z, row, x].tolist() == expected


def test_threadgroup_is_cut_to_the_grid():
    y = run("y[i] = float(threads_per_threadgroup.x);", threads=10, threadgroup=256)
    np.testing.assert_array_equal(y, np.full(10, 10))


def test_strided_inputs():
    base = mx.array(RANDOM.normal(size=(6, 8)).astype(np.float32))
    for x in (base, base.T, base[::-1], base[:, ::2].T, mx.broadcast_to(base[2], (6, 8))):
        for contiguous in (True, False):
            kernel = msl.metal_kernel(
                "strided", ["x"], ["y"],
                "uint i = thread_position_in_grid.x;\ny[i] = x[elem_to_loc(int(i), x_shape, x_strides, x_ndim)];",
                ensure_row_contiguous=contiguous,
            )  # fmt: skip
            (y,) = kernel(
                inputs=[x], output_shapes=[x.shape], output_dtypes=[x.dtype], grid=(x.size, 1, 1),
                threadgroup=(32, 1, 1),
            )  # fmt: skip
            np.testing.assert_array_equal(np.array(y), np.array(x))


def test_numbers_scalars_booleans_and_few_elements_as_inputs():
    kernel = msl.metal_kernel(
        "mixed", ["a", "b", "c", "d"], ["y"],
        "uint i = thread_position_in_grid.x;\ny[i] = a + float(b) + c[i % 3] + (d[i] ? 100.0f : 0.0f);",
    )  # fmt: skip
    d = mx.array(LANES % 2 == 0)
    (y,) = kernel(
        inputs=[0.5, mx.array(3, dtype=mx.int32), mx.array([10.0, 20.0, 30.0]), d], output_shapes=[(64,)],
        output_dtypes=[mx.float32], grid=(64, 1, 1), threadgroup=(32, 1, 1),
    )  # fmt: skip
    np.testing.assert_array_equal(np.array(y), 3.5 + 10 * (LANES % 3 + 1) + 100 * (LANES % 2 == 0))


@pytest.mark.repeats(step=4)
@pytest.mark.parametrize("dtype", [mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int64, mx.uint64, mx.bool_])
def test_integer_dtypes(dtype):
    x = mx.array(RANDOM.integers(0, 2 if dtype == mx.bool_ else 100, THREADS)).astype(dtype)
    y = everywhere("y[i] = T(x[63 - i]);", inputs=[x], dtype=dtype, template=[("T", dtype)])
    np.testing.assert_array_equal(y, np.array(x)[::-1])


def test_several_outputs_and_templates():
    kernel = msl.metal_kernel(
        "several", ["x"], ["y", "u"],
        """
        uint i = thread_position_in_grid.x;
        if constexpr (DOUBLE) y[i] = T(2.0f * x[i]); else y[i] = T(x[i]);
        u[i] = int(i) * N;
        """,
    )  # fmt: skip
    for double, n, dtype in ((True, 3, mx.float32), (False, -2, mx.float16)):
        y, u = kernel(
            inputs=[ramp()], output_shapes=[(8, 8), (64,)], output_dtypes=[dtype, mx.int32], grid=(64, 1, 1),
            threadgroup=(64, 1, 1), template=[("T", dtype), ("N", n), ("DOUBLE", double)],
        )  # fmt: skip
        assert y.shape == (8, 8) and y.dtype == dtype
        np.testing.assert_array_equal(np.array(y).reshape(-1), np.arange(1, 65) * (2 if double else 1))
        np.testing.assert_array_equal(np.array(u), LANES * n)


def test_empty_grid_runs_nothing():
    assert run("y[i] = x[i];", threads=0, shape=(0, 4)).shape == (0, 4)
    np.testing.assert_array_equal(run("y[i] = x[i];", threads=0, shape=(3,), init_value=2.0), [2, 2, 2])


@pytest.mark.parametrize("mode", ["safe", "relaxed", "fast"])
def test_math_modes(mode):
    kernel = msl.metal_kernel(
        "mode", ["x"], ["y"], "uint i = thread_position_in_grid.x;\ny[i] = exp(x[i]) / x[i];",
        compile_options={"math_mode": mode},
    )  # fmt: skip
    (y,) = kernel(
        inputs=[mx.array(FLOATS)], output_shapes=[(64,)], output_dtypes=[mx.float32], grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
    )  # fmt: skip
    np.testing.assert_allclose(np.array(y), np.exp(FLOATS) / FLOATS, rtol=1e-6)


def test_verbose_prints_the_text(capsys):
    run("y[i] = x[i];", verbose=True)
    printed = capsys.readouterr().out
    assert printed.startswith("Generated source code for `k`:\n```\n[[kernel]] void custom_kernel_k_float_float(\n")


GOOD_CALL = {
    "inputs": [mx.ones(8)], "output_shapes": [(8,)], "output_dtypes": [mx.float32], "grid": (8, 1, 1),
    "threadgroup": (8, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize(
    "change, words",
    [
        ({"inputs": []}, ["inputs", "0", "1"]),
        ({"output_shapes": [(8,), (8,)]}, ["output_shapes", "2", "1"]),
        ({"output_dtypes": []}, ["output_dtypes"]),
        ({"inputs": [mx.ones(8, dtype=mx.complex64)]}, ["complex64"]),
        ({"grid": (8, 1)}, ["grid", "(8, 1)", "three"]),
        ({"grid": (8, -1, 1)}, ["grid", "-1"]),
        ({"threadgroup": (0, 1, 1)}, ["threadgroup", "(0, 1, 1)"]),
        ({"threadgroup": (64, 32, 1)}, ["threadgroup", "2048", "1024"]),
        ({"order": 2}, ["order", "2", "0", "1"]),
        ({"statistics": True, "checks": False}, ["statistics", "checks"]),
        ({"trace_buffers": {"q": 4}}, ["trace_buffers", "q"]),
        ({"trace_buffers": {"x": 0}}, ["trace_buffers", "x", "0"]),
    ],
)
def test_bad_calls_are_rejected_with_the_field_and_the_value(change, words):
    kernel = msl.metal_kernel("k", ["x"], ["y"], "y[thread_position_in_grid.x] = x[0];")
    kernel(**GOOD_CALL)
    with pytest.raises(ValueError) as raised:
        kernel(**{**GOOD_CALL, **change})
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"name": "a-b"}, ["name", "a-b"]),
        ({"output_names": []}, ["output_names"]),
        ({"input_names": ["x", "x"]}, ["x", "input_names"]),
        ({"input_names": ["2x"]}, ["2x"]),
        ({"compile_options": {"math_mode": "exact"}}, ["compile_options", "exact", "safe"]),
        ({"compile_options": {"speed": "high"}}, ["compile_options", "speed"]),
    ],
)
def test_bad_kernels_are_rejected(change, words):
    good = {"name": "k", "input_names": ["x"], "output_names": ["y"], "source": "y[0] = x[0];"}
    with pytest.raises(ValueError) as raised:
        msl.metal_kernel(**{**good, **change})
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_more_buffers_than_metal_binds_are_rejected():
    names = [f"in{i}" for i in range(16)]
    source = "y[0] = in0[0];" + "".join(f"// {name}_shape\n" for name in names)
    kernel = msl.metal_kernel("many", names, ["y"], source)
    with pytest.raises(ValueError, match=r"33 buffers.*31"):
        kernel(**{**GOOD_CALL, "inputs": [mx.ones(8)] * 16})
