// Every access of a kernel to memory is announced here before it happens: the kernel is compiled
// with -fsanitize=thread, whose calls end in this file instead of in the compiler's own library.
// Each element has a shadow cell that says who read and wrote it last, and after which barriers.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <link.h>
#include <sys/mman.h>
#include <vector>

#include "runtime.h"

namespace msl {
namespace {

constexpr size_t GAP = 1 << 20;             // unmapped meaning between two regions
constexpr size_t GROUP_LIMIT = 32 * 1024;   // threadgroup memory that every Apple GPU has
constexpr unsigned MOST_ARRAYS = 64;
enum { DEVICE = 0, GROUP = 1 };

struct Access {
  uint32_t epoch, simd_epoch, group;  // epoch 0: never
  uint16_t thread;
  uint8_t atomic;
  uint8_t several;  // 1: other threads of the simdgroup too, 2: of the group, 3: of other groups
  uint32_t code;    // where, as an offset in the library of the kernel
};

struct Cell {
  Access written, read;
};

struct Region {
  char *begin, *end;
  uint32_t element;
  uint32_t grain;  // bytes that one cell stands for
  int memory;
  bool writable, filled;
  const char* name;
  Cell* cells;
};

std::vector<Region> buffers, arrays;  // arrays by their number
std::vector<void*> pointers;
Region* latest;
char *arena, *group_arena, *group_next;
size_t arena_size, group_used;
uintptr_t module_begin, module_end;  // the library of the kernel

void find_module() {
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void*) {
        uintptr_t low = ~uintptr_t(0), high = 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
          const uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
          low = begin < low ? begin : low;
          high = begin + info->dlpi_phdr[i].p_memsz > high ? begin + info->dlpi_phdr[i].p_memsz : high;
        }
        const uintptr_t here = reinterpret_cast<uintptr_t>(launch.kernel);
        if (here < low || here >= high) return 0;
        module_begin = low;
        module_end = high;
        return 1;
      },
      nullptr);
}

Place place_of(uintptr_t code) { return {code - module_begin, 0}; }

Region* find(const char* address) {
  if (latest && address >= latest->begin && address < latest->end) return latest;
  for (auto* list : {&buffers, &arrays})
    for (Region& region : *list)
      if (address >= region.begin && address < region.end) return latest = &region;
  return nullptr;
}

long element_at(const Region& region, const char* address) {
  const long distance = address - region.begin, size = region.element;
  return distance >= 0 ? distance / size : -((-distance + size - 1) / size);
}

[[noreturn]] void out_of_bounds(const char* address, size_t size, const char* verb, uintptr_t code) {
  for (auto* list : {&buffers, &arrays})
    for (const Region& region : *list) {
      if (!region.begin || address + GAP / 2 < region.begin || address > region.end + GAP / 2) continue;
      fault(BOUNDS, place_of(code), {}, "{0} %s %zu bytes at `%s`[%ld], which has %zu elements of %u bytes",
            verb, size, region.name, element_at(region, address),
            size_t(region.end - region.begin) / region.element, region.element);
    }
  fault(BOUNDS, place_of(code), {}, "{0} %s %zu bytes at %p, which belongs to no buffer or array", verb, size, address);
}

// One cell a byte from now on: an access was smaller than an element or not aligned to it.
void refine(Region& region) {
  const size_t bytes = region.end - region.begin;
  Cell* cells = static_cast<Cell*>(calloc(bytes + 1, sizeof(Cell)));
  for (size_t i = 0; i < bytes; ++i) cells[i] = region.cells[i / region.grain];
  free(region.cells);
  region.cells = cells;
  region.grain = 1;
}

// Is there an access in `past` by another thread that no barrier separates from the running one?
// 0: no; else as in Access::several.
uint8_t overlap(const Access& past, int memory) {
  if (!past.epoch) return 0;
  if (memory == DEVICE && (past.several == 3 || past.group != now.group)) return 3;
  if (past.epoch < now.epoch[memory]) return 0;
  if (past.several == 2) return 2;
  const unsigned simdgroup = now.thread / 32;
  if (past.thread / 32u != simdgroup) return 2;
  if (past.simd_epoch < now.simd_epoch[memory][simdgroup]) return 0;
  return past.several || past.thread != now.thread;
}

void note(Access& past, int memory, uint8_t several, bool atomic, uintptr_t code) {
  const unsigned simdgroup = now.thread / 32;
  const uint32_t epoch = now.epoch[memory], simd_epoch = now.simd_epoch[memory][simdgroup];
  const bool stale = past.epoch < epoch || (past.thread / 32u == simdgroup && past.simd_epoch < simd_epoch);
  past.atomic = atomic && (stale || past.atomic);
  past.epoch = epoch;
  past.simd_epoch = simd_epoch;
  past.group = now.group;
  past.thread = uint16_t(now.thread);
  past.several = several;
  past.code = uint32_t(code - module_begin);
}

[[noreturn]] void race(const Region& region, const char* address, const Access& other, const char* verb,
                       const char* other_verb, uintptr_t code) {
  char who[64];
  if (other.group != now.group) snprintf(who, sizeof who, "thread %u of another group", other.thread);
  else if (other.thread == now.thread) snprintf(who, sizeof who, "another thread");
  else snprintf(who, sizeof who, "thread %u", other.thread);
  fault(RACE, place_of(code), {other.code, 0}, "{0} %s `%s`[%ld], which %s %s at {1} with no barrier between",
        verb, region.name, element_at(region, address), who, other_verb);
}

void check(Region& region, const char* address, size_t size, unsigned kind, uintptr_t code) {
  const size_t offset = address - region.begin;
  if (region.grain > 1 && (offset % region.grain || size % region.grain)) refine(region);
  const int memory = region.memory;
  const bool atomic = kind & ATOMIC;
  const size_t last = (offset + size - 1) / region.grain;
  for (size_t i = offset / region.grain; i <= last; ++i) {
    Cell& cell = region.cells[i];
    const char* here = region.begin + i * region.grain;
    if (kind & READ && !region.filled && cell.written.epoch < (memory == GROUP ? now.group_epoch : 1) && !allowed(UNINITIALISED))
      fault(UNINITIALISED, place_of(code), {}, "{0} reads `%s`[%ld], which nobody has written so far", region.name, element_at(region, here));
    const uint8_t writers = overlap(cell.written, memory);
    if (writers && !(atomic && cell.written.atomic) && !allowed(RACE))
      race(region, here, cell.written, kind & WRITE ? "writes" : "reads", "wrote", code);
    if (kind & WRITE) {
      if (overlap(cell.read, memory) && !(atomic && cell.read.atomic) && !allowed(RACE))
        race(region, here, cell.read, "writes", "read", code);
      note(cell.written, memory, writers, atomic, code);
    } else {
      note(cell.read, memory, overlap(cell.read, memory), atomic, code);
    }
  }
}

void access(const void* pointer, size_t size, unsigned kind, const void* return_address) {
  const char* address = static_cast<const char*>(pointer);
  if (!now.running || (address >= now.stack && address + size <= now.stack_end)) return;
  const uintptr_t code = reinterpret_cast<uintptr_t>(return_address) - 1;
  const char* verb = kind & WRITE ? "writes" : "reads";
  Region* region = find(address);
  if (!region) {
    if (address >= reinterpret_cast<char*>(exchanges) && address < reinterpret_cast<char*>(exchanges + MOST_THREADS / 32)) return;
    const uintptr_t number = reinterpret_cast<uintptr_t>(address);
    if (number < module_begin || number >= module_end) out_of_bounds(address, size, verb, code);
    if (kind & WRITE) fault(READ_ONLY, place_of(code), {}, "{0} writes a variable outside the kernel");
    return;
  }
  if (address + size > region->end) out_of_bounds(address, size, verb, code);
  if (kind & WRITE && !region->writable) fault(READ_ONLY, place_of(code), {}, "{0} writes the input `%s`", region->name);
  if (region->cells) check(*region, address, size, kind, code);
}

Region new_region(char* begin, size_t bytes, uint32_t element, int memory, const char* name) {
  Region region{begin, begin + bytes, element, element, memory, true, false, name, nullptr};
  region.cells = static_cast<Cell*>(calloc(bytes / element + 1, sizeof(Cell)));
  return region;
}

}  // namespace

void* const* memory_begin() {
  find_module();
  arena_size = GAP + MOST_ARRAYS * GAP + GROUP_LIMIT;
  for (uint32_t i = 0; i < launch.count; ++i) arena_size += (launch.buffers[i].bytes + 4096) / 4096 * 4096 + GAP;
  arena = static_cast<char*>(mmap(nullptr, arena_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  char* next = arena + GAP;
  for (uint32_t i = 0; i < launch.count; ++i) {
    const Buffer& buffer = launch.buffers[i];
    Region region{next, next + buffer.bytes, buffer.element, buffer.element, DEVICE, false, true, buffer.name, nullptr};
    if (buffer.output) region = new_region(next, buffer.bytes, buffer.element, DEVICE, buffer.name);
    region.filled = !buffer.output || buffer.filled;
    memcpy(next, buffer.data, buffer.bytes);
    buffers.push_back(region);
    pointers.push_back(next + buffer.offset);
    next += (buffer.bytes + 4096) / 4096 * 4096 + GAP;
  }
  group_arena = group_next = next;
  group_used = 0;
  arrays.resize(MOST_ARRAYS);
  latest = nullptr;
  memset(&now, 0, sizeof now);
  now.epoch[DEVICE] = now.epoch[GROUP] = 1;
  return pointers.data();
}

void memory_new_group() {
  now.group_epoch = ++now.epoch[GROUP];
  for (Region& region : arrays)
    if (region.begin) memset(region.begin, 0xCD, region.end - region.begin);
}

void memory_end(bool good) {
  for (uint32_t i = 0; i < buffers.size(); ++i) {
    const Region& region = buffers[i];
    if (!launch.buffers[i].output) continue;
    const size_t cells = size_t(region.end - region.begin) / region.grain;
    size_t missing = 0, first = 0;
    for (size_t cell = 0; cell < cells && !region.filled; ++cell)
      if (!region.cells[cell].written.epoch && !missing++) first = cell * region.grain / region.element;
    if (good && missing && !allowed(UNWRITTEN))
      record(UNWRITTEN, {}, {}, "nobody has written `%s`[%zu] (%zu bytes of this output are left as they were)",
             region.name, first, missing * region.grain);
    memcpy(launch.buffers[i].data, region.begin, region.end - region.begin);
  }
  for (auto* list : {&buffers, &arrays}) {
    for (Region& region : *list) free(region.cells);
    list->clear();
  }
  pointers.clear();
  munmap(arena, arena_size);
}

}  // namespace msl

using namespace msl;

extern "C" {

void* msl_threadgroup_array(unsigned number, size_t bytes, size_t element, const char* name) {
  const Place here = place_of(reinterpret_cast<uintptr_t>(__builtin_return_address(0)) - 1);
  if (number >= MOST_ARRAYS) fault(GROUP_MEMORY, here, {}, "{0} more than %u threadgroup arrays", MOST_ARRAYS);
  Region& region = arrays[number];
  if (!region.begin) {
    group_used += (bytes + 15) / 16 * 16;
    if (group_used > GROUP_LIMIT && !allowed(GROUP_MEMORY))
      fault(GROUP_MEMORY, here, {}, "{0} `%s` brings threadgroup memory to %zu bytes; the limit is %zu", name, group_used, GROUP_LIMIT);
    region = new_region(group_next, bytes, element, GROUP, name);
    memset(region.begin, 0xCD, bytes);
    group_next += (bytes + 15) / 16 * 16 + GAP / 2;
  }
  return region.begin;
}

void msl_atomic(const void* address, size_t size, unsigned kind) {
  access(address, size, kind | ATOMIC, __builtin_return_address(0));
}

#define HOOK(NAME, SIZE, KIND) \
  void NAME(void* address) { access(address, SIZE, KIND, __builtin_return_address(0)); }
#define HOOKS(SIZE)                              \
  HOOK(__tsan_read##SIZE, SIZE, READ)            \
  HOOK(__tsan_write##SIZE, SIZE, WRITE)          \
  HOOK(__tsan_unaligned_read##SIZE, SIZE, READ)  \
  HOOK(__tsan_unaligned_write##SIZE, SIZE, WRITE) \
  HOOK(__tsan_volatile_read##SIZE, SIZE, READ)   \
  HOOK(__tsan_volatile_write##SIZE, SIZE, WRITE)
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
void __tsan_read_range(void* address, unsigned long size) { access(address, size, READ, __builtin_return_address(0)); }
void __tsan_write_range(void* address, unsigned long size) { access(address, size, WRITE, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// The calls of -fsanitize=shift,bounds,integer-divide-by-zero.
struct Location { const char* file; uint32_t line, column; };
struct Type { uint16_t kind, width; };  // width: bit 0 signed, the rest log2 of the bits

static Place ubsan_place(const Location& at, const void* code) {
  const size_t length = strlen(at.file);
  if (length > 6 && !strcmp(at.file + length - 6, ".metal")) return {0, at.line};
  return place_of(reinterpret_cast<uintptr_t>(code) - 1);
}

static long long ubsan_number(const Type& type, uintptr_t value) {
  const unsigned bits = 1u << (type.width >> 1);
  if (bits >= 64) return (long long)value;
  const uintptr_t low = value & ((uintptr_t(1) << bits) - 1);
  return type.width & 1 && low >> (bits - 1) ? (long long)low - (1ll << bits) : (long long)low;
}

void __ubsan_handle_shift_out_of_bounds(void* data, uintptr_t, uintptr_t by) {
  struct Data { Location at; const Type *left, *right; }* it = static_cast<Data*>(data);
  if (allowed(SHIFT)) return;
  fault(SHIFT, ubsan_place(it->at, __builtin_return_address(0)), {}, "{0} shifts a number of %u bits by %lld",
        1u << (it->left->width >> 1), ubsan_number(*it->right, by));
}

void __ubsan_handle_out_of_bounds(void* data, uintptr_t index) {
  struct Data { Location at; const Type *array, *index; }* it = static_cast<Data*>(data);
  fault(INDEX, ubsan_place(it->at, __builtin_return_address(0)), {}, "{0} takes element %lld of an array of type %s",
        ubsan_number(*it->index, index), reinterpret_cast<const char*>(it->array + 1));
}

void __ubsan_handle_divrem_overflow(void* data, uintptr_t, uintptr_t) {
  fault(DIVISION, ubsan_place(*static_cast<Location*>(data), __builtin_return_address(0)), {}, "{0} divides by zero");
}

}  // extern "C"
