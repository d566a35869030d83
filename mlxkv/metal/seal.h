// What sealing needs beside codes.h: loads of four, butterflies in registers, one side of a record.
// A tile holds 16 tokens of DIMS floats, or DIMS / 2 = N pairs: z[n] = (x[2 n], x[2 n + 1]).

#ifndef KV_PAIRS // cuda.h has its own
typedef threadgroup float2* kv_pairs;
#endif

template <typename T>
inline float kv_half_word(uint word, int high) {
  return float(as_type<T>(ushort(high ? word >> 16 : word & 0xFFFFu)));
}

// COUNT values, 4 or 8, by wide loads: `from` stands at a multiple of COUNT.
template <int COUNT, typename T>
inline void kv_load(const device T* from, thread float* v) {
  uint words[4];
  if (COUNT == 8) {
    const uint4 four = *(const device uint4*)from;
    words[0] = four.x;
    words[1] = four.y;
    words[2] = four.z;
    words[3] = four.w;
  } else {
    const uint2 two = *(const device uint2*)from;
    words[0] = two.x;
    words[1] = two.y;
  }
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    v[i] = kv_half_word<T>(words[i / 2], i % 2);
  }
}

template <int COUNT>
inline void kv_load(const device float* from, thread float* v) {
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    const float4 four = *(const device float4*)(from + i);
    v[i] = four.x;
    v[i + 1] = four.y;
    v[i + 2] = four.z;
    v[i + 3] = four.w;
  }
}

// a / b, correctly rounded, from the rounded 1 / b.
inline float kv_divide(float a, float b, float inverse) {
  const float q = a * inverse;
  return metal::fma(metal::fma(-q, b, a), inverse, q);
}

// The bits of i < R <= 16 in reverse.
template <int R>
constexpr int kv_reversed(int i) {
  return (i % 2 * 8 + i / 2 % 2 * 4 + i / 4 % 2 * 2 + i / 8) / (16 / R);
}

// R-point transform in registers, R <= 16; entry c of Fourier's comes out at kv_reversed(c).
template <int R, int FOURIER>
inline void kv_butterflies(thread float* re, thread float* im) {
#pragma unroll
  for (int stage = 0; (R >> stage) > 1; stage++) {
    const int span = R >> (stage + 1);
#pragma unroll
    for (int i = 0; i < R / 2; i++) {
      const int low = i / span * 2 * span + i % span;
      const int high = low + span;
      const int turn = FOURIER ? i % span * (8 / span) : 0; // sixteenths of a circle
      const float x = re[low] - re[high];
      const float y = im[low] - im[high];
      re[low] += re[high];
      im[low] += im[high];
      if (turn == 0) {
        re[high] = x;
        im[high] = y;
      } else if (turn == 4) {
        re[high] = y;
        im[high] = -x;
      } else if (turn % 4 == 2) {
        const float sum = (x + y) * 0.70710678118654752f;
        const float difference = (y - x) * 0.70710678118654752f;
        re[high] = turn == 2 ? sum : difference;
        im[high] = turn == 2 ? difference : -sum;
      } else {
        const float large = 0.92387953251128676f;
        const float small = 0.38268343236508977f;
        const float c = turn == 1 ? large : turn == 3 ? small : turn == 5 ? -small : -large;
        const float s = turn == 1 || turn == 7 ? small : large;
        re[high] = x * c + y * s;
        im[high] = y * c - x * s;
      }
    }
  }
}

// Where pair k of a token lies: moved within 16 pairs, so that the lanes of every access below meet
// different banks. Linear in the bits: where k = a + b without a common bit, it is
// kv_pair_at(a, token) ^ kv_pair_at(b, 0), which leaves one operation to an access.
template <int DIMS, int R1>
constexpr int kv_pair_at(int k, int token) {
  return token * (DIMS / 2) + (k ^ (((k >> 2) ^ (k / (2 * R1))) & 3) ^
      (((token ^ (token >> 2)) & 3) << 2));
}

// Pairs of 16 tokens -> their N-point transform, in the tile: N = R1 R2, n = a + R2 b, entry (c, d)
// at pair R1 d + c. table: DIMS signs with the norm, then DIMS (cos, -sin) of the circle.
template <typename T, int DIMS, int FOURIER>
inline void kv_transform(
    const device T* x, const device float* table, kv_pairs tile, int lane) {
  constexpr int N = DIMS / 2;
  constexpr int R1 = N / 8 < 16 ? N / 8 : 16;
  constexpr int R2 = N / R1;
  const int part = lane % 4;
  const device float2* circle = (const device float2*)(table + DIMS);
#pragma unroll 1
  for (int r = 0; r < 2; r++) {
    const int token = lane / 4 + 8 * r;
    const device T* row = x + token * DIMS;
    for (int first = 2 * part; first < R2; first += 8) {
      const int own = kv_pair_at<DIMS, R1>(first * R1, token);
      float re[2 * R1];
      float im[2 * R1];
#pragma unroll
      for (int b = 0; b < R1; b++) {
        float v[4];
        float sign[4];
        kv_load<4>(row + 2 * (first + R2 * b), v);
        kv_load<4>(table + 2 * (first + R2 * b), sign);
        re[b] = v[0] * sign[0];
        im[b] = v[1] * sign[1];
        re[b + R1] = v[2] * sign[2];
        im[b + R1] = v[3] * sign[3];
      }
#pragma unroll
      for (int s = 0; s < 2; s++) {
        kv_butterflies<R1, FOURIER>(re + s * R1, im + s * R1);
#pragma unroll
        for (int c = 0; c < R1; c++) {
          const int at = own ^ kv_pair_at<DIMS, R1>(s * R1 + c, 0);
          float2 z;
          z.x = re[s * R1 + (FOURIER ? kv_reversed<R1>(c) : c)];
          z.y = im[s * R1 + (FOURIER ? kv_reversed<R1>(c) : c)];
          if (FOURIER && c > 0) {
            const float2 w = circle[2 * (first + s) * c];
            const float real = z.x * w.x - z.y * w.y;
            z.y = z.x * w.y + z.y * w.x;
            z.x = real;
          }
          tile[at] = z;
        }
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
  for (int r = 0; r < 2; r++) {
    const int token = lane / 4 + 8 * r;
#pragma unroll 1
    for (int c = part; c < R1; c += 4) {
      const int own = kv_pair_at<DIMS, R1>(c, token);
      float re[R2];
      float im[R2];
#pragma unroll
      for (int a = 0; a < R2; a++) {
        const float2 z = tile[own ^ kv_pair_at<DIMS, R1>(a * R1, 0)];
        re[a] = z.x;
        im[a] = z.y;
      }
      kv_butterflies<R2, FOURIER>(re, im);
#pragma unroll
      for (int d = 0; d < R2; d++) {
        float2 z;
        z.x = re[FOURIER ? kv_reversed<R2>(d) : d];
        z.y = im[FOURIER ? kv_reversed<R2>(d) : d];
        tile[own ^ kv_pair_at<DIMS, R1>(d * R1, 0)] = z;
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Stored dims 2 k and 2 k + 1 of a token, k = first + 16 j + i, first < 16 the lane's. Fourier: bin
// k of the real spectrum from bins k and -k of the pairs', (DC, Nyquist) at 0. Hadamard: the last
// butterfly.
template <int DIMS, int FOURIER>
inline float2 kv_stored_pair(
    const device float* table, kv_pairs tile, int token, int first, int j, int i) {
  constexpr int N = DIMS / 2;
  constexpr int R1 = N / 8 < 16 ? N / 8 : 16;
  constexpr int R2 = N / R1;
  const int k = 16 * j + i;
  float2 out;
  if (FOURIER) {
    const float2 z = tile[kv_pair_at<DIMS, R1>(first, token) ^ kv_pair_at<DIMS, R1>(k, 0)];
    // -k: all bits of k - 1 turned over; where i = 0 borrows, 16 - first and the next sixteen.
    int back = i == 0 ? kv_pair_at<DIMS, R1>((16 - first) % 16, token)
                      : kv_pair_at<DIMS, R1>(first, token) ^ kv_pair_at<DIMS, R1>(N - k, 0);
    if (i == 0) {
      back ^= first == 0 ? kv_pair_at<DIMS, R1>((N - k) % N, 0)
                         : kv_pair_at<DIMS, R1>(N - k - 16, 0);
    }
    const float2 y = tile[back];
    const float2 w = ((const device float2*)(table + DIMS))[first + k];
    const float sum = z.y + y.y;
    const float difference = z.x - y.x;
    out.x = metal::fma(difference, w.y, metal::fma(sum, w.x, z.x + y.x));
    out.y = metal::fma(-difference, w.x, metal::fma(sum, w.y, z.y - y.y));
    if (k == 0 && first == 0) {
      out.x = (z.x + z.y) * 1.41421356237309505f;
      out.y = (z.x - z.y) * 1.41421356237309505f;
    }
  } else {
    const float2 z = tile[kv_pair_at<DIMS, R1>(first % R2 * R1 + first / R2, token) ^
                          kv_pair_at<DIMS, R1>(k % R2 * R1 + k / R2, 0)];
    out.x = z.x + z.y;
    out.y = z.x - z.y;
  }
  return out;
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
    uint scale_word = 0u;
    uint bias_word = 0u;
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
      // A word of numbers: both halves r of a token of the keys, two tokens of the values.
      if (KEYS) {
        scale_word |= scale_bits[0] << (16 * r);
        bias_word |= SYMMETRIC ? 0u : bias_bits[0] << (16 * r);
      } else {
        scale_word = scale_bits[0] | scale_bits[RANGES - 1] << 16;
        bias_word = SYMMETRIC ? 0u : bias_bits[0] | bias_bits[RANGES - 1] << 16;
      }
      const int token = KEYS ? g : 2 * t + 8 * r;
      if (KEYS ? r == 1 && t == 0 : g == 0) {
        out[32 * WORDS + kv_number<KEYS>(token, group, 0, GROUPS, SYMMETRIC) / 2] = scale_word;
        if (!SYMMETRIC) {
          out[32 * WORDS + kv_number<KEYS>(token, group, 1, GROUPS, SYMMETRIC) / 2] = bias_word;
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
