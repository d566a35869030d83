// Metal's words over C++ for OpenCL 2021 (clang -x clcpp), whose named address spaces are nearest to Metal's. For the type
// check alone: nothing has a body but what templates need. METAL_LEVEL: 310, 320 or 400.
// What is stricter here than Metal is the dialect of mlxkv/metal/README.md: bfloat converts to float by name only.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
// Words of OpenCL that are names in Metal.
#define pipe pipe_
#define global global_
#define local local_
#define generic generic_
#define atomic_int atomic_int_
#define atomic_uint atomic_uint_
#define atomic_float atomic_float_
#define memory_order memory_order_
#define __METAL__ 1
#define __METAL_VERSION__ METAL_LEVEL
#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 0
#define METAL_FUNC inline __attribute__((__always_inline__))
#define METAL_CONST_ARG(x)
#define MLX_METAL_JIT 1
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#if METAL_LEVEL >= 320
#define coherent(scope)
#endif

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
#define VECTORS(T) \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
VECTORS(char)
VECTORS(uchar)
VECTORS(short)
VECTORS(ushort)
VECTORS(int)
VECTORS(uint)
VECTORS(long)
VECTORS(ulong)
VECTORS(half)
VECTORS(float)
#undef VECTORS
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define HUGE_VALF INFINITY
#define M_PI_F 3.14159265358979323846f
#define M_SQRT1_2_F 0.70710678118654752440f

struct bfloat {
  ushort bits;
  bfloat() = default;
  constexpr explicit bfloat(float x) : bits(ushort(__builtin_bit_cast(uint, x) >> 16)) {}
#define TO_FLOAT(space) \
  constexpr explicit operator float() const space { return __builtin_bit_cast(float, uint(bits) << 16); }
  TO_FLOAT(thread)
  TO_FLOAT(device)
  TO_FLOAT(threadgroup)
  TO_FLOAT(constant)
#undef TO_FLOAT
};

// MLX's preamble computes with it, as Metal lets it. Ours is warned, which is a breach.
#define NO_MATH __attribute__((deprecated("bfloat is loaded and stored, never computed with")))
NO_MATH constexpr bfloat operator-(bfloat a) { return bfloat(-float(a)); }
NO_MATH constexpr float operator+(bfloat a, bfloat b) { return float(a) + float(b); }
NO_MATH constexpr float operator-(bfloat a, bfloat b) { return float(a) - float(b); }
NO_MATH constexpr float operator*(bfloat a, bfloat b) { return float(a) * float(b); }
NO_MATH constexpr float operator/(bfloat a, bfloat b) { return float(a) / float(b); }
NO_MATH constexpr float operator*(bfloat a, float b) { return float(a) * b; }
NO_MATH constexpr bool operator==(bfloat a, bfloat b) { return float(a) == float(b); }
NO_MATH constexpr bool operator<(bfloat a, bfloat b) { return float(a) < float(b); }

namespace metal {
template <typename T, int N> struct vec_of { typedef T type __attribute__((ext_vector_type(N))); };
template <> struct vec_of<bfloat, 2> { struct type { bfloat x, y; }; };
template <typename T, int N> using vec = typename vec_of<T, N>::type;
template <typename To, typename From> constexpr To as_type(From v) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different sizes");
  return __builtin_bit_cast(To, v);
}

template <typename T, typename U> constexpr constant bool is_same_v = __is_same(T, U);
template <typename T, typename U> constexpr constant bool is_convertible_v = __is_convertible_to(T, U);
template <bool, typename T = void> struct enable_if {};
template <typename T> struct enable_if<true, T> { typedef T type; };
template <bool B, typename T = void> using enable_if_t = typename enable_if<B, T>::type;
template <typename T> struct numeric_limits;
#define LIMITS(T, least, most) \
  template <> struct numeric_limits<T> { \
    static constexpr T min() { return T(least); } \
    static constexpr T lowest() { return T(least); } \
    static constexpr T max() { return T(most); } \
    static constexpr T infinity() { return T(__builtin_inff()); } \
    static constexpr T quiet_NaN() { return T(__builtin_nanf("")); } \
    static constexpr T epsilon() { return T(1.1920929e-07f); } \
  };
#define WHOLE(T, least, most) \
  template <> struct numeric_limits<T> { \
    static constexpr T min() { return T(least); } \
    static constexpr T lowest() { return T(least); } \
    static constexpr T max() { return T(most); } \
  };
WHOLE(bool, 0, 1)
WHOLE(char, -128, 127)
WHOLE(uchar, 0, 255)
WHOLE(short, -32768, 32767)
WHOLE(ushort, 0, 65535)
WHOLE(int, -2147483647 - 1, 2147483647)
WHOLE(uint, 0, 4294967295u)
WHOLE(long, -9223372036854775807l - 1, 9223372036854775807l)
WHOLE(ulong, 0, 18446744073709551615ul)
LIMITS(half, 6.103515625e-05f, 65504.0f)
LIMITS(float, 1.17549435e-38f, 3.40282347e+38f)
LIMITS(bfloat, 1.17549435e-38f, 3.38953139e+38f)
#undef LIMITS
#undef WHOLE

// Overloads for each type alone, as Metal's library has them: a call of two types is ambiguous.
#define FLOATS(F, n) F(n, float) F(n, float2) F(n, float3) F(n, float4) F(n, half) F(n, half2) F(n, half3) F(n, half4)
#define INTS(F, n) \
  F(n, char) F(n, uchar) F(n, short) F(n, ushort) F(n, int) F(n, uint) F(n, long) F(n, ulong) \
  F(n, int2) F(n, int4) F(n, uint2) F(n, uint4) F(n, short2) F(n, short4) F(n, ushort2) F(n, ushort4) \
  F(n, uchar2) F(n, uchar4) F(n, char4)
#define ONE(n, T) T n(T);
#define TWO(n, T) T n(T, T);
#define THREE(n, T) T n(T, T, T);
#define TEST(n, T) bool n(T);
#define CHOOSE(n, T) T n(T, T, bool);
#define MATH \
  FLOATS(ONE, exp2) FLOATS(ONE, exp) FLOATS(ONE, exp10) FLOATS(ONE, log2) FLOATS(ONE, log) FLOATS(ONE, log10) \
  FLOATS(ONE, sqrt) FLOATS(ONE, rsqrt) FLOATS(ONE, cos) FLOATS(ONE, sin) FLOATS(ONE, tan) FLOATS(ONE, cosh) \
  FLOATS(ONE, sinh) FLOATS(ONE, tanh) FLOATS(ONE, acos) FLOATS(ONE, asin) FLOATS(ONE, atan) FLOATS(TWO, atan2) \
  FLOATS(ONE, rint) FLOATS(ONE, round) FLOATS(ONE, floor) FLOATS(ONE, ceil) FLOATS(ONE, trunc) FLOATS(ONE, fract) \
  FLOATS(ONE, fabs) FLOATS(ONE, saturate) FLOATS(ONE, sign) FLOATS(TWO, pow) FLOATS(TWO, powr) FLOATS(TWO, fmod) \
  FLOATS(TWO, divide) FLOATS(TWO, fmax) FLOATS(TWO, fmin) FLOATS(THREE, mix) FLOATS(TWO, step) \
  FLOATS(ONE, abs) FLOATS(TWO, max) FLOATS(TWO, min) FLOATS(THREE, clamp)
MATH
namespace fast { MATH }
namespace precise { MATH }
FLOATS(THREE, fma) FLOATS(TWO, copysign) FLOATS(CHOOSE, select) FLOATS(THREE, max3) FLOATS(THREE, min3)
FLOATS(THREE, median3) FLOATS(THREE, fmax3) FLOATS(THREE, fmin3) FLOATS(TWO, fdim)
TEST(isinf, float) TEST(isnan, float) TEST(isfinite, float) TEST(isinf, half) TEST(isnan, half) TEST(signbit, float)
float ldexp(float, int);
float frexp(float, thread int&);
float dot(float2, float2);
float dot(float3, float3);
float dot(float4, float4);
half dot(half2, half2);
half dot(half4, half4);
INTS(ONE, abs) INTS(TWO, max) INTS(TWO, min) INTS(THREE, clamp) INTS(CHOOSE, select) INTS(THREE, max3)
INTS(THREE, min3) INTS(THREE, median3) INTS(ONE, popcount) INTS(ONE, clz) INTS(ONE, ctz) INTS(ONE, reverse_bits)
INTS(TWO, mulhi) INTS(TWO, rotate) INTS(TWO, absdiff) INTS(TWO, addsat) INTS(TWO, subsat) INTS(THREE, mad24)
INTS(TWO, mul24) CHOOSE(select, bool)
uint extract_bits(uint, uint, uint);
int extract_bits(int, uint, uint);
uint insert_bits(uint, uint, uint, uint);
bool any(int2);
bool any(int4);
bool all(int2);
bool all(int4);

// 8, 16 and 32 bits alone: 64 bits and bool have no such operation, but for MLX's own behind this.
#define SIMD(F, n) \
  FLOATS(F, n) F(n, char) F(n, uchar) F(n, short) F(n, ushort) F(n, int) F(n, uint) F(n, int2) F(n, int4) F(n, uint2) \
  F(n, uint4) F(n, ushort2) F(n, ushort4) F(n, short2) F(n, short4)
#define MOVE(n, T) T n(T, ushort) __attribute__((convergent));
#define FILL(n, T) T n(T, T, ushort) __attribute__((convergent));
#define JOIN(n, T) T n(T) __attribute__((convergent));
SIMD(MOVE, simd_shuffle) SIMD(MOVE, simd_shuffle_xor) SIMD(MOVE, simd_shuffle_up) SIMD(MOVE, simd_shuffle_down)
SIMD(MOVE, simd_shuffle_rotate_up) SIMD(MOVE, simd_shuffle_rotate_down) SIMD(MOVE, simd_broadcast)
SIMD(MOVE, quad_shuffle) SIMD(MOVE, quad_shuffle_xor) SIMD(MOVE, quad_broadcast)
SIMD(FILL, simd_shuffle_and_fill_up) SIMD(FILL, simd_shuffle_and_fill_down)
SIMD(JOIN, simd_sum) SIMD(JOIN, simd_product) SIMD(JOIN, simd_max) SIMD(JOIN, simd_min) SIMD(JOIN, quad_sum)
SIMD(JOIN, simd_prefix_inclusive_sum) SIMD(JOIN, simd_prefix_exclusive_sum) SIMD(JOIN, simd_broadcast_first)
INTS(JOIN, simd_and) INTS(JOIN, simd_or) INTS(JOIN, simd_xor)
bool simd_any(bool) __attribute__((convergent));
bool simd_all(bool) __attribute__((convergent));
bool simd_is_first() __attribute__((convergent));
struct simd_vote { explicit operator ulong() const thread; };
simd_vote simd_ballot(bool) __attribute__((convergent));

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
void threadgroup_barrier(mem_flags) __attribute__((convergent));
void simdgroup_barrier(mem_flags) __attribute__((convergent));
#if METAL_LEVEL >= 320
enum memory_order { memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel, memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device);
#else
enum memory_order { memory_order_relaxed };
#endif
template <typename T> struct atomic { T value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
#define ATOMIC(space, T) \
  T atomic_load_explicit(const volatile space atomic<T>*, memory_order); \
  void atomic_store_explicit(volatile space atomic<T>*, T, memory_order); \
  T atomic_exchange_explicit(volatile space atomic<T>*, T, memory_order); \
  T atomic_fetch_add_explicit(volatile space atomic<T>*, T, memory_order); \
  T atomic_fetch_sub_explicit(volatile space atomic<T>*, T, memory_order); \
  T atomic_fetch_or_explicit(volatile space atomic<T>*, T, memory_order); \
  T atomic_fetch_and_explicit(volatile space atomic<T>*, T, memory_order); \
  T atomic_fetch_max_explicit(volatile space atomic<T>*, T, memory_order); \
  T atomic_fetch_min_explicit(volatile space atomic<T>*, T, memory_order);
ATOMIC(device, uint) ATOMIC(device, int) ATOMIC(threadgroup, uint) ATOMIC(threadgroup, int)

template <typename T, int C, int R> struct simdgroup_matrix {
  vec<T, C * R / 32> held;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  thread vec<T, C * R / 32>& thread_elements() thread { return held; }
};
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <typename T, int C, int R> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
#define MATRIX(space) \
  template <typename T, int C, int R> \
  void simdgroup_load(thread simdgroup_matrix<T, C, R>&, const space T*, ulong = C, ulong2 = 0, bool = false); \
  template <typename T, int C, int R> \
  void simdgroup_store(simdgroup_matrix<T, C, R>, space T*, ulong = C, ulong2 = 0, bool = false);
MATRIX(device) MATRIX(threadgroup)
template <typename D, typename A, typename B, typename C> D metal_multiply(A, B, C) __attribute__((convergent));
template <typename D, typename A, typename B, int N>
void simdgroup_multiply(thread simdgroup_matrix<D, N, N>&, simdgroup_matrix<A, N, N>, simdgroup_matrix<B, N, N>);
template <typename D, typename A, typename B, typename C, int N>
inline void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, N, N>& d, simdgroup_matrix<A, N, N> a, simdgroup_matrix<B, N, N> b, simdgroup_matrix<C, N, N> c) {
  d.held = metal_multiply<vec<D, N * N / 32>>(a.held, b.held, c.held);
}

struct os_log {
  constexpr os_log(constant char*, constant char*) constant {}
  template <typename... Args> void log_debug(constant char*, Args...) const constant {}
};
}
using namespace metal;

// What bf16_math.h calls below the library: any arguments, a float.
template <typename... A> constexpr float metal_below(A...) { return 0.0f; }
