// Second part of attend: scores of the 16 tokens of a record.
if (paged) {
  for (int unit = part * each + group; unit < stop; unit += S) {
    const int place = unit;
    const device uint* record = run + (first_record + place) * record_words;
    const device uint* header =
        run_headers + (first_record + place) / PAGE_RECORDS * HEADER;
    const int token_of_page = 16 * (place % PAGE_RECORDS);  // the record's first
    const int position0 = n_sink + 16 * (n_before + unit);
#if WITH_PAIRS
    if (PAIRS_K && (unit - group) % PAGE_RECORDS == 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const device half* angles = (const device half*)header + PAIRS;
      for (int i = thread_id; i < PAIRS * ANGLES; i += 32 * S) {
        const float step = float(angles[i / ANGLES]);
        const float low = float(angles[i / ANGLES + 2 * PAIRS]);
        const float angle = metal::fma(float(i % ANGLES) + 0.5f, step, low) - KV_PI;
        rotations[2 * i] = -metal::fast::cos(angle);
        rotations[2 * i + 1] = -metal::fast::sin(angle);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
#endif

#if WITH_TREE
    if (TREE_K == 2) {
      tree_k = kv_tree<2, 1>(books_k, (const device half*)header, lane);
    }
    if (TREE_V == 2) {
      tree_v = kv_tree<2, 1>(books_v, (const device half*)(header + HEADER_K), lane);
    }
#endif
    // Scores of tokens g and g + 8: this lane's dims, then the four lanes of a token together.
    float s[QT * 2];
#pragma unroll
    for (int i = 0; i < QT * 2; i++) {
      s[i] = 0.0f;
    }
#if WITH_PAIRS
    if (PAIRS_K) {
      constexpr int WORDS = kv_slot_word<BITS_K == 3 ? 2 : BITS_K>(1, 0, 0);  // of a block, without high bits
      const device half* page_numbers = (const device half*)header;
      // A block at a time: registers.
#pragma unroll 1
      for (int j = 0; j < BK / 2; j++) {  // the other half of a pair is BK / 2 blocks further
        const int pair = 32 * j + 8 * t;
        const int other = j + BK / 2;
        uint radii[WORDS];
        uint angles[WORDS];
        uint high[2] = {0u, 0u};
        kv_load_some<WORDS_K, WORDS>(record, lane, kv_slot_word<BITS_K>(j, 0, 0), radii);
        kv_load_some<WORDS_K, WORDS>(record, lane, kv_slot_word<BITS_K>(other, 0, 0), angles);
        if (BITS_K == 3) {
          kv_load_some<WORDS_K, 1>(record, lane, kv_high_word(j), high);
          kv_load_some<WORDS_K, 1>(record, lane, kv_high_word(other), high + 1);
        }
        float steps[8];
        float biases[8];
        kv_load_numbers<8>(page_numbers + pair, steps);
        kv_load_numbers<8>(page_numbers + RK + pair, biases);
#pragma unroll
        for (int i = 0; i < 8; i++) {  // to the middle of a step
          biases[i] = metal::fma(0.5f - STEPS_K, steps[i], biases[i]);
          steps[i] *= STEPS_K;
        }
#pragma unroll
        for (int n = 0; n < 16; n++) {
          const int r = n % 2;
          const int i = n / 2;
          const int h = i / 4;
          const int p = i % 4;
          const int word = kv_slot_word<BITS_K>(0, r, p);
          const float code = kv_one_plus<BITS_K>(kv_code<BITS_K>(radii[word], high[0], j, r, p, h));
          const float radius = metal::fma(steps[i], code, biases[i]);
          const int angle = int(kv_code<BITS_K>(angles[word], high[1], other, r, p, h));
          const int at = 2 * ANGLES * pair + 2 * angle;
          const float first = radius * rotations[at + 2 * ANGLES * i];
          const float last = radius * rotations[at + 2 * ANGLES * i + 1];
#pragma unroll
          for (int q = 0; q < QT; q++) {
            s[2 * q + r] = metal::fma(q_tile[q * 32 * BK + pair + i], first, s[2 * q + r]);
            s[2 * q + r] = metal::fma(q_tile[q * 32 * BK + PAIRS + pair + i], last, s[2 * q + r]);
          }
        }
      }
    }
#endif
#if WITH_MIXED_BITS
#pragma unroll 1
    for (int b = 0; b < blocks_k; b++) {
      float k[8];
      kv_mixed_levels(record, kv_mixed_entry(headers, 0, b), lane, k);
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int q = 0; q < QT; q++) {
          const float query = q_tile[q * 32 * BK + 16 * b + 4 * t + i];
          s[2 * q] = metal::fma(query, k[i], s[2 * q]);
          s[2 * q + 1] = metal::fma(query, k[4 + i], s[2 * q + 1]);
        }
      }
    }
    const device half* scales_k = (const device half*)(record + side_words_k - 8);
#pragma unroll
    for (int i = 0; i < 2 * QT; i++) {
      s[i] *= float(scales_k[kv_key_number(g + 8 * (i % 2), 0, 0, 1, 1)]);
    }
#else
    const device half* numbers = (const device half*)(record + 32 * WORDS_K);
#if WITH_CHANNEL
    const device half* page_numbers = (const device half*)header +
        (CHANNEL_K ? token_of_page / GROUP_K * (SYMMETRIC_K ? 1 : 2) * 32 * BK : 0);
#endif
    // Two blocks at a time: all of them would not fit in registers.
#pragma unroll 1
    for (int c = 0; c < (PAIRS_K ? 0 : (BK + 1) / 2); c++) {
      uint words[PAIR_WORDS_K];
      constexpr bool TOGETHER = BITS_K < 8 || KV_ROOMY;
      if (TOGETHER) {
        kv_load_some<WORDS_K, PAIR_WORDS_K>(record, lane, c * PAIR_WORDS_K, words);
      }
#pragma unroll
      for (int b = 0; b < 2; b++) {
        const int j = 2 * c + b;
        if (j >= BK) {
          continue;
        }
        if (!TOGETHER) {
          constexpr int BLOCK_WORDS_K = PAIR_WORDS_K / 2;
          kv_load_some<WORDS_K, BLOCK_WORDS_K>(
              record, lane, j * BLOCK_WORDS_K, words + b * BLOCK_WORDS_K);
        }
        float k[16];
        float steps[8];  // of the lane's dims
        float biases[8];
#if WITH_CHANNEL
        const int dim = 32 * j + 8 * t;
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
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int token = g + 8 * r;
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
            const uint low = words[kv_slot_word<BITS_K>(b, r, 0)];
            const uint high = words[BITS_K == 3 ? kv_high_word(b) : 0];
            const int of = 2 * j + t / 2;
            const float radius =
                kv_number_at(numbers, kv_key_number(token, of, 0, GROUPS_K, 1), of < GROUPS_K);
            kv_tree_key(
                tree_k, radius, low >> (8 * r), high >> kv_high_bit(b, r, 0, 0), t, k + 8 * r);
          }
#endif
#pragma unroll
          for (int p = 0; p < (TREE_K ? 0 : 4); p++) {
            const uint word = words[kv_slot_word<BITS_K>(b, r, p)];
            const uint high = BITS_K == 3 ? words[kv_high_word(b)] : 0u;
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const int i = 4 * h + p;
              const float code = kv_one_plus<BITS_K>(kv_code<BITS_K>(word, high, b, r, p, h));
              if (!CODEBOOK_K && !RAW_K) {
                k[8 * r + i] = metal::fma(steps[i], code, biases[i] - steps[i]);
              }
#if WITH_CODEBOOK
              if (CODEBOOK_K) {
                k[8 * r + i] = steps[i] * kv_level<BITS_K>(code, levels_k);
              }
#endif
#if WITH_HALVES
              if (RAW_K) {
                k[8 * r + i] = kv_half_of(word, h);
              }
#endif
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
#pragma unroll
          for (int q = 0; q < QT; q++) {
            const float query = q_tile[q * 32 * BK + 32 * j + 8 * t + i];
            s[2 * q] = metal::fma(query, k[i], s[2 * q]);
            s[2 * q + 1] = metal::fma(query, k[8 + i], s[2 * q + 1]);
          }
        }
      }
    }
#endif
