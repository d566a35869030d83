// Decode attention by matrix tiles: attend.metal and merge.metal in one dispatch, for 16-bit model types.
// Threadgroup: S simdgroups, 8 query rows; grid: (32 S, splits, kv heads of the batch x tiles of 8 rows).
// The last threadgroup of a tile to arrive merges the splits.
//
// q [heads, rows, D] of type T, in the model's domain. Records, headers, windows, lengths and the inputs of a
// second run of pages (RUNS = 2): as in attend.metal
// map_k: model's -> stored domain, of q; map_v: stored -> model's: tiles of halves (tiles.py), HAS_K, HAS_V
// size: [rows, page splits, record capacity, sink capacity, recent capacity, new tokens,
//   kv heads, words of map_k per head, of map_v (0: one for all), scale log2(e) as bits, log2(e) as
//   bits, 4 masks of keys, 4 of values, page splits of the first run, capacity of the second, its
//   records, bits: each sequence has maps of its own (1: of keys, 2: of values), then per batch:
//   records, sink, recent tokens, first record]
// counter: zero before and after, one per tile of rows.
constexpr int BK = (RK + 31) / 32;
constexpr int BV = (RV + 31) / 32;
constexpr int BD = (D + 31) / 32;
constexpr int QB = BK > BD ? BK : BD;
constexpr int OB = BV > BD ? BV : BD;
constexpr int GROUPS_K = CHANNEL_K ? 1 : (RK + GROUP_K - 1) / GROUP_K;
constexpr int GROUPS_V = (RV + GROUP_V - 1) / GROUP_V;
constexpr int WORDS_K = kv_lane_words<BITS_K>(BK);
constexpr int WORDS_V = kv_lane_words<BITS_V>(BV);
constexpr int NUMBERS_K = kv_number_words<BITS_K>(GROUPS_K, SYMMETRIC_K, CHANNEL_K);
constexpr int SIDE_K = 32 * WORDS_K + NUMBERS_K;
constexpr int SLOTS_K = NUMBERS_K / 8;  // numbers of a token
constexpr int HELD_K = SLOTS_K > 0 ? SLOTS_K : 1;
constexpr int SLOT_TILES = (HELD_K + 7) / 8;
#if WITH_MIXED_BITS
// Template: RK and RV are the most stored dims, RECORD a share of shared memory; the table in the place of the headers
// has what is the layer's own.
const int record_words = int(headers[0]);
const int side_words_k = int(headers[1]);
const int blocks_k = int(headers[4]);
const int blocks_v = int(headers[5]);
#else
constexpr int record_words = RECORD;
#endif
constexpr int PAGE_RECORDS = PAGE / 16;
constexpr int HEADER_K = TREE_K == 2
    ? 16
    : kv_header_words(BK, PAGE / GROUP_K, SYMMETRIC_K, CHANNEL_K);
constexpr bool RAW_K = BITS_K == 16;  // float16 numbers: words of a record are words of a tile
constexpr bool RAW_V = BITS_V == 16;
// Codes of keys with scales per token and group are multiplied with their offsets, which one more tile
// subtracts. Codes of other formats are decoded first.
constexpr bool OFFSETS_K = !CHANNEL_K && !CODEBOOK_K && !TREE_K && !RAW_K;
// Scales of channels are multiplied into the queries, once for the tokens that share them, which one simdgroup
// reads in a row. The products are as large as scores, so queries are not scaled down (KV_SCORE).
constexpr bool FOLDED = CHANNEL_K && !PAIRS_K;
constexpr int STEP = FOLDED ? 2 : 2 * S;  // from a simdgroup's pair of records to its next
constexpr float MIDDLE_K = SYMMETRIC_K ? float(1 << (BITS_K - 1)) : 0.0f;
constexpr int WIDTH = 32 * OB;
constexpr int STRIDE = WIDTH + 4;  // of partials: output, maximum, sum, 0, 0
constexpr int ROW = 32 * (QB > OB ? QB : OB) + 8;
constexpr int POOL = 1024 + 2 * S * WIDTH > 512 * S ? 1024 + 2 * S * WIDTH : 512 * S;
constexpr float NOTHING = -1.0e30f;

threadgroup uint4 pool_words[(POOL + 8 * ROW) / 4];
threadgroup float tile_max[S * 8];
threadgroup float tile_sum[S * 8];
threadgroup float q_sums[HELD_K * 8];
threadgroup uint arrived[1];
#if WITH_MIXED_BITS
threadgroup uint4 mixed_k[3 * 2 * BK];  // `kv_mixed_entry` of each block
threadgroup uint4 mixed_v[3 * 2 * BV];
threadgroup uint mixed_rows[2 * BK + 2 * BV];  // words before the row of each block
#endif

kv_floats pool = (kv_floats)pool_words;
kv_floats tile_rows = pool + POOL;
const kv_quads queries = (kv_quads)pool_words;

const int lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup;
const int thread_id = group * 32 + lane;
const int g = tile_row(lane);
const int t = tile_column(lane) / 2;
const int rows = size[0];
const int page_splits = size[1];
const int tiles = (rows + 7) / 8;
const int unit_of_merge = threadgroup_position_in_grid.z;
const int head = unit_of_merge / tiles;
const int first_row = (unit_of_merge % tiles) * 8;
const int tile_height = metal::min(8, rows - first_row);
const int split = threadgroup_position_in_grid.y;
const int splits = threads_per_grid.y;
const bool paged = split < page_splits;
const int new_tokens = size[5];
const int kv_head = head % size[6];
const int batch = head / size[6];
const int n_first = size[23 + 4 * batch];
const int n_sink = size[24 + 4 * batch];
const int n_recent = size[25 + 4 * batch];
const int total = n_sink + 16 * (n_first + (RUNS == 2 ? size[21] : 0)) + n_recent;
const bool later = RUNS == 2 && paged && split >= size[19];  // in the second run
const int n_records = later ? size[21] : n_first;
// Indices of 32 bits: arrays of MLX are shorter.
const uint first_record = later ? head * size[20] : kv_head * size[2] + size[26 + 4 * batch];
const int first_splits = RUNS == 2 ? size[19] : page_splits;

const int sink_units = (n_sink + 15) / 16;
const int units = paged ? n_records : sink_units + (n_recent + 15) / 16;
const int parts = later ? page_splits - first_splits : paged ? first_splits : splits - page_splits;
const int part = split - (later ? first_splits : paged ? 0 : page_splits);
// Simdgroups take pairs of records in turn, or (FOLDED) a run of pairs each.
const bool runs = FOLDED && paged;
const int least = runs ? 2 : 1;
const int each = (units + parts * least - 1) / (parts * least) * least;
const int run = runs ? (each + 2 * S - 1) / (2 * S) * 2 : paged ? 2 : 1;
int unit = part * each + group * run;
const int stop = metal::min(units, metal::min((part + 1) * each, runs ? unit + run : units));
// Load queries first: after the records they would wait for all of them.
constexpr int MINE = (8 * 32 * QB + 32 * S - 1) / (32 * S);
float mine[MINE];
#pragma unroll
for (int n = 0; n < MINE; n++) {
  const int row = (thread_id + n * 32 * S) / (32 * QB);
  const int dim = (thread_id + n * 32 * S) % (32 * QB);
  mine[n] = row < tile_height && dim < D
      ? float(q[((head * rows + first_row + row) * D) + dim])
      : 0.0f;
}
const bool transforms = HAS_K && paged;
const device uint* map = later ? map_k_2 : map_k;
const int map_at = (size[22] & 1 ? head : kv_head) * size[7] + (4 * g + t) * 4;
constexpr int AHEAD_K = 8;
uint4 ahead[AHEAD_K];
if (transforms && group < 2 * BK) {
#pragma unroll
  for (int k = 0; k < AHEAD_K && k < 2 * BD; k++) {
    ahead[k] = *(const device uint4*)(map + (map_at + (group * 2 * BD + k) * 128));
  }
}
KvPipe pipe = kv_pipe_start<RECORD, STAGES, S, STEP>(
    later ? records_2 : records, (first_record + unit) * record_words, record_words,
    paged ? stop - unit : 0, group, lane);
#if WITH_MIXED_BITS
for (int i = thread_id; i < 3 * 2 * BK; i += 32 * S) {
  mixed_k[i] = ((const device uint4*)kv_mixed_entry(headers, 0, 0))[i];
}
for (int i = thread_id; i < 3 * 2 * BV; i += 32 * S) {
  mixed_v[i] = ((const device uint4*)kv_mixed_entry(headers, 1, 0))[i];
}
for (int i = thread_id; i < 2 * BK + 2 * BV; i += 32 * S) {
  mixed_rows[i] = (i < 2 * BK ? kv_mixed_entry(headers, 0, i) : kv_mixed_entry(headers, 1, i - 2 * BK))[8];
}
#endif
#pragma unroll
for (int n = 0; n < MINE; n++) {
  const int i = thread_id + n * 32 * S;
  if (i < 8 * 32 * QB) {
    const float scale = as_type<float>(size[9]) / (FOLDED && paged ? 1.0f : KV_SCORE);
    tile_rows[i / (32 * QB) * ROW + i % (32 * QB)] = mine[n] * scale;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (transforms) {
  constexpr int MOST = (2 * BK + S - 1) / S;
  TileC transformed[MOST];
#pragma unroll
  for (int n = 0; n < MOST; n++) {
    const int m = group + n * S;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      transformed[n].v[i] = 0.0f;
    }
    if (m < 2 * BK) {
#pragma unroll
      for (int k = 0; k < 2 * BD; k++) {
        const uint4 x = n == 0 && k < AHEAD_K
            ? ahead[k % AHEAD_K]
            : *(const device uint4*)(map + (map_at + (m * 2 * BD + k) * 128));
        TileA a;
        a.w[0] = x.x;
        a.w[1] = x.y;
        a.w[2] = x.z;
        a.w[3] = x.w;
        TileB b;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int dim = 16 * k + 8 * r;
          b.w[r] = kv_halves(
              tile_rows[tile_b_column(lane, 0) * ROW + dim + tile_b_row(lane, 0)],
              tile_rows[tile_b_column(lane, 1) * ROW + dim + tile_b_row(lane, 1)]);
        }
        tile_multiply(transformed[n], a, b);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int n = 0; n < MOST; n++) {
    const int m = group + n * S;
    if (m < 2 * BK) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        tile_rows[(2 * t + i % 2) * ROW + 16 * m + g + 8 * (i / 2)] = transformed[n].v[i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Queries as the right factor: k-tile u of block j, word r holds dims 32 j + 8 t + 4 i + 2 u + r. Trees
// decode neighbours together: dims 32 j + 8 t + 4 u + 2 r + i. Mixed bits (mixed_bits.h): dims 16 n + 4 t + 2 i + r.
// They lie in `pool`, four words a lane and block (`kv_query`), and where registers are enough in those, too.
for (int n = group; n < 2 * QB; n += S) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float pair[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int k = tile_b_row(lane, i);
      int dim = 32 * (n / 2) + 8 * (k / 2) +
          (TREE_K && paged ? 4 * (n % 2) + 2 * r + k % 2 : 4 * (k % 2) + 2 * (n % 2) + r);
#if WITH_MIXED_BITS
      dim = paged ? 16 * n + 2 * k + r : dim;
#endif
      pair[i] = tile_rows[tile_b_column(lane, i) * ROW + dim];
    }
#if WITH_MIXED_BITS
    if (paged && r == 1) {  // as high as the codes of these slots stand below their leading one
      const float weight = as_type<float>(mixed_k[3 * n + 2].y);
      pair[0] *= weight;
      pair[1] *= weight;
    }
#endif
    pool[128 * (n / 2) + 4 * lane + 2 * (n % 2) + r] = as_type<float>(kv_halves(pair[0], pair[1]));
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
TileB q_tile[POOLED ? 1 : 2 * QB];
#pragma unroll
for (int n = 0; n < (POOLED ? 0 : 2 * QB); n++) {
  q_tile[n] = kv_query<1>(q_tile, queries, n, lane);
}

// After the outputs: a tile whose rows are the sums over tokens of the middle values of each group.
#if WITH_MIXED_BITS
constexpr int EXTRA = 1;
#else
constexpr int EXTRA = SYMMETRIC_V ? 0 : 1;
#endif
TileC o[2 * OB + EXTRA];
float top[2];
float sum[2];
int last_seen[2];
#pragma unroll
for (int i = 0; i < 2; i++) {
  top[i] = NOTHING;
  sum[i] = 0.0f;
  last_seen[i] = total - new_tokens + (first_row + 2 * t + i) % new_tokens;
}
#pragma unroll
for (int n = 0; n < 2 * OB + EXTRA; n++) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    o[n].v[i] = 0.0f;
  }
}
