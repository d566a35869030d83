// Which accesses are ordered: barriers within a threadgroup, fences with atomics across
// threadgroups.
//
// `clock_now` grows at every barrier and fence. An access remembers the clock at which it happened;
// it is over for the others once a barrier with the right mem_flags has a later clock.
#include <algorithm>

#include "state.h"

namespace emu {

uint32_t clock_now = 1, group_start = 1;

constexpr int kMulti = 0x800;  // thread numbers from here on mean several readers, see shadow.cpp
static uint32_t barrier_clock[2];  // [is device memory]
static uint32_t simd_clock[kMaxThreads / kSimd][2];
static uint32_t any_barrier;  // the last threadgroup barrier, whatever its flags
static std::vector<uint32_t> group_starts;

// A device fence and then an atomic write publish what came before; an atomic read and then a
// device fence on the other side make it visible. Threadgroups run one after the other.
struct Release {
  const void* place;
  uint32_t stamp, barrier;
  std::vector<uint32_t> fenced;  // per thread: its own accesses up to this clock
};
struct Acquire {
  const void* place;
  uint32_t stamp;
};
using Acquires = std::vector<Acquire>;
static std::vector<std::vector<Release>> releases;  // by the order in which groups ran
static uint32_t stamp = 0;
static uint32_t fence_clock[kMaxThreads], fence_barrier[kMaxThreads];
static Acquires pending[kMaxThreads], active[kMaxThreads], group_pending, group_active;
static bool uses_atomics = false;

void order_start_group() {
  group_start = ++clock_now;
  group_starts.push_back(group_start);
  releases.emplace_back();
  any_barrier = barrier_clock[0] = barrier_clock[1] = group_start;
  for (auto& clocks : simd_clock) clocks[0] = clocks[1] = group_start;
  if (!uses_atomics) return;
  std::fill(fence_clock, fence_clock + kMaxThreads, 0);
  for (auto& list : pending) list.clear();
  for (auto& list : active) list.clear();
  group_pending.clear(), group_active.clear();
}

static void pour(Acquires& from, Acquires& into) {
  into.insert(into.end(), from.begin(), from.end());
  from.clear();
}

void order_barrier(int flags) {
  any_barrier = ++clock_now;
  if (flags & kThreadgroup) barrier_clock[0] = clock_now;
  if (flags & kDevice) barrier_clock[1] = clock_now;
  if (!uses_atomics) return;
  for (auto& list : pending) pour(list, group_pending);
  if (flags & kDevice)
    for (auto& list : active) pour(list, group_active);
}

void order_simd_barrier(int simdgroup, int flags) {
  ++clock_now;
  if (flags & kThreadgroup) simd_clock[simdgroup][0] = clock_now;
  if (flags & kDevice) simd_clock[simdgroup][1] = clock_now;
}

bool ordered_in_group(uint32_t clock, int thread, bool device_memory) {
  if (thread == current || clock < barrier_clock[device_memory]) return true;
  int simdgroup = thread >= kMulti ? thread - kMulti : thread / kSimd;
  return simdgroup == current / kSimd && clock < simd_clock[simdgroup][device_memory];
}

static bool acquired(const void* place, uint32_t after) {
  auto later = [&](const Acquire& a) { return a.place == place && a.stamp > after; };
  return std::any_of(active[current].begin(), active[current].end(), later) ||
         std::any_of(group_active.begin(), group_active.end(), later);
}

bool has_acquired() { return !active[current].empty() || !group_active.empty(); }

bool ordered_across_groups(uint32_t clock, int thread) {
  if (!uses_atomics) return false;
  auto next = std::upper_bound(group_starts.begin(), group_starts.end(), clock);
  for (const Release& r : releases[size_t(next - group_starts.begin()) - 1]) {
    bool covers = clock < r.barrier || (thread < kMulti && clock <= r.fenced[size_t(thread)]);
    if (covers && acquired(r.place, r.stamp)) return true;
  }
  return false;
}

static void note_atomic(const void* place, bool reads) {
  uses_atomics = true;
  ++stamp;
  if (reads) pending[current].push_back({place, stamp});
  Release release{place, stamp, 0, std::vector<uint32_t>(kMaxThreads, 0)};
  bool any = false;
  for (int i = 0; i < kMaxThreads; i++) {
    // The fence of another thread counts once a barrier has brought it here.
    if (!fence_clock[i] || (i != current && fence_clock[i] >= any_barrier)) continue;
    release.fenced[size_t(i)] = fence_clock[i];
    release.barrier = std::max(release.barrier, fence_barrier[i]);
    any = true;
  }
  if (any) releases.back().push_back(release);
}

}  // namespace emu

using namespace emu;

extern "C" void emu_fence(int flags, int relaxed, Site) {
  if (relaxed || !(flags & kDevice)) return;
  uses_atomics = true;
  fence_barrier[current] = barrier_clock[1];
  fence_clock[current] = clock_now++;
  active[current].insert(active[current].end(), group_pending.begin(), group_pending.end());
  pour(pending[current], active[current]);
}

extern "C" unsigned emu_atomic(bool adds, void* where, unsigned value, Site at) {
  if (uintptr_t(where) % 4) {
    report(
        Fault{"misaligned", "an atomic operation at an address that is no multiple of 4"}.loaded_model(at));
  }
  if (launch.checks) {
    check_access(where, 4, true, adds ? kUpdate : kAtomicStore, __builtin_return_address(0));
    note_atomic(where, adds);
  }
  unsigned* place = static_cast<unsigned*>(where);
  unsigned old = *place;
  *place = adds ? old + value : value;
  return old;
}
