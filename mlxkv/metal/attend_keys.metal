// Second part of attend: scores of the 16 tokens of a record, or of a window.
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
          const float a = q_tile[q * 32 * BQ + pair + i];
          const float b = q_tile[q * 32 * BQ + PAIRS + pair + i];
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
      float signs[16];
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
        float length = 0.0f;
        if (SIGNS_K) {
          length = float(numbers[kv_key_number(token, 0, 1, 1, 0)]);
        }
        if (!CHANNEL_K && !TREE_K && !RAW_K) {
          const float step = STEPS_K * float(numbers[kv_key_number(token, group_of, 0, GROUPS_K, SYMMETRIC_K)]);
          const float bias = SYMMETRIC_K
              ? -0.5f * step
              : float(numbers[kv_key_number(token, group_of, 1, GROUPS_K, SYMMETRIC_K)]);
          for (int i = 0; i < 8; i++) {
            steps[i] = step;
            biases[i] = bias;
          }
        }
        if (TREE_K) {
          const uint low = record[kv_word_at(kv_slot_word<BITS_K>(j, r, 0), lane, WORDS_K)];
          const uint high = record[kv_word_at(kv_high_word(j), lane, WORDS_K)];
          const int of = 2 * j + t / 2;
          const float radius =
              kv_number_at(numbers, kv_key_number(token, of, 0, GROUPS_K, 1), of < GROUPS_K);
          kv_tree_key(
              tree_k, radius, low >> (8 * r), high >> kv_high_bit(j, r, 0, 0), t, k + 8 * r);
        }
        for (int p = 0; p < (TREE_K ? 0 : 4); p++) {
          const uint word = record[kv_word_at(kv_slot_word<BITS_K>(j, r, p), lane, WORDS_K)];
          const uint high = BITS_K == 3 ? record[kv_word_at(kv_high_word(j), lane, WORDS_K)] : 0u;
          for (int h = 0; h < 2; h++) {
            const int i = 4 * h + p;
            const uint whole = kv_code<BITS_K>(word, high, j, r, p, h);
            const float code = kv_one_plus<LEVEL_BITS_K>(whole & ((1u << LEVEL_BITS_K) - 1u));
            signs[8 * r + i] = whole >> LEVEL_BITS_K ? length : -length;
            k[8 * r + i] = RAW_K ? kv_half_of(word, h)
                : CODEBOOK_K
                ? steps[i] * kv_level<LEVEL_BITS_K>(code, levels_k)
                : metal::fma(steps[i], code, biases[i] - steps[i]);
            if (OUTER_K && !CHANNEL_K) {
              k[8 * r + i] *= outer[i];
            }
          }
        }
      }
      for (int q = 0; q < QT; q++) {
        for (int i = 0; i < 8; i++) {
          const float query = q_tile[q * 32 * BQ + 32 * j + 8 * t + i];
          s[2 * q] = metal::fma(query, k[i], s[2 * q]);
          s[2 * q + 1] = metal::fma(query, k[8 + i], s[2 * q + 1]);
          if (SIGNS_K) {
            const float seen = q_tile[q * 32 * BQ + 32 * (BK + j) + 8 * t + i];
            s[2 * q] = metal::fma(seen, signs[i], s[2 * q]);
            s[2 * q + 1] = metal::fma(seen, signs[8 + i], s[2 * q + 1]);
          }
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
