// Third part of attend: scores to probabilities, and what they make of the values.
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
          if (!CHANNEL_V && !TREE_V && !RAW_V) {
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
          float of_tree[4];
          if (TREE_V) {
            const uint low = side[kv_word_at(kv_slot_word<BITS_V>(j, r, 0), lane, WORDS_V)];
            const uint high =
                side[kv_word_at(kv_high_word(j), lane, WORDS_V)] >> kv_high_bit(j, r, 0, h);
            const int of = 2 * j + g / 4;
            const float radius =
                kv_number_at(numbers, kv_value_number(token, of, 0, GROUPS_V), of < GROUPS_V);
            const uint other = simd_shuffle_xor(high, ushort(4));  // g and its neighbour
            kv_tree_value(tree_v, radius, low >> (8 * r + 16 * h), high, other, g, of_tree);
          }
          for (int p = 0; p < 4; p++) {
            const uint word = side[kv_word_at(kv_slot_word<BITS_V>(j, r, p), lane, WORDS_V)];
            const uint high = BITS_V == 3 ? side[kv_word_at(kv_high_word(j), lane, WORDS_V)] : 0u;
            const float code = kv_one_plus<BITS_V>(kv_code<BITS_V>(word, high, j, r, p, h));
            float value = CODEBOOK_V ? steps[p] * kv_level<BITS_V>(code, levels_v)
                                     : metal::fma(steps[p], code, biases[p] - steps[p]);
            if (TREE_V || RAW_V) {
              value = RAW_V ? kv_half_of(word, h) : of_tree[p];
            }
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
