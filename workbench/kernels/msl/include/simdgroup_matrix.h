// <metal_simdgroup_matrix>: 8x8 matrices spread over the 32 lanes of a simdgroup.
//
// Every lane holds two neighbouring elements of a row. Apple's specification does not say which; the map below is the
// one that MLX relies on (steel/gemm/mma.h, get_coord), with the bits of the lane number written b4 b3 b2 b1 b0:
//     row = b4 b2 b1      first column = b3 b0 0
#pragma once
#include "simd.h"

namespace metal {

struct matrix_position {
  uint row, column;
};
MSL_SHIM matrix_position position_of_lane(uint lane) {
  const uint quad = lane / 4;
  return matrix_position{(quad & 4) + (lane / 2) % 4, (quad & 2) * 2 + (lane % 2) * 2};
}

template <class T, int Columns, int Rows = Columns>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix is 8x8");
  static_assert(is_floating_point_v<T>, "simdgroup_matrix holds float, half or bfloat");
  vec<T, 2> elements;

  simdgroup_matrix() = default;
  __attribute__((nodebug)) explicit simdgroup_matrix(T diagonal) {
    const matrix_position at = position_of_lane(msl_lane());
    elements[0] = at.row == at.column ? diagonal : T(0);
    elements[1] = at.row == at.column + 1 ? diagonal : T(0);
  }
  __attribute__((nodebug, always_inline)) __private vec<T, 2>& thread_elements() __private { return elements; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8>;

template <class T, int Columns, int Rows = Columns>
MSL_SHIM simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> m;
  m.elements = value;
  return m;
}
template <class T, int Columns, int Rows = Columns>
MSL_SHIM simdgroup_matrix<T, Columns, Rows> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, Columns, Rows>(value);
}

// Indices of this lane's two elements in a matrix in memory.
struct matrix_indices {
  ulong first, second;
};
MSL_SHIM matrix_indices indices_of_lane(ulong elements_per_row, ulong2 origin, bool transpose) {
  const matrix_position at = position_of_lane(msl_lane());
  if (transpose) {
    const ulong first = (at.column + origin[0]) * elements_per_row + at.row + origin[1];
    return matrix_indices{first, first + elements_per_row};
  }
  const ulong first = (at.row + origin[1]) * elements_per_row + at.column + origin[0];
  return matrix_indices{first, first + 1};
}

#define MSL_MATRIX_MEMORY(space)                                                                               \
  template <class T, int C, int R>                                                                             \
  MSL_SHIM void simdgroup_load(__private simdgroup_matrix<T, C, R>& m, const space T* source,                  \
                               ulong elements_per_row = C, ulong2 origin = 0, bool transpose = false) {        \
    msl_simd_uniform("simdgroup_load");                                                                        \
    const matrix_indices at = indices_of_lane(elements_per_row, origin, transpose);                            \
    m.elements[0] = source[at.first];                                                                          \
    m.elements[1] = source[at.second];                                                                         \
  }                                                                                                            \
  template <class T, int C, int R>                                                                             \
  MSL_SHIM void simdgroup_store(simdgroup_matrix<T, C, R> m, space T* destination,                             \
                                ulong elements_per_row = C, ulong2 origin = 0, bool transpose = false) {       \
    msl_simd_uniform("simdgroup_store");                                                                       \
    const matrix_indices at = indices_of_lane(elements_per_row, origin, transpose);                            \
    destination[at.first] = m.elements[0];                                                                     \
    destination[at.second] = m.elements[1];                                                                    \
  }
MSL_MATRIX_MEMORY(__global)
MSL_MATRIX_MEMORY(__local)
#undef MSL_MATRIX_MEMORY

// d = a * b + c. Apple's compiler requires one element type for a and b.
template <class D, class AB, class C>
MSL_SHIM void simdgroup_multiply_accumulate(__private simdgroup_matrix<D, 8>& d, simdgroup_matrix<AB, 8> a,
                                            simdgroup_matrix<AB, 8> b, simdgroup_matrix<C, 8> c) {
  static_assert(is_same_v<D, C>, "the accumulator and the result have one element type");
  float a_b_c[6] = {(float)a.elements[0], (float)a.elements[1], (float)b.elements[0],
                    (float)b.elements[1], (float)c.elements[0], (float)c.elements[1]};
  msl_simdgroup_multiply_accumulate(a_b_c);
  d.elements[0] = (D)a_b_c[0];
  d.elements[1] = (D)a_b_c[1];
}
template <class D, class AB>
MSL_SHIM void simdgroup_multiply(__private simdgroup_matrix<D, 8>& d, simdgroup_matrix<AB, 8> a,
                                 simdgroup_matrix<AB, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8>(D(0)));
}

}  // namespace metal
