// metal:: mathematics. Arguments of one call must have one type, as on Metal.
#pragma once
#include "types.h"

#define INFINITY __builtin_inff()

namespace metal {

inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline float floor(float x) { return __builtin_floorf(x); }
namespace fast {
inline float exp2(float x) { return __builtin_exp2f(x); }
inline float sin(float x) { return __builtin_sinf(x); }
inline float cos(float x) { return __builtin_cosf(x); }
}  // namespace fast

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return half(float(a) * float(b) + float(c)); }
template <int N>
inline vec<half, N> fma(vec<half, N> a, vec<half, N> b, vec<half, N> c) {
  for (int i = 0; i < N; i++) a.v[i] = fma(a.v[i], b.v[i], c.v[i]);
  return a;
}

inline float saturate(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

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
inline T abs(T x) {
  return x < T(0) ? T(-x) : x;
}
inline float abs(float x) { return __builtin_fabsf(x); }

}  // namespace metal
