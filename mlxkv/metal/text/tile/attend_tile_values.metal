// Third part of attend_tile: probabilities of the records' tokens, and their products with the values.
    TileB p[PAIR];
#if WITH_MIXED_BITS
    // The words of the values travel while probabilities are computed.
    uint values[EARLY > 0 ? PAIR * EARLY : 1];
#pragma unroll
    for (int n = 0; n < EARLY; n++) {
      const int row = int(mixed_rows[2 * BK + n]);
#pragma unroll
      for (int e = 0; e < PAIR; e++) {
        values[PAIR * n + e] = kv_read1(lanes[e], row);
      }
    }
#endif
    kv_probabilities<2 * OB + EXTRA, PAIR>(s, p, top, sum, o, FOLDED ? 1.0f : KV_SCORE);
#if WITH_MIXED_BITS
    TileB scaled[PAIR];
#pragma unroll
    for (int e = 0; e < PAIR; e++) {
      TileA middle;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const uint scale =
            kv_read1(record[e], record_words - 8 + tile_b_row(lane, 0) / 2 * 2 + r);
        scaled[e].w[r] = kv_multiply_halves(p[e].w[r], tile_b_numbers(scale, lane));
        middle.w[2 * r] = middle.w[2 * r + 1] = kv_halves(0.5f, 0.5f);
      }
      tile_multiply(o[2 * OB], middle, scaled[e]);
    }
#pragma unroll
    for (int n = 0; n < 2 * BV; n++) {
      if (n == 0 || n < blocks_v) {
        const uint4 entry = mixed_v[3 * n];
        uint pairs[PAIR * 4];
        uint own[PAIR];
#pragma unroll
        for (int e = 0; e < PAIR; e++) {
          own[e] = EARLY > 0 && n < EARLY ? values[n < EARLY ? PAIR * n + e : 0]
                             : kv_read1(lanes[e], int(mixed_rows[2 * BK + n]));
        }
        if (int(entry.y) < 0) {
          const uint4 rest = mixed_v[3 * n + 1];
          kv_mixed_special<PAIR>(
              lanes, mixed_rows[2 * BK + n], own, entry, rest, mixed_lane, pairs);
        } else {
#pragma unroll
          for (int e = 0; e < PAIR; e++) {
            kv_mixed_pairs<0x64006400u>(own[e], entry, pairs + 4 * e);
          }
        }
#pragma unroll
        for (int e = 0; e < PAIR; e++) {
          TileA a;
#pragma unroll
          for (int m = 0; m < 4; m++) {
            a.w[m] = kv_add_halves(
                pairs[4 * e + m], m % 2 ? mixed_v[3 * n + 1].y : mixed_v[3 * n + 1].x);
          }
          tile_multiply(o[n], a, scaled[e]);
        }
      }
    }
#else
#pragma unroll
    for (int e = 0; e < PAIR; e++) {
      uint words[WORDS_V];
      uint scales[2 * GROUPS_V];
      const KvRecord values = kv_record_after(record[e], v_lane);
      if (!RAW_V && !SOME_V) {
        kv_read_words<WORDS_V, 32>(words, values, 0);
      }
      const KvRecord numbers = kv_record_after(record[e], v_scales_at);
      if (!TREE_V && !RAW_V && !SOME_V) {
        kv_read_words<2 * GROUPS_V, 1>(scales, numbers, 0);
      }
      if (!SYMMETRIC_V) {
        TileA middle;
        middle.w[0] = middle.w[2] = 0u;
        if (g < GROUPS_V) {
          const uint2 bias = kv_read2(record[e], v_bias_at);
          const uint2 scale = kv_read2(record[e], v_scale_at);
          const uint code = kv_halves(kv_middle<BITS_V>(), kv_middle<BITS_V>());
          middle.w[0] = kv_add_multiplied_halves(bias.x, code, scale.x);
          middle.w[2] = kv_add_multiplied_halves(bias.y, code, scale.y);
        }
        middle.w[1] = middle.w[0];  // these rows are not read
        middle.w[3] = middle.w[2];
        tile_multiply(o[2 * OB], middle, p[e]);
      }
#if WITH_TREE
      if (TREE_V == 2) {
        const int at = both ? unit + e : unit;
        const device uint* header = page_headers + (at / PAGE_RECORDS * HEADER + HEADER_K);
        tree = kv_tree<2, 1>(books_v, (const device half*)header, lane);
        tree_v = kv_half_tree(tree);
      }
      const KvRecord radii_v = kv_record_after(
          record[e], SIDE_K + 32 * WORDS_V + kv_value_number(2 * t, g / 4, 0, GROUPS_V) / 2);
#pragma unroll
      for (int j = 0; j < (TREE_V ? BV : 0); j++) {
        uint run[8];
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int of = 2 * j + g / 4;
          const uint radii = of < GROUPS_V ? kv_read1(radii_v, 4 * j + r) : 0u;
          const uint low = words[kv_slot_word<BITS_V>(j, r, 0)] >> (8 * r);
          const uint high = words[BITS_V == 3 ? kv_high_word(j) : 0] >> kv_high_bit(j, r, 0, 0);
          const uint other = simd_shuffle(high, ushort(tile_lane(g ^ 1, 2 * t)));
          kv_tree_value_pairs(tree_v, radii, low, high, other, g, run + 4 * r);
        }
#pragma unroll
        for (int u = 0; u < 2; u++) {
          TileA a;
#pragma unroll
          for (int m = 0; m < 4; m++) {
            a.w[m] = run[4 * (m / 2) + 2 * u + m % 2];
          }
          tile_multiply(o[2 * j + u], a, p[e]);
        }
      }
#endif
#if WITH_HALVES
#pragma unroll
      for (int j = 0; j < (RAW_V ? BV : 0); j++) {
        kv_read_words<8, 32>(words, values, 256 * j);
#pragma unroll
        for (int u = 0; u < 2; u++) {
          TileA a;
#pragma unroll
          for (int m = 0; m < 4; m++) {
            a.w[m] = words[kv_slot_word<16>(0, m / 2, 2 * u + m % 2)];
          }
          tile_multiply(o[2 * j + u], a, p[e]);
        }
      }
#endif
#pragma unroll
      for (int n = 0; n < (TREE_V || RAW_V ? 0 : GROUPS_V); n++) {
        if (SOME_V) {
          kv_read_words<2, 1>(scales + 2 * n, numbers, 2 * n);
        }
        TileB scaled;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          scaled.w[r] = kv_multiply_halves(p[e].w[r], tile_b_numbers(scales[2 * n + r], lane));
        }
#pragma unroll
        for (int j = n * GROUP_V / 32; j < BV && 32 * j / GROUP_V == n; j++) {
          kv_read_some<BV, WORDS_V, SOME_V>(words, values, j);
#pragma unroll
          for (int u = 0; u < 2; u++) {
            TileA a;
#pragma unroll
            for (int m = 0; m < 4; m++) {
              const int r = m / 2;
              const int slot = 2 * u + m % 2;
              const uint word = words[kv_slot_word<BITS_V>(j, r, slot)];
              const uint high = words[BITS_V == 3 ? kv_high_word(j) : 0];
              a.w[m] = kv_centred_pair<BITS_V>(word, high, masks_v, j, r, slot);
#if WITH_CODEBOOK
              if (CODEBOOK_V) {
                a.w[m] = kv_level_pair<BITS_V, BITS_V>(word, high, masks_v, levels_v, j, r, slot);
              }
#endif
            }
            tile_multiply(o[2 * j + u], a, scaled);
          }
        }
      }
    }
#endif
    unit += PAIR;
    second = PAIR == 1 && !second && both;
    if (!second) {
      kv_pipe_release<RECORD, STAGES, S, STEP>(pipe, lane);
      unit += STEP - 2 + (PAIR == 1 && !both ? 1 : 0);
    }
  }
#if WITH_MIXED_BITS
#pragma unroll
  for (int n = 0; n < 2 * BV; n++) {
    if (n < blocks_v) {
      const float weight = as_type<float>(mixed_v[3 * n + 2].y);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        o[n].v[i] += o[2 * OB].v[i];
        o[n].v[2 + i] = metal::fma(o[n].v[2 + i], weight, o[2 * OB].v[i]);
      }
    }
  }
#endif
  if (!SYMMETRIC_V) {
#pragma unroll
    for (int n = 0; n < GROUPS_V; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float middle = simd_shuffle(o[2 * OB].v[i], ushort(tile_lane(n, 2 * t)));
#pragma unroll
        for (int j = n * GROUP_V / 32; j < BV && 32 * j / GROUP_V == n; j++) {
#pragma unroll
          for (int u = 0; u < 2; u++) {
            o[2 * j + u].v[i] += middle;
            o[2 * j + u].v[2 + i] += middle;
          }
        }
      }
    }
  }
