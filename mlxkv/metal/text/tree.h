// Polar trees (PolarQuant of Han et al.): 16 dims as a radius and 15 angles. Comes after codes.h.
// The codebooks of the four levels follow each other: 16, 4, 4 and 4 angles. Lanes hold the tables and look
// up by shuffles: lane i < 20 holds cosine and sine of angle i of levels 1 and 2; lane 16 far + 4 a + b holds,
// for angle a of level 4 and b of level 3, the factors of the radius in the first and in the last four
// of the first (far: of the last) eight dims.
// TREE 1: codebooks of the format, as the bits of floats. 2: codebooks of the page, halves in its header of
// 16 words.

#if WITH_TREE
struct KvTree {
  float cosine;
  float sine;
  float first;
  float last;
};

template <int TREE, int COUNT>
inline float kv_tree_angle(const thread int* books, const device half* page, int i) {
  return (TREE == 2 ? float(page[i]) : as_type<float>(books[i % COUNT])) - KV_PI;
}

template <int TREE, int COUNT>
inline KvTree kv_tree(const thread int* books, const device half* page, int lane) {
  const float own = kv_tree_angle<TREE, COUNT>(books, page, lane < 20 ? lane : 0);
  const float three = kv_tree_angle<TREE, COUNT>(books, page, 20 + lane % 4);
  const float four = kv_tree_angle<TREE, COUNT>(books, page, 24 + lane / 4 % 4);
  KvTree tree;
  tree.cosine = -metal::fast::cos(own);
  tree.sine = -metal::fast::sin(own);
  const float of_eight = lane < 16 ? metal::fast::cos(four) : metal::fast::sin(four);
  tree.first = of_eight * metal::fast::cos(three);
  tree.last = of_eight * metal::fast::sin(three);
  return tree;
}

// Places of the angles. low, high: the bits of a token, from bit 0 on. Level 1: pairs of dims are 4 bits
// apart, first and last four dims 16 bits. High bits: levels 3 and 4, then both of level 2.
inline ushort kv_tree_one(uint low, int shift) {
  return ushort((low >> shift) & 15u);
}
inline ushort kv_tree_two(uint high, int shift) {
  return ushort(((high >> shift) & 3u) | 16u);
}
inline ushort kv_tree_above(uint high, int shift, int far) {
  return ushort(((high >> shift) & 15u) | (far ? 16u : 0u));
}

// Dims 8 t .. 8 t + 7 of a block.
inline void kv_tree_key(KvTree tree, float radius, uint low, uint high, int t, thread float* k) {
  const ushort above = kv_tree_above(high, 0, t % 2);
  float of_four[2];
  of_four[0] = radius * simd_shuffle(tree.first, above);
  of_four[1] = radius * simd_shuffle(tree.last, above);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const ushort two = kv_tree_two(high, 16 + 2 * h);
    float of_two[2];
    of_two[0] = of_four[h] * simd_shuffle(tree.cosine, two);
    of_two[1] = of_four[h] * simd_shuffle(tree.sine, two);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const ushort one = kv_tree_one(low, 16 * h + 4 * i);
      k[4 * h + 2 * i] = of_two[i] * simd_shuffle(tree.cosine, one);
      k[4 * h + 2 * i + 1] = of_two[i] * simd_shuffle(tree.sine, one);
    }
  }
}

// Dims 4 g .. 4 g + 3 of a block. other: the high bits of the other four dims of the eight.
inline void kv_tree_value(
    KvTree tree, float radius, uint low, uint high, uint other, int g, thread float* v) {
  const ushort above = kv_tree_above(g % 2 ? other : high, 0, g % 4 / 2);
  const float first = simd_shuffle(tree.first, above);
  const float last = simd_shuffle(tree.last, above);
  radius *= g % 2 ? last : first;
  const ushort two = kv_tree_two(g % 2 ? high : other, g % 2 * 2);
  float of_two[2];
  of_two[0] = radius * simd_shuffle(tree.cosine, two);
  of_two[1] = radius * simd_shuffle(tree.sine, two);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const ushort one = kv_tree_one(low, 4 * i);
    v[2 * i] = of_two[i] * simd_shuffle(tree.cosine, one);
    v[2 * i + 1] = of_two[i] * simd_shuffle(tree.sine, one);
  }
}

// Half i of a side's numbers, 0 where there is none.
inline float kv_number_at(const device half* numbers, int i, bool there) {
  return there ? float(numbers[i]) : 0.0f;
}
#endif
