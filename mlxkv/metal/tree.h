// Polar trees (PolarQuant of Han et al.): 16 dims as a radius and 15 angles. Stands behind codes.h.
// The lanes share what they look up: lane i holds cosine and sine of angle i of the codebooks, which
// follow each other, 16, 4, 4 and 4 angles; codes are looked up by shuffles.
// TREE 1: codebooks of the format, as the bits of floats; 2: those of the page, halves in its header.

constexpr int KV_TREE_HEADER = 16; // words: 28 halves, padded

struct KvTree {
  float cosine;
  float sine;
};

template <int TREE, int COUNT>
inline KvTree kv_tree(const thread int* books, const device half* page, int lane) {
  const int i = lane < 28 ? lane : 0;
  const float angle = (TREE == 2 ? float(page[i]) : as_type<float>(books[i % COUNT])) - KV_PI;
  KvTree tree;
  tree.cosine = -metal::cos(angle);
  tree.sine = -metal::sin(angle);
  return tree;
}

inline ushort kv_tree_place(uint code, uint first) {
  return ushort(code | first); // first: 0, 16, 20, 24, whose low bits are free
}

// Codes of levels 3 and 4 of eight dims, from the high bits of their first and their last four.
inline uint kv_tree_upper(uint first, uint last, int level) {
  return ((first >> (level - 1)) & 1u) | ((last >> (level - 1)) & 1u) << 1;
}

// Dims 8 t .. 8 t + 7 of a block: low and high are the bits of token r of a lane, from bit 0 on.
inline void kv_tree_key(KvTree tree, float radius, uint low, uint high, int t, thread float* k) {
  const ushort four = kv_tree_place(kv_tree_upper(high, high >> 16, 4), 24u);
  const float near = simd_shuffle(tree.cosine, four);
  const float far = simd_shuffle(tree.sine, four);
  const float of_eight = radius * (t % 2 ? far : near);
  const ushort three = kv_tree_place(kv_tree_upper(high, high >> 16, 3), 20u);
  float of_four[2];
  of_four[0] = of_eight * simd_shuffle(tree.cosine, three);
  of_four[1] = of_eight * simd_shuffle(tree.sine, three);
  for (int h = 0; h < 2; h++) {
    const ushort two = kv_tree_place((high >> (16 * h)) & 3u, 16u);
    float of_two[2];
    of_two[0] = of_four[h] * simd_shuffle(tree.cosine, two);
    of_two[1] = of_four[h] * simd_shuffle(tree.sine, two);
    for (int i = 0; i < 2; i++) {
      const ushort one = kv_tree_place((low >> (16 * h + 4 * i)) & 15u, 0u);
      k[4 * h + 2 * i] = of_two[i] * simd_shuffle(tree.cosine, one);
      k[4 * h + 2 * i + 1] = of_two[i] * simd_shuffle(tree.sine, one);
    }
  }
}

// Dims 4 g .. 4 g + 3 of a block, of one token. low, high: its bits, from bit 0 on; other: the high
// bits of the four dims beside these in their eight.
inline void kv_tree_value(
    KvTree tree, float radius, uint low, uint high, uint other, int g, thread float* v) {
  const uint first = g % 2 ? other : high;
  const uint last = g % 2 ? high : other;
  const ushort four = kv_tree_place(kv_tree_upper(first, last, 4), 24u);
  const ushort three = kv_tree_place(kv_tree_upper(first, last, 3), 20u);
  const ushort two = kv_tree_place(high & 3u, 16u);
  float near = simd_shuffle(tree.cosine, four);
  float far = simd_shuffle(tree.sine, four);
  radius *= g % 4 < 2 ? near : far;
  near = simd_shuffle(tree.cosine, three);
  far = simd_shuffle(tree.sine, three);
  radius *= g % 2 ? far : near;
  float of_two[2];
  of_two[0] = radius * simd_shuffle(tree.cosine, two);
  of_two[1] = radius * simd_shuffle(tree.sine, two);
  for (int i = 0; i < 2; i++) {
    const ushort one = kv_tree_place((low >> (4 * i)) & 15u, 0u);
    v[2 * i] = of_two[i] * simd_shuffle(tree.cosine, one);
    v[2 * i + 1] = of_two[i] * simd_shuffle(tree.sine, one);
  }
}

// Half i of a side's numbers, 0 where there is none.
inline float kv_number_at(const device half* numbers, int i, bool there) {
  return there ? float(numbers[i]) : 0.0f;
}
