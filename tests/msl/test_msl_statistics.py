"""Counts of a launch, against counts by hand."""

import mlx.core as mx
import numpy as np
import pytest
from msl_runs import ramp, skip_without_compiler

from workbench import msl

skip_without_compiler()

# Each threadgroup of 64 threads adds the rows of `table` that `rows` lists for it, through threadgroup memory.
GATHER = """
  const uint i = thread_position_in_threadgroup.x;
  const uint group = threadgroup_position_in_grid.x + 2 * threadgroup_position_in_grid.y;
  threadgroup float sums[64];
  sums[i] = 0;
  for (int n = 0; n < 3; n++) sums[i] += float(table[rows[group * 3 + n] * 64 + int(i)]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float total = simd_sum(sums[63 - i]);
  simdgroup_barrier(mem_flags::mem_none);
  if (thread_index_in_simdgroup == 0) y[group * 2 + simdgroup_index_in_threadgroup] = total;
"""
ROWS = np.array([[0, 4, 2], [3, 3, 3], [1, 0, 1], [9, 5, 9]], np.int32)


@pytest.fixture(scope="module", params=[0, 1])
def gathered(request):
    kernel = msl.metal_kernel("gather", ["table", "rows"], ["y"], GATHER)
    table = mx.random.normal((10, 64), key=mx.random.key(3)).astype(mx.float16)
    (y,) = kernel(
        inputs=[table, mx.array(ROWS)], output_shapes=[(4, 2)], output_dtypes=[mx.float32], grid=(128, 2, 1),
        threadgroup=(64, 1, 1), trace_buffers={"table": 128}, order=request.param,
    )  # fmt: skip
    expected = np.array(table).astype(np.float64)[ROWS].sum(1).reshape(4, 2, 32).sum(2)
    np.testing.assert_allclose(np.array(y), expected[:, ::-1], rtol=1e-5, atol=1e-5)
    return kernel.last_statistics


def test_rows_that_each_threadgroup_read(gathered):
    expected = {(n % 2, n // 2, 0): tuple(sorted(set(rows))) for n, rows in enumerate(ROWS.tolist())}
    assert gathered.rows_read == {"table": expected}


def test_bytes_of_buffers(gathered):
    table, rows, y = (gathered.buffers[name] for name in ("table", "rows", "y"))
    assert table.bytes_read == 4 * 3 * 64 * 2  # every thread one half per row
    assert table.distinct_bytes_read == (3 + 1 + 2 + 2) * 64 * 2  # a row read twice by a threadgroup counts once
    assert table.size == 10 * 64 * 2 and table.bytes_written == 0
    assert rows.bytes_read == 4 * 64 * 3 * 4 and rows.distinct_bytes_read == 4 * 3 * 4
    assert (y.bytes_written, y.bytes_read, y.distinct_bytes_read) == (4 * 2 * 4, 0, 0)


def test_operations(gathered):
    assert gathered.threadgroups == 4
    assert gathered.threadgroup_barriers == 4
    assert gathered.simdgroup_barriers == 4 * 2
    assert gathered.simd_operations == 4 * 2
    assert gathered.matrix_multiplications == 0
    assert gathered.threadgroup_memory == 64 * 4
    assert gathered.accesses > 0 and gathered.seconds > 0


def test_bytes_of_threadgroup_memory(gathered):
    # The running sum stays in a register: at least one store and the load after the barrier remain.
    assert gathered.threadgroup_bytes_read >= 4 * 64 * 4
    assert 4 * 64 * 4 <= gathered.threadgroup_bytes_written <= 4 * 64 * 4 * 4


def test_matrix_multiplications_and_rows_of_matrix_loads():
    kernel = msl.metal_kernel(
        "matrices", ["x"], ["y"],
        """
        simdgroup_float8x8 a, c(0.0f);
        const uint g = threadgroup_position_in_grid.x;
        for (int n = 0; n < 3; n++) {
          simdgroup_load(a, x + (g * 3 + n) * 64, 8);
          simdgroup_multiply_accumulate(c, a, a, c);
        }
        simdgroup_store(c, y + g * 64, 8);
        """,
    )  # fmt: skip
    x = mx.random.normal((6, 8, 8), key=mx.random.key(5))
    (y,) = kernel(
        inputs=[x], output_shapes=[(2, 8, 8)], output_dtypes=[mx.float32], grid=(64, 1, 1), threadgroup=(32, 1, 1),
        statistics=True, trace_buffers={"x": 256, "y": 256},
    )  # fmt: skip
    wide = np.array(x).astype(np.float64)
    np.testing.assert_allclose(np.array(y), (wide @ wide).reshape(2, 3, 8, 8).sum(1), rtol=1e-5, atol=1e-5)
    counted = kernel.last_statistics
    assert counted.matrix_multiplications == 6
    assert counted.buffers["x"].bytes_read == counted.buffers["x"].distinct_bytes_read == 6 * 256
    assert counted.buffers["y"].bytes_written == 2 * 256
    assert counted.rows_read["x"] == {(0, 0, 0): (0, 1, 2), (1, 0, 0): (3, 4, 5)}
    assert counted.rows_read["y"] == {}  # written, not read


def test_statistics_are_of_the_launch_that_asked():
    kernel = msl.metal_kernel("k", ["x"], ["y"], "const uint i = thread_position_in_grid.x;\ny[i] = x[i];")
    call = {"output_dtypes": [mx.float32], "threadgroup": (8, 1, 1)}
    assert kernel.last_statistics is None
    kernel(inputs=[ramp(8)], output_shapes=[(8,)], grid=(8, 1, 1), **call)
    assert kernel.last_statistics is None
    for size in (8, 24):
        kernel(inputs=[ramp(size)], output_shapes=[(size,)], grid=(size, 1, 1), statistics=True, **call)
        assert kernel.last_statistics.buffers["x"].bytes_read == 4 * size
        assert kernel.last_statistics.rows_read == {}
