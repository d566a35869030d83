// Transforms: fast ones by butterflies in registers, in two passes over a tile of threadgroup memory; others
// as a product. A tile holds 8 pairs of tokens, z[n] = (x of one, x of the other)[n], whose spectra are
// separated by additions. Keys: tokens q and q + 8; values: 2 q and 2 q + 1, since one lane stores both
// (codes.h). Rounding leaves 1e-7 of the other token in each, so tokens of zeros are detected apart.

#if WITH_TRANSFORM
// The bits of i < R <= 32 in reverse.
template <int R>
constexpr int kv_reversed(int i) {
  return (i % 2 * 16 + i / 2 % 2 * 8 + i / 4 % 2 * 4 + i / 8 % 2 * 2 + i / 16) / (32 / R);
}

// The cosine of `angle` 32nds of a circle: 0 to 8, and -16 to 16.
constexpr float kv_cosine_of_quarter(int angle) {
  return angle == 0 ? 1.0f
      : angle == 1  ? 0.98078528040323044f
      : angle == 2  ? 0.92387953251128676f
      : angle == 3  ? 0.83146961230254524f
      : angle == 4  ? 0.70710678118654752f
      : angle == 5  ? 0.55557023301960222f
      : angle == 6  ? 0.38268343236508977f
      : angle == 7  ? 0.19509032201612827f
                   : 0.0f;
}

constexpr float kv_cosine(int angle) {
  return angle < -8 ? -kv_cosine_of_quarter(16 + angle)
      : angle < 0   ? kv_cosine_of_quarter(-angle)
      : angle <= 8  ? kv_cosine_of_quarter(angle)
                   : -kv_cosine_of_quarter(16 - angle);
}

// R-point transform in registers, R <= 32; entry c of the Fourier transform ends at kv_reversed(c).
template <int R, int FOURIER>
inline void kv_butterflies(thread float* re, thread float* im) {
#pragma unroll
  for (int stage = 0; (R >> stage) > 1; stage++) {
    const int span = R >> (stage + 1);
#pragma unroll
    for (int i = 0; i < R / 2; i++) {
      const int low = i / span * 2 * span + i % span;
      const int high = low + span;
      const int angle = FOURIER ? i % span * (16 / span) : 0; // 32nds of a circle
      const float x = re[low] - re[high];
      const float y = im[low] - im[high];
      re[low] += re[high];
      im[low] += im[high];
      if (angle == 0) {
        re[high] = x;
        im[high] = y;
      } else if (angle == 8) {
        re[high] = y;
        im[high] = -x;
      } else if (angle % 8 == 4) {
        const float sum = (x + y) * 0.70710678118654752f;
        const float difference = (y - x) * 0.70710678118654752f;
        re[high] = angle == 4 ? sum : difference;
        im[high] = angle == 4 ? difference : -sum;
      } else {
        const float c = kv_cosine(angle);
        const float s = kv_cosine(angle - 8);
        re[high] = x * c + y * s;
        im[high] = y * c - x * s;
      }
    }
  }
}

// Place of entry k of pair q. In every access below a half simdgroup, 4 pairs and 2 neighbouring bits of k,
// meets each of the 16 banks of float2 once. Linear in the bits: for k = a + b without a common bit it is
// kv_place(q, a) ^ kv_place(0, b), and apart from bits 4 and 8 these two have no common bit either.
template <int DIMS>
constexpr int kv_place(int q, int k) {
  return (q & 3) + (((k ^ (k >> 2) ^ (k >> 4) ^ (k >> 6) ^ (k >> 8)) & 3) << 2) +
      ((k >> 2) << 4) + (q >> 2) * 4 * DIMS;
}

// So four places serve all b: the rest of b is a constant distance from one of them.
template <int DIMS>
inline void kv_places(kv_pairs tile, int q, int k, thread kv_pairs* at) {
  const int own = kv_place<DIMS>(q, k);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    at[i] = tile + (own ^ (4 * i));
  }
}

template <int DIMS>
inline float2 kv_get(const thread kv_pairs* at, int k, int further = 0) {
  const int place = kv_place<DIMS>(0, k);
  return at[place / 4 % 4][(place & ~15) + further];
}

template <int DIMS>
inline void kv_put(const thread kv_pairs* at, int k, float2 z) {
  const int place = kv_place<DIMS>(0, k);
  at[place / 4 % 4][place & ~15] = z;
}

// Transforms 16 tokens, as pairs, into the tile: DIMS points, DIMS = R1 R2, n = a + R2 b. Entry (d, c) of the
// Fourier transform is R1 d + c and replaces entry (a, c) in its place, of Hadamard's it is d + R2 c.
// table: DIMS signs times the norm, then DIMS (cos, -sin) of the circle, then scales (`kv_block`).
// Returns, for pair lane / 4, bit 0 if the first token is not all zeros, bit 1 if the second is not.
template <typename T, int DIMS, int FOURIER, int KEYS>
inline uint kv_transform(
    const device T* x, const device float* table, kv_pairs tile, int lane) {
  constexpr int R2 = DIMS == 64 ? 8 : DIMS == 512 ? 32 : 16;
  constexpr int R1 = DIMS / R2;
  constexpr int COLUMNS = DIMS == 128 ? 4 : 2; // read at a time
  constexpr int WORDS = COLUMNS * int(sizeof(T)) / 4;
  constexpr int STEP1 = FOURIER ? 1 : R2; // from entry (a, c) to (a, c + 1)
  constexpr int STEP2 = FOURIER ? R1 : 1; // and to (a + 1, c)
  const int q = lane / 4;
  const int part = lane % 4;
  const device float2* circle = (const device float2*)(table + DIMS);
  constexpr uint ANY = sizeof(T) == 4 ? 0x7FFFFFFFu : 0x7FFF7FFFu;
  uint any_one = 0u;
  uint any_other = 0u;
  const device T* row = x + (KEYS ? q : 2 * q) * DIMS;
#pragma unroll 1
  for (int first = COLUMNS * part; first < R2; first += 4 * COLUMNS) {
    uint one[R1 * WORDS];
    uint other[R1 * WORDS];
    uint sign[R1 * COLUMNS];
#pragma unroll
    for (int b = 0; b < R1; b++) {
      kv_load_words<WORDS>(row + first + R2 * b, one + WORDS * b);
      kv_load_words<WORDS>(row + (KEYS ? 8 : 1) * DIMS + first + R2 * b, other + WORDS * b);
      kv_load_words<COLUMNS>(table + first + R2 * b, sign + COLUMNS * b);
    }
#pragma unroll
    for (int i = 0; i < R1 * WORDS; i++) {
      any_one |= one[i];
      any_other |= other[i];
    }
    kv_pairs at[4];
    kv_places<DIMS>(tile, q, first * STEP2, at);
#pragma unroll
    for (int s = 0; s < COLUMNS; s++) {
      float re[R1];
      float im[R1];
#pragma unroll
      for (int b = 0; b < R1; b++) {
        const float factor = as_type<float>(sign[COLUMNS * b + s]);
        re[b] = kv_value<T>(one + WORDS * b, s) * factor;
        im[b] = kv_value<T>(other + WORDS * b, s) * factor;
      }
      kv_butterflies<R1, FOURIER>(re, im);
#pragma unroll
      for (int c = 0; c < R1; c++) {
        float2 z;
        z.x = re[FOURIER ? kv_reversed<R1>(c) : c];
        z.y = im[FOURIER ? kv_reversed<R1>(c) : c];
        if (FOURIER && c > 0) {
          const float2 w = circle[first * c + s * c];
          const float real = z.x * w.x - z.y * w.y;
          z.y = z.x * w.y + z.y * w.x;
          z.x = real;
        }
        kv_put<DIMS>(at, s * STEP2 + c * STEP1, z);
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
  for (int c = part; c < R1; c += 4) {
    kv_pairs at[4];
    kv_places<DIMS>(tile, q, c * STEP1, at);
    float re[R2];
    float im[R2];
#pragma unroll
    for (int a = 0; a < R2; a++) {
      const float2 z = kv_get<DIMS>(at, a * STEP2);
      re[a] = z.x;
      im[a] = z.y;
    }
    kv_butterflies<R2, FOURIER>(re, im);
#pragma unroll
    for (int d = 0; d < R2; d++) {
      float2 z;
      z.x = re[FOURIER ? kv_reversed<R2>(d) : d];
      z.y = im[FOURIER ? kv_reversed<R2>(d) : d];
      kv_put<DIMS>(at, d * STEP2, z);
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  uint any = ((any_one & ANY) != 0u ? 1u : 0u) | ((any_other & ANY) != 0u ? 2u : 0u);
  any |= simd_shuffle_xor(any, ushort(1));
  any |= simd_shuffle_xor(any, ushort(2));
  return any;
}

// Multiplies 16 tokens by a matrix [DIMS, DIMS], into the tile as `kv_transform`. A lane computes COLUMNS
// columns of all tokens at a time, so all lanes read the same values at once.
template <typename T, int DIMS, int KEYS>
inline void kv_product(const device T* x, const device float* matrix, kv_pairs tile, int lane) {
  constexpr int COLUMNS = DIMS % 64 == 0 ? 2 : 1;
#pragma unroll 1
  for (int first = lane; first < DIMS; first += 32 * COLUMNS) {
    float one[8 * COLUMNS];
    float other[8 * COLUMNS];
#pragma unroll
    for (int i = 0; i < 8 * COLUMNS; i++) {
      one[i] = other[i] = 0.0f;
    }
#pragma unroll 1
    for (int d = 0; d < DIMS; d += 4) {
      float row[4 * COLUMNS];
#pragma unroll
      for (int i = 0; i < 4 * COLUMNS; i++) {
        row[i] = matrix[(d + i / COLUMNS) * DIMS + first + i % COLUMNS * 32];
      }
#pragma unroll
      for (int q = 0; q < 8; q++) {
        float left[4];
        float right[4];
        kv_load<4>(x + (KEYS ? q : 2 * q) * DIMS + d, left);
        kv_load<4>(x + (KEYS ? q + 8 : 2 * q + 1) * DIMS + d, right);
#pragma unroll
        for (int i = 0; i < 4 * COLUMNS; i++) {
          const int at = COLUMNS * q + i % COLUMNS;
          one[at] = metal::fma(left[i / COLUMNS], row[i], one[at]);
          other[at] = metal::fma(right[i / COLUMNS], row[i], other[at]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 8 * COLUMNS; i++) {
      float2 z;
      z.x = one[i];
      z.y = other[i];
      tile[kv_place<DIMS>(i / COLUMNS, first + i % COLUMNS * 32)] = z;
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Reads COUNT stored dims (4 or 8) of both tokens of a pair, from dim 32 j + COUNT u on, u the lane's.
// at, back: the `kv_places` of the lane (`kv_transform`).
// Fourier: bins k of the two real spectra from bins k and -k of the pair, (DC, Nyquist) at 0.
template <int DIMS, int FOURIER, int COUNT>
inline void kv_stored(
    kv_pairs tile, const thread kv_pairs* at, const thread kv_pairs* back, int zero, int u, int j,
    int further, thread float* one, thread float* other) {
#pragma unroll
  for (int i = 0; i < COUNT; i += 2) {
    float2 z;
    float2 y;
    if (FOURIER) {
      const int k = 16 * j + i / 2;
      z = kv_get<DIMS>(at, k, further);
      if (i == 0) {
        // The subtraction -k borrows. Entry 0 has no partner: it pairs with Nyquist's, the middle.
        const int place = zero ^ (u == 0 ? kv_place<DIMS>(0, j == 0 ? DIMS / 2 : DIMS - k)
                                         : kv_place<DIMS>(0, DIMS - 16 - k));
        y = tile[place + further];
      } else {
        y = kv_get<DIMS>(back, (DIMS - k) & ~(16 - COUNT / 2), further);
      }
      one[i] = z.x + y.x;
      one[i + 1] = z.y - y.y;
      other[i] = z.y + y.y;
      other[i + 1] = y.x - z.x;
      if (k == 0 && u == 0) {
        one[i] = z.x * 1.41421356237309505f;
        one[i + 1] = y.x * 1.41421356237309505f;
        other[i] = z.y * 1.41421356237309505f;
        other[i + 1] = y.y * 1.41421356237309505f;
      }
    } else {
      z = kv_get<DIMS>(at, 32 * j + i, further);
      y = kv_get<DIMS>(at, 32 * j + i + 1, further);
      one[i] = z.x;
      one[i + 1] = y.x;
      other[i] = z.y;
      other[i + 1] = y.y;
    }
  }
}
#endif
