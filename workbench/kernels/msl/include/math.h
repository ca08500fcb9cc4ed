// <metal_math>, <metal_common>, <metal_integer>, <metal_geometric>: functions of scalars and vectors.
// half and bfloat are computed in float and rounded once.
#pragma once
#include "vectors.h"

extern "C" {
float expf(float);
float exp2f(float);
float exp10f(float);
float logf(float);
float log2f(float);
float log10f(float);
float sinf(float);
float cosf(float);
float tanf(float);
float sinhf(float);
float coshf(float);
float tanhf(float);
float asinf(float);
float acosf(float);
float atanf(float);
float asinhf(float);
float acoshf(float);
float atanhf(float);
float powf(float, float);
float atan2f(float, float);
float fmodf(float, float);
float ldexpf(float, int);
}

namespace metal {

// One function of x for every floating-point type, component by component for vectors.
#define MSL_UNARY(name, expression)                                       \
  MSL_SHIM float name(float x) { return expression; }                     \
  MSL_SHIM half name(half narrow) {                                       \
    float x = narrow;                                                     \
    return (half)(expression);                                            \
  }                                                                       \
  MSL_SHIM bfloat name(bfloat narrow) {                                   \
    float x = (float)narrow;                                              \
    return (bfloat)(expression);                                          \
  }                                                                       \
  template <class T, int N>                                               \
  MSL_SHIM vec<T, N> name(vec<T, N> v) {                                  \
    MSL_UNROLL for (int i = 0; i < N; i++) v[i] = name(T(v[i]));          \
    return v;                                                             \
  }

#define MSL_BINARY(name, expression)                                                              \
  MSL_SHIM float name(float a, float b) { return expression; }                                    \
  MSL_SHIM half name(half a_narrow, half b_narrow) {                                              \
    float a = a_narrow, b = b_narrow;                                                             \
    return (half)(expression);                                                                    \
  }                                                                                               \
  MSL_SHIM bfloat name(bfloat a_narrow, bfloat b_narrow) {                                        \
    float a = (float)a_narrow, b = (float)b_narrow;                                               \
    return (bfloat)(expression);                                                                  \
  }                                                                                               \
  template <class T, int N>                                                                       \
  MSL_SHIM vec<T, N> name(vec<T, N> a, vec<T, N> b) {                                             \
    MSL_UNROLL for (int i = 0; i < N; i++) a[i] = name(T(a[i]), T(b[i]));                         \
    return a;                                                                                     \
  }

#define MSL_MATH_FUNCTIONS                                    \
  MSL_UNARY(exp, expf(x))                                     \
  MSL_UNARY(exp10, exp10f(x))                                 \
  MSL_UNARY(log, logf(x))                                     \
  MSL_UNARY(log2, log2f(x))                                   \
  MSL_UNARY(log10, log10f(x))                                 \
  MSL_UNARY(sin, sinf(x))                                     \
  MSL_UNARY(cos, cosf(x))                                     \
  MSL_UNARY(tan, tanf(x))                                     \
  MSL_UNARY(sinh, sinhf(x))                                   \
  MSL_UNARY(cosh, coshf(x))                                   \
  MSL_UNARY(tanh, tanhf(x))                                   \
  MSL_UNARY(asin, asinf(x))                                   \
  MSL_UNARY(acos, acosf(x))                                   \
  MSL_UNARY(atan, atanf(x))                                   \
  MSL_UNARY(asinh, asinhf(x))                                 \
  MSL_UNARY(acosh, acoshf(x))                                 \
  MSL_UNARY(atanh, atanhf(x))                                 \
  MSL_UNARY(sqrt, __builtin_sqrtf(x))                         \
  MSL_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))                 \
  MSL_UNARY(floor, __builtin_floorf(x))                       \
  MSL_UNARY(ceil, __builtin_ceilf(x))                         \
  MSL_UNARY(rint, __builtin_rintf(x))                         \
  MSL_UNARY(round, __builtin_roundf(x))                       \
  MSL_UNARY(trunc, __builtin_truncf(x))                       \
  MSL_UNARY(fabs, __builtin_fabsf(x))                         \
  MSL_UNARY(fract, x - __builtin_floorf(x))                   \
  MSL_BINARY(pow, powf(a, b))                                 \
  MSL_BINARY(powr, powf(a, b))                                \
  MSL_BINARY(atan2, atan2f(a, b))                             \
  MSL_BINARY(fmod, fmodf(a, b))                               \
  MSL_BINARY(divide, a / b)

// fast::exp2 is off by as much as Apple's specification allows, 3 + floor(2 |x|) units in the last place, up or down by
// the bits of x; results below the normal numbers are 0. So a kernel that is right here tolerates every such exp2.
MSL_SHIM float msl_fast_exp2(float x) {
  const float nearest = exp2f(x);
  if (nearest < 1.17549435e-38f) return 0.0f;
  if (!(nearest < INFINITY)) return nearest;
  const uint units = 3 + (uint)(2.0f * __builtin_fabsf(x));
  const bool up = (as_type<uint>(x) * 2654435761u) >> 31;
  return as_type<float>(up ? as_type<uint>(nearest) + units : as_type<uint>(nearest) - units);
}

MSL_MATH_FUNCTIONS
MSL_UNARY(exp2, exp2f(x))
namespace fast {
MSL_MATH_FUNCTIONS
MSL_UNARY(exp2, msl_fast_exp2(x))
}
namespace precise {
MSL_MATH_FUNCTIONS
MSL_UNARY(exp2, exp2f(x))
}
#undef MSL_MATH_FUNCTIONS

MSL_UNARY(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f)
MSL_UNARY(saturate, x > 0 ? (x < 1 ? x : 1.0f) : 0.0f)
#undef MSL_UNARY
#undef MSL_BINARY

MSL_SHIM float ldexp(float x, int exponent) { return ldexpf(x, exponent); }
MSL_SHIM bool isnan(float x) { return x != x; }
MSL_SHIM bool isinf(float x) { return __builtin_fabsf(x) == INFINITY; }
MSL_SHIM bool isfinite(float x) { return __builtin_fabsf(x) < INFINITY; }

#define MSL_FMA(T) \
  MSL_SHIM T fma(T a, T b, T c) { return (T)__builtin_fmaf((float)a, (float)b, (float)c); }
MSL_FMA(float)
MSL_FMA(half)
MSL_FMA(bfloat)
#undef MSL_FMA

#define MSL_INTEGER_FUNCTIONS(T)                                       \
  MSL_SHIM T max(T a, T b) { return a < b ? b : a; }                   \
  MSL_SHIM T min(T a, T b) { return b < a ? b : a; }                   \
  MSL_SHIM T clamp(T x, T low, T high) { return min(max(x, low), high); } \
  MSL_SHIM T abs(T a) { return a < T(0) ? T(-a) : a; }
MSL_INTEGER_FUNCTIONS(char)
MSL_INTEGER_FUNCTIONS(uchar)
MSL_INTEGER_FUNCTIONS(short)
MSL_INTEGER_FUNCTIONS(ushort)
MSL_INTEGER_FUNCTIONS(int)
MSL_INTEGER_FUNCTIONS(uint)
MSL_INTEGER_FUNCTIONS(long)
MSL_INTEGER_FUNCTIONS(ulong)
#undef MSL_INTEGER_FUNCTIONS

// Of a NaN and a number, the number is returned, as in IEEE 754 maxNum and as Metal documents for fmax and max.
#define MSL_FLOAT_FUNCTIONS(T)                                             \
  MSL_SHIM T max(T a, T b) { return a != a ? b : (a < b ? b : a); }        \
  MSL_SHIM T min(T a, T b) { return a != a ? b : (b < a ? b : a); }        \
  MSL_SHIM T fmax(T a, T b) { return max(a, b); }                          \
  MSL_SHIM T fmin(T a, T b) { return min(a, b); }                          \
  MSL_SHIM T clamp(T x, T low, T high) { return min(max(x, low), high); }  \
  MSL_SHIM T abs(T a) { return a < T(0) ? T(-a) : a; }                     \
  MSL_SHIM T mix(T a, T b, T t) { return a + (b - a) * t; }
MSL_FLOAT_FUNCTIONS(float)
MSL_FLOAT_FUNCTIONS(half)
MSL_FLOAT_FUNCTIONS(bfloat)
#undef MSL_FLOAT_FUNCTIONS

// Component by component for vectors.
#define MSL_OF_VECTORS(name, parameters, components)                          \
  template <class T, int N>                                                   \
  MSL_SHIM vec<T, N> name parameters {                                        \
    MSL_UNROLL for (int i = 0; i < N; i++) a[i] = name components;            \
    return a;                                                                 \
  }
#define MSL_OF_TWO_VECTORS(name) MSL_OF_VECTORS(name, (vec<T, N> a, vec<T, N> b), (T(a[i]), T(b[i])))
#define MSL_OF_THREE_VECTORS(name) \
  MSL_OF_VECTORS(name, (vec<T, N> a, vec<T, N> b, vec<T, N> c), (T(a[i]), T(b[i]), T(c[i])))
MSL_OF_VECTORS(abs, (vec<T, N> a), (T(a[i])))
MSL_OF_TWO_VECTORS(max)
MSL_OF_TWO_VECTORS(min)
MSL_OF_TWO_VECTORS(fmax)
MSL_OF_TWO_VECTORS(fmin)
MSL_OF_THREE_VECTORS(fma)
MSL_OF_THREE_VECTORS(clamp)
MSL_OF_THREE_VECTORS(mix)
#undef MSL_OF_THREE_VECTORS
#undef MSL_OF_TWO_VECTORS
#undef MSL_OF_VECTORS

template <class T, int N>
MSL_SHIM T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  MSL_UNROLL for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}
template <class T>
MSL_SHIM T select(T if_false, T if_true, bool condition) {
  return condition ? if_true : if_false;
}

MSL_SHIM uint popcount(uint x) { return (uint)__builtin_popcount(x); }
MSL_SHIM uint clz(uint x) { return x ? (uint)__builtin_clz(x) : 32u; }
MSL_SHIM uint ctz(uint x) { return x ? (uint)__builtin_ctz(x) : 32u; }
MSL_SHIM int popcount(int x) { return __builtin_popcount((uint)x); }
MSL_SHIM int clz(int x) { return (int)clz((uint)x); }
MSL_SHIM int ctz(int x) { return (int)ctz((uint)x); }

}  // namespace metal
