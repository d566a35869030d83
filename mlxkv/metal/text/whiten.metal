// Whitens rows b of R numbers: b L^-T with L L^T = b^T b + r I (Cholesky), whose second moment is the unit
// matrix. One threadgroup of S simdgroups per set of rows. The result equals Q of the QR factorisation in
// `orthonormal` in whiten.py.
// rows [sets, N, R] float; out [sets, N, R], then, with INVERSE, [sets, R, R]: L^-T
// numbers: [r as a share of the mean of the diagonal, the least diagonal entry, 6 unused]
// Template: N, R, S, INVERSE, PASSES (2: repeat on the result, against rounding errors of the moment).
constexpr int C = (R + 31) / 32;
constexpr int ALL = N + (INVERSE ? R : 0);
constexpr int SIDE_BY_SIDE = 4;  // rows of a simdgroup, which hide each other's latency

threadgroup float factor[R * (R + 1) / 2];  // lower triangle, row by row
threadgroup float column[32 * C];
threadgroup float inverses[R];  // of the diagonal

const int lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup;
const int thread_id = group * 32 + lane;
const int set = threadgroup_position_in_grid.x;
device float* to = out + size_t(set) * ALL * R;
const device float* from = rows + size_t(set) * N * R;

#pragma unroll 1
for (int pass = 0; pass < PASSES; pass++) {
  for (int i = group; i < R; i += S) {
    float sum[C];
    for (int c = 0; c < C; c++) {
      sum[c] = 0.0f;
    }
    for (int n = 0; n < N; n++) {
      const float own = from[n * R + i];
      for (int c = 0; c < C; c++) {
        const int j = lane + 32 * c;
        if (j <= i) {
          sum[c] = metal::fma(own, from[n * R + j], sum[c]);
        }
      }
    }
    for (int c = 0; c < C; c++) {
      const int j = lane + 32 * c;
      if (j <= i) {
        factor[i * (i + 1) / 2 + j] = sum[c];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_device);  // the rows read here are overwritten below
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float mean = 0.0f;
  for (int i = 0; i < R; i++) {
    mean += factor[i * (i + 3) / 2];
  }
  const float ridge = numbers[0] * mean / float(R);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_id; i < R; i += 32 * S) {
    factor[i * (i + 3) / 2] += ridge;
  }

#pragma unroll 1
  for (int k = 0; k < R; k++) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float inverse = 1.0f / metal::sqrt(metal::max(factor[k * (k + 3) / 2], numbers[1]));
    for (int i = k + 1 + thread_id; i < R; i += 32 * S) {
      const float value = factor[i * (i + 1) / 2 + k] * inverse;
      factor[i * (i + 1) / 2 + k] = value;
      column[i] = value;
    }
    if (thread_id == 0) {
      inverses[k] = inverse;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = k + 1 + group; i < R; i += S) {
      for (int c = 0; c < C; c++) {
        const int j = lane + 32 * c;
        if (j > k && j <= i) {
          factor[i * (i + 1) / 2 + j] -= column[i] * column[j];
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

#pragma unroll 1
  for (int first = SIDE_BY_SIDE * group; first < ALL; first += SIDE_BY_SIDE * S) {
    float b[SIDE_BY_SIDE * C];
    for (int n = 0; n < SIDE_BY_SIDE; n++) {
      const int row = first + n;
      for (int c = 0; c < C; c++) {
        const int j = lane + 32 * c;
        b[n * C + c] = j >= R || row >= ALL ? 0.0f
            : row < N ? from[row * R + j]
                      : (row - N == j ? 1.0f : 0.0f);
      }
    }
#pragma unroll
    for (int own = 0; own < C; own++) {
      for (int l = 0; l < 32 && 32 * own + l < R; l++) {
        const int k = 32 * own + l;
        float x[SIDE_BY_SIDE];
        for (int n = 0; n < SIDE_BY_SIDE; n++) {
          x[n] = simd_shuffle(b[n * C + own], ushort(l)) * inverses[k];
        }
        for (int c = own; c < C; c++) {
          const int j = lane + 32 * c;
          const float below = j > k && j < R ? factor[j * (j + 1) / 2 + k] : 0.0f;
          for (int n = 0; n < SIDE_BY_SIDE; n++) {
            b[n * C + c] = j == k ? x[n] : metal::fma(-x[n], below, b[n * C + c]);
          }
        }
      }
    }
    for (int n = 0; n < SIDE_BY_SIDE; n++) {
      for (int c = 0; c < C; c++) {
        const int j = lane + 32 * c;
        if (j < R && first + n < ALL) {
          to[(first + n) * R + j] = b[n * C + c];
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup_barrier(mem_flags::mem_device);
  from = to;
}
