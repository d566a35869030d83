// Decodes one or both sides of records to T between copies of the windows, for the scratch of a prefill, one
// layer at a time. A simdgroup per 16 tokens of a side; grid: (32 x units, sides).
// records [heads, capacity, RECORD words]; headers [heads, capacity / records of a page, HEADER words];
// sink_k, live_k [heads, tokens, DIMS_K], sink_v, live_v [heads, tokens, DIMS_V] of type T;
// out: keys [heads, sink tokens + 16 records + recent tokens, DIMS_K], then values in the same way.
// size: [records per head, capacity, heads, sink tokens, recent tokens, first side (1: values alone), 0, 0]
// Template: T, RECORD, PAGE, HEADER, SIDE_K and HEADER_K (words of the keys in each); per side BITS (16:
// float16 numbers), DIMS, GROUP, SYMMETRIC, CODEBOOK and the coefficients C of its levels, CHANNEL,
// PAIRS, TREE and its BOOKS.
#if WITH_MIXED_BITS
// The table in the place of the headers has what differs by layer.
const int record_words = int(headers[0]);
const int dims_k = int(headers[2]);
const int dims_v = int(headers[3]);
#else
constexpr int record_words = RECORD;
constexpr int dims_k = DIMS_K;
constexpr int dims_v = DIMS_V;
constexpr int PAGE_RECORDS = PAGE / 16;
constexpr int BOOK_K = TREE_K == 1 ? 28 : 1;
constexpr int BOOK_V = TREE_V == 1 ? 28 : 1;
float levels_k[8];
float levels_v[8];
#pragma unroll
for (int i = 0; i < 8; i++) {
  levels_k[i] = as_type<float>(C_K[i]);
  levels_v[i] = as_type<float>(C_V[i]);
}
int books_k[BOOK_K];
#pragma unroll
for (int i = 0; i < BOOK_K; i++) {
  books_k[i] = BOOKS_K[i];
}
int books_v[BOOK_V];
#pragma unroll
for (int i = 0; i < BOOK_V; i++) {
  books_v[i] = BOOKS_V[i];
}
#endif

const int lane = thread_index_in_simdgroup;
const int unit = threadgroup_position_in_grid.x * (threads_per_threadgroup.x / 32) +
    simdgroup_index_in_threadgroup;
const bool values = int(threadgroup_position_in_grid.y) + size[5] == 1;
const int n_sink = size[3];
const int n_recent = size[4];
const int sink_units = (n_sink + 15) / 16;
const int units = sink_units + size[0] + (n_recent + 15) / 16;
const size_t tokens = size_t(n_sink) + 16 * size[0] + n_recent;
const int head = unit / units;
const int part = unit % units;
const int record = part - sink_units;
if (head < size[2]) {
  const bool paged = record >= 0 && record < size[0];
  const bool in_sink = record < 0;
  const int first = 16 * (in_sink ? part : record - size[0]);  // of the window
  const int many = metal::min(16, (in_sink ? n_sink : n_recent) - first);
  const size_t row = size_t(head) * tokens +
      (paged ? n_sink + 16 * record : in_sink ? first : n_sink + 16 * size[0] + first);
  const size_t from = size_t(head) * (in_sink ? n_sink : n_recent) + first;
  const device uint* at = records + (size_t(head) * size[1] + (paged ? record : 0)) * record_words;
#if WITH_MIXED_BITS
#else
  const device uint* header = headers +
      (size_t(head) * (size[1] / PAGE_RECORDS) + (paged ? record / PAGE_RECORDS : 0)) * HEADER;
  const int place = record % PAGE_RECORDS;
#endif
  if (!values) {
    device T* rows = out + row * dims_k;
#if WITH_MIXED_BITS
    if (paged) {
      kv_dequantize_blocks<T, 1>(at, headers, rows, lane);
    } else {
      kv_copy_words(rows, (in_sink ? sink_k : recent_k) + from * dims_k, many * dims_k, lane);
    }
#else
    if (paged) {
      kv_dequantize_side<
          T, BITS_K, DIMS_K, GROUP_K, SYMMETRIC_K, CODEBOOK_K, CHANNEL_K, PAIRS_K, TREE_K,
          BOOK_K, 1>(at, header, place, rows, levels_k, books_k, lane);
    } else {
      kv_copy<T, DIMS_K>(rows, (in_sink ? sink_k : recent_k) + from * DIMS_K, many, lane);
    }
#endif
  } else {
    device T* rows = out + (size[5] ? 0 : size_t(size[2]) * tokens * dims_k) + row * dims_v;
#if WITH_MIXED_BITS
    if (paged) {
      kv_dequantize_blocks<T, 0>(at, headers, rows, lane);
    } else {
      kv_copy_words(rows, (in_sink ? sink_v : recent_v) + from * dims_v, many * dims_v, lane);
    }
#else
    if (paged) {
      kv_dequantize_side<
          T, BITS_V, DIMS_V, GROUP_V, SYMMETRIC_V, CODEBOOK_V, CHANNEL_V, PAIRS_V, TREE_V,
          BOOK_V, 0>(at + SIDE_K, header + HEADER_K, place, rows, levels_v, books_v, lane);
    } else {
      kv_copy<T, DIMS_V>(rows, (in_sink ? sink_v : recent_v) + from * DIMS_V, many, lane);
    }
#endif
  }
}
