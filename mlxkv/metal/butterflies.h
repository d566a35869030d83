// Wide loads, and the transforms with a fast form: butterflies in registers, twice over a tile of
// threadgroup memory. A tile holds 16 tokens of N = DIMS / 2 pairs, z[n] = (x[2 n], x[2 n + 1]).

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
  constexpr int R2 = N < 64 ? 8 : 16;
  constexpr int R1 = N / R2;
  const int part = lane % 4;
  const device float2* circle = (const device float2*)(table + DIMS);
#pragma unroll 1
  for (int r = 0; r < 2; r++) {
    const int token = lane / 4 + 8 * r;
    const device T* row = x + token * DIMS;
#pragma unroll 1
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
  constexpr int R2 = N < 64 ? 8 : 16;
  constexpr int R1 = N / R2;
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
