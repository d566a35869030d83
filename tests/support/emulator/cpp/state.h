// What the parts of the core share: lanes, memory regions, the launch, and how a fault is reported.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "fiber.h"
#include "bridge.h"

namespace emu {

constexpr int kSimd = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kStack = 128 * 1024;
constexpr size_t kThreadgroupLimit = 32 * 1024;

enum class Stop : int { kReady, kSimdOp, kBarrier, kDone };

struct Lane {
  Fiber fiber;
  Stop stop;
  int op, flags;
  unsigned argument, bits, result;
  uint64_t path;           // the calls that led here, as a hash of return addresses
  const float *a, *b, *c;  // matrix operands, on the lane's own stack
  float* d;
  Site at;
};

enum class Mode : int { kInput, kOutput, kFilled, kThreadgroup };

// A stretch of watched memory. `writes` and `reads` hold one cell per byte, see shadow.cpp.
struct Region {
  std::string name;
  char *low, *high;
  Mode mode;
  uint32_t itemsize;
  uint64_t *writes = nullptr, *reads = nullptr;
};

struct Three {
  uint32_t x, y, z;
  uint32_t volume() const { return x * y * z; }
};

struct Launch {
  bool checks, descending;
  size_t threadgroup_memory = kThreadgroupLimit;
  Three grid, threads, groups;
  void (*entry)(const void* attributes, void* const* buffers);
  std::vector<void*> buffers;
  char *code_low = nullptr, *code_high = nullptr;  // the kernel's library, for program counters
};

extern Launch launch;
extern Lane lanes[kMaxThreads];
extern int current;     // running thread of the threadgroup, -1 in the core
extern uint32_t group;  // running threadgroup
extern char* stacks;

// Of all threads, and as much again below the first: a big local array reaches far down.
constexpr size_t kStacks = kMaxThreads * kStack;
inline bool in_stacks(const char* address) {
  return size_t(address - stacks + kStacks) < 2 * kStacks;
}

// Regions live in one reserved range of addresses; pages of it lead to their region.
constexpr size_t kPage = 16384, kGap = size_t(16) << 20;
extern std::vector<Region*> regions;
Region* region_at(const void* address);
Region* nearest_region(const void* address);
char* reserve(size_t nbytes);
void adopt(Region* region);

// Which accesses are ordered: see order.cpp.
extern uint32_t clock_now, group_start;
bool ordered_in_group(uint32_t clock, int thread, bool device_memory);
bool ordered_across_groups(uint32_t clock, int thread);
bool has_acquired();
void order_start_group();
void order_barrier(int flags);
void order_simd_barrier(int simdgroup, int flags);
void shadow_start_group();
enum Access : int { kPlain, kUpdate, kAtomicStore };  // kUpdate: atomic, reads and writes
void check_access(void* address, size_t nbytes, bool write, int atomic, void* pc);
void check_outputs();

void run_group(uint32_t index);
void complete_simd(int simdgroup);

struct Fault {
  const char* kind;
  std::string message;
  std::vector<int> threads = {};  // empty: the running one
  void* pc = nullptr;             // where, if by program counter
  void* other = nullptr;          // the earlier access of a race
  const char* file = nullptr;
  unsigned line = 0, column = 0;
  Fault& loaded_model(const Site& at) {
    file = at.file_name(), line = at.line(), column = at.column();
    return *this;
  }
};
[[noreturn]] void report(const Fault& fault);
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string where(const Site& at);
const char* op_name(int op);

}  // namespace emu
