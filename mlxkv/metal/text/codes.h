// Page records: codes and scales of 16 tokens of one kv head, in the order in which the lanes of a
// simdgroup read them. mlxkv/formats/records.py describes the same order; nothing else does.
//
// Lane (g, t) = (lane / 4, lane % 4). Dims come in blocks j of 32. A lane holds, per block, the slots
//   (r, p, half):  r 0..1, p 0..3, half 0..1
//   keys:    token g + 8 r,            dim 32 j + 8 t + 4 half + p
//   values:  token 2 t + 8 r + half,   dim 32 j + 4 g + p
// which are the fragments of a 16 x 8 x 16 matrix product. Portable bodies read the same order.
//
// Record, in uint32 words:  [K codes | K numbers | V codes | V numbers]
// codes: word m of a lane is at (m / v) 32 v + lane v + m % v, v the largest of 4, 2, 1 that divides
// the words of a lane. Numbers are float16 scales and biases, no bias when symmetric, ordered so that
// one wide load serves a lane:
//   keys:    [g][r][scales of all groups, biases of all groups]
//   values:  scale [t][group][r][half], then bias [group][t][r][half]
// Codes of 16 bits are the float16 numbers themselves (low rank that is not quantised): a word holds both
// halves of a slot (r, p), and there are no scales.
//
// Numbers that the tokens of a page share are in the page's header, a row of words in an array beside the
// records, [K header | V header], with dims padded to whole blocks:
//   CHANNEL (scales per channel):       [group of tokens][scales of all dims, biases of all dims]
// A side with scales per channel has no numbers in its records.
// TREE (polar trees): codes of 3 bits: two are half an angle of level 1, the third is a bit of the levels
// above (codec/polar_tree.py, `split`). Radii are scales of 16 dims. Codebooks of a page, 28 halves, are in
// its header.
// MIXED_BITS (mixed bits): blocks of 16 dims in another order (mixed_bits.h), and a scale per token.
// PAIRS (PolarQuant's keys): as CHANNEL; the codes of dim i < R/2 are radii, the codes of dim i + R/2
// angles, in steps of `scale` from `bias` on; a code decodes to the middle of its step.

#ifndef KV_INVERSE // cuda.h has its own
constant constexpr int KV_ROOMY = 0;  // whether registers, and a cache for code, hold several blocks at once
#endif

constant constexpr float KV_PI = 3.14159265f;  // subtracted from angles: fast cosines are accurate within +-pi

// Words of codes per lane, for `blocks` blocks.
template <int BITS>
constexpr int kv_lane_words(int blocks) {
  return BITS == 3 ? 3 * ((blocks + 1) / 2) : BITS * blocks / 2;
}

constexpr int kv_vector(int words) {
  return words % 4 == 0 ? 4 : (words % 2 == 0 ? 2 : 1);
}

// Words of one side of a record.
template <int BITS>
constexpr int kv_side_words(int blocks, int groups, int symmetric) {
  return 32 * kv_lane_words<BITS>(blocks) + (BITS == 16 ? 0 : 8 * groups * (symmetric ? 1 : 2));
}

// Words of the numbers of one side: in a record, and in the header of a page with `rows` groups of tokens.
template <int BITS>
constexpr int kv_number_words(int groups, int symmetric, int channel) {
  return BITS == 16 ? 0 : channel ? 0 : 8 * groups * (symmetric ? 1 : 2);
}
constexpr int kv_header_words(int blocks, int rows, int symmetric, int channel) {
  return channel ? 16 * blocks * rows * (symmetric ? 1 : 2) : 0;
}

// Place of word m of a lane.
constexpr int kv_word_at(int m, int lane, int words) {
  return (m / kv_vector(words)) * 32 * kv_vector(words) + lane * kv_vector(words) +
      m % kv_vector(words);
}

// Place of the code of slot (r, p, half) of block j: the lane's word, and the bit in it. Codes of 3 bits
// are 2 low bits and, in a word that two blocks share, 1 high bit.
template <int BITS>
constexpr int kv_slot_word(int j, int r, int p) {
  return BITS == 4 ? 2 * j + r
      : BITS == 2 ? j
      : BITS == 3 ? 3 * (j / 2) + j % 2
      : BITS == 16 ? 8 * j + 4 * r + p
                  : 4 * j + 2 * r + p / 2;
}

template <int BITS>
constexpr int kv_slot_bit(int r, int p, int half_) {
  return BITS == 4 ? 4 * p + 16 * half_
      : BITS == 8  ? 8 * (p % 2) + 16 * half_
      : BITS == 16 ? 16 * half_
                   : 2 * (4 * r + p) + 16 * half_;
}

constexpr int kv_high_word(int j) {
  return 3 * (j / 2) + 2;
}

constexpr int kv_high_bit(int j, int r, int p, int half_) {
  return 8 * (j % 2) + 4 * r + p + 16 * half_;
}

// Place of a scale (bias 0) or a bias (bias 1) among the numbers of a side, in halves.
constexpr int kv_key_number(int token, int group, int bias, int groups, int symmetric) {
  return ((token % 8 * 2 + token / 8) * (symmetric ? 1 : 2) + bias) * groups + group;
}

constexpr int kv_value_number(int token, int group, int bias, int groups) {
  return bias ? 16 * groups + 4 * (4 * group + token % 8 / 2) + 2 * (token / 8) + token % 2
              : 4 * (token % 8 / 2 * groups + group) + 2 * (token / 8) + token % 2;
}

template <int KEYS>
constexpr int kv_number(int token, int group, int bias, int groups, int symmetric) {
  return KEYS ? kv_key_number(token, group, bias, groups, symmetric)
              : kv_value_number(token, group, bias, groups);
}

inline float kv_half_of(uint word, int high) {
  return float(as_type<half>(ushort(high ? word >> 16 : word & 0xFFFFu)));
}

// The code as a float 1 + code / 2^BITS, without conversion: the code becomes the top of the mantissa.
// x = scale code + bias is then scale 2^BITS (1 + code / 2^BITS) + bias - scale 2^BITS.
template <int BITS>
inline float kv_one_plus(uint code) {
  return as_type<float>(0x3F800000u | (code << (23 - BITS)));
}

#if WITH_CODEBOOK
// A level of a codebook from such a float: the odd polynomial through all levels, of the code minus its
// middle. Coefficients: `levels.polynomial` times 2^-BITS.
template <int BITS>
inline float kv_level(float code, const thread float* c) {
  constexpr int TERMS = BITS > 4 ? 8 : 1 << (BITS - 1);
  const float u = code - (1.5f - 0.5f / float(1 << BITS));
  const float square = u * u;
  float sum = c[TERMS - 1];
#pragma unroll
  for (int i = TERMS - 2; i >= 0; i--) {
    sum = metal::fma(sum, square, c[i]);
  }
  return u * sum;
}
#endif

template <int BITS>
inline uint kv_code(uint word, uint high, int j, int r, int p, int half_) {
  uint code = (word >> kv_slot_bit<BITS>(r, p, half_)) & ((1u << (BITS == 3 ? 2 : BITS)) - 1u);
  return BITS == 3 ? code | (((high >> kv_high_bit(j, r, p, half_)) & 1u) << 2) : code;
}
