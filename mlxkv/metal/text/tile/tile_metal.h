// Tiles on Metal: 16 x 8 += 16 x 16 by 16 x 8, halves in, floats out, in 8 x 8 matrices.
// Written in the dialect, so the emulator runs this text unchanged. The lane map is the one in MLX's own
// kernels. Word r of A: row tile_row + 8 (r % 2), columns tile_column + 8 (r / 2) + 0, 1.
// Value 2 h + i of C: row tile_row + 8 h, column tile_column + i. Word r of B, halves i = 0, 1:
// row tile_b_row(lane, i) + 8 r, column tile_b_column(lane, i): pairs lie along the columns.
struct TileA {
  uint w[4];
};
struct TileB {
  uint w[2];
};
struct TileC {
  float v[4];
};

inline uint tile_row(uint lane) {
  return ((lane / 4) & 4u) + (lane / 2) % 4;
}
inline uint tile_column(uint lane) {
  return ((lane / 4) & 2u) * 2 + (lane % 2) * 2;
}
inline uint tile_lane(uint row, uint column) {
  return (row & 4u) * 4 + (row % 4) * 2 + (column & 4u) * 2 + (column / 2) % 2;
}
inline uint tile_b_row(uint lane, uint i) {
  return tile_row(lane);
}
inline uint tile_b_column(uint lane, uint i) {
  return tile_column(lane) + i;
}

inline void tile_multiply(thread TileC& c, TileA a, TileB b) {
#pragma unroll
  for (uint h = 0; h < 2; h++) {
    simdgroup_float8x8 sum;
    sum.thread_elements()[0] = c.v[2 * h];
    sum.thread_elements()[1] = c.v[2 * h + 1];
#pragma unroll
    for (uint k = 0; k < 2; k++) {
      simdgroup_half8x8 left, right;
      half2 pair = as_type<half2>(a.w[2 * k + h]);
      left.thread_elements()[0] = pair.x;
      left.thread_elements()[1] = pair.y;
      pair = as_type<half2>(b.w[k]);
      right.thread_elements()[0] = pair.x;
      right.thread_elements()[1] = pair.y;
      simdgroup_multiply_accumulate(sum, left, right, sum);
    }
    c.v[2 * h] = sum.thread_elements()[0];
    c.v[2 * h + 1] = sum.thread_elements()[1];
  }
}

// Returns c + a b, and keeps c.
inline TileC tile_product(TileC c, TileA a, TileB b) {
  tile_multiply(c, a, b);
  return c;
}

// Maximum and sum over the lanes of a column.
inline float tile_column_max(float value) {
  value = metal::max(value, simd_shuffle_xor(value, ushort(2)));
  value = metal::max(value, simd_shuffle_xor(value, ushort(4)));
  return metal::max(value, simd_shuffle_xor(value, ushort(16)));
}
inline float tile_column_sum(float value) {
  value += simd_shuffle_xor(value, ushort(2));
  value += simd_shuffle_xor(value, ushort(4));
  return value + simd_shuffle_xor(value, ushort(16));
}

inline uint kv_halves(float low, float high) {
  half2 pair;
  pair.x = half(low);
  pair.y = half(high);
  return as_type<uint>(pair);
}
// The low or the high halves of two words.
inline uint kv_both(uint a, uint b, int high) {
  return high ? (a >> 16) | (b & 0xFFFF0000u) : (a & 0xFFFFu) | (b << 16);
}
inline uint kv_multiply_halves(uint a, uint b) {
  return as_type<uint>(as_type<half2>(a) * as_type<half2>(b));
}

inline uint kv_add_halves(uint a, uint b) {
  return as_type<uint>(as_type<half2>(a) + as_type<half2>(b));
}
inline uint kv_add_multiplied_halves(uint a, uint b, uint c) {
  return as_type<uint>(metal::fma(as_type<half2>(b), as_type<half2>(c), as_type<half2>(a)));
}

// C, 16 x 8, as the right factor of the next product.
inline TileB tile_b_of(TileC c) {
  TileB b;
  b.w[0] = kv_halves(c.v[0], c.v[1]);
  b.w[1] = kv_halves(c.v[2], c.v[3]);
  return b;
}
// Numbers along the rows of B, in both halves: `pair` holds the numbers of rows tile_b_row & ~1 and the next.
inline uint tile_b_numbers(uint pair, uint lane) {
  return (tile_row(lane) % 2 ? pair >> 16 : pair & 0xFFFFu) * 0x10001u;
}

// The records of a simdgroup, every S-th pair, read in place: a buffer holds at most 2^32 words.
struct KvRecord {
  const device uint* buffer;
  uint at;
};
inline uint kv_read1(KvRecord from, int word) {
  return from.buffer[from.at + uint(word)];
}
inline uint2 kv_read2(KvRecord from, int word) {
  return *(const device uint2*)(from.buffer + (from.at + uint(word)));
}
inline uint4 kv_read4(KvRecord from, int word) {
  return *(const device uint4*)(from.buffer + (from.at + uint(word)));
}
inline KvRecord kv_record_after(KvRecord record, int words) {
  record.at += uint(words);
  return record;
}
struct KvPipe {
  KvRecord next;
  int words;  // of a record
};
template <int RECORD, int STAGES, int S, int STEP>
inline KvPipe kv_pipe_start(
    const device uint* buffer, size_t at, int words, int count, int group, int lane) {
  KvPipe pipe;
  pipe.next.buffer = buffer;
  pipe.next.at = uint(at);
  pipe.words = words;
  return pipe;
}
template <int RECORD, int STAGES, int S, int STEP>
inline KvRecord kv_pipe_wait(thread KvPipe& pipe, bool second) {
  return kv_record_after(pipe.next, second ? pipe.words : 0);
}
template <int RECORD, int STAGES, int S, int STEP>
inline void kv_pipe_release(thread KvPipe& pipe, int lane) {
  pipe.next = kv_record_after(pipe.next, STEP * pipe.words);
}
