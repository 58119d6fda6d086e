// Metal's scalar and vector types. half is the compiler's _Float16, rounded after every operation;
// bfloat is a struct that, as in Metal, is made from other types only by an explicit conversion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <source_location>
#include <type_traits>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef half float16_t;

struct bfloat {
  uint16_t bits;
  bfloat() = default;
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T> || std::is_same_v<T, half>>>
  constexpr explicit bfloat(T value) : bits(round(float(value))) {}
  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }

 private:
  static constexpr uint16_t round(float value) {
    const uint32_t x = __builtin_bit_cast(uint32_t, value);
    if ((x & 0x7fffffff) > 0x7f800000) return uint16_t(x >> 16 | 64);  // stays a NaN
    return uint16_t((x + 0x7fff + (x >> 16 & 1)) >> 16);
  }
};
typedef bfloat bfloat16_t;

// bfloat with bfloat or an integer stays bfloat; with float it becomes float by the conversion above.
// One float operation and one rounding give the correctly rounded bfloat.
#define MSL_INTEGER typename T, typename = std::enable_if_t<std::is_integral_v<T>>
#define MSL_BFLOAT(OP)                                                                              \
  constexpr bfloat operator OP(bfloat a, bfloat b) { return bfloat(float(a) OP float(b)); }         \
  template <MSL_INTEGER> constexpr bfloat operator OP(bfloat a, T b) { return a OP bfloat(b); }     \
  template <MSL_INTEGER> constexpr bfloat operator OP(T a, bfloat b) { return bfloat(a) OP b; }     \
  constexpr bfloat& operator OP##=(bfloat& a, bfloat b) { return a = a OP b; }                      \
  template <MSL_INTEGER> constexpr bfloat& operator OP##=(bfloat& a, T b) { return a = a OP b; }
MSL_BFLOAT(+) MSL_BFLOAT(-) MSL_BFLOAT(*) MSL_BFLOAT(/)
#undef MSL_BFLOAT
#undef MSL_INTEGER
constexpr bfloat operator-(bfloat a) { return bfloat(-float(a)); }
constexpr bfloat operator+(bfloat a) { return a; }
constexpr half operator""h(long double value) { return half(value); }
constexpr bfloat operator""bf(long double value) { return bfloat(float(value)); }

namespace metal {

template <typename T> inline constexpr bool is_scalar_v =
    std::is_arithmetic_v<T> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template <typename T> inline constexpr bool is_floating_point_v =
    std::is_same_v<std::remove_cv_t<T>, float> || std::is_same_v<std::remove_cv_t<T>, half> || std::is_same_v<std::remove_cv_t<T>, bfloat>;
template <typename T> struct is_floating_point : std::bool_constant<is_floating_point_v<T>> {};
using std::bool_constant, std::conditional, std::conditional_t, std::enable_if, std::enable_if_t,
    std::integral_constant, std::is_integral, std::is_integral_v, std::is_same, std::is_same_v,
    std::is_signed, std::is_signed_v, std::is_unsigned, std::is_unsigned_v, std::make_signed_t,
    std::make_unsigned_t, std::remove_cv_t, std::remove_reference_t;

template <typename T, int N> struct vec;

// Some elements of a vector, named as in v.xy. It lives in the vector's own memory.
template <typename T, int N, int... I> struct Swizzle {
  T all[N];
  constexpr operator vec<T, int(sizeof...(I))>() const { return {all[I]...}; }
  constexpr T operator[](size_t k) const { return vec<T, int(sizeof...(I))>(*this)[k]; }
  constexpr Swizzle& operator=(const vec<T, int(sizeof...(I))>& other) {
    int k = 0;
    ((all[I] = other[k++]), ...);
    return *this;
  }
};

template <typename T, int N> struct Elements;
template <typename T> struct Elements<T, 2> {
  union { T all[2]; struct { T x, y; }; struct { T r, g; }; Swizzle<T, 2, 0, 1> xy; Swizzle<T, 2, 1, 0> yx; };
};
template <typename T> struct alignas(4 * sizeof(T)) Elements<T, 3> {
  union { T all[3]; struct { T x, y, z; }; struct { T r, g, b; }; Swizzle<T, 3, 0, 1> xy; Swizzle<T, 3, 1, 2> yz; };
};
template <typename T> struct Elements<T, 4> {
  union {
    T all[4]; struct { T x, y, z, w; }; struct { T r, g, b, a; };
    Swizzle<T, 4, 0, 1> xy; Swizzle<T, 4, 2, 3> zw; Swizzle<T, 4, 0, 2> xz; Swizzle<T, 4, 1, 3> yw;
    Swizzle<T, 4, 1, 2> yz; Swizzle<T, 4, 0, 1, 2> xyz; Swizzle<T, 4, 1, 2, 3> yzw;
  };
};

template <typename T, int N> struct alignas((N == 3 ? 4 : N) * sizeof(T)) vec : Elements<T, N> {
  using Elements<T, N>::all;
  vec() = default;
  constexpr vec(T value) { for (int i = 0; i < N; ++i) all[i] = value; }
  template <typename S, typename = std::enable_if_t<is_scalar_v<S> && !std::is_same_v<S, T>>>
  constexpr vec(S value) : vec(T(value)) {}
  template <typename U> constexpr explicit vec(const vec<U, N>& other) {
    for (int i = 0; i < N; ++i) all[i] = T(other[i]);
  }
  template <typename A, typename B, typename... More> constexpr vec(A a, B b, More... more) {
    int filled = 0;
    append(filled, a), append(filled, b), (append(filled, more), ...);
  }
  constexpr T& operator[](size_t i) { return all[i]; }
  constexpr const T& operator[](size_t i) const { return all[i]; }

 private:
  template <typename S> constexpr void append(int& filled, const S& value) {
    if constexpr (is_scalar_v<S>) all[filled++] = T(value);
    else for (size_t i = 0; i < sizeof(value.all) / sizeof(value.all[0]); ++i) all[filled++] = T(value.all[i]);
  }
};

#define MSL_BINARY(OP, RESULT)                                                                        \
  template <typename T, int N> constexpr vec<RESULT, N> operator OP(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<RESULT, N> out;                                                                               \
    for (int i = 0; i < N; ++i) out[i] = RESULT(a[i] OP b[i]);                                        \
    return out;                                                                                       \
  }                                                                                                   \
  template <typename T, int N, typename S, typename = std::enable_if_t<is_scalar_v<S>>>               \
  constexpr vec<RESULT, N> operator OP(const vec<T, N>& a, S b) { return a OP vec<T, N>(T(b)); }       \
  template <typename T, int N, typename S, typename = std::enable_if_t<is_scalar_v<S>>>               \
  constexpr vec<RESULT, N> operator OP(S a, const vec<T, N>& b) { return vec<T, N>(T(a)) OP b; }
#define MSL_ARITHMETIC(OP)                                                                            \
  MSL_BINARY(OP, T)                                                                                   \
  template <typename T, int N> constexpr vec<T, N>& operator OP##=(vec<T, N>& a, const vec<T, N>& b) { return a = a OP b; } \
  template <typename T, int N, typename S, typename = std::enable_if_t<is_scalar_v<S>>>               \
  constexpr vec<T, N>& operator OP##=(vec<T, N>& a, S b) { return a = a OP b; }
MSL_ARITHMETIC(+) MSL_ARITHMETIC(-) MSL_ARITHMETIC(*) MSL_ARITHMETIC(/) MSL_ARITHMETIC(%)
MSL_ARITHMETIC(&) MSL_ARITHMETIC(|) MSL_ARITHMETIC(^) MSL_ARITHMETIC(<<) MSL_ARITHMETIC(>>)
MSL_BINARY(==, bool) MSL_BINARY(!=, bool) MSL_BINARY(<, bool) MSL_BINARY(<=, bool)
MSL_BINARY(>, bool) MSL_BINARY(>=, bool) MSL_BINARY(&&, bool) MSL_BINARY(||, bool)
#undef MSL_ARITHMETIC
#undef MSL_BINARY
#define MSL_UNARY(OP)                                                             \
  template <typename T, int N> constexpr vec<T, N> operator OP(const vec<T, N>& a) { \
    vec<T, N> out;                                                                \
    for (int i = 0; i < N; ++i) out[i] = T(OP a[i]);                              \
    return out;                                                                   \
  }
MSL_UNARY(-) MSL_UNARY(~) MSL_UNARY(!)
#undef MSL_UNARY

// Like the compiler's own limits, which do not know half and bfloat.
template <typename T> struct numeric_limits : std::numeric_limits<T> {};
#define MSL_LIMITS(TYPE, INFINITE, MOST, NORMAL, DIGITS)                             \
  template <> struct numeric_limits<TYPE> : std::numeric_limits<float> {             \
    static constexpr int digits = DIGITS;                                            \
    static constexpr TYPE of(uint16_t bits) { return __builtin_bit_cast(TYPE, bits); } \
    static constexpr TYPE infinity() { return of(INFINITE); }                        \
    static constexpr TYPE quiet_NaN() { return of(INFINITE | 1 << (DIGITS - 2)); }   \
    static constexpr TYPE max() { return of(MOST); }                                 \
    static constexpr TYPE lowest() { return of(0x8000 | MOST); }                     \
    static constexpr TYPE min() { return of(NORMAL); }                               \
    static constexpr TYPE epsilon() { return TYPE(1.0f / (1 << (DIGITS - 1))); }      \
  };
MSL_LIMITS(half, 0x7c00, 0x7bff, 0x0400, 11)
MSL_LIMITS(bfloat, 0x7f80, 0x7f7f, 0x0080, 8)
#undef MSL_LIMITS

}  // namespace metal

#define MSL_VECTORS(NAME, TYPE) \
  typedef metal::vec<TYPE, 2> NAME##2; typedef metal::vec<TYPE, 3> NAME##3; typedef metal::vec<TYPE, 4> NAME##4;
MSL_VECTORS(bool, bool) MSL_VECTORS(char, char) MSL_VECTORS(uchar, uchar) MSL_VECTORS(short, short)
MSL_VECTORS(ushort, ushort) MSL_VECTORS(int, int) MSL_VECTORS(uint, uint) MSL_VECTORS(long, long)
MSL_VECTORS(ulong, ulong) MSL_VECTORS(half, half) MSL_VECTORS(bfloat, bfloat) MSL_VECTORS(float, float)
#undef MSL_VECTORS

template <typename To, typename From> constexpr To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, value);
}
