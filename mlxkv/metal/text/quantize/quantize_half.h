// Encodes one side of a record as float16 numbers, by one simdgroup: x [16, DIMS] to words at `out`. Numbers
// saturate, and are zero beyond the last dim. KIND: `kv_quantize_side`.
#if WITH_HALVES
inline uint kv_halves_word(float low, float high) {
  return uint(as_type<ushort>(half(low))) | (uint(as_type<ushort>(half(high))) << 16);
}

template <typename T, int DIMS, int KEYS, int KIND>
inline void kv_quantize_half(
    const device T* x, const device float* table, kv_pairs tile, device uint* out, int lane) {
  constexpr int BLOCKS = (DIMS + 31) / 32;
  constexpr int WORDS = kv_lane_words<16>(BLOCKS);
  kv_pairs at[4];
  kv_pairs back[4];
  int zero[1];
  kv_transform<T, DIMS, KEYS, KIND>(x, table, tile, at, back, zero, lane);
  uint words[WORDS];
#pragma unroll
  for (int j = 0; j < BLOCKS; j++) {
    float v[16];
    kv_block<T, DIMS, KEYS, KIND>(x, table, tile, at, back, zero[0], lane, j, v);
#pragma unroll
    for (int s = 0; s < 16; s++) {
      const int dim = 32 * j + (KEYS ? 8 * (lane % 4) + s % 8 : 4 * (lane / 4) + s % 4);
      // NaN stays NaN.
      const float most = v[s] > 65504.0f ? 65504.0f : v[s];
      const float kept = most < -65504.0f ? -65504.0f : most;
      v[s] = DIMS % 32 == 0 || dim < DIMS ? kept : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int p = 0; p < 4; p++) {
        words[kv_slot_word<16>(j, r, p)] = kv_halves_word(v[8 * r + p], v[8 * r + 4 + p]);
      }
    }
  }
  kv_put<WORDS, WORDS>(out, words, lane, 0);
}
#endif
