// The limit of a clipped token: the RANK-th largest of its absolute values, spread over lanes as in quantize.h.
// Sorting networks take the same instructions for all values and handle ties.

#if WITH_CLIP
// Length of the lists: at least a lane's values of two blocks, and at least `rank`.
constexpr int kv_list(int rank) {
  return rank <= 8 ? 8 : (rank <= 16 ? 16 : (rank <= 32 ? 32 : 64));
}

// Puts the larger of two first.
inline void kv_order(thread float* v, int first, int second) {
  const float larger = metal::max(v[first], v[second]);
  v[second] = metal::min(v[first], v[second]);
  v[first] = larger;
}

// Sorts in descending order, by Batcher's odd-even merges.
template <int N>
inline void kv_sort(thread float* v) {
#pragma unroll
  for (int stage = 0; (1 << stage) < N; stage++) {
    const int run = 1 << stage;
#pragma unroll
    for (int step = 0; step <= stage; step++) {
      const int span = run >> step;
      const int first = span % run;
#pragma unroll
      for (int i = 0; i < N - 1; i++) {
        if (i >= first && (i - first) / span % 2 == 0 && i + span < N &&
            i / (2 * run) == (i + span) / (2 * run)) {
          kv_order(v, i, i + span);
        }
      }
    }
  }
}

// Merges the N largest of two descending lists into v, descending. The maxima of one list and the other in
// reverse are a bitonic sequence of them, which a merge of halves sorts.
template <int N>
inline void kv_merge(thread float* v, const thread float* other) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    v[i] = metal::max(v[i], other[N - 1 - i]);
  }
#pragma unroll
  for (int step = 1; (N >> step) > 0; step++) {
    const int span = N >> step;
#pragma unroll
    for (int i = 0; i < N; i++) {
      if ((i & span) == 0) {
        kv_order(v, i, i + span);
      }
    }
  }
}

// Merges the lists of two tokens in each of two lanes into the list of one token in each, in `one`: a lane
// sends the list that it does not keep.
template <int N>
inline void kv_share(thread float* one, const thread float* other, int lane, int distance) {
  const bool second = (lane & distance) != 0;
  float taken[N];
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float given = second ? one[i] : other[i];
    one[i] = second ? other[i] : one[i];
    taken[i] = simd_shuffle_xor(given, ushort(distance));
  }
  kv_merge<N>(one, taken);
}

// The RANK-th largest of two descending lists, of this lane and of the lane at `distance`: the least, over all
// ways to divide RANK between the lists, of the larger element at the cut.
template <int RANK>
inline float kv_ranked(const thread float* v, int distance) {
  float found = 3.4e38f;
#pragma unroll
  for (int i = 0; i < RANK; i++) {
    const float theirs = simd_shuffle_xor(v[RANK - 1 - i], ushort(distance));
    found = metal::min(found, metal::max(v[i], theirs));
  }
  return found;
}
#endif
