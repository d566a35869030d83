// Metal's library on an AMD GPU with 32 lanes (gfx1030), one or two instructions each, as Apple's GPUs have it: so that
// registers can be counted. Numbers that come out are not always right: a sum goes by shuffles, a matrix product is one instruction.
namespace metal {
#define ONE_OP(n, op) \
  INLINE float n(float x) { return op(x); } \
  namespace fast { INLINE float n(float x) { return op(x); } } \
  namespace precise { INLINE float n(float x) { return op(x); } }
ONE_OP(exp2, __builtin_exp2f)
ONE_OP(exp, __builtin_exp2f)
ONE_OP(log2, __builtin_log2f)
ONE_OP(log, __builtin_log2f)
ONE_OP(sqrt, __builtin_amdgcn_sqrtf)
ONE_OP(rsqrt, __builtin_amdgcn_rsqf)
ONE_OP(cos, __builtin_amdgcn_cosf)
ONE_OP(sin, __builtin_amdgcn_sinf)
ONE_OP(rint, __builtin_rintf)
ONE_OP(floor, __builtin_floorf)
ONE_OP(ceil, __builtin_ceilf)
ONE_OP(trunc, __builtin_truncf)
ONE_OP(fract, __builtin_amdgcn_fractf)
ONE_OP(fabs, __builtin_fabsf)
INLINE half fma(half a, half b, half c) { return __builtin_fmaf16(a, b, c); }
INLINE half2 fma(half2 a, half2 b, half2 c) { asm("v_pk_fma_f16 %0, %1, %2, %0" : "+v"(c) : "v"(a), "v"(b)); return c; }
INLINE float2 fma(float2 a, float2 b, float2 c) { return (float2)(fma(a.x, b.x, c.x), fma(a.y, b.y, c.y)); }
INLINE float4 fma(float4 a, float4 b, float4 c) { return (float4)(fma(a.xy, b.xy, c.xy), fma(a.zw, b.zw, c.zw)); }
INLINE uint popcount(uint x) { return __builtin_popcount(x); }
INLINE uint clz(uint x) { return x ? __builtin_clz(x) : 32u; }
INLINE uint ctz(uint x) { return x ? __builtin_ctz(x) : 32u; }
INLINE uint metal_lane() { return __builtin_amdgcn_mbcnt_lo(~0u, 0); }
INLINE uint metal_from(uint x, uint lane) { return __builtin_amdgcn_ds_bpermute(int(lane * 4u), int(x)); }
#define MOVES(T) \
  INLINE T simd_shuffle(T x, ushort l) { return as_type<T>(metal_from(as_type<uint>(x), l)); } \
  INLINE T simd_shuffle_xor(T x, ushort m) { return as_type<T>(metal_from(as_type<uint>(x), metal_lane() ^ m)); } \
  INLINE T simd_shuffle_up(T x, ushort m) { return as_type<T>(metal_from(as_type<uint>(x), metal_lane() - m)); } \
  INLINE T simd_shuffle_down(T x, ushort m) { return as_type<T>(metal_from(as_type<uint>(x), metal_lane() + m)); } \
  INLINE T simd_broadcast(T x, ushort l) { return as_type<T>(metal_from(as_type<uint>(x), l)); }
MOVES(uint) MOVES(int) MOVES(float) MOVES(half2) MOVES(ushort2)
#define FOLDS(T) \
  INLINE T simd_sum(T x) { for (ushort m = 16; m; m /= 2) x += simd_shuffle_xor(x, m); return x; } \
  INLINE T simd_max(T x) { for (ushort m = 16; m; m /= 2) x = max(x, simd_shuffle_xor(x, m)); return x; } \
  INLINE T simd_min(T x) { for (ushort m = 16; m; m /= 2) x = min(x, simd_shuffle_xor(x, m)); return x; }
FOLDS(uint) FOLDS(int) FOLDS(float)
INLINE uint simd_or(uint x) { for (ushort m = 16; m; m /= 2) x |= simd_shuffle_xor(x, m); return x; }
INLINE uint simd_and(uint x) { for (ushort m = 16; m; m /= 2) x &= simd_shuffle_xor(x, m); return x; }
INLINE bool simd_any(bool x) { return __builtin_amdgcn_uicmp(uint(x), 0u, 33) != 0ul; }
INLINE bool simd_all(bool x) { return __builtin_amdgcn_uicmp(uint(x), 0u, 32) == 0ul; }
INLINE void threadgroup_barrier(mem_flags) { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "workgroup"); __builtin_amdgcn_s_barrier(); }
INLINE void simdgroup_barrier(mem_flags) { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront"); __builtin_amdgcn_wave_barrier(); }
INLINE void atomic_thread_fence(mem_flags, memory_order, thread_scope) { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
#define ATOMICS(space, T) \
  INLINE T atomic_load_explicit(const volatile space atomic<T>* p, memory_order) { return p->value; } \
  INLINE void atomic_store_explicit(volatile space atomic<T>* p, T v, memory_order) { p->value = v; } \
  INLINE T atomic_fetch_add_explicit(volatile space atomic<T>* p, T v, memory_order) { T o = p->value; p->value = o + v; return o; } \
  INLINE T atomic_fetch_or_explicit(volatile space atomic<T>* p, T v, memory_order) { T o = p->value; p->value = o | v; return o; } \
  INLINE T atomic_fetch_max_explicit(volatile space atomic<T>* p, T v, memory_order) { T o = p->value; p->value = max(o, v); return o; } \
  INLINE T atomic_fetch_min_explicit(volatile space atomic<T>* p, T v, memory_order) { T o = p->value; p->value = min(o, v); return o; }
ATOMICS(device, uint) ATOMICS(device, int) ATOMICS(threadgroup, uint) ATOMICS(threadgroup, int)
template <> INLINE float2 metal_multiply<float2, half2, half2, float2>(half2 a, half2 b, float2 c) {
  asm volatile("v_pk_fma_f16 %0, %1, %2, %0" : "+v"(c) : "v"(a), "v"(b));
  return c;
}
}
