// The dialect for a type check alone: clang with address spaces as types, declarations only.
// Vectors are clang's own, so that loads work from every address space and constructors do not.
#pragma once

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef __INT64_TYPE__ int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef _Float16 half;
typedef half float16_t;
typedef __bf16 bfloat;
typedef bfloat bfloat16_t;

#define STRICT_VECTORS(T)                             \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
STRICT_VECTORS(uchar)
STRICT_VECTORS(char)
STRICT_VECTORS(ushort)
STRICT_VECTORS(short)
STRICT_VECTORS(uint)
STRICT_VECTORS(int)
STRICT_VECTORS(half)
STRICT_VECTORS(float)
STRICT_VECTORS(ulong)

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define M_PI_F 3.14159265358979323846f
#define FLT_MAX __FLT_MAX__

namespace strict {
template <class T>
constexpr bool number = false;
template <>
inline constexpr bool number<float> = true;
template <>
inline constexpr bool number<half> = true;
template <>
inline constexpr bool number<int> = true;
template <>
inline constexpr bool number<uint> = true;
template <>
inline constexpr bool number<short> = true;
template <>
inline constexpr bool number<ushort> = true;
template <>
inline constexpr bool number<signed char> = true;
template <>
inline constexpr bool number<uchar> = true;
template <class T>
concept Number = number<T>;
template <class T, class U>
constexpr bool same = false;
template <class T>
constexpr bool same<T, T> = true;
template <class T>
concept UShort = same<T, ushort>;
}  // namespace strict

namespace metal {

template <class To, class From>
constexpr To as_type(From value) {
  return __builtin_bit_cast(To, value);
}

#define STRICT_UNARY(name) \
  float name(float);       \
  half name(half);
#define STRICT_ALL_UNARY                                                                        \
  STRICT_UNARY(exp)                                                                             \
  STRICT_UNARY(exp2)                                                                            \
  STRICT_UNARY(log) STRICT_UNARY(log2) STRICT_UNARY(sqrt) STRICT_UNARY(rsqrt) STRICT_UNARY(sin) \
      STRICT_UNARY(cos) STRICT_UNARY(tanh) STRICT_UNARY(rint) STRICT_UNARY(round)               \
          STRICT_UNARY(floor) STRICT_UNARY(ceil) STRICT_UNARY(trunc)
STRICT_ALL_UNARY
namespace precise {
STRICT_ALL_UNARY
}
namespace fast {
STRICT_ALL_UNARY
}
float atan2(float, float);
float acos(float);
float pow(float, float);
float fmod(float, float);
float ldexp(float, int);
float fma(float, float, float);
half fma(half, half, half);
half2 fma(half2, half2, half2);
float saturate(float);
bool isnan(float);
bool isinf(float);
bool isfinite(float);
template <strict::Number T>
T max(T, T);
template <strict::Number T>
T min(T, T);
template <strict::Number T>
T clamp(T, T, T);
template <strict::Number T>
T abs(T);
float fabs(float);
float sign(float);
template <class T>
T select(T, T, bool);
template <class T>
T popcount(T);
uint clz(uint);
uint ctz(uint);
uint reverse_bits(uint);
uint extract_bits(uint, uint, uint);

#define STRICT_SIMD(name)     \
  template <strict::Number T> \
  T name(T);
STRICT_SIMD(simd_sum)
STRICT_SIMD(simd_product)
STRICT_SIMD(simd_max) STRICT_SIMD(simd_min) STRICT_SIMD(simd_and) STRICT_SIMD(simd_or)
    STRICT_SIMD(simd_xor) STRICT_SIMD(simd_broadcast_first) STRICT_SIMD(simd_prefix_inclusive_sum)
        STRICT_SIMD(simd_prefix_exclusive_sum)
// The distance is a ushort and nothing that merely converts to one.
#define STRICT_MOVE(name)                       \
  template <strict::Number T, strict::UShort U> \
  T name(T, U);
            STRICT_MOVE(simd_broadcast) STRICT_MOVE(simd_shuffle) STRICT_MOVE(simd_shuffle_xor)
                STRICT_MOVE(simd_shuffle_up) STRICT_MOVE(simd_shuffle_down) struct simd_vote {
  typedef uint64_t vote_t;
  explicit operator vote_t() const;
  bool any() const;
  bool all() const;
};
bool simd_any(bool);
bool simd_all(bool);
simd_vote simd_ballot(bool);

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

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
#define coherent(scope)
void atomic_thread_fence(mem_flags, memory_order, thread_scope);

template <class T>
struct atomic {
  T value;
};
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;
#define STRICT_ATOMIC(name)                            \
  template <class T>                                   \
  T name(volatile device atomic<T>*, T, memory_order); \
  template <class T>                                   \
  T name(volatile threadgroup atomic<T>*, T, memory_order);
STRICT_ATOMIC(atomic_fetch_add_explicit)
STRICT_ATOMIC(atomic_fetch_sub_explicit)
STRICT_ATOMIC(atomic_fetch_min_explicit) STRICT_ATOMIC(atomic_fetch_max_explicit)
    STRICT_ATOMIC(atomic_fetch_and_explicit) STRICT_ATOMIC(atomic_fetch_or_explicit)
        STRICT_ATOMIC(atomic_exchange_explicit)
            STRICT_ATOMIC(atomic_store_explicit) template <class T>
            T atomic_load_explicit(const volatile device atomic<T>*, memory_order);
template <class T>
T atomic_load_explicit(const volatile threadgroup atomic<T>*, memory_order);

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8);
  struct Elements {
    T v[2];
    T& operator[](int i) { return v[i]; }
  };
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  Elements& thread_elements();
};
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
template <class T, int R, int C>
simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);
#define STRICT_MATRIX(space)                                                                  \
  template <class T>                                                                          \
  void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const space T*, ulong = 8,                  \
                      ulong2 = ulong2{0, 0}, bool = false);                                   \
  template <class T>                                                                          \
  void simdgroup_store(simdgroup_matrix<T, 8, 8>, space T*, ulong = 8, ulong2 = ulong2{0, 0}, \
                       bool = false);
STRICT_MATRIX(device)
STRICT_MATRIX(threadgroup)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>,
                                   simdgroup_matrix<B, 8, 8>, simdgroup_matrix<C, 8, 8>);
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>,
                        simdgroup_matrix<B, 8, 8>);

}  // namespace metal
using namespace metal;
