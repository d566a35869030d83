// Last part of attend: sum over the lanes of a simdgroup, then over simdgroups, to one output per query row
// and split.
#pragma unroll
for (int i = 0; i < QT * OB * 4; i++) {
  o[i] += simd_shuffle_xor(o[i], ushort(1));
  o[i] += simd_shuffle_xor(o[i], ushort(2));
}
#pragma unroll
for (int q = 0; q < QT; q++) {
  sum[q] += simd_shuffle_xor(sum[q], ushort(4));
  sum[q] += simd_shuffle_xor(sum[q], ushort(8));
  sum[q] += simd_shuffle_xor(sum[q], ushort(16));
  if (lane == 0) {
    tile_max[group * QT + q] = top[q];
    tile_sum[group * QT + q] = sum[q];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
float peaks[QT];
#pragma unroll
for (int q = 0; q < QT; q++) {
  peaks[q] = NOTHING;
  for (int n = 0; n < S; n++) {
    peaks[q] = metal::max(peaks[q], tile_max[n * QT + q]);
  }
}
for (int n = 0; n < S; n++) {
  if (n == group) {
#pragma unroll
    for (int q = 0; q < QT; q++) {
      const float shrink = metal::fast::exp2(top[q] - peaks[q]);
#pragma unroll
      for (int j = 0; j < OB; j++) {
        if (j % 4 == t) {  // the four lanes of a g hold the same sums: each keeps some blocks
#pragma unroll
          for (int p = 0; p < 4; p++) {
#if WITH_MIXED_BITS
            const int dim = paged ? 16 * (p / 2) + 2 * g + p % 2 : 4 * g + p;
#else
            const int dim = 4 * g + p;
#endif
            const int at = (q * OB + j) * 32 + dim;
            const float value = shrink * o[q * OB * 4 + 4 * j + p];
            tile_out[at] = n == 0 ? value : tile_out[at] + value;
          }
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
#pragma unroll
for (int q = 0; q < QT; q++) {
  const int row = first_row + q;
  if (row < rows) {
    const int slot = (head * rows + row) * splits + split;
    for (int i = thread_id; i < OB * 32; i += 32 * S) {
      partial_out[slot * OB * 32 + i] = tile_out[q * OB * 32 + i];
    }
    if (thread_id == 0) {
      float all = 0.0f;
      for (int n = 0; n < S; n++) {
        all += tile_sum[n * QT + q] * metal::fast::exp2(tile_max[n * QT + q] - peaks[q]);
      }
      partial_stats[2 * slot] = peaks[q];
      partial_stats[2 * slot + 1] = all;
    }
  }
}
