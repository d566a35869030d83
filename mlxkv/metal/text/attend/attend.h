// Pieces of attend. A lane owns one of 32 tokens where scores become probabilities: token `lane` of two records.

#ifndef KV_STAGE // cuda.h has its own
typedef const threadgroup uint4* kv_quads;
typedef threadgroup float* kv_floats;
typedef threadgroup half* kv_shared_halves;
typedef const threadgroup half4* kv_half_fours;
typedef threadgroup float4* kv_four;
typedef threadgroup float2* kv_two;
#endif

// COUNT floats to and from threadgroup memory at a multiple of COUNT, by the widest loads that this allows: the
// memory as vectors, since a compiler knows no more of what a pointer is a multiple of than its type says.
template <int COUNT>
inline void kv_store_shared(kv_four memory, uint at, const thread float* x) {
  if (COUNT % 4 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++) {
      memory[at * uint(COUNT / 4) + uint(i)] = float4{x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
    }
  } else if (COUNT % 2 == 0) {
    const kv_two twos = (kv_two)memory;
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
      twos[at * uint(COUNT / 2) + uint(i)] = float2{x[2 * i], x[2 * i + 1]};
    }
  } else {
    const kv_floats ones = (kv_floats)memory;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      ones[at * uint(COUNT) + uint(i)] = x[i];
    }
  }
}

template <int COUNT>
inline void kv_load_shared(kv_four memory, uint at, thread float* x) {
  if (COUNT % 4 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++) {
      const float4 four = memory[at * uint(COUNT / 4) + uint(i)];
      x[4 * i] = four.x;
      x[4 * i + 1] = four.y;
      x[4 * i + 2] = four.z;
      x[4 * i + 3] = four.w;
    }
  } else if (COUNT % 2 == 0) {
    const kv_two twos = (kv_two)memory;
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
      const float2 two = twos[at * uint(COUNT / 2) + uint(i)];
      x[2 * i] = two.x;
      x[2 * i + 1] = two.y;
    }
  } else {
    const kv_floats ones = (kv_floats)memory;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      x[i] = ones[at * uint(COUNT) + uint(i)];
    }
  }
}

// Queries in threadgroup memory: halves, or floats where outputs are floats.
template <int WIDE>
struct KvQuery {
  typedef half type;
  typedef kv_shared_halves pointer;
};
template <>
struct KvQuery<1> {
  typedef float type;
  typedef kv_floats pointer;
};

// Place of query `at` + i, at a multiple of four: of eight dims 0, 1, 4, 5, 2, 3, 6, 7, as codes lie in words.
inline uint kv_query_place(uint at, int i) {
  const uint place = at + uint(i);
  return (place & ~7u) + 2u * (place & 2u) + (place & 4u) / 2u + (place & 1u);
}

// Four queries, from four `at` on.
template <int WIDE>
inline void kv_four_queries(kv_quads queries, uint at, thread float* q) {
  if (WIDE) {
    const uint4 four = queries[at];
    q[0] = as_type<float>(four.x);
    q[1] = as_type<float>(four.y);
    q[2] = as_type<float>(four.z);
    q[3] = as_type<float>(four.w);
  } else {
    const half4 four = ((kv_half_fours)queries)[at];
    q[0] = float(four.x);
    q[1] = float(four.y);
    q[2] = float(four.z);
    q[3] = float(four.w);
  }
}

// Codes of slots (r, p, half 0 and 1) of block j as halves, larger by `kv_code_offset`: a code is placed in the
// mantissa of a half where it stands in its word, so that most need no shift.
template <int BITS>
inline uint kv_code_halves(uint word, uint high, int j, int r, int p) {
  if (BITS == 8) {
    return ((p % 2 ? word >> 8 : word) & 0x00FF00FFu) | 0x64006400u;
  }
  if (BITS == 4) {
    const uint x = p < 2 ? word : word >> 8;
    return p % 2 ? (x & 0x00F000F0u) | 0x54005400u : (x & 0x000F000Fu) | 0x64006400u;
  }
  const uint x = ((r ? word >> 8 : word) & (0x00030003u << (2 * p))) | (0x64006400u - 0x08000800u * uint(p));
  if (BITS == 2) {
    return x;
  }
  const int shift = kv_high_bit(j, r, p, 0) - 2 * p - 2;  // from the third bit's place to that above the two
  const uint third = shift < 0 ? high << (shift < 0 ? -shift : 0) : high >> (shift < 0 ? 0 : shift);
  return x | (third & (0x00040004u << (2 * p)));
}

template <int BITS>
constexpr float kv_code_offset(int p) {
  return BITS == 8 ? 1024.0f
      : BITS == 4  ? (p % 2 ? 64.0f : 1024.0f)
                   : (p == 0 ? 1024.0f : p == 1 ? 256.0f : p == 2 ? 64.0f : 16.0f);
}

// c tanh(s / c), of scores s and a cap c in base-2 exponents.
inline float kv_capped(float s, float cap) {
  const float e = metal::fast::exp2(s * (2.88539008f / cap));
  return cap - 2.0f * cap / (e + 1.0f);
}

// Scores of token `lane` for the OWN query rows of a simdgroup: what all simdgroups of its team have written, four
// partial sums each. TOKEN: entries of rows to a token.
template <int QT, int OWN, uint PARTS, uint TOKEN>
inline void kv_scores(kv_four shared, uint lane, uint part, thread float* s) {
#pragma unroll
  for (uint i = 0u; i < 4u * PARTS; i++) {
    float more[OWN];
    kv_load_shared<OWN>(shared, (lane * TOKEN + i) * uint(QT / OWN) + part, more);
#pragma unroll
    for (int q = 0; q < OWN; q++) {
      s[q] = i == 0u ? more[q] : s[q] + more[q];
    }
  }
}

// Turns scores into probabilities. The running maximum is raised only when exceeded by `lazy`; shrink: what then
// multiplies all that was summed before, else 1.
template <int OWN>
inline void kv_probabilities(thread float* s, thread float* top, thread float* shrink, float lazy, float cap) {
  bool exceeds = false;
#pragma unroll
  for (int q = 0; q < OWN; q++) {
    if (cap > 0.0f) {  // known when a kernel is built
      s[q] = s[q] > -INFINITY ? kv_capped(s[q], cap) : s[q];
    }
    shrink[q] = 1.0f;
    exceeds = exceeds || s[q] > top[q] + lazy;
  }
  if (simd_any(exceeds)) {  // the whole simdgroup takes the same branch
#pragma unroll
    for (int q = 0; q < OWN; q++) {
      float peak = metal::max(s[q], top[q]);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        peak = metal::max(peak, simd_shuffle_xor(peak, ushort(step)));
      }
      shrink[q] = metal::fast::exp2(top[q] - peak);
      top[q] = peak;
    }
  }
#pragma unroll
  for (int q = 0; q < OWN; q++) {
    s[q] = metal::fast::exp2(s[q] - top[q]);
  }
}

// Number i of an array that registers hold.
template <int COUNT>
inline float kv_one_of(const thread float* x, uint i) {
  float out = x[0];
#pragma unroll
  for (int n = 1; n < COUNT; n++) {
    out = i == uint(n) ? x[n] : out;
  }
  return out;
}

// Multiplies the N outputs of each row by what the simdgroups of a team have found for their rows. Always, as a branch
// around it costs more.
template <int QT, int N>
inline void kv_rescale(kv_four shrinks, thread float* o) {
  float shrink[QT];
  kv_load_shared<QT>(shrinks, 0u, shrink);
#pragma unroll
  for (int q = 0; q < QT; q++) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      o[q * N + i] *= shrink[q];
    }
  }
}

// Block n, or the last, where parts of unequal size ask for one beyond it.
template <int BLOCKS, int PARTS>
inline uint kv_block(uint n) {
  return BLOCKS % PARTS == 0 ? n : metal::min(n, uint(BLOCKS - 1));
}

// The sum over all lanes.
inline float kv_all_lanes(float x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    x += simd_shuffle_xor(x, ushort(step));
  }
  return x;
}

template <int PARTS>
inline void kv_team_barrier() {
  if (PARTS == 1) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
