// Metal's types and functions for a second compile by clang: address spaces are real attributes, the
// dialect is C++14 as in Metal 3, and every function has Metal's own list of types, so that a call
// which is ambiguous there is ambiguous here. Nothing is defined: the text is checked and not run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define METAL_FUNC inline __attribute__((always_inline))
#define MLX_MTL_CONST static constexpr constant const
#define MLX_MTL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")
#define MLX_MTL_LOOP_UNROLL _Pragma("clang loop unroll(full)")

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;
typedef half float16_t;
typedef bfloat bfloat16_t;

namespace metal {

template <bool B> using bool_constant = std::integral_constant<bool, B>;
using std::conditional; using std::conditional_t; using std::enable_if;
using std::enable_if_t; using std::integral_constant; using std::is_integral; using std::is_same;
using std::is_signed; using std::is_unsigned; using std::make_signed_t; using std::make_unsigned_t;
using std::remove_cv_t; using std::remove_reference_t;
template <typename A, typename B> constexpr bool is_same_v = std::is_same<A, B>::value;
template <typename T> constexpr bool is_integral_v = std::is_integral<T>::value;
template <typename T> constexpr bool is_signed_v = std::is_signed<T>::value;
template <typename T> constexpr bool is_unsigned_v = std::is_unsigned<T>::value;
template <typename T> constexpr bool is_floating_point_v =
    std::is_same<T, float>::value || std::is_same<T, half>::value || std::is_same<T, bfloat>::value;
template <typename T> struct is_floating_point : std::integral_constant<bool, is_floating_point_v<T>> {};
template <typename T> struct numeric_limits : std::numeric_limits<T> {};
template <> struct numeric_limits<half> : std::numeric_limits<float> {
  static constexpr half infinity(); static constexpr half quiet_NaN(); static constexpr half max();
  static constexpr half lowest(); static constexpr half min(); static constexpr half epsilon();
};
template <> struct numeric_limits<bfloat> : std::numeric_limits<float> {
  static constexpr bfloat infinity(); static constexpr bfloat quiet_NaN(); static constexpr bfloat max();
  static constexpr bfloat lowest(); static constexpr bfloat min(); static constexpr bfloat epsilon();
};
template <typename T, int N> using vec = T __attribute__((ext_vector_type(N)));

#define MSL_OF_REALS(DO) DO(float) DO(half) DO(bfloat)
#define MSL_OF_INTEGERS(DO) DO(char) DO(uchar) DO(short) DO(ushort) DO(int) DO(uint) DO(long) DO(ulong)
#define MSL_REAL1(T) \
  T exp(T); T exp2(T); T exp10(T); T log(T); T log2(T); T log10(T); T sqrt(T); T rsqrt(T); T sin(T);  \
  T cos(T); T tan(T); T sinh(T); T cosh(T); T tanh(T); T asin(T); T acos(T); T atan(T); T asinh(T);   \
  T acosh(T); T atanh(T); T floor(T); T ceil(T); T round(T); T rint(T); T trunc(T); T fabs(T);        \
  T fract(T); T sign(T); T pow(T, T); T powr(T, T); T atan2(T, T); T fmod(T, T); T copysign(T, T);    \
  T fdim(T, T); T fmin(T, T); T fmax(T, T); T divide(T, T); T fma(T, T, T); T ldexp(T, int);          \
  T mix(T, T, T); T step(T, T); T saturate(T); bool isnan(T); bool isinf(T); bool isfinite(T);        \
  bool signbit(T); T sincos(T, T&); T modf(T, T&); T frexp(T, int&);
#define MSL_ANY(T) \
  T min(T, T); T max(T, T); T min3(T, T, T); T max3(T, T, T); T clamp(T, T, T); T abs(T); T select(T, T, bool);
#define MSL_INTEGER(T) \
  T popcount(T); T clz(T); T ctz(T); T reverse_bits(T); T extract_bits(T, uint, uint); T rotate(T, T);  \
  T insert_bits(T, T, uint, uint); T mulhi(T, T); std::make_unsigned_t<T> absdiff(T, T);
MSL_OF_REALS(MSL_REAL1) MSL_OF_REALS(MSL_ANY) MSL_OF_INTEGERS(MSL_ANY) MSL_OF_INTEGERS(MSL_INTEGER)
namespace fast { MSL_OF_REALS(MSL_REAL1) }
namespace precise { MSL_OF_REALS(MSL_REAL1) }

// Vectors: by the name alone, since clang deduces no lengths.
#define MSL_VECTOR1(NAME) template <typename V, typename = decltype(V().x)> V NAME(V);
#define MSL_VECTOR2(NAME) template <typename V, typename = decltype(V().x)> V NAME(V, V);
#define MSL_VECTOR3(NAME) template <typename V, typename = decltype(V().x)> V NAME(V, V, V);
MSL_VECTOR1(exp) MSL_VECTOR1(exp2) MSL_VECTOR1(log) MSL_VECTOR1(log2) MSL_VECTOR1(sqrt) MSL_VECTOR1(rsqrt)
MSL_VECTOR1(sin) MSL_VECTOR1(cos) MSL_VECTOR1(tanh) MSL_VECTOR1(floor) MSL_VECTOR1(ceil) MSL_VECTOR1(round)
MSL_VECTOR1(rint) MSL_VECTOR1(trunc) MSL_VECTOR1(fabs) MSL_VECTOR1(abs) MSL_VECTOR2(pow) MSL_VECTOR2(min)
MSL_VECTOR2(max) MSL_VECTOR3(clamp) MSL_VECTOR3(fma) MSL_VECTOR3(mix)
template <typename V> auto dot(V a, V b) -> decltype(a.x * b.x);
template <typename V> auto length(V v) -> decltype(v.x * v.x);
template <typename V> bool any(V);
template <typename V> bool all(V);
template <typename T, int N, typename... Parts> vec<T, N> msl_vector(Parts...);

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <typename T> T simd_sum(T); template <typename T> T simd_product(T); template <typename T> T simd_max(T);
template <typename T> T simd_min(T); template <typename T> T simd_and(T); template <typename T> T simd_or(T);
template <typename T> T simd_xor(T); template <typename T> T simd_broadcast_first(T);
template <typename T> T simd_prefix_inclusive_sum(T); template <typename T> T simd_prefix_exclusive_sum(T);
template <typename T> T simd_shuffle(T, ushort); template <typename T> T simd_broadcast(T, ushort);
template <typename T> T simd_shuffle_xor(T, ushort); template <typename T> T simd_shuffle_down(T, ushort);
template <typename T> T simd_shuffle_up(T, ushort); template <typename T> T simd_shuffle_rotate_down(T, ushort);
template <typename T> T simd_shuffle_rotate_up(T, ushort);
struct simd_vote { explicit operator ulong() const; bool all() const; bool any() const; };
simd_vote simd_ballot(bool);
bool simd_all(bool); bool simd_any(bool); bool simd_is_first();

enum memory_order { memory_order_relaxed };
template <typename T> struct atomic { T plain; };
typedef atomic<int> atomic_int; typedef atomic<uint> atomic_uint; typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
template <typename T> struct Same { typedef T type; };
template <typename T> using same_t = typename Same<T>::type;
#define MSL_ATOMIC1(NAME, SPACE) template <typename T> T NAME(SPACE atomic<T>*, same_t<T>, memory_order);
#define MSL_ATOMICS(SPACE)                                                                          \
  template <typename T> T atomic_load_explicit(const SPACE atomic<T>*, memory_order);               \
  template <typename T> void atomic_store_explicit(SPACE atomic<T>*, same_t<T>, memory_order);      \
  MSL_ATOMIC1(atomic_exchange_explicit, SPACE) MSL_ATOMIC1(atomic_fetch_add_explicit, SPACE)        \
  MSL_ATOMIC1(atomic_fetch_sub_explicit, SPACE) MSL_ATOMIC1(atomic_fetch_max_explicit, SPACE)       \
  MSL_ATOMIC1(atomic_fetch_min_explicit, SPACE) MSL_ATOMIC1(atomic_fetch_and_explicit, SPACE)       \
  MSL_ATOMIC1(atomic_fetch_or_explicit, SPACE) MSL_ATOMIC1(atomic_fetch_xor_explicit, SPACE)        \
  template <typename T> bool atomic_compare_exchange_weak_explicit(                                 \
      SPACE atomic<T>*, T*, same_t<T>, memory_order, memory_order);
MSL_ATOMICS(device) MSL_ATOMICS(threadgroup)

}  // namespace metal

#define MSL_VECTORS(NAME, TYPE) \
  typedef metal::vec<TYPE, 2> NAME##2; typedef metal::vec<TYPE, 3> NAME##3; typedef metal::vec<TYPE, 4> NAME##4;
MSL_VECTORS(bool, bool) MSL_VECTORS(char, char) MSL_VECTORS(uchar, uchar) MSL_VECTORS(short, short)
MSL_VECTORS(ushort, ushort) MSL_VECTORS(int, int) MSL_VECTORS(uint, uint) MSL_VECTORS(long, long)
MSL_VECTORS(ulong, ulong) MSL_VECTORS(half, half) MSL_VECTORS(bfloat, bfloat) MSL_VECTORS(float, float)

// clang builds its vectors by casts from one value only.
#define uint2(...) metal::msl_vector<uint, 2>(__VA_ARGS__)
#define uint3(...) metal::msl_vector<uint, 3>(__VA_ARGS__)
#define uint4(...) metal::msl_vector<uint, 4>(__VA_ARGS__)
#define int2(...) metal::msl_vector<int, 2>(__VA_ARGS__)
#define int3(...) metal::msl_vector<int, 3>(__VA_ARGS__)
#define int4(...) metal::msl_vector<int, 4>(__VA_ARGS__)
#define half2(...) metal::msl_vector<half, 2>(__VA_ARGS__)
#define half3(...) metal::msl_vector<half, 3>(__VA_ARGS__)
#define half4(...) metal::msl_vector<half, 4>(__VA_ARGS__)
#define float2(...) metal::msl_vector<float, 2>(__VA_ARGS__)
#define float3(...) metal::msl_vector<float, 3>(__VA_ARGS__)
#define float4(...) metal::msl_vector<float, 4>(__VA_ARGS__)

template <typename To, typename From> To as_type(From);
using namespace metal;

template <typename T, typename U> T ceildiv(T, U);
template <typename T> struct Limits { static const T max, min, finite_max, finite_min; };
template <typename I = int64_t> I elem_to_loc(I, const constant int*, const constant int64_t*, int);
template <typename I = int64_t> I elem_to_loc(uint3, const constant int*, const constant int64_t*, int);

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define M_PI_F 3.14159265358979323846f
#define M_LN2_F 0.69314718055994530942f
#define M_LOG2E_F 1.44269504088896340736f
#define M_SQRT2_F 1.41421356237309504880f
