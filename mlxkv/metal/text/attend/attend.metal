// Decode attention over quantized pages and full-precision windows, in base-2 exponents.
// Threadgroup: S simdgroups; grid: (32 S x tiles of QT query rows, splits, kv heads of the batch):
// threadgroups that read the same records are neighbours. The first size[1] splits share the records,
// the others the windows (sink, then recent). Codes are read once for the QT query rows of a tile. Each
// split writes (maximum, sum, output) per row.
//
// q_pages  [heads, runs, rows, RK]: queries in the stored domain, float
// q_window [heads, rows, D]: queries in the model's domain, type T. scale[0]: attention scale times log2(e)
// records  [.., capacity, RECORD]; headers [.., capacity / records of a page, HEADER]: kv heads are `capacity`
//          apart; a sequence begins at its first record, the first of a page. So sequences of a batch may
//          have buffers of their own, or lie side by side in one.
// records_2, headers_2 [heads, ..]: a second run of pages after the first, in its own stored domain
// sink_k, sink_v, live_k, live_v [heads, tokens, D], of type T
// size     [rows, page splits, record capacity, sink capacity, recent capacity, new tokens, kv heads,
//           page splits of the first run, capacity of the second, runs]
// lengths  [batch, 5]: records, sink tokens, recent tokens, first record, records of the second run
// Row i of a head belongs to new token i % L, the last L tokens of recent.
constexpr int BK = (RK + 31) / 32;
constexpr int BV = (RV + 31) / 32;
constexpr int BD = (D + 31) / 32;
constexpr int QB = BK > BD ? BK : BD;
constexpr int OB = BV > BD ? BV : BD;
constexpr int GROUPS_K = CHANNEL_K ? 1 : (RK + GROUP_K - 1) / GROUP_K;
constexpr int GROUPS_V = CHANNEL_V ? 1 : (RV + GROUP_V - 1) / GROUP_V;
constexpr int WORDS_K = kv_lane_words<BITS_K>(BK);
constexpr int WORDS_V = kv_lane_words<BITS_V>(BV);
constexpr int PAIR_WORDS_K = kv_lane_words<BITS_K>(2);  // of two blocks
constexpr int SIDE_K =
    32 * WORDS_K + kv_number_words<BITS_K>(GROUPS_K, SYMMETRIC_K, CHANNEL_K);
#if WITH_MIXED_BITS
// Template: RK and RV are the most stored dims; the table in the place of the headers has the layer's own.
const int record_words = int(headers[0]);
const int side_words_k = int(headers[1]);
const int key_dims = int(headers[2]);
const int blocks_k = int(headers[4]);
const int blocks_v = int(headers[5]);
#else
constexpr int record_words = RECORD;
constexpr int key_dims = RK;
#endif
constexpr int PAGE_RECORDS = PAGE / 16;
constexpr int HEADER_K = TREE_K == 2
    ? 16
    : kv_header_words(BK, PAGE / GROUP_K, SYMMETRIC_K, CHANNEL_K);
constexpr bool RAW_K = BITS_K == 16;  // float16 numbers, no codes
constexpr bool RAW_V = BITS_V == 16;
constexpr float STEPS_K = float(1 << BITS_K);
constexpr float STEPS_V = float(1 << BITS_V);
constexpr float LAZY = 8.0f;  // the running maximum is raised when exceeded by this much
constexpr float NOTHING = -1.0e30f;
#if WITH_PAIRS
constexpr int ANGLES = PAIRS_K ? 1 << BITS_K : 1;
constexpr int PAIRS = PAIRS_K ? RK / 2 : 1;
#endif

threadgroup float q_tile[QT * QB * 32];
threadgroup float tile_out[QT * OB * 32];
threadgroup float tile_max[S * QT];
threadgroup float tile_sum[S * QT];
#if WITH_PAIRS
threadgroup float rotations[2 * PAIRS * ANGLES];  // cosine and sine of each angle of a pair
#endif

#if WITH_CODEBOOK
float levels_k[8];
float levels_v[8];
#pragma unroll
for (int i = 0; i < 8; i++) {
  levels_k[i] = as_type<float>(C_K[i]);
  levels_v[i] = as_type<float>(C_V[i]);
}
#endif

const int lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup;
const int thread_id = group * 32 + lane;
const int g = lane / 4;
const int t = lane % 4;
const int rows = size[0];
const int page_splits = size[1];
const int head = threadgroup_position_in_grid.z;
const int first_row = threadgroup_position_in_grid.x * QT;
const int split = threadgroup_position_in_grid.y;
const bool paged = split < page_splits;
const int splits = threads_per_grid.y;
const int new_tokens = size[5];
const int batch = head / size[6];
const bool second = paged && split >= size[7];
const int n_before = second ? lengths[5 * batch] : 0;  // records
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
const int q_run = (head * (paged ? size[9] : 1) + (second ? 1 : 0)) * rows;

const int q_dims = 32 * (paged ? BK : BD);
const int q_width = paged ? key_dims : D;
for (int i = thread_id; i < QT * q_dims; i += 32 * S) {
  const int row = first_row + i / q_dims;
  const int dim = i % q_dims;
  float value = 0.0f;
  if (row < rows && dim < q_width) {
    const int at = (q_run + row) * q_width + dim;
    value = paged ? q_pages[at] : float(q_window[at]);
  }
  q_tile[i] = value * scale[0];
}
threadgroup_barrier(mem_flags::mem_threadgroup);

float o[QT * OB * 4];
float top[QT];
float sum[QT];
int last_seen[QT];
#pragma unroll
for (int q = 0; q < QT; q++) {
  top[q] = NOTHING;
  sum[q] = 0.0f;
  last_seen[q] = total - new_tokens + (first_row + q) % new_tokens;
}
#pragma unroll
for (int i = 0; i < QT * OB * 4; i++) {
  o[i] = 0.0f;
}

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

const int sink_units = (n_sink + 15) / 16;
const int units = paged ? n_records : sink_units + (n_recent + 15) / 16;
const int run_splits = second ? page_splits - size[7] : size[7];
const int parts = paged ? run_splits : splits - page_splits;
const int part = split - (paged ? (second ? size[7] : 0) : page_splits);
// Pairs: whole pages, because the simdgroups divide a page and share its table.
const int unit_of_parts = PAIRS_K && paged ? PAGE_RECORDS : 1;
const int each = ((units + parts - 1) / parts + unit_of_parts - 1) / unit_of_parts * unit_of_parts;
const int stop = metal::min(units, (part + 1) * each);
