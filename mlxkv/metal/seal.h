// One side of a record by one simdgroup, for seal.metal.

// a / b, correctly rounded, from the rounded 1 / b.
inline float kv_divide(float a, float b, float inverse) {
  const float q = a * inverse;
  return metal::fma(metal::fma(-q, b, a), inverse, q);
}

// The eight values that a lane holds of half r of block j: keys one token and eight dims, values
// two tokens and four dims. KIND: 0 as they come, 1 Hadamard, 2 real Fourier.
template <typename T, int DIMS, int KEYS, int KIND>
inline void kv_eight(
    const device T* x, const device float* table, kv_pairs tile, int lane, int r, int j,
    thread float* v) {
  const int g = lane / 4;
  const int t = lane % 4;
  if (KIND == 0 && KEYS && DIMS % 32 == 0) {
    kv_load<8>(x + (g + 8 * r) * DIMS + 32 * j + 8 * t, v);
    return;
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int token = KEYS ? g + 8 * r : 2 * t + 8 * r + h;
    const int dim = KEYS ? 32 * j + 8 * t + 4 * h : 32 * j + 4 * g;
    if (KIND > 0) {
      const int first = KEYS ? 4 * t : 2 * g;
      const int i = KEYS ? 2 * h : 0;
      const float2 a = kv_stored_pair<DIMS, KIND == 2>(table, tile, token, first, j, i);
      const float2 b = kv_stored_pair<DIMS, KIND == 2>(table, tile, token, first, j, i + 1);
      v[4 * h] = a.x;
      v[4 * h + 1] = a.y;
      v[4 * h + 2] = b.x;
      v[4 * h + 3] = b.y;
    } else if (DIMS % 4 == 0) {
      // Beyond the last dim any value of the row will do: it changes no minimum or maximum.
      kv_load<4>(x + token * DIMS + (DIMS % 32 == 0 || dim < DIMS ? dim : DIMS - 4), v + 4 * h);
    } else {
#pragma unroll
      for (int p = 0; p < 4; p++) {
        v[4 * h + p] = float(x[token * DIMS + metal::min(dim + p, DIMS - 1)]);
      }
    }
  }
}

// One side of one record by one simdgroup: x [16, DIMS] -> codes and numbers at `out`.
template <typename T, int BITS, int DIMS, int GROUP, int SYMMETRIC, int KEYS, int KIND>
inline void kv_seal_side(
    const device T* x, const device float* table, kv_pairs tile, device uint* out, int lane) {
  constexpr int BLOCKS = (DIMS + 31) / 32;
  constexpr int GROUPS = (DIMS + GROUP - 1) / GROUP;
  constexpr int GROUP_BLOCKS = (GROUP + 31) / 32;
  constexpr int WORDS = kv_lane_words<BITS>(BLOCKS);
  constexpr int RANGES = KEYS ? 1 : 2; // tokens that a lane holds at a time
  constexpr float LOWEST = SYMMETRIC ? 1.0f : 0.0f;
  constexpr float TOP = float((1 << BITS) - 1);
  constexpr float MIDDLE = float(1 << (BITS - 1));
  const int g = lane / 4;
  const int t = lane % 4;
  if (KIND > 0) {
    kv_transform<T, DIMS, KIND == 2>(x, table, tile, lane);
  }
  uint code_words[WORDS];
#pragma unroll
  for (int m = 0; m < WORDS; m++) {
    code_words[m] = 0u;
  }
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float v[8 * GROUP_BLOCKS];
      float low[2];
      float high[2];
      low[0] = low[1] = 3.4e38f;
      high[0] = high[1] = -3.4e38f;
#pragma unroll
      for (int i = 0; i < GROUP_BLOCKS; i++) {
        if (group * GROUP_BLOCKS + i < BLOCKS) {
          const int j = group * GROUP_BLOCKS + i;
          kv_eight<T, DIMS, KEYS, KIND>(x, table, tile, lane, r, j, v + 8 * i);
#pragma unroll
          for (int s = 0; s < 8; s++) {
            const int n = s / 4 % RANGES;
            if (SYMMETRIC) {
              high[n] = metal::max(high[n], metal::abs(v[8 * i + s]));
            } else {
              low[n] = metal::min(low[n], v[8 * i + s]);
              high[n] = metal::max(high[n], v[8 * i + s]);
            }
          }
        }
      }
      float step[2];
      float inverse[2];
      float start[2];
      uint scale_bits[2];
      uint bias_bits[2];
#pragma unroll
      for (int n = 0; n < RANGES; n++) {
        // The other dims of a token lie in the lanes of the same g (keys) or t (values).
#pragma unroll
        for (int i = 0; i < (KEYS ? 2 : 3); i++) {
          const ushort distance = ushort((KEYS ? 1 : 4) << i);
          high[n] = metal::max(high[n], simd_shuffle_xor(high[n], distance));
          if (!SYMMETRIC) {
            low[n] = metal::min(low[n], simd_shuffle_xor(low[n], distance));
          }
        }
        half scale;
        if (SYMMETRIC) {
          const float span = kv_divide(high[n], MIDDLE - 1.0f, 1.0f / (MIDDLE - 1.0f));
          scale = half(metal::min(span, 65504.0f / MIDDLE));
          start[n] = -MIDDLE * float(scale);
        } else {
          const half bias = half(metal::max(metal::min(low[n], 65504.0f), -65504.0f));
          start[n] = float(bias);
          bias_bits[n] = as_type<ushort>(bias);
          const float span = kv_divide(high[n] - start[n], TOP, 1.0f / TOP);
          scale = half(metal::max(metal::min(span, 65504.0f), -65504.0f));
        }
        scale_bits[n] = as_type<ushort>(scale);
        step[n] = float(scale);
        if (!(step[n] > 0.0f)) { // a group without a range: the middle or the lowest code
          step[n] = 1.0f;
          start[n] = SYMMETRIC ? -MIDDLE : start[n];
        }
        inverse[n] = 1.0f / step[n];
        if (KIND > 0) { // codes from the lowest on, as a share of all
          start[n] += LOWEST * step[n];
          inverse[n] = inverse[n] * (1.0f / (TOP - LOWEST));
        }
      }
      if (KEYS ? t == 0 : g == 0) {
        device ushort* numbers = (device ushort*)(out + 32 * WORDS);
#pragma unroll
        for (int n = 0; n < RANGES; n++) {
          const int token = (KEYS ? g : 2 * t) + 8 * r + n;
          const int at = kv_number<KEYS>(token, group, 0, GROUPS, SYMMETRIC);
          numbers[at] = ushort(scale_bits[n]);
          if (!SYMMETRIC) {
            numbers[kv_number<KEYS>(token, group, 1, GROUPS, SYMMETRIC)] = ushort(bias_bits[n]);
          }
        }
      }
#pragma unroll
      for (int s = 0; s < 8 * GROUP_BLOCKS; s++) {
        const int j = group * GROUP_BLOCKS + s / 8;
        if (j < BLOCKS) {
          const int h = s / 4 % 2;
          const int p = s % 4;
          const int n = h % RANGES;
          const int dim = KEYS ? 32 * j + 8 * t + 4 * h + p : 32 * j + 4 * g + p;
          // Adding 2^23 rounds half to even and leaves the integer in the last bits. Values as
          // they come may sit on ties: those are divided as plain ops do.
          float code = v[s] - start[n];
          if (KIND > 0) {
            code = metal::saturate(code * inverse[n]);
            code = metal::fma(code, TOP - LOWEST, 8388608.0f + LOWEST);
          } else {
            code = kv_divide(code, step[n], inverse[n]);
            code = metal::max(metal::min(code, TOP), LOWEST) + 8388608.0f;
          }
          const uint bits = as_type<uint>(code);
          const uint zero = 0x4B000000u;
          const int shift = kv_slot_bit<BITS>(r, p, h);
          if (BITS == 3) {
            const uint three = DIMS % 32 == 0 || dim < DIMS ? bits - zero : 0u;
            code_words[kv_slot_word<BITS>(j, r, p)] += (three & 3u) << shift;
            code_words[kv_high_word(j)] += (three >> 2) << kv_high_bit(j, r, p, h);
          } else if (DIMS % 32 == 0 || dim < DIMS) {
            code_words[kv_slot_word<BITS>(j, r, p)] += (bits << shift) - (zero << shift);
          }
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < WORDS; m += kv_vector(WORDS)) {
    device uint* at = out + kv_word_at(m, lane, WORDS);
    if (WORDS % 4 == 0) {
      uint4 four;
      four.x = code_words[m];
      four.y = code_words[m + 1 < WORDS ? m + 1 : m];
      four.z = code_words[m + 2 < WORDS ? m + 2 : m];
      four.w = code_words[m + 3 < WORDS ? m + 3 : m];
      *(device uint4*)at = four;
    } else if (WORDS % 2 == 0) {
      uint2 two;
      two.x = code_words[m];
      two.y = code_words[m + 1 < WORDS ? m + 1 : m];
      *(device uint2*)at = two;
    } else {
      at[0] = code_words[m];
    }
  }
}
