// Simd operations, barriers, threadgroup memory and atomics of the dialect.
#pragma once
#include "bridge.h"
#include "math.h"

namespace emu {

template <int size>
struct Bits;
template <>
struct Bits<2> {
  using type = ushort;
};
template <>
struct Bits<4> {
  using type = uint;
};

template <class T>
inline T simd(int op, T x, ushort argument, Site at) {
  using Word = typename Bits<sizeof(T)>::type;
  return __builtin_bit_cast(T, Word(emu_simd(op, __builtin_bit_cast(Word, x), argument, at)));
}

// `threadgroup T name[N];` becomes a reference to memory that the core lays out and watches.
template <class T>
struct Element {
  using type = T;
};
template <class T, size_t N>
struct Element<T[N]> {
  using type = typename Element<T>::type;
};
template <class T>
inline T& shared(uint index, const char* name) {
  using E = typename Element<T>::type;
  return *static_cast<T*>(emu_shared(index, sizeof(T), alignof(T), sizeof(E), name));
}

}  // namespace emu

namespace metal {

#define EMU_HERE emu::Site at = emu::Site::current()
template <class T>
inline T simd_shuffle(T x, ushort lane, EMU_HERE) {
  return emu::simd(emu::kShuffle, x, lane, at);
}
template <class T>
inline T simd_shuffle_xor(T x, ushort mask, EMU_HERE) {
  return emu::simd(emu::kShuffleXor, x, mask, at);
}
inline bool simd_any(bool x, EMU_HERE) { return emu_simd(emu::kAny, x, 0, at); }

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
inline void threadgroup_barrier(mem_flags flags, EMU_HERE) {
  emu_barrier(emu::kThreadgroupBarrier, int(flags), at);
}
inline void simdgroup_barrier(mem_flags flags, EMU_HERE) {
  emu_barrier(emu::kSimdBarrier, int(flags), at);
}

enum memory_order { memory_order_relaxed, memory_order_seq_cst };
enum thread_scope { thread_scope_threadgroup, thread_scope_device };
// A fence of a scope below the device orders nothing here: barriers do that work in the dialect.
inline void atomic_thread_fence(mem_flags flags, memory_order order,
                                thread_scope scope = thread_scope_device, EMU_HERE) {
  bool weak = order == memory_order_relaxed || scope < thread_scope_device;
  emu_fence(int(flags), weak, at);
}

struct atomic_uint {
  uint value;
};
inline uint atomic_fetch_add_explicit(atomic_uint* p, uint value, memory_order, EMU_HERE) {
  return emu_atomic(true, p, value, at);
}
inline void atomic_store_explicit(atomic_uint* p, uint value, memory_order, EMU_HERE) {
  emu_atomic(false, p, value, at);
}

}  // namespace metal
