// The watch over memory: bounds, inputs, uninitialised bytes and races.
//
// The kernel is compiled with -fsanitize=thread; this file supplies the functions that code calls.
// Each watched byte has one cell for its last writer and one for its readers:
//   clock 30 bits | thread 12 bits | place in the code 16 bits | flags 6 bits;  0: never.
#include <cstring>

#include "state.h"

namespace emu {

constexpr int kMultiple = 0x800, kEverybody = 0xfff;  // readers: one simdgroup (+ its number), more
constexpr uint64_t kAtomic = uint64_t(1) << 58, kEarlier = uint64_t(1) << 59;
constexpr uint32_t kClockLimit = 1u << 30;

static uint32_t clock_of(uint64_t cell) { return uint32_t(cell) & (kClockLimit - 1); }
static int thread_of(uint64_t cell) { return int(cell >> 30) & 0xfff; }

static uint64_t make_cell(int thread, void* pc, bool atomic) {
  uint64_t place = uint64_t(static_cast<char*>(pc) - launch.code_low);
  if (place > 0xffff) place = 0xffff;
  return uint64_t(clock_now) | uint64_t(thread) << 30 | place << 42 | (atomic ? kAtomic : 0);
}

static void* place_of(uint64_t cell) {
  uint64_t place = cell >> 42 & 0xffff;
  return place == 0xffff ? nullptr : launch.code_low + place;
}

static std::string element(const Region& r, const char* address) {
  long offset = long(address - r.low);
  long size = long(r.itemsize), index = offset >= 0 ? offset / size : -((size - 1 - offset) / size);
  return text("%s[%ld] (%ld elements of %ld bytes)", r.name.c_str(), index,
              long(r.high - r.low) / size, size);
}

[[noreturn]] static void race(const Region& r, char* address, bool write, uint64_t cell,
                              bool earlier_wrote, bool across, void* pc) {
  int other = thread_of(cell);
  Fault fault{across ? "race-across-threadgroups" : "race", ""};
  std::string who = other < kMultiple ? text("thread %d", other) : "several threads";
  if (across) who += " of another threadgroup";
  fault.message =
      text("%s: thread %d %s what %s %s, and nothing orders the two", element(r, address).c_str(),
           current, write ? "writes" : "reads", who.c_str(), earlier_wrote ? "wrote" : "read");
  fault.pc = pc, fault.other = place_of(cell);
  fault.threads = {current};
  if (!across && other < kMultiple) fault.threads.push_back(other);
  report(fault);
}

// Faults if `cell`, an earlier access, conflicts with an access of the running thread.
static void check_order(const Region& r, char* address, bool write, uint64_t cell,
                        bool earlier_wrote, bool atomic, void* pc) {
  if (!cell || (atomic && (cell & kAtomic))) return;
  uint32_t clock = clock_of(cell);
  int thread = thread_of(cell);
  bool device_memory = r.mode != Mode::kThreadgroup;
  if (clock >= group_start) {
    if (!ordered_in_group(clock, thread, device_memory))
      race(r, address, write, cell, earlier_wrote, false, pc);
    if (!(cell & kEarlier) || has_acquired()) return;
    race(r, address, write, cell | uint64_t(kEverybody) << 30, earlier_wrote, true, pc);
  }
  if (device_memory && !ordered_across_groups(clock, thread))
    race(r, address, write, cell, earlier_wrote, true, pc);
}

static uint64_t with_reader(const Region& r, uint64_t old, uint64_t mine) {
  if (!old) return mine;
  uint64_t earlier = old & kEarlier;
  if (clock_of(old) < group_start) return r.mode == Mode::kThreadgroup ? mine : mine | kEarlier;
  int thread = thread_of(old);
  if (ordered_in_group(clock_of(old), thread, r.mode != Mode::kThreadgroup)) return mine | earlier;
  int simdgroup = thread >= kMultiple ? thread - kMultiple : thread / kSimd;
  int readers = simdgroup == current / kSimd ? kMultiple + simdgroup : kEverybody;
  return (mine & ~(uint64_t(0xfff) << 30)) | uint64_t(readers) << 30 | earlier;
}

static void touch(Region& r, char* address, size_t nbytes, bool write, int atomic, void* pc) {
  uint64_t* writes = r.writes + (address - r.low);
  uint64_t* reads = r.reads + (address - r.low);
  uint64_t mine = make_cell(current, pc, atomic);
  uint64_t last_write = ~uint64_t(0), last_read = ~uint64_t(0), reader = 0;
  bool fresh_group = r.mode == Mode::kThreadgroup;
  for (size_t i = 0; i < nbytes; i++) {
    // The bytes of one element nearly always share one history: look at it once.
    if (writes[i] != last_write || reads[i] != last_read) {
      last_write = writes[i], last_read = reads[i];
      bool written = last_write && !(fresh_group && clock_of(last_write) < group_start);
      if (!written && !(write && atomic != kUpdate) && r.mode != Mode::kFilled) {
        report({"uninitialised",
                "reads " + element(r, address + i) + ", which nothing has written",
                {current},
                pc});
      }
      if (written) check_order(r, address + i, write, last_write, true, atomic, pc);
      if (write)
        check_order(r, address + i, true, last_read, false, atomic, pc);
      else
        reader = with_reader(r, last_read, mine);
    }
    if (write)
      writes[i] = mine;
    else
      reads[i] = reader;
  }
}

// Neither a buffer nor threadgroup memory: the thread's own stack and tables of constants are fine.
static void outside(char* address, size_t nbytes, bool write, void* pc) {
  if (address >= launch.code_low && address + nbytes <= launch.code_high) {
    if (!write) return;
    report({"static-write", "writes a variable at file scope", {current}, pc});
  }
  if (in_stacks(address))
    report({"stack", "a thread needs more than its stack, or reaches into another's", {}, pc});
  const char* verb = write ? "writes" : "reads";
  if (address < reinterpret_cast<char*>(4096))
    report({"null", text("%s through a null pointer", verb), {}, pc});
  report({"out-of-bounds", text("%s %zu bytes that belong to no buffer", verb, nbytes), {}, pc});
}

void check_access(void* where, size_t nbytes, bool write, int atomic, void* pc) {
  char* address = static_cast<char*>(where);
  if (size_t(address - (stacks + size_t(current) * kStack)) < kStack) return;
  Region* r = region_at(address);
  if (!r || address < r->low || address + nbytes > r->high) {
    if (!r && !(r = nearest_region(address))) return outside(address, nbytes, write, pc);
    report({"out-of-bounds",
            text("%s %zu bytes at ", write ? "writes" : "reads", nbytes) + element(*r, address),
            {current},
            pc});
  }
  if (r->mode == Mode::kInput) {
    if (!write) return;
    report({"input-write", "writes " + element(*r, address) + ", an input", {current}, pc});
  }
  touch(*r, address, nbytes, write, atomic, pc);
}

void shadow_start_group() {
  if (clock_now > kClockLimit - (1u << 20))
    report({"limit", "too many barriers in one launch", {0}});
}

void check_outputs() {
  for (Region* r : regions) {
    if (r->mode != Mode::kOutput) continue;
    size_t nbytes = size_t(r->high - r->low), missing = 0, first = 0;
    for (size_t i = 0; i < nbytes; i++)
      if (!r->writes[i] && missing++ == 0) first = i;
    if (!missing) continue;
    report({"unwritten-output",
            text("no thread writes %zu of %zu elements, the first is ",
                 (missing + r->itemsize - 1) / r->itemsize, nbytes / r->itemsize) +
                element(*r, r->low + first),
            {0}});
  }
}

}  // namespace emu

#define EMU_PC __builtin_return_address(0)
#define EMU_ACCESS(n)                                                                              \
  extern "C" void __tsan_read##n(void* p) { emu::check_access(p, n, false, emu::kPlain, EMU_PC); } \
  extern "C" void __tsan_write##n(void* p) { emu::check_access(p, n, true, emu::kPlain, EMU_PC); } \
  extern "C" void __tsan_unaligned_read##n(void* p) {                                              \
    emu::check_access(p, n, false, emu::kPlain, EMU_PC);                                           \
  }                                                                                                \
  extern "C" void __tsan_unaligned_write##n(void* p) {                                             \
    emu::check_access(p, n, true, emu::kPlain, EMU_PC);                                            \
  }                                                                                                \
  extern "C" void __tsan_volatile_read##n(void* p) {                                               \
    emu::check_access(p, n, false, emu::kPlain, EMU_PC);                                           \
  }                                                                                                \
  extern "C" void __tsan_volatile_write##n(void* p) {                                              \
    emu::check_access(p, n, true, emu::kPlain, EMU_PC);                                            \
  }
EMU_ACCESS(1)
EMU_ACCESS(2)
EMU_ACCESS(4)
EMU_ACCESS(8)
EMU_ACCESS(16)
extern "C" void __tsan_read_range(void* p, size_t n) {
  emu::check_access(p, n, false, emu::kPlain, EMU_PC);
}
extern "C" void __tsan_write_range(void* p, size_t n) {
  emu::check_access(p, n, true, emu::kPlain, EMU_PC);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
// Block copies that the compiler makes into calls (g++ leaves them unwatched, clang does not).
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t n) {
  emu::check_access(const_cast<void*>(from), n, false, emu::kPlain, EMU_PC);
  emu::check_access(to, n, true, emu::kPlain, EMU_PC);
  return memcpy(to, from, n);
}
extern "C" void* __tsan_memset(void* to, int value, size_t n) {
  emu::check_access(to, n, true, emu::kPlain, EMU_PC);
  return memset(to, value, n);
}
