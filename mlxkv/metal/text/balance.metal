// Finds KVarN's scales of the tokens and channels of a tile, as `balance` in codec/dual_scale.py.
// One threadgroup of S simdgroups per tile. A thread keeps its values in registers: tokens group + S k,
// channels lane + 32 c.
// x [tiles, TOKENS, DIMS] float; tokens [tiles, TOKENS], channels [tiles, DIMS]
// numbers: [least and largest log2 of a scale; smallest and largest deviation of a step; least deviation in
// an imbalance; factor by which a state must be better]
// Template: TOKENS a multiple of S, DIMS of 32, CHANNEL (1: scale tokens first), UNIT (1: divide the tile by
// its deviation first), ROUNDS.
constexpr int K = TOKENS / S;
constexpr int C = DIMS / 32;

threadgroup float sums[S * DIMS];
threadgroup float means[DIMS];
threadgroup float ends[S * 5];

const int lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup;
const int tile = threadgroup_position_in_grid.x;
const device float* from = x + size_t(tile) * TOKENS * DIMS;

float v[K * C];
#pragma unroll
for (int k = 0; k < K; k++) {
#pragma unroll
  for (int c = 0; c < C; c++) {
    v[k * C + c] = from[(group + S * k) * DIMS + lane + 32 * c];
  }
}
if (UNIT) {
  float mean = 0.0f;
  for (int pass = 0; pass < 2; pass++) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < K * C; i++) {
      sum += pass == 0 ? v[i] : (v[i] - mean) * (v[i] - mean);
    }
    for (ushort step = 1; step < 32; step *= 2) {
      sum += simd_shuffle_xor(sum, step);
    }
    if (lane == 0) {
      ends[5 * group + pass] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = 0.0f;
    for (int n = 0; n < S; n++) {
      sum += ends[5 * n + pass];
    }
    if (pass == 0) {
      mean = sum / float(TOKENS * DIMS);
    } else {
      const float deviation = metal::sqrt(sum / float(TOKENS * DIMS - 1));
#pragma unroll
      for (int i = 0; i < K * C; i++) {
        v[i] /= deviation > 0.0f ? deviation : 1.0f;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

float log_t[K];
float log_c[C];
float best_t[K];
float best_c[C];
float spread_t[K];
float spread_c[C];
#pragma unroll
for (int k = 0; k < K; k++) {
  log_t[k] = best_t[k] = 0.0f;
}
#pragma unroll
for (int c = 0; c < C; c++) {
  log_c[c] = best_c[c] = 0.0f;
}
float lowest = 0.0f;
#pragma unroll 1
for (int n = 0; n <= ROUNDS; n++) {
  // Scale the first axis, measure and scale the other, measure the first.
#pragma unroll 1
  for (int turn = 0; turn < 2; turn++) {
    const bool over_tokens = (turn == 0) == (CHANNEL == 1);  // deviations of channels
    for (int when = 0; when < 2; when++) {
      if (n > 0 && turn == 0 && (when == 0) == (CHANNEL == 1)) {
#pragma unroll
        for (int k = 0; k < K; k++) {
          const float step = metal::log2(metal::max(metal::min(spread_t[k], numbers[3]), numbers[2]));
          const float next = metal::max(metal::min(log_t[k] + step, numbers[1]), numbers[0]);
          spread_t[k] *= metal::fast::exp2(log_t[k] - next);
          log_t[k] = next;
        }
      } else if (n > 0 && turn == 0) {
#pragma unroll
        for (int c = 0; c < C; c++) {
          const float step = metal::log2(metal::max(metal::min(spread_c[c], numbers[3]), numbers[2]));
          const float next = metal::max(metal::min(log_c[c] + step, numbers[1]), numbers[0]);
          spread_c[c] *= metal::fast::exp2(log_c[c] - next);
          log_c[c] = next;
        }
      }
      if (when == 0) {
        float down_c[C];
#pragma unroll
        for (int c = 0; c < C; c++) {
          down_c[c] = metal::fast::exp2(-log_c[c]);
        }
        if (over_tokens) {
          float center[C];
          for (int pass = 0; pass < 2; pass++) {
            float sum[C];
#pragma unroll
            for (int c = 0; c < C; c++) {
              sum[c] = 0.0f;
            }
#pragma unroll
            for (int k = 0; k < K; k++) {
              const float down = metal::fast::exp2(-log_t[k]);
#pragma unroll
              for (int c = 0; c < C; c++) {
                const float y = v[k * C + c] * down * down_c[c];
                sum[c] += pass == 0 ? y : (y - center[c]) * (y - center[c]);
              }
            }
#pragma unroll
            for (int c = 0; c < C; c++) {
              sums[group * DIMS + lane + 32 * c] = sum[c];
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (int i = 32 * group + lane; i < DIMS; i += 32 * S) {
              float all = 0.0f;
              for (int m = 0; m < S; m++) {
                all += sums[m * DIMS + i];
              }
              means[i] = pass == 0 ? all / float(TOKENS) : metal::sqrt(all / float(TOKENS - 1));
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
            for (int c = 0; c < C; c++) {
              center[c] = means[lane + 32 * c];
              spread_c[c] = center[c];
            }
          }
        } else {
#pragma unroll
          for (int k = 0; k < K; k++) {
            const float down = metal::fast::exp2(-log_t[k]);
            float center = 0.0f;
            for (int pass = 0; pass < 2; pass++) {
              float sum = 0.0f;
#pragma unroll
              for (int c = 0; c < C; c++) {
                const float y = v[k * C + c] * down * down_c[c];
                sum += pass == 0 ? y : (y - center) * (y - center);
              }
              for (ushort step = 1; step < 32; step *= 2) {
                sum += simd_shuffle_xor(sum, step);
              }
              center = pass == 0 ? sum / float(DIMS) : metal::sqrt(sum / float(DIMS - 1));
            }
            spread_t[k] = center;
          }
        }
      }
    }
  }
  // Imbalance of the tile: largest over smallest deviation, of tokens and of channels.
  float end[5];
  end[0] = spread_t[0];
  end[1] = spread_t[0];
  end[2] = spread_c[0];
  end[3] = spread_c[0];
  end[4] = 0.0f;  // NaN shows in a sum, not in a maximum
#pragma unroll
  for (int k = 0; k < K; k++) {
    end[0] = metal::max(end[0], spread_t[k]);
    end[1] = metal::min(end[1], spread_t[k]);
    end[4] += spread_t[k];
  }
#pragma unroll
  for (int c = 0; c < C; c++) {
    end[2] = metal::max(end[2], spread_c[c]);
    end[3] = metal::min(end[3], spread_c[c]);
  }
  for (ushort step = 1; step < 32; step *= 2) {
    end[2] = metal::max(end[2], simd_shuffle_xor(end[2], step));
    end[3] = metal::min(end[3], simd_shuffle_xor(end[3], step));
  }
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < 5; i++) {
      ends[5 * group + i] = end[i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int m = 0; m < S; m++) {
    end[0] = metal::max(end[0], ends[5 * m]);
    end[1] = metal::min(end[1], ends[5 * m + 1]);
    end[4] += ends[5 * m + 4];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float reached = end[0] / metal::max(end[1], numbers[4]) +
      end[2] / metal::max(end[3], numbers[4]) + 0.0f * end[4];
  if (n == 0) {
    lowest = reached;
  } else if (reached < lowest * numbers[5]) {
    lowest = reached;
#pragma unroll
    for (int k = 0; k < K; k++) {
      best_t[k] = log_t[k];
    }
#pragma unroll
    for (int c = 0; c < C; c++) {
      best_c[c] = log_c[c];
    }
  }
}
#pragma unroll
for (int k = 0; k < K; k++) {
  if (lane == 0) {
    tokens[size_t(tile) * TOKENS + group + S * k] = metal::fast::exp2(best_t[k]);
  }
}
#pragma unroll
for (int c = 0; c < C; c++) {
  if (group == 0) {
    channels[size_t(tile) * DIMS + lane + 32 * c] = metal::fast::exp2(best_c[c]);
  }
}
