// Decodes the formats other than affine codes to halves in the places of a tile. Comes after tile.h. kv_pair:
// tile.h; the order of slots: codes.h.

#if WITH_CODEBOOK
constexpr int kv_level_terms(int bits) {
  return bits == 2 ? 2 : (bits == 3 ? 4 : 5);
}

// Levels of a codebook for slots (r, p, half 0 and 1): an odd polynomial of
// v = (2 code + 1) / 2^BITS - 1. c: coefficients from the host, each twice in a word. Codes have BITS bits in
// slots of WIDTH bits.
template <int BITS, int WIDTH>
inline uint kv_level_pair(
    uint word, uint high, const thread uint* masks, const thread uint* c, int j, int r, int p) {
  constexpr int TERMS = kv_level_terms(BITS);
  constexpr float STEP = 2.0f / float(1 << BITS);
  constexpr int READ = WIDTH == 3 && BITS == 2 ? 2 : WIDTH;
  const float low = -(kv_offset<READ>(p) + float(1 << (BITS - 1))) * STEP;
  const uint code = kv_pair<READ>(word, high, masks, j, r, p);
  uint v = kv_add_multiplied_halves(kv_halves(low, low), code, kv_halves(STEP, STEP));
  v = kv_add_halves(v, kv_halves(0.5f * STEP, 0.5f * STEP));
  const uint square = kv_multiply_halves(v, v);
  uint sum = c[TERMS - 1];
#pragma unroll
  for (int i = TERMS - 2; i >= 0; i--) {
    sum = kv_add_multiplied_halves(c[i], sum, square);
  }
  return kv_multiply_halves(v, sum);
}
#endif

// The low or the high half of a word, twice.
inline uint kv_twice(uint pair, int high) {
  return kv_both(pair, pair, high);
}

// Halves i and 4 + i of eight, i = 2 u + r, for slots (p = i, half 0 and 1).
inline uint kv_eighth(uint4 x, int u, int r) {
  return kv_both(u ? x.y : x.x, u ? x.w : x.z, r);
}

#if WITH_CHANNEL
// Gives the queries of block j times the scales of its channels, q. Adds to `sum` the part that all their scores share,
// a tile of equal rows: queries times middle values, minus the offset that kv_pair adds to codes around the middle
// one. Rounding errors of the products are then multiplied by small codes.
// numbers: from word `at` on the scales of the block's dims, and `biases` words behind them the biases.
template <int BITS, int SYMMETRIC>
inline void kv_fold(
    const device uint* numbers, uint at, int biases, kv_quads queries, int j, thread TileB* q,
    thread TileC& sum, int lane) {
  if (!SYMMETRIC) {
    const uint4 own = *(const device uint4*)(numbers + (at + 2 * tile_column(lane)));
    const uint4 bias = *(const device uint4*)(numbers + (at + biases + 2 * tile_column(lane)));
    const uint middle = kv_halves(kv_middle<BITS>(), kv_middle<BITS>());
#pragma unroll
    for (int u = 0; u < 2; u++) {
      TileA a;
#pragma unroll
      for (int m = 0; m < 4; m++) {
        a.w[m] =
            kv_add_multiplied_halves(kv_eighth(bias, u, m / 2), middle, kv_eighth(own, u, m / 2));
      }
      tile_multiply(sum, a, kv_query<1>(q, queries, 2 * j + u, lane));
    }
  }
  const uint4 scale = *(const device uint4*)(numbers + (at + tile_b_row(lane, 0) / 2 * 4));
#pragma unroll
  for (int u = 0; u < 2; u++) {
    TileA offset;
#pragma unroll
    for (int m = 0; m < 4; m++) {
      const float taken = -kv_offset<BITS>(2 * u + m / 2) - kv_middle<BITS>();
      offset.w[m] = kv_halves(taken, taken);
    }
    const TileB query = kv_query<1>(q, queries, 2 * j + u, lane);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      q[u].w[r] = kv_multiply_halves(query.w[r], tile_b_numbers(kv_eighth(scale, u, r), lane));
    }
    tile_multiply(sum, offset, q[u]);
  }
}
#endif

#if WITH_PAIRS
// Keys as radius and angle, tokens r, slots (p, half 0 and 1) of one block: their first and second
// dims. numbers: steps of radius and angle, then their lowest values, eight each.
template <int BITS>
inline void kv_polar_pair(
    const thread uint* radii, const thread uint* angles, const thread uint4* numbers, int j,
    int other, int r, int p, thread uint& first, thread uint& second) {
  constexpr float STEPS = float(1 << BITS);
  float x[2];
  float y[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float of[4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
      of[n] = kv_half(kv_eighth(numbers[n], p / 2, p % 2), h);
    }
    // The middle of a step. Subtracting pi flips both signs.
    const float one = kv_one_plus<BITS>(kv_code<BITS>(
        radii[kv_slot_word<BITS>(j, r, p)], radii[BITS == 3 ? kv_high_word(j) : 0], j, r, p, h));
    const float two = kv_one_plus<BITS>(kv_code<BITS>(
        angles[kv_slot_word<BITS>(other, r, p)], angles[BITS == 3 ? kv_high_word(other) : 0], other,
        r, p, h));
    const float radius = metal::fma(of[0] * STEPS, one, metal::fma(0.5f - STEPS, of[0], of[2]));
    const float angle =
        metal::fma(of[1] * STEPS, two, metal::fma(0.5f - STEPS, of[1], of[3] - KV_PI));
    x[h] = -radius * metal::fast::cos(angle);
    y[h] = -radius * metal::fast::sin(angle);
  }
  first = kv_halves(x[0], x[1]);
  second = kv_halves(y[0], y[1]);
}
#endif


#if WITH_TREE
// The tables of a tree in halves (`KvTree`).
struct KvHalfTree {
  uint rotation;   // cosine, sine
  uint above;  // first, last
};
inline KvHalfTree kv_half_tree(KvTree tree) {
  KvHalfTree out;
  out.rotation = kv_halves(tree.cosine, tree.sine);
  out.above = kv_halves(tree.first, tree.last);
  return out;
}

// `kv_tree_key` in halves: dims 8 t .. 8 t + 7 as four pairs of neighbours. radius: twice in a word.
inline void kv_tree_key_pairs(
    KvHalfTree tree, uint radius, uint low, uint high, int t, thread uint* pairs) {
  const uint of_four =
      kv_multiply_halves(radius, simd_shuffle(tree.above, kv_tree_above(high, 0, t % 2)));
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint rotation = simd_shuffle(tree.rotation, kv_tree_two(high, 16 + 2 * h));
    const uint of_two = kv_multiply_halves(kv_twice(of_four, h), rotation);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint last = simd_shuffle(tree.rotation, kv_tree_one(low, 16 * h + 4 * i));
      pairs[2 * h + i] = kv_multiply_halves(kv_twice(of_two, i), last);
    }
  }
}

// `kv_tree_value` in halves, for two tokens: each word holds one of dims 4 g .. 4 g + 3 of both. radii: of both;
// low, high, other: bits of the first token from bit 0 on, of the second from bit 16 on.
inline void kv_tree_value_pairs(
    KvHalfTree tree, uint radii, uint low, uint high, uint other, int g, thread uint* pairs) {
  const uint upper = g % 2 ? other : high;
  const uint middle = g % 2 ? high >> 2 : other;
  uint of[2][4];  // of each token: the levels above, level 2, and both of level 1
#pragma unroll
  for (int h = 0; h < 2; h++) {
    of[h][0] = simd_shuffle(tree.above, kv_tree_above(upper, 16 * h, g % 4 / 2));
    of[h][1] = simd_shuffle(tree.rotation, kv_tree_two(middle, 16 * h));
    of[h][2] = simd_shuffle(tree.rotation, kv_tree_one(low, 16 * h));
    of[h][3] = simd_shuffle(tree.rotation, kv_tree_one(low, 16 * h + 4));
  }
  const uint radius = kv_multiply_halves(radii, kv_both(of[0][0], of[1][0], g % 2));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint of_two = kv_multiply_halves(radius, kv_both(of[0][1], of[1][1], i));
#pragma unroll
    for (int n = 0; n < 2; n++) {
      pairs[2 * i + n] = kv_multiply_halves(of_two, kv_both(of[0][2 + i], of[1][2 + i], n));
    }
  }
}
#endif

#if WITH_MIXED_BITS
// Mixed bits (mixed_bits.h): a lane's word of a row. from: the lane's word of row 0 of a record. shared: two lanes
// share it.
inline uint kv_mixed_read(KvRecord from, uint row, int lane, uint shared) {
  const uint word = kv_read1(from, int(row) + (shared != 0u ? lane / 2 - lane : 0));
  return shared != 0u ? kv_mixed_spread(word, lane) : word;
}

// `kv_mixed_pairs` for COUNT records, of a block that stands in two places, or where lanes share words. rest: words 4 to 7 of
// the entry; pairs: four for each record.
template <int COUNT>
inline void kv_mixed_special(
    const thread KvRecord* from, uint row, const thread uint* word, uint4 entry, uint4 rest,
    int lane, thread uint* pairs) {
  const uint flags = rest.w >> 16;
  entry.y &= 31u;
  if ((flags & KV_MIXED_THIRD) != 0u) {
    const uint shared = flags & KV_MIXED_THIRD_HALF_ROW;
#pragma unroll
    for (int e = 0; e < COUNT; e++) {
      const uint third = kv_mixed_read(from[e], rest.z, lane, shared) >> (rest.w & 31u);
      kv_mixed_pairs<0u>(word[e], entry, pairs + 4 * e);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const uint high = r ? third << 1 : third << 2;
        pairs[4 * e + 2 * r] |= high & 0x00040004u;
        pairs[4 * e + 2 * r + 1] |= high & 0x00100010u;
      }
    }
  } else if ((flags & KV_MIXED_EIGHT) != 0u) {
#pragma unroll
    for (int e = 0; e < COUNT; e++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const uint x = r ? kv_read1(from[e], int(row) + 32) : word[e];
        pairs[4 * e + 2 * r] = x & entry.z;
        pairs[4 * e + 2 * r + 1] = (x >> 8) & entry.z;
      }
    }
  } else {
#pragma unroll
    for (int e = 0; e < COUNT; e++) {
      kv_mixed_pairs<0u>(kv_mixed_read(from[e], rest.z, lane, 1u), entry, pairs + 4 * e);
    }
  }
  // By another instruction than above, or a compiler would move it behind both ways of a branch.
#pragma unroll
  for (int i = 0; i < 4 * COUNT; i++) {
    pairs[i] += 0x64006400u;
  }
}
#endif
