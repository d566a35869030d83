// Layout of memory: one range of addresses with a gap around every buffer and threadgroup array.
#include <sys/mman.h>

#include <cstring>

#include "state.h"

namespace emu {

std::vector<Region*> regions;

constexpr size_t kRange = size_t(1) << 36;  // reserved, not used: pages come when touched
constexpr size_t kMaxShared = 64;
static char *range_low = nullptr, *range_next = nullptr;
static std::vector<uint16_t> page_owner;  // grows with the range; 0: nobody

static Region shared_regions[kMaxShared];
static uint32_t shared_group[kMaxShared];
static size_t shared_total = 0;

static void start_range() {
  void* base = mmap(nullptr, kRange, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) report({"limit", "no address space for the emulator", {0}});
  range_low = static_cast<char*>(base);
  range_next = range_low + kGap;
}

char* reserve(size_t nbytes) {
  if (!range_low) start_range();
  char* low = range_next;
  range_next += (nbytes + kGap + kPage - 1) / kPage * kPage;
  if (range_next > range_low + kRange) report({"limit", "buffers too large for the emulator", {0}});
  page_owner.resize(size_t(range_next - range_low) / kPage);
  return low;
}

static uint64_t* cells(size_t count) {
  void* block = mmap(nullptr, count * 8 + 8, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) report({"limit", "no memory for the checks", {0}});
  return static_cast<uint64_t*>(block);
}

void adopt(Region* region) {
  regions.push_back(region);
  size_t first = size_t(region->low - range_low) / kPage;
  size_t last = size_t(region->high - range_low) / kPage;
  for (size_t i = first; i <= last; i++) page_owner[i] = uint16_t(regions.size());
  if (!launch.checks || region->mode == Mode::kInput) return;
  region->writes = cells(size_t(region->high - region->low));
  region->reads = cells(size_t(region->high - region->low));
}

Region* region_at(const void* address) {
  size_t offset = size_t(static_cast<const char*>(address) - range_low);
  if (offset / kPage >= page_owner.size()) return nullptr;
  uint16_t owner = page_owner[offset / kPage];
  return owner ? regions[owner - 1u] : nullptr;
}

// For messages: whose gap is this address in?
Region* nearest_region(const void* address) {
  const char* at = static_cast<const char*>(address);
  Region* best = nullptr;
  size_t distance = kGap;
  for (Region* r : regions) {
    size_t away = at < r->low ? size_t(r->low - at) : at >= r->high ? size_t(at - r->high) : 0;
    if (away < distance) best = r, distance = away;
  }
  return best;
}

}  // namespace emu

using namespace emu;

extern "C" void* emu_shared(unsigned index, unsigned long nbytes, unsigned long align,
                            unsigned itemsize, const char* name) {
  if (index >= kMaxShared) report({"threadgroup-memory", "too many threadgroup arrays", {}});
  Region& r = shared_regions[index];
  if (!r.low) {
    shared_total += nbytes;
    if (shared_total > launch.threadgroup_memory) {
      report({"threadgroup-memory",
              text("%zu bytes of threadgroup memory with %s; there are %zu", shared_total, name,
                   launch.threadgroup_memory),
              {}});
    }
    // No better aligned than its type promises, so that a wider load is seen to be misaligned.
    // Unwatched, it ends where the page ends, so that an overflow is felt.
    size_t space = (nbytes + 2 * kPage - 1) / kPage * kPage;
    char* page = reserve(space);
    mprotect(page, space, PROT_READ | PROT_WRITE);
    r.name = name, r.mode = Mode::kThreadgroup;
    r.low = launch.checks ? page + align : page + space - nbytes, r.high = r.low + nbytes;
    r.itemsize = itemsize;
    adopt(&r);
  }
  if (!launch.checks && shared_group[index] != group + 1) {
    shared_group[index] = group + 1;
    memset(r.low, launch.descending ? 0x7e : 0xff, nbytes);
  }
  return r.low;
}
