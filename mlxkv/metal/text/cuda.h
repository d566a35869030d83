// The dialect's words on CUDA, before codes.h. mx.fast.cuda_kernel passes
// --device-as-default-execution-space: plain functions are device functions.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef __nv_bfloat16 bfloat16_t;
typedef unsigned int uint;
typedef unsigned short ushort;

struct kv_uint3 {
  uint x, y, z;
};

inline kv_uint3 kv_grid_threads() {
  return {gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z};
}

#define thread_index_in_simdgroup (threadIdx.x % 32u)
#define simdgroup_index_in_threadgroup (threadIdx.x / 32u)
#define thread_position_in_threadgroup threadIdx
#define threadgroup_position_in_grid blockIdx
#define threads_per_threadgroup blockDim
#define threads_per_grid (kv_grid_threads())

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) {
  __syncthreads();
}

inline void simdgroup_barrier(mem_flags) {
  __syncwarp();
}

template <typename T>
inline T simd_shuffle(T value, ushort lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
template <typename T>
inline T simd_shuffle_xor(T value, ushort distance) {
  return __shfl_xor_sync(0xffffffffu, value, distance);
}
inline int simd_sum(int value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(0xffffffffu, value);
#else
  for (int step = 1; step < 32; step *= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, step);
  }
  return value;
#endif
}
inline bool simd_any(bool value) {
  return __any_sync(0xffffffffu, value);
}

template <typename To, typename From>
inline To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs equal sizes");
  To out;
  memcpy(&out, &value, sizeof(To));
  return out;
}

#define coherent(scope)
typedef uint atomic_uint;
enum memory_order_ { memory_order_relaxed, memory_order_seq_cst };
enum thread_scope_ { thread_scope_device };
inline void atomic_thread_fence(mem_flags, memory_order_, thread_scope_) {
  __threadfence();
}
inline uint atomic_fetch_add_explicit(atomic_uint* at, uint value, memory_order_) {
  return atomicAdd(at, value);
}
inline void atomic_store_explicit(atomic_uint* at, uint value, memory_order_) {
  atomicExch(at, value);
}
// A pointer to threadgroup memory (butterflies.h) is a plain pointer: `threadgroup` here declares memory.
#define KV_PAIRS
typedef float2* kv_pairs;
// The same in tile.h.
#define KV_STAGE
typedef const uint* kv_words;
typedef const uint4* kv_quads;
typedef const uint4* KvMixedTable;
typedef float* kv_floats;
typedef float2* kv_two;
typedef float4* kv_four;
typedef half* kv_shared_halves;
struct __align__(8) half4 {
  half x, y, z, w;
};
typedef const half4* kv_half_fours;

namespace metal {
inline float max(float a, float b) {
  return fmaxf(a, b);
}
inline float min(float a, float b) {
  return fminf(a, b);
}
inline int max(int a, int b) {
  return a > b ? a : b;
}
inline uint min(uint a, uint b) {
  return a < b ? a : b;
}
inline int min(int a, int b) {
  return a < b ? a : b;
}
inline float abs(float a) {
  return fabsf(a);
}
inline float fma(float a, float b, float c) {
  return fmaf(a, b, c);
}
inline float saturate(float a) {
  return __saturatef(a);
}
inline float sqrt(float a) {
  return sqrtf(a);
}
inline float rint(float a) {
  return rintf(a);
}
inline float log2(float a) {
  return log2f(a);
}
namespace fast {
inline float exp2(float a) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(a));
  return out;
}
inline float cos(float a) {
  return __cosf(a);
}
inline float sin(float a) {
  return __sinf(a);
}
} // namespace fast
} // namespace metal

// 1 / a, exact but for the last bits, for quantize.h; without a branch for values out of range.
#define KV_INVERSE
constexpr int KV_ROOMY = 1;
inline float kv_inverse(float a) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(a));
  return out;
}

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// Last, because attributes such as __device__ contain the first of these words.
#define device
#define constant
#define thread
#define threadgroup __shared__
