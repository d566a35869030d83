// What the kernel calls in the core. Values cross as bits, so the kernel holds no memory of the
// core.
#pragma once
#include <source_location>

namespace emu {

using Site = std::source_location;  // line and column of the call in the body

enum Op : int {
  kShuffle,
  kShuffleXor,
  kAny,
  kMatrix8,
  kMatrix16,
  kSimdBarrier,
  kThreadgroupBarrier,
};
enum Flags : int { kNone = 0, kDevice = 1, kThreadgroup = 2 };

}  // namespace emu

extern "C" {
// A simd operation: waits for the 32 lanes and returns this lane's result.
unsigned emu_simd(int op, unsigned bits, unsigned argument, emu::Site at);
unsigned emu_lane();
void emu_barrier(int op, int flags, emu::Site at);
// Matrix product over a simdgroup: each lane hands over its elements as floats.
void emu_matrix(int op, const float* a, const float* b, const float* c, float* d, emu::Site at);
void* emu_shared(unsigned index, unsigned long nbytes, unsigned long align, unsigned itemsize,
                 const char* name);
// Adds to a number, or stores one; returns what was there.
unsigned emu_atomic(bool adds, void* where, unsigned value, emu::Site at);
void emu_fence(int flags, int relaxed, emu::Site at);
}
