// metal:: mathematics. Arguments of one call must have one type, as on Metal.
#pragma once
#include "types.h"

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define M_PI_F 3.14159265358979323846f
#define FLT_MAX __FLT_MAX__

namespace metal {

#define EMU_UNARY(name, builtin)                    \
  inline float name(float x) { return builtin(x); } \
  inline half name(half x) { return half(builtin(float(x))); }
#define EMU_ALL_UNARY                      \
  EMU_UNARY(exp, __builtin_expf)           \
  EMU_UNARY(exp2, __builtin_exp2f)         \
  EMU_UNARY(log, __builtin_logf)           \
  EMU_UNARY(log2, __builtin_log2f)         \
  EMU_UNARY(sqrt, __builtin_sqrtf)         \
  EMU_UNARY(rsqrt, 1.0f / __builtin_sqrtf) \
  EMU_UNARY(sin, __builtin_sinf)           \
  EMU_UNARY(cos, __builtin_cosf)           \
  EMU_UNARY(tanh, __builtin_tanhf)         \
  EMU_UNARY(rint, __builtin_rintf)         \
  EMU_UNARY(round, __builtin_roundf)       \
  EMU_UNARY(floor, __builtin_floorf)       \
  EMU_UNARY(ceil, __builtin_ceilf)         \
  EMU_UNARY(trunc, __builtin_truncf)
EMU_ALL_UNARY
namespace precise {
EMU_ALL_UNARY
}
namespace fast {
EMU_ALL_UNARY
}
#undef EMU_ALL_UNARY
#undef EMU_UNARY

inline float atan2(float y, float x) { return __builtin_atan2f(y, x); }
inline float acos(float x) { return __builtin_acosf(x); }
inline float pow(float x, float y) { return __builtin_powf(x, y); }
inline float fmod(float x, float y) { return __builtin_fmodf(x, y); }
inline float ldexp(float x, int k) { return __builtin_ldexpf(x, k); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return half(float(a) * float(b) + float(c)); }
template <int N>
inline vec<half, N> fma(vec<half, N> a, vec<half, N> b, vec<half, N> c) {
  for (int i = 0; i < N; i++) a.v[i] = fma(a.v[i], b.v[i], c.v[i]);
  return a;
}

inline float saturate(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }

// A NaN loses against a number, as fmax and fmin have it on all three machines.
template <class T>
inline T max(T a, T b) {
  return b != b || a >= b ? a : b;
}
template <class T>
inline T min(T a, T b) {
  return b != b || a <= b ? a : b;
}
template <class T>
inline T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class T>
inline T abs(T x) {
  return x < T(0) ? T(-x) : x;
}
inline float abs(float x) { return __builtin_fabsf(x); }
inline float fabs(float x) { return __builtin_fabsf(x); }
inline float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f; }
template <class T>
inline T select(T otherwise, T chosen, bool condition) {
  return condition ? chosen : otherwise;
}

template <class T>
inline T popcount(T x) {
  return T(__builtin_popcountll(uint64_t(x) & (~uint64_t(0) >> (64 - 8 * sizeof(T)))));
}
inline uint clz(uint x) { return x ? uint(__builtin_clz(x)) : 32u; }
inline uint ctz(uint x) { return x ? uint(__builtin_ctz(x)) : 32u; }
inline uint reverse_bits(uint x) {
  uint out = 0;
  for (uint i = 0; i < 32; i++) out |= ((x >> i) & 1u) << (31 - i);
  return out;
}
inline uint extract_bits(uint x, uint offset, uint bits) {
  return bits == 0 ? 0u : (x >> offset) & (0xffffffffu >> (32 - bits));
}

}  // namespace metal
