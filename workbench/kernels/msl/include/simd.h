// <metal_simdgroup>, <metal_quadgroup> and barriers. Simdgroups are 32 threads wide, as on every Apple GPU.
#pragma once
#include "atomic.h"
#include "math.h"

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
MSL_SHIM mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((int)a | (int)b); }
MSL_SHIM void threadgroup_barrier(mem_flags flags) { msl_threadgroup_barrier((int)flags); }
MSL_SHIM void simdgroup_barrier(mem_flags flags) { msl_simdgroup_barrier((int)flags); }

// Codes for the runtime (runtime/simd.cpp).
template <class T>
struct element_type;
#define MSL_ELEMENT_TYPE(T, code)                 \
  template <>                                     \
  struct element_type<T> {                        \
    static constexpr __constant int value = code; \
  };
MSL_ELEMENT_TYPE(float, 0)
MSL_ELEMENT_TYPE(half, 1)
MSL_ELEMENT_TYPE(bfloat, 2)
MSL_ELEMENT_TYPE(int, 3)
MSL_ELEMENT_TYPE(uint, 4)
MSL_ELEMENT_TYPE(short, 5)
MSL_ELEMENT_TYPE(ushort, 6)
MSL_ELEMENT_TYPE(char, 7)
MSL_ELEMENT_TYPE(signed char, 7)
MSL_ELEMENT_TYPE(uchar, 8)
#undef MSL_ELEMENT_TYPE
// The same for any type, with three more; 255 for a struct.
template <class T>
constexpr __constant int scalar_code = is_same_v<T, float>                              ? 0
                                       : is_same_v<T, half>                             ? 1
                                       : is_same_v<T, bfloat>                           ? 2
                                       : is_one_of<T, int, atomic<int>>                 ? 3
                                       : is_one_of<T, uint, atomic<uint>>               ? 4
                                       : is_same_v<T, short>                            ? 5
                                       : is_same_v<T, ushort>                           ? 6
                                       : is_one_of<T, char, signed char>                ? 7
                                       : is_same_v<T, uchar>                            ? 8
                                       : is_same_v<T, bool>                             ? 9
                                       : is_same_v<T, long>                             ? 10
                                       : is_same_v<T, ulong>                            ? 11
                                                                                        : 255;
template <class T>
constexpr __constant int type_code = scalar_code<typename components<remove_cv_t<T>>::type>;

// WATCH(x) adds the value of a scalar or vector to a recording. On a GPU, define it as nothing.
template <class T>
MSL_SHIM void watch_value(__constant const char* name, T value) {
  static_assert(type_code<T> != 255 && sizeof(T) <= 16, "WATCH takes a scalar or a vector");
  msl_watch(name, type_code<T>, sizeof(T), &value);
}
#define WATCH(x) metal::watch_value(#x, x)
enum { MSL_ADD, MSL_MAX, MSL_MIN, MSL_MULTIPLY, MSL_AND, MSL_OR, MSL_XOR };

// Apple GPUs exchange at most 32 bits per lane and component between lanes.
#define MSL_REQUIRE_32_BITS(T) \
  static_assert(sizeof(typename components<T>::type) <= 4, "simd functions take components of at most 32 bits")

#define MSL_REDUCTION(name, combine)                                                                   \
  template <class T>                                                                                   \
  MSL_SHIM T name(T x) {                                                                               \
    MSL_REQUIRE_32_BITS(T);                                                                            \
    using E = typename components<T>::type;                                                            \
    if constexpr (components<T>::count == 1) {                                                         \
      msl_simd_reduce(#name, combine, element_type<E>::value, sizeof(E), &x);                                     \
    } else {                                                                                           \
      MSL_UNROLL for (int i = 0; i < components<T>::count; i++) {                                      \
        E component = x[i];                                                                            \
        msl_simd_reduce(#name, combine, element_type<E>::value, sizeof(E), &component);                           \
        x[i] = component;                                                                              \
      }                                                                                                \
    }                                                                                                  \
    return x;                                                                                          \
  }
MSL_REDUCTION(simd_sum, MSL_ADD)
MSL_REDUCTION(simd_max, MSL_MAX)
MSL_REDUCTION(simd_min, MSL_MIN)
MSL_REDUCTION(simd_product, MSL_MULTIPLY)
MSL_REDUCTION(simd_and, MSL_AND)
MSL_REDUCTION(simd_or, MSL_OR)
MSL_REDUCTION(simd_xor, MSL_XOR)
#undef MSL_REDUCTION

#define MSL_SCAN(name, combine, inclusive)                               \
  template <class T>                                                     \
  MSL_SHIM T name(T x) {                                                 \
    MSL_REQUIRE_32_BITS(T);                                              \
    msl_simd_scan(#name, combine, element_type<T>::value, sizeof(T), inclusive, &x); \
    return x;                                                            \
  }
MSL_SCAN(simd_prefix_inclusive_sum, MSL_ADD, 1)
MSL_SCAN(simd_prefix_exclusive_sum, MSL_ADD, 0)
MSL_SCAN(simd_prefix_inclusive_product, MSL_MULTIPLY, 1)
MSL_SCAN(simd_prefix_exclusive_product, MSL_MULTIPLY, 0)
#undef MSL_SCAN

#define MSL_EXCHANGE(name, parameter, source)                  \
  template <class T>                                           \
  MSL_SHIM T name(T x, ushort parameter) {                     \
    MSL_REQUIRE_32_BITS(T);                                    \
    const uint lane = msl_lane();                              \
    (void)lane;                                                \
    msl_simd_exchange(#name, sizeof(T), &x, source);           \
    return x;                                                  \
  }
MSL_EXCHANGE(simd_shuffle, source_lane, source_lane)
MSL_EXCHANGE(simd_broadcast, source_lane, source_lane)
MSL_EXCHANGE(simd_shuffle_xor, mask, lane ^ mask)
MSL_EXCHANGE(simd_shuffle_down, delta, lane + delta < 32 ? lane + delta : lane)
MSL_EXCHANGE(simd_shuffle_up, delta, lane >= delta ? lane - delta : lane)
MSL_EXCHANGE(simd_shuffle_rotate_down, delta, (lane + delta) % 32)
MSL_EXCHANGE(simd_shuffle_rotate_up, delta, (lane + 32 - delta % 32) % 32)
MSL_EXCHANGE(quad_shuffle, source_lane, lane / 4 * 4 + source_lane)
MSL_EXCHANGE(quad_broadcast, source_lane, lane / 4 * 4 + source_lane)
MSL_EXCHANGE(quad_shuffle_xor, mask, lane ^ mask)
#undef MSL_EXCHANGE

template <class T>
MSL_SHIM T simd_shuffle_and_fill_up(T x, T fill, ushort delta) {
  const uint lane = msl_lane();
  const T shifted = simd_shuffle_rotate_up(x, delta);
  const T filled = simd_shuffle_rotate_up(fill, delta);
  return lane >= delta ? shifted : filled;
}
template <class T>
MSL_SHIM T simd_shuffle_and_fill_down(T x, T fill, ushort delta) {
  const uint lane = msl_lane();
  const T shifted = simd_shuffle_rotate_down(x, delta);
  const T filled = simd_shuffle_rotate_down(fill, delta);
  return lane + delta < 32 ? shifted : filled;
}

struct simd_vote {
  ulong mask;
  bool all() const { return mask == 0xffffffff; }
  bool any() const { return mask != 0; }
  explicit operator ulong() const { return mask; }
};
MSL_SHIM simd_vote simd_ballot(bool predicate) { return simd_vote{msl_simd_ballot("simd_ballot", predicate)}; }
MSL_SHIM simd_vote simd_active_threads_mask() { return simd_vote{msl_simd_ballot("simd_active_threads_mask", 1)}; }
MSL_SHIM bool simd_any(bool predicate) { return msl_simd_ballot("simd_any", predicate) != 0; }
MSL_SHIM bool simd_all(bool predicate) { return msl_simd_ballot("simd_all", !predicate) == 0; }
MSL_SHIM bool simd_is_first() { return msl_lane() == (uint)__builtin_ctzl(msl_simd_ballot("simd_is_first", 1)); }
template <class T>
MSL_SHIM T simd_broadcast_first(T x) {
  const ulong active = msl_simd_ballot("simd_broadcast_first", 1);
  return simd_shuffle(x, (ushort)__builtin_ctzl(active));
}

template <class T>
MSL_SHIM T quad_sum(T x) {
  x += quad_shuffle_xor(x, (ushort)1);
  return x + quad_shuffle_xor(x, (ushort)2);
}
template <class T>
MSL_SHIM T quad_max(T x) {
  x = max(x, quad_shuffle_xor(x, (ushort)1));
  return max(x, quad_shuffle_xor(x, (ushort)2));
}
template <class T>
MSL_SHIM T quad_min(T x) {
  x = min(x, quad_shuffle_xor(x, (ushort)1));
  return min(x, quad_shuffle_xor(x, (ushort)2));
}

}  // namespace metal
