// What chunks of tokens are ranked by: the logarithm to base 2 of the attention mass that the mean and the deviation of
// a chunk's keys promise each query row, and of the mass of the windows, exactly (spec/reading.py).
// Threadgroup: S simdgroups. Each has SIDE chunks, LANES lanes for one, or SIDE tokens of a window; grid: (32 x simdgroups,
// 1, heads of the batch).
//
// q_pages, q_window, sink_k, live_k, lengths, scale: as in attend.metal
// summaries [.., chunks, WIDTH]: the codes of the means of the stored dims, four to a word, those of the deviations, and
// both steps, halves
// size [rows, capacity of records, sink capacity, live capacity, new tokens, kv heads, chunks, units: chunks, and
//       those of windows]
// logs [heads, rows, units]: first the chunks, then the sink, then live; NOTHING where there is none
constexpr int LANES = 8;
constexpr int SIDE = 32 / LANES;
constexpr int WORDS = (RK + 3) / 4;
constexpr int WIDTH = 2 * WORDS + 1;
constexpr int EACH = (WORDS + LANES - 1) / LANES;  // of a lane
constexpr int OF_HEAD = (D + 4 * LANES - 1) / (4 * LANES);
constexpr float NOTHING = -1.0e30f;

const int lane = thread_index_in_simdgroup;
const int unit = threadgroup_position_in_grid.x * S + simdgroup_index_in_threadgroup;
const int head = threadgroup_position_in_grid.z;
const int rows = size[0];
const int chunks = size[6];
const int units = size[7];
const int of_pages = (chunks + SIDE - 1) / SIDE;
const int batch = head / size[5];
const int n_records = lengths[5 * batch];
const int n_sink = lengths[5 * batch + 1];
const int n_live = lengths[5 * batch + 2];

if (unit < of_pages) {
  const int chunk = SIDE * unit + lane / LANES;
  const int part = lane % LANES;
  const bool there = chunk < n_records / LIST;
  const size_t first = (size_t(head % size[5]) * size[1] + size_t(lengths[5 * batch + 3])) / LIST;
  const device uint* words = summaries + (first + (there ? chunk : 0)) * WIDTH;
  float steps[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    steps[i] = kv_half_word<half>(words[WIDTH - 1], i);
  }
  const float varied = steps[1] * steps[1] * (0.5f / scale[1]);  // halved, in base-2 exponents
  float mean[4 * EACH];
  float variance[4 * EACH];
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const int at = part + LANES * j;
    const bool inside = there && at < WORDS;
    const uint means = inside ? words[at] : 0u;
    const uint deviations = inside ? words[WORDS + at] : 0u;
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const float deviation = float((deviations >> (8 * n)) & 0xFFu);
      mean[4 * j + n] = (float((means >> (8 * n)) & 0xFFu) - 128.0f) * steps[0];
      variance[4 * j + n] = deviation * deviation * varied;
    }
  }
  for (int row = 0; row < rows; row++) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      float q[4];
      kv_four<RK>(q_pages + (size_t(head) * rows + row) * RK, part + LANES * j, q);
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const float scaled = q[n] * scale[0];
        sum = metal::fma(scaled, metal::fma(scaled, variance[4 * j + n], mean[4 * j + n]), sum);
      }
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
      sum += simd_shuffle_xor(sum, ushort(step));
    }
    if (part == 0 && chunk < chunks) {
      logs[(size_t(head) * rows + row) * units + chunk] = there ? sum + metal::log2(float(16 * LIST)) : NOTHING;
    }
  }
} else if (unit - of_pages < units - chunks) {
  const int of_sink = (size[2] + SIDE - 1) / SIDE;
  const int window = unit - of_pages;
  const bool sink = window < of_sink;
  const int token = SIDE * (window - (sink ? 0 : of_sink)) + lane / LANES;
  const int part = lane % LANES;
  const bool inside = token < (sink ? n_sink : n_live);
  const size_t first = (size_t(head) * size[sink ? 2 : 3] + (inside ? token : 0)) * D;
  float key[4 * OF_HEAD];
#pragma unroll
  for (int j = 0; j < OF_HEAD; j++) {
    kv_four<D>(sink ? sink_k + first : live_k + first, part + LANES * j, key + 4 * j);
  }
  for (int row = 0; row < rows; row++) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < OF_HEAD; j++) {
      float q[4];
      kv_four<D>(q_window + (size_t(head) * rows + row) * D, part + LANES * j, q);
#pragma unroll
      for (int n = 0; n < 4; n++) {
        sum = metal::fma(q[n], key[4 * j + n], sum);
      }
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
      sum += simd_shuffle_xor(sum, ushort(step));
    }
    const bool seen = inside && (sink || token <= n_live - size[4] + row % size[4]);
    const float score = seen ? sum * scale[0] : NOTHING;
    float peak = score;
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) {
      peak = metal::max(peak, simd_shuffle_xor(peak, ushort(step)));
    }
    float mass = seen ? metal::fast::exp2(score - peak) : 0.0f;
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) {
      mass += simd_shuffle_xor(mass, ushort(step));
    }
    if (lane == 0) {
      logs[(size_t(head) * rows + row) * units + chunks + window] = mass > 0.0f ? peak + metal::log2(mass) : NOTHING;
    }
  }
}
