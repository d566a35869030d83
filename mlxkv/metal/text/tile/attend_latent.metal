// Decode attention over latents (MLA), in base-2 exponents: one token a sequence, and one record that is key and
// value of all heads. A block of 16 M tokens is decoded once into threadgroup memory, as halves, and multiplied
// twice, as keys and as values, for 8 QT query rows. The rotary keys' part of the scores is an input: exact.
// Threadgroup: QT DH simdgroups, one for 8 query rows and R / DH dims; grid: (32 QT DH x tiles of rows, splits,
// batch). The first size[1] splits share the pages, the others the windows (sink, then recent). Each split writes
// (maximum, sum, output) per row, which `merge` joins.
//
// q_pages  [batch, rows, R]: queries in the stored domain, float; q_window [batch, rows, R]: in the model's, T
// codes    [batch, tokens, R BITS / 32]: little-endian bit streams (codec/packing.py)
// scales, biases [batch, tokens, R / GROUP], or with CHANNEL [batch, tokens / GROUP, R]; SYMMETRIC: no biases
// sink, recent [batch, tokens, R], T
// rotary   [batch, rows, columns], T: added to the scores, in the model's units; columns in the order of tokens, recent
//          ones from a column of their own on
// scale    [attention scale times log2(e), log2(e)]
// size     [rows, page splits, tokens in pages, sink tokens, recent tokens, capacity in tokens of codes, columns, capacity in
//          tokens of recent, first column of recent tokens]
constexpr int TOKENS = 16 * M;
constexpr int DIMS = R / DH;  // of a simdgroup
constexpr int STEPS = DIMS / 16;
constexpr int STRIDE = R / 2 + 4;  // words of a row: 8 rows lie in different banks
constexpr int UNITS = R / 8;  // a thread decodes 8 dims at a time
constexpr int THREADS = 32 * QT * DH;
constexpr int ROWS = THREADS / UNITS;  // tokens that are decoded side by side
constexpr int ROUNDS = (TOKENS + ROWS - 1) / ROWS;
constexpr int WORDS = R * BITS / 32;
constexpr float LEVELS = float(1 << BITS);
constexpr float NOTHING = -1.0e30f;

threadgroup uint4 stage[TOKENS * STRIDE / 4];
threadgroup float parts[DH * QT * M * 128];

const int lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup;
const int thread_id = group * 32 + lane;
const int tile = group % QT;
const int part_of = group / QT;
const int rows = size[0];
const int page_splits = size[1];
const int n_pages = size[2];
const int n_sink = size[3];
const int n_recent = size[4];
const int capacity = size[5];
const int total = size[6];
const int recent_room = size[7];
const int recent_column = size[8];
const int batch = threadgroup_position_in_grid.z;
const int first_row = (threadgroup_position_in_grid.x * QT + tile) * 8;
const int split = threadgroup_position_in_grid.y;
const int splits = threads_per_grid.y;
const bool paged = split < page_splits;
const int row_of = tile_row(lane);
const int column_of = tile_column(lane);

// Queries as right factors: 16 dims by 8 rows.
TileB q[STEPS];
#pragma unroll
for (int k = 0; k < STEPS; k++) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float pair[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = first_row + int(tile_b_column(lane, i));
      const int dim = part_of * DIMS + 16 * k + 8 * r + int(tile_b_row(lane, i));
      float value = 0.0f;
      if (row < rows) {
        const size_t at = (size_t(batch) * rows + row) * R + dim;
        value = paged ? q_pages[at] : float(q_window[at]);
      }
      value *= scale[0] / KV_SCORE;
      pair[i] = metal::max(metal::min(value, 65504.0f), -65504.0f);
    }
    q[k].w[r] = kv_halves(pair[0], pair[1]);
  }
}

TileC o[STEPS];
float top[2];
float sum[2];
#pragma unroll
for (int i = 0; i < 2; i++) {
  top[i] = NOTHING;
  sum[i] = 0.0f;
}
#pragma unroll
for (int n = 0; n < STEPS; n++) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    o[n].v[i] = 0.0f;
  }
}

const int sink_blocks = (n_sink + TOKENS - 1) / TOKENS;
const int blocks =
    paged ? (n_pages + TOKENS - 1) / TOKENS : sink_blocks + (n_recent + TOKENS - 1) / TOKENS;
const int shares = paged ? page_splits : splits - page_splits;
const int share = split - (paged ? 0 : page_splits);
const int each = (blocks + shares - 1) / shares;
const int stop = metal::min(blocks, (share + 1) * each);
const int unit = thread_id % UNITS;
for (int block = share * each; block < stop; block++) {
  const bool in_sink = !paged && block < sink_blocks;
  const int token0 = TOKENS * (paged || in_sink ? block : block - sink_blocks);
  const int tokens = metal::min(TOKENS, (paged ? n_pages : in_sink ? n_sink : n_recent) - token0);
  const int position0 = in_sink ? token0 : paged ? n_sink + token0 : recent_column + token0;
  float steps[8];
  float lows[8];
  if (CHANNEL && paged) {  // a block lies in one group of tokens
    const size_t at = (size_t(batch) * (capacity / GROUP) + token0 / GROUP) * R + 8 * unit;
    kv_load_numbers<8>(scales + at, steps);
    if (!SYMMETRIC) {
      kv_load_numbers<8>(biases + at, lows);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      steps[i] *= LEVELS;
      lows[i] = (SYMMETRIC ? -0.5f * steps[i] : lows[i]) - steps[i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int n = 0; n < ROUNDS; n++) {
    const int token = n * ROWS + thread_id / UNITS;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      x[i] = 0.0f;
    }
    if (token < tokens) {
      if (paged) {
        const size_t row = size_t(batch) * capacity + token0 + token;
        const device uint* words = codes + row * WORDS;
        const int bit = 8 * BITS * unit;
        const uint low = words[bit / 32];
        uint high = 0u;
        if (BITS == 8 || (BITS == 3 && bit % 32 > 8)) {
          high = words[bit / 32 + 1];
        }
        uint bits = low >> (bit % 32);
        if (BITS == 3 && bit % 32 > 8) {
          bits |= high << (32 - bit % 32);
        }
        if (!CHANNEL) {
          const size_t at = row * (R / GROUP) + 8 * unit / GROUP;
          const float step = LEVELS * float(scales[at]);
          const float bias = SYMMETRIC ? -0.5f * step : float(biases[at]);
#pragma unroll
          for (int i = 0; i < 8; i++) {
            steps[i] = step;
            lows[i] = bias - step;
          }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const uint from = BITS == 8 && i >= 4 ? high : bits;
          const uint code = (from >> (BITS == 8 ? 8 * (i % 4) : BITS * i)) & ((1u << BITS) - 1u);
          x[i] = metal::fma(steps[i], kv_one_plus<BITS>(code), lows[i]);
        }
      } else {
        const size_t row = size_t(batch) * (in_sink ? n_sink : recent_room) + token0 + token;
        kv_load<8>((in_sink ? sink : recent) + row * R + 8 * unit, x);
      }
    }
    if (token < TOKENS) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        x[i] = metal::max(metal::min(x[i], 65504.0f), -65504.0f);
      }
      uint4 four;
      four.x = kv_halves(x[0], x[1]);
      four.y = kv_halves(x[2], x[3]);
      four.z = kv_halves(x[4], x[5]);
      four.w = kv_halves(x[6], x[7]);
      stage[(token * STRIDE + 4 * unit) / 4] = four;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Scores: tokens by queries, of this simdgroup's dims; the parts of all dims meet in threadgroup memory.
  kv_words held = (kv_words)stage;
  TileC s[M];
#pragma unroll
  for (int m = 0; m < M; m++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = 16 * m + row_of + 8 * (i / 2);
      const int row = first_row + column_of + i % 2;
      float value = 0.0f;
      if (part_of == 0) {
        value = -INFINITY;
        if (token < tokens && row < rows) {
          const size_t at = (size_t(batch) * rows + row) * total + position0 + token;
          value = metal::max(float(rotary[at]) * (scale[1] / KV_SCORE), NOTHING);
        }
      }
      s[m].v[i] = value;
    }
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      TileA a;
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const int token = 16 * m + row_of + 8 * (r % 2);
        const int dim = part_of * DIMS + 16 * k + column_of + 8 * (r / 2);
        a.w[r] = held[token * STRIDE + dim / 2];
      }
      tile_multiply(s[m], a, q[k]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      parts[(group * M + m) * 128 + 32 * i + lane] = s[m].v[i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int m = 0; m < M; m++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float value = parts[(tile * M + m) * 128 + 32 * i + lane];
#pragma unroll
      for (int d = 1; d < DH; d++) {
        value += parts[((d * QT + tile) * M + m) * 128 + 32 * i + lane];
      }
      s[m].v[i] = value;
    }
  }
  TileB p[M];
  kv_probabilities<STEPS, M>(s, p, top, sum, o, KV_SCORE);

  // Outputs: dims by queries. Row n of a left factor is dim 2 n, row n + 8 dim 2 n + 1, so that a word has both.
#pragma unroll
  for (int n = 0; n < STEPS; n++) {
#pragma unroll
    for (int m = 0; m < M; m++) {
      TileA a;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int at = (16 * m + column_of + 8 * h) * STRIDE + (part_of * DIMS + 16 * n) / 2 + row_of;
        const uint first = held[at];
        const uint next = held[at + STRIDE];
        a.w[2 * h] = kv_both(first, next, 0);
        a.w[2 * h + 1] = kv_both(first, next, 1);
      }
      tile_multiply(o[n], a, p[m]);
    }
  }
}

#pragma unroll
for (int i = 0; i < 2; i++) {
  const float whole = tile_column_sum(sum[i]);
  const int row = first_row + column_of + i;
  if (row < rows) {
    const size_t slot = (size_t(batch) * rows + row) * splits + split;
    if (part_of == 0 && row_of == 0) {
      partial_stats[2 * slot] = top[i];
      partial_stats[2 * slot + 1] = whole;
    }
#pragma unroll
    for (int n = 0; n < STEPS; n++) {
      const size_t at = slot * R + part_of * DIMS + 16 * n + 2 * row_of;
      partial_out[at] = o[n].v[i];
      partial_out[at + 1] = o[n].v[2 + i];
    }
  }
}
