// Second part of attend: partial scores of the 32 tokens of two records.
if (paged) {
  int unit = part * each + int(team) * CHUNK;
#pragma unroll 1
  while (unit < stop) {
    const uint header = (first_record + uint(unit)) / uint(PAGE_RECORDS) * uint(HEADER);  // first word of the page's
    const uint place = (first_record + uint(unit)) % uint(PAGE_RECORDS) * 16u;  // the first token's, in its page
    // The lane's number, which a compiler cannot know to be the same in every turn: it would keep each address that
    // follows from it in a register of its own.
    const uint lane_now = lane + (uint(unit) >> 31);
    if (FOLDED && unit % CHUNK == 0) {
      // Queries times scales of channels, four dims a lane_now; biases, and what codes are larger by, add a number that the
      // scores of all these tokens share.
      const device half* numbers =
          (const device half*)(run_headers + header) + place / uint(GROUP_K) * CHANNEL_NUMBERS_K;
      kv_team_barrier<PARTS>();
      const kv_four fold = shared + own_part * 8u * QT;
      const kv_floats fold_floats = (kv_floats)fold;
      // Lanes share the rows where the dims of a simdgroup are fewer than theirs.
      constexpr uint FOURS = 8u * uint(PK);
      constexpr uint ROWS_AT_ONCE = FOURS < 32u && 32u % FOURS == 0u ? 32u / FOURS : 1u;
      const uint own_row = ROWS_AT_ONCE > 1u ? lane_now / FOURS : 0u;
#pragma unroll
      for (uint n = 0u; n < FOURS; n += 32u) {
        const uint i = ROWS_AT_ONCE > 1u ? lane_now % FOURS : n + lane_now;
        const uint dim = 4u * (FOURS * own_part + i);
        const bool held = (FOURS % 32u == 0u || i < FOURS) && (BK % PARTS == 0 || dim < 32u * uint(BK));
        float steps[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        float biases[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (held) {
          kv_load_numbers<4>(numbers + dim, steps);
          if (!SYMMETRIC_K) {
            kv_load_numbers<4>(numbers + (32u * uint(BK) + dim), biases);
          }
        }
#pragma unroll 1
        for (uint q = own_row; q < uint(QT); q += ROWS_AT_ONCE) {
          float query[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          if (held) {
            kv_load_shared<4>(row_words, (q * uint(QB * 32) + dim) / 4u, query);
          }
          float all = 0.0f;
          float times[4];
#pragma unroll
          for (int d = 0; d < 4; d++) {
            const float larger = (SYMMETRIC_K ? 0.5f * STEPS_K : 0.0f) + (WIDE ? 0.0f : kv_code_offset<BITS_K>(d));
            times[d] = float(KvQuery<WIDE_Q>::type(query[d] * steps[d]));
            all = metal::fma(query[d], biases[d], metal::fma(times[d], -larger, all));
          }
          const uint place_q = kv_query_place((team * uint(QT) + q) * uint(QB * 32) + dim, 0);
          if (held) {
#pragma unroll
            for (int d = 0; d < 4; d++) {  // dims 2 and 3 of four are four places further
              q_tile[place_q + (d < 2 ? uint(d) : uint(d) + 2u)] = KvQuery<WIDE_Q>::type(times[d]);
            }
          }
          fold_floats[q * 32u + lane_now] = n == 0u ? all : fold_floats[q * 32u + lane_now] + all;
        }
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      if (lane < uint(QT)) {
        // A row's sum is in the lanes that held the row.
        const uint first = ROWS_AT_ONCE > 1u ? lane % ROWS_AT_ONCE * FOURS : 0u;
        constexpr uint COUNT = ROWS_AT_ONCE > 1u ? FOURS : 32u;
        float4 four = float4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (uint i = 0u; i < COUNT; i += 4u) {
          const float4 add = fold[(lane * 32u + first + i) / 4u];
          four = float4{four.x + add.x, four.y + add.y, four.z + add.z, four.w + add.w};
        }
        common[group * uint(QT) + lane] = four.x + four.y + (four.z + four.w);
      }
      kv_team_barrier<PARTS>();
    }
    {
      const uint record = (first_record + uint(unit)) * uint(record_words);  // its first word
      const uint other = unit + 1 < stop ? uint(record_words) : 0u;  // words to the second record
#if WITH_MIXED_BITS
#pragma unroll 1
      for (uint e = 0u; e < 32u; e += 16u) {  // its first token
        const uint of = record + (e ? other : 0u);
        float s[2 * QT];  // [8 tokens further, row]
#pragma unroll
        for (int i = 0; i < 2 * QT; i++) {
          s[i] = 0.0f;
        }
#pragma unroll 1
        for (int n = 0; n < 2 * PK; n++) {
          const int b = 2 * PK * int(own_part) + n;
          if (b < blocks_k) {
            float query[4 * QT];
#pragma unroll
            for (int q = 0; q < QT; q++) {
              kv_four_queries<WIDE_Q>(queries, uint(q * QB * 8) + 4u * uint(b) + t, query + 4 * q);
            }
            uint codes[4];
            kv_mixed_halves(run, of, mixed_k, uint(b), lane, codes);
#pragma unroll
            for (int i = 0; i < 8; i++) {
              const int r = i / 4;
              const int h = i / 2 % 2;
              const float code = kv_half_of(codes[2 * r + i % 2], h) - (WIDE ? KV_MIXED_OFFSET : 0.0f);
#pragma unroll
              for (int q = 0; q < QT; q++) {
                s[r * QT + q] = metal::fma(query[4 * q + i % 4], code, s[r * QT + q]);
              }
            }
          }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const uint token = e + 8u * uint(r) + lane_now / 4u;
          kv_store_shared<QT>(shared, token * TOKEN + 4u * own_part + lane_now % 4u, s + r * QT);
        }
      }
#endif
#if WITH_PLAIN_K
      {
        constexpr int AT_ONCE = BITS_K == 3 ? 2 : 1;  // blocks that share a word
        constexpr int LOADED = BITS_K == 3 ? 3 : BITS_K / 2;
        constexpr bool FULL = BK % PARTS == 0 && PK % AT_ONCE == 0;  // no block is beyond the last
        float s[4 * QT];  // of tokens g + 8 i, [i, row]
#pragma unroll
        for (int i = 0; i < 4 * QT; i++) {
          s[i] = 0.0f;
        }
#pragma unroll 1
        for (int n = 0; n < PK; n += AT_ONCE) {
          const uint wanted = own_part * uint(PK) + uint(n);
          const uint first_block = FULL ? wanted : metal::min(wanted, uint(BK - 1) / uint(AT_ONCE) * uint(AT_ONCE));
          const uint first_word = first_block / uint(AT_ONCE) * uint(LOADED);
          uint words[2 * LOADED];
          kv_load_some<WORDS_K, LOADED>(run, record, lane, first_word, words);
          kv_load_some<WORDS_K, LOADED>(run, record + other, lane, first_word, words + LOADED);
#pragma unroll
          for (int b = 0; b < AT_ONCE; b++) {
            const uint j = first_block + uint(b);
            if (FULL || wanted + uint(b) < uint(BK)) {
#pragma unroll
              for (int pair = 0; pair < 2; pair++) {
                float query[4 * QT];
#pragma unroll
                for (int q = 0; q < QT; q++) {
                  kv_four_queries<WIDE_Q>(
                      queries, 2u * (eights_at + uint(q * QB * 4) + 4u * j) + uint(pair), query + 4 * q);
                }
#pragma unroll
                for (int i = 0; i < 8; i++) {
                  const thread uint* of = words + i / 4 * LOADED;
                  const int r = i / 2 % 2;
                  const int d = 2 * pair + i % 2;
                  const uint codes = kv_code_halves<BITS_K>(
                      of[kv_slot_word<BITS_K>(b, r, d)], BITS_K == 3 ? of[LOADED - 1] : 0u, b, r, d);
#pragma unroll
                  for (int h = 0; h < 2; h++) {
                    const float code = kv_half_of(codes, h) - (WIDE ? kv_code_offset<BITS_K>(d) : 0.0f);
#pragma unroll
                    for (int q = 0; q < QT; q++) {
                      s[i / 2 * QT + q] = metal::fma(query[4 * q + 2 * h + i % 2], code, s[i / 2 * QT + q]);
                    }
                  }
                }
              }
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint token = 8u * uint(i) + lane_now / 4u;
          kv_store_shared<QT>(shared, token * TOKEN + 4u * own_part + lane_now % 4u, s + i * QT);
        }
      }
#endif
#if WITH_TREE
      const device half* books = (const device half*)(run_headers + header);
      if (TREE_K == 2) {
        tree_k = kv_tree<2, 1>(books_k, books, lane);
      }
#endif
#if WITH_DECODED_K
#pragma unroll 1
      for (uint e = 0u; e < 32u; e += 16u) {  // its first token
        const uint of = record + (e ? other : 0u);
        float s[2 * QT];  // [8 tokens further, row]
#pragma unroll
        for (int i = 0; i < 2 * QT; i++) {
          s[i] = 0.0f;
        }
#if WITH_PAIRS
      if (PAIRS_K) {
        constexpr int WORDS = kv_slot_word<BITS_K == 3 ? 2 : BITS_K>(1, 0, 0);  // of a block, without high bits
        constexpr int PAIRS = RK / 2;
        constexpr int HALF_BLOCKS = BK / 2;
        constexpr int PART_BLOCKS = (HALF_BLOCKS + PARTS - 1) / PARTS;
        const device half* page_numbers = (const device half*)(run_headers + header);
#pragma unroll 1
        for (int n = 0; n < PART_BLOCKS; n++) {
          const int j = int(own_part) * PART_BLOCKS + n;  // the other half of a pair is BK / 2 blocks further
          const int other_block = j + HALF_BLOCKS;
          const int pair = 32 * j + 8 * int(t);
          if (j < HALF_BLOCKS) {
            const device uint* from = run + of;
            uint radii[WORDS];
            uint angles[WORDS];
            uint high[2] = {0u, 0u};
            kv_load_some<WORDS_K, WORDS>(from, 0u, lane, uint(kv_slot_word<BITS_K>(j, 0, 0)), radii);
            kv_load_some<WORDS_K, WORDS>(from, 0u, lane, uint(kv_slot_word<BITS_K>(other_block, 0, 0)), angles);
            if (BITS_K == 3) {
              kv_load_some<WORDS_K, 1>(from, 0u, lane, uint(kv_high_word(j)), high);
              kv_load_some<WORDS_K, 1>(from, 0u, lane, uint(kv_high_word(other_block)), high + 1);
            }
            // Four pairs at a time: registers.
#pragma unroll 1
            for (int h = 0; h < 2; h++) {
              float steps[8];  // of radii, then of angles
              float biases[8];
              kv_load_numbers<4>(page_numbers + pair + 4 * h, steps);
              kv_load_numbers<4>(page_numbers + PAIRS + pair + 4 * h, steps + 4);
              kv_load_numbers<4>(page_numbers + 2 * PAIRS + pair + 4 * h, biases);
              kv_load_numbers<4>(page_numbers + 3 * PAIRS + pair + 4 * h, biases + 4);
#pragma unroll
              for (int i = 0; i < 8; i++) {  // to the middle of a step
                biases[i] = metal::fma(0.5f - STEPS_K, steps[i], biases[i] - (i < 4 ? 0.0f : KV_PI));
                steps[i] *= STEPS_K;
              }
#pragma unroll
              for (int i = 0; i < 8; i++) {
                const int r = i % 2;
                const int p = i / 2;
                const int word = kv_slot_word<BITS_K>(0, r, p);
                const float radius = metal::fma(
                    steps[p], kv_one_plus<BITS_K>(kv_code<BITS_K>(radii[word], high[0], j, r, p, h)), biases[p]);
                const float angle = metal::fma(
                    steps[4 + p], kv_one_plus<BITS_K>(kv_code<BITS_K>(angles[word], high[1], other_block, r, p, h)),
                    biases[4 + p]);
                const float first = -radius * metal::fast::cos(angle);
                const float last = -radius * metal::fast::sin(angle);
#pragma unroll
                for (int q = 0; q < QT; q++) {
                  const uint at = kv_query_place(query_at + uint(q * QB * 32 + 32 * j), 4 * h + p);
                  s[r * QT + q] = metal::fma(q_tile[at], first, s[r * QT + q]);
                  s[r * QT + q] = metal::fma(q_tile[at + PAIRS], last, s[r * QT + q]);
                }
              }
            }
          }
        }
      }
#endif
#if WITH_DECODED_K
      if (DECODED_K && !PAIRS_K) {
        // Words of a block, or of two of 3 bits.
        constexpr int LOADED = BITS_K == 3 ? 3 : BITS_K == 16 ? 8 : BITS_K / 2;
#if WITH_CHANNEL
        const device half* page_numbers =
            (const device half*)(run_headers + header) +
            (CHANNEL_K ? (place + e) / uint(GROUP_K) * CHANNEL_NUMBERS_K : 0u);
#endif
#pragma unroll 1
        for (int n = 0; n < PK; n++) {
          const int j = int(own_part) * PK + n;
          if (BK % PARTS == 0 || j < BK) {
            const device uint* from = run + of;
            const device half* numbers = (const device half*)(from + 32 * WORDS_K);
            uint words[LOADED];
            kv_load_some<WORDS_K, LOADED>(run, of, lane, uint((BITS_K == 3 ? j / 2 : j) * LOADED), words);
            const uint high = BITS_K == 3 ? words[LOADED - 1] >> (8 * (j % 2)) : 0u;
#pragma unroll
            for (int r = 0; r < 2; r++) {
              float k[8];
              float steps[8];  // of the lane's dims
              float biases[8];
              const int token = int(g) + 8 * r;
#if WITH_CHANNEL
              const int dim = 32 * j + 8 * int(t);
              if (CHANNEL_K) {
                kv_load_numbers<8>(page_numbers + dim, steps);
                if (!SYMMETRIC_K) {
                  kv_load_numbers<8>(page_numbers + 32 * BK + dim, biases);
                }
#pragma unroll
                for (int i = 0; i < 8; i++) {
                  steps[i] *= STEPS_K;
                  biases[i] = SYMMETRIC_K ? -0.5f * steps[i] : biases[i];
                }
              }
#endif
              if (!CHANNEL_K && !TREE_K && !RAW_K) {
                const int group_of = 32 * j / GROUP_K;
                const float step =
                    STEPS_K * float(numbers[kv_key_number(token, group_of, 0, GROUPS_K, SYMMETRIC_K)]);
                const float bias = SYMMETRIC_K
                    ? -0.5f * step
                    : float(numbers[kv_key_number(token, group_of, 1, GROUPS_K, SYMMETRIC_K)]);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                  steps[i] = step;
                  biases[i] = bias;
                }
              }
#if WITH_TREE
              if (TREE_K) {
                const uint low = BITS_K == 3 && j % 2 ? words[1] : words[0];
                const int group_of = 2 * j + int(t / 2u);
                const float radius = kv_number_at(
                    numbers, kv_key_number(token, group_of, 0, GROUPS_K, 1), group_of < GROUPS_K);
                kv_tree_key(tree_k, radius, low >> (8 * r), high >> kv_high_bit(0, r, 0, 0), t, k);
              }
#endif
#pragma unroll
              for (int i = 0; i < (TREE_K ? 0 : 8); i++) {
                const int p = i % 4;
                const int at = kv_slot_word<BITS_K>(0, r, p);
                const uint word = BITS_K == 3 && j % 2 ? words[1] : words[at];
                const float code = kv_one_plus<BITS_K>(kv_code<BITS_K>(word, high, 0, r, p, i / 4));
                if (!CODEBOOK_K && !RAW_K) {
                  k[i] = metal::fma(steps[i], code, biases[i] - steps[i]);
                }
#if WITH_CODEBOOK
                if (CODEBOOK_K) {
                  k[i] = steps[i] * kv_level<BITS_K>(code, levels_k);
                }
#endif
#if WITH_HALVES
                if (RAW_K) {
                  k[i] = kv_half_of(word, i / 4);
                }
#endif
              }
#pragma unroll
              for (int i = 0; i < 8; i++) {
#pragma unroll
                for (int q = 0; q < QT; q++) {
                  const float query = q_tile[kv_query_place(query_at + uint(q * QB * 32 + 32 * j), i)];
                  s[r * QT + q] = metal::fma(query, k[i], s[r * QT + q]);
                }
              }
            }
          }
        }
      }
#endif
        // The quarters of tokens g and g + 8, in threadgroup memory.
#pragma unroll
        for (int r = 0; r < 2; r++) {
          kv_store_shared<QT>(shared, (e + 8u * uint(r) + g) * TOKEN + 4u * own_part + t, s + r * QT);
        }
      }
#endif
