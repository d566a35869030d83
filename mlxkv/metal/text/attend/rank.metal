// What chunks of tokens are ranked by: the logarithm to base 2 of the attention mass that the mean and the deviation of
// a chunk's keys promise each query row, and of the mass of the windows, exactly (spec/reading.py).
// Threadgroup: S simdgroups. Each has RUN times SIDE chunks, LANES lanes for one, so that queries are loaded once for
// many; or SIDE tokens of a window. Grid: (32 x simdgroups, 1, heads of the batch).
//
// q_pages, q_window, sink_k, live_k, lengths, scale: as in attend.metal
// summaries [.., chunks, WIDTH]: the codes of the means of the stored dims, four to a word, then codes of deviations, and
// both steps, halves
// size [rows, capacity of records, sink capacity, live capacity, new tokens, kv heads, chunks, units: chunks and
//       SIDE tokens of a window]
// logs [heads, rows, units]: first the chunks, then the sink, then live; NOTHING where there is none
constexpr int LANES = RK > 128 || D > 128 ? 16 : 8;
constexpr int SIDE = 32 / LANES;  // chunks, or tokens, side by side
constexpr int WORDS = (RK + 3) / 4;
constexpr int WIDTH = 2 * WORDS + 1;
constexpr int EACH = (WORDS + LANES - 1) / LANES;  // of a lane
constexpr int OF_HEAD = (D + 4 * LANES - 1) / (4 * LANES);
constexpr int ROWS = 4;  // at a time
constexpr float NOTHING = -1.0e30f;

const int lane = thread_index_in_simdgroup;
const int unit = threadgroup_position_in_grid.x * S + simdgroup_index_in_threadgroup;
const int head = threadgroup_position_in_grid.z;
const int rows = size[0];
const int chunks = size[6];
const int units = size[7];
const int of_pages = (chunks + RUN * SIDE - 1) / (RUN * SIDE);
const int batch = head / size[5];
const int n_records = lengths[5 * batch];
const int n_sink = lengths[5 * batch + 1];
const int n_live = lengths[5 * batch + 2];

if (unit < of_pages) {
  const int part = lane % LANES;
  const int first_chunk = RUN * SIDE * unit + lane / LANES;
  const int held = n_records / LIST;
  // A sequence without pages may begin where the buffer ends.
  const size_t start =
      held > 0 ? (size_t(head % size[5]) * size[1] + size_t(lengths[5 * batch + 3])) / LIST : 0;
  const float half_of = 0.5f / scale[1];  // in base-2 exponents
  for (int from = 0; from < rows; from += ROWS) {
    float q[ROWS * 4 * EACH];
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      const int at = metal::min(from + row, rows - 1);
#pragma unroll
      for (int j = 0; j < EACH; j++) {
        float four[4];
        kv_four<RK>(q_pages + (size_t(head) * rows + at) * RK, part + LANES * j, four);
#pragma unroll
        for (int n = 0; n < 4; n++) {
          q[(row * EACH + j) * 4 + n] = four[n] * scale[0];
        }
      }
    }
    for (int run = 0; run < RUN; run++) {
      const int chunk = first_chunk + SIDE * run;
      uint words[2 * EACH + 1];
      kv_chunk<WORDS, EACH, LANES>(summaries + (start + size_t(chunk < held ? chunk : 0)) * WIDTH, part, words);
      const float step = kv_half_word<half>(words[2 * EACH], 0);
      const float spread = kv_half_word<half>(words[2 * EACH], 1);
      const float varied = spread * spread * half_of;
      float sum[ROWS];
#pragma unroll
      for (int row = 0; row < ROWS; row++) {
        sum[row] = 0.0f;
      }
#pragma unroll
      for (int j = 0; j < EACH; j++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const float mean = metal::fma(float((words[j] >> (8 * n)) & 0xFFu), step, -128.0f * step);
          const float deviation = float((words[EACH + j] >> (8 * n)) & 0xFFu);
          const float variance = deviation * deviation * varied;
#pragma unroll
          for (int row = 0; row < ROWS; row++) {
            const float asked = q[(row * EACH + j) * 4 + n];
            sum[row] = metal::fma(asked, metal::fma(asked, variance, mean), sum[row]);
          }
        }
      }
#pragma unroll
      for (int distance = 1; distance < LANES; distance *= 2) {
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
          sum[row] += simd_shuffle_xor(sum[row], ushort(distance));
        }
      }
#pragma unroll
      for (int row = 0; row < ROWS; row++) {
        if (part == 0 && chunk < chunks && from + row < rows) {
          logs[(size_t(head) * rows + from + row) * units + chunk] =
              chunk < held ? sum[row] + metal::log2(float(16 * LIST)) : NOTHING;
        }
      }
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
