// <metal_type_traits> and <metal_limits>: the part that compute kernels use.
#pragma once
#include "base.h"

namespace metal {

template <class T, T v>
struct integral_constant {
  static constexpr __constant T value = v;
  using value_type = T;
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
constexpr __constant bool is_same_v = is_same<A, B>::value;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class Yes, class No>
struct conditional {
  using type = Yes;
};
template <class Yes, class No>
struct conditional<false, Yes, No> {
  using type = No;
};
template <bool B, class Yes, class No>
using conditional_t = typename conditional<B, Yes, No>::type;

template <class T>
struct remove_cv {
  using type = T;
};
template <class T>
struct remove_cv<const T> {
  using type = T;
};
template <class T>
struct remove_cv<volatile T> {
  using type = T;
};
template <class T>
using remove_cv_t = typename remove_cv<T>::type;

template <class T, class... Ts>
constexpr __constant bool is_one_of = (is_same_v<T, Ts> || ...);

template <class From, class To>
constexpr __constant bool is_convertible_v = __is_convertible_to(From, To);
template <class T>
constexpr __constant bool is_floating_point_v = is_one_of<T, float, half, bfloat>;
template <class T>
constexpr __constant bool is_integral_v =
    is_one_of<T, bool, char, signed char, uchar, short, ushort, int, uint, long, ulong>;
template <class T>
constexpr __constant bool is_arithmetic_v = is_floating_point_v<T> || is_integral_v<T>;
template <class T>
constexpr __constant bool is_signed_v = T(-1) < T(0);
template <class T>
constexpr __constant bool is_unsigned_v = is_integral_v<T> && !is_signed_v<T>;

template <class T>
struct numeric_limits;

#define MSL_FLOAT_LIMITS(T, largest, smallest, step)                        \
  template <>                                                               \
  struct numeric_limits<T> {                                                \
    static constexpr T max() { return (T)(largest); }                       \
    static constexpr T lowest() { return (T)(-(largest)); }                 \
    static constexpr T min() { return (T)(smallest); }                      \
    static constexpr T epsilon() { return (T)(step); }                      \
    static constexpr T infinity() { return (T)__builtin_inff(); }           \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); }        \
  };
MSL_FLOAT_LIMITS(float, FLT_MAX, FLT_MIN, FLT_EPSILON)
MSL_FLOAT_LIMITS(half, 65504.0f, 6.103515625e-5f, 0.0009765625f)
MSL_FLOAT_LIMITS(bfloat, 3.38953139e38f, FLT_MIN, 0.0078125f)
#undef MSL_FLOAT_LIMITS

#define MSL_INTEGER_LIMITS(T, low, high)            \
  template <>                                       \
  struct numeric_limits<T> {                        \
    static constexpr T max() { return (T)(high); }  \
    static constexpr T lowest() { return (T)(low); } \
    static constexpr T min() { return (T)(low); }   \
  };
MSL_INTEGER_LIMITS(bool, 0, 1)
MSL_INTEGER_LIMITS(char, -128, 127)
MSL_INTEGER_LIMITS(signed char, -128, 127)
MSL_INTEGER_LIMITS(uchar, 0, 255)
MSL_INTEGER_LIMITS(short, -32768, 32767)
MSL_INTEGER_LIMITS(ushort, 0, 65535)
MSL_INTEGER_LIMITS(int, INT_MIN, INT_MAX)
MSL_INTEGER_LIMITS(uint, 0, UINT_MAX)
MSL_INTEGER_LIMITS(long, -9223372036854775807l - 1, 9223372036854775807l)
MSL_INTEGER_LIMITS(ulong, 0, 18446744073709551615ul)
#undef MSL_INTEGER_LIMITS

}  // namespace metal
