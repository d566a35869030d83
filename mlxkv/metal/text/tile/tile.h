// Helpers of bodies that multiply tiles, for every lane map. Comes after tile_*.h and codes.h.

#ifndef KV_STAGE // cuda.h has its own
typedef const threadgroup uint* kv_words;
typedef const threadgroup uint4* kv_quads;
typedef threadgroup float* kv_floats;
#endif

// k-tile n of the queries: of registers, or (POOLED) of threadgroup memory, where a lane has four words a block.
template <int POOLED>
inline TileB kv_query(const thread TileB* held, kv_quads pool, int n, int lane) {
  if (!POOLED) {
    return held[n];
  }
  const uint4 x = pool[32 * (n / 2) + lane];
  TileB q;
  q.w[0] = n % 2 ? x.z : x.x;
  q.w[1] = n % 2 ? x.w : x.y;
  return q;
}

// kv_pair puts the bits of a code below a leading one, one instruction for two codes: the half reads as
// code + kv_offset, and sums are corrected for the offsets.
template <int BITS>
constexpr float kv_offset(int p) {
  return BITS == 8 ? 1024.0f
      : BITS == 4  ? (p % 2 ? 64.0f : 1024.0f)
                   : (p == 0 ? 1024.0f : p == 1 ? 256.0f : p == 2 ? 64.0f : 16.0f);
}

template <int BITS>
constexpr uint kv_mask(int p) {
  return BITS == 8 ? 0x00FF00FFu : BITS == 4 ? 0x000F000Fu << (4 * (p % 2)) : 0x00030003u << (2 * p);
}

// The codes of slots (r, p, half 0) and (r, p, half 1) of block j as two halves. The masks are inputs where registers
// hold them: a compiler would build constants again in every round of a loop.
template <int BITS>
inline uint kv_pair(uint word, uint high, const thread uint* masks, int j, int r, int p) {
  if (BITS == 8) {
    return ((word >> (8 * (p % 2))) & masks[0]) | 0x64006400u;
  }
  if (BITS == 4) {
    const uint x = p >= 2 ? word >> 8 : word;
    return p % 2 ? (x & masks[1]) | 0x54005400u : (x & masks[0]) | 0x64006400u;
  }
  uint x = ((r ? word >> 8 : word) & masks[p]) | (0x64006400u - uint(p) * 0x08000800u);
  if (BITS == 3) {
    const int from = kv_high_bit(j, r, p, 0);
    const int to = 2 * p + 2;
    const uint moved = from >= to ? high >> metal::max(from - to, 0) : high << metal::max(to - from, 0);
    x |= moved & (0x00040004u << (2 * p));
  }
  return x;
}

// Loads WORDS words of a record by the widest loads; the vectors of LANES lanes alternate.
template <int WORDS, int LANES>
inline void kv_read_words(thread uint* to, KvRecord from, int first) {
  constexpr int V = kv_vector(WORDS);
#pragma unroll
  for (int m = 0; m < WORDS; m += V) {
    if (V == 4) {
      const uint4 x = kv_read4(from, first + m * LANES);
      to[m] = x.x;
      to[m + 1 % V] = x.y;
      to[m + 2 % V] = x.z;
      to[m + 3 % V] = x.w;
    } else if (V == 2) {
      const uint2 x = kv_read2(from, first + m * LANES);
      to[m] = x.x;
      to[m + 1 % V] = x.y;
    } else {
      to[m] = kv_read1(from, first + m * LANES);
    }
  }
}

// The same as blocks need them (SOME): the words of block j and of those that share a load with it, once.
template <int BLOCKS, int WORDS, int SOME>
inline void kv_read_some(thread uint* to, KvRecord from, int j) {
  constexpr int V = kv_vector(WORDS);
  constexpr int EACH = WORDS % (BLOCKS * V) == 0 ? 1
      : WORDS * 2 % (BLOCKS * V) == 0            ? 2
      : WORDS * 4 % (BLOCKS * V) == 0            ? 4
                                                 : BLOCKS;
  constexpr int MANY = EACH * WORDS / BLOCKS;
  if (SOME && j % EACH == 0) {
    kv_read_words<MANY, 32>(to + j / EACH * MANY, from, j / EACH * MANY * 32);
  }
}

// c tanh(s / c), of scores s and a cap c in base-2 exponents.
inline float kv_capped(float s, float cap) {
  const float e = metal::fast::exp2(s * (2.88539008f / cap));
  return cap - 2.0f * cap / (e + 1.0f);
}

// The middle of the codes, a whole number. Values are centred on it before products: their sums run over many
// tokens, and matrix units truncate below the last bit of a sum.
template <int BITS>
constexpr float kv_middle() {
  return float(1 << (BITS - 1));
}

template <int BITS>
inline uint kv_centred_pair(uint word, uint high, const thread uint* masks, int j, int r, int p) {
  const float shift = -kv_offset<BITS>(p) - kv_middle<BITS>();
  return kv_add_halves(kv_pair<BITS>(word, high, masks, j, r, p), kv_halves(shift, shift));
}

#if WITH_PER_TOKEN
// Numbers of the keys as a left factor: tokens g and g + 8, slots 8 m + 2 t and the next of SLOTS
// (scales of all groups, biases of all groups), twice.
template <int SLOTS>
inline TileA kv_read_slots(KvRecord from, int first, int m, int g, int t) {
  TileA a;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int slot = 8 * m + 2 * t;
    uint x = 0u;
    if (SLOTS % 2 == 0) {
      if (slot < SLOTS) {
        x = kv_read1(from, first + ((2 * g + r) * SLOTS + slot) / 2);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int at = (2 * g + r) * SLOTS + slot + i;
        if (slot + i < SLOTS) {
          const uint word = kv_read1(from, first + at / 2);
          x |= (at % 2 ? word >> 16 : word & 0xFFFFu) << (16 * i);
        }
      }
    }
    a.w[r] = x;
    a.w[2 + r] = x;
  }
  return a;
}
#endif

inline float kv_half(uint word, int high) {
  const half2 pair = as_type<half2>(word);
  return high ? float(pair.y) : float(pair.x);
}

// Two neighbours of a 16-bit model type, as halves. bfloat16 beyond their range saturates.
template <int BF16>
inline float kv_low(uint word) {
  return BF16 ? metal::max(metal::min(as_type<float>(word << 16), 65504.0f), -65504.0f)
              : kv_half(word, 0);
}
template <int BF16>
inline float kv_high(uint word) {
  return BF16 ? metal::max(metal::min(as_type<float>(word & 0xFFFF0000u), 65504.0f), -65504.0f)
              : kv_half(word, 1);
}

// Turns scores of M times 16 tokens and 8 queries, in units of 1 / unit, into probabilities, as right factors of
// the next products. The running maximum is raised only when exceeded by 2^4; the N tiles of o are then
// rescaled.
constant constexpr float KV_SCORE = 32.0f;  // keeps scaled queries in the range of a half
template <int N, int M>
inline void kv_probabilities(
    thread TileC* s, thread TileB* p, thread float* top, thread float* sum, thread TileC* o,
    float unit) {
  TileC above[M];
  bool exceeds = false;
#pragma unroll
  for (int m = 0; m < M; m++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      above[m].v[i] = metal::fma(s[m].v[i], unit, -top[i % 2]);
      exceeds = exceeds | (above[m].v[i] > 4.0f);
    }
  }
  if (simd_any(exceeds)) {
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float peak = metal::max(s[0].v[i], s[0].v[2 + i]);
#pragma unroll
      for (int m = 1; m < M; m++) {
        peak = metal::max(peak, metal::max(s[m].v[i], s[m].v[2 + i]));
      }
      peak = metal::max(tile_column_max(peak) * unit, top[i]);
      shrink[i] = metal::fast::exp2(top[i] - peak);
      top[i] = peak;
      sum[i] *= shrink[i];
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        above[m].v[i] = metal::fma(s[m].v[i], unit, -top[i % 2]);
      }
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        o[n].v[i] *= shrink[i % 2];
      }
    }
  }
#pragma unroll
  for (int m = 0; m < M; m++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      above[m].v[i] = metal::fast::exp2(above[m].v[i]);
      sum[i % 2] += above[m].v[i];
    }
    p[m] = tile_b_of(above[m]);
  }
}
