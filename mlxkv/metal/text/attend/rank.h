// Numbers that rank.metal multiplies. Comes after loads.h.

// Numbers 4 at .. 4 at + 3 of a row of DIMS, zeros behind its end.
template <int DIMS, typename T>
inline void kv_four(const device T* row, int at, thread float* four) {
#pragma unroll
  for (int n = 0; n < 4; n++) {
    four[n] = 0.0f;
  }
  if (DIMS % 4 == 0) {
    if (4 * at < DIMS) {
      kv_load<4>(row + 4 * at, four);
    }
  } else {
#pragma unroll
    for (int n = 0; n < 4; n++) {
      if (4 * at + n < DIMS) {
        four[n] = float(row[4 * at + n]);
      }
    }
  }
}

// A lane's words of a chunk: EACH of the means, EACH of the deviations, and the steps. Queries are zero where a row of
// codes has ended.
template <int WORDS, int EACH, int LANES>
inline void kv_chunk(const device uint* chunk, int part, thread uint* words) {
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const int at = part + LANES * j;
    const bool inside = WORDS % LANES == 0 || at < WORDS;
    words[j] = inside ? chunk[at] : 0u;
    words[EACH + j] = inside ? chunk[WORDS + at] : 0u;
  }
  words[2 * EACH] = chunk[2 * WORDS];
}
