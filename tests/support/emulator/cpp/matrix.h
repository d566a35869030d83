// simdgroup 8x8 matrices. Lane map as in MLX's own kernels: a lane holds two neighbours of one row.
#pragma once
#include "simd.h"

namespace metal {

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup matrices are 8 x 8");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

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

}  // namespace metal
