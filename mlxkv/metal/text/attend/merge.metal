// Merges the partials of all splits into the output, one query row per threadgroup, in float32.
// partial_out [all rows, splits, WIDTH], partial_stats [all rows, splits, 2] (maximum, sum)
// up [runs, all heads, kv heads or 1, RV, D]: maps the values of a run of pages from the stored domain to the
// model's (HAS_UP).
// sinks [heads]: logits of attention sinks; scale[1]: log2(e).
// size: [splits, page splits, rows per kv head, kv heads, new tokens, heads of up, page splits of the
// first run, runs, stored dims of values where RV is 0]
// out [all rows, D] of type T.
threadgroup float stored[2 * WIDTH];

const int row = threadgroup_position_in_grid.x;
const int splits = size[0];
const int page_splits = size[1];
const int kv_head = (row / size[2]) % size[3];
const int runs = size[7];
const int up_head = (row / size[2]) % size[5];
const size_t first = size_t(row) * splits;
const int value_dims = RV > 0 ? RV : size[8];
const int thread_id = thread_position_in_threadgroup.x;
const int threads = threads_per_threadgroup.x;

float peak = -1.0e30f;
for (int n = 0; n < splits; n++) {
  peak = metal::max(peak, partial_stats[2 * (first + n)]);
}
float all = 0.0f;
if (HAS_SINKS) {
  const int head = kv_head * (size[2] / size[4]) + (row % size[2]) / size[4];
  const float logit = sinks[head] * scale[1];
  peak = metal::max(peak, logit);
  all = metal::fast::exp2(logit - peak);
}
for (int n = 0; n < splits; n++) {
  const size_t at = 2 * (first + n);
  all += partial_stats[at + 1] * metal::fast::exp2(partial_stats[at] - peak);
}
const float share = all > 0.0f ? 1.0f / all : 0.0f;

// Pages first, in the stored domain.
for (int i = thread_id; i < runs * value_dims; i += threads) {
  const int run = i / value_dims;
  const int dim = i % value_dims;
  const int stop = run + 1 < runs ? size[6] : page_splits;
  float total = 0.0f;
  for (int n = run > 0 ? size[6] : 0; n < stop; n++) {
    const size_t slot = first + n;
    total += partial_out[slot * WIDTH + dim] * metal::fast::exp2(partial_stats[2 * slot] - peak);
  }
  stored[run * WIDTH + dim] = total;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int dim = thread_id; dim < D; dim += threads) {
  float total = 0.0f;
  if (HAS_UP) {
    for (int run = 0; run < runs; run++) {
      const device float* column = up + size_t(run * size[5] + up_head) * value_dims * D + dim;
      for (int n = 0; n < value_dims; n++) {
        total = metal::fma(stored[run * WIDTH + n], column[n * D], total);
      }
    }
  } else {
    for (int run = 0; run < runs; run++) {
      total += stored[run * WIDTH + dim];
    }
  }
  for (int n = page_splits; n < splits; n++) {
    const size_t slot = first + n;
    total += partial_out[slot * WIDTH + dim] * metal::fast::exp2(partial_stats[2 * slot] - peak);
  }
  out[size_t(row) * D + dim] = T(total * share);
}
