// Wide loads of values, words of a record and numbers of a page. Comes after codes.h.

#ifndef KV_PAIRS // cuda.h has its own
typedef threadgroup float2* kv_pairs;
#endif

template <typename T>
inline float kv_half_word(uint word, int high) {
  return float(as_type<T>(ushort(high ? word >> 16 : word & 0xFFFFu)));
}

// A bfloat is the upper half of a float.
template <>
inline float kv_half_word<bfloat16_t>(uint word, int high) {
  return as_type<float>(high ? word & 0xFFFF0000u : word << 16);
}

// Value i of values loaded as words.
template <typename T>
inline float kv_value(const thread uint* words, int i) {
  return kv_half_word<T>(words[i / 2], i % 2);
}

template <>
inline float kv_value<float>(const thread uint* words, int i) {
  return as_type<float>(words[i]);
}

// 1, 2 or 4 words by one load; `from` is a multiple of as many.
template <int WORDS, typename T>
inline void kv_load_words(const device T* from, thread uint* words) {
  if (WORDS == 4) {
    const uint4 four = *(const device uint4*)from;
    words[0] = four.x;
    words[1] = four.y;
    words[2] = four.z;
    words[3] = four.w;
  } else if (WORDS == 2) {
    const uint2 two = *(const device uint2*)from;
    words[0] = two.x;
    words[1] = two.y;
  } else {
    words[0] = *(const device uint*)from;
  }
}

// COUNT values, 4 or 8, by wide loads; `from` is a multiple of COUNT.
template <int COUNT, typename T>
inline void kv_load(const device T* from, thread float* v) {
  constexpr int LOADED = sizeof(T) == 4 ? 4 : COUNT;
  constexpr int WORDS = LOADED * int(sizeof(T)) / 4;
#pragma unroll
  for (int i = 0; i < COUNT; i += LOADED) {
    uint words[4];
    kv_load_words<WORDS>(from + i, words);
#pragma unroll
    for (int n = 0; n < LOADED; n++) {
      v[i + n] = kv_value<T>(words, n);
    }
  }
}

// COUNT of the WORDS words of a lane (`kv_word_at`) from word `first` on, a multiple of COUNT, by the widest loads: of a
// side that begins at word `at` of `from`, an index of 32 bits that a load adds itself.
template <int WORDS, int COUNT>
inline void kv_load_some(const device uint* from, uint at, uint lane, uint first, thread uint* words) {
  constexpr uint OF = kv_vector(WORDS);  // words of a lane side by side
  constexpr int STEP = kv_vector(WORDS) < kv_vector(COUNT) ? kv_vector(WORDS) : kv_vector(COUNT);
#pragma unroll
  for (int m = 0; m < COUNT; m += STEP) {
    const uint n = first + uint(m);
    kv_load_words<STEP>(from + (at + n / OF * (32u * OF) + lane * OF + n % OF), words + m);
  }
}

// COUNT halves (4 or 8) of a header by one load, from a multiple of COUNT on.
template <int COUNT>
inline void kv_load_numbers(const device half* from, thread float* to) {
  if (COUNT == 8) {
    const uint4 x = *(const device uint4*)from;
    to[0] = kv_half_of(x.x, 0);
    to[1] = kv_half_of(x.x, 1);
    to[2] = kv_half_of(x.y, 0);
    to[3] = kv_half_of(x.y, 1);
    to[COUNT - 4] = kv_half_of(x.z, 0);
    to[COUNT - 3] = kv_half_of(x.z, 1);
    to[COUNT - 2] = kv_half_of(x.w, 0);
    to[COUNT - 1] = kv_half_of(x.w, 1);
  } else {
    const uint2 x = *(const device uint2*)from;
    to[0] = kv_half_of(x.x, 0);
    to[1] = kv_half_of(x.x, 1);
    to[2] = kv_half_of(x.y, 0);
    to[3] = kv_half_of(x.y, 1);
  }
}
