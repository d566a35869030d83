// Encodes new keys and values as page records, transforms included.
// One simdgroup per record and side; grid: (32 x all records, 2 sides).
// keys, values [heads, capacity, D] of types T_K, T_V; table_k, table_v: `Transform.table`, or for
// KIND 3 matrices [1 or kv heads, D, D]
// records [heads, records per head, words]
// size: [records per head, heads, first token of the keys, their capacity, the same of the values,
// matrices of the keys, of the values]
// Template: S simdgroups of a threadgroup, TILE pairs of floats for each; per side T, D, BITS (16: float16
// numbers), GROUP, SYMMETRIC, CODEBOOK (codes are indices of levels with boundaries B above 0), KIND (0 none,
// 1 Hadamard, 2 real Fourier, 3 any matrix, 4 real Fourier and a scale per channel), RANK (`Affine.clip_rank`,
// 64 at most).
#if WITH_MIXED_BITS
// Tables and sizes have what differs by layer; transforms come before.
const int dims_k = int(table_k[1]);
const int dims_v = int(table_v[1]);
const int side_k = int(table_k[2]) + 8;
const int record_words = side_k + int(table_v[2]) + 8;
#else
constexpr int GROUPS_K = (D_K + GROUP_K - 1) / GROUP_K;
constexpr int GROUPS_V = (D_V + GROUP_V - 1) / GROUP_V;
constexpr int SIDE_K = kv_side_words<BITS_K>((D_K + 31) / 32, GROUPS_K, SYMMETRIC_K);
constexpr int SIDE_V = kv_side_words<BITS_V>((D_V + 31) / 32, GROUPS_V, SYMMETRIC_V);
constexpr int record_words = SIDE_K + SIDE_V;
#endif

#if WITH_CODEBOOK
float boundaries_k[8];
float boundaries_v[8];
#pragma unroll
for (int i = 0; i < 8; i++) {
  boundaries_k[i] = as_type<float>(B_K[i]);
  boundaries_v[i] = as_type<float>(B_V[i]);
}
#endif

#if WITH_MIXED_BITS
#else
threadgroup float2 tiles[S * TILE];
#endif

const int lane = thread_index_in_simdgroup;
const int simdgroup = simdgroup_index_in_threadgroup;
const int unit = threadgroup_position_in_grid.x * S + simdgroup;

if (unit < size[0] * size[1]) {
  const int head = unit / size[0];
  const int token = unit % size[0] * 16;
  device uint* out = records + size_t(unit) * record_words;
#if WITH_MIXED_BITS
  if (threadgroup_position_in_grid.y == 0) {
    kv_quantize_mixed<T_K, 1>(
        keys + (size_t(head) * size[3] + size[2] + token) * dims_k, table_k, out, lane);
  } else {
    kv_quantize_mixed<T_V, 0>(
        values + (size_t(head) * size[5] + size[4] + token) * dims_v, table_v, out + side_k, lane);
  }
#else
  if (threadgroup_position_in_grid.y == 0) {
    const device T_K* from = keys + (size_t(head) * size[3] + size[2] + token) * D_K;
    const device float* table = table_k + (KIND_K == 3 ? size_t(head % size[6]) * (D_K * D_K) : 0);
#if WITH_HALVES
    if (BITS_K == 16) {
      kv_quantize_half<T_K, D_K, 1, KIND_K>(from, table, tiles + simdgroup * TILE, out, lane);
    }
#endif
#if WITH_CODEBOOK
    if (CODEBOOK_K) {
      kv_quantize_codebook<T_K, BITS_K, D_K, 1, KIND_K>(
          from, table, tiles + simdgroup * TILE, boundaries_k, out, lane);
    }
#endif
    if (BITS_K != 16 && !CODEBOOK_K) {
      kv_quantize_side<T_K, BITS_K, D_K, GROUP_K, SYMMETRIC_K, 1, KIND_K, RANK_K>(
          from, table, tiles + simdgroup * TILE, out, lane);
    }
  } else {
    const device T_V* from = values + (size_t(head) * size[5] + size[4] + token) * D_V;
    const device float* table = table_v + (KIND_V == 3 ? size_t(head % size[7]) * (D_V * D_V) : 0);
#if WITH_HALVES
    if (BITS_V == 16) {
      kv_quantize_half<T_V, D_V, 0, KIND_V>(from, table, tiles + simdgroup * TILE, out + SIDE_K, lane);
    }
#endif
#if WITH_CODEBOOK
    if (CODEBOOK_V) {
      kv_quantize_codebook<T_V, BITS_V, D_V, 0, KIND_V>(
          from, table, tiles + simdgroup * TILE, boundaries_v, out + SIDE_K, lane);
    }
#endif
    if (BITS_V != 16 && !CODEBOOK_V) {
      kv_quantize_side<T_V, BITS_V, D_V, GROUP_V, SYMMETRIC_V, 0, KIND_V, RANK_V>(
          from, table, tiles + simdgroup * TILE, out + SIDE_K, lane);
    }
  }
#endif
}
