// What a compiler knows of Metal's library on any machine: bodies of what words.h declares. Between numbers alone.
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
