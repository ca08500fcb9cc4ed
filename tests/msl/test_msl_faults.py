"""Every check of a launch: a kernel with exactly one fault, and a twin without it that runs."""

import re

import mlx.core as mx
import numpy as np
import pytest
from msl_runs import THREADS, fault_of, ramp, run, skip_without_compiler

from workbench import msl
from workbench.kernels.msl.report import DESCRIPTIONS

skip_without_compiler()

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
STORE_IN_B = "threadgroup float b[64];\nb[i] = x[i];\n"

# name: (kind, object, source with the fault, twin without it, options). The report must name a line that starts with
# "@" (for a race, the line of the second access).
FAULTS = {
    "read past the end": (
        "out of bounds", "x",
        "@y[i] = x[i + 1];",
        "y[i] = i + 1 < 64 ? x[i + 1] : 0.0f;", {}),
    "read before the start": (
        "out of bounds", "x",
        "@y[i] = x[int(i) - 1];",
        "y[i] = i > 0 ? x[int(i) - 1] : 0.0f;", {}),
    "read very far away": (
        "out of bounds", "x",
        "@y[i] = x[int(i) * 33554432 + 3];",
        "y[i] = x[(int(i) * 33554432 + 3) & 63];", {}),
    "read through a pointer to nowhere": (
        "wild access", "",
        "@y[i] = x[long(i) << 44];",
        "y[i] = x[(long(i) << 44) & 63];", {}),
    "write past the end": (
        "out of bounds", "y",
        "@y[i + 1] = x[i];",
        "y[(i + 1) % 64] = x[i];", {}),
    "write through a null pointer": (
        "wild access", "",
        "device float* p = i == 7 ? (device float*)0 : y + i;\n@*p = x[i];",
        "device float* p = y + i;\n*p = x[i];", {}),
    "write to an input": (
        "write to input", "x",
        "y[i] = x[i];\n@if (i == 5) const_cast<device float*>(x)[3] = 1.0f;",
        "y[i] = x[i];\nif (i == 5) y[5] = 1.0f;", {}),
    "output read before it is written": (
        "output read before written", "y",
        "@y[i] += x[i];",
        "y[i] = 1.0f;\ny[i] += x[i];", {}),
    "output element left out": (
        "output not written", "y",
        "if (i != 9) y[i] = x[i];",
        "y[i] = i != 9 ? x[i] : 0.0f;", {}),
    "output written by two threads": (
        "device race", "y",
        "y[i] = x[i];\n@y[0] = x[i];",
        "y[i] = x[i];\nif (i == 0) y[0] = x[1];", {}),
    "output written by two threadgroups": (
        "device race", "y",
        "@y[i % 32] = x[i];",
        "y[i] = x[i];", {"threadgroup": 32}),
    "output read by another thread with no barrier": (
        "device race", "y",
        "@y[i] = x[i];\n@if (i == 1) y[1] = y[0];",
        "y[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_device);\nif (i == 1) y[1] = y[0];",
        {"init_value": 1.0}),
    "output exchanged over a barrier for other memory": (
        "device race", "y",
        "y[i] = x[i];\n" + BARRIER + "const float other = y[63 - i];\n"
        "threadgroup_barrier(mem_flags::mem_device);\ny[i] = other;",
        "y[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_device);\nconst float other = y[63 - i];\n"
        "threadgroup_barrier(mem_flags::mem_device);\ny[i] = other;",
        {}),
    "atomic beside a plain write": (
        "device race", "y",
        "device atomic_uint* count = (device atomic_uint*)y;\n"
        "@if (i == 0) y[0] = 0;\n@atomic_fetch_add_explicit(count, 1u, memory_order_relaxed);",
        "device atomic_uint* count = (device atomic_uint*)y;\n"
        "atomic_fetch_add_explicit(count, 1u, memory_order_relaxed);",
        {"dtype": mx.uint32, "shape": (1,), "init_value": 0}),
    "index outside a threadgroup array": (
        "array out of bounds", "",
        "threadgroup float b[63];\n@b[i] = x[i];\n" + BARRIER + "y[i] = b[i / 2];",
        "threadgroup float b[64];\nb[i] = x[i];\n" + BARRIER + "y[i] = b[i / 2];", {}),
    "pointer past a threadgroup array": (
        "threadgroup out of bounds", "b",
        "threadgroup float b[63], c;\nthreadgroup float* p = b;\nif (i == 0) c = 0;\n@p[i] = x[i];\ny[i] = p[i];",
        "threadgroup float b[64];\nthreadgroup float* p = b;\np[i] = x[i];\ny[i] = p[i];", {}),
    "pointer before a threadgroup array": (
        "threadgroup out of bounds", "b",
        "threadgroup float b[64];\nthreadgroup float* p = b;\n@p[int(i) - 1] = x[i];\ny[i] = 1.0f;",
        "threadgroup float b[64];\nthreadgroup float* p = b;\np[int(i)] = x[i];\ny[i] = 1.0f;", {}),
    "threadgroup memory read before it is written": (
        "threadgroup uninitialised", "b",
        "threadgroup float b[64];\nif (i < 32) b[i] = x[i];\n" + BARRIER + "@y[i] = b[i];",
        "threadgroup float b[64];\nb[i] = x[i];\n" + BARRIER + "y[i] = b[i];", {}),
    "threadgroup memory of the threadgroup before": (
        "threadgroup uninitialised", "b",
        "threadgroup float b[32];\nif (i < 32) b[i] = x[i];\n" + BARRIER + "@y[i] = b[i % 32];",
        "threadgroup float b[32];\nb[i % 32] = x[i];\n" + BARRIER + "y[i] = b[i % 32];",
        {"threadgroup": 32, "order": 0}),
    "too much threadgroup memory": (
        "threadgroup memory", "c",
        "threadgroup float b[4096];\n@threadgroup float c[4097];\nb[i] = c[i] = x[i];\ny[i] = b[i];",
        "threadgroup float b[4096];\nthreadgroup float c[4096];\nb[i] = c[i] = x[i];\ny[i] = b[i];", {}),
    "threadgroup memory written and read with no barrier": (
        "threadgroup race", "b",
        STORE_IN_B + "@y[i] = b[i / 32 * 32];",
        STORE_IN_B + BARRIER + "y[i] = b[i / 32 * 32];", {"order": 0}),
    "threadgroup memory read and overwritten with no barrier": (
        "threadgroup race", "b",
        STORE_IN_B + BARRIER + "@const float other = b[63 - i];\n@b[i] = other;\ny[i] = other;",
        STORE_IN_B + BARRIER + "const float other = b[63 - i];\n" + BARRIER + "b[i] = other;\ny[i] = other;", {}),
    "threadgroup memory read in one simdgroup and overwritten in the other": (
        "threadgroup race", "b",
        STORE_IN_B + BARRIER + "@y[i] = i == 63 ? b[31] : 1.0f;\n@if (i == 31) b[31] = 2.0f;",
        STORE_IN_B + BARRIER + "y[i] = i == 63 ? b[31] : 1.0f;\n" + BARRIER + "if (i == 31) b[31] = 2.0f;", {}),
    "barrier that orders no memory": (
        "threadgroup race", "b",
        STORE_IN_B + "threadgroup_barrier(mem_flags::mem_none);\n@y[i] = b[63 - i];",
        STORE_IN_B + BARRIER + "y[i] = b[63 - i];", {}),
    "barrier that orders device memory only": (
        "threadgroup race", "b",
        STORE_IN_B + "threadgroup_barrier(mem_flags::mem_device);\n@y[i] = b[63 - i];",
        STORE_IN_B + "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);\ny[i] = b[63 - i];", {}),
    "simdgroup_barrier between simdgroups": (
        "threadgroup race", "b",
        STORE_IN_B + "simdgroup_barrier(mem_flags::mem_threadgroup);\n@y[i] = i < 32 ? 1.0f : b[i - 32];",
        STORE_IN_B + "simdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = b[i ^ 1];", {"order": 0}),
    "simd_sum in place of a barrier": (
        "threadgroup race", "b",
        STORE_IN_B + "const float sum = simd_sum(x[i]);\n@y[i] = b[i ^ 1] + sum;",
        STORE_IN_B + "const float sum = simd_sum(x[i]);\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = b[i ^ 1] + sum;", {}),
    "atomic of threadgroup memory beside a plain write": (
        "threadgroup race", "n",
        "threadgroup atomic_uint n;\nthreadgroup uint* plain = (threadgroup uint*)&n;\nif (i == 0) *plain = 0;\n"
        "@atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);\ny[i] = x[i];",
        "threadgroup atomic_uint n;\nthreadgroup uint* plain = (threadgroup uint*)&n;\nif (i == 0) *plain = 0;\n"
        + BARRIER + "atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);\ny[i] = x[i];", {"order": 0}),
    "barrier that some threads skip": (
        "return past barrier", "",
        "@if (i < 63) " + BARRIER + "y[i] = x[i];",
        BARRIER + "y[i] = x[i];", {"order": 0}),
    "barrier after a thread has returned": (
        "barrier after return", "",
        "y[i] = x[i];\nif (i == 63) return;\n@" + BARRIER + "y[i] = x[63 - i];",
        "y[i] = x[i];\n" + BARRIER + "if (i == 63) return;\ny[i] = x[63 - i];", {"order": 1}),
    "two barriers in place of one": (
        "different barriers", "",
        "threadgroup float b[64];\nif (i < 32) {\nb[i] = x[i];\n" + BARRIER + "y[i] = 2.0f * b[i];\n} else {\n"
        "b[i] = 3.0f;\n" + BARRIER + "y[i] = x[i];\n}",
        STORE_IN_B + BARRIER + "y[i] = b[i];", {}),
    "barrier in some lanes and simd_sum in others": (
        "divergence", "",
        "float sum = 0;\nif (i % 32 == 0) {\n" + BARRIER + "} else {\nsum = simd_sum(x[i]);\n}\ny[i] = sum;",
        "float sum = 0;\n" + BARRIER + "sum = simd_sum(x[i]);\ny[i] = sum;", {}),
    "simd_sum that some lanes skip": (
        "return past simd", "simd_sum",
        "@y[i] = i != 63 ? simd_sum(x[i]) : 0.0f;",
        "y[i] = simd_sum(i != 63 ? x[i] : 0.0f);", {"order": 0}),
    "simd_sum after a lane has returned": (
        "simd after return", "simd_sum",
        "y[i] = x[i];\nif (i == 63) return;\n@y[i] = simd_sum(x[i]);",
        "y[i] = x[i];\nif (i >= 32) return;\ny[i] = simd_sum(x[i]);", {"order": 1}),
    "two simd_sums in place of one": (
        "different simd operations", "simd_sum",
        "if (i % 32 < 16) {\ny[i] = simd_sum(x[i]);\n} else {\ny[i] = simd_sum(x[i] * 2.0f);\n}",
        "y[i] = simd_sum(i % 32 < 16 ? x[i] : x[i] * 2.0f);", {}),
    "simd_max in some lanes and simd_sum in others": (
        "different simd operations", "",
        "if (i % 32 < 16) {\ny[i] = simd_sum(x[i]);\n} else {\ny[i] = simd_max(x[i]);\n}",
        "y[i] = simd_sum(x[i]) + simd_max(x[i]);", {}),
    "simd_shuffle from an absent lane": (
        "absent lane", "simd_shuffle",
        "@y[i] = simd_shuffle(x[i], 20);",
        "y[i] = simd_shuffle(x[i], 7);", {"threads": 40, "threadgroup": 40}),
    "matrix product with absent lanes": (
        "partial simdgroup", "simdgroup_multiply_accumulate",
        "simdgroup_float8x8 a(1.0f), b(2.0f), c(0.0f);\n@simdgroup_multiply_accumulate(c, a, b, c);\ny[i] = x[i];",
        "simdgroup_float8x8 a(1.0f), b(2.0f), c(0.0f);\n"
        "if (i < 32) simdgroup_multiply_accumulate(c, a, b, c);\ny[i] = x[i];", {"threads": 40, "threadgroup": 40}),
    "simdgroup_load by half of the lanes": (
        "partial simdgroup", "simdgroup_load or simdgroup_store",
        "simdgroup_float8x8 a(1.0f), c(0.0f);\nif (i % 32 < 16) simdgroup_load(a, x, 8);\n"
        "@simdgroup_multiply_accumulate(c, a, a, c);\ny[i] = c.thread_elements()[0];",
        "simdgroup_float8x8 a(1.0f), c(0.0f);\nsimdgroup_load(a, x, 8);\n"
        "simdgroup_multiply_accumulate(c, a, a, c);\ny[i] = c.thread_elements()[0];", {}),
    "index outside a local array": (
        "array out of bounds", "",
        "float q[4] = {1, 2, 3, 4};\n@y[i] = q[i % 5];",
        "float q[4] = {1, 2, 3, 4};\ny[i] = q[i % 4];", {}),
    "pointer past a local array": (
        "local memory out of bounds", "",
        "float q[4] = {x[0], x[1], x[2], x[3]};\nthread float* p = q;\n@y[i] = p[i % 5];",
        "float q[4] = {x[0], x[1], x[2], x[3]};\nthread float* p = q;\ny[i] = p[i % 4];", {}),
    "too much private memory": (
        "private memory", "",
        "float q[40000];\nfor (int j = 0; j < 40000; j++) q[j] = x[(j * 7 + int(i)) % 64];\ny[i] = q[int(x[i]) * 600];",
        "float q[20000];\nfor (int j = 0; j < 20000; j++) q[j] = x[(j * 7 + int(i)) % 64];\ny[i] = q[int(x[i]) * 300];",
        {"threads": 32, "threadgroup": 32}),
    "vector read from an odd element": (
        "misaligned", "",
        "@y[i] = (*(const device float4*)(x + i / 2)).x;",
        "y[i] = (*(const device float4*)(x + i / 4 * 4)).x;", {}),
    "integer overflow in a sum": (
        "arithmetic", "",
        "const int n = 2147483647 - 63;\n@y[i] = float(n + int(x[i]));",
        "const int n = 2147483647 - 64;\ny[i] = float(n + int(x[i]));", {}),
    "integer overflow in a product": (
        "arithmetic", "",
        "@y[i] = float(int(x[i]) * 33554432);",
        "y[i] = float(int(x[i]) * 33554431);", {}),
    "division by zero": (
        "arithmetic", "",
        "@y[i] = float(7 / (int(x[i]) - 3));",
        "y[i] = float(7 / (int(x[i]) + 3));", {}),
    "float outside the range of int": (
        "arithmetic", "",
        "@y[i] = float(int(x[i] * 4.0e7f));",
        "y[i] = float(int(x[i] * 3.0e7f));", {}),
    "assert": (
        "assertion", "",
        "y[i] = x[i];\n@assert(x[i] < 64.0f);",
        "y[i] = x[i];\nassert(x[i] < 65.0f);", {}),
    "loop without an end": (
        "time limit", "",
        "y[i] = x[i];\n@while (x[0] > 0.0f) if (x[1] < 0.0f) y[i] = 2.0f;",
        "y[i] = x[i];\nwhile (x[0] < 0.0f) if (x[1] < 0.0f) y[i] = 2.0f;", {"time_limit": 0.2}),
    "loop of barriers without an end": (
        "time limit", "",
        "y[i] = x[i];\nwhile (x[0] > 0.0f) simdgroup_barrier(mem_flags::mem_none);",
        "y[i] = x[i];\nwhile (x[0] < 0.0f) simdgroup_barrier(mem_flags::mem_none);", {"time_limit": 0.2}),
}  # fmt: skip


@pytest.mark.repeats(step=12)
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported_and_its_twin_runs(name, order):
    kind, object_name, faulty, twin, options = FAULTS[name]
    options = {"order": order, **options}
    fault = fault_of(faulty.replace("@", ""), **options)
    assert fault.kind == kind, str(fault)
    if object_name:
        assert fault.object == object_name
    assert fault.kernel == "k" and "kernel k" in str(fault)
    marked = [number for number, line in enumerate(faulty.split("\n"), start=2) if line.startswith("@")]
    if marked:
        assert fault.file == "k.source" and fault.line in marked, str(fault)
        assert faulty.split("\n")[fault.line - 2].lstrip("@") in str(fault)
    run(twin, **options)


def test_every_kind_of_fault_is_tested():
    elsewhere = {"no memory", "arithmetic stopped"}  # seen without checks, tested below
    assert {kind for kind, *_ in FAULTS.values()} == set(DESCRIPTIONS) - elsewhere


@pytest.mark.parametrize("order", [0, 1])
def test_report_states_index_and_thread(order):
    fault = fault_of("if (i == 37) y[i] = x[i + 100];\nelse y[i] = x[i];", order=order)
    assert fault.index == 137
    assert fault.thread_position_in_grid == (37, 0, 0)
    assert fault.threadgroup_position_in_grid == (0, 0, 0)
    assert "x[137]" in str(fault) and "holds 64 elements" in str(fault) and "read of 4 bytes" in str(fault)
    assert "simdgroup 1, lane 5" in str(fault)


def test_report_states_the_position_in_a_grid_of_three_axes():
    kernel = msl.metal_kernel(
        "grid3", ["x"], ["y"],
        "uint3 p = thread_position_in_grid;\nuint at = (p.z * 6 + p.y) * 4 + p.x;\ny[at] = x[at == 29 ? 64 : at];",
    )  # fmt: skip
    with pytest.raises(msl.MslError) as raised:
        kernel(
            inputs=[ramp()], output_shapes=[(48,)], output_dtypes=[mx.float32], grid=(4, 6, 2), threadgroup=(2, 3, 1)
        )
    assert raised.value.thread_position_in_grid == (1, 1, 1)
    assert raised.value.threadgroup_position_in_grid == (0, 0, 1)
    assert raised.value.line == 3


def test_index_is_exact_even_if_a_32_bit_index_is_wrong_by_gigabytes():
    """The slot of an address says which buffer was meant, with several buffers of several sizes."""
    inputs = [ramp(), ramp(1000, mx.float16), ramp(8, mx.int32)]
    source = "const int far = {index};\ny[i] = x[i] + float(z[{z}]) + float(w[{w}]);"
    for name, z, w in (("z", "i == 3 ? far : 0", "0"), ("w", "0", "i == 3 ? far : 0")):
        for index in (2**31 - 1, -(2**31) + 1, 1000, -1):
            fault = fault_of(source.format(index=index, z=z, w=w), inputs=inputs)
            assert (fault.kind, fault.object, fault.index) == ("out of bounds", name, index)


def test_race_names_both_threads_and_both_lines():
    fault = fault_of("threadgroup float b[64];\nb[i % 63] = x[i];\ny[i] = 1.0f;", order=0)
    assert (fault.kind, fault.object, fault.line) == ("threadgroup race", "b", 3)
    assert "write by thread 0 of threadgroup 0 at k.source:3" in str(fault)
    assert fault.thread_position_in_grid == (63, 0, 0)


FILLED = STORE_IN_B + BARRIER
COUNTED = (
    "threadgroup atomic_uint b[1];\nif (i == 0) atomic_store_explicit(&b[0], 0u, memory_order_relaxed);\n" + BARRIER
    + "if (i > 31) atomic_fetch_add_explicit(&b[0], 1u, memory_order_relaxed);\ny[i] = x[i];\n"
)  # fmt: skip


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (FILLED + "if (i == 63) b[63] = 2.0f;\ny[i] = i == 31 ? b[63] : 1.0f;", "read .* not ordered after the write"),
        (FILLED + "y[i] = i == 63 ? b[31] : 1.0f;\nif (i == 31) b[31] = 2.0f;", "write .* not ordered after the read"),
        (COUNTED + "if (i == 31) *(threadgroup uint*)b = 7;", "write .* not ordered after the atomic access"),
    ],
)
def test_a_race_names_the_kind_of_the_earlier_access(source, words):
    """Each kind is kept by itself. In this order thread 63 comes before 31, so that no other access stands for it."""
    assert re.search(words, str(fault_of(source, order=1)))


def test_fault_in_a_helper_is_reported_at_the_helpers_line():
    header = "\n\nMETAL_FUNC float read(const device float* p, uint at) {\n  return p[at + 1];\n}\n"
    fault = fault_of("y[i] = read(x, i);", header=header)
    assert (fault.file, fault.line) == ("k.header", 4)
    assert "return p[at + 1];" in str(fault)


def test_line_directive_of_the_source_is_kept():
    fault = fault_of('y[i] = x[i];\n#line 40 "attention.metal"\ny[i] += x[i + 1];')
    assert (fault.file, fault.line) == ("attention.metal", 40)


def test_fault_in_a_simd_function_is_reported_at_the_call():
    source = "threadgroup float b[63];\nif (i < 32) {\nb[i] = x[i];\n}\n" + BARRIER
    source += "simdgroup_float8x8 m;\nsimdgroup_load(m, b, 8);\ny[i] = m.thread_elements()[0];"
    fault = fault_of(source)
    assert (fault.kind, fault.line) == ("threadgroup uninitialised", 8)


def test_initialised_output_may_be_read_and_left_alone():
    y = run("if (i % 2 == 0) y[i] += x[i];", init_value=3.0)
    np.testing.assert_array_equal(y, np.where(np.arange(64) % 2 == 0, 3 + np.arange(1, 65), 3))


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("vector, size", [("float2", 2), ("float4", 4), ("half4", 2)])
def test_vectors_lie_at_multiples_of_their_size(vector, size):
    source = f"y[i] = float((*(const device {vector}*)(x + {{at}})).y);"
    fault = fault_of(source.format(at=f"i / 2 + {size // 2}"))
    assert fault.kind == "misaligned"
    run(source.format(at=f"i / {size} * {size}"))


def test_without_checks_a_stray_address_still_ends_in_an_error():
    fault = fault_of("y[i] = x[long(i) << 44];", checks=False)
    assert (fault.kind, fault.line) == ("no memory", 2)


def test_without_checks_a_division_by_zero_still_ends_in_an_error():
    fault = fault_of("y[i] = float(7 / (int(x[i]) - 3));", checks=False)
    assert fault.kind == "arithmetic stopped"


def test_after_a_fault_the_next_launch_is_right():
    for _ in range(3):
        fault_of("threadgroup float b[64];\nb[i] = x[i];\ny[i] = b[63 - i];")
        np.testing.assert_array_equal(run("y[i] = 2.0f * x[i];"), 2 * np.arange(1, 65))


def test_inputs_are_never_changed():
    x = mx.random.normal((THREADS,), key=mx.random.key(1))
    before = np.array(x)
    fault_of("const_cast<device float*>(x)[i] = 7.0f;\ny[i] = 1.0f;", inputs=[x])
    run("const_cast<device float*>(x)[i] = 7.0f;\ny[i] = 1.0f;", inputs=[x], checks=False)
    np.testing.assert_array_equal(np.array(x), before)
