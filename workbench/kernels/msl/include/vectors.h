// Vector types. Clang's ext_vector provides arithmetic and swizzles; constructors are added here.
#pragma once
#include "traits.h"

#define MSL_VECTORS(T)                                      \
  typedef T T##2 __attribute__((ext_vector_type(2)));       \
  typedef T T##3 __attribute__((ext_vector_type(3)));       \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(float)
MSL_VECTORS(bfloat)
#undef MSL_VECTORS
typedef int2 bool2;
typedef int3 bool3;
typedef int4 bool4;

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

// Number of components and component type of a scalar or vector type.
template <class T>
struct components {
  static constexpr __constant int count = 1;
  using type = T;
};
template <class T, int N>
struct components<T __attribute__((ext_vector_type(N)))> {
  static constexpr __constant int count = N;
  using type = T;
};

template <class V, int I>
MSL_SHIM void fill_components(__private V&) {
  static_assert(I == components<V>::count, "vector constructor: wrong number of components");
}
template <class V, int I, class First, class... Rest>
MSL_SHIM void fill_components(__private V& v, First first, Rest... rest) {
  using T = typename components<V>::type;
  if constexpr (components<First>::count == 1) {
    v[I] = (T)first;
  } else {
    MSL_UNROLL for (int j = 0; j < components<First>::count; j++) v[I + j] = (T)first[j];
  }
  fill_components<V, I + components<First>::count>(v, rest...);
}

// A vector's constructor: float4(scalar), float4(float2, float2), float4(int4), float4() ...
template <class V, class... Args>
MSL_SHIM V make_vector(Args... args) {
  V v;
  fill_components<V, 0>(v, args...);
  return v;
}
template <class V, class Arg>
MSL_SHIM V make_vector(Arg arg) {
  V v;
  if constexpr (components<Arg>::count == 1) {
    v = (typename components<V>::type)arg;
  } else {
    fill_components<V, 0>(v, arg);
  }
  return v;
}
template <class V>
MSL_SHIM V make_vector() {
  return (V)(typename components<V>::type)0;
}

}  // namespace metal

// A function-like macro applies only when a vector type's name is followed by "(", as in a constructor call.
#define MSL_CONSTRUCT(V) metal::make_vector<V>
#define char2(...) MSL_CONSTRUCT(char2)(__VA_ARGS__)
#define char3(...) MSL_CONSTRUCT(char3)(__VA_ARGS__)
#define char4(...) MSL_CONSTRUCT(char4)(__VA_ARGS__)
#define uchar2(...) MSL_CONSTRUCT(uchar2)(__VA_ARGS__)
#define uchar3(...) MSL_CONSTRUCT(uchar3)(__VA_ARGS__)
#define uchar4(...) MSL_CONSTRUCT(uchar4)(__VA_ARGS__)
#define short2(...) MSL_CONSTRUCT(short2)(__VA_ARGS__)
#define short3(...) MSL_CONSTRUCT(short3)(__VA_ARGS__)
#define short4(...) MSL_CONSTRUCT(short4)(__VA_ARGS__)
#define ushort2(...) MSL_CONSTRUCT(ushort2)(__VA_ARGS__)
#define ushort3(...) MSL_CONSTRUCT(ushort3)(__VA_ARGS__)
#define ushort4(...) MSL_CONSTRUCT(ushort4)(__VA_ARGS__)
#define int2(...) MSL_CONSTRUCT(int2)(__VA_ARGS__)
#define int3(...) MSL_CONSTRUCT(int3)(__VA_ARGS__)
#define int4(...) MSL_CONSTRUCT(int4)(__VA_ARGS__)
#define uint2(...) MSL_CONSTRUCT(uint2)(__VA_ARGS__)
#define uint3(...) MSL_CONSTRUCT(uint3)(__VA_ARGS__)
#define uint4(...) MSL_CONSTRUCT(uint4)(__VA_ARGS__)
#define long2(...) MSL_CONSTRUCT(long2)(__VA_ARGS__)
#define long3(...) MSL_CONSTRUCT(long3)(__VA_ARGS__)
#define long4(...) MSL_CONSTRUCT(long4)(__VA_ARGS__)
#define ulong2(...) MSL_CONSTRUCT(ulong2)(__VA_ARGS__)
#define ulong3(...) MSL_CONSTRUCT(ulong3)(__VA_ARGS__)
#define ulong4(...) MSL_CONSTRUCT(ulong4)(__VA_ARGS__)
#define half2(...) MSL_CONSTRUCT(half2)(__VA_ARGS__)
#define half3(...) MSL_CONSTRUCT(half3)(__VA_ARGS__)
#define half4(...) MSL_CONSTRUCT(half4)(__VA_ARGS__)
#define float2(...) MSL_CONSTRUCT(float2)(__VA_ARGS__)
#define float3(...) MSL_CONSTRUCT(float3)(__VA_ARGS__)
#define float4(...) MSL_CONSTRUCT(float4)(__VA_ARGS__)
#define bfloat2(...) MSL_CONSTRUCT(bfloat2)(__VA_ARGS__)
#define bfloat3(...) MSL_CONSTRUCT(bfloat3)(__VA_ARGS__)
#define bfloat4(...) MSL_CONSTRUCT(bfloat4)(__VA_ARGS__)
