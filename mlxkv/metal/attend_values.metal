// Third part of attend: scores to probabilities, and what they make of the values.
  bool exceeds = false;
#pragma unroll
  for (int q = 0; q < QT; q++) {
#pragma unroll
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
#pragma unroll
    for (int q = 0; q < QT; q++) {
      float peak = metal::max(s[2 * q], s[2 * q + 1]);
      peak = metal::max(peak, simd_shuffle_xor(peak, ushort(4)));
      peak = metal::max(peak, simd_shuffle_xor(peak, ushort(8)));
      peak = metal::max(peak, simd_shuffle_xor(peak, ushort(16)));
      peak = metal::max(peak, top[q]);
      const float shrink = metal::fast::exp2(top[q] - peak);
      top[q] = peak;
      sum[q] *= shrink;
#pragma unroll
      for (int i = 0; i < OB * 4; i++) {
        o[q * OB * 4 + i] *= shrink;
      }
    }
  }
  // Probabilities move from the lanes of the keys to those of the values.
  float p_values[QT * 4];
#pragma unroll
  for (int q = 0; q < QT; q++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float probability = metal::fast::exp2(s[2 * q + r] - top[q]);
      sum[q] += probability;
      p_values[4 * q + 2 * r] = simd_shuffle(probability, ushort(8 * t));
      p_values[4 * q + 2 * r + 1] = simd_shuffle(probability, ushort(8 * t + 4));
    }
  }
  // Outputs: tokens 2 t + 8 r + h, dims 32 j + 4 g + p.
  if (paged) {
    const device uint* side = record + SIDE_K;
    const device half* numbers = (const device half*)(side + 32 * WORDS_V);
#if WITH_CHANNEL || WITH_OUTER
    const device half* page_numbers = (const device half*)(header + HEADER_K) +
        (CHANNEL_V ? token_of_page / GROUP_V * (SYMMETRIC_V ? 1 : 2) * 32 * BV : 0);
#endif
    uint words[WORDS_V];
    if (!RAW_V) {
      kv_load_lane<WORDS_V>(side, lane, words);
    }
#pragma unroll
    for (int j = 0; j < BV; j++) {
      float steps[4];  // of the lane's dims
      float biases[4];
#if WITH_HALVES
      uint raw[8];
      if (RAW_V) {
        kv_load_lane<8>(side + 256 * j, lane, raw);
      }
#endif
#if WITH_CHANNEL || WITH_OUTER
      float outer[4];
      const int dim = 32 * j + 4 * g;
      if (CHANNEL_V) {
        kv_load_numbers<4>(page_numbers + dim, steps);
        if (!SYMMETRIC_V) {
          kv_load_numbers<4>(page_numbers + 32 * BV + dim, biases);
        }
#pragma unroll
        for (int p = 0; p < 4; p++) {
          steps[p] *= STEPS_V;
          biases[p] = SYMMETRIC_V ? -0.5f * steps[p] : biases[p];
        }
      } else if (OUTER_V) {
        kv_load_numbers<4>(page_numbers + dim, outer);
      }
#endif
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const int r = n / 2;
        const int h = n % 2;
        const int token = 2 * t + 8 * r + h;
        if (!CHANNEL_V && !TREE_V && !RAW_V) {
          const int group_of = 32 * j / GROUP_V;
          const float step =
              STEPS_V * float(numbers[kv_value_number(token, group_of, 0, GROUPS_V)]);
          const float bias = SYMMETRIC_V
              ? -0.5f * step
              : float(numbers[kv_value_number(token, group_of, 1, GROUPS_V)]);
#pragma unroll
          for (int p = 0; p < 4; p++) {
            steps[p] = step;
            biases[p] = bias;
          }
        }
#if WITH_OUTER
        if (OUTER_V && CHANNEL_V) {
#pragma unroll
          for (int p = 0; p < 4; p++) {
            outer[p] = float(numbers[kv_value_number(token, 0, 0, 1)]);
          }
        }
#endif
#if WITH_TREE
        float of_tree[4];
        if (TREE_V) {
          const uint low = words[kv_slot_word<BITS_V>(j, r, 0)];
          const uint high =
              words[BITS_V == 3 ? kv_high_word(j) : 0] >> kv_high_bit(j, r, 0, h);
          const int of = 2 * j + g / 4;
          const float radius =
              kv_number_at(numbers, kv_value_number(token, of, 0, GROUPS_V), of < GROUPS_V);
          const uint other = simd_shuffle_xor(high, ushort(4));  // g and its neighbour
          kv_tree_value(tree_v, radius, low >> (8 * r + 16 * h), high, other, g, of_tree);
        }
#endif
#pragma unroll
        for (int p = 0; p < 4; p++) {
#if WITH_HALVES
          const uint word =
              RAW_V ? raw[4 * r + p] : words[RAW_V ? 0 : kv_slot_word<BITS_V>(j, r, p)];
#else
          const uint word = words[kv_slot_word<BITS_V>(j, r, p)];
#endif
          const uint high = BITS_V == 3 ? words[kv_high_word(j)] : 0u;
          const float code = kv_one_plus<BITS_V>(kv_code<BITS_V>(word, high, j, r, p, h));
          float value = 0.0f;
          if (!CODEBOOK_V && !RAW_V && !TREE_V) {
            value = metal::fma(steps[p], code, biases[p] - steps[p]);
          }
#if WITH_CODEBOOK
          if (CODEBOOK_V) {
            value = steps[p] * kv_level<BITS_V>(code, levels_v);
          }
#endif
#if WITH_HALVES
          if (RAW_V) {
            value = kv_half_of(word, h);
          }
#endif
#if WITH_TREE
          if (TREE_V) {
            value = of_tree[p];
          }
#endif
#if WITH_OUTER
          if (OUTER_V) {
            value *= outer[p];
          }
#endif
#pragma unroll
          for (int q = 0; q < QT; q++) {
            const int i = q * OB * 4 + 4 * j + p;
            o[i] = metal::fma(p_values[4 * q + n], value, o[i]);
          }
        }
      }
    }
  } else {
    const device T* from = (in_sink ? sink_v : live_v) + at_window;
#pragma unroll
    for (int j = 0; j < BD; j++) {
      const int dim = 32 * j + 4 * g;
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const int token = 2 * t + 8 * (n / 2) + n % 2;
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (token < tokens && dim < D) {
          const device T* row = from + token * D + dim;
          if (D % 4 == 0) {
            kv_load<4>(row, v);
          } else {
#pragma unroll
            for (int p = 0; p < 4; p++) {
              v[p] = dim + p < D ? float(row[dim + p < D ? p : 0]) : 0.0f;
            }
          }
        }
#pragma unroll
        for (int p = 0; p < 4; p++) {
#pragma unroll
          for (int q = 0; q < QT; q++) {
            const int i = q * OB * 4 + 4 * j + p;
            o[i] = metal::fma(p_values[4 * q + n], v[p], o[i]);
          }
        }
      }
    }
  }
}
