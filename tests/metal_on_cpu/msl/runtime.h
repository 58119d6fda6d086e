// Shared by the two halves of the runtime: fibres.cpp (threads, barriers, simd operations) and
// memory.cpp (which bytes may be read and written, by whom).
#pragma once

#include "interface.h"

namespace msl {

enum Kind : uint32_t {
  BARRIER, SIMD, EXITED, LANE, UNIFORM, BOUNDS, UNINITIALISED, RACE, READ_ONLY, SHIFT, INDEX,
  DIVISION, GROUP_MEMORY, UNWRITTEN,
};

// A place in the program: an offset in the kernel's library, or a line where that is known already.
struct Place {
  uint64_t address = 0;
  uint32_t line = 0;
};

// One finding. "{0}" and "{1}" in the text stand for the places.
struct Report {
  uint32_t kind;
  uint32_t found;
  Place places[2];
  char text[1024];
};

struct Buffer {
  void* data;        // the caller's memory: lowest address
  uint64_t bytes;
  uint64_t offset;   // of the pointer that the kernel gets (negative strides)
  uint32_t element;  // bytes of one element
  uint32_t output;   // else read only
  uint32_t filled;   // an output that holds values before the launch
  const char* name;
};

struct Launch {
  void (*kernel)(void* const* buffers, const Position& at);  // its msl_thread
  const Buffer* buffers;
  uint32_t count;
  Triple grid, group;
  uint32_t allow;  // bit k: faults of kind k are not reported
};

// The running thread, as memory.cpp needs to know it.
struct Now {
  bool running;             // a kernel thread runs: accesses are checked
  uint32_t thread;          // in the group
  uint32_t group;           // linear index of the group
  const char *stack, *stack_end;
  // Barriers passed that order [0] device and [1] threadgroup memory (the bits of mem_flags).
  uint32_t epoch[2];
  uint32_t simd_epoch[2][32];
  uint32_t group_epoch;     // value of epoch[1] when the group began
};
extern Now now;
extern Launch launch;
constexpr unsigned MOST_THREADS = 1024;  // of a group
extern Exchange exchanges[MOST_THREADS / 32];  // of the latest simd operations; kernels read it

bool allowed(Kind kind);
// Record a finding (the first one counts) and leave the running thread for good.
[[noreturn]] void fault(Kind kind, Place first, Place second, const char* format, ...)
    __attribute__((format(printf, 4, 5)));
// Record a finding from outside any thread.
void record(Kind kind, Place first, Place second, const char* format, ...)
    __attribute__((format(printf, 4, 5)));

void* const* memory_begin();  // copies the buffers in; returns the pointers for the kernel
void memory_new_group();
void memory_end(bool good);   // looks for outputs left unwritten, copies outputs out, frees

}  // namespace msl
