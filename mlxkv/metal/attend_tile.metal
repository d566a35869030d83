// Decode attention by matrix tiles: what attend.metal and merge.metal do, in one dispatch, for
// 16-bit model types. Threadgroup: S simdgroups, 8 query rows; grid: (32 S, splits, kv heads of the
// batch x tiles of 8 rows). The last threadgroup of a tile to arrive merges the splits.
//
// q [heads, rows, D] of type T, in the model's own domain; records, windows, lengths: attend.metal
// map_k: q -> stored domain; map_v: stored -> model's: tiles of halves (kernels.py), HAS_K, HAS_V
// size: [rows, page splits, record capacity, sink capacity, live capacity, new tokens, window,
//   kv heads, words of map_k per head, of map_v (0: one for all), scale log2(e) as bits, log2(e) as
//   bits, 4 masks of keys, 4 of values, 4 unused, then per batch: records, sink, live tokens, 0]
// counter: zero before and after, one per tile of rows.
constexpr int BK = (RK + 31) / 32;
constexpr int BV = (RV + 31) / 32;
constexpr int BD = (D + 31) / 32;
constexpr int QB = BK > BD ? BK : BD;
constexpr int OB = BV > BD ? BV : BD;
constexpr int GROUPS_K = (RK + GROUP_K - 1) / GROUP_K;
constexpr int GROUPS_V = (RV + GROUP_V - 1) / GROUP_V;
constexpr int WORDS_K = kv_lane_words<BITS_K>(BK);
constexpr int WORDS_V = kv_lane_words<BITS_V>(BV);
constexpr int SIDE_K = kv_side_words<BITS_K>(BK, GROUPS_K, SYMMETRIC_K);
constexpr int SLOTS_K = GROUPS_K * (SYMMETRIC_K ? 1 : 2);
constexpr int SLOT_TILES = (SLOTS_K + 7) / 8;
constexpr float MIDDLE_K = SYMMETRIC_K ? float(1 << (BITS_K - 1)) : 0.0f;
constexpr float MIDDLE_V = SYMMETRIC_V ? float(1 << (BITS_V - 1)) : 0.0f;
constexpr int WIDTH = 32 * OB;
constexpr int STRIDE = WIDTH + 4;  // of partials: output, maximum, sum, 0, 0
constexpr int ROW = 32 * (QB > OB ? QB : OB) + 8;
constexpr int POOL = 1024 + 16 * WIDTH > 512 * S ? 1024 + 16 * WIDTH : 512 * S;
constexpr float NOTHING = -1.0e30f;

threadgroup float tile_rows[8 * ROW];
threadgroup float pool[POOL];
threadgroup float tile_max[S * 8];
threadgroup float tile_sum[S * 8];
threadgroup float q_sums[SLOTS_K * 8];
threadgroup uint arrived[1];

const int lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup;
const int thread_id = group * 32 + lane;
const int g = tile_row(lane);
const int t = tile_column(lane) / 2;
const int rows = size[0];
const int page_splits = size[1];
const int tiles = (rows + 7) / 8;
const int unit_of_merge = threadgroup_position_in_grid.z;
const int head = unit_of_merge / tiles;
const int first_row = (unit_of_merge % tiles) * 8;
const int tile_height = metal::min(8, rows - first_row);
const int split = threadgroup_position_in_grid.y;
const int splits = threads_per_grid.y;
const bool paged = split < page_splits;
const int new_tokens = size[5];
const int window = WINDOW ? size[6] : 0;
const int kv_head = head % size[7];
const int batch = head / size[7];
const int n_records = size[24 + 4 * batch];
const int n_sink = size[25 + 4 * batch];
const int n_live = size[26 + 4 * batch];
const int total = n_sink + 16 * n_records + n_live;

const int sink_units = (n_sink + 15) / 16;
const int units = paged ? n_records : sink_units + (n_live + 15) / 16;
const int parts = paged ? page_splits : splits - page_splits;
const int part = paged ? split : split - page_splits;
const int each = (units + parts - 1) / parts;
const int stop = metal::min(units, (part + 1) * each);
int unit = part * each + group * (paged ? 2 : 1);
// Queries first: behind the records they would wait for all of them.
constexpr int MINE = (8 * 32 * QB + 32 * S - 1) / (32 * S);
float mine[MINE];
for (int n = 0; n < MINE; n++) {
  const int row = (thread_id + n * 32 * S) / (32 * QB);
  const int dim = (thread_id + n * 32 * S) % (32 * QB);
  mine[n] = row < tile_height && dim < D
      ? float(q[(size_t(head) * rows + first_row + row) * D + dim])
      : 0.0f;
}
const bool turns = HAS_K && paged;
const device uint* map = map_k + size_t(kv_head) * size[8] + (4 * g + t) * 4;
constexpr int AHEAD_K = 8;
uint4 ahead[AHEAD_K];
if (turns && group < 2 * BK) {
  for (int k = 0; k < AHEAD_K && k < 2 * BD; k++) {
    ahead[k] = *(const device uint4*)(map + (group * 2 * BD + k) * 128);
  }
}
KvPipe pipe = kv_pipe_start<RECORD, STAGES, S>(
    records + (size_t(head) * size[2] + unit) * RECORD, paged ? stop - unit : 0, group, lane);
for (int n = 0; n < MINE; n++) {
  const int i = thread_id + n * 32 * S;
  if (i < 8 * 32 * QB) {
    tile_rows[i / (32 * QB) * ROW + i % (32 * QB)] = mine[n] * (as_type<float>(size[10]) / KV_SCORE);
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (turns) {
  constexpr int MOST = (2 * BK + S - 1) / S;
  TileC turned[MOST];
  for (int n = 0; n < MOST; n++) {
    const int m = group + n * S;
    for (int i = 0; i < 4; i++) {
      turned[n].v[i] = 0.0f;
    }
    if (m < 2 * BK) {
#pragma unroll
      for (int k = 0; k < 2 * BD; k++) {
        const uint4 x = n == 0 && k < AHEAD_K
            ? ahead[k % AHEAD_K]
            : *(const device uint4*)(map + (m * 2 * BD + k) * 128);
        TileA a;
        a.w[0] = x.x;
        a.w[1] = x.y;
        a.w[2] = x.z;
        a.w[3] = x.w;
        TileB b;
        for (int r = 0; r < 2; r++) {
          const int dim = 16 * k + 8 * r;
          b.w[r] = kv_halves(
              tile_rows[tile_b_column(lane, 0) * ROW + dim + tile_b_row(lane, 0)],
              tile_rows[tile_b_column(lane, 1) * ROW + dim + tile_b_row(lane, 1)]);
        }
        tile_multiply(turned[n], a, b);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = 0; n < MOST; n++) {
    const int m = group + n * S;
    if (m < 2 * BK) {
      for (int i = 0; i < 4; i++) {
        tile_rows[(2 * t + i % 2) * ROW + 16 * m + g + 8 * (i / 2)] = turned[n].v[i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Queries as the right factor: k-tile u of block j, word r holds dims 32 j + 8 t + 4 i + 2 u + r.
TileB q_tile[2 * QB];
for (int n = 0; n < 2 * QB; n++) {
  for (int r = 0; r < 2; r++) {
    float pair[2];
    for (int i = 0; i < 2; i++) {
      const int k = tile_b_row(lane, i);
      const int dim = 32 * (n / 2) + 8 * (k / 2) + 4 * (k % 2) + 2 * (n % 2) + r;
      pair[i] = tile_rows[tile_b_column(lane, i) * ROW + dim];
    }
    q_tile[n].w[r] = kv_halves(pair[0], pair[1]);
  }
}

// Behind the outputs: sums of scaled probabilities of each group, then one tile whose rows are the
// sums of biases of each group. 2 bits need the latter alone: rows 0..7 with the offsets of even p,
// rows 8..15 with those of odd p.
constexpr bool NEAR = BITS_V == 2;
constexpr int EXTRA = NEAR ? 1 : GROUPS_V + (SYMMETRIC_V ? 0 : 1);
TileC o[2 * OB + EXTRA];
float top[2];
float sum[2];
int first_seen[2];
int last_seen[2];
for (int i = 0; i < 2; i++) {
  top[i] = NOTHING;
  sum[i] = 0.0f;
  last_seen[i] = total - new_tokens + (first_row + 2 * t + i) % new_tokens;
  first_seen[i] = WINDOW ? last_seen[i] - window + 1 : 0;
}
for (int n = 0; n < 2 * OB + EXTRA; n++) {
  for (int i = 0; i < 4; i++) {
    o[n].v[i] = 0.0f;
  }
}

if (paged) {
  uint masks_k[4];
  uint masks_v[4];
  for (int i = 0; i < 4; i++) {
    masks_k[i] = uint(size[12 + i]);
    masks_v[i] = uint(size[16 + i]);
  }
  // Sums over the dims of a group: of queries (row 1), which biases of keys multiply, and of queries
  // times offset (row 0), which scales multiply to take the offsets out again.
  for (int n = 0; n < GROUPS_K; n++) {
    TileC sums;
    for (int i = 0; i < 4; i++) {
      sums.v[i] = 0.0f;
    }
    for (int j = n * GROUP_K / 32; j < BK && 32 * j / GROUP_K == n; j++) {
      for (int u = 0; u < 2; u++) {
        TileA a;
        for (int r = 0; r < 2; r++) {
          const float offset = kv_offset<BITS_K>(2 * u + r) + MIDDLE_K;
          const float value = g == 0 ? -offset : (g == 1 ? 1.0f : 0.0f);
          a.w[2 * r] = kv_halves(value, value);
          a.w[2 * r + 1] = 0u;
        }
        tile_multiply(sums, a, q_tile[2 * j + u]);
      }
    }
    if (group == 0 && g < (SYMMETRIC_K ? 1 : 2)) {
      for (int i = 0; i < 2; i++) {
        q_sums[(n + g * GROUPS_K) * 8 + 2 * t + i] = sums.v[i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  TileB q_slots[SLOT_TILES];  // rows 0..7: slots, rows 8..15: what halves of them leave
  for (int m = 0; m < SLOT_TILES; m++) {
    float rest[2];
    float whole[2];
    for (int i = 0; i < 2; i++) {
      const int slot = 8 * m + tile_b_row(lane, i);
      const float value = slot < SLOTS_K ? q_sums[slot * 8 + tile_b_column(lane, i)] : 0.0f;
      whole[i] = float(half(value));
      rest[i] = value - whole[i];
    }
    q_slots[m].w[0] = kv_halves(whole[0], whole[1]);
    q_slots[m].w[1] = kv_halves(rest[0], rest[1]);
  }

  TileA ones;
  for (int m = 0; m < 4; m++) {
    ones.w[m] = 0x3C003C00u;
  }
  const int k_lane = kv_vector(WORDS_K) * (4 * g + t);
  const int v_lane = SIDE_K + kv_vector(WORDS_V) * (4 * g + t);
  const int v_scales_at = SIDE_K + 32 * WORDS_V + tile_b_row(lane, 0) / 2 * 2 * GROUPS_V;
  const int v_scale_at = SIDE_K + 32 * WORDS_V + 2 * (t * GROUPS_V + g);
  const int v_bias_at = SIDE_K + 32 * WORDS_V + 8 * GROUPS_V + 8 * g + 2 * t;
  // Where instructions are the limit, two records side by side: one hides the latency of the other.
  constexpr int PAIR = BITS_K + BITS_V < 7 ? 2 : 1;
  KvRecord record[2];
  bool second = false;
  while (unit < stop) {
    const bool both = unit + 1 < stop;
    if (!second) {
      record[0] = kv_pipe_wait<RECORD, STAGES, S>(pipe);
      record[1] = both ? kv_record_after(record[0], RECORD) : record[0];  // or the last one again
    } else {
      record[0] = record[1];
    }
    TileC s[PAIR];
#pragma unroll
    for (int e = 0; e < PAIR; e++) {
      uint words[WORDS_K];
      uint scales[SLOTS_K];
      kv_read_words<WORDS_K, 32>(words, record[e], k_lane);
      kv_read_words<SLOTS_K, 1>(scales, record[e], 32 * WORDS_K + g * SLOTS_K);
      for (int i = 0; i < 4; i++) {
        s[e].v[i] = 0.0f;
      }
      for (int m = 0; m < SLOT_TILES; m++) {
        tile_multiply(
            s[e], kv_read_slots<SLOTS_K>(record[e], 32 * WORDS_K, m, g, t), q_slots[m]);
      }
      for (int n = 0; n < GROUPS_K; n++) {
        TileC c;
        for (int i = 0; i < 4; i++) {
          c.v[i] = 0.0f;
        }
        for (int j = n * GROUP_K / 32; j < BK && 32 * j / GROUP_K == n; j++) {
          for (int u = 0; u < 2; u++) {
            TileA a;
            for (int m = 0; m < 4; m++) {
              const int r = m % 2;
              const int p = 2 * u + m / 2;
              a.w[m] = kv_pair<BITS_K>(
                  words[kv_slot_word<BITS_K>(j, r, p)],
                  words[BITS_K == 3 ? kv_high_word(j) : 0], masks_k, j, r, p);
            }
            tile_multiply(c, a, q_tile[2 * j + u]);
          }
        }
        for (int i = 0; i < 4; i++) {
          const int at = i / 2 * SLOTS_K + n;
          s[e].v[i] = metal::fma(kv_half(scales[at / 2], at % 2), c.v[i], s[e].v[i]);
        }
      }
      for (int i = 0; i < 4; i++) {
        const int position = n_sink + 16 * (unit + e) + g + 8 * (i / 2);
        if ((e == 1 && !both) || (WINDOW && position < first_seen[i % 2])) {
          s[e].v[i] = -INFINITY;
        }
      }
    }
    TileB p[PAIR];
    kv_probabilities<2 * OB + EXTRA, PAIR>(s, p, top, sum, o);
#pragma unroll
    for (int e = 0; e < PAIR; e++) {
      uint words[WORDS_V];
      uint scales[2 * GROUPS_V];
      kv_read_words<WORDS_V, 32>(words, record[e], v_lane);
      kv_read_words<2 * GROUPS_V, 1>(scales, record[e], v_scales_at);
      for (int n = 0; n < GROUPS_V; n++) {
        TileB scaled;
        for (int r = 0; r < 2; r++) {
          scaled.w[r] = kv_multiply_halves(p[e].w[r], tile_b_numbers(scales[2 * n + r], lane));
        }
        if (!NEAR) {
          tile_multiply(o[2 * OB + n], ones, scaled);
        }
        for (int j = n * GROUP_V / 32; j < BV && 32 * j / GROUP_V == n; j++) {
          for (int u = 0; u < 2; u++) {
            TileA a;
            for (int m = 0; m < 4; m++) {
              const int r = m / 2;
              const int slot = 2 * u + m % 2;
              const uint word = words[kv_slot_word<BITS_V>(j, r, slot)];
              a.w[m] = NEAR
                  ? kv_pair_near(word, masks_v, r, slot)
                  : kv_pair<BITS_V>(
                        word, words[BITS_V == 3 ? kv_high_word(j) : 0], masks_v, j, r, slot);
            }
            tile_multiply(o[2 * j + u], a, scaled);
          }
        }
      }
      if (NEAR || !SYMMETRIC_V) {
        TileA bias;
        for (int r = 0; r < 2; r++) {
          bias.w[2 * r] = bias.w[2 * r + 1] = 0u;
        }
        if (g < GROUPS_V) {
          if (!SYMMETRIC_V) {
            const uint2 x = kv_read2(record[e], v_bias_at);
            bias.w[0] = bias.w[1] = x.x;
            bias.w[2] = bias.w[3] = x.y;
          }
          if (NEAR) {
            const uint2 x = kv_read2(record[e], v_scale_at);
            const uint even = kv_halves(-4.0f - MIDDLE_V, -4.0f - MIDDLE_V);
            const uint odd = kv_halves(-16.0f - MIDDLE_V, -16.0f - MIDDLE_V);
            bias.w[0] = kv_add_multiplied_halves(bias.w[0], even, x.x);
            bias.w[1] = kv_add_multiplied_halves(bias.w[1], odd, x.x);
            bias.w[2] = kv_add_multiplied_halves(bias.w[2], even, x.y);
            bias.w[3] = kv_add_multiplied_halves(bias.w[3], odd, x.y);
          }
        }
        tile_multiply(o[2 * OB + EXTRA - 1], bias, p[e]);
      }
    }
    unit += PAIR;
    second = PAIR == 1 && !second && both;
    if (!second) {
      kv_pipe_release<RECORD, STAGES, S>(pipe, lane);
      unit += 2 * (S - 1) + (PAIR == 1 && !both ? 1 : 0);
    }
  }
  for (int n = 0; n < GROUPS_V; n++) {
    for (int i = 0; i < 2; i++) {
      const ushort owner = ushort(tile_lane(n, 2 * t));
      const float even =
          NEAR || !SYMMETRIC_V ? simd_shuffle(o[2 * OB + EXTRA - 1].v[i], owner) : 0.0f;
      const float odd = NEAR ? simd_shuffle(o[2 * OB + EXTRA - 1].v[2 + i], owner) : even;
      const float offset = NEAR ? 0.0f : o[2 * OB + (NEAR ? 0 : n)].v[i];
      for (int j = n * GROUP_V / 32; j < BV && 32 * j / GROUP_V == n; j++) {
        for (int slot = 0; slot < 4; slot++) {
          float value = o[2 * j + slot / 2].v[2 * (slot % 2) + i] + (slot % 2 ? odd : even);
          if (!NEAR) {
            value = metal::fma(-(kv_offset<BITS_V>(slot) + MIDDLE_V), offset, value);
          }
          o[2 * j + slot / 2].v[2 * (slot % 2) + i] = value;
        }
      }
    }
  }
} else {
  for (; unit < stop; unit += S) {
    const bool in_sink = unit < sink_units;
    const int token0 = in_sink ? 16 * unit : 16 * (unit - sink_units);
    const int tokens = (in_sink ? n_sink : n_live) - token0;
    const int position0 = in_sink ? token0 : total - n_live + token0;
    const size_t base = (size_t(head) * (in_sink ? size[3] : size[4]) + token0) * D;
    const device uint* keys = (const device uint*)((in_sink ? sink_k : live_k) + base);
    const device uint* values = (const device uint*)((in_sink ? sink_v : live_v) + base);
    TileC s[1];
    for (int i = 0; i < 4; i++) {
      s[0].v[i] = 0.0f;
    }
    for (int j = 0; j < BD; j++) {
      uint x[8];
      for (int i = 0; i < 8; i++) {
        x[i] = 0u;
      }
      for (int r = 0; r < 2; r++) {
        if (g + 8 * r < tokens && 32 * j + 8 * t < D) {
          const uint4 w =
              *(const device uint4*)(keys + ((g + 8 * r) * D + 32 * j + 8 * t) / 2);
          x[4 * r] = w.x;
          x[4 * r + 1] = w.y;
          x[4 * r + 2] = w.z;
          x[4 * r + 3] = w.w;
        }
      }
      for (int u = 0; u < 2; u++) {
        TileA a;
        for (int m = 0; m < 4; m++) {
          const int r = m % 2;
          const int at = 4 * r + u;
          a.w[m] = m / 2 ? kv_halves(kv_high<BF16>(x[at]), kv_high<BF16>(x[at + 2]))
                         : kv_halves(kv_low<BF16>(x[at]), kv_low<BF16>(x[at + 2]));
        }
        tile_multiply(s[0], a, q_tile[2 * j + u]);
      }
    }
    for (int i = 0; i < 4; i++) {
      const int token = g + 8 * (i / 2);
      const int position = position0 + token;
      if (token >= tokens || position > last_seen[i % 2] || position < first_seen[i % 2]) {
        s[0].v[i] = -INFINITY;
      }
    }
    TileB p[1];
    kv_probabilities<2 * OB + EXTRA, 1>(s, p, top, sum, o);
    for (int j = 0; j < BD; j++) {
      uint x[8];
      for (int i = 0; i < 8; i++) {
        x[i] = 0u;
      }
      for (int n = 0; n < 4; n++) {
        const int token = 2 * t + 8 * (n / 2) + n % 2;
        if (token < tokens && 32 * j + 4 * g < D) {
          const uint2 w = *(const device uint2*)(values + (token * D + 32 * j + 4 * g) / 2);
          x[2 * n] = w.x;
          x[2 * n + 1] = w.y;
        }
      }
      for (int u = 0; u < 2; u++) {
        TileA a;
        for (int m = 0; m < 4; m++) {
          const int at = 4 * (m / 2) + u;
          a.w[m] = m % 2 ? kv_halves(kv_high<BF16>(x[at]), kv_high<BF16>(x[at + 2]))
                         : kv_halves(kv_low<BF16>(x[at]), kv_low<BF16>(x[at + 2]));
        }
        tile_multiply(o[2 * j + u], a, p[0]);
      }
    }
  }
}

// The simdgroups of a threadgroup: to a common maximum, then added up, halving their number.
for (int i = 0; i < 2; i++) {
  sum[i] = tile_column_sum(sum[i]);
  if (g == 0) {
    tile_max[group * 8 + 2 * t + i] = top[i];
    tile_sum[group * 8 + 2 * t + i] = sum[i];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int i = 0; i < 2; i++) {
  float peak = NOTHING;
  for (int n = 0; n < S; n++) {
    peak = metal::max(peak, tile_max[n * 8 + 2 * t + i]);
  }
  const float shrink = metal::exp2(top[i] - peak);
  for (int n = 0; n < 2 * OB; n++) {
    o[n].v[i] *= shrink;
    o[n].v[2 + i] *= shrink;
  }
}
for (int first = 0; first < 2 * OB; first += 4) {
  for (int n = 0; n < 4; n++) {
    for (int i = 0; i < 4; i++) {
      pool[((group * 4 + n) * 32 + lane) * 4 + i] = o[first + n].v[i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_id; i < 512; i += 32 * S) {
    const int owner = i / 4 % 32;
    const int row = tile_column(owner) + i % 2;
    const int dim = 16 * first + 32 * (i / 256) + 4 * tile_row(owner) + i / 128 % 2 * 2 + i % 4 / 2;
    float value = 0.0f;
    for (int n = 0; n < S; n++) {
      value += pool[512 * n + i];
    }
    tile_rows[row * ROW + dim] = value;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

const size_t slot0 = (size_t(head) * rows + first_row) * splits;  // + row * splits + split
coherent(device) device float* partials = (coherent(device) device float*)partial_out;
for (int i = thread_id; i < tile_height * WIDTH; i += 32 * S) {
  const int row = i / WIDTH;
  partials[(slot0 + row * splits + split) * STRIDE + i % WIDTH] = tile_rows[row * ROW + i % WIDTH];
}
if (thread_id < tile_height) {
  float peak = NOTHING;
  for (int n = 0; n < S; n++) {
    peak = metal::max(peak, tile_max[n * 8 + thread_id]);
  }
  float all = 0.0f;
  for (int n = 0; n < S; n++) {
    all += tile_sum[n * 8 + thread_id] * metal::exp2(tile_max[n * 8 + thread_id] - peak);
  }
  const size_t at = (slot0 + thread_id * splits + split) * STRIDE + WIDTH;
  partials[at] = peak;
  partials[at + 1] = all;
  partials[at + 2] = 0.0f;
  partials[at + 3] = 0.0f;
}
atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
threadgroup_barrier(mem_flags::mem_device);
if (thread_id == 0) {
  device atomic_uint* place = (device atomic_uint*)counter + unit_of_merge;
  arrived[0] = atomic_fetch_add_explicit(place, 1u, memory_order_relaxed);
}
threadgroup_barrier(mem_flags::mem_threadgroup);

if (arrived[0] + 1u == uint(splits)) {
  atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
  if (thread_id == 0) {
    atomic_store_explicit(
        (device atomic_uint*)counter + unit_of_merge, 0u, memory_order_relaxed);
  }
  // Weights of the splits, one row per simdgroup, in pool; sums behind them.
  for (int row = group; row < tile_height; row += S) {
    const size_t at = (slot0 + row * splits) * STRIDE + WIDTH;
    float peaks[4];  // at most 128 splits
    float counts[4];
    float all = 0.0f;
    float peak = NOTHING;
    for (int i = 0; i < 4; i++) {
      peaks[i] = lane + 32 * i < splits ? partials[at + (lane + 32 * i) * STRIDE] : NOTHING;
      counts[i] = lane + 32 * i < splits ? partials[at + (lane + 32 * i) * STRIDE + 1] : 0.0f;
      peak = metal::max(peak, peaks[i]);
    }
    for (ushort step = 1; step < 32; step *= 2) {
      peak = metal::max(peak, simd_shuffle_xor(peak, step));
    }
    float logit = NOTHING;
    if (HAS_SINKS) {
      const int q_row = first_row + row;
      logit = sinks[kv_head * (rows / new_tokens) + q_row / new_tokens] * as_type<float>(size[11]);
      peak = metal::max(peak, logit);
    }
    for (int i = 0; i < 4; i++) {
      const int n = lane + 32 * i;
      if (n < splits) {
        const float weight = metal::exp2(peaks[i] - peak);
        pool[row * splits + n] = weight;
        all += weight * counts[i];
      }
    }
    for (ushort step = 1; step < 32; step *= 2) {
      all += simd_shuffle_xor(all, step);
    }
    if (HAS_SINKS) {
      all += metal::exp2(logit - peak);
    }
    const float share = all > 0.0f ? 1.0f / all : 0.0f;
    for (int n = lane; n < splits; n += 32) {
      pool[row * splits + n] *= share;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // Four dims a lane. Where simdgroups are left over, several share the splits of a row; row
  // S + n of the sums is what the windows give.
  // Four dims a lane, AHEAD loads under way. Where simdgroups are left over, several share the
  // splits of a row. What the windows give stays apart: row 8 + job.
  constexpr int AHEAD = 16;
  const int ways = metal::max(1, S / tile_height);
  for (int job = group; job < tile_height * ways; job += S) {
    const int row = job % tile_height;
    for (int quad = lane; quad < WIDTH / 4; quad += 32) {
      const coherent(device) device float* from =
          partials + (slot0 + row * splits) * STRIDE + 4 * quad;
      float a[8];
      for (int i = 0; i < 8; i++) {
        a[i] = 0.0f;
      }
      for (int first = job / tile_height; first < splits; first += AHEAD * ways) {
        float4 x[AHEAD];
        for (int n = 0; n < AHEAD; n++) {
          const int at = metal::min(first + n * ways, splits - 1);
          x[n] = *(const coherent(device) device float4*)(from + size_t(at) * STRIDE);
        }
        for (int n = 0; n < AHEAD; n++) {
          const int at = first + n * ways;
          const float weight = at < splits ? pool[row * splits + at] : 0.0f;
          const float of_pages = at < page_splits ? weight : 0.0f;
          const float of_windows = at < page_splits ? 0.0f : weight;
          a[0] = metal::fma(of_pages, x[n].x, a[0]);
          a[1] = metal::fma(of_pages, x[n].y, a[1]);
          a[2] = metal::fma(of_pages, x[n].z, a[2]);
          a[3] = metal::fma(of_pages, x[n].w, a[3]);
          a[4] = metal::fma(of_windows, x[n].x, a[4]);
          a[5] = metal::fma(of_windows, x[n].y, a[5]);
          a[6] = metal::fma(of_windows, x[n].z, a[6]);
          a[7] = metal::fma(of_windows, x[n].w, a[7]);
        }
      }
      for (int i = 0; i < 8; i++) {
        pool[1024 + (8 * (i / 4) + job) * WIDTH + 4 * quad + i % 4] = a[i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_id; i < 8 * WIDTH; i += 32 * S) {
    const int row = i / WIDTH;
    const int dim = i % WIDTH;
    float of_pages = 0.0f;
    float of_windows = 0.0f;
    for (int n = row; row < tile_height && n < tile_height * ways; n += tile_height) {
      of_pages += pool[1024 + n * WIDTH + dim];
      of_windows += pool[1024 + (8 + n) * WIDTH + dim];
    }
    tile_rows[row * ROW + dim] = of_pages;
    if (row < tile_height) {
      pool[1024 + (8 + row) * WIDTH + dim] = of_windows;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (HAS_V) {
#pragma unroll 1
    for (int m = group; m < 2 * BD; m += S) {
      const device uint* map = map_v + size_t(kv_head) * size[9] + (m * 2 * BV * 32 + 4 * g + t) * 4;
      TileC c;
      for (int i = 0; i < 4; i++) {
        c.v[i] = 0.0f;
      }
#pragma unroll 8
      for (int k = 0; k < 2 * BV; k++) {
        const uint4 x = *(const device uint4*)(map + k * 128);
        TileA a;
        a.w[0] = x.x;
        a.w[1] = x.y;
        a.w[2] = x.z;
        a.w[3] = x.w;
        TileB b;
        for (int r = 0; r < 2; r++) {
          const int dim = 16 * k + 8 * r;
          b.w[r] = kv_halves(
              tile_rows[tile_b_column(lane, 0) * ROW + dim + tile_b_row(lane, 0)],
              tile_rows[tile_b_column(lane, 1) * ROW + dim + tile_b_row(lane, 1)]);
        }
        tile_multiply(c, a, b);
      }
      for (int i = 0; i < 4; i++) {
        pool[1024 + (2 * t + i % 2) * WIDTH + 16 * m + g + 8 * (i / 2)] = c.v[i];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
#pragma unroll 1
  for (int i = thread_id; i < tile_height * D; i += 32 * S) {
    const int row = i / D;
    const int dim = i % D;
    const float value = HAS_V ? pool[1024 + row * WIDTH + dim] : tile_rows[row * ROW + dim];
    out[(size_t(head) * rows + first_row + row) * D + dim] =
        T(value + pool[1024 + (8 + row) * WIDTH + dim]);
  }
}
