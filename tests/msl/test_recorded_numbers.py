"""The numbers of a recording, on kernels whose numbers are known."""

import mlx.core as mx
import pytest
from msl_runs import skip_without_compiler

from workbench import msl
from workbench.kernels.msl.recorded_numbers import DEFINITIONS

skip_without_compiler()

COLUMN = """threadgroup float t[32 * {width}];
for (uint j = 0; j < 32; j++) t[j * {width} + i] = x[j * 32 + i];
threadgroup_barrier(mem_flags::mem_threadgroup);
float sum = 0.0f;
for (uint j = 0; j < 32; j++) sum += t[i * {width} + j];
y[i] = sum;"""


def numbers_of(source, threads=32, threadgroups=1, size=4096):
    kernel = msl.metal_kernel("k", ["x"], ["y"], "const uint i = thread_position_in_grid.x;\n" + source)
    x = mx.arange(size).astype(mx.float32)
    launch = {"inputs": [x], "output_shapes": [(threads,)], "output_dtypes": [x.dtype], "threadgroup": (32, 1, 1)}
    run = kernel.record(**launch, grid=(threads, 1, 1), threadgroups=threadgroups)
    assert run.fault is None, run.fault
    return run


@pytest.mark.parametrize(
    "index, lines, best",
    [("i", 1, 1), ("i + 1", 2, 1), ("2 * i", 2, 1), ("32 * i", 32, 1), ("i / 2", 1, 1), ("0", 1, 1), ("31 - i", 1, 1)],
)
def test_lines_per_access(index, lines, best):
    run = numbers_of(f"y[i] = x[{index}];")
    (number,) = (one for one in run.numbers if (one.name, one.array) == ("lines per access", "x"))
    assert (number.value, number.best) == (lines, best)


def test_wide_loads_need_more_lines():
    run = numbers_of("y[i] = (*(const device float4*)(x + 4 * i)).z;")
    (number,) = (one for one in run.numbers if (one.name, one.array) == ("lines per access", "x"))
    assert (number.value, number.best) == (4, 4) and run.number("bytes read", "x") == 512


@pytest.mark.parametrize("width, conflicts", [(32, (1 + 32) / 2), (33, 1), (34, (1 + 2) / 2), (48, (1 + 16) / 2)])
def test_bank_conflicts_of_a_column(width, conflicts):
    """Rows of 32 words put a column into one bank; a word of padding spreads it. The stores have no conflict."""
    run = numbers_of(COLUMN.format(width=width))
    (number,) = (one for one in run.numbers if one.name == "bank conflicts")
    assert number.array == "t" and number.value == pytest.approx(conflicts) and number.best == 1
    assert "a model" in number.definition


def test_lanes_that_need_the_same_word_do_not_conflict():
    source = (
        "threadgroup float t[32];\nt[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = t[{index}];"
    )
    for index, conflicts in (("0", 1), ("i / 2", 1), ("i", 1)):
        assert numbers_of(source.format(index=index)).number("bank conflicts", "t") == conflicts


def test_bytes_and_reads_per_element():
    run = numbers_of("y[i] = x[0] + x[i];", threads=64, threadgroups=2)
    assert run.number("bytes read", "x") == 4 * 2 * 64 and run.number("bytes written", "y") == 4 * 64
    # Each element once per threadgroup: the first has x[0 ... 31], the second x[0] and x[32 ... 63].
    (number,) = (one for one in run.numbers if (one.name, one.array) == ("bytes read", "x"))
    assert number.best == 4 * (32 + 33)
    assert run.number("reads per element", "x") == pytest.approx(128 / 65)


def test_active_lanes_of_a_branch():
    whole, half = numbers_of("y[i] = x[i];"), numbers_of("y[i] = 1.0f;\nif (i < 16) y[i] = x[i];")
    assert whole.number("active lanes") == 1.0
    # A store of all, a load and a store of half, and the end of all.
    assert half.number("active lanes") == pytest.approx((1 + 0.5 + 0.5 + 1) / 4)


def test_barriers_and_simd_functions_are_counted():
    source = """float a = simd_sum(x[i]);
threadgroup_barrier(mem_flags::mem_threadgroup);
simdgroup_float8x8 m(1.0f);
simdgroup_multiply_accumulate(m, m, m, m);
threadgroup_barrier(mem_flags::mem_threadgroup);
y[i] = a + m.thread_elements()[0];"""
    run = numbers_of(source)
    counts = [run.number(name) for name in ("barriers", "simd functions", "matrix products")]
    assert counts == [2, 1, 1]
    # 32 loads, a sum; a product; 32 stores: 66 events in the three parts that two barriers make.
    assert run.number("events between barriers") == pytest.approx((32 + 1 + 1 + 32) / 3)


def test_every_number_has_its_definition():
    run = numbers_of(COLUMN.format(width=33))
    assert all(one.definition == DEFINITIONS[one.name] for one in run.numbers)
    with pytest.raises(KeyError, match="the numbers are bytes read"):
        run.number("speed")
    assert run.number("bytes read", "nothing") == 0
