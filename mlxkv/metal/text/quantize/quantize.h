// Encoding of one side of a record by one simdgroup, for quantize.metal.

// a / b, correctly rounded, from the rounded 1 / b.
inline float kv_divide(float a, float b, float inverse) {
  const float q = a * inverse;
  return metal::fma(metal::fma(-q, b, a), inverse, q);
}

#ifndef KV_INVERSE // cuda.h has its own
inline float kv_inverse(float a) {
  return 1.0f / a;
}
#endif

// Loads a lane's values of block j, 8 with r = 0 and 8 with r = 1, untransformed: for keys one token and
// eight dims each, for values two tokens and four dims each.
template <typename T, int DIMS, int KEYS>
inline void kv_sixteen(const device T* x, int lane, int j, thread float* v) {
  const int g = lane / 4;
  const int t = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (KEYS && DIMS % 32 == 0) {
      kv_load<8>(x + (g + 8 * r) * DIMS + 32 * j + 8 * t, v + 8 * r);
    } else {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int token = KEYS ? g + 8 * r : 2 * t + 8 * r + h;
        const int dim = KEYS ? 32 * j + 8 * t + 4 * h : 32 * j + 4 * g;
        // Beyond the last dim repeat values of the row: they change no minimum or maximum.
        if (DIMS % 4 == 0) {
          kv_load<4>(
              x + token * DIMS + (DIMS % 32 == 0 || dim < DIMS ? dim : DIMS - 4),
              v + 8 * r + 4 * h);
        } else {
#pragma unroll
          for (int p = 0; p < 4; p++) {
            v[8 * r + 4 * h + p] = float(x[token * DIMS + metal::min(dim + p, DIMS - 1)]);
          }
        }
      }
    }
  }
}

// The token, of those in its registers, whose range a lane computes and stores.
template <int KEYS>
inline int kv_ranged(int lane) {
  const int g = lane / 4;
  const int t = lane % 4;
  return KEYS ? g + 8 * (t % 2) : 2 * t + 8 * (g / 2 % 2) + g % 2;
}

// Reduces `most` over the lanes of a token to its maximum (SUM: sum). A lane ends with the token whose
// number is in the bits of t (keys) or g (values); at each step it sends the half that it does not keep.
template <int KEYS, int SUM>
inline float kv_together(thread float* most, int lane) {
  int count = KEYS ? 2 : 4;
#pragma unroll
  for (int i = 0; i < (KEYS ? 2 : 3); i++) {
    const int distance = (KEYS ? 1 : 4) << i;
    if (count > 1) {
      count /= 2;
#pragma unroll
      for (int n = 0; n < count; n++) {
        const bool second = (lane & distance) != 0;
        const float kept = second ? most[2 * n + 1] : most[2 * n];
        const float given = second ? most[2 * n] : most[2 * n + 1];
        const float got = simd_shuffle_xor(given, ushort(distance));
        most[n] = SUM ? kept + got : metal::max(kept, got);
      }
    } else {
      const float got = simd_shuffle_xor(most[0], ushort(distance));
      most[0] = SUM ? most[0] + got : metal::max(most[0], got);
    }
  }
  return most[0];
}

// Transforms a record and returns in `at`, `back`, `zero` where `kv_block` finds it. True: the token of
// `kv_ranged` is all zeros, although its neighbour left rounding errors there.
template <typename T, int DIMS, int KEYS, int KIND>
inline bool kv_transform(
    const device T* x, const device float* table, kv_pairs tile, thread kv_pairs* at,
    thread kv_pairs* back, thread int* zero, int lane) {
  const int g = lane / 4;
  const int t = lane % 4;
  const int pair = KEYS ? g : t;
  constexpr int FOURIER = KIND == 2 || KIND == 4;
  bool empty = false;
  zero[0] = 0;
#if WITH_TRANSFORM
  if (KIND > 0) {
    uint any = 0u;
    if (KIND == 3) {
      kv_product<T, DIMS, KEYS>(x, table, tile, lane);
    } else {
      any = kv_transform<T, DIMS, FOURIER, KEYS>(x, table, tile, lane);
    }
    if (FOURIER) {
      any = KEYS ? any : simd_shuffle(any, ushort(kv_ranged<KEYS>(lane) / 2 * 4));
      empty = (any >> (KEYS ? t % 2 : g % 2) & 1u) == 0u;
    }
    const int entry = (KEYS ? t : g) * (KEYS ? 8 : 4) / (FOURIER ? 2 : 1);
    kv_places<DIMS>(tile, pair, entry, at);
    kv_places<DIMS>(tile, pair, (KEYS ? 12 : 14) ^ entry, back);
    zero[0] = kv_place<DIMS>(pair, (16 - entry) % 16);
    return empty;
  }
#endif
#pragma unroll
  for (int i = 0; i < 4; i++) {
    at[i] = back[i] = tile; // never read
  }
  return empty;
}

// Stores COUNT of the WORDS words of a lane, from word `first` on, a multiple of COUNT.
template <int WORDS, int COUNT>
inline void kv_put(device uint* out, const thread uint* words, int lane, int first) {
  constexpr int STEP = kv_vector(WORDS) < kv_vector(COUNT) ? kv_vector(WORDS) : kv_vector(COUNT);
#pragma unroll
  for (int m = 0; m < COUNT; m += STEP) {
    if (first + m < WORDS) {
      device uint* at = out + kv_word_at(first + m, lane, WORDS);
      if (STEP == 4) {
        uint4 four;
        four.x = words[m];
        four.y = words[m + 1 < COUNT ? m + 1 : m];
        four.z = words[m + 2 < COUNT ? m + 2 : m];
        four.w = words[m + 3 < COUNT ? m + 3 : m];
        *(device uint4*)at = four;
      } else if (STEP == 2) {
        uint2 two;
        two.x = words[m];
        two.y = words[m + 1 < COUNT ? m + 1 : m];
        *(device uint2*)at = two;
      } else {
        at[0] = words[m];
      }
    }
  }
}

// Loads a lane's values of block j as `kv_sixteen`, after the transform. KIND 4: times the scales of their
// channels, which are the last DIMS of the table (SRFT paper, section 7.1).
template <typename T, int DIMS, int KEYS, int KIND>
inline void kv_block(
    const device T* x, const device float* table, kv_pairs tile, const thread kv_pairs* at,
    const thread kv_pairs* back, int zero, int lane, int j, thread float* v) {
#if WITH_TRANSFORM
  constexpr int FOURIER = KIND == 2 || KIND == 4;
  if (KIND > 0 && KEYS) {
    kv_stored<DIMS, FOURIER, 8>(tile, at, back, zero, lane % 4, j, 0, v, v + 8);
  } else if (KIND > 0) {
    kv_stored<DIMS, FOURIER, 4>(tile, at, back, zero, lane / 4, j, 0, v, v + 4);
    kv_stored<DIMS, FOURIER, 4>(tile, at, back, zero, lane / 4, j, 4 * DIMS, v + 8, v + 12);
  }
  if (KIND == 4) {
    constexpr int COUNT = KEYS ? 8 : 4;
    const device float* scales = table + 3 * DIMS + 32 * j + COUNT * (KEYS ? lane % 4 : lane / 4);
    float of_dims[COUNT];
    kv_load<COUNT>(scales, of_dims);
#pragma unroll
    for (int s = 0; s < 16; s++) {
      v[s] *= of_dims[s % COUNT];
    }
  }
#endif
  if (KIND == 0) {
    kv_sixteen<T, DIMS, KEYS>(x, lane, j, v);
  }
}

#if WITH_CLIP
// The RANK-th largest absolute value of the token of `kv_ranged`. Two tokens at a time, to keep few lists
// in registers.
template <typename T, int DIMS, int KEYS, int KIND, int RANK>
inline float kv_limit(
    const device T* x, const device float* table, kv_pairs tile, thread kv_pairs* at,
    thread kv_pairs* back, int zero, int lane) {
  constexpr int N = kv_list(RANK);
  constexpr int BLOCKS = (DIMS + 31) / 32;
  constexpr int COUNT = KEYS ? 8 : 4; // dims of a lane in a block
  constexpr int CHUNKS = KV_ROOMY ? (BLOCKS * COUNT + N - 1) / N : 1;
  float lists[KEYS ? N : 2 * N];
#pragma unroll
  for (int half_ = 0; half_ < (KEYS ? 1 : 2); half_++) {
    thread float* one = lists + N * half_;
    float other[N];
#pragma unroll CHUNKS
    for (int first = 0; first < BLOCKS; first += N / COUNT) {
      float chunk[2 * N];
#pragma unroll
      for (int i = 0; i < N / COUNT; i++) {
        const int j = first + i;
        float some[16];
        if (j < BLOCKS) {
          kv_block<T, DIMS, KEYS, KIND>(x, table, tile, at, back, zero, lane, j, some);
        }
#pragma unroll
        for (int s = 0; s < COUNT; s++) {
          // Beyond the last dim: no larger than any value.
          const int dim = 32 * j + COUNT * (KEYS ? lane % 4 : lane / 4) + s;
          const bool there = DIMS % 32 == 0 ? j < BLOCKS : dim < DIMS;
          const int slot = 2 * COUNT * half_ + s;
          chunk[COUNT * i + s] = there ? metal::abs(some[slot]) : 0.0f;
          chunk[N + COUNT * i + s] = there ? metal::abs(some[slot + COUNT]) : 0.0f;
        }
      }
      kv_sort<N>(chunk);
      kv_sort<N>(chunk + N);
      if (first == 0) {
#pragma unroll
        for (int i = 0; i < N; i++) {
          one[i] = chunk[i];
          other[i] = chunk[N + i];
        }
      } else {
        kv_merge<N>(one, chunk);
        kv_merge<N>(other, chunk + N);
      }
    }
    kv_share<N>(one, other, lane, KEYS ? 1 : 4);
    if (!KV_ROOMY) {  // a compiler would merge both lists behind the next tokens, and keep them until then
      const int never = one[N - 1] < 0.0f;
      lane += never;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        at[i] += never;
        back[i] += never;
      }
    }
  }
  if (!KEYS) {
    kv_share<N>(lists, lists + (KEYS ? 0 : N), lane, 8);
  }
  return kv_ranked<RANK>(lists, KEYS ? 2 : 16);
}
#endif

// Loads a lane's values of block j as `kv_block`, clipped to the limits of their tokens if RANK is above 1.
template <typename T, int DIMS, int KEYS, int KIND, int RANK>
inline void kv_clipped(
    const device T* x, const device float* table, kv_pairs tile, const thread kv_pairs* at,
    const thread kv_pairs* back, int zero, const thread float* limits, int lane, int j,
    thread float* v) {
  kv_block<T, DIMS, KEYS, KIND>(x, table, tile, at, back, zero, lane, j, v);
  if (RANK > 1) {
#pragma unroll
    for (int s = 0; s < 16; s++) {
      const float limit = limits[KEYS ? s / 8 : s / 4];
      v[s] = metal::max(metal::min(v[s], limit), -limit);
    }
  }
}

// Encodes one side of a record by one simdgroup: x [16, DIMS] to codes and numbers at `out`.
// KIND: 0 no transform, 1 Hadamard, 2 real Fourier, 3 any matrix, 4 real Fourier and scales. RANK: a token is clipped to its RANK-th
// largest absolute value (`kv_limit`); 1 clips nothing.
template <typename T, int BITS, int DIMS, int GROUP, int SYMMETRIC, int KEYS, int KIND, int RANK>
inline void kv_quantize_side(
    const device T* x, const device float* table, kv_pairs tile, device uint* out, int lane) {
  constexpr int BLOCKS = (DIMS + 31) / 32;
  constexpr int GROUPS = (DIMS + GROUP - 1) / GROUP;
  constexpr int GROUP_BLOCKS = (GROUP + 31) / 32;
  constexpr int WORDS = kv_lane_words<BITS>(BLOCKS);
  constexpr int HELD = KEYS ? 2 : 4; // tokens of a lane: r, and half in the lowest bit of values'
  constexpr float LOWEST = SYMMETRIC ? 1.0f : 0.0f;
  constexpr float TOP = float((1 << BITS) - 1);
  constexpr float MIDDLE = float(1 << (BITS - 1));
  constexpr uint ZERO = 0x4B000000u; // 2^23
  const int g = lane / 4;
  int t = lane % 4;
  const int ranged = kv_ranged<KEYS>(lane);
  kv_pairs at[4];
  kv_pairs back[4];
  int found_zero[1];
  const bool empty = kv_transform<T, DIMS, KEYS, KIND>(x, table, tile, at, back, found_zero, lane);
  const int zero = found_zero[0];
  float limits[HELD];
#if WITH_CLIP
  if (RANK > 1) {
    const float limit =
        kv_limit<T, DIMS, KEYS, KIND, RANK>(x, table, tile, at, back, zero, lane);
#pragma unroll
    for (int n = 0; n < HELD; n++) {
      limits[n] = simd_shuffle(limit, ushort(KEYS ? 4 * g + n : 4 * n + t));
    }
    if (!KV_ROOMY) {  // a compiler would keep the values and lanes beside the lists, and not read them again
      simdgroup_barrier(mem_flags::mem_threadgroup);
      x += limit < 0.0f;  // never
      t += limit < 0.0f;
    }
  }
#endif
  // Words are stored with their groups: with two where 3 bits of two blocks share a word.
  constexpr int PAIRED = BITS == 3 && GROUP_BLOCKS % 2 == 1;
  constexpr int SPAN = PAIRED ? (KV_ROOMY ? GROUPS : 2) : 1;
  constexpr int COUNT = kv_lane_words<BITS>(SPAN * GROUP_BLOCKS);
  constexpr bool AGAIN = !KV_ROOMY && GROUP_BLOCKS > 4;  // blocks are read again: registers
  constexpr int PARTS = AGAIN ? GROUP_BLOCKS : 1;
  constexpr int TOGETHER = KV_ROOMY ? GROUPS : 1;
#pragma unroll TOGETHER
  for (int first = 0; first < GROUPS; first += SPAN) {
    uint code_words[COUNT];
#pragma unroll
    for (int m = 0; m < COUNT; m++) {
      code_words[m] = 0u;
    }
#pragma unroll
    for (int place = 0; place < SPAN; place++) {
      const int group = first + place;
      float v[16 * (AGAIN ? 1 : GROUP_BLOCKS)];
      float low[HELD]; // negated
      float high[HELD];
#pragma unroll
      for (int n = 0; n < HELD; n++) {
        low[n] = high[n] = -3.4e38f;
      }
#pragma unroll
      for (int i = 0; i < GROUP_BLOCKS; i++) {
        const int j = group * GROUP_BLOCKS + i;
        if (j < BLOCKS) {
          thread float* some = v + (AGAIN ? 0 : 16 * i);
          kv_clipped<T, DIMS, KEYS, KIND, RANK>(
              x, table, tile, at, back, zero, limits, lane, j, some);
#pragma unroll
          for (int s = 0; s < 16; s++) {
            const int n = KEYS ? s / 8 : s / 4;
            if (SYMMETRIC) {
              high[n] = metal::max(high[n], metal::abs(some[s]));
            } else {
              low[n] = metal::max(low[n], -some[s]);
              high[n] = metal::max(high[n], some[s]);
            }
          }
        }
      }
      const float found = kv_together<KEYS, 0>(high, lane);
      const float most = empty ? 0.0f : found;
      half scale;
      float start = 0.0f;
      uint bias_bits = 0u;
      if (SYMMETRIC) {
        const float span = kv_divide(most, MIDDLE - 1.0f, 1.0f / (MIDDLE - 1.0f));
        scale = half(metal::min(span, 65504.0f / MIDDLE));
        start = -MIDDLE * float(scale);
      } else {
        const float lowest = kv_together<KEYS, 0>(low, lane);
        const float least = empty ? 0.0f : -lowest;
        const half bias = half(metal::max(metal::min(least, 65504.0f), -65504.0f));
        start = float(bias);
        bias_bits = as_type<ushort>(bias);
        // Below 0 by no more than the rounding of the bias.
        scale = half(metal::min(kv_divide(most - start, TOP, 1.0f / TOP), 65504.0f));
      }
      float step = float(scale);
      if (!(step > 0.0f)) { // a group without a range: the middle or the lowest code
        step = 1.0f;
        start = SYMMETRIC ? -MIDDLE : start;
      }
      // A code, counted from the lowest, is value * inverse + offset. Untransformed values may lie on ties:
      // they are divided exactly, as plain ops do.
      const float inverse = KIND > 0 ? kv_inverse(step) * (1.0f / (TOP - LOWEST)) : 1.0f / step;
      const float offset = KIND > 0 ? -start * inverse : start;
      if (group < GROUPS && (KEYS ? t < 2 : g < 4)) {
        device ushort* numbers = (device ushort*)(out + 32 * WORDS);
        numbers[kv_number<KEYS>(ranged, group, 0, GROUPS, SYMMETRIC)] = as_type<ushort>(scale);
        if (!SYMMETRIC) {
          numbers[kv_number<KEYS>(ranged, group, 1, GROUPS, SYMMETRIC)] = ushort(bias_bits);
        }
      }
      if (AGAIN) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
      }
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        if (AGAIN && group * GROUP_BLOCKS + part < BLOCKS) {
          kv_clipped<T, DIMS, KEYS, KIND, RANK>(
              x, table, tile, at, back, zero, limits, lane, group * GROUP_BLOCKS + part, v);
        }
#pragma unroll
        for (int n = 0; n < HELD; n++) {
          const ushort from = ushort(KEYS ? 4 * g + n : 4 * n + t);
          const float one_inverse = simd_shuffle(inverse, from);
          // Abs-max codes are centred on the middle one, whatever the scale.
          const float one_offset = KIND > 0 && SYMMETRIC ? 0.5f : simd_shuffle(offset, from);
          const float one_step = KIND > 0 ? 0.0f : simd_shuffle(step, from);
#pragma unroll
          for (int s = 0; s < 16 / HELD * (GROUP_BLOCKS / PARTS); s++) {
            const int held = s / (16 / HELD);
            const int i = part + held;
            const int j = group * GROUP_BLOCKS + i;
            const int of = place * GROUP_BLOCKS + i;
            if (j < BLOCKS) {
              const int slot = n * (16 / HELD) + s % (16 / HELD);
              const int r = slot / 8;
              const int h = slot / 4 % 2;
              const int p = slot % 4;
              const int dim = KEYS ? 32 * j + 8 * t + 4 * h + p : 32 * j + 4 * g + p;
              // Adding 2^23 rounds half to even and leaves the integer in the last bits.
              float code = v[16 * held + slot];
              if (KIND > 0) {
                code = metal::saturate(metal::fma(code, one_inverse, one_offset));
                code = metal::fma(code, TOP - LOWEST, 8388608.0f + LOWEST);
              } else {
                code = kv_divide(code - one_offset, one_step, one_inverse);
                code = metal::max(metal::min(code, TOP), LOWEST) + 8388608.0f;
              }
              const uint bits = DIMS % 32 == 0 || dim < DIMS ? as_type<uint>(code) : ZERO;
              const int shift = kv_slot_bit<BITS>(r, p, h);
              if (BITS == 3) {
                code_words[kv_slot_word<BITS>(of, r, p)] += (bits & 3u) << shift;
                code_words[kv_high_word(of)] += (bits >> 2 & 1u) << kv_high_bit(of, r, p, h);
              } else {
                code_words[kv_slot_word<BITS>(of, r, p)] += (bits << shift) - (ZERO << shift);
              }
            }
          }
        }
      }
    }
    kv_put<WORDS, COUNT>(out, code_words, lane, first / SPAN * COUNT);
  }
}
