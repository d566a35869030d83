// What the kernel calls in the core. Values cross as bits, so the kernel holds no memory of the
// core.
#pragma once
#include <source_location>

namespace emu {

using Site = std::source_location;  // line and column of the call in the body

enum Op : int {
  kSum,
  kProduct,
  kMax,
  kMin,
  kAnd,
  kOr,
  kXor,
  kPrefixInclusiveSum,
  kPrefixExclusiveSum,
  kBroadcast,
  kBroadcastFirst,
  kShuffle,
  kShuffleXor,
  kShuffleUp,
  kShuffleDown,
  kAny,
  kAll,
  kBallot,
  kMatrix8,
  kMatrix16,
  kSimdBarrier,
  kThreadgroupBarrier,
};
enum Type : int { kF32, kF16, kBF16, kI32, kU32, kI16, kU16, kI8, kU8 };
enum AtomicOp : int {
  kLoad,
  kStore,
  kExchange,
  kAdd,
  kSub,
  kMinimum,
  kMaximum,
  kBitAnd,
  kBitOr,
  kCas
};
enum Flags : int { kNone = 0, kDevice = 1, kThreadgroup = 2 };

}  // namespace emu

extern "C" {
// A simd operation: waits for the 32 lanes and returns this lane's result.
unsigned long emu_simd(int op, int type, unsigned long bits, unsigned argument, emu::Site at);
void emu_barrier(int op, int flags, emu::Site at);
// Matrix product over a simdgroup: each lane hands over its elements as floats.
void emu_matrix(int op, const float* a, const float* b, const float* c, float* d, emu::Site at);
void* emu_shared(unsigned index, unsigned long nbytes, unsigned long align, unsigned itemsize,
                 const char* name);
unsigned emu_atomic(int op, int is_signed, void* where, unsigned value, unsigned* expected,
                    emu::Site at);
void emu_fence(int flags, int relaxed, emu::Site at);
}
