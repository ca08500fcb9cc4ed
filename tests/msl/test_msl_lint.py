"""Code that Apple's compiler rejects is rejected here, and similar legal code is not."""

import pytest
from msl_runs import fault_of, ramp, run, skip_without_compiler

from workbench.kernels.msl.compiler import syntax_errors

skip_without_compiler()

# name: (words of the message, "source" or "header", line, source and header with the fault, and without).
REJECTED = {
    "pointer without an address space": (
        "'p' is a pointer or reference without an address space", "header", 2,
        ("float q[2] = {x[i], 1};\ny[i] = pick(q);", "\nfloat pick(float* p) { return p[0]; }"),
        ("float q[2] = {x[i], 1};\ny[i] = pick(q);", "\nfloat pick(thread float* p) { return p[0]; }")),
    "reference without an address space": (
        "'v' is a pointer or reference without an address space", "header", 1,
        ("float v = x[i];\ndouble_it(v);\ny[i] = v;", "void double_it(float& v) { v *= 2; }"),
        ("float v = x[i];\ndouble_it(v);\ny[i] = v;", "void double_it(thread float& v) { v *= 2; }")),
    "local pointer without an address space": (
        "'p' is a pointer or reference without an address space", "source", 3,
        ("float v = x[i];\nfloat* p = &v;\ny[i] = *p;", ""),
        ("float v = x[i];\nthread float* p = &v;\ny[i] = *p;", "")),
    "member function on an object in device memory": (
        "on an object in device memory", "source", 3,
        ("device cell* c = (device cell*)y;\nc[i].set(x[i]);",
         "struct cell { float v; void set(float a) { v = a; } };"),
        ("device cell* c = (device cell*)y;\nc[i].set(x[i]);",
         "struct cell { float v; void set(float a) device { v = a; } };")),
    "pointer to the wrong address space": (
        "cannot initialize a variable of type 'threadgroup float *'", "source", 2,
        ("threadgroup float* p = y;\np[i] = x[i];", ""),
        ("device float* p = y;\np[i] = x[i];", "")),
    "const taken away": (
        "const device float *", "source", 2,
        ("device float* p = x;\ny[i] = p[i];", ""),
        ("const device float* p = x;\ny[i] = p[i];", "")),
    "few elements are constant, not device": (
        "note: candidate function not viable", "header", 1,
        ("y[i] = first(x);", "float first(const device float* p) { return p[0]; }"),
        ("y[i] = first(x);", "template <typename P>\nfloat first(P p) { return p[0]; }")),
    "a comment that is not ASCII": (
        "MLX hands sources over as ASCII", "source", 3,
        ("y[i] = x[i] * x[i];\n// x²", ""),
        ("y[i] = x[i] * x[i];\n// x^2", "")),
    "lambda": (
        "lambda", "source", 2,
        ("auto twice = [](float v) { return 2 * v; };\ny[i] = twice(x[i]);", ""),
        ("y[i] = twice(x[i]);", "float twice(float v) { return 2 * v; }")),
    "recursion": (
        "'power' can call itself", "header", 1,
        ("y[i] = power(x[i], 3);", "float power(float v, int n) { return n == 0 ? 1.0f : v * power(v, n - 1); }"),
        ("y[i] = power(x[i], 3);",
         "float power(float v, int n) { float p = 1; while (n-- > 0) p *= v; return p; }")),
    "recursion over two functions": (
        "can call itself", "header", 2,
        ("y[i] = float(even(int(i)));",
         "int odd(int n);\nint even(int n) { return n == 0 ? 1 : odd(n - 1); }\n"
         "int odd(int n) { return n == 0 ? 0 : even(n - 1); }"),
        ("y[i] = float(even(int(i)));",
         "int odd(int n) { return n & 1; }\nint even(int n) { return 1 - odd(n); }")),
    "goto": (
        "goto", "source", 2,
        ("if (i > 3) goto end;\nend: y[i] = x[i];", ""),
        ("y[i] = x[i];", "")),
    "static variable": (
        "'n' outlives the kernel", "source", 2,
        ("static int n = 3;\ny[i] = x[i] * float(n);", ""),
        ("static constant constexpr int n = 3;\ny[i] = x[i] * float(n);", "")),
    "global variable": (
        "'n' outlives the kernel", "header", 1,
        ("y[i] = x[i] * n;", "float n = 3;"),
        ("y[i] = x[i] * n;", "constant float n = 3;")),
    "vector literal of OpenCL": (
        "a vector literal of OpenCL", "source", 3,
        ("\ny[i] = ((float4)(x[i], 1, 2, 3)).x;", ""),
        ("\ny[i] = (float4(x[i], 1, 2, 3)).x;", "")),
    "keywords of OpenCL": (
        "a keyword of OpenCL", "source", 2,
        ("__global float* p = y;\np[i] = x[i];", ""),
        ("device float* p = y;\np[i] = x[i];", "")),
    "names that OpenCL reserves": (
        "reserves for an address space", "source", 2,
        ("global float* p = y;\np[i] = x[i];", ""),
        ("device float* globally = y;  // local to a global function\nglobally[i] = x[i];", "")),
    "names that Metal reserves": (
        "'fragment': a word that Metal reserves", "source", 2,
        ("float fragment = x[i];\ny[i] = fragment;", ""),
        ("float fragment_ = x[i];\ny[i] = fragment_;", "")),
    "function named like one of Metal's": (
        "function 'length': Metal has a function of this name", "header", 1,
        ("y[i] = length(x[i]);", "float length(float v) { return v; }"),
        ("float length = own_length(x[i]);\ny[i] = length;", "float own_length(float v) { return v; }")),
    "threadgroup variable in a helper": (
        "a threadgroup variable outside the kernel", "header", 2,
        ("y[i] = share(x[i], i);", "float share(float v, uint i) {\n  threadgroup float b[64];\n  return b[i] = v;\n}"),
        ("threadgroup float b[64];\ny[i] = share(b, x[i], i);",
         "float share(threadgroup float* b, float v, uint i) {\n  b[i] = v;\n  return b[i];\n}")),
    "float narrowed to bfloat": (
        "loses floating-point precision", "source", 3,
        ("bfloat b = bfloat(x[i]);\nb = 2.0f * b;\ny[i] = float(b);", ""),
        ("bfloat b = bfloat(x[i]);\nhalf h = x[i];  // to half, Metal needs no cast\nb = bfloat(2.0f * h);\n"
         "y[i] = float(b);", "")),
    "float narrowed to a bfloat of another name": (
        "loses floating-point precision", "source", 3,
        ("using T = bfloat;\nT b = x[i];\ny[i] = float(b);", ""),
        ("using T = half;\nT b = x[i];\ny[i] = float(b);", "")),
    "float narrowed to a bfloat of a template": (
        "loses floating-point precision", "source", 2,
        ("Held<bfloat>::T b = x[i];\ny[i] = float(b);", "template <typename V> struct Held { using T = V; };"),
        ("Held<half>::T b = x[i];\ny[i] = float(b);", "template <typename V> struct Held { using T = V; };")),
    "double": (
        "double", "source", 2,
        ("double d = x[i];\ny[i] = float(d);", ""),
        ("float d = x[i] * 1.0;\ny[i] = d;", "")),
    "wrong number of components": (
        "wrong number of components", "source", 2,
        ("y[i] = float4(x[i], 1, 2).x;", ""),
        ("y[i] = float4(x[i], float2(1, 2), 3).x;", "")),
    "ambiguous overload": (
        "call to 'max' is ambiguous", "source", 2,
        ("y[i] = float(max(i, 3));", ""),
        ("y[i] = float(max(i, 3u));", "")),
    "64 bits between lanes": (
        "at most 32 bits", "source", 2,
        ("y[i] = float(simd_shuffle(long(i), 3));", ""),
        ("y[i] = float(simd_shuffle(int(i), 3));", "")),
    "factors of two types": (
        "no matching function for call to 'simdgroup_multiply_accumulate'", "source", 3,
        ("simdgroup_float8x8 a(1.0f), c(0.0f); simdgroup_half8x8 b(1.0h);\nsimdgroup_multiply_accumulate(c, a, b, c);\n"
         "y[i] = c.thread_elements()[0];", ""),
        ("simdgroup_half8x8 a(1.0h); simdgroup_float8x8 c(0.0f); simdgroup_half8x8 b(1.0h);\n"
         "simdgroup_multiply_accumulate(c, a, b, c);\ny[i] = c.thread_elements()[0];", "")),
    "array of a size known at run time": (
        "array size", "source", 2,
        ("float q[i + 1];\nq[0] = x[i];\ny[i] = q[0];", ""),
        ("constexpr int n = 4;\nfloat q[n + 1];\nq[0] = x[i];\ny[i] = q[0];", "")),
    "variable read before it is set": (
        "uninitialized", "source", 3,
        ("float v;\ny[i] = v + x[i];", ""),
        ("float v = 0;\ny[i] = v + x[i];", "")),
    "virtual function": (
        "virtual", "header", 1,
        ("y[i] = thing().get() * x[i];", "struct thing { virtual float get() const { return 2; } };"),
        ("y[i] = thing().get() * x[i];", "struct thing { float get() const { return 2; } };")),
    "exception": (
        "'throw'", "source", 2,
        ("if (x[i] < 0) throw 1;\ny[i] = x[i];", ""),
        ("y[i] = x[i];", "")),
    "member pointer without an address space": (
        "member 'p' is a pointer or reference without an address space", "header", 2,
        ("view v;\nv.p = 0;\ny[i] = x[i];", "struct view {\n  float* p;\n};"),
        ("view v;\nv.p = y;\ny[i] = x[i];", "struct view {\n  device float* p;\n};")),
    "cast without an address space": (
        "a cast to a pointer without an address space", "source", 2,
        ("y[i] = float(*(const int*)(x + i));", ""),
        ("y[i] = float(*(const device int*)(x + i));", "")),
    "reference returned without an address space": (
        "function 'first' returns a pointer or reference without an address space", "header", 1,
        ("y[i] = first(x + i);", "const float& first(const device float* p) { return *p; }"),
        ("y[i] = first(x + i);", "const device float& first(const device float* p) { return *p; }")),
    "threadgroup variable in an inner block": (
        "a threadgroup variable in an inner block", "source", 3,
        ("{\nthreadgroup float b[64];\nb[i] = x[i];\ny[i] = b[i];\n}", ""),
        ("threadgroup float b[64];\n{\nb[i] = x[i];\ny[i] = b[i];\n}", "")),
    "threadgroup variable with a constructor": (
        "whose constructor nothing runs", "source", 2,
        ("threadgroup pair b[64];\nb[i].v = x[i];\ny[i] = b[i].v;",
         "struct pair {\n  float v;\n  pair(float a) : v(a) {}\n  pair() : v(0) {}\n};"),
        ("threadgroup pair b[64];\nb[i].v = x[i];\ny[i] = b[i].v;", "struct pair {\n  float v;\n};")),
    "vector of 8 components": (
        "a vector of more than 4 components", "source", 2,
        ("vec<float, 8> v = vec<float, 8>(x[i]);\ny[i] = v[0];", ""),
        ("vec<float, 4> v = vec<float, 4>(x[i]);\ny[i] = v[0];", "")),
    "template arguments that are deduced for a class": (
        "'box' without template arguments, which Metal does not deduce", "source", 2,
        ("box b{x[i]};\ny[i] = b.v;",
         "template <typename T>\nstruct box {\n  T v;\n};\ntemplate <typename T> box(T) -> box<T>;"),
        ("box<float> b{x[i]};\ny[i] = b.v;", "template <typename T>\nstruct box {\n  T v;\n};")),
    "constant that a call computes": (
        "constant 'n' is computed by a call", "header", 2,
        ("y[i] = x[i] * n;", "constexpr float twice(float v) { return 2 * v; }\nconstant float n = twice(2.0f);"),
        ("y[i] = x[i] * n;", "\nconstant float n = 4.0f;")),
    "extern": (
        "nothing to link", "header", 1,
        ("y[i] = x[i];", "extern float other(float v);"),
        ("y[i] = other(x[i]);", "float other(float v) { return v; }")),
    "atomic of 64 bits": (
        "an atomic of 64 bits", "header", 1,
        ("y[i] = x[i];", "struct cell { device atomic_ulong* p; };"),
        ("y[i] = x[i];", "struct cell { device atomic_uint* p; };")),
    "bool between lanes": (
        "a simd function of bool", "source", 2,
        ("y[i] = float(simd_shuffle(x[i] > 3, ushort(0)));", ""),
        ("y[i] = float(simd_shuffle(int(x[i] > 3), ushort(0)));", "")),
    "half times bfloat": (
        "half and bfloat in one operation", "source", 4,
        ("half h = half(x[i]);\nbfloat b = bfloat(2.0f);\ny[i] = float(h * b);", ""),
        ("half h = half(x[i]);\nbfloat b = bfloat(2.0f);\ny[i] = float(h) * float(b);", "")),
    "function named like one of MLX's": (
        "'log1p': MLX defines this name", "header", 1,
        ("y[i] = log1p(x[i]);", "float log1p(float v) { return log(1.0f + v); }"),
        ("y[i] = own_log1p(x[i]);", "float own_log1p(float v) { return log(1.0f + v); }")),
    "undeclared name": (
        "use of undeclared identifier 'get_global_id'", "source", 3,
        ("\ny[i] = x[get_global_id(0)];", ""),
        ("\ny[i] = x[thread_position_in_grid.x];", "")),
}  # fmt: skip


@pytest.mark.repeats(step=4)
@pytest.mark.parametrize("name", REJECTED)
def test_rejected_at_its_line_and_its_neighbour_accepted(name):
    words, file, line, (faulty, faulty_header), (good, good_header) = REJECTED[name]
    few = {"inputs": [ramp(6)], "threads": 6, "threadgroup": 6} if "few elements" in name else {}
    error = fault_of(faulty, header=faulty_header, **few)
    assert error.kind == "compile error"
    assert words in str(error), str(error)
    assert f"k.{file}:{line}: " in str(error), str(error)
    quoted = (faulty_header if file == "header" else "THREAD\n" + faulty).split("\n")[line - 1].strip()
    assert f"    {quoted}" in str(error)
    run(good, header=good_header, **few)


def test_narrowing_is_named_beside_other_errors():
    error = fault_of("bfloat b = x[i];\nhalf h = x[i];\ny[i] = float(b) + h + missing;")
    assert [line for line in str(error).splitlines() if line.startswith("k.source")] == [
        "k.source:2: implicit conversion loses floating-point precision: 'const device float' to 'thread bfloat'",
        "k.source:4: use of undeclared identifier 'missing'",
    ]


def test_syntax_errors_have_the_narrowing_that_metal_rejects():
    kernel = "kernel void k(__global float* y, float x) {{ {} b = x; y[0] = b; }}"
    assert "error: implicit conversion loses" in syntax_errors(kernel.format("__bf16"))
    assert not syntax_errors(kernel.format("_Float16"))


def test_comments_and_strings_are_not_code():
    run("y[i] = x[i];  // (float4)(1, 2, 3, 4), __global, global, vertex\n/* local\nprivate */")


def test_structures_with_constructors_copies_and_temporaries():
    header = """
    struct accumulator {
      float sum, most;
      accumulator() = default;
      accumulator(float v) : sum(v), most(v) {}
      void add(float v) { sum += v; most = max(most, v); }
      float mean(int n) const { return sum / float(n); }
    private:
      int unused;
    };
    accumulator merged(accumulator a, accumulator b) {
      accumulator c = a;
      c.add(b.sum);
      return c;
    }
    """
    run("accumulator a(x[i]);\na.add(2);\ny[i] = merged(a, accumulator(1.0f)).mean(3) + a.most;", header=header)
