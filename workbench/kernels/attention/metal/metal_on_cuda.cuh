// The part of Metal that the Metal kernels use, on CUDA. cuda.py puts it in front of them, removes the words device,
// constant, thread and threadgroup, and turns threadgroup arrays into __shared__ arrays.
//
// A warp is a simdgroup. simdgroup_matrix keeps Apple's layout of two elements per lane and multiplies by shuffles:
// correct, but far from the speed of a tensor core. All lanes of a warp take part in every operation below.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define METAL_FUNC __device__ __forceinline__
#define WARP 0xffffffffu

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define M_LOG2E_F 1.44269504088896340736f

#define threadgroup_position_in_grid blockIdx
#define thread_index_in_threadgroup threadIdx.x
#define thread_index_in_simdgroup (threadIdx.x % 32)
#define simdgroup_index_in_threadgroup (threadIdx.x / 32)
#define threadgroup_barrier(flags) __syncthreads()

typedef unsigned short ushort;

template <typename T, int N>
struct alignas(sizeof(T) * N) vec {
  T elements[N];
  vec() = default;
  METAL_FUNC explicit vec(T value) {
    for (int i = 0; i < N; i++) {
      elements[i] = value;
    }
  }
  METAL_FUNC T& operator[](int i) { return elements[i]; }
  METAL_FUNC const T& operator[](int i) const { return elements[i]; }
};

namespace fast {
METAL_FUNC float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
}  // namespace fast

METAL_FUNC float simd_shuffle(float value, ushort lane) { return __shfl_sync(WARP, value, lane); }
METAL_FUNC float simd_shuffle_xor(float value, ushort mask) { return __shfl_xor_sync(WARP, value, mask); }
METAL_FUNC bool simd_any(bool value) { return __any_sync(WARP, value) != 0; }

METAL_FUNC float simd_sum(float value) {
  for (int mask = 16; mask > 0; mask /= 2) {
    value += __shfl_xor_sync(WARP, value, mask);
  }
  return value;
}

METAL_FUNC int simd_max(int value) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const int other = __shfl_xor_sync(WARP, value, mask);
    value = other > value ? other : value;
  }
  return value;
}

METAL_FUNC int simd_min(int value) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const int other = __shfl_xor_sync(WARP, value, mask);
    value = other < value ? other : value;
  }
  return value;
}

struct simdgroup_float8x8 {
  float elements[2];
  METAL_FUNC float (&thread_elements())[2] { return elements; }
};

METAL_FUNC int matrix_row(int lane) { return ((lane & 16) >> 2) | ((lane & 6) >> 1); }
METAL_FUNC int matrix_column(int lane) { return ((lane & 8) >> 1) | ((lane & 1) << 1); }
METAL_FUNC int matrix_lane(int row, int column) {
  return ((row & 4) << 2) | ((row & 3) << 1) | ((column & 4) << 1) | ((column & 2) >> 1);
}

METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_float8x8& d, simdgroup_float8x8 a, simdgroup_float8x8 b,
                                              simdgroup_float8x8 c) {
  const int row = matrix_row(thread_index_in_simdgroup);
  const int column = matrix_column(thread_index_in_simdgroup);
  for (int k = 0; k < 8; k++) {
    const float even = simd_shuffle(a.elements[0], matrix_lane(row, k));
    const float odd = simd_shuffle(a.elements[1], matrix_lane(row, k));
    const float left = k % 2 == 0 ? even : odd;
    c.elements[0] += left * simd_shuffle(b.elements[0], matrix_lane(k, column));
    c.elements[1] += left * simd_shuffle(b.elements[1], matrix_lane(k, column));
  }
  d = c;
}

METAL_FUNC void simdgroup_load(simdgroup_float8x8& matrix, const float* from, int elements_per_row) {
  const int lane = thread_index_in_simdgroup;
  matrix.elements[0] = from[matrix_row(lane) * elements_per_row + matrix_column(lane)];
  matrix.elements[1] = from[matrix_row(lane) * elements_per_row + matrix_column(lane) + 1];
}

METAL_FUNC void simdgroup_store(simdgroup_float8x8 matrix, float* to, int elements_per_row) {
  const int lane = thread_index_in_simdgroup;
  to[matrix_row(lane) * elements_per_row + matrix_column(lane)] = matrix.elements[0];
  to[matrix_row(lane) * elements_per_row + matrix_column(lane) + 1] = matrix.elements[1];
}
