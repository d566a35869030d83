// Encodes transformed keys and values as page records and headers, where keys have a scale per channel.
// Keys: one threadgroup per group of tokens that share scales; values: one simdgroup per record.
// Grid: (32 S x the larger number of threadgroups, 2 sides).
// keys [heads, capacity, D_K] of type T_K; values [heads, capacity, D_V] of type T_V
// records [heads, records per head, words]; headers [heads, groups of tokens, scales and biases]
// size: [records per head, heads, first token of the keys, their capacity, the same of the values]
// Template: S simdgroups of a threadgroup; per side T, D, BITS, GROUP (of keys: tokens), SYMMETRIC;
// RANK_V (`Affine.clip_rank`); CHUNK (blocks of keys that a simdgroup packs at a time, even).
constexpr int BLOCKS = (D_K + 31) / 32;
constexpr int WORDS = kv_lane_words<BITS_K>(BLOCKS);
constexpr int CHUNKS = (BLOCKS + CHUNK - 1) / CHUNK;
constexpr int COUNT = kv_lane_words<BITS_K>(CHUNK);  // words of a chunk
constexpr int SIDE_K = 32 * WORDS;
constexpr int SIDE_V =
    kv_side_words<BITS_V>((D_V + 31) / 32, (D_V + GROUP_V - 1) / GROUP_V, SYMMETRIC_V);
constexpr int NAMES = SYMMETRIC_K ? 1 : 2;
constexpr float TOP = float((1 << BITS_K) - 1);
constexpr float MIDDLE = float(1 << (BITS_K - 1));

threadgroup float2 tiles[1];  // never used: nothing is transformed here
threadgroup float low[S * 32 * BLOCKS];
threadgroup float high[S * 32 * BLOCKS];

const int lane = thread_index_in_simdgroup;
const int simdgroup = simdgroup_index_in_threadgroup;
const int place = threadgroup_position_in_grid.x;
const int groups = size[0] * 16 / GROUP_K;  // of tokens, per head
const int heads = size[1];

if (threadgroup_position_in_grid.y == 0 && place < groups * heads) {
  const int token0 = size[2] + place % groups * GROUP_K;
  const device T_K* from = keys + (size_t(place / groups) * size[3] + token0) * D_K;
#pragma unroll
  for (int j = 0; j < BLOCKS; j++) {
    const int dim = metal::min(32 * j + lane, D_K - 1);
    float least = 3.4e38f;
    float most = -3.4e38f;
    for (int token = simdgroup; token < GROUP_K; token += S) {
      const float x = float(from[token * D_K + dim]);
      least = metal::min(least, x);
      most = metal::max(most, x);
    }
    low[simdgroup * 32 * BLOCKS + 32 * j + lane] = least;
    high[simdgroup * 32 * BLOCKS + 32 * j + lane] = most;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // The range of a channel; afterwards low and high hold the start and the step of its codes.
  device ushort* header = (device ushort*)headers + size_t(place) * NAMES * 32 * BLOCKS;
  for (int dim = simdgroup * 32 + lane; dim < 32 * BLOCKS; dim += 32 * S) {
    float least = low[dim];
    float most = high[dim];
    for (int n = 1; n < S; n++) {
      least = metal::min(least, low[n * 32 * BLOCKS + dim]);
      most = metal::max(most, high[n * 32 * BLOCKS + dim]);
    }
    half scale;
    float start;
    if (SYMMETRIC_K) {
      const float span =
          kv_divide(metal::max(most, -least), MIDDLE - 1.0f, 1.0f / (MIDDLE - 1.0f));
      scale = half(metal::min(span, 65504.0f / MIDDLE));
      start = -MIDDLE * float(scale);
    } else {
      const half bias = half(metal::max(metal::min(least, 65504.0f), -65504.0f));
      start = float(bias);
      scale = half(metal::min(kv_divide(most - start, TOP, 1.0f / TOP), 65504.0f));
      header[32 * BLOCKS + dim] = dim < D_K ? as_type<ushort>(bias) : ushort(0);
    }
    header[dim] = dim < D_K ? as_type<ushort>(scale) : ushort(0);
    float step = float(scale);
    if (!(step > 0.0f)) {  // a channel without a range: the middle or the lowest code
      step = 1.0f;
      start = SYMMETRIC_K ? -MIDDLE : start;
    }
    low[dim] = start;
    high[dim] = step;
    high[32 * BLOCKS + dim] = 1.0f / step;  // in the place of the second simdgroup's maximum, no longer needed
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // A simdgroup packs CHUNK blocks of a record at a time: as many as fit in registers.
  for (int n = simdgroup; n < GROUP_K / 16 * CHUNKS; n += S) {
    const int record = n / CHUNKS;
    const int chunk = n % CHUNKS;
    uint words[COUNT];
#pragma unroll
    for (int m = 0; m < COUNT; m++) {
      words[m] = 0u;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
      const int j = CHUNK * chunk + i;
      float v[16];
      if (j < BLOCKS) {
        kv_sixteen<T_K, D_K, 1>(from + 16 * record * D_K, lane, j, v);
      }
#pragma unroll
      for (int s = 0; s < 8; s++) {
        const int dim = 32 * j + 8 * (lane % 4) + s;
        const int at = j < BLOCKS ? dim : 0;
        const float start = low[at];
        const float step = high[at];
        const float inverse = high[32 * BLOCKS + at];
#pragma unroll
        for (int r = 0; r < 2; r++) {
          // Adding 2^23 rounds half to even and leaves the integer in the last bits.
          const float code = kv_divide(v[8 * r + s] - start, step, inverse);
          const float kept = metal::max(metal::min(code, TOP), SYMMETRIC_K ? 1.0f : 0.0f);
          const uint bits = dim < D_K ? as_type<uint>(kept + 8388608.0f) & uint(TOP) : 0u;
          const int shift = kv_slot_bit<BITS_K>(r, s % 4, s / 4);
          if (BITS_K == 3) {
            words[kv_slot_word<BITS_K>(i, r, s % 4)] |= (bits & 3u) << shift;
            words[kv_high_word(i)] |= (bits >> 2) << kv_high_bit(i, r, s % 4, s / 4);
          } else {
            words[kv_slot_word<BITS_K>(i, r, s % 4)] |= bits << shift;
          }
        }
      }
    }
    const size_t at = size_t(place) * (GROUP_K / 16) + record;
    kv_put<WORDS, COUNT>(records + at * (SIDE_K + SIDE_V), words, lane, chunk * COUNT);
  }
}
const int unit = place * S + simdgroup;
if (threadgroup_position_in_grid.y == 1 && unit < size[0] * heads) {
  const int token0 = size[4] + unit % size[0] * 16;
  kv_quantize_side<T_V, BITS_V, D_V, GROUP_V, SYMMETRIC_V, 0, 0, RANK_V>(
      values + (size_t(unit / size[0]) * size[5] + token0) * D_V, (const device float*)size, tiles,
      records + size_t(unit) * (SIDE_K + SIDE_V) + SIDE_K, lane);
}
