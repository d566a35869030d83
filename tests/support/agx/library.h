// Metal's library as Mesa's compiler for Apple's GPUs takes it: built-ins of OpenCL that become one instruction each.
float native_exp2(float); float native_log2(float); float native_sqrt(float); float native_rsqrt(float);
float native_cos(float); float native_sin(float); float rint(float); float floor(float); float ceil(float); float trunc(float); float fabs(float);
float fma(float, float, float); half fma(half, half, half);
uint popcount(uint); uint clz(uint); uint ctz(uint);
void barrier(uint) __attribute__((convergent)); void sub_group_barrier(uint) __attribute__((convergent));
#define SG(T) T sub_group_shuffle(T, uint) __attribute__((convergent)); T sub_group_shuffle_xor(T, uint) __attribute__((convergent)); T sub_group_shuffle_up(T, uint) __attribute__((convergent)); T sub_group_shuffle_down(T, uint) __attribute__((convergent)); T sub_group_broadcast(T, uint) __attribute__((convergent));
SG(uint) SG(float) SG(int)
#undef SG
#define RG(T) T sub_group_reduce_add(T) __attribute__((convergent)); T sub_group_reduce_max(T) __attribute__((convergent)); T sub_group_reduce_min(T) __attribute__((convergent));
RG(uint) RG(float) RG(int)
#undef RG
uint sub_group_non_uniform_reduce_or(uint) __attribute__((convergent)); uint sub_group_non_uniform_reduce_and(uint) __attribute__((convergent));
int sub_group_any(int) __attribute__((convergent)); int sub_group_all(int) __attribute__((convergent));
uint get_sub_group_local_id(void); uint get_sub_group_id(void); size_t get_local_id(uint); size_t get_group_id(uint); size_t get_global_id(uint); size_t get_num_groups(uint); size_t get_global_size(uint);
uint atomic_add(volatile __global uint*, uint); uint atomic_add(volatile __local uint*, uint); int atomic_add(volatile __global int*, int); int atomic_add(volatile __local int*, int);
uint atomic_or(volatile __global uint*, uint); uint atomic_or(volatile __local uint*, uint);
uint atomic_max(volatile __global uint*, uint); uint atomic_max(volatile __local uint*, uint); uint atomic_min(volatile __global uint*, uint); uint atomic_min(volatile __local uint*, uint);
int atomic_max(volatile __global int*, int); int atomic_max(volatile __local int*, int); int atomic_min(volatile __global int*, int); int atomic_min(volatile __local int*, int);
int atomic_or(volatile __global int*, int); int atomic_or(volatile __local int*, int);
#define INLINE inline __attribute__((always_inline))
namespace metal {
#define BODY(T) \
  INLINE T max(T a, T b) { return a > b ? a : b; } \
  INLINE T min(T a, T b) { return a < b ? a : b; } \
  INLINE T clamp(T x, T a, T b) { return min(max(x, a), b); } \
  INLINE T select(T a, T b, bool c) { return c ? b : a; } \
  INLINE T abs(T x) { return x < T(0) ? T(-x) : x; }
BODY(float) BODY(half) BODY(int) BODY(uint) BODY(short) BODY(ushort) BODY(long) BODY(ulong)
#undef BODY
#define BODY(n) namespace n { \
  INLINE float max(float a, float b) { return a > b ? a : b; } \
  INLINE float min(float a, float b) { return a < b ? a : b; } \
  INLINE float clamp(float x, float a, float b) { return metal::clamp(x, a, b); } \
  INLINE float abs(float x) { return metal::abs(x); } }
BODY(fast) BODY(precise)
#undef BODY
INLINE half2 max(half2 a, half2 b) { return a > b ? a : b; }
INLINE half2 min(half2 a, half2 b) { return a < b ? a : b; }
INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE float saturate(float x) { return clamp(x, 0.0f, 1.0f); }
}
namespace metal {
#define ONE_OP(n, op) \
  INLINE float n(float x) { return op(x); } \
  namespace fast { INLINE float n(float x) { return op(x); } } \
  namespace precise { INLINE float n(float x) { return op(x); } }
ONE_OP(exp2, ::native_exp2)
ONE_OP(exp, ::native_exp2)
ONE_OP(log2, ::native_log2)
ONE_OP(log, ::native_log2)
ONE_OP(sqrt, ::native_sqrt)
ONE_OP(rsqrt, ::native_rsqrt)
ONE_OP(cos, ::native_cos)
ONE_OP(sin, ::native_sin)
ONE_OP(rint, ::rint)
ONE_OP(floor, ::floor)
ONE_OP(ceil, ::ceil)
ONE_OP(trunc, ::trunc)
ONE_OP(fabs, ::fabs)
INLINE float fract(float x) { return x - ::floor(x); }
INLINE half fma(half a, half b, half c) { return ::fma(a, b, c); }
INLINE half2 fma(half2 a, half2 b, half2 c) { return (half2)(::fma(a.x, b.x, c.x), ::fma(a.y, b.y, c.y)); }
INLINE float2 fma(float2 a, float2 b, float2 c) { return (float2)(fma(a.x, b.x, c.x), fma(a.y, b.y, c.y)); }
INLINE float4 fma(float4 a, float4 b, float4 c) { return (float4)(fma(a.xy, b.xy, c.xy), fma(a.zw, b.zw, c.zw)); }
INLINE uint popcount(uint x) { return ::popcount(x); }
INLINE uint clz(uint x) { return ::clz(x); }
INLINE uint ctz(uint x) { return ::ctz(x); }
INLINE uint metal_lane() { return ::get_sub_group_local_id(); }
#define MOVES(T) \
  INLINE T simd_shuffle(T x, ushort l) { return as_type<T>(::sub_group_shuffle(as_type<uint>(x), uint(l))); } \
  INLINE T simd_shuffle_xor(T x, ushort m) { return as_type<T>(::sub_group_shuffle_xor(as_type<uint>(x), uint(m))); } \
  INLINE T simd_shuffle_up(T x, ushort m) { return as_type<T>(::sub_group_shuffle_up(as_type<uint>(x), uint(m))); } \
  INLINE T simd_shuffle_down(T x, ushort m) { return as_type<T>(::sub_group_shuffle_down(as_type<uint>(x), uint(m))); } \
  INLINE T simd_broadcast(T x, ushort l) { return as_type<T>(::sub_group_shuffle(as_type<uint>(x), uint(l))); }
MOVES(uint) MOVES(int) MOVES(float) MOVES(half2) MOVES(ushort2)
#define FOLDS(T) \
  INLINE T simd_sum(T x) { return ::sub_group_reduce_add(x); } \
  INLINE T simd_max(T x) { return ::sub_group_reduce_max(x); } \
  INLINE T simd_min(T x) { return ::sub_group_reduce_min(x); }
FOLDS(uint) FOLDS(int) FOLDS(float)
INLINE uint simd_or(uint x) { for (ushort m = 16; m; m /= 2) x |= simd_shuffle_xor(x, m); return x; }
INLINE uint simd_and(uint x) { for (ushort m = 16; m; m /= 2) x &= simd_shuffle_xor(x, m); return x; }
INLINE bool simd_any(bool x) { return ::sub_group_any(int(x)) != 0; }
INLINE bool simd_all(bool x) { return ::sub_group_all(int(x)) != 0; }
INLINE void threadgroup_barrier(mem_flags) { ::barrier(3u); }
INLINE void simdgroup_barrier(mem_flags) { ::sub_group_barrier(1u); }
INLINE void atomic_thread_fence(mem_flags, memory_order, thread_scope) { }
#define ATOMICS(space, T) \
  INLINE T atomic_load_explicit(const volatile space atomic<T>* p, memory_order) { return p->value; } \
  INLINE void atomic_store_explicit(volatile space atomic<T>* p, T v, memory_order) { p->value = v; } \
  INLINE T atomic_fetch_add_explicit(volatile space atomic<T>* p, T v, memory_order) { return ::atomic_add((volatile space T*)p, v); } \
  INLINE T atomic_fetch_or_explicit(volatile space atomic<T>* p, T v, memory_order) { return ::atomic_or((volatile space T*)p, v); } \
  INLINE T atomic_fetch_max_explicit(volatile space atomic<T>* p, T v, memory_order) { return ::atomic_max((volatile space T*)p, v); } \
  INLINE T atomic_fetch_min_explicit(volatile space atomic<T>* p, T v, memory_order) { return ::atomic_min((volatile space T*)p, v); }
ATOMICS(device, uint) ATOMICS(device, int) ATOMICS(threadgroup, uint) ATOMICS(threadgroup, int)
template <> INLINE float2 metal_multiply<float2, half2, half2, float2>(half2 a, half2 b, float2 c) {
  return (float2)(fma(float(a.x), float(b.x), c.x), fma(float(a.y), float(b.y), c.y));
}
}
