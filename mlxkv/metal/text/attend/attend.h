// Softmax of attend over 16 tokens, of a record or a window, for QT query rows.

// c tanh(s / c), of scores s and a cap c in base-2 exponents.
inline float kv_capped(float s, float cap) {
  const float e = metal::fast::exp2(s * (2.88539008f / cap));
  return cap - 2.0f * cap / (e + 1.0f);
}

// Turns s, partial scores of tokens g and g + 8 in the four lanes of a token, into probabilities in all four.
// The running maximum is raised only when exceeded by `lazy`; the N outputs of each row are then rescaled.
template <int QT, int N>
inline void kv_probabilities(
    thread float* s, thread float* top, thread float* sum, thread float* o,
    const thread int* last_seen, int position0, int tokens, int g,
    float lazy, float cap) {
  bool exceeds = false;
#pragma unroll
  for (int i = 0; i < 2 * QT; i++) {
    s[i] += simd_shuffle_xor(s[i], ushort(1));
    s[i] += simd_shuffle_xor(s[i], ushort(2));
    if (cap > 0.0f) {  // known when a kernel is built
      s[i] = kv_capped(s[i], cap);
    }
    const int token = 8 * (i % 2);  // from that of the lane on
    const bool seen = token < tokens - g && position0 + g + token <= last_seen[i / 2];
    s[i] = seen ? s[i] : -INFINITY;
    exceeds = exceeds || s[i] > top[i / 2] + lazy;
  }
  if (simd_any(exceeds)) {  // the whole simdgroup takes the same branch
#pragma unroll
    for (int q = 0; q < QT; q++) {
      float peak = metal::max(s[2 * q], s[2 * q + 1]);
      peak = metal::max(peak, simd_shuffle_xor(peak, ushort(4)));
      peak = metal::max(peak, simd_shuffle_xor(peak, ushort(8)));
      peak = metal::max(peak, simd_shuffle_xor(peak, ushort(16)));
      peak = metal::max(peak, top[q]);
      const float shrink = metal::fast::exp2(top[q] - peak);
      top[q] = peak;
      sum[q] *= shrink;
#pragma unroll
      for (int i = 0; i < N; i++) {
        o[q * N + i] *= shrink;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * QT; i++) {
    s[i] = metal::fast::exp2(s[i] - top[i / 2]);
    sum[i / 2] += s[i];
  }
}
