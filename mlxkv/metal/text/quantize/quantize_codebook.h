// Encodes one side of a record by a codebook, by one simdgroup: x [16, DIMS] to codes and norms at `out`.
// boundaries: between levels above 0, for vectors of norm 1. KIND: `kv_quantize_side`.
#if WITH_CODEBOOK
template <typename T, int BITS, int DIMS, int KEYS, int KIND>
inline void kv_quantize_codebook(
    const device T* x, const device float* table, kv_pairs tile, const thread float* boundaries,
    device uint* out, int lane) {
  constexpr int BLOCKS = (DIMS + 31) / 32;
  constexpr int WORDS = kv_lane_words<BITS>(BLOCKS);
  constexpr int HELD = KEYS ? 2 : 4; // tokens of a lane, as in `kv_quantize_side`
  constexpr int ABOVE = BITS > 4 ? 0 : (1 << (BITS - 1)) - 1;
  constexpr uint MIDDLE = 1u << (BITS - 1);
  const int g = lane / 4;
  const int t = lane % 4;
  kv_pairs at[4];
  kv_pairs back[4];
  int zero[1];
  const bool empty = kv_transform<T, DIMS, KEYS, KIND>(x, table, tile, at, back, zero, lane);
  float norms[HELD];
#pragma unroll
  for (int n = 0; n < HELD; n++) {
    norms[n] = 0.0f;
  }
  // Two passes over the blocks: a whole token does not fit in registers.
#pragma unroll
  for (int j = 0; j < BLOCKS; j++) {
    float v[16];
    kv_block<T, DIMS, KEYS, KIND>(x, table, tile, at, back, zero[0], lane, j, v);
#pragma unroll
    for (int s = 0; s < 16; s++) {
      const int dim = 32 * j + (KEYS ? 8 * t + s % 8 : 4 * g + s % 4);
      const float value = DIMS % 32 == 0 || dim < DIMS ? v[s] : 0.0f;
      norms[KEYS ? s / 8 : s / 4] = metal::fma(value, value, norms[KEYS ? s / 8 : s / 4]);
    }
  }
  const float square = kv_together<KEYS, 1>(norms, lane);
  const float norm = empty ? 0.0f : metal::sqrt(square);
#pragma unroll
  for (int n = 0; n < HELD; n++) {
    norms[n] = simd_shuffle(norm, ushort(KEYS ? 4 * g + n : 4 * n + t));
  }
  if (!KV_ROOMY) {  // a compiler would keep the values, and not read them again
    simdgroup_barrier(mem_flags::mem_threadgroup);
    x += square < 0.0f;  // never
  }
  uint code_words[WORDS];
#pragma unroll
  for (int m = 0; m < WORDS; m++) {
    code_words[m] = 0u;
  }
#pragma unroll
  for (int j = 0; j < BLOCKS; j++) {
    float v[16];
    kv_block<T, DIMS, KEYS, KIND>(x, table, tile, at, back, zero[0], lane, j, v);
#pragma unroll
    for (int s = 0; s < 16; s++) {
      const int r = s / 8;
      const int h = s / 4 % 2;
      const int p = s % 4;
      const int dim = 32 * j + (KEYS ? 8 * t + s % 8 : 4 * g + p);
      const float size = metal::abs(v[s]);
      uint above = 0u;
#pragma unroll
      for (int i = 0; i < ABOVE; i++) {
        above += size > boundaries[i] * norms[KEYS ? s / 8 : s / 4] ? 1u : 0u;
      }
      uint code = v[s] > 0.0f ? MIDDLE + above : MIDDLE - 1u - above;
      code = DIMS % 32 == 0 || dim < DIMS ? code : 0u;
      const int shift = kv_slot_bit<BITS>(r, p, h);
      if (BITS == 3) {
        code_words[kv_slot_word<BITS>(j, r, p)] |= (code & 3u) << shift;
        code_words[kv_high_word(j)] |= (code >> 2) << kv_high_bit(j, r, p, h);
      } else {
        code_words[kv_slot_word<BITS>(j, r, p)] |= code << shift;
      }
    }
  }
  kv_put<WORDS, WORDS>(out, code_words, lane, 0);
  if (KEYS ? t < 2 : g < 4) {
    device ushort* numbers = (device ushort*)(out + 32 * WORDS);
    // NaN stays NaN.
    const half scale = half(norm > 65504.0f ? 65504.0f : norm);
    numbers[kv_number<KEYS>(kv_ranged<KEYS>(lane), 0, 0, 1, 1)] = as_type<ushort>(scale);
  }
}
#endif
