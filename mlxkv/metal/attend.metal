// Decode attention over sealed pages and full-precision windows, in base-2 exponents.
// Threadgroup: S simdgroups; grid: (32 S, splits, kv heads of the batch x tiles of QT query rows).
// The first size[1] splits share the records, the others the windows (sink, then live). Codes are
// read once for the QT query rows of a tile. Each split leaves (maximum, sum, output) per row.
//
// q_pages  [heads, runs, rows, RK]  queries in the stored domain, float; q_window [heads, rows, D], of
// type T, in the model's own. scale[0]: the scale of attention times log2(e)
// records  [heads, capacity, RECORD]; headers [heads, capacity / records of a page, HEADER]
// records_2, headers_2: the same of a second run of pages behind the first, in a stored domain of its own
// sink_k, sink_v, live_k, live_v [heads, tokens, D], of type T
// size     [rows, page splits, record capacity, sink capacity, live capacity, new tokens, window,
//           kv heads, page splits of the first run, capacity of the second, runs]
// lengths  [batch, 4]: records, sink tokens, live tokens, records of the second run
// Row i of a head belongs to new token i % L, the last L tokens of live.
constexpr int BK = (RK + 31) / 32;
constexpr int BV = (RV + 31) / 32;
constexpr int BD = (D + 31) / 32;
constexpr int QB = BK > BD ? BK : BD;
constexpr int OB = BV > BD ? BV : BD;
constexpr int GROUPS_K = CHANNEL_K ? 1 : (RK + GROUP_K - 1) / GROUP_K;
constexpr int GROUPS_V = CHANNEL_V ? 1 : (RV + GROUP_V - 1) / GROUP_V;
constexpr int WORDS_K = kv_lane_words<BITS_K>(BK);
constexpr int WORDS_V = kv_lane_words<BITS_V>(BV);
constexpr int SIDE_K =
    32 * WORDS_K + kv_number_words(GROUPS_K, SYMMETRIC_K, CHANNEL_K, OUTER_K);
constexpr int PAGE_RECORDS = PAGE / 16;
constexpr int HEADER_K = kv_header_words(BK, PAGE / GROUP_K, SYMMETRIC_K, CHANNEL_K, OUTER_K);
constexpr float STEPS_K = float(1 << BITS_K);
constexpr float STEPS_V = float(1 << BITS_V);
constexpr float LAZY = 8.0f;  // the running maximum follows when it is exceeded by this much
constexpr float NOTHING = -1.0e30f;
constexpr int ANGLES = PAIRS_K ? 1 << BITS_K : 1;
constexpr int PAIRS = PAIRS_K ? RK / 2 : 1;

threadgroup float q_tile[QT * QB * 32];
threadgroup float tile_out[QT * OB * 32];
threadgroup float tile_max[S * QT];
threadgroup float tile_sum[S * QT];
threadgroup float turns[2 * PAIRS * ANGLES];  // cosine and sine of each angle that a pair can have

const float levels_k[8] = {
    as_type<float>(uint(C_K0)), as_type<float>(uint(C_K1)),
    as_type<float>(uint(C_K2)), as_type<float>(uint(C_K3)),
    as_type<float>(uint(C_K4)), as_type<float>(uint(C_K5)),
    as_type<float>(uint(C_K6)), as_type<float>(uint(C_K7))};
const float levels_v[8] = {
    as_type<float>(uint(C_V0)), as_type<float>(uint(C_V1)),
    as_type<float>(uint(C_V2)), as_type<float>(uint(C_V3)),
    as_type<float>(uint(C_V4)), as_type<float>(uint(C_V5)),
    as_type<float>(uint(C_V6)), as_type<float>(uint(C_V7))};

const int lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup;
const int thread_id = group * 32 + lane;
const int g = lane / 4;
const int t = lane % 4;
const int rows = size[0];
const int page_splits = size[1];
const int tiles = (rows + QT - 1) / QT;
const int head = threadgroup_position_in_grid.z / tiles;
const int first_row = (threadgroup_position_in_grid.z % tiles) * QT;
const int split = threadgroup_position_in_grid.y;
const bool paged = split < page_splits;
const int splits = threads_per_grid.y;
const int new_tokens = size[5];
const int window = size[6];
const int batch = head / size[7];
const bool second = paged && split >= size[8];
const int n_before = second ? lengths[4 * batch] : 0;  // records
const int n_records = lengths[4 * batch + (second ? 3 : 0)];
const int n_sink = lengths[4 * batch + 1];
const int n_live = lengths[4 * batch + 2];
const int total = n_sink + 16 * (lengths[4 * batch] + lengths[4 * batch + 3]) + n_live;
const device uint* run = second ? records_2 : records;
const device uint* run_headers = second ? headers_2 : headers;
const int capacity = size[second ? 9 : 2];
const size_t q_run = (size_t(head) * (paged ? size[10] : 1) + (second ? 1 : 0)) * rows;

const int q_dims = 32 * (paged ? BK : BD);
for (int i = thread_id; i < QT * q_dims; i += 32 * S) {
  const int row = first_row + i / q_dims;
  const int dim = i % q_dims;
  float value = 0.0f;
  if (row < rows && dim < (paged ? RK : D)) {
    const size_t at = (q_run + row) * (paged ? RK : D) + dim;
    value = paged ? q_pages[at] : float(q_window[at]);
  }
  q_tile[i] = value * scale[0];
}
threadgroup_barrier(mem_flags::mem_threadgroup);

float o[QT * OB * 4];
float top[QT];
float sum[QT];
int first_seen[QT];  // first position that the row's sliding window shows
int last_seen[QT];
for (int q = 0; q < QT; q++) {
  top[q] = NOTHING;
  sum[q] = 0.0f;
  last_seen[q] = total - new_tokens + (first_row + q) % new_tokens;
  first_seen[q] = window > 0 ? last_seen[q] - window + 1 : 0;
}
for (int i = 0; i < QT * OB * 4; i++) {
  o[i] = 0.0f;
}

const int sink_units = (n_sink + 15) / 16;
const int units = paged ? n_records : sink_units + (n_live + 15) / 16;
const int run_splits = second ? page_splits - size[8] : size[8];
const int parts = paged ? run_splits : splits - page_splits;
const int part = split - (paged ? (second ? size[8] : 0) : page_splits);
// Pairs: whole pages, so that the simdgroups, which divide a page, read one page at a time.
const int unit_of_parts = PAIRS_K && paged ? PAGE_RECORDS : 1;
const int each = ((units + parts - 1) / parts + unit_of_parts - 1) / unit_of_parts * unit_of_parts;
const int stop = metal::min(units, (part + 1) * each);
for (int unit = part * each + group; unit < stop; unit += S) {
  const device uint* record = run + (size_t(head) * capacity + (paged ? unit : 0)) * RECORD;
  const device uint* header =
      run_headers + (size_t(head) * (capacity / PAGE_RECORDS) + (paged ? unit / PAGE_RECORDS : 0)) * HEADER;
  const int token_of_page = 16 * (unit % PAGE_RECORDS);  // the record's first
  const bool in_sink = unit < sink_units;
  const int token0 = in_sink ? 16 * unit : 16 * (unit - sink_units);  // windows only
  const int tokens = paged ? 16 : (in_sink ? n_sink : n_live) - token0;
  const int position0 = paged ? n_sink + 16 * (n_before + unit) : (in_sink ? token0 : total - n_live + token0);
  const size_t at_window = (size_t(head) * (in_sink ? size[3] : size[4]) + token0) * D;

  if (PAIRS_K && paged && (unit - group) % PAGE_RECORDS == 0) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const device half* angles = (const device half*)header + PAIRS;
    for (int i = thread_id; i < PAIRS * ANGLES; i += 32 * S) {
      const float step = float(angles[i / ANGLES]);
      const float low = float(angles[i / ANGLES + 2 * PAIRS]);
      const float angle = metal::fma(float(i % ANGLES) + 0.5f, step, low) - KV_PI;
      turns[2 * i] = -metal::cos(angle);
      turns[2 * i + 1] = -metal::sin(angle);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // Scores of tokens g and g + 8: this lane's dims, then the four lanes of a token together.
  float s[QT * 2];
  for (int i = 0; i < QT * 2; i++) {
    s[i] = 0.0f;
  }
  if (paged && PAIRS_K) {
    const device half* page_numbers = (const device half*)header;
    for (int j = 0; j < BK / 2; j++) {  // the other half of a pair stands BK / 2 blocks further
      const int pair = 32 * j + 8 * t;
      float steps[8];
      float biases[8];
      kv_load_numbers<8>(page_numbers + pair, steps);
      kv_load_numbers<8>(page_numbers + RK + pair, biases);
      for (int i = 0; i < 8; i++) {  // to the middle of a step
        biases[i] = metal::fma(0.5f - STEPS_K, steps[i], biases[i]);
        steps[i] *= STEPS_K;
      }
      float first[16];
      float second[16];
      for (int r = 0; r < 2; r++) {
        for (int p = 0; p < 4; p++) {
          const uint radii = record[kv_word_at(kv_slot_word<BITS_K>(j, r, p), lane, WORDS_K)];
          const uint radii_high =
              BITS_K == 3 ? record[kv_word_at(kv_high_word(j), lane, WORDS_K)] : 0u;
          const int other = j + BK / 2;
          const uint angles = record[kv_word_at(kv_slot_word<BITS_K>(other, r, p), lane, WORDS_K)];
          const uint angles_high =
              BITS_K == 3 ? record[kv_word_at(kv_high_word(other), lane, WORDS_K)] : 0u;
          for (int h = 0; h < 2; h++) {
            const int i = 4 * h + p;
            const float code = kv_one_plus<BITS_K>(kv_code<BITS_K>(radii, radii_high, j, r, p, h));
            const float radius = metal::fma(steps[i], code, biases[i]);
            const int angle = int(kv_code<BITS_K>(angles, angles_high, other, r, p, h));
            const int at = 2 * ((pair + i) * ANGLES + angle);
            first[8 * r + i] = radius * turns[at];
            second[8 * r + i] = radius * turns[at + 1];
          }
        }
      }
      for (int q = 0; q < QT; q++) {
        for (int i = 0; i < 8; i++) {
          const float a = q_tile[q * 32 * BK + pair + i];
          const float b = q_tile[q * 32 * BK + PAIRS + pair + i];
          for (int r = 0; r < 2; r++) {
            s[2 * q + r] = metal::fma(a, first[8 * r + i], s[2 * q + r]);
            s[2 * q + r] = metal::fma(b, second[8 * r + i], s[2 * q + r]);
          }
        }
      }
    }
  } else if (paged) {
    const device half* numbers = (const device half*)(record + 32 * WORDS_K);
    const device half* page_numbers = (const device half*)header +
        (CHANNEL_K ? token_of_page / GROUP_K * (SYMMETRIC_K ? 1 : 2) * 32 * BK : 0);
    for (int j = 0; j < BK; j++) {
      float k[16];
      float steps[8];  // of the lane's dims
      float biases[8];
      float outer[8];
      const int dim = 32 * j + 8 * t;
      if (CHANNEL_K) {
        kv_load_numbers<8>(page_numbers + dim, steps);
        if (!SYMMETRIC_K) {
          kv_load_numbers<8>(page_numbers + 32 * BK + dim, biases);
        }
        for (int i = 0; i < 8; i++) {
          steps[i] *= STEPS_K;
          biases[i] = SYMMETRIC_K ? -0.5f * steps[i] : biases[i];
        }
      } else if (OUTER_K) {
        kv_load_numbers<8>(page_numbers + dim, outer);
      }
      for (int r = 0; r < 2; r++) {
        const int token = g + 8 * r;
        const int group_of = CHANNEL_K ? 0 : 32 * j / GROUP_K;
        if (!CHANNEL_K) {
          const float step = STEPS_K * float(numbers[kv_key_number(token, group_of, 0, GROUPS_K, SYMMETRIC_K)]);
          const float bias = SYMMETRIC_K
              ? -0.5f * step
              : float(numbers[kv_key_number(token, group_of, 1, GROUPS_K, SYMMETRIC_K)]);
          for (int i = 0; i < 8; i++) {
            steps[i] = step;
            biases[i] = bias;
          }
        }
        for (int p = 0; p < 4; p++) {
          const uint word = record[kv_word_at(kv_slot_word<BITS_K>(j, r, p), lane, WORDS_K)];
          const uint high = BITS_K == 3 ? record[kv_word_at(kv_high_word(j), lane, WORDS_K)] : 0u;
          for (int h = 0; h < 2; h++) {
            const int i = 4 * h + p;
            const float code = kv_one_plus<BITS_K>(kv_code<BITS_K>(word, high, j, r, p, h));
            k[8 * r + i] = CODEBOOK_K
                ? steps[i] * kv_level<BITS_K>(code, levels_k)
                : metal::fma(steps[i], code, biases[i] - steps[i]);
            if (OUTER_K && !CHANNEL_K) {
              k[8 * r + i] *= outer[i];
            }
          }
        }
      }
      for (int q = 0; q < QT; q++) {
        for (int i = 0; i < 8; i++) {
          const float query = q_tile[q * 32 * BK + 32 * j + 8 * t + i];
          s[2 * q] = metal::fma(query, k[i], s[2 * q]);
          s[2 * q + 1] = metal::fma(query, k[8 + i], s[2 * q + 1]);
        }
      }
    }
    if (OUTER_K && CHANNEL_K) {
      for (int q = 0; q < QT; q++) {
        for (int r = 0; r < 2; r++) {
          s[2 * q + r] *= float(numbers[kv_key_number(g + 8 * r, 0, 0, 1, 1)]);
        }
      }
    }
  } else {
    for (int j = 0; j < BD; j++) {
      for (int r = 0; r < 2; r++) {
        const int token = g + 8 * r;
        for (int i = 0; i < 8; i++) {
          const int dim = 32 * j + 8 * t + i;
          float k = 0.0f;
          if (token < tokens && dim < D) {
            const size_t at = at_window + size_t(token) * D + dim;
            k = in_sink ? float(sink_k[at]) : float(live_k[at]);
          }
          for (int q = 0; q < QT; q++) {
            s[2 * q + r] = metal::fma(q_tile[q * 32 * BD + dim], k, s[2 * q + r]);
          }
        }
      }
    }
  }
  bool exceeds = false;
  for (int q = 0; q < QT; q++) {
    for (int r = 0; r < 2; r++) {
      float score = s[2 * q + r];
      score += simd_shuffle_xor(score, ushort(1));
      score += simd_shuffle_xor(score, ushort(2));
      const int token = g + 8 * r;
      const int position = position0 + token;
      const bool seen = token < tokens && position <= last_seen[q] && position >= first_seen[q];
      s[2 * q + r] = seen ? score : -INFINITY;
      exceeds = exceeds || (seen && score > top[q] + LAZY);
    }
  }
  if (simd_any(exceeds)) {  // the whole simdgroup takes the same way
    for (int q = 0; q < QT; q++) {
      float peak = metal::max(s[2 * q], s[2 * q + 1]);
      peak = metal::max(peak, simd_shuffle_xor(peak, ushort(4)));
      peak = metal::max(peak, simd_shuffle_xor(peak, ushort(8)));
      peak = metal::max(peak, simd_shuffle_xor(peak, ushort(16)));
      peak = metal::max(peak, top[q]);
      const float shrink = metal::exp2(top[q] - peak);
      top[q] = peak;
      sum[q] *= shrink;
      for (int i = 0; i < OB * 4; i++) {
        o[q * OB * 4 + i] *= shrink;
      }
    }
  }
  // Probabilities move from the lanes of the keys to those of the values.
  float p_values[QT * 4];
  for (int q = 0; q < QT; q++) {
    for (int r = 0; r < 2; r++) {
      const float probability = metal::exp2(s[2 * q + r] - top[q]);
      sum[q] += probability;
      p_values[4 * q + 2 * r] = simd_shuffle(probability, ushort(8 * t));
      p_values[4 * q + 2 * r + 1] = simd_shuffle(probability, ushort(8 * t + 4));
    }
  }
  // Outputs: tokens 2 t + 8 r + h, dims 32 j + 4 g + p.
  if (paged) {
    const device uint* side = record + SIDE_K;
    const device half* numbers = (const device half*)(side + 32 * WORDS_V);
    const device half* page_numbers = (const device half*)(header + HEADER_K) +
        (CHANNEL_V ? token_of_page / GROUP_V * (SYMMETRIC_V ? 1 : 2) * 32 * BV : 0);
    for (int j = 0; j < BV; j++) {
      float steps[4];  // of the lane's dims
      float biases[4];
      float outer[4];
      const int dim = 32 * j + 4 * g;
      if (CHANNEL_V) {
        kv_load_numbers<4>(page_numbers + dim, steps);
        if (!SYMMETRIC_V) {
          kv_load_numbers<4>(page_numbers + 32 * BV + dim, biases);
        }
        for (int p = 0; p < 4; p++) {
          steps[p] *= STEPS_V;
          biases[p] = SYMMETRIC_V ? -0.5f * steps[p] : biases[p];
        }
      } else if (OUTER_V) {
        kv_load_numbers<4>(page_numbers + dim, outer);
      }
      for (int r = 0; r < 2; r++) {
        for (int h = 0; h < 2; h++) {
          const int token = 2 * t + 8 * r + h;
          const int group_of = CHANNEL_V ? 0 : 32 * j / GROUP_V;
          if (!CHANNEL_V) {
            const float step =
                STEPS_V * float(numbers[kv_value_number(token, group_of, 0, GROUPS_V)]);
            const float bias = SYMMETRIC_V
                ? -0.5f * step
                : float(numbers[kv_value_number(token, group_of, 1, GROUPS_V)]);
            for (int p = 0; p < 4; p++) {
              steps[p] = step;
              biases[p] = bias;
            }
          } else if (OUTER_V) {
            for (int p = 0; p < 4; p++) {
              outer[p] = float(numbers[kv_value_number(token, 0, 0, 1)]);
            }
          }
          for (int p = 0; p < 4; p++) {
            const uint word = side[kv_word_at(kv_slot_word<BITS_V>(j, r, p), lane, WORDS_V)];
            const uint high = BITS_V == 3 ? side[kv_word_at(kv_high_word(j), lane, WORDS_V)] : 0u;
            const float code = kv_one_plus<BITS_V>(kv_code<BITS_V>(word, high, j, r, p, h));
            float value = CODEBOOK_V ? steps[p] * kv_level<BITS_V>(code, levels_v)
                                     : metal::fma(steps[p], code, biases[p] - steps[p]);
            if (OUTER_V) {
              value *= outer[p];
            }
            for (int q = 0; q < QT; q++) {
              const int i = q * OB * 4 + 4 * j + p;
              o[i] = metal::fma(p_values[4 * q + 2 * r + h], value, o[i]);
            }
          }
        }
      }
    }
  } else {
    for (int j = 0; j < BD; j++) {
      for (int n = 0; n < 4; n++) {
        const int token = 2 * t + 8 * (n / 2) + n % 2;
        for (int p = 0; p < 4; p++) {
          const int dim = 32 * j + 4 * g + p;
          float value = 0.0f;
          if (token < tokens && dim < D) {
            const size_t at = at_window + size_t(token) * D + dim;
            value = in_sink ? float(sink_v[at]) : float(live_v[at]);
          }
          for (int q = 0; q < QT; q++) {
            const int i = q * OB * 4 + 4 * j + p;
            o[i] = metal::fma(p_values[4 * q + n], value, o[i]);
          }
        }
      }
    }
  }
}
