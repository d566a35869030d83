// Third part of attend: probabilities of the lane's token, and their products with values.
      kv_team_barrier<PARTS>();
      float p[OWN];  // of the lane's token, for the simdgroup's rows
      kv_scores<QT, OWN, PARTS, TOKEN>(shared, lane_now, own_part, p);
      const bool seen = unit + int(lane / 16u) < stop;
      const device uint* own_record = run + (record + (lane < 16u ? 0u : other));  // of the lane's token
      const int token = int(lane % 16u);
#if WITH_PLAIN_K
      if (!CHANNEL_K) {
        const device half* numbers = (const device half*)(own_record + 32 * WORDS_K);
        const float step = float(numbers[kv_key_number(token, 0, 0, 1, SYMMETRIC_K)]);
        const float bias =
            SYMMETRIC_K ? 0.0f : float(numbers[kv_key_number(token, 0, 1, 1, SYMMETRIC_K)]);
#pragma unroll
        for (int q = 0; q < OWN; q++) {
          const float4 of_query = query_sums[first_own + uint(q)];
          p[q] = metal::fma(p[q] - of_query.y, step, bias * of_query.x);
        }
      }
      if (FOLDED) {
#pragma unroll
        for (int q = 0; q < OWN; q++) {
#pragma unroll
          for (uint i = 0u; i < uint(PARTS); i++) {
            p[q] += common[(team * uint(PARTS) + i) * uint(QT) + first_own + uint(q)];
          }
        }
      }
#endif
#if WITH_MIXED_BITS
      const float step = float(((const device half*)(own_record + side_words_k - 8))[kv_key_number(token, 0, 0, 1, 1)]);
#pragma unroll
      for (int q = 0; q < OWN; q++) {
        p[q] = (p[q] - query_sums[first_own + uint(q)].y) * step;
      }
#endif
#pragma unroll
      for (int q = 0; q < OWN; q++) {
        p[q] = seen ? p[q] : -INFINITY;
      }
      float shrink[OWN];
      kv_probabilities<OWN>(p, top, shrink, LAZY, as_type<float>(CAP));
      float sum[SUMS];
      kv_load_shared<SUMS>(sums, lane_now, sum);
#pragma unroll
      for (int q = 0; q < OWN; q++) {
        sum[q * (1 + MORE)] = metal::fma(sum[q * (1 + MORE)], shrink[q], p[q]);
      }
      // In the order of the lanes of the values.
#pragma unroll
      for (int i = 0; i < SCALED; i++) {
        float times = 1.0f;
#if WITH_MIXED_BITS
        times = float(((const device half*)(own_record + record_words - 8))[kv_value_number(token, 0, 0, 1)]);
#pragma unroll
        for (int q = 0; q < OWN; q++) {
          sum[q * (1 + MORE) + 1] = metal::fma(p[q], times, sum[q * (1 + MORE) + 1] * shrink[q]);
        }
#endif
#if WITH_PLAIN_V
        {
          const device half* numbers = (const device half*)(own_record + SIDE_K + 32 * WORDS_V);
          times = float(numbers[kv_value_number(token, i, 0, GROUPS_V)]);
          const float lowest = SYMMETRIC_V ? -0.5f * STEPS_V * times
                                           : float(numbers[kv_value_number(token, i, 1, GROUPS_V)]);
#pragma unroll
          for (int q = 0; q < OWN; q++) {
            const int at = q * (1 + MORE) + 1 + 2 * i;
            sum[at] = metal::fma(p[q], times, sum[at] * shrink[q]);
            sum[at + 1] = metal::fma(p[q], lowest, sum[at + 1] * shrink[q]);
          }
        }
#endif
#pragma unroll
        for (int q = 0; q < OWN; q++) {
          const uint pair = (uint(i) * 16u + lane_now / 2u) * uint(QT) + first_own + uint(q);  // of two tokens
          weight_floats[2u * pair + lane_now % 2u] = p[q] * times;
        }
      }
      kv_store_shared<SUMS>(sums, lane_now, sum);
      if (lane < uint(OWN)) {
        ((kv_floats)shrinks)[first_own + lane] = kv_one_of<OWN>(shrink, lane);
      }
      kv_team_barrier<PARTS>();
      kv_rescale<QT, OB * 4>(shrinks, o);
#if WITH_TREE
      if (TREE_V == 2) {
        tree_v = kv_tree<2, 1>(books_v, books + 2 * HEADER_K, lane);
      }
#endif
#if WITH_DECODED_V || WITH_MIXED_BITS
#pragma unroll 1
#else
#pragma unroll
#endif
      for (uint e = 0u; e < 32u; e += 16u) {  // its first token
        const uint of = record + (e ? other : 0u);
#if WITH_MIXED_BITS
        const uint entry_now = (uint(unit) + e) >> 31;  // 0, unknown to a compiler: entries stay in memory
        float of_tokens[4 * QT];  // [8 tokens further, row, token of two]
        kv_load_shared<2 * QT>(weights, e / 2u + lane_now % 4u, of_tokens);
        kv_load_shared<2 * QT>(weights, e / 2u + 4u + lane_now % 4u, of_tokens + 2 * QT);
#pragma unroll
        for (int n = 0; n < 2 * PV; n++) {
          const int b = 2 * PV * int(own_part) + n;
          if (b < blocks_v) {
            uint codes[4];
            kv_mixed_halves(run, of, mixed_v, uint(b) + entry_now, lane, codes);
#pragma unroll
            for (int i = 0; i < 8; i++) {
              const int r = i / 4;
              const int h = i / 2 % 2;
              const float code = kv_half_of(codes[2 * r + i % 2], h) - (WIDE ? KV_MIXED_OFFSET : 0.0f);
#pragma unroll
              for (int q = 0; q < QT; q++) {
                const int at = q * OB * 4 + 2 * n + i % 2;
                o[at] = metal::fma(of_tokens[2 * r * QT + 2 * q + h], code, o[at]);
              }
            }
          }
        }
#endif
#if WITH_PLAIN_V
        {
          constexpr int AT_ONCE = BITS_V == 3 ? 2 : 1;  // blocks that share a word
          constexpr int LOADED = BITS_V == 3 ? 3 : BITS_V / 2;
          uint words[(PV + AT_ONCE - 1) / AT_ONCE * LOADED];
#pragma unroll
          for (int n = 0; n < (BITS_V == 8 ? 0 : PV); n += AT_ONCE) {
            const uint block = kv_block<BV, PARTS>(uint(PV) * own_part + uint(n));
            kv_load_some<WORDS_V, LOADED>(
                run, of + uint(SIDE_K), lane, block / uint(AT_ONCE) * uint(LOADED), words + n / AT_ONCE * LOADED);
          }
#pragma unroll
          for (int r = 0; r < 2; r++) {
            float of_tokens[2 * QT];
#pragma unroll
            for (int n = 0; n < PV; n++) {
              if (BITS_V == 8) {  // half a block at a time: registers
                const uint block = kv_block<BV, PARTS>(uint(PV) * own_part + uint(n));
                kv_load_some<WORDS_V, BITS_V == 8 ? 2 : 1>(
                    run, of + uint(SIDE_K), lane, 4u * block + uint(2 * r), words);
              }
              if (BV % PARTS == 0 || uint(PV) * own_part + uint(n) < uint(BV)) {
                // Weights of the block's group, of which a part of the dims may begin in the middle.
                constexpr bool WITHIN = PARTS > 1 && 32 * PV % GROUP_V != 0;
                if (n == 0 || (SCALED > 1 && (WITHIN || 32 * n % GROUP_V == 0))) {
                  const uint of_group = SCALED > 1 ? 32u * (uint(PV) * own_part + uint(n)) / uint(GROUP_V) : 0u;
                  kv_load_shared<2 * QT>(weights, of_group * 16u + uint(4 * r) + e / 2u + lane_now % 4u, of_tokens);
                }
                const int first = n / AT_ONCE * LOADED;
#pragma unroll
                for (int d = 0; d < 4; d++) {
                  const int word = BITS_V == 8 ? d / 2 : first + kv_slot_word<BITS_V>(n % AT_ONCE, r, d);
                  const uint codes = kv_code_halves<BITS_V>(
                      words[word], BITS_V == 3 ? words[first + LOADED - 1] : 0u, n % AT_ONCE, r, d);
#pragma unroll
                  for (int h = 0; h < 2; h++) {
                    const float code = kv_half_of(codes, h) - (WIDE ? kv_code_offset<BITS_V>(d) : 0.0f);
#pragma unroll
                    for (int q = 0; q < QT; q++) {
                      const int at = q * OB * 4 + 4 * n + d;
                      o[at] = metal::fma(of_tokens[2 * q + h], code, o[at]);
                    }
                  }
                }
              }
            }
          }
        }
#endif
#if WITH_DECODED_V
        if (DECODED_V) {
          const device uint* side = run + (of + uint(SIDE_K));
          const device half* numbers = (const device half*)(side + 32 * WORDS_V);
#if WITH_CHANNEL
          const device half* page_numbers = (const device half*)(run_headers + (header + uint(HEADER_K))) +
              (CHANNEL_V ? (place + e) / uint(GROUP_V) * CHANNEL_NUMBERS_V : 0u);
#endif
          // Words of a block, or of two of 3 bits.
          constexpr int LOADED = BITS_V == 3 ? 3 : BITS_V == 16 ? 8 : BITS_V / 2;
          float of_tokens[4 * QT];
          kv_load_shared<2 * QT>(weights, e / 2u + lane_now % 4u, of_tokens);
          kv_load_shared<2 * QT>(weights, e / 2u + 4u + t, of_tokens + 2 * QT);
#pragma unroll
          for (int n = 0; n < PV; n++) {
            const int j = PV * int(own_part) + n;
            if (BV % PARTS == 0 || j < BV) {
              uint words[LOADED];
              kv_load_some<WORDS_V, LOADED>(
                  side, 0u, lane, uint((BITS_V == 3 ? j / 2 : j) * LOADED), words);
              const uint high = BITS_V == 3 ? words[LOADED - 1] >> (8 * (j % 2)) : 0u;
              float steps[4];  // of the lane's dims
              float biases[4];
              float scales[4];  // of the lane's tokens
              float lowest[4];
              if (!CHANNEL_V && !TREE_V && !RAW_V) {
                kv_load_numbers<4>(numbers + kv_value_number(2 * int(t), 32 * j / GROUP_V, 0, GROUPS_V), scales);
                if (!SYMMETRIC_V) {
                  kv_load_numbers<4>(numbers + kv_value_number(2 * int(t), 32 * j / GROUP_V, 1, GROUPS_V), lowest);
                }
              }
#if WITH_CHANNEL
              const int dim = 32 * j + 4 * int(g);
              if (CHANNEL_V) {
                kv_load_numbers<4>(page_numbers + dim, steps);
                if (!SYMMETRIC_V) {
                  kv_load_numbers<4>(page_numbers + 32 * BV + dim, biases);
                }
#pragma unroll
                for (int d = 0; d < 4; d++) {
                  steps[d] *= STEPS_V;
                  biases[d] = SYMMETRIC_V ? -0.5f * steps[d] : biases[d];
                }
              }
#endif
#pragma unroll
              for (int n2 = 0; n2 < 4; n2++) {
                const int r = n2 / 2;
                const int h = n2 % 2;
                if (!CHANNEL_V && !TREE_V && !RAW_V) {
                  const float step = STEPS_V * scales[n2];
#pragma unroll
                  for (int d = 0; d < 4; d++) {
                    steps[d] = step;
                    biases[d] = SYMMETRIC_V ? -0.5f * step : lowest[n2];
                  }
                }
#if WITH_TREE
                float of_tree[4];
                if (TREE_V) {
                  const uint low = BITS_V == 3 && j % 2 ? words[1] : words[0];
                  const uint own_high = high >> kv_high_bit(0, r, 0, h);
                  const int group_of = 2 * j + int(lane_now / 16u);
                  const float radius = kv_number_at(
                      numbers, kv_value_number(2 * int(lane_now % 4u) + 8 * r + h, group_of, 0, GROUPS_V), group_of < GROUPS_V);
                  const uint neighbour = simd_shuffle_xor(own_high, ushort(4));  // g and its neighbour
                  kv_tree_value(tree_v, radius, low >> (8 * r + 16 * h), own_high, neighbour, g, of_tree);
                }
#endif
#pragma unroll
                for (int d = 0; d < 4; d++) {
                  const int at_word = kv_slot_word<BITS_V>(0, r, d);
                  const uint word = BITS_V == 3 && j % 2 ? words[1] : words[at_word];
                  const float code = kv_one_plus<BITS_V>(kv_code<BITS_V>(word, high, 0, r, d, h));
                  float value = 0.0f;
                  if (!CODEBOOK_V && !RAW_V && !TREE_V) {
                    value = metal::fma(steps[d], code, biases[d] - steps[d]);
                  }
#if WITH_CODEBOOK
                  if (CODEBOOK_V) {
                    value = steps[d] * kv_level<BITS_V>(code, levels_v);
                  }
#endif
#if WITH_HALVES
                  if (RAW_V) {
                    value = kv_half_of(word, h);
                  }
#endif
#if WITH_TREE
                  if (TREE_V) {
                    value = of_tree[d];
                  }
#endif
#pragma unroll
                  for (int q = 0; q < QT; q++) {
                    const int at = q * OB * 4 + 4 * n + d;
                    o[at] = metal::fma(of_tokens[r * 2 * QT + 2 * q + h], value, o[at]);
                  }
                }
              }
            }
          }
        }
#endif
      }
    }
    unit += 2;
    if (unit % CHUNK == 0) {
      unit += (TEAMS - 1) * CHUNK;
    }
  }
