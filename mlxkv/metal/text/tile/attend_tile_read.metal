// Second part of attend_tile: this threadgroup's records, or its windows: scores of two records.
if (paged) {
  uint masks_k[4];
  uint masks_v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    masks_k[i] = POOLED ? kv_mask<BITS_K>(i) : uint(size[11 + i]);
    masks_v[i] = POOLED ? kv_mask<BITS_V>(i) : uint(size[15 + i]);
  }
#if WITH_PER_TOKEN
  if (OFFSETS_K) {
    // Sums over the dims of a group: of queries (row 1), for the biases of keys, and of queries times offset
    // (row 0), for the scales, to subtract the offsets.
#pragma unroll
    for (int n = 0; n < GROUPS_K; n++) {
      TileC sums;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sums.v[i] = 0.0f;
      }
#pragma unroll
      for (int j = n * GROUP_K / 32; j < BK && 32 * j / GROUP_K == n; j++) {
#pragma unroll
        for (int u = 0; u < 2; u++) {
          TileA a;
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const float offset = kv_offset<BITS_K>(2 * u + r) + MIDDLE_K;
            const float value = g == 0 ? -offset : (g == 1 ? 1.0f : 0.0f);
            a.w[2 * r] = kv_halves(value, value);
            a.w[2 * r + 1] = 0u;
          }
          tile_multiply(sums, a, kv_query<POOLED>(q_tile, queries, 2 * j + u, lane));
        }
      }
      if (group == 0 && g < (SYMMETRIC_K ? 1 : 2)) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          q_sums[(n + g * GROUPS_K) * 8 + 2 * t + i] = sums.v[i];
        }
      }
    }
  }
#endif
#if WITH_MIXED_BITS
  // What codes have too much, times the queries: the leading one and the middle.
  TileC start_k;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    start_k.v[i] = 0.0f;
  }
#pragma unroll
  for (int n = 0; n < 2 * BK; n++) {
    if (n < blocks_k) {
      const float middle_of = as_type<float>(mixed_k[3 * n + 2].z);
      const float higher = middle_of / as_type<float>(mixed_k[3 * n + 2].y);
      TileA a;
      TileA middle;
#pragma unroll
      for (int m = 0; m < 4; m++) {
        a.w[m] = kv_halves(-1024.0f, -1024.0f);
        middle.w[m] = m / 2 ? kv_halves(-higher, -higher) : kv_halves(-middle_of, -middle_of);
      }
      const TileB q = kv_query<POOLED>(q_tile, queries, n, lane);
      tile_multiply(start_k, a, q);
      tile_multiply(start_k, middle, q);
    }
  }
#endif
  threadgroup_barrier(mem_flags::mem_threadgroup);
#if WITH_PER_TOKEN
  constexpr float SLOT = 64.0f;  // sums of 1024 times queries have to fit into halves
  TileB q_slots[SLOT_TILES];  // rows 0..7: slots, rows 8..15: their rounding errors in halves
#pragma unroll
  for (int m = 0; m < SLOT_TILES; m++) {
    float rest[2];
    float whole[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int slot = 8 * m + tile_b_row(lane, i);
      const float value =
          OFFSETS_K && slot < SLOTS_K ? q_sums[slot * 8 + tile_b_column(lane, i)] * (1.0f / SLOT) : 0.0f;
      whole[i] = float(half(value));
      rest[i] = value - whole[i];
    }
    q_slots[m].w[0] = kv_halves(whole[0], whole[1]);
    q_slots[m].w[1] = kv_halves(rest[0], rest[1]);
  }
#endif

  TileC zero;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    zero.v[i] = 0.0f;
  }
#if WITH_CODEBOOK
  uint levels_k[5];
  uint levels_v[5];
#pragma unroll
  for (int i = 0; i < 5; i++) {
    levels_k[i] = uint(LEVELS_K[i]);
    levels_v[i] = uint(LEVELS_V[i]);
  }
#endif
  const int k_lane = kv_vector(WORDS_K) * (4 * g + t);
  const int v_lane = SIDE_K + kv_vector(WORDS_V) * (4 * g + t);
  const int v_scales_at = SIDE_K + 32 * WORDS_V + tile_b_row(lane, 0) / 2 * 2 * GROUPS_V;
  const int v_scale_at = SIDE_K + 32 * WORDS_V + 2 * (t * GROUPS_V + g);
  const int v_bias_at = SIDE_K + 32 * WORDS_V + 8 * GROUPS_V + 8 * g + 2 * t;
#if WITH_TREE
  int books_k[TREE_K == 1 ? 28 : 1];
#pragma unroll
  for (int i = 0; i < (TREE_K == 1 ? 28 : 1); i++) {
    books_k[i] = BOOKS_K[i];
  }
  int books_v[TREE_V == 1 ? 28 : 1];
#pragma unroll
  for (int i = 0; i < (TREE_V == 1 ? 28 : 1); i++) {
    books_v[i] = BOOKS_V[i];
  }
  KvTree tree = kv_tree<1, TREE_K == 1 ? 28 : 1>(books_k, (const device half*)headers, lane);
  KvHalfTree tree_k = kv_half_tree(tree);
  tree = kv_tree<1, TREE_V == 1 ? 28 : 1>(books_v, (const device half*)headers, lane);
  KvHalfTree tree_v = kv_half_tree(tree);
#endif
  const device uint* page_numbers = later ? headers_2 : headers;
  const device uint* page_headers = page_numbers + size_t(first_record / PAGE_RECORDS * HEADER);
  // Where instructions are the limit, two records side by side hide each other's latency.
  // Not where both would not fit in registers, or their code in a cache.
#if WITH_MIXED_BITS
  constexpr bool LARGE = !KV_ROOMY;
#else
  constexpr bool LARGE = PAIRS_K || CODEBOOK_K;
#endif
  constexpr int PAIR = !POOLED && !LARGE && BITS_K + BITS_V < 7 && !(FOLDED && GROUP_K % 32) ? 2 : 1;
  // Where registers are few, words are read as blocks need them, if both blocks of a pair begin a load.
  constexpr int SOME_K = POOLED && !TREE_K && !(PAIRS_K && BK % 4) && !RAW_K;
  constexpr int SOME_V = POOLED && !TREE_V && !RAW_V;
#if WITH_CHANNEL
  // Those that registers do not hold lie behind the unscaled ones, the simdgroup's own.
  constexpr int ROOM = (POOL + 8 * ROW - 1024) / (128 * S);
  constexpr int KEPT = POOLED ? (BK > ROOM ? BK - ROOM : 1) : BK;  // blocks
  TileB folded[2 * KEPT];
  constexpr int ALL_K = POOLED ? 1 : BK;
  const int other = 32 * (8 + group * (BK - KEPT) - KEPT);
  float start[2] = {0.0f, 0.0f};  // biases times queries, without the offsets of the codes
  int fold = unit;  // where scales change
#endif
  bool second = false;
  while (unit < stop) {
    // Or a compiler would move what it reads of the pool in front of the loop, into registers, and the addresses.
    const int mine = POOLED && unit < 0 ? 0 : lane;
    if (POOLED) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    const bool both = unit + 1 < stop;
    KvRecord record[PAIR];
    record[0] = kv_pipe_wait<RECORD, STAGES, S, STEP>(pipe, second);
    if (PAIR == 2) {
      record[PAIR - 1] = kv_record_after(record[0], both ? record_words : 0);  // or the last again
    }
#if WITH_CHANNEL
    if (FOLDED && unit >= fold) {
      constexpr int RECORDS = GROUP_K / 16;
      constexpr int NAMES = SYMMETRIC_K ? 1 : 2;
      fold = int((uint(unit) / RECORDS + 1) * RECORDS);
      const uint place = first_record + unit;
      const uint numbers =
          place / PAGE_RECORDS * HEADER + place / RECORDS % (PAGE / GROUP_K) * (NAMES * 16 * BK);
      TileC sums = zero;
#pragma unroll ALL_K
      for (int j = 0; j < BK; j++) {
        TileB two[2];
        kv_fold<BITS_K, SYMMETRIC_K>(
            page_numbers, numbers + 16 * j, 16 * BK, queries, j, two, sums, mine);
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
          for (int i = 0; i < KEPT; i++) {
            folded[2 * i + n / 2].w[n % 2] = i == j ? two[n / 2].w[n % 2] : folded[2 * i + n / 2].w[n % 2];
          }
          if (KEPT < BK) {  // those that are kept lie where the next one will
            pool[4 * (other + mine + 32 * metal::max(j, KEPT)) + n] = as_type<float>(two[n / 2].w[n % 2]);
          }
        }
      }
      start[0] = sums.v[0];
      start[1] = sums.v[1];
    }
#endif
    TileC s[PAIR];
#if WITH_MIXED_BITS
    const int mixed_lane = 4 * g + t;
    // Blocks whose words are read before the first is used: as many as registers hold (tiles.py).
    constexpr int EARLY = 2 * BK < SOON ? 2 * BK : SOON;
    KvRecord lanes[PAIR];
#pragma unroll
    for (int e = 0; e < PAIR; e++) {
      lanes[e] = kv_record_after(record[e], mixed_lane);
    }
    uint keys[EARLY > 0 ? PAIR * EARLY : 1];
#pragma unroll
    for (int n = 0; n < EARLY; n++) {  // blocks that there are not have row 0
      const int row = int(mixed_rows[n]);
#pragma unroll
      for (int e = 0; e < PAIR; e++) {
        keys[PAIR * n + e] = kv_read1(lanes[e], row);
      }
    }
#pragma unroll
    for (int e = 0; e < PAIR; e++) {
      s[e] = start_k;
    }
    constexpr int AT_ONCE_K = POOLED ? 2 : 2 * BK;  // instructions have to fit in a cache
#pragma unroll AT_ONCE_K
    for (int n = 0; n < 2 * BK; n++) {
      if (n == 0 || n < blocks_k) {
        const uint4 entry = mixed_k[3 * n];
        uint pairs[PAIR * 4];
        uint own[PAIR];
#pragma unroll
        for (int e = 0; e < PAIR; e++) {
          own[e] = EARLY > 0 && n < EARLY ? keys[n < EARLY ? PAIR * n + e : 0]
                             : kv_read1(lanes[e], int(mixed_rows[n]));
        }
        if (int(entry.y) < 0) {
          const uint4 rest = mixed_k[3 * n + 1];
          kv_mixed_special<PAIR>(lanes, mixed_rows[n], own, entry, rest, mixed_lane, pairs);
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
            a.w[m] = pairs[4 * e + 2 * (m % 2) + m / 2];
          }
          s[e] = tile_product(s[e], a, kv_query<POOLED>(q_tile, queries, n, mine));
        }
      }
    }
#endif
#pragma unroll
    for (int e = 0; e < PAIR; e++) {
#if WITH_MIXED_BITS
      const uint scales = kv_read1(record[e], side_words_k - 8 + g);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        s[e].v[i] *= kv_half(scales, i / 2);
      }
#else
      uint words[WORDS_K];
      uint scales[HELD_K];
      const KvRecord keys = kv_record_after(record[e], k_lane);
      if (!RAW_K && !SOME_K) {
        kv_read_words<WORDS_K, 32>(words, keys, 0);
      }
      if (!TREE_K && !RAW_K) {
        kv_read_words<SLOTS_K, 1>(scales, kv_record_after(record[e], g * SLOTS_K), 32 * WORDS_K);
      }
      const int at = both ? unit + e : unit;  // position of the record
      const device uint* header = page_headers + size_t(at / PAGE_RECORDS) * HEADER;
      s[e] = zero;
#if WITH_PER_TOKEN
      if (OFFSETS_K) {
#pragma unroll
        for (int m = 0; m < SLOT_TILES; m++) {
          s[e] = tile_product(
              m == 0 ? zero : s[e], kv_read_slots<SLOTS_K>(record[e], 32 * WORDS_K, m, g, t),
              q_slots[m]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          s[e].v[i] *= SLOT;
        }
      }
#endif
#if WITH_TREE
      if (TREE_K == 2) {
        tree = kv_tree<2, 1>(books_k, (const device half*)header, lane);
        tree_k = kv_half_tree(tree);
      }
#pragma unroll
      for (int j = 0; j < (TREE_K ? BK : 0); j++) {
        uint run[8];
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int of = 2 * j + t / 2;
          const int number = kv_key_number(g + 8 * r, t / 2, 0, GROUPS_K, 1);
          const KvRecord radii = kv_record_after(record[e], number / 2);
          const uint radius = of < GROUPS_K ? kv_read1(radii, 32 * WORDS_K + j) : 0u;
          const uint low = words[kv_slot_word<BITS_K>(j, r, 0)] >> (8 * r);
          const uint high = words[BITS_K == 3 ? kv_high_word(j) : 0] >> kv_high_bit(j, r, 0, 0);
          kv_tree_key_pairs(tree_k, kv_twice(radius, number % 2), low, high, t, run + 4 * r);
        }
#pragma unroll
        for (int u = 0; u < 2; u++) {
          TileA a;
#pragma unroll
          for (int m = 0; m < 4; m++) {
            a.w[m] = run[4 * (m % 2) + 2 * u + m / 2];
          }
          tile_multiply(s[e], a, kv_query<POOLED>(q_tile, queries, 2 * j + u, mine));
        }
      }
#endif
#if WITH_PAIRS
      if (PAIRS_K) {
        const device uint4* numbers = (const device uint4*)header + t;
#pragma unroll
        for (int j = 0; j < BK / 2; j++) {  // the other half of a pair is BK / 2 blocks further
          kv_read_some<BK, WORDS_K, SOME_K>(words, keys, j);
          kv_read_some<BK, WORDS_K, SOME_K>(words, keys, j + BK / 2);
          uint4 of[4];
#pragma unroll
          for (int n = 0; n < 4; n++) {
            of[n] = numbers[BK * 2 * n + 4 * j];
          }
#pragma unroll
          for (int u = 0; u < 2; u++) {
            TileA a;
            TileA b;
#pragma unroll
            for (int m = 0; m < 4; m++) {
              kv_polar_pair<BITS_K>(
                  words, words, of, j, j + BK / 2, m % 2, 2 * u + m / 2, a.w[m], b.w[m]);
            }
            tile_multiply(s[e], a, kv_query<POOLED>(q_tile, queries, 2 * j + u, mine));
            tile_multiply(
                s[e], b, kv_query<POOLED>(q_tile, queries, 2 * (j + BK / 2) + u, mine));
          }
        }
      }
#endif
#if WITH_CHANNEL
      if (FOLDED) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          s[e].v[i] = start[i % 2];
        }
#pragma unroll
        for (int j = 0; j < BK; j++) {
          kv_read_some<BK, WORDS_K, SOME_K>(words, keys, j);
#pragma unroll
          for (int u = 0; u < 2; u++) {
            TileA a;
#pragma unroll
            for (int m = 0; m < 4; m++) {
              a.w[m] = kv_pair<BITS_K>(
                  words[kv_slot_word<BITS_K>(j, m % 2, 2 * u + m / 2)],
                  words[BITS_K == 3 ? kv_high_word(j) : 0], masks_k, j, m % 2, 2 * u + m / 2);
            }
            TileB q = folded[j < KEPT ? 2 * j + u : 0];
            if (j >= KEPT) {
              q = kv_query<1>(folded, queries, 2 * j + u, mine + other);
            }
            tile_multiply(s[e], a, q);
          }
        }
      }
#endif
#if WITH_HALVES
#pragma unroll
      for (int j = 0; j < (RAW_K ? BK : 0); j++) {  // a block at a time: registers
        kv_read_words<8, 32>(words, keys, 256 * j);
#pragma unroll
        for (int u = 0; u < 2; u++) {
          TileA a;
#pragma unroll
          for (int m = 0; m < 4; m++) {
            a.w[m] = words[kv_slot_word<16>(0, m % 2, 2 * u + m / 2)];
          }
          tile_multiply(s[e], a, kv_query<POOLED>(q_tile, queries, 2 * j + u, mine));
        }
      }
#endif
#if WITH_PER_TOKEN
#pragma unroll
      for (int n = 0; n < (CHANNEL_K || TREE_K || RAW_K ? 0 : GROUPS_K); n++) {
        TileC c;
#pragma unroll
        for (int j = n * GROUP_K / 32; j < BK && 32 * j / GROUP_K == n; j++) {
          kv_read_some<BK, WORDS_K, SOME_K>(words, keys, j);
#pragma unroll
          for (int u = 0; u < 2; u++) {
            TileA a;
#pragma unroll
            for (int m = 0; m < 4; m++) {
              const int r = m % 2;
              const int p = 2 * u + m / 2;
              const uint word = words[kv_slot_word<BITS_K>(j, r, p)];
              const uint high = words[BITS_K == 3 ? kv_high_word(j) : 0];
              a.w[m] = kv_pair<BITS_K>(word, high, masks_k, j, r, p);
#if WITH_CODEBOOK
              if (CODEBOOK_K) {
                a.w[m] =
                    kv_level_pair<BITS_K, BITS_K>(word, high, masks_k, levels_k, j, r, p);
              }
#endif
            }
            c = tile_product(
                32 * j == n * GROUP_K && u == 0 ? zero : c, a,
                kv_query<POOLED>(q_tile, queries, 2 * j + u, mine));
          }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int at_ = i / 2 * SLOTS_K + n;
          s[e].v[i] = metal::fma(kv_half(scales[at_ / 2], at_ % 2), c.v[i], s[e].v[i]);
        }
      }
#endif
#endif
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (CAP) {
          const float of_score = FOLDED ? 1.0f : KV_SCORE;
          s[e].v[i] = kv_capped(s[e].v[i] * of_score, as_type<float>(CAP)) / of_score;
        }
        if (e == 1 && !both) {
          s[e].v[i] = -INFINITY;
        }
      }
    }
