// Vectors from numbers: C++ for OpenCL has no float2(a, b). Behind MLX's preamble, which defines conversions to vectors.
#define SAME(T, U, N) inline T##N make_##T##N(U##N a) { return __builtin_convertvector(a, T##N); }
#define EACH(T, N) SAME(T, float, N) SAME(T, half, N) SAME(T, int, N) SAME(T, uint, N) SAME(T, short, N) SAME(T, ushort, N) SAME(T, uchar, N)
#define MAKE(T) \
  inline T##2 make_##T##2(T a) { return (T##2)(a); } \
  inline T##3 make_##T##3(T a) { return (T##3)(a); } \
  inline T##4 make_##T##4(T a) { return (T##4)(a); } \
  inline T##2 make_##T##2(T a, T b) { return (T##2)(a, b); } \
  inline T##3 make_##T##3(T a, T b, T c) { return (T##3)(a, b, c); } \
  inline T##4 make_##T##4(T a, T b, T c, T d) { return (T##4)(a, b, c, d); } \
  inline T##4 make_##T##4(T##2 a, T##2 b) { return (T##4)(a, b); } \
  EACH(T, 2) EACH(T, 3) EACH(T, 4)
namespace metal {
MAKE(float) MAKE(half) MAKE(int) MAKE(uint) MAKE(short) MAKE(ushort) MAKE(uchar) MAKE(char)
}
#undef SAME
#undef EACH
#undef MAKE
#define float2(...) metal::make_float2(__VA_ARGS__)
#define float3(...) metal::make_float3(__VA_ARGS__)
#define float4(...) metal::make_float4(__VA_ARGS__)
#define half2(...) metal::make_half2(__VA_ARGS__)
#define half3(...) metal::make_half3(__VA_ARGS__)
#define half4(...) metal::make_half4(__VA_ARGS__)
#define int2(...) metal::make_int2(__VA_ARGS__)
#define int3(...) metal::make_int3(__VA_ARGS__)
#define int4(...) metal::make_int4(__VA_ARGS__)
#define uint2(...) metal::make_uint2(__VA_ARGS__)
#define uint3(...) metal::make_uint3(__VA_ARGS__)
#define uint4(...) metal::make_uint4(__VA_ARGS__)
#define ushort2(...) metal::make_ushort2(__VA_ARGS__)
#define ushort4(...) metal::make_ushort4(__VA_ARGS__)
#define short2(...) metal::make_short2(__VA_ARGS__)
#define short4(...) metal::make_short4(__VA_ARGS__)
#define uchar2(...) metal::make_uchar2(__VA_ARGS__)
#define uchar4(...) metal::make_uchar4(__VA_ARGS__)
