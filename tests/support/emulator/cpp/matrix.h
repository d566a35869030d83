// simdgroup 8x8 matrices. Lane map as in MLX's own kernels: a lane holds two neighbours of one row.
#pragma once
#include "simd.h"

namespace emu {
extern "C" unsigned emu_lane();
inline uint matrix_row() {
  uint lane = emu_lane(), quad = lane / 4;
  return (quad & 4u) + (lane / 2) % 4;
}
inline uint matrix_column() {
  uint lane = emu_lane(), quad = lane / 4;
  return (quad & 2u) * 2 + (lane % 2) * 2;
}
}  // namespace emu

namespace metal {

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup matrices are 8 x 8");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T x) : elements(x, x) {}
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

template <class T, int R, int C>
inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T x) {
  return simdgroup_matrix<T, R, C>(x);
}

template <class T, class U>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const U* source,
                           ulong elements_per_row = 8, vec<ulong, 2> origin = vec<ulong, 2>(0, 0),
                           bool transpose = false, EMU_HERE) {
  static_assert(emu::same<T, U>, "a matrix is loaded from memory of its own type");
  emu_barrier(emu::kSimdBarrier, 0, at);
  for (uint i = 0; i < 2; i++) {
    ulong row = emu::matrix_row(), column = emu::matrix_column() + i;
    if (transpose)
      m.elements[i] = source[(origin.x + column) * elements_per_row + origin.y + row];
    else
      m.elements[i] = source[(origin.y + row) * elements_per_row + origin.x + column];
  }
}

template <class T, class U>
inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, U* target,
                            ulong elements_per_row = 8, vec<ulong, 2> origin = vec<ulong, 2>(0, 0),
                            bool transpose = false, EMU_HERE) {
  static_assert(emu::same<T, U>, "a matrix is stored to memory of its own type");
  emu_barrier(emu::kSimdBarrier, 0, at);
  for (uint i = 0; i < 2; i++) {
    ulong row = emu::matrix_row(), column = emu::matrix_column() + i;
    if (transpose)
      target[(origin.x + column) * elements_per_row + origin.y + row] = m.elements[i];
    else
      target[(origin.y + row) * elements_per_row + origin.x + column] = m.elements[i];
  }
}

// d = a b + c, summed in float and rounded once.
template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                          const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b,
                                          const simdgroup_matrix<C, 8, 8>& c, EMU_HERE) {
  float fa[2], fb[2], fc[2], fd[2];
  for (int i = 0; i < 2; i++) {
    fa[i] = float(a.elements[i]), fb[i] = float(b.elements[i]), fc[i] = float(c.elements[i]);
  }
  emu_matrix(emu::kMatrix8, fa, fb, fc, fd, at);
  d.elements = vec<D, 2>(D(fd[0]), D(fd[1]));
}

template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b, EMU_HERE) {
  simdgroup_matrix<D, 8, 8> zero(D(0));
  simdgroup_multiply_accumulate(d, a, b, zero, at);
}

}  // namespace metal
