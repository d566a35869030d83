// Partials of all splits -> one output per query row, in float32. One threadgroup per row.
// partial_out [rows in all, splits, WIDTH], partial_stats [rows in all, splits, 2] (maximum, sum)
// sinks [heads]: logits of attention sinks times log2(e); size: [splits, page splits, rows per kv
// head, kv heads, new tokens]. out_pages [rows, RV] in the stored domain, out_window [rows, D].
const int row = threadgroup_position_in_grid.x;
const int splits = size[0];
const int page_splits = size[1];
const size_t first = size_t(row) * splits;

float peak = -1.0e30f;
for (int n = 0; n < splits; n++) {
  peak = metal::max(peak, partial_stats[2 * (first + n)]);
}
float sink = 0.0f;
if (HAS_SINKS) {
  const int kv_head = (row / size[2]) % size[3];
  const float logit = sinks[kv_head * (size[2] / size[4]) + (row % size[2]) / size[4]];
  peak = metal::max(peak, logit);
  sink = metal::exp2(logit - peak);
}
float all = sink;
for (int n = 0; n < splits; n++) {
  const size_t at = 2 * (first + n);
  all += partial_stats[at + 1] * metal::exp2(partial_stats[at] - peak);
}
const float share = all > 0.0f ? 1.0f / all : 0.0f;
const int threads = threads_per_threadgroup.x;
for (int dim = thread_position_in_threadgroup.x; dim < WIDTH; dim += threads) {
  float pages = 0.0f;
  float window = 0.0f;
  for (int n = 0; n < splits; n++) {
    const size_t slot = first + n;
    const float value =
        partial_out[slot * WIDTH + dim] * metal::exp2(partial_stats[2 * slot] - peak) * share;
    if (n < page_splits) {
      pages += value;
    } else {
      window += value;
    }
  }
  if (dim < RV) {
    out_pages[size_t(row) * RV + dim] = pages;
  }
  if (dim < D) {
    out_window[size_t(row) * D + dim] = window;
  }
}
