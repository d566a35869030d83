// Runs a threadgroup: every thread is a fiber, barriers and simd operations are rendezvous.
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>

#include "state.h"

#if EMU_FAST_SWITCH
asm(R"(
.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#endif

namespace emu {

Launch launch;
Lane lanes[kMaxThreads];
int current = -1;
uint32_t group = 0;
char* stacks = nullptr;
static Fiber scheduler;

// The attributes of a thread, in the order in which the generated entry point reads them.
struct Attributes {
  Three in_grid, in_group, group_at, grid, threads, groups;
  uint32_t index, lane, simdgroup;
};

static Three position(uint32_t index, Three size) {
  return {index % size.x, index / size.x % size.y, index / size.x / size.y};
}

static void thread_main() {
  Three at = position(uint32_t(current), launch.threads), block = position(group, launch.groups);
  Attributes a{};
  a.in_grid = {block.x * launch.threads.x + at.x, block.y * launch.threads.y + at.y,
               block.z * launch.threads.z + at.z};
  a.in_group = at, a.group_at = block;
  a.grid = launch.grid, a.threads = launch.threads, a.groups = launch.groups;
  a.index = uint32_t(current), a.lane = a.index % kSimd, a.simdgroup = a.index / kSimd;
  launch.entry(&a, launch.buffers.data());
  lanes[current].stop = Stop::kDone;
  switch_fiber(lanes[current].fiber, scheduler);
  __builtin_unreachable();
}

static void resume(int thread) {
  current = thread;
  switch_fiber(scheduler, lanes[thread].fiber);
  current = -1;
}

// Lanes may meet in one line of a helper and still have come by different calls. The watched build
// keeps frame pointers, so the chain of return addresses tells.
static uint64_t path_here(void** frame) {
  uint64_t hash = 0;
#if EMU_FAST_SWITCH
  if (!launch.checks) return 0;
  char *low = stacks + size_t(current) * kStack, *high = low + kStack - 16;
  while (reinterpret_cast<char*>(frame) > low && reinterpret_cast<char*>(frame) < high) {
    hash = (hash ^ reinterpret_cast<uint64_t>(frame[1])) * 0x9e3779b97f4a7c15u;
    frame = static_cast<void**>(frame[0]);
  }
#else
  (void)frame;
#endif
  return hash;
}

static void wait(Stop stop, void* frame) {
  Lane& lane = lanes[current];
  lane.stop = stop;
  lane.path = path_here(static_cast<void**>(frame));
  switch_fiber(lane.fiber, scheduler);
}

static bool together(const Lane& a, const Lane& b) {
  if (a.stop != b.stop) return false;
  if (a.stop == Stop::kDone) return true;
  return a.op == b.op && a.path == b.path && a.at.line() == b.at.line() &&
         a.at.column() == b.at.column() && !strcmp(a.at.file_name(), b.at.file_name());
}

// Threads that should have met did not: say who stands where, name the smaller party.
[[noreturn]] static void diverged(const char* what, const std::vector<int>& threads) {
  std::vector<std::vector<int>> parties;
  for (int thread : threads) {
    size_t i = 0;
    while (i < parties.size() && !together(lanes[parties[i][0]], lanes[thread])) i++;
    if (i == parties.size()) parties.push_back({});
    parties[i].push_back(thread);
  }
  Fault fault{"divergence", std::string("threads of one ") + what + " parted:"};
  const std::vector<int>* fewest = &parties[0];
  for (auto& party : parties) {
    const Lane& lane = lanes[party[0]];
    fault.message += text(" %zu threads (first %d) ", party.size(), party[0]);
    if (lane.stop == Stop::kDone)
      fault.message += "have ended;";
    else
      fault.message += text("wait in %s at %s;", op_name(lane.op), where(lane.at).c_str());
    if (lane.stop != Stop::kDone) fault.loaded_model(lane.at);
    if (party.size() <= fewest->size()) fewest = &party;
  }
  fault.message.pop_back();
  fault.threads = *fewest;
  report(fault);
}

static int turn(int i, int count) { return launch.descending ? count - 1 - i : i; }

// Runs one simdgroup up to its next threadgroup barrier or its end.
static void run_simdgroup(int simdgroup) {
  Lane* first = &lanes[simdgroup * kSimd];
  while (true) {
    for (int i = 0; i < kSimd; i++) resume(simdgroup * kSimd + turn(i, kSimd));
    for (int i = 1; i < kSimd; i++) {
      if (together(first[0], first[i])) continue;
      std::vector<int> all;
      for (int k = 0; k < kSimd; k++) all.push_back(simdgroup * kSimd + k);
      diverged("simdgroup", all);
    }
    if (first->stop != Stop::kSimdOp) return;
    complete_simd(simdgroup);
  }
}

void run_group(uint32_t index) {
  group = index;
  int count = int(launch.threads.volume()), simdgroups = count / kSimd;
  for (int i = 0; i < count; i++) {
    // The first page of each stack stays without access: a stack that overflows is seen.
    make_fiber(lanes[i].fiber, stacks + i * kStack + kPage, kStack - kPage, thread_main);
    lanes[i].stop = Stop::kReady;
  }
  order_start_group();
  shadow_start_group();
  while (true) {
    for (int i = 0; i < simdgroups; i++) {
      int simdgroup = turn(i, simdgroups);
      if (lanes[simdgroup * kSimd].stop != Stop::kDone) run_simdgroup(simdgroup);
    }
    bool same = true;
    for (int i = 1; i < simdgroups; i++) same &= together(lanes[0], lanes[i * kSimd]);
    if (!same) {
      std::vector<int> all;
      for (int i = 0; i < count; i++) all.push_back(i);
      diverged("threadgroup", all);
    }
    if (lanes[0].stop == Stop::kDone) return;
    order_barrier(lanes[0].flags);
  }
}

std::string text(const char* format, ...) {
  char line[512];
  va_list list;
  va_start(list, format);
  vsnprintf(line, sizeof line, format, list);
  va_end(list);
  return line;
}

std::string where(const Site& at) {
  const char* slash = strrchr(at.file_name(), '/');
  return text("%s:%u:%u", slash ? slash + 1 : at.file_name(), at.line(), at.column());
}

}  // namespace emu

using namespace emu;

extern "C" unsigned emu_lane() { return unsigned(current % kSimd); }

extern "C" unsigned emu_simd(int op, unsigned bits, unsigned argument, Site at) {
  Lane& lane = lanes[current];
  lane.op = op, lane.bits = bits, lane.argument = argument, lane.at = at;
  wait(Stop::kSimdOp, __builtin_frame_address(0));
  return lane.result;
}

extern "C" void emu_barrier(int op, int flags, Site at) {
  Lane& lane = lanes[current];
  lane.op = op, lane.flags = flags, lane.at = at;
  wait(op == kThreadgroupBarrier ? Stop::kBarrier : Stop::kSimdOp, __builtin_frame_address(0));
}

extern "C" void emu_matrix(int op, const float* a, const float* b, const float* c, float* d,
                           Site at) {
  Lane& lane = lanes[current];
  lane.op = op, lane.at = at, lane.a = a, lane.b = b, lane.c = c, lane.d = d;
  wait(Stop::kSimdOp, __builtin_frame_address(0));
}
