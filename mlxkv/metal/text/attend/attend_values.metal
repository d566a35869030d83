// Third part of attend: probabilities, and their products with the values of the record.
    kv_probabilities<QT, OB * 4>(
        s, top, sum, o, last_seen, position0, 16, g, LAZY, as_type<float>(CAP));
    // Outputs: tokens 2 t + 8 r + h, dims 32 j + 4 g + p.
    float p_values[QT * 4];  // move from the lanes of the keys to those of the values
#pragma unroll
    for (int i = 0; i < QT * 4; i++) {
      p_values[i] = simd_shuffle(s[i / 4 * 2 + i % 4 / 2], ushort(8 * t + 4 * (i % 2)));
    }
#if WITH_MIXED_BITS
    const device half* scales_v = (const device half*)(record + record_words - 8);
#pragma unroll
    for (int i = 0; i < QT * 4; i++) {
      const int token = 2 * t + 8 * (i % 4 / 2) + i % 2;
      p_values[i] *= float(scales_v[kv_value_number(token, 0, 0, 1)]);
    }
#pragma unroll
    for (int b = 0; b < 2 * BV; b++) {
      if (b < blocks_v) {
        float v[8];
        kv_mixed_levels(record, kv_mixed_entry(headers, 1, b), lane, v);
#pragma unroll
        for (int q = 0; q < QT; q++) {
#pragma unroll
          for (int i = 0; i < 8; i++) {
            const int at = q * OB * 4 + 2 * b + i % 2;
            o[at] = metal::fma(p_values[4 * q + i / 2], v[i], o[at]);
          }
        }
      }
    }
#else
    const device uint* side = record + SIDE_K;
    const device half* numbers_v = (const device half*)(side + 32 * WORDS_V);
#if WITH_CHANNEL
    const device half* page_numbers_v = (const device half*)(header + HEADER_K) +
        (CHANNEL_V ? token_of_page / GROUP_V * (SYMMETRIC_V ? 1 : 2) * 32 * BV : 0);
#endif
    uint words_v[WORDS_V];
    if (BITS_V < 8) {
      kv_load_lane<WORDS_V>(side, lane, words_v);
    }
#pragma unroll
    for (int j = 0; j < BV; j++) {
      if (BITS_V == 8) {  // a block at a time: registers
        kv_load_some<WORDS_V, 4>(side, lane, 4 * j, words_v + (BITS_V == 8 ? 4 * j : 0));
      }
      float steps[4];  // of the lane's dims
      float biases[4];
      float scales[4];  // of the lane's tokens
      float lowest[4];
      if (!CHANNEL_V && !TREE_V && !RAW_V) {
        kv_load_numbers<4>(numbers_v + kv_value_number(2 * t, 32 * j / GROUP_V, 0, GROUPS_V), scales);
        if (!SYMMETRIC_V) {
          kv_load_numbers<4>(numbers_v + kv_value_number(2 * t, 32 * j / GROUP_V, 1, GROUPS_V), lowest);
        }
      }
#if WITH_HALVES
      uint raw[8];  // a block at a time: registers
      if (RAW_V) {
        kv_load_lane<8>(side + 256 * j, lane, raw);
      }
#endif
#if WITH_CHANNEL
      const int dim = 32 * j + 4 * g;
      if (CHANNEL_V) {
        kv_load_numbers<4>(page_numbers_v + dim, steps);
        if (!SYMMETRIC_V) {
          kv_load_numbers<4>(page_numbers_v + 32 * BV + dim, biases);
        }
#pragma unroll
        for (int p = 0; p < 4; p++) {
          steps[p] *= STEPS_V;
          biases[p] = SYMMETRIC_V ? -0.5f * steps[p] : biases[p];
        }
      }
#endif
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const int r = n / 2;
        const int h = n % 2;
        if (!CHANNEL_V && !TREE_V && !RAW_V) {
          const float step = STEPS_V * scales[n];
#pragma unroll
          for (int p = 0; p < 4; p++) {
            steps[p] = step;
            biases[p] = SYMMETRIC_V ? -0.5f * step : lowest[n];
          }
        }
#if WITH_TREE
        float of_tree[4];
        if (TREE_V) {
          const uint low = words_v[kv_slot_word<BITS_V>(j, r, 0)];
          const uint high =
              words_v[BITS_V == 3 ? kv_high_word(j) : 0] >> kv_high_bit(j, r, 0, h);
          const int of = 2 * j + g / 4;
          const float radius =
              kv_number_at(numbers_v, kv_value_number(2 * t + 8 * r + h, of, 0, GROUPS_V), of < GROUPS_V);
          const uint other = simd_shuffle_xor(high, ushort(4));  // g and its neighbour
          kv_tree_value(tree_v, radius, low >> (8 * r + 16 * h), high, other, g, of_tree);
        }
#endif
#pragma unroll
        for (int p = 0; p < 4; p++) {
#if WITH_HALVES
          const uint word =
              RAW_V ? raw[4 * r + p] : words_v[RAW_V ? 0 : kv_slot_word<BITS_V>(j, r, p)];
#else
          const uint word = words_v[kv_slot_word<BITS_V>(j, r, p)];
#endif
          const uint high = BITS_V == 3 ? words_v[kv_high_word(j)] : 0u;
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
#pragma unroll
          for (int q = 0; q < QT; q++) {
            const int i = q * OB * 4 + 4 * j + p;
            o[i] = metal::fma(p_values[4 * q + n], value, o[i]);
          }
        }
      }
    }
#endif
  }
