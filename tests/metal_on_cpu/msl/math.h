// Metal's math functions for float, half, bfloat and their vectors. 16-bit types are computed in
// float and rounded once. Functions of two operands want one type, as Metal does: max(x, 0) with an
// unsigned x is ambiguous there and an error here.
#pragma once

#include "types.h"

namespace metal {

template <typename T> inline constexpr bool is_real_v = is_floating_point_v<T>;
#define MSL_REAL typename T, typename = std::enable_if_t<is_real_v<T>>
#define MSL_SCALAR typename T, typename = std::enable_if_t<is_scalar_v<T>>

#define MSL_REAL1(NAME, EXPRESSION)                                                        \
  template <MSL_REAL> inline T NAME(T value) { const float x = float(value); return T(EXPRESSION); } \
  template <typename T, int N> inline vec<T, N> NAME(vec<T, N> v) {                        \
    for (int i = 0; i < N; ++i) v[i] = NAME(v[i]);                                         \
    return v;                                                                              \
  }
#define MSL_REAL2(NAME, EXPRESSION)                                                        \
  template <MSL_REAL> inline T NAME(T a, T b) {                                            \
    const float x = float(a), y = float(b);                                                \
    return T(EXPRESSION);                                                                  \
  }                                                                                        \
  template <typename T, int N> inline vec<T, N> NAME(vec<T, N> a, vec<T, N> b) {           \
    for (int i = 0; i < N; ++i) a[i] = NAME(a[i], b[i]);                                   \
    return a;                                                                              \
  }
#define MSL_FUNCTIONS                                                                      \
  MSL_REAL1(exp, __builtin_expf(x)) MSL_REAL1(exp2, __builtin_exp2f(x))                    \
  MSL_REAL1(exp10, __builtin_powf(10.0f, x)) MSL_REAL1(log, __builtin_logf(x))             \
  MSL_REAL1(log2, __builtin_log2f(x)) MSL_REAL1(log10, __builtin_log10f(x))                \
  MSL_REAL1(sqrt, __builtin_sqrtf(x)) MSL_REAL1(rsqrt, 1.0f / __builtin_sqrtf(x))          \
  MSL_REAL1(sin, __builtin_sinf(x)) MSL_REAL1(cos, __builtin_cosf(x))                      \
  MSL_REAL1(tan, __builtin_tanf(x)) MSL_REAL1(sinh, __builtin_sinhf(x))                    \
  MSL_REAL1(cosh, __builtin_coshf(x)) MSL_REAL1(tanh, __builtin_tanhf(x))                  \
  MSL_REAL1(asin, __builtin_asinf(x)) MSL_REAL1(acos, __builtin_acosf(x))                  \
  MSL_REAL1(atan, __builtin_atanf(x)) MSL_REAL1(asinh, __builtin_asinhf(x))                \
  MSL_REAL1(acosh, __builtin_acoshf(x)) MSL_REAL1(atanh, __builtin_atanhf(x))              \
  MSL_REAL1(floor, __builtin_floorf(x)) MSL_REAL1(ceil, __builtin_ceilf(x))                \
  MSL_REAL1(round, __builtin_roundf(x)) MSL_REAL1(rint, __builtin_rintf(x))                \
  MSL_REAL1(trunc, __builtin_truncf(x)) MSL_REAL1(fabs, __builtin_fabsf(x))                \
  MSL_REAL1(fract, x - __builtin_floorf(x))                                                \
  MSL_REAL1(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f)                                     \
  MSL_REAL2(pow, __builtin_powf(x, y)) MSL_REAL2(powr, __builtin_powf(x, y))               \
  MSL_REAL2(atan2, __builtin_atan2f(x, y)) MSL_REAL2(fmod, __builtin_fmodf(x, y))          \
  MSL_REAL2(copysign, __builtin_copysignf(x, y)) MSL_REAL2(fdim, __builtin_fdimf(x, y))    \
  MSL_REAL2(fmin, __builtin_fminf(x, y)) MSL_REAL2(fmax, __builtin_fmaxf(x, y))            \
  MSL_REAL2(divide, x / y)

MSL_FUNCTIONS
namespace fast { MSL_FUNCTIONS }
namespace precise { MSL_FUNCTIONS }
#undef MSL_FUNCTIONS
#undef MSL_REAL1
#undef MSL_REAL2

// The product of two 16-bit numbers is exact in double, so one rounding is left.
template <MSL_REAL> inline T fma(T a, T b, T c) {
  if constexpr (std::is_same_v<T, float>) return __builtin_fmaf(a, b, c);
  else return T(float(double(float(a)) * double(float(b)) + double(float(c))));
}
template <MSL_REAL> inline T ldexp(T x, int n) { return T(__builtin_ldexpf(float(x), n)); }
template <MSL_REAL> inline T mix(T a, T b, T by) { return T(float(a) + (float(b) - float(a)) * float(by)); }
template <MSL_REAL> inline T step(T edge, T x) { return x < edge ? T(0) : T(1); }
template <MSL_REAL> inline bool isnan(T x) { return float(x) != float(x); }
template <MSL_REAL> inline bool isinf(T x) { return __builtin_isinf(float(x)); }
template <MSL_REAL> inline bool isfinite(T x) { return __builtin_isfinite(float(x)); }
template <MSL_REAL> inline bool signbit(T x) { return __builtin_signbit(float(x)); }
template <MSL_REAL> inline T sincos(T x, T& cosine) { cosine = cos(x); return sin(x); }
template <MSL_REAL> inline T modf(T x, T& whole) { whole = trunc(x); return T(float(x) - float(whole)); }
template <MSL_REAL> inline T frexp(T x, int& exponent) { return T(__builtin_frexpf(float(x), &exponent)); }

template <MSL_SCALAR> constexpr T min(T a, T b) {  // a NaN loses, as in fmin
  if constexpr (is_real_v<T>) if (float(a) != float(a)) return b;
  return b < a ? b : a;
}
template <MSL_SCALAR> constexpr T max(T a, T b) {
  if constexpr (is_real_v<T>) if (float(a) != float(a)) return b;
  return a < b ? b : a;
}
template <MSL_SCALAR> constexpr T min3(T a, T b, T c) { return min(a, min(b, c)); }
template <MSL_SCALAR> constexpr T max3(T a, T b, T c) { return max(a, max(b, c)); }
template <MSL_SCALAR> constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <MSL_REAL> constexpr T saturate(T x) { return clamp(x, T(0), T(1)); }
template <MSL_SCALAR> constexpr T select(T no, T yes, bool choice) { return choice ? yes : no; }
template <MSL_SCALAR> constexpr T abs(T x) { return x < T(0) ? T(-x) : T(x); }
template <MSL_SCALAR> constexpr auto absdiff(T a, T b) { return std::make_unsigned_t<T>(a < b ? b - a : a - b); }

template <typename T> constexpr T popcount(T x) { return T(__builtin_popcountl(std::make_unsigned_t<T>(x))); }
template <typename T> constexpr T clz(T x) {
  constexpr int bits = 8 * sizeof(T);
  return T(x == 0 ? bits : __builtin_clzl(std::make_unsigned_t<T>(x)) - (64 - bits));
}
template <typename T> constexpr T ctz(T x) { return T(x == 0 ? 8 * sizeof(T) : __builtin_ctzl(x)); }
template <typename T> constexpr T reverse_bits(T x) {
  using U = std::make_unsigned_t<T>;
  U from = U(x), to = 0;
  for (size_t i = 0; i < 8 * sizeof(T); ++i, from = U(from >> 1)) to = U(to << 1 | (from & 1));
  return T(to);
}
template <typename T> constexpr T extract_bits(T x, uint offset, uint bits) {
  if (bits == 0) return T(0);
  const uint spare = 8 * sizeof(T) - bits;
  return T(T(std::make_unsigned_t<T>(x) << (spare - offset)) >> spare);
}
template <typename T> constexpr T insert_bits(T base, T insert, uint offset, uint bits) {
  using U = std::make_unsigned_t<T>;
  const U mask = U((bits >= 8 * sizeof(T) ? ~U(0) : U((U(1) << bits) - 1)) << offset);
  return T((U(base) & ~mask) | (U(U(insert) << offset) & mask));
}
template <typename T> constexpr T rotate(T x, T by) {
  using U = std::make_unsigned_t<T>;
  const uint bits = 8 * sizeof(T), n = uint(by) % bits;
  return n ? T(U(U(x) << n) | U(U(x) >> (bits - n))) : x;
}
template <typename T> constexpr T mulhi(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return T((Wide(a) * Wide(b)) >> (8 * sizeof(T)));
}

template <typename T, int N> inline vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  for (int i = 0; i < N; ++i) a[i] = fma(a[i], b[i], c[i]);
  return a;
}
template <typename T, int N> constexpr vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; ++i) a[i] = min(a[i], b[i]);
  return a;
}
template <typename T, int N> constexpr vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; ++i) a[i] = max(a[i], b[i]);
  return a;
}
template <typename T, int N> constexpr vec<T, N> clamp(vec<T, N> x, vec<T, N> low, vec<T, N> high) { return min(max(x, low), high); }
template <typename T, int N> constexpr vec<T, N> abs(vec<T, N> v) {
  for (int i = 0; i < N; ++i) v[i] = abs(v[i]);
  return v;
}
template <typename T, int N> constexpr vec<T, N> select(vec<T, N> no, vec<T, N> yes, vec<bool, N> choice) {
  for (int i = 0; i < N; ++i) no[i] = choice[i] ? yes[i] : no[i];
  return no;
}
template <typename T, int N> constexpr T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; ++i) sum += a[i] * b[i];
  return sum;
}
template <typename T, int N> inline T length(vec<T, N> v) { return sqrt(dot(v, v)); }
template <int N> constexpr bool any(vec<bool, N> v) { for (int i = 0; i < N; ++i) if (v[i]) return true; return false; }
template <int N> constexpr bool all(vec<bool, N> v) { for (int i = 0; i < N; ++i) if (!v[i]) return false; return true; }

#undef MSL_REAL
#undef MSL_SCALAR

}  // namespace metal

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_huge_valf()
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX metal::numeric_limits<half>::max()
#define M_PI_F 3.14159265358979323846f
#define M_LN2_F 0.69314718055994530942f
#define M_LOG2E_F 1.44269504088896340736f
#define M_SQRT2_F 1.41421356237309504880f
