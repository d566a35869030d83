// The three functions that MLX asks of a BLAS, answered by the OpenBLAS in NumPy's wheel (whose names
// have an affix and whose integers have 64 bits).
#include <cstdint>

#define FORWARD(NAME, T, SCALAR)                                                                    \
  extern "C" void scipy_##NAME##64_(int, int, int, int64_t, int64_t, int64_t, SCALAR, const T*,     \
                                    int64_t, const T*, int64_t, SCALAR, T*, int64_t);               \
  extern "C" void NAME(int layout, int ta, int tb, int m, int n, int k, SCALAR alpha, const T* a,   \
                       int lda, const T* b, int ldb, SCALAR beta, T* c, int ldc) {                  \
    scipy_##NAME##64_(layout, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                \
  }

FORWARD(cblas_sgemm, float, float)
FORWARD(cblas_dgemm, double, double)
FORWARD(cblas_cgemm, void, const void*)
