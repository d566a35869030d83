// Decode attention over quantized pages and full-precision windows, in base-2 exponents, by multiply-adds.
// Threadgroup: S simdgroups, in teams of PARTS; grid: (32 S x tiles of QT query rows, splits, kv heads of the
// batch): threadgroups that read the same records are neighbours. The first size[1] splits share the records,
// the others the windows (sink, then recent). Codes are read once for the QT query rows of a tile. The simdgroups
// of a team read the same tokens, each some blocks of dims, so that outputs fit in registers. Each split writes
// (maximum, sum, output) per row.
//
// A team reads 32 tokens at a time. Lane (g, t) multiplies what records hold for it (codes.h): of keys tokens
// g + 8 i, a quarter of the dims; then a lane adds the quarters of one token, `lane`, and makes its
// probabilities; of values lane (g, t) reads tokens 2 t + 8 i and 2 t + 8 i + 1, an eighth of the dims.
//
// q        [heads, rows, D]: queries of type T. scale[0]: attention scale times log2(e)
// down, down_2 [size[9], size[10] heads of the batch, one for each kv head, or one; D, RK]: maps of queries into the
//          stored domain of the keys of a run of pages, of type MAP (HAS_DOWN)
// records  [.., capacity, RECORD]; headers [.., capacity / records of a page, HEADER]: kv heads are `capacity`
//          apart; a sequence begins at its first record, the first of a page. So sequences of a batch may
//          have buffers of their own, or lie side by side in one.
// records_2, headers_2 [heads, ..]: a second run of pages after the first, in its own stored domain
// sink_k, sink_v, recent_k, recent_v [heads, tokens, D], of type T
// size     [rows, page splits, record capacity, sink capacity, recent capacity, new tokens, kv heads,
//           page splits of the first run, capacity of the second, heads of down, heads of down_2]
// lengths  [batch, 5]: records, sink tokens, recent tokens, first record, records of the second run
// Row i of a head belongs to new token i % L, the last L tokens of recent.
constexpr int BK = (RK + 31) / 32;
constexpr int BV = (RV + 31) / 32;
constexpr int BD = (D + 31) / 32;
// Blocks of a simdgroup.
constexpr int PK = (BK + PARTS - 1) / PARTS;
constexpr int PV = (BV + PARTS - 1) / PARTS;
constexpr int PD = (BD + PARTS - 1) / PARTS;
constexpr int QB = PARTS * (PK > PD ? PK : PD);
constexpr int OB = PV > PD ? PV : PD;
constexpr int TEAMS = S / PARTS;
constexpr int WIDE = sizeof(T) == 4;  // outputs are floats: so are queries, and codes are exact
constexpr int GROUPS_K = CHANNEL_K ? 1 : (RK + GROUP_K - 1) / GROUP_K;
constexpr int GROUPS_V = CHANNEL_V ? 1 : (RV + GROUP_V - 1) / GROUP_V;
constexpr int WORDS_K = kv_lane_words<BITS_K>(BK);
constexpr int WORDS_V = kv_lane_words<BITS_V>(BV);
constexpr int SIDE_K =
    32 * WORDS_K + kv_number_words<BITS_K>(GROUPS_K, SYMMETRIC_K, CHANNEL_K);
#if WITH_MIXED_BITS
// Template: RK and RV are the most stored dims; the table in the place of the headers has the layer's own.
const int record_words = int(headers[0]);
const int side_words_k = int(headers[1]);
const int key_dims = int(headers[2]);
const int blocks_k = int(headers[4]);
const int blocks_v = int(headers[5]);
constexpr bool MIXED = true;
threadgroup uint4 mixed_k[3 * KV_MIXED_MOST];  // the entries of the table
threadgroup uint4 mixed_v[3 * KV_MIXED_MOST];
#else
constexpr bool MIXED = false;
constexpr int record_words = RECORD;
constexpr int key_dims = RK;
#endif
constexpr int PAGE_RECORDS = PAGE / 16;
constexpr int HEADER_K = TREE_K == 2
    ? 16
    : kv_header_words(BK, PAGE / GROUP_K, SYMMETRIC_K, CHANNEL_K);
// Numbers in a header that a group of tokens shares.
constexpr uint CHANNEL_NUMBERS_K = (SYMMETRIC_K ? 1 : 2) * 32 * BK;
constexpr uint CHANNEL_NUMBERS_V = (SYMMETRIC_V ? 1 : 2) * 32 * BV;
constexpr bool RAW_K = BITS_K == 16;  // float16 numbers, no codes
constexpr bool RAW_V = BITS_V == 16;
// Codes are multiplied as they are, unless DECODED: scales of tokens multiply scores and probabilities, scales of
// channels the queries, once for the tokens that share them.
constexpr bool FOLDED = CHANNEL_K && !DECODED_K;
constexpr int SCALED = DECODED_V || MIXED ? 1 : GROUPS_V;  // probabilities, times the scales of so many groups
constexpr int OWN = QT / PARTS;  // rows whose probabilities a simdgroup makes, for its team
constexpr int CHUNK = FOLDED ? GROUP_K / 16 : 2;  // records that a team reads between two others
constexpr float STEPS_K = float(1 << BITS_K);
constexpr float STEPS_V = float(1 << BITS_V);
constexpr float LAZY = 8.0f;  // the running maximum is raised when exceeded by this much
constexpr float NOTHING = -1.0e30f;
constexpr uint TOKEN = 4u * PARTS + 1u;  // entries of QT partial scores to a token: and a gap, for other banks
constexpr uint PARTIAL = 8u * QT * TOKEN;  // fours of floats, of a team
constexpr uint SHARED = PARTIAL + 8u * QT * SCALED + 2u;  // and probabilities, and factors of rows
constexpr bool WIDE_Q = WIDE || DECODED_K;
// Queries before they are mapped: in memory of their own, as far as there is enough, since in that of scores they cost
// the loop copies.
constexpr bool OWN_RAW = D <= 256;
constexpr uint RAW = HAS_DOWN ? (QT * D + 3u) / 4u : 1u;  // fours of floats
threadgroup float4 raw_words[OWN_RAW ? RAW : 1u];
// Queries in the stored domain, before scales of channels are multiplied into them (FOLDED); at the end outputs.
threadgroup float4 row_words[QT * 8 * (QB > PARTS * OB ? QB : PARTS * OB)];
threadgroup uint4 query_words[(FOLDED ? TEAMS : 1) * QT * QB * (WIDE_Q ? 8 : 4)];
threadgroup float4 shared_words[OWN_RAW || RAW < TEAMS * SHARED ? TEAMS * SHARED : RAW];
// Sums over a lane's tokens, for each of its rows: of probabilities, and of those times scales and biases of values.
constexpr int MORE = 2 * SCALED;
constexpr int SUMS = (OWN * (1 + MORE) + 3) / 4 * 4;
threadgroup float4 sum_words[S * 8 * SUMS];
constexpr int COMMON = FOLDED ? S * QT : 1;
threadgroup float common[COMMON];  // to the scores of a simdgroup's tokens, of its dims
threadgroup float tile_max[TEAMS * QT];
threadgroup float tile_sum[TEAMS * QT];
threadgroup float tile_more[TEAMS * QT * MORE];

const KvQuery<WIDE_Q>::pointer q_tile = (KvQuery<WIDE_Q>::pointer)query_words;

#if WITH_CODEBOOK
float levels_k[8];
float levels_v[8];
#pragma unroll
for (int i = 0; i < 8; i++) {
  levels_k[i] = as_type<float>(C_K[i]);
  levels_v[i] = as_type<float>(C_V[i]);
}
#endif

const uint lane = thread_index_in_simdgroup;
const uint group = simdgroup_index_in_threadgroup;
const uint team = group / uint(PARTS);
const uint own_part = PARTS == 1 ? 0u : group % uint(PARTS);  // of the dims
const uint thread_id = group * 32u + lane;
const uint g = lane / 4u;
const uint t = lane % 4u;
const int rows = size[0];
const int page_splits = size[1];
const int head = threadgroup_position_in_grid.z;
const int first_row = threadgroup_position_in_grid.x * QT;
const uint last_row = metal::min(uint(QT), uint(rows - first_row)) - 1u;  // of the tile
const int split = threadgroup_position_in_grid.y;
const bool paged = split < page_splits;
const int splits = threads_per_grid.y;
const int new_tokens = size[5];
const int batch = head / size[6];
const bool second = paged && split >= size[7];
const int n_records = lengths[5 * batch + (second ? 4 : 0)];
const int n_sink = lengths[5 * batch + 1];
const int n_recent = lengths[5 * batch + 2];
const int total = n_sink + 16 * (lengths[5 * batch] + lengths[5 * batch + 4]) + n_recent;
const device uint* run = second ? records_2 : records;
const device uint* run_headers = second ? headers_2 : headers;
const int capacity = size[second ? 8 : 2];
// The kv head's first record, whole pages from the start of the buffer. Indices of 32 bits: arrays of MLX are shorter.
const uint first_record = head % size[6] * capacity +
    (second ? batch * size[6] * capacity : lengths[5 * batch + 3]);

#if WITH_MIXED_BITS
for (int i = int(thread_id); i < 3 * KV_MIXED_MOST; i += 32 * S) {
  mixed_k[i] = ((const device uint4*)kv_mixed_entry(headers, 0, 0))[i];
  mixed_v[i] = ((const device uint4*)kv_mixed_entry(headers, 1, 0))[i];
}
#endif
{
  const device T* own_q = q + uint(head * rows + first_row) * uint(D);
  const kv_four raw = OWN_RAW ? (kv_four)raw_words : (kv_four)shared_words;
  if (HAS_DOWN && paged) {
    for (uint i = thread_id; i < uint(QT * D); i += uint(32 * S)) {
      ((kv_floats)raw)[i] = i / uint(D) <= last_row ? float(own_q[i]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const device MAP* map = second ? down_2 : down;
  const uint first_map = uint(head) % uint(size[second ? 10 : 9]) * uint(D * key_dims);
  const uint width = uint(paged ? key_dims : D);
#pragma unroll 1
  for (uint dim = thread_id; dim < uint(QB * 32); dim += uint(32 * S)) {
    float value[QT];
#pragma unroll
    for (int i = 0; i < QT; i++) {
      value[i] = 0.0f;
    }
    if (HAS_DOWN && paged && dim < width) {
      constexpr int AT_ONCE = D % 16 == 0 ? 16 : D % 4 == 0 ? 4 : 1;  // loads in flight
      constexpr int FOUR = D % 4 == 0 ? 4 : 1;
#pragma unroll 1
      for (uint n = 0u; n < uint(D); n += uint(AT_ONCE)) {
        float times[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
          times[k] = float(map[first_map + (n + uint(k)) * width + dim]);
        }
#pragma unroll
        for (int i = 0; i < QT; i++) {
          float query[AT_ONCE];
#pragma unroll
          for (int k = 0; k < AT_ONCE; k += FOUR) {
            kv_load_shared<FOUR>(raw, (uint(i * D + k) + n) / uint(FOUR), query + k);
          }
#pragma unroll
          for (int k = 0; k < AT_ONCE; k++) {
            value[i] = metal::fma(query[k], times[k], value[i]);
          }
        }
      }
    } else if (dim < width) {
#pragma unroll
      for (int i = 0; i < QT; i++) {
        value[i] = float(own_q[metal::min(uint(i), last_row) * uint(D) + dim]);
      }
    }
#pragma unroll
    for (int i = 0; i < QT; i++) {
      const uint at = uint(i * QB * 32) + dim;
      float scaled = uint(i) <= last_row ? value[i] * scale[0] : 0.0f;
#if WITH_MIXED_BITS
      if (paged && dim % 2u == 1u && dim < width) {  // as codes are taken
        scaled *= as_type<float>(kv_mixed_entry(headers, 0, int(dim / 16u))[9]);
      }
#endif
      if (FOLDED && paged) {
        ((kv_floats)row_words)[at] = scaled;
      } else {
        q_tile[MIXED && paged ? at : kv_query_place(at, 0)] = KvQuery<WIDE_Q>::type(scaled);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

float o[QT * OB * 4];
float top[OWN];  // of the simdgroup's rows
#pragma unroll
for (int q = 0; q < OWN; q++) {
  top[q] = NOTHING;
}
const kv_four sums = (kv_four)sum_words + group * uint(8 * SUMS);
#pragma unroll
for (int i = 0; i < SUMS / 4; i++) {
  sums[lane * uint(SUMS / 4) + uint(i)] = float4{0.0f, 0.0f, 0.0f, 0.0f};
}
#pragma unroll
for (int i = 0; i < QT * OB * 4; i++) {
  o[i] = 0.0f;
}

#if WITH_PLAIN_K || WITH_MIXED_BITS
// Sums over all dims of queries, and of queries times what codes are larger by.
threadgroup float4 query_sums[QT];
#pragma unroll
for (int q = 0; q < QT; q++) {
  if (!FOLDED) {
    float all = 0.0f;
    float larger = 0.0f;
#if WITH_MIXED_BITS
    for (uint i = lane; i < 16u * uint(paged ? blocks_k : 0); i += 32u) {
      const device uint* entry = kv_mixed_entry(headers, 0, int(i / 16u));
      const float middle = as_type<float>(entry[10]) / (i % 2u == 1u ? as_type<float>(entry[9]) : 1.0f);
      larger = metal::fma(float(q_tile[uint(q * QB * 32) + i]), middle + (WIDE ? 0.0f : KV_MIXED_OFFSET), larger);
    }
#else
    for (uint i = lane; i < 32u * BK; i += 32u) {
      const float query = float(q_tile[kv_query_place(uint(q * QB * 32) + i, 0)]);
      const float taken = SYMMETRIC_K ? 0.5f * STEPS_K : 0.0f;
      all += query;
      larger = metal::fma(query, taken + (WIDE ? 0.0f : kv_code_offset<BITS_K>(int(i % 4u))), larger);
    }
#endif
    all = kv_all_lanes(all);
    larger = kv_all_lanes(larger);
    if (thread_id == 0u) {
      query_sums[q] = float4{all, larger, 0.0f, 0.0f};
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
#endif

#if WITH_TREE
int books_k[TREE_K == 1 ? 28 : 1];
#pragma unroll
for (int i = 0; i < (TREE_K == 1 ? 28 : 1); i++) {
  books_k[i] = BOOKS_K[i];
}
int books_v[TREE_V == 1 ? 28 : 1];
#pragma unroll
for (int i = 0; i < (TREE_V == 1 ? 28 : 1); i++) {
  books_v[i] = BOOKS_V[i];
}
KvTree tree_k = kv_tree<1, TREE_K == 1 ? 28 : 1>(books_k, (const device half*)headers, lane);
KvTree tree_v = kv_tree<1, TREE_V == 1 ? 28 : 1>(books_v, (const device half*)headers, lane);
#endif

const kv_four shared = (kv_four)shared_words + team * SHARED;
const kv_four weights = shared + PARTIAL;
const kv_floats weight_floats = (kv_floats)weights;
const kv_four shrinks = weights + 8u * QT * SCALED;
const uint first_own = own_part * uint(OWN);
const kv_quads queries = (kv_quads)query_words;
// Of the lane's dims: in eights, and as numbers.
const uint eights_at = (FOLDED && paged ? team * uint(QT * QB * 4) : 0u) + t;
const uint query_at = 8u * eights_at;
const int sink_units = (n_sink + 15) / 16;
const int units = paged ? n_records : sink_units + (n_recent + 15) / 16;
const int run_splits = second ? page_splits - size[7] : size[7];
const int parts = paged ? run_splits : splits - page_splits;
const int part = split - (paged ? (second ? size[7] : 0) : page_splits);
const int unit_of_parts = paged ? CHUNK : 2;
const int each = ((units + parts - 1) / parts + unit_of_parts - 1) / unit_of_parts * unit_of_parts;
const int stop = metal::min(units, (part + 1) * each);
