// Last part of attend: sum over the lanes of a simdgroup, then over teams, to one output per query row and split.
#pragma unroll
for (int i = 0; i < QT * OB * 4; i++) {
  o[i] += simd_shuffle_xor(o[i], ushort(1));
  o[i] += simd_shuffle_xor(o[i], ushort(2));
}
float sum[SUMS];
kv_load_shared<SUMS>(sums, lane, sum);
#pragma unroll
for (int q = 0; q < OWN; q++) {
  const uint at = team * uint(QT) + first_own + uint(q);
  const float all = kv_all_lanes(sum[q * (1 + MORE)]);
  if (lane == 0u) {
    tile_max[at] = top[q];
    tile_sum[at] = all;
  }
#pragma unroll
  for (int i = 0; i < MORE; i++) {
    const float all_more = kv_all_lanes(sum[q * (1 + MORE) + 1 + i]);
    if (lane == 0u) {
      tile_more[at * uint(MORE) + uint(i)] = all_more;
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
#if WITH_PLAIN_V
// Biases, and what codes were too large by.
if (paged) {
#pragma unroll
  for (int q = 0; q < QT; q++) {
#pragma unroll
    for (int n = 0; n < PV; n++) {
      const uint of_group = SCALED > 1 ? 32u * (uint(PV) * own_part + uint(n)) / uint(GROUP_V) : 0u;
      if (SCALED == 1 || of_group < uint(SCALED)) {
        const uint at = (team * uint(QT) + uint(q)) * uint(MORE) + 2u * of_group;
        const float times = tile_more[at];
        const float lowest = tile_more[at + 1u];
#pragma unroll
        for (int d = 0; d < 4; d++) {
          o[q * OB * 4 + 4 * n + d] += lowest - (WIDE ? 0.0f : kv_code_offset<BITS_V>(d) * times);
        }
      }
    }
  }
}
#endif
#if WITH_MIXED_BITS
if (paged) {
#pragma unroll
  for (int n = 0; n < 2 * PV; n++) {
    const int b = 2 * PV * int(own_part) + n;
    if (b < blocks_v) {
      const device uint* entry = kv_mixed_entry(headers, 1, b);
      const float middle = as_type<float>(entry[10]);
      const float undo = as_type<float>(entry[9]);
#pragma unroll
      for (int q = 0; q < QT; q++) {
        const float times = tile_more[(team * uint(QT) + uint(q)) * uint(MORE)];
        const float larger = (WIDE ? 0.0f : KV_MIXED_OFFSET) * times;
        const int at = q * OB * 4 + 2 * n;
        o[at] -= metal::fma(middle, times, larger);
        o[at + 1] = metal::fma(o[at + 1] - larger, undo, -middle * times);
      }
    }
  }
}
#endif
float peaks[QT];
#pragma unroll
for (int q = 0; q < QT; q++) {
  peaks[q] = NOTHING;
  for (int n = 0; n < TEAMS; n++) {
    peaks[q] = metal::max(peaks[q], tile_max[n * QT + q]);
  }
}
const int out_blocks = paged ? PV : PD;  // of a simdgroup
const kv_floats tile_out = (kv_floats)row_words;
for (int n = 0; n < TEAMS; n++) {
  if (n == team) {
#pragma unroll
    for (int q = 0; q < QT; q++) {
      const float shrink = metal::fast::exp2(tile_max[team * uint(QT) + uint(q)] - peaks[q]);
#pragma unroll
      for (int j = 0; j < OB; j++) {
        if (uint(j % 4) == t && j < out_blocks) {  // the four lanes of a g hold the same sums: each keeps some blocks
#pragma unroll
          for (int d = 0; d < 4; d++) {
            const int dim = MIXED && paged ? 16 * (d / 2) + 2 * g + d % 2 : 4 * g + d;
            const int at = (q * PARTS * OB + out_blocks * own_part + j) * 32 + dim;
            const float value = shrink * o[q * OB * 4 + 4 * j + d];
            tile_out[at] = n == 0 ? value : tile_out[at] + value;
          }
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
constexpr int WIDTH_OUT = BV > BD ? BV : BD;  // blocks that are written
#pragma unroll
for (int q = 0; q < QT; q++) {
  const int row = first_row + q;
  if (row < rows) {
    const int slot = (head * rows + row) * splits + split;
    for (int i = thread_id; i < WIDTH_OUT * 32; i += 32 * S) {
      partial_out[slot * WIDTH_OUT * 32 + i] = i < 32 * PARTS * out_blocks ? tile_out[q * PARTS * OB * 32 + i] : 0.0f;
    }
    if (thread_id == 0) {
      float all = 0.0f;
      for (int n = 0; n < TEAMS; n++) {
        all += tile_sum[n * QT + q] * metal::fast::exp2(tile_max[n * QT + q] - peaks[q]);
      }
      partial_stats[2 * slot] = peaks[q];
      partial_stats[2 * slot + 1] = all;
    }
  }
}
