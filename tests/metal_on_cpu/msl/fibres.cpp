// Runs a grid: one fibre for each thread of a group, one group after another, always in the same
// order. A thread runs until it ends or waits; those who wait go on when everyone is there.
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>

#include "runtime.h"

namespace msl {

Now now;
Launch launch;
Exchange exchanges[MOST_THREADS / 32];

namespace {

constexpr size_t STACK = 128 * 1024, GUARD = 4096;
enum class State : uint8_t { READY, BARRIER, SIMD, ENDED };

struct Fibre {
  jmp_buf place;
  ucontext_t start;
  bool started = false;
  State state = State::READY;
  const char* name = "";  // of the operation it waits in
  uint64_t site = 0;
  unsigned flags = 0, argument = 0;
  bool uniform = false;
  Position at;
};

Fibre fibres[MOST_THREADS];
alignas(16) unsigned char handed_in[MOST_THREADS][16];
char* stacks;
unsigned threads;        // of the running group
jmp_buf scheduler;
void* const* buffers;
Report report;

Place place_of(const Fibre& fibre) { return {0, uint32_t(fibre.site >> 12)}; }

void leave() {
  if (_setjmp(fibres[now.thread].place) == 0) _longjmp(scheduler, 1);
}

void fibre_main() {
  for (;;) {  // a fibre is used again for the next group
    Fibre& me = fibres[now.thread];
    launch.kernel(buffers, me.at);
    me.state = State::ENDED;
    leave();
  }
}

void resume(unsigned thread) {
  Fibre& fibre = fibres[thread];
  now.thread = thread;
  now.stack = stacks + thread * (STACK + GUARD) + GUARD;
  now.stack_end = now.stack + STACK;
  if (_setjmp(scheduler) == 0) {
    now.running = true;
    if (fibre.started) _longjmp(fibre.place, 1);
    fibre.started = true;
    getcontext(&fibre.start);
    fibre.start.uc_stack.ss_sp = const_cast<char*>(now.stack);
    fibre.start.uc_stack.ss_size = STACK;
    fibre.start.uc_link = nullptr;
    makecontext(&fibre.start, fibre_main, 0);
    setcontext(&fibre.start);
  }
  now.running = false;
}

// "0-7, 12" for the threads in [first, end) that satisfy `chosen`, counted from `first`.
template <typename Predicate>
std::string ranges(unsigned first, unsigned end, Predicate chosen) {
  std::string text;
  for (unsigned i = first; i < end; ++i) {
    if (!chosen(fibres[i])) continue;
    unsigned last = i;
    while (last + 1 < end && chosen(fibres[last + 1])) ++last;
    if (!text.empty()) text += ", ";
    text += std::to_string(i - first);
    if (last > i) text += "-" + std::to_string(last - first);
    i = last;
  }
  return text;
}

// The simdgroup [first, end) if some lane waits in a simd operation: let all go on, or record why not.
bool release_simdgroup(unsigned first, unsigned end) {
  const Fibre* one = nullptr;
  for (unsigned i = first; i < end && !one; ++i)
    if (fibres[i].state == State::SIMD) one = &fibres[i];
  if (!one) return false;

  auto same = [&](const Fibre& f) { return f.state == State::SIMD && f.site == one->site; };
  uint32_t present = 0;
  for (unsigned i = first; i < end; ++i) {
    const Fibre& fibre = fibres[i];
    if (same(fibre)) {
      present |= 1u << (i - first);
      if (one->uniform && fibre.argument != one->argument && !allowed(UNIFORM)) {
        record(UNIFORM, place_of(*one), {}, "%s at {0}: lanes of one simdgroup give different lane arguments (%u and %u)",
               one->name, one->argument, fibre.argument);
        return false;
      }
      continue;
    }
    const std::string there = ranges(first, end, same);
    if (fibre.state == State::ENDED) {
      if (allowed(EXITED)) continue;
      record(EXITED, place_of(*one), {}, "%s at {0} is reached by lanes %s of simdgroup %u; lanes %s have ended",
             one->name, there.c_str(), first / 32,
             ranges(first, end, [](const Fibre& f) { return f.state == State::ENDED; }).c_str());
    } else {
      record(SIMD, place_of(*one), place_of(fibre), "lanes %s of simdgroup %u wait in %s at {0}, lanes %s in %s at {1}",
             there.c_str(), first / 32, one->name,
             ranges(first, end, [&](const Fibre& f) { return f.state == fibre.state && f.site == fibre.site; }).c_str(),
             fibre.name);
    }
    return false;
  }
  Exchange& exchange = exchanges[first / 32];
  exchange.present = present;
  memcpy(exchange.value, handed_in[first], size_t(end - first) * 16);
  for (int memory = 0; memory < 2; ++memory)
    if (one->flags >> memory & 1) now.simd_epoch[memory][first / 32]++;
  for (unsigned i = first; i < end; ++i)
    if (fibres[i].state == State::SIMD) fibres[i].state = State::READY;
  return true;
}

// Nobody is ready and no simdgroup could go on: every thread must wait at one barrier.
bool release_barrier() {
  const Fibre* one = nullptr;
  for (unsigned i = 0; i < threads && !one; ++i)
    if (fibres[i].state == State::BARRIER) one = &fibres[i];
  auto same = [&](const Fibre& f) { return f.state == State::BARRIER && f.site == one->site; };
  for (unsigned i = 0; i < threads; ++i) {
    const Fibre& fibre = fibres[i];
    if (same(fibre)) continue;
    const std::string there = ranges(0, threads, same);
    if (fibre.state == State::ENDED)
      record(BARRIER, place_of(*one), {}, "the barrier at {0} is reached by threads %s of the group; threads %s have ended",
             there.c_str(), ranges(0, threads, [](const Fibre& f) { return f.state == State::ENDED; }).c_str());
    else
      record(BARRIER, place_of(*one), place_of(fibre), "threads %s of the group wait at the barrier at {0}, threads %s at the one at {1}",
             there.c_str(),
             ranges(0, threads, [&](const Fibre& f) { return f.state == State::BARRIER && f.site == fibre.site; }).c_str());
    return false;
  }
  for (int memory = 0; memory < 2; ++memory)
    if (one->flags >> memory & 1) now.epoch[memory]++;
  for (unsigned i = 0; i < threads; ++i) fibres[i].state = State::READY;
  return true;
}

bool run_group() {
  for (;;) {
    unsigned ended = 0;
    for (unsigned i = 0; i < threads; ++i) {
      if (fibres[i].state == State::READY) resume(i);
      if (report.found) return false;
      ended += fibres[i].state == State::ENDED;
    }
    if (ended == threads) return true;
    bool released = false;
    for (unsigned i = 0; i < threads; i += 32) {
      released |= release_simdgroup(i, i + 32 < threads ? i + 32 : threads);
      if (report.found) return false;
    }
    if (!released && !release_barrier()) return false;
  }
}

bool run_grid() {
  const Triple grid = launch.grid;
  auto least = [](uint32_t a, uint32_t b) { return a < b ? a : b; };
  const Triple size{least(launch.group.x, grid.x), least(launch.group.y, grid.y), least(launch.group.z, grid.z)};
  const Triple groups{(grid.x + size.x - 1) / size.x, (grid.y + size.y - 1) / size.y, (grid.z + size.z - 1) / size.z};
  now.group = 0;
  for (uint32_t z = 0; z < groups.z; ++z)
    for (uint32_t y = 0; y < groups.y; ++y)
      for (uint32_t x = 0; x < groups.x; ++x, ++now.group) {
        const Triple origin{x * size.x, y * size.y, z * size.z};
        const Triple actual{least(size.x, grid.x - origin.x), least(size.y, grid.y - origin.y), least(size.z, grid.z - origin.z)};
        threads = actual.x * actual.y * actual.z;
        for (unsigned i = 0; i < threads; ++i) {
          const Triple in{i % actual.x, i / actual.x % actual.y, i / (actual.x * actual.y)};
          fibres[i].state = State::READY;
          fibres[i].at = {{origin.x + in.x, origin.y + in.y, origin.z + in.z}, in, {x, y, z},
                          grid, groups, size, actual, i, i % 32, i / 32, (threads + 31) / 32,
                          (size.x * size.y * size.z + 31) / 32};
        }
        memory_new_group();
        if (!run_group()) return false;
      }
  return true;
}

void write_report(Kind kind, Place first, Place second, const char* format, va_list arguments) {
  if (report.found) return;
  report.found = 1;
  report.kind = kind;
  report.places[0] = first;
  report.places[1] = second;
  const int used = vsnprintf(report.text, sizeof report.text - 96, format, arguments);
  const Position& at = fibres[now.thread].at;
  if (used >= 0 && now.running)
    snprintf(report.text + strlen(report.text), 96, " (thread %u of group %u, %u, %u)", at.index, at.group.x, at.group.y, at.group.z);
  else if (used >= 0 && kind != UNWRITTEN)
    snprintf(report.text + strlen(report.text), 96, " (group %u, %u, %u)", at.group.x, at.group.y, at.group.z);
}

}  // namespace

bool allowed(Kind kind) { return launch.allow >> kind & 1; }

void record(Kind kind, Place first, Place second, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  write_report(kind, first, second, format, arguments);
  va_end(arguments);
}

void fault(Kind kind, Place first, Place second, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  write_report(kind, first, second, format, arguments);
  va_end(arguments);
  now.running = false;
  _longjmp(scheduler, 1);
}

}  // namespace msl

using namespace msl;

extern "C" {

void msl_barrier(unsigned flags, uint64_t site) {
  Fibre& me = fibres[now.thread];
  me.state = State::BARRIER;
  me.name = "threadgroup_barrier";
  me.site = site;
  me.flags = flags;
  leave();
}

const Exchange* msl_simd(const char* name, uint64_t site, const void* value, size_t size, unsigned argument, bool uniform) {
  Fibre& me = fibres[now.thread];
  me.state = State::SIMD;
  me.name = name;
  me.site = site;
  me.flags = 0;
  me.argument = argument;
  me.uniform = uniform;
  memcpy(handed_in[now.thread], value, size);
  leave();
  return &exchanges[now.thread / 32];
}

void msl_simd_barrier(unsigned flags, uint64_t site) {
  Fibre& me = fibres[now.thread];
  me.state = State::SIMD;
  me.name = "simdgroup_barrier";
  me.site = site;
  me.flags = flags;
  me.uniform = false;
  leave();
}

void msl_absent_lane(const char* name, uint64_t site, unsigned lane) {
  fault(LANE, {0, uint32_t(site >> 12)}, {}, "%s at {0} reads lane %u, which takes no part", name, lane);
}

unsigned msl_lane() { return now.thread % 32; }

// Returns nullptr if nothing was found.
const Report* msl_launch(const Launch* wanted) {
  launch = *wanted;
  if (!stacks) {
    stacks = static_cast<char*>(mmap(nullptr, MOST_THREADS * (STACK + GUARD), PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (unsigned i = 0; i < MOST_THREADS; ++i) mprotect(stacks + i * (STACK + GUARD), GUARD, PROT_NONE);
  }
  report.found = 0;
  buffers = memory_begin();
  const bool good = run_grid();
  if (!good)
    for (Fibre& fibre : fibres) fibre.started = false;  // some stand in the middle of the kernel
  memory_end(good);
  return report.found ? &report : nullptr;
}

}  // extern "C"
