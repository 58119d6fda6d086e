// What a compiled kernel asks of the runtime. The runtime is compiled without instrumentation,
// kernels with it, so nothing but these functions may be shared between the two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace msl {

struct Triple {
  uint32_t x, y, z;
};

// Where one thread of the grid stands.
struct Position {
  Triple in_grid, in_group, group;        // of the thread; of its group among the groups
  Triple grid, groups, nominal, actual;   // sizes; a group at the edge may be smaller than asked
  uint32_t index, lane, simdgroup, simdgroups, nominal_simdgroups;
};

// What the 32 lanes of a simdgroup handed in at one simd operation.
struct Exchange {
  uint32_t present;  // bit i: lane i took part
  alignas(16) unsigned char value[32][16];
};

enum : unsigned { READ = 1, WRITE = 2, ATOMIC = 4 };  // kinds of access, added up

}  // namespace msl

extern "C" {
// A site is line << 12 | column of the call in the Metal text.
void msl_barrier(unsigned flags, uint64_t site);
void msl_simd_barrier(unsigned flags, uint64_t site);
// `argument` must be the same in all lanes if `uniform` is set. Valid until the lane's next operation.
const msl::Exchange* msl_simd(const char* name, uint64_t site, const void* value, size_t size,
                              unsigned argument, bool uniform);
[[noreturn]] void msl_absent_lane(const char* name, uint64_t site, unsigned lane);
void* msl_threadgroup_array(unsigned number, size_t bytes, size_t element, const char* name);
void msl_atomic(const void* address, size_t size, unsigned kind);
unsigned msl_lane();
// The compiled kernel, for one thread. `buffers` are in the order of the buffer indices.
void msl_thread(void* const* buffers, const msl::Position& at);
}
