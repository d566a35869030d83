// Encodes one side of pages: values already in the stored domain -> its part of each record.
// One simdgroup per record of 16 tokens; x [heads, tokens, R] float, out [heads, records, words].
// size: [records in all, 0 ...]. Template: BITS, DIMS, GROUP (dims per scale), SYMMETRIC, KEYS.
const int lane = thread_index_in_simdgroup;
const int record = threadgroup_position_in_grid.x * (threads_per_threadgroup.x / 32) +
    simdgroup_index_in_threadgroup;
constexpr int BLOCKS = (DIMS + 31) / 32;
constexpr int GROUPS = (DIMS + GROUP - 1) / GROUP;
constexpr int GROUP_BLOCKS = (GROUP + 31) / 32;
constexpr int WORDS = kv_lane_words<BITS>(BLOCKS);
constexpr int SIDE = kv_side_words<BITS>(BLOCKS, GROUPS, SYMMETRIC);
constexpr float TOP = float((1 << BITS) - 1);
constexpr float MIDDLE = float(1 << (BITS - 1));

if (record < size[0]) {
  const int g = lane / 4;
  const int t = lane % 4;
  const device float* rows = x + size_t(record) * 16 * DIMS;
  device uint* out = words + size_t(record) * SIDE;
  device half* numbers = (device half*)(out + 32 * WORDS);

  uint code_words[WORDS];
  for (int m = 0; m < WORDS; m++) {
    code_words[m] = 0u;
  }

  for (int group = 0; group < GROUPS; group++) {
    const int first = group * GROUP_BLOCKS;
    const int last = metal::min(first + GROUP_BLOCKS, BLOCKS);
    // A lane has 2 tokens of the keys (r) and 4 of the values (r, half): at most 4 ranges.
    float low[4];
    float high[4];
    for (int n = 0; n < 4; n++) {
      low[n] = 3.0e38f;
      high[n] = -3.0e38f;
    }
    for (int j = first; j < last; j++) {
      for (int r = 0; r < 2; r++) {
        for (int p = 0; p < 4; p++) {
          for (int h = 0; h < 2; h++) {
            const int token = KEYS ? g + 8 * r : 2 * t + 8 * r + h;
            const int dim = KEYS ? 32 * j + 8 * t + 4 * h + p : 32 * j + 4 * g + p;
            const int n = KEYS ? r : 2 * r + h;
            if (dim < DIMS) {
              const float value = rows[token * DIMS + dim];
              low[n] = metal::min(low[n], value);
              high[n] = metal::max(high[n], value);
            }
          }
        }
      }
    }
    float step[4];
    float start[4];
    for (int n = 0; n < (KEYS ? 2 : 4); n++) {
      // The other dims of a token lie in the lanes of the same g (keys) or of the same t (values).
      for (ushort distance = KEYS ? 1 : 4; distance < (KEYS ? 4 : 32); distance *= 2) {
        low[n] = metal::min(low[n], simd_shuffle_xor(low[n], distance));
        high[n] = metal::max(high[n], simd_shuffle_xor(high[n], distance));
      }
      const int token = KEYS ? g + 8 * n : 2 * t + 8 * (n / 2) + n % 2;
      const bool writes = KEYS ? t == 0 : g == 0;
      half scale;
      half bias = half(0.0f);
      if (SYMMETRIC) {
        const float amax = metal::max(metal::abs(low[n]), metal::abs(high[n]));
        scale = half(metal::min(amax / (MIDDLE - 1.0f), 65504.0f / MIDDLE));
        start[n] = -MIDDLE * float(scale);
      } else {
        bias = half(metal::max(metal::min(low[n], 65504.0f), -65504.0f));
        start[n] = float(bias);
        const float span = (high[n] - start[n]) / TOP;
        scale = half(metal::max(metal::min(span, 65504.0f), -65504.0f));
      }
      step[n] = float(scale);
      if (writes) {
        numbers[kv_number<KEYS>(token, group, 0, GROUPS)] = scale;
        if (!SYMMETRIC) {
          numbers[kv_number<KEYS>(token, group, 1, GROUPS)] = bias;
        }
      }
    }
    for (int j = first; j < last; j++) {
      for (int r = 0; r < 2; r++) {
        for (int p = 0; p < 4; p++) {
          for (int h = 0; h < 2; h++) {
            const int token = KEYS ? g + 8 * r : 2 * t + 8 * r + h;
            const int dim = KEYS ? 32 * j + 8 * t + 4 * h + p : 32 * j + 4 * g + p;
            const int n = KEYS ? r : 2 * r + h;
            float code = SYMMETRIC ? MIDDLE : 0.0f;
            if (dim < DIMS && step[n] > 0.0f) {
              code = metal::rint((rows[token * DIMS + dim] - start[n]) / step[n]);
              code = metal::max(metal::min(code, TOP), SYMMETRIC ? 1.0f : 0.0f);
            }
            const uint bits = dim < DIMS ? uint(code) : 0u;
            code_words[kv_slot_word<BITS>(j, r, p)] |= (BITS == 3 ? bits & 3u : bits)
                << kv_slot_bit<BITS>(r, p, h);
            if (BITS == 3) {
              code_words[kv_high_word(j)] |= (bits >> 2) << kv_high_bit(j, r, p, h);
            }
          }
        }
      }
    }
  }
  for (int m = 0; m < WORDS; m++) {
    out[kv_word_at(m, lane, WORDS)] = code_words[m];
  }
}
