// The part that kernels rely on of the text that MLX puts in front of every custom kernel (metal::utils()).
#pragma once
#include "atomic.h"
#include "simdgroup_matrix.h"

using namespace metal;

typedef half float16_t;
typedef bfloat bfloat16_t;

#define MLX_MTL_CONST static constant constexpr const
#define MLX_MTL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")

template <typename U>
struct Limits {
  static constexpr constant U max = metal::numeric_limits<U>::max();
  static constexpr constant U min = metal::numeric_limits<U>::min();
  static constexpr constant U finite_max = metal::numeric_limits<U>::max();
  static constexpr constant U finite_min = metal::numeric_limits<U>::min();
};
#define MSL_FLOAT_LIMITS(T)                                                     \
  template <>                                                                   \
  struct Limits<T> {                                                            \
    static constexpr constant T max = metal::numeric_limits<T>::infinity();     \
    static constexpr constant T min = -metal::numeric_limits<T>::infinity();    \
    static constexpr constant T finite_max = metal::numeric_limits<T>::max();   \
    static constexpr constant T finite_min = metal::numeric_limits<T>::lowest(); \
  };
MSL_FLOAT_LIMITS(float)
MSL_FLOAT_LIMITS(half)
MSL_FLOAT_LIMITS(bfloat)
#undef MSL_FLOAT_LIMITS

// Offset in an array with strides of the element with a given row-major index.
template <typename IdxT = int64_t>
MSL_SHIM IdxT elem_to_loc(IdxT elem, constant const int* shape, constant const int64_t* strides, int ndim) {
  IdxT offset = 0;
  for (int axis = ndim - 1; axis >= 0 && elem > 0; --axis) {
    offset += (elem % shape[axis]) * IdxT(strides[axis]);
    elem /= shape[axis];
  }
  return offset;
}

template <typename T, typename U>
MSL_SHIM T ceildiv(T numerator, U denominator) {
  return (numerator + denominator - 1) / denominator;
}
