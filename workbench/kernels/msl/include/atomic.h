// <metal_atomic>: 32-bit atomics with relaxed order, the only order Metal has for device and threadgroup memory.
#pragma once
#include "base.h"

namespace metal {

enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  static_assert(sizeof(T) == 4, "atomic<T> takes int, uint or float");
  T value;
};
// OpenCL has types of these names, so Metal's types have other names here.
#define atomic_int metal_atomic_int
#define atomic_uint metal_atomic_uint
#define atomic_float metal_atomic_float
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;

enum {  // codes for the runtime (runtime/hooks.cpp)
  MSL_ATOMIC_LOAD,
  MSL_ATOMIC_STORE,
  MSL_ATOMIC_ADD,
  MSL_ATOMIC_SUB,
  MSL_ATOMIC_MAX,
  MSL_ATOMIC_MIN,
  MSL_ATOMIC_AND,
  MSL_ATOMIC_OR,
  MSL_ATOMIC_XOR,
  MSL_ATOMIC_EXCHANGE
};
MSL_SHIM uint run_atomic(size_t at, int operation, uint operand) { return msl_atomic_uint(at, operation, operand); }
MSL_SHIM int run_atomic(size_t at, int operation, int operand) { return msl_atomic_int(at, operation, operand); }
MSL_SHIM float run_atomic(size_t at, int operation, float operand) { return msl_atomic_float(at, operation, operand); }

#define MSL_ATOMIC(space, name, operation)                                                   \
  template <class T, class V>                                                                \
  MSL_SHIM T name(volatile space atomic<T>* object, V operand, memory_order) {               \
    return run_atomic((size_t)object, operation, (T)operand);                                \
  }
#define MSL_ATOMICS(space)                                                                                   \
  MSL_ATOMIC(space, atomic_fetch_add_explicit, MSL_ATOMIC_ADD)                                               \
  MSL_ATOMIC(space, atomic_fetch_sub_explicit, MSL_ATOMIC_SUB)                                               \
  MSL_ATOMIC(space, atomic_fetch_max_explicit, MSL_ATOMIC_MAX)                                               \
  MSL_ATOMIC(space, atomic_fetch_min_explicit, MSL_ATOMIC_MIN)                                               \
  MSL_ATOMIC(space, atomic_fetch_and_explicit, MSL_ATOMIC_AND)                                               \
  MSL_ATOMIC(space, atomic_fetch_or_explicit, MSL_ATOMIC_OR)                                                 \
  MSL_ATOMIC(space, atomic_fetch_xor_explicit, MSL_ATOMIC_XOR)                                               \
  MSL_ATOMIC(space, atomic_exchange_explicit, MSL_ATOMIC_EXCHANGE)                                           \
  template <class T, class V>                                                                                \
  MSL_SHIM void atomic_store_explicit(volatile space atomic<T>* object, V operand, memory_order) {           \
    run_atomic((size_t)object, MSL_ATOMIC_STORE, (T)operand);                                                \
  }                                                                                                          \
  template <class T>                                                                                         \
  MSL_SHIM T atomic_load_explicit(const volatile space atomic<T>* object, memory_order) {                    \
    return run_atomic((size_t)object, MSL_ATOMIC_LOAD, T(0));                                                \
  }                                                                                                          \
  template <class T, class V>                                                                                \
  MSL_SHIM bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>* object, __private T* expected, \
                                                      V desired, memory_order, memory_order) {               \
    uint expected_bits = __builtin_bit_cast(uint, *expected);                                                \
    const bool exchanged =                                                                                   \
        msl_atomic_compare_exchange((size_t)object, &expected_bits, __builtin_bit_cast(uint, (T)desired));   \
    *expected = __builtin_bit_cast(T, expected_bits);                                                        \
    return exchanged;                                                                                        \
  }
MSL_ATOMICS(__global)
MSL_ATOMICS(__local)
#undef MSL_ATOMICS
#undef MSL_ATOMIC

}  // namespace metal
