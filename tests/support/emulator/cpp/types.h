// Scalar and vector types of the dialect, spelled in C++ with no standard header (compile time).
#pragma once

#define device
#define constant
#define threadgroup
#define thread
#define coherent(scope)

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

namespace emu {
template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;
}  // namespace emu

// g++ 12 has no bfloat. Both directions are explicit: the dialect asks for float(x) and T(x).
struct bfloat {
  ushort bits;
  bfloat() = default;
  template <class F>
  constexpr explicit bfloat(F value) : bits(rounded(float(value))) {}
  constexpr explicit operator float() const { return __builtin_bit_cast(float, uint(bits) << 16); }
  constexpr explicit operator half() const { return half(float(*this)); }
  constexpr explicit operator int() const { return int(float(*this)); }

  static constexpr ushort rounded(float value) {
    uint word = __builtin_bit_cast(uint, value);
    if ((word & 0x7fffffffu) > 0x7f800000u) return ushort((word >> 16) | 64u);  // stays a NaN
    return ushort((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
};
typedef bfloat bfloat16_t;

namespace metal {

template <class T, int N>
struct vec;

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    struct {
      T x, y;
    };
    T v[2];
  };
  vec() = default;
  constexpr explicit vec(T a) : v{a, a} {}
  constexpr vec(T a, T b) : v{a, b} {}
  constexpr T& operator[](int i) { return v[i]; }
  constexpr const T& operator[](int i) const { return v[i]; }
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    struct {
      T x, y, z;
    };
    T v[3];
  };
  vec() = default;
  constexpr explicit vec(T a) : v{a, a, a} {}
  constexpr vec(T a, T b, T c) : v{a, b, c} {}
  constexpr T& operator[](int i) { return v[i]; }
  constexpr const T& operator[](int i) const { return v[i]; }
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    struct {
      T x, y, z, w;
    };
    T v[4];
  };
  vec() = default;
  constexpr explicit vec(T a) : v{a, a, a, a} {}
  constexpr vec(T a, T b, T c, T d) : v{a, b, c, d} {}
  constexpr T& operator[](int i) { return v[i]; }
  constexpr const T& operator[](int i) const { return v[i]; }
};

// Component by component; the dialect uses this for half2 only, and CUDA needs a helper for it.
#define EMU_VECTOR_OPERATOR(op)                               \
  template <class T, int N>                                   \
  constexpr vec<T, N> operator op(vec<T, N> a, vec<T, N> b) { \
    for (int i = 0; i < N; i++) a.v[i] = T(a.v[i] op b.v[i]); \
    return a;                                                 \
  }
EMU_VECTOR_OPERATOR(+)
EMU_VECTOR_OPERATOR(-)
EMU_VECTOR_OPERATOR(*)
#undef EMU_VECTOR_OPERATOR

template <class To, class From>
constexpr To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different size");
  return __builtin_bit_cast(To, value);
}

}  // namespace metal

#define EMU_VECTORS(T)           \
  typedef metal::vec<T, 2> T##2; \
  typedef metal::vec<T, 3> T##3; \
  typedef metal::vec<T, 4> T##4;
EMU_VECTORS(uchar)
EMU_VECTORS(char)
EMU_VECTORS(ushort)
EMU_VECTORS(short)
EMU_VECTORS(uint)
EMU_VECTORS(int)
EMU_VECTORS(half)
EMU_VECTORS(bfloat)
EMU_VECTORS(float)
#undef EMU_VECTORS
