// Barriers, operations among the 32 lanes of a simdgroup, atomics. The default argument `at` is
// evaluated where a kernel makes the call, so it names the line and column in the Metal text.
#pragma once

#include "interface.h"
#include "math.h"

#define MSL_AT std::source_location at = std::source_location::current()
#define MSL_SITE (uint64_t(at.line()) << 12 | (at.column() & 4095))

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

inline void threadgroup_barrier(mem_flags flags, MSL_AT) { msl_barrier(unsigned(flags), MSL_SITE); }
inline void simdgroup_barrier(mem_flags flags, MSL_AT) { msl_simd_barrier(unsigned(flags), MSL_SITE); }

// What all lanes handed in. `has` tells whether a lane took part.
template <typename T> struct Lanes {
  static_assert(sizeof(T) <= 16, "simd operations take scalars and vectors");
  const msl::Exchange* all;
  Lanes(const char* name, uint64_t site, T value, unsigned argument = 0, bool uniform = false)
      : all(msl_simd(name, site, &value, sizeof(T), argument, uniform)) {}
  bool has(unsigned lane) const { return lane < 32 && all->present >> lane & 1; }
  T operator[](unsigned lane) const {
    T value;
    __builtin_memcpy(&value, all->value[lane], sizeof(T));
    return value;
  }
  // Of a lane that must be there.
  T need(const char* name, uint64_t site, unsigned lane) const {
    if (!has(lane)) msl_absent_lane(name, site, lane);
    return (*this)[lane];
  }
};

// Pairs, then pairs of pairs: the tree that hardware uses, and the same for every run.
template <typename T, typename F> inline T reduce_lanes(const char* name, uint64_t site, T value, F combine) {
  const Lanes<T> lanes(name, site, value);
  T values[32];
  bool has[32];
  for (unsigned i = 0; i < 32; ++i) has[i] = lanes.has(i), values[i] = has[i] ? lanes[i] : value;
  for (unsigned step = 1; step < 32; step *= 2)
    for (unsigned i = 0; i < 32; i += 2 * step) {
      if (!has[i + step]) continue;
      values[i] = has[i] ? T(combine(values[i], values[i + step])) : values[i + step];
      has[i] = true;
    }
  return values[0];
}
#define MSL_REDUCE(NAME, EXPRESSION) \
  template <typename T> inline T NAME(T value, MSL_AT) { \
    return reduce_lanes(#NAME, MSL_SITE, value, [](T a, T b) { return EXPRESSION; }); \
  }
MSL_REDUCE(simd_sum, a + b) MSL_REDUCE(simd_product, a * b) MSL_REDUCE(simd_max, max(a, b))
MSL_REDUCE(simd_min, min(a, b)) MSL_REDUCE(simd_and, a & b) MSL_REDUCE(simd_or, a | b) MSL_REDUCE(simd_xor, a ^ b)
#undef MSL_REDUCE

template <typename T> inline T simd_shuffle(T value, ushort lane, MSL_AT) {
  return Lanes<T>("simd_shuffle", MSL_SITE, value).need("simd_shuffle", MSL_SITE, lane);
}
template <typename T> inline T simd_broadcast(T value, ushort lane, MSL_AT) {
  return Lanes<T>("simd_broadcast", MSL_SITE, value, lane, true).need("simd_broadcast", MSL_SITE, lane);
}
template <typename T> inline T simd_shuffle_xor(T value, ushort mask, MSL_AT) {
  return Lanes<T>("simd_shuffle_xor", MSL_SITE, value, mask, true).need("simd_shuffle_xor", MSL_SITE, msl_lane() ^ mask);
}
template <typename T> inline T simd_shuffle_down(T value, ushort delta, MSL_AT) {
  const Lanes<T> lanes("simd_shuffle_down", MSL_SITE, value, delta, true);
  const unsigned from = msl_lane() + delta;
  return lanes.has(from) ? lanes[from] : value;  // past the last lane: unchanged
}
template <typename T> inline T simd_shuffle_up(T value, ushort delta, MSL_AT) {
  const Lanes<T> lanes("simd_shuffle_up", MSL_SITE, value, delta, true);
  const unsigned from = msl_lane() - delta;
  return lanes.has(from) ? lanes[from] : value;
}
template <typename T> inline T simd_shuffle_rotate_down(T value, ushort delta, MSL_AT) {
  return Lanes<T>("simd_shuffle_rotate_down", MSL_SITE, value, delta, true).need("simd_shuffle_rotate_down", MSL_SITE, (msl_lane() + delta) % 32);
}
template <typename T> inline T simd_shuffle_rotate_up(T value, ushort delta, MSL_AT) {
  return Lanes<T>("simd_shuffle_rotate_up", MSL_SITE, value, delta, true).need("simd_shuffle_rotate_up", MSL_SITE, (msl_lane() - delta) % 32);
}
template <typename T> inline T simd_broadcast_first(T value, MSL_AT) {
  const Lanes<T> lanes("simd_broadcast_first", MSL_SITE, value);
  return lanes[unsigned(__builtin_ctz(lanes.all->present))];
}
template <typename T> inline T simd_prefix_inclusive_sum(T value, MSL_AT) {
  const Lanes<T> lanes("simd_prefix_inclusive_sum", MSL_SITE, value);
  T sum = T(0);
  for (unsigned i = 0; i <= msl_lane(); ++i) if (lanes.has(i)) sum = T(sum + lanes[i]);
  return sum;
}
template <typename T> inline T simd_prefix_exclusive_sum(T value, MSL_AT) {
  const Lanes<T> lanes("simd_prefix_exclusive_sum", MSL_SITE, value);
  T sum = T(0);
  for (unsigned i = 0; i < msl_lane(); ++i) if (lanes.has(i)) sum = T(sum + lanes[i]);
  return sum;
}

struct simd_vote {
  ulong votes, active;
  explicit operator ulong() const { return votes; }
  bool all() const { return votes == active; }
  bool any() const { return votes != 0; }
};
inline simd_vote msl_votes(const char* name, uint64_t site, bool mine) {
  const Lanes<bool> lanes(name, site, mine);
  simd_vote vote{0, lanes.all->present};
  for (unsigned i = 0; i < 32; ++i) vote.votes |= ulong(lanes.has(i) && lanes[i]) << i;
  return vote;
}
inline simd_vote simd_ballot(bool mine, MSL_AT) { return msl_votes("simd_ballot", MSL_SITE, mine); }
inline bool simd_all(bool mine, MSL_AT) { return msl_votes("simd_all", MSL_SITE, mine).all(); }
inline bool simd_any(bool mine, MSL_AT) { return msl_votes("simd_any", MSL_SITE, mine).any(); }
inline bool simd_is_first(MSL_AT) { return msl_lane() == unsigned(__builtin_ctzl(msl_votes("simd_is_first", MSL_SITE, true).active)); }

// Threads run one at a time, so plain operations are atomic; the runtime is told what they are.
enum memory_order { memory_order_relaxed };
template <typename T> struct atomic { T plain; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
template <typename T> struct Same { typedef T type; };
template <typename T> using same_t = typename Same<T>::type;

template <typename T, typename F>
__attribute__((no_sanitize("thread"))) inline T update_atomic(atomic<T>* object, unsigned kind, F change) {
  msl_atomic(object, sizeof(T), kind);
  const T old = object->plain;
  if (kind & msl::WRITE) object->plain = change(old);
  return old;
}
template <typename T> inline T atomic_load_explicit(const atomic<T>* object, memory_order) {
  return update_atomic(const_cast<atomic<T>*>(object), msl::READ, [](T old) { return old; });
}
template <typename T> inline void atomic_store_explicit(atomic<T>* object, same_t<T> value, memory_order) {
  update_atomic(object, msl::WRITE, [=](T) { return value; });
}
#define MSL_ATOMIC(NAME, EXPRESSION) \
  template <typename T> inline T NAME(atomic<T>* object, same_t<T> value, memory_order) { \
    return update_atomic(object, msl::READ | msl::WRITE, [=](T old) { return T(EXPRESSION); }); \
  }
MSL_ATOMIC(atomic_exchange_explicit, value) MSL_ATOMIC(atomic_fetch_add_explicit, old + value)
MSL_ATOMIC(atomic_fetch_sub_explicit, old - value) MSL_ATOMIC(atomic_fetch_max_explicit, max(old, value))
MSL_ATOMIC(atomic_fetch_min_explicit, min(old, value)) MSL_ATOMIC(atomic_fetch_and_explicit, old & value)
MSL_ATOMIC(atomic_fetch_or_explicit, old | value) MSL_ATOMIC(atomic_fetch_xor_explicit, old ^ value)
#undef MSL_ATOMIC
template <typename T>
inline bool atomic_compare_exchange_weak_explicit(atomic<T>* object, T* expected, same_t<T> wanted, memory_order, memory_order) {
  const T before = *expected;
  const T old = update_atomic(object, msl::READ | msl::WRITE, [=](T now) { return now == before ? wanted : now; });
  *expected = old;
  return old == before;
}

}  // namespace metal

#undef MSL_AT
#undef MSL_SITE
