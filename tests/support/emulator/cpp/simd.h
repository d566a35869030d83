// Simd operations, barriers, threadgroup memory and atomics of the dialect.
#pragma once
#include "bridge.h"
#include "math.h"

namespace emu {

template <class T>
constexpr int type_of = -1;
template <>
inline constexpr int type_of<float> = kF32;
template <>
inline constexpr int type_of<half> = kF16;
template <>
inline constexpr int type_of<bfloat> = kBF16;
template <>
inline constexpr int type_of<int> = kI32;
template <>
inline constexpr int type_of<uint> = kU32;
template <>
inline constexpr int type_of<short> = kI16;
template <>
inline constexpr int type_of<ushort> = kU16;
template <>
inline constexpr int type_of<signed char> = kI8;
template <>
inline constexpr int type_of<uchar> = kU8;

template <int size>
struct Bits;
template <>
struct Bits<1> {
  using type = uchar;
};
template <>
struct Bits<2> {
  using type = ushort;
};
template <>
struct Bits<4> {
  using type = uint;
};

template <class T>
inline T simd(int op, T x, uint argument, Site at) {
  static_assert(type_of<T> >= 0, "simd operations take 8 to 32 bit numbers (no bool, no 64 bit)");
  using Word = typename Bits<sizeof(T)>::type;
  return __builtin_bit_cast(
      T, Word(emu_simd(op, type_of<T>, __builtin_bit_cast(Word, x), argument, at)));
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
#define EMU_REDUCE(name, op)         \
  template <class T>                 \
  inline T name(T x, EMU_HERE) {     \
    return emu::simd(op, x, 0u, at); \
  }
EMU_REDUCE(simd_sum, emu::kSum)
EMU_REDUCE(simd_product, emu::kProduct)
EMU_REDUCE(simd_max, emu::kMax)
EMU_REDUCE(simd_min, emu::kMin)
EMU_REDUCE(simd_and, emu::kAnd)
EMU_REDUCE(simd_or, emu::kOr)
EMU_REDUCE(simd_xor, emu::kXor)
EMU_REDUCE(simd_prefix_inclusive_sum, emu::kPrefixInclusiveSum)
EMU_REDUCE(simd_prefix_exclusive_sum, emu::kPrefixExclusiveSum)
EMU_REDUCE(simd_broadcast_first, emu::kBroadcastFirst)
#undef EMU_REDUCE

#define EMU_MOVE(name, op)                        \
  template <class T>                              \
  inline T name(T x, ushort argument, EMU_HERE) { \
    return emu::simd(op, x, uint(argument), at);  \
  }
EMU_MOVE(simd_broadcast, emu::kBroadcast)
EMU_MOVE(simd_shuffle, emu::kShuffle)
EMU_MOVE(simd_shuffle_xor, emu::kShuffleXor)
EMU_MOVE(simd_shuffle_up, emu::kShuffleUp)
EMU_MOVE(simd_shuffle_down, emu::kShuffleDown)
#undef EMU_MOVE

struct simd_vote {
  typedef uint64_t vote_t;
  vote_t bits;
  explicit operator vote_t() const { return bits; }
  bool any() const { return bits != 0; }
  bool all() const { return bits == 0xffffffffu; }
};
inline bool simd_any(bool x, EMU_HERE) { return emu_simd(emu::kAny, emu::kU32, x, 0, at); }
inline bool simd_all(bool x, EMU_HERE) { return emu_simd(emu::kAll, emu::kU32, x, 0, at); }
inline simd_vote simd_ballot(bool x, EMU_HERE) {
  return {emu_simd(emu::kBallot, emu::kU32, x, 0, at)};
}

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
inline void threadgroup_barrier(mem_flags flags, EMU_HERE) {
  emu_barrier(emu::kThreadgroupBarrier, int(flags), at);
}
inline void simdgroup_barrier(mem_flags flags, EMU_HERE) {
  emu_barrier(emu::kSimdBarrier, int(flags), at);
}

enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
  thread_scope_system
};
// A fence of a scope below the device orders nothing here: barriers do that work in the dialect.
inline void atomic_thread_fence(mem_flags flags, memory_order order,
                                thread_scope scope = thread_scope_device, EMU_HERE) {
  bool weak = order == memory_order_relaxed || scope < thread_scope_device;
  emu_fence(int(flags), weak, at);
}

template <class T>
struct atomic {
  static_assert(emu::same<T, uint> || emu::same<T, int>, "atomics are uint or int");
  T value;
};
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;

namespace emu_detail {
template <class T>
inline T atomic_call(int op, volatile atomic<T>* where, T value, emu::Site at) {
  return T(emu_atomic(op, T(-1) < T(0), (void*)where, uint(value), nullptr, at));
}
}  // namespace emu_detail

template <class T>
inline T atomic_load_explicit(const volatile atomic<T>* p, memory_order, EMU_HERE) {
  return emu_detail::atomic_call<T>(emu::kLoad, (volatile atomic<T>*)p, T(0), at);
}
#define EMU_ATOMIC(name, op)                                              \
  template <class T, class V>                                             \
  inline T name(volatile atomic<T>* p, V value, memory_order, EMU_HERE) { \
    return emu_detail::atomic_call<T>(op, p, T(value), at);               \
  }
EMU_ATOMIC(atomic_store_explicit, emu::kStore)
EMU_ATOMIC(atomic_exchange_explicit, emu::kExchange)
EMU_ATOMIC(atomic_fetch_add_explicit, emu::kAdd)
EMU_ATOMIC(atomic_fetch_sub_explicit, emu::kSub)
EMU_ATOMIC(atomic_fetch_min_explicit, emu::kMinimum)
EMU_ATOMIC(atomic_fetch_max_explicit, emu::kMaximum)
EMU_ATOMIC(atomic_fetch_and_explicit, emu::kBitAnd)
EMU_ATOMIC(atomic_fetch_or_explicit, emu::kBitOr)
#undef EMU_ATOMIC

}  // namespace metal
