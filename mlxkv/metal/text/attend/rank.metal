// What chunks of tokens are ranked by: the logarithm to base 2 of the attention mass that the mean and the deviation of
// a chunk's keys promise each query row, and of the mass of the windows, exactly (spec/reading.py).
// Threadgroup: S simdgroups, a unit each: a chunk, or 16 tokens of a window; grid: (32 S x units / S, 1, heads of the batch).
//
// q_pages, q_window, sink_k, live_k, lengths, scale: as in attend.metal
// summaries [.., chunks, 2 RK] halves: mean and deviation of each stored dim
// size [rows, capacity of records, sink capacity, live capacity, new tokens, kv heads, chunks, units]
// logs [heads, rows, units]: first the chunks, then the sink, then live; NOTHING where there is none
constexpr int BLOCKS = (RK + 31) / 32;
constexpr float NOTHING = -1.0e30f;

const int lane = thread_index_in_simdgroup;
const int unit = threadgroup_position_in_grid.x * S + simdgroup_index_in_threadgroup;
const int head = threadgroup_position_in_grid.z;
const int rows = size[0];
const int chunks = size[6];
const int units = size[7];
const int batch = head / size[5];
const int n_records = lengths[5 * batch];
const int n_sink = lengths[5 * batch + 1];
const int n_live = lengths[5 * batch + 2];

if (unit < chunks) {
  const bool there = unit < n_records / LIST;
  const size_t first = (size_t(head % size[5]) * size[1] + size_t(lengths[5 * batch + 3])) / LIST;
  float mean[BLOCKS];
  float variance[BLOCKS];
#pragma unroll
  for (int j = 0; j < BLOCKS; j++) {
    const int dim = 32 * j + lane;
    const bool inside = there && dim < RK;
    const size_t at = (first + (there ? unit : 0)) * (2 * RK) + (inside ? dim : 0);
    mean[j] = inside ? float(summaries[at]) : 0.0f;
    const float deviation = inside ? float(summaries[at + RK]) : 0.0f;
    variance[j] = deviation * deviation * (0.5f / scale[1]);  // halved, in base-2 exponents
  }
  for (int row = 0; row < rows; row++) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
      const int dim = 32 * j + lane;
      const float q = dim < RK
          ? q_pages[(size_t(head) * rows + row) * RK + dim] * scale[0]
          : 0.0f;
      sum = metal::fma(q, metal::fma(q, variance[j], mean[j]), sum);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      sum += simd_shuffle_xor(sum, ushort(step));
    }
    if (lane == 0) {
      logs[(size_t(head) * rows + row) * units + unit] = there ? sum + metal::log2(float(16 * LIST)) : NOTHING;
    }
  }
} else if (unit < units) {
  const int of_sink = (size[2] + 15) / 16;
  const bool sink = unit - chunks < of_sink;
  const int token0 = 16 * (unit - chunks - (sink ? 0 : of_sink));
  const int token = token0 + lane / 2;
  const int count = sink ? n_sink : n_live;
  const bool inside = token < count;
  const size_t at = (size_t(head) * size[sink ? 2 : 3] + (inside ? token : 0)) * D;
  for (int row = 0; row < rows; row++) {
    float sum = 0.0f;
    for (int dim = lane % 2; dim < D; dim += 2) {
      const float key = sink ? float(sink_k[at + dim]) : float(live_k[at + dim]);
      sum = metal::fma(float(q_window[(size_t(head) * rows + row) * D + dim]), key, sum);
    }
    sum = (sum + simd_shuffle_xor(sum, ushort(1))) * scale[0];
    const bool seen = inside && (sink || token <= n_live - size[4] + row % size[4]);
    sum = seen ? sum : NOTHING;
    float peak = sum;
#pragma unroll
    for (int step = 2; step < 32; step *= 2) {
      peak = metal::max(peak, simd_shuffle_xor(peak, ushort(step)));
    }
    float mass = seen ? metal::fast::exp2(sum - peak) : 0.0f;
#pragma unroll
    for (int step = 2; step < 32; step *= 2) {
      mass += simd_shuffle_xor(mass, ushort(step));
    }
    if (lane == 0) {
      logs[(size_t(head) * rows + row) * units + unit] = mass > 0.0f ? peak + metal::log2(mass) : NOTHING;
    }
  }
}
