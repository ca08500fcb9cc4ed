"""Results of Metal's functions and types, against NumPy and MLX."""

import mlx.core as mx
import numpy as np
import pytest
from msl_runs import THREADS, everywhere, ramp, run, skip_without_compiler

from workbench import msl

skip_without_compiler()

LANES = np.arange(THREADS)
RANDOM = np.random.default_rng(7)
FLOATS = RANDOM.uniform(0.2, 0.95, THREADS).astype(np.float32)
DTYPES = {"float": mx.float32, "half": mx.float16, "bfloat": mx.bfloat16}


# ---- functions ----

UNARY = {
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: 10.0**x, "log": np.log, "log2": np.log2, "log10": np.log10,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asin": np.arcsin,
    "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": lambda x: np.arccosh(x + 1),
    "atanh": np.arctanh, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "floor": np.floor, "ceil": np.ceil,
    "rint": np.rint, "round": np.round, "trunc": np.trunc, "fabs": np.abs, "abs": np.abs, "sign": np.sign,
    "saturate": lambda x: np.clip(x, 0, 1), "fract": lambda x: x - np.floor(x),
}  # fmt: skip


def test_functions_of_one_argument():
    """All of them in one kernel: 64 arguments each, as floats and as the four components of a vector."""
    lines = [
        f"y[{n} * 128 + i] = metal::{name}(x[i]{' + 1.0f' if name == 'acosh' else ''});\n"
        f"y[{n} * 128 + 64 + i] = metal::{name}(float4(x[i]{' + 1.0f' if name == 'acosh' else ''})).z;"
        for n, name in enumerate(UNARY)
    ]
    y = run("\n".join(lines), inputs=[mx.array(FLOATS)], shape=(len(UNARY), 2, THREADS))
    for got, (name, function) in zip(y, UNARY.items()):
        expected = function(FLOATS.astype(np.float64))
        np.testing.assert_allclose(got, [expected] * 2, rtol=4e-7, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("namespace", ["metal::fast", "metal::precise", "metal"])
def test_fast_and_precise_functions(namespace):
    y = run(f"y[i] = {namespace}::exp(-x[i]) + {namespace}::divide(x[i], 3.0f);", inputs=[mx.array(FLOATS)])
    np.testing.assert_allclose(y, np.exp(-FLOATS) + FLOATS / 3, rtol=1e-6)


def test_fast_exp2_is_wrong_by_the_whole_allowed_error():
    """3 + floor(2 |x|) units in the last place, in both directions: no kernel that passes here relies on less."""
    x = np.concatenate([RANDOM.uniform(-120, 0, 3000), RANDOM.uniform(-2, 0, 1096)]).astype(np.float32)
    fast = run("y[i] = fast::exp2(x[i]);", inputs=[mx.array(x)], threads=len(x)).astype(np.float64)
    precise = run("y[i] = exp2(x[i]);", inputs=[mx.array(x)], threads=len(x))
    exact = np.exp2(x.astype(np.float64))
    allowed = 3 + np.floor(2 * np.abs(x))
    off = (fast - exact) / np.spacing(precise)
    assert (np.abs(off) <= allowed + 1).all()  # the nearest float is up to one unit away from the exact number
    assert (np.abs(off) >= allowed - 1).mean() > 0.99
    assert 0.4 < (off > 0).mean() < 0.6
    assert (np.abs(precise - exact) <= np.spacing(precise)).all()


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_functions_of_narrow_types_are_rounded_once(kind):
    x = mx.array(FLOATS).astype(DTYPES[kind])
    y = run("y[i] = metal::exp(x[i]);", inputs=[x], dtype=DTYPES[kind])
    expected = mx.array(np.exp(np.array(x.astype(mx.float32)).astype(np.float64))).astype(mx.float32)
    np.testing.assert_array_equal(y, np.array(expected.astype(DTYPES[kind]).astype(mx.float32)))


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_arithmetic_of_narrow_types_is_rounded_at_every_operation(kind):
    x, z = (mx.array(RANDOM.normal(size=THREADS).astype(np.float32)).astype(DTYPES[kind]) for _ in range(2))
    y = run("y[i] = x[i] * z[i] + x[i];", inputs=[x, z], dtype=DTYPES[kind])
    wide = [np.array(a.astype(mx.float32)) for a in (x, z)]
    product = mx.array(wide[0] * wide[1]).astype(DTYPES[kind]).astype(mx.float32)
    expected = (product + x.astype(mx.float32)).astype(DTYPES[kind]).astype(mx.float32)
    np.testing.assert_array_equal(y, np.array(expected))


def test_conversion_to_bfloat_rounds_to_nearest_even():
    bits = RANDOM.integers(0, 2**32, 4096, dtype=np.uint32)
    bits[:4] = 0x3F808000, 0x3F818000, 0x7F800000, 0xFF7FFFFF  # two ties, infinity, the lowest float
    x = bits.view(np.float32)
    x[np.isnan(x)] = 1.5
    y = run("y[i] = bfloat(x[i]);", inputs=[mx.array(x)], threads=4096, dtype=mx.bfloat16)
    np.testing.assert_array_equal(y, np.array(mx.array(x).astype(mx.bfloat16).astype(mx.float32)))


def test_maximum_skips_nan():
    x = mx.array(np.where(LANES % 3 == 0, np.nan, FLOATS))
    y = run("y[i] = max(x[i], 0.5f) + min(0.5f, x[i]) + fmax(x[i], -1.0f);", inputs=[x])
    value = np.where(LANES % 3 == 0, np.nan, FLOATS)
    expected = np.fmax(value, 0.5) + np.fmin(value, 0.5) + np.fmax(value, -1)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_integer_functions():
    x = mx.array(RANDOM.integers(-1000, 1000, THREADS).astype(np.int32))
    y = run("y[i] = clamp(abs(x[i]), 3, 700) * 64 + popcount(x[i]) - clz(x[i]) + ctz(x[i]);",
            inputs=[x], dtype=mx.int32)  # fmt: skip
    bits = [format(v & 0xFFFFFFFF, "032b") for v in np.array(x).tolist()]
    zeros = [(len(b) - len(b.lstrip("0")), len(b) - len(b.rstrip("0"))) for b in bits]
    expected = [
        min(max(abs(v), 3), 700) * 64 + b.count("1") - leading + trailing
        for v, b, (leading, trailing) in zip(np.array(x).tolist(), bits, zeros)
    ]
    np.testing.assert_array_equal(y, expected)


def test_vectors():
    y = run(
        """
        const float4 a = float4(x[i], 2, half(3), 4);
        const float4 b(float2(1, 2), a.zw);
        const float4 c = metal::vec<float, 4>(int4(5, 6, 7, 8));
        float4 d = fma(a, b, c);
        d.xy = d.yx;
        d += float4(0.5f);
        y[i * 6 + 0] = d.x; y[i * 6 + 1] = d.y; y[i * 6 + 2] = d.z; y[i * 6 + 3] = d[3];
        y[i * 6 + 4] = dot(a, b);
        y[i * 6 + 5] = float(as_type<uint>(x[i]) >> 23);
        """,
        inputs=[mx.array(FLOATS)],
        shape=(THREADS, 6),
    )
    expected = np.stack(
        [np.full(THREADS, 10.5), FLOATS + 5.5, np.full(THREADS, 16.5), np.full(THREADS, 24.5),
         FLOATS + 4 + 9 + 16, FLOATS.view(np.uint32) >> 23], axis=1
    )  # fmt: skip
    np.testing.assert_allclose(y, expected, rtol=1e-6)


# ---- simdgroups ----

REDUCTIONS = {"simd_sum": np.sum, "simd_max": np.max, "simd_min": np.min, "simd_product": np.prod}


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("threads", [64, 40])
def test_reductions(kind, threads):
    x = mx.array(FLOATS[:threads] + 0.4).astype(DTYPES[kind])
    lines = [f"y[{n} * {threads} + i] = {name}(x[i]);" for n, name in enumerate(REDUCTIONS)]
    y = everywhere(
        "\n".join(lines), inputs=[x], threads=threads, threadgroup=threads, shape=(4, threads), dtype=DTYPES[kind]
    )
    wide = np.array(x.astype(mx.float32)).astype(np.float64)
    for got, function in zip(y, REDUCTIONS.values()):
        groups = [np.full(min(32, threads - s), function(wide[s : s + 32])) for s in range(0, threads, 32)]
        np.testing.assert_allclose(
            got, np.concatenate(groups), rtol={"float": 2e-6, "half": 1e-3, "bfloat": 8e-3}[kind]
        )


def test_reductions_of_integers_and_vectors():
    x = mx.array(RANDOM.integers(0, 2**20, THREADS).astype(np.int32))
    y = everywhere(
        """
        y[i] = simd_and(x[i]) + simd_or(x[i]) + simd_xor(x[i]) + simd_max(x[i]) - simd_min(-x[i]);
        const float2 both = simd_sum(float2(x[i] % 100, -1.0f));
        y[i] += int(both.x) * 7 + int(both.y);
        """,
        inputs=[x],
        dtype=mx.int32,
    )
    for s in (0, 32):
        v = np.array(x)[s : s + 32]
        expected = np.bitwise_and.reduce(v) + np.bitwise_or.reduce(v) + np.bitwise_xor.reduce(v) + v.max() + v.max()
        np.testing.assert_array_equal(y[s : s + 32], expected + (v % 100).sum() * 7 - 32)


SHUFFLES = {
    "simd_shuffle(x[i], ushort(i * 7 % 32))": lambda lane, base: base + (base + lane) * 7 % 32,
    "simd_broadcast(x[i], 5)": lambda lane, base: base + 5,
    "simd_broadcast_first(x[i])": lambda lane, base: base,
    "simd_shuffle_xor(x[i], 9)": lambda lane, base: base + (lane ^ 9),
    "simd_shuffle_down(x[i], 3)": lambda lane, base: base + np.where(lane < 29, lane + 3, lane),
    "simd_shuffle_up(x[i], 3)": lambda lane, base: base + np.where(lane >= 3, lane - 3, lane),
    "simd_shuffle_rotate_down(x[i], 30)": lambda lane, base: base + (lane + 30) % 32,
    "simd_shuffle_rotate_up(x[i], 30)": lambda lane, base: base + (lane + 2) % 32,
    "quad_shuffle(x[i], 2)": lambda lane, base: base + lane // 4 * 4 + 2,
    "quad_shuffle_xor(x[i], 3)": lambda lane, base: base + (lane ^ 3),
}


def test_shuffles():
    y = everywhere(
        "\n".join(f"y[{n * THREADS} + i] = {call};" for n, call in enumerate(SHUFFLES)),
        inputs=[mx.array(FLOATS)],
        shape=(len(SHUFFLES), THREADS),
    )
    for got, (call, source) in zip(y, SHUFFLES.items()):
        np.testing.assert_array_equal(got, FLOATS[source(LANES % 32, LANES // 32 * 32)], err_msg=call)


def test_votes_scans_and_quads():
    y = everywhere(
        """
        const bool large = x[i] > 0.5f;
        y[i] = float(ulong(simd_ballot(large)) & 0xffff);
        y[64 + i] = (simd_any(large) ? 1 : 0) + (simd_all(x[i] > 0.0f) ? 2 : 0) + (simd_all(large) ? 4 : 0)
            + (simd_is_first() ? 8 : 0);
        y[128 + i] = simd_prefix_inclusive_sum(x[i]);
        y[192 + i] = simd_prefix_exclusive_sum(x[i]);
        y[256 + i] = simd_prefix_inclusive_product(x[i]);
        y[320 + i] = quad_sum(x[i]) + quad_max(x[i]) - quad_min(x[i]);
        y[384 + i] = simd_shuffle_and_fill_up(x[i], 9.0f, 2) + simd_shuffle_and_fill_down(x[i], 5.0f, 2);
        """,
        inputs=[mx.array(FLOATS)],
        shape=(7, THREADS),
    )
    for s in (0, 32):
        x = FLOATS[s : s + 32]
        got = y[:, s : s + 32]
        assert (got[0] == sum(1 << lane for lane in range(16) if x[lane] > 0.5)).all()
        np.testing.assert_array_equal(got[1], 3 + 8 * (np.arange(32) == 0))
        np.testing.assert_allclose(got[2], np.cumsum(x), rtol=1e-6)
        np.testing.assert_allclose(got[3], np.cumsum(x) - x, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got[4], np.cumprod(x), rtol=1e-5)
        quads = x.reshape(8, 4)
        np.testing.assert_allclose(got[5], np.repeat(quads.sum(1) + quads.max(1) - quads.min(1), 4), rtol=1e-6)
        up, down = np.concatenate([[9, 9], x[:-2]]), np.concatenate([x[2:], [5, 5]])
        np.testing.assert_allclose(got[6], up + down, rtol=1e-6)


# ---- matrices ----


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("kind", DTYPES)
def test_matrix_product(kind):
    a, b = (mx.array(RANDOM.normal(size=(16, 24)).astype(np.float32)).astype(DTYPES[kind]) for _ in range(2))
    y = everywhere(
        """
        simdgroup_matrix<T, 8, 8> a;
        simdgroup_matrix<T, 8, 8> b;
        simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(0.5f);
        simdgroup_load(a, x + 3 * 24 + 2, 24);                        // rows 3 to 10, columns 2 to 9
        simdgroup_load(b, z, 24, ulong2(8, 1), true);                 // rows 8 to 15, columns 1 to 8, transposed
        simdgroup_multiply_accumulate(c, a, b, c);
        if (simdgroup_index_in_threadgroup == 0) simdgroup_store(c, y, 8);
        simdgroup_multiply(c, a, b);
        if (simdgroup_index_in_threadgroup == 0) simdgroup_store(c, y + 64, 8, ulong2(0, 0), true);
        """,
        inputs=[a, b],
        shape=(2, 8, 8),
        template=[("T", DTYPES[kind])],
    )
    wide_a, wide_b = (np.array(m.astype(mx.float32)).astype(np.float64) for m in (a, b))
    # Transposed, element (row, column) of the matrix lies at (column + 8, row + 1): the origin is (x, y) of the matrix.
    product = wide_a[3:11, 2:10] @ wide_b[8:16, 1:9].T
    np.testing.assert_allclose(y[0], product + 0.5, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y[1].T, product, rtol=1e-5, atol=1e-5)


def test_elements_of_a_lane_are_those_of_apples_gpus():
    """Lane b4 b3 b2 b1 b0 holds row b4 b2 b1, columns b3 b0 0 and b3 b0 1: an identity matrix and a ramp show it."""
    y = run(
        """
        simdgroup_float8x8 m(1.0f), ramp;
        simdgroup_load(ramp, x, 8);
        if (i < 32) {
          y[4 * i] = m.thread_elements()[0];
          y[4 * i + 1] = m.thread_elements()[1];
          y[4 * i + 2] = ramp.thread_elements()[0];
          y[4 * i + 3] = ramp.thread_elements()[1];
        }
        """,
        inputs=[ramp()],
        shape=(32, 4),
    )
    for lane in range(32):
        b4, b3, b2, b1, b0 = (int(b) for b in format(lane, "05b"))
        row, column = b4 * 4 + b2 * 2 + b1, b3 * 4 + b0 * 2
        at = row * 8 + column
        np.testing.assert_array_equal(y[lane], [row == column, row == column + 1, at + 1, at + 2])


# ---- memory ----


def test_atomics():
    x = mx.array(RANDOM.integers(-(2**30), 2**30, THREADS).astype(np.int32))
    kernel = msl.metal_kernel(
        "atomics", ["x"], ["n", "f"],
        """
        const uint i = thread_position_in_grid.x;
        threadgroup atomic_int lowest;
        if (i == 0) atomic_store_explicit(&lowest, 2147483647, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_min_explicit(&lowest, x[i], memory_order_relaxed);
        atomic_fetch_max_explicit(&n[0], x[i], memory_order_relaxed);
        atomic_fetch_add_explicit(&n[1], x[i] / 64, memory_order_relaxed);
        atomic_fetch_sub_explicit(&n[2], 3, memory_order_relaxed);
        atomic_fetch_or_explicit(&n[3], 1 << (i % 31), memory_order_relaxed);
        atomic_fetch_xor_explicit(&n[4], x[i], memory_order_relaxed);
        int seen = atomic_load_explicit(&n[5], memory_order_relaxed);
        while (!atomic_compare_exchange_weak_explicit(&n[5], &seen, seen + 2, memory_order_relaxed,
                                                      memory_order_relaxed)) {}
        atomic_fetch_add_explicit(&f[0], 0.25f, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (i == 0) {
          int low = atomic_exchange_explicit(&lowest, 0, memory_order_relaxed);
          atomic_store_explicit(&n[6], low, memory_order_relaxed);
        }
        """,
        atomic_outputs=True,
    )  # fmt: skip
    for order in (0, 1):
        n, f = kernel(
            inputs=[x], output_shapes=[(7,), (1,)], output_dtypes=[mx.int32, mx.float32], grid=(64, 1, 1),
            threadgroup=(64, 1, 1), init_value=0, order=order,
        )  # fmt: skip
        v = np.array(x)
        sixty_fourths = np.trunc(v / 64).astype(int).sum()
        expected = [v.max(), sixty_fourths, -192, 2**31 - 1, np.bitwise_xor.reduce(v), 128, v.min()]
        np.testing.assert_array_equal(np.array(n), expected)
        assert f.item() == 16


def test_threadgroup_variables_of_every_form():
    y = everywhere(
        """
        threadgroup float single;
        threadgroup float4 vectors[16];
        threadgroup pair pairs[64], more[2][3];
        threadgroup
            half  wide[N]
                      [4];
        threadgroup float* p = &single;
        if (i == 0) *p = 0.5f;
        if (i < 16) vectors[i] = float4(x[i]);
        pairs[i].b = x[i];
        if (i < 6) more[i / 3][i % 3].a = x[i];
        for (int j = 0; j < 4; j++) wide[i][j] = half(x[i]);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = single + vectors[i / 4].z + pairs[63 - i].b + more[i % 2][i % 3].a + float(wide[i ^ 1][i % 4]);
        """,
        header="struct pair { float a, b; };\n",
        inputs=[ramp()],
        template=[("N", 64)],
    )
    more = (LANES % 2 * 3 + LANES % 3) + 1
    np.testing.assert_array_equal(y, 0.5 + LANES // 4 + 1 + 64 - LANES + more + (LANES ^ 1) + 1)


def test_constant_tables():
    y = everywhere(
        "float sum = 0;\nfor (uint j = 0; j <= i % 5; j++) sum += table[(j + i) % 5];\ny[i] = sum;",
        header="constant float table[5] = {1, 10, 100, 1000, 10000};\n",
    )
    table = [1, 10, 100, 1000, 10000]
    np.testing.assert_array_equal(y, [sum(table[(j + i) % 5] for j in range(i % 5 + 1)) for i in range(64)])
