// Metal's address spaces, scalar types and constants, spelled in C++ for OpenCL, which has the same address spaces.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define __METAL__ 1
#define __METAL_VERSION__ 310
#define __HAVE_BFLOAT__ 1
#define WORKBENCH_MSL_ON_CPU 1

#define device __global
#define threadgroup __local
#define thread __private

#define METAL_FUNC inline __attribute__((always_inline))
// Functions of this shim carry no debug information, so code inlined from them is attributed to the line of the kernel
// that called them. A fault report shows that line.
#define MSL_SHIM inline __attribute__((always_inline, nodebug))
// The call of the kernel reads the arguments itself; those reads are not the kernel's accesses.
#define MSL_NOT_CHECKED __attribute__((no_sanitize("thread")))
#define MSL_UNROLL _Pragma("clang loop unroll(full)")

#define NAN __builtin_nanf("")
#define INFINITY __builtin_inff()
#define HUGE_VALF __builtin_inff()
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.1920929e-7f
#define HALF_MAX 65504.0h
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_SQRT2_F 1.41421356237309504880f

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __bf16 bfloat;

// Functions of the runtime (runtime/*.cpp). `operation` is the name of the Metal function, for reports.
extern "C" {
void msl_threadgroup_barrier(int flags);
void msl_simdgroup_barrier(int flags);
uint msl_lane();
void msl_simd_uniform(__constant const char* operation);
void msl_simd_reduce(__constant const char* operation, int combine, int element_type, int bytes,
                     __private void* value);
void msl_simd_scan(__constant const char* operation, int combine, int element_type, int bytes,
                   int inclusive, __private void* value);
void msl_simd_exchange(__constant const char* operation, int bytes, __private void* value, uint source_lane);
ulong msl_simd_ballot(__constant const char* operation, int predicate);
void msl_simdgroup_multiply_accumulate(__private float* a_b_c);
__local void* msl_threadgroup_variable(int index, ulong bytes, ulong element_bytes, int element_type,
                                       __constant const char* name);
void msl_watch(__constant const char* name, int element_type, int bytes, __private const void* value);
uint msl_atomic_uint(size_t address, int operation, uint operand);
int msl_atomic_int(size_t address, int operation, int operand);
float msl_atomic_float(size_t address, int operation, float operand);
int msl_atomic_compare_exchange(size_t address, __private uint* expected, uint desired);
void msl_assert_failed(int line);
}

#define assert(condition) ((condition) ? (void)0 : msl_assert_failed(__LINE__))

template <class To, class From>
MSL_SHIM To as_type(From value) {
  return __builtin_bit_cast(To, value);
}
