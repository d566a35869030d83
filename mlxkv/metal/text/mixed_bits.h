// Mixed bits (mlxkv/metal/template.py): codes whose width differs by block of 16 dims, read by a table that
// the layers of a model share a text for. Comes after codes.h and loads.h.
//
// Lane (g, t) holds, of block b, the slots (r, p, half), r, p and half 0..1:
//   keys:    token g + 8 r,            dim 16 b + 4 t + 2 half + p
//   values:  token 2 t + 8 r + half,   dim 16 b + 2 g + p
// as fragments of a 16 x 8 x 16 product. Its words are rows of 32, one for each lane: of codes of 8 bits two (r),
// of 4 bits one; two blocks of 2 bits, or four of 1 bit, share one. A code is at bit 16 half and
//   8 bits: 8 p     4 bits: 8 r + 4 p     2 bits: 4 r + 2 p     1 bit: r + 2 p     of its part of the word.
// Codes of 3 bits have two bits as codes of 2 bits, and the third as one of 1 bit. Where the last row is half
// empty, two lanes share a word.

#if WITH_MIXED_BITS
#ifndef KV_STAGE // cuda.h has its own
typedef const threadgroup uint4* KvMixedTable;
#endif
constant constexpr int KV_MIXED_HEAD = 8;
constant constexpr int KV_MIXED_MOST = 16;  // blocks of a side in the table
constant constexpr int KV_MIXED_ENTRY = 12;
constant constexpr uint KV_MIXED_HALF_ROW = 1u;
constant constexpr uint KV_MIXED_THIRD = 2u;
constant constexpr uint KV_MIXED_EIGHT = 4u;
constant constexpr uint KV_MIXED_THIRD_HALF_ROW = 8u;
constant constexpr uint KV_MIXED_SPECIAL = 1u << 31;  // of entry[1], where one of these is set

// A lane's part of a word that it shares with its neighbour, spread as in a word of its own.
inline uint kv_mixed_spread(uint word, int lane) {
  const uint own = word >> (16 * (lane % 2));
  return (own & 0xFFu) | ((own & 0xFF00u) << 8);
}

// A lane's word of a row of a record.
inline uint kv_mixed_word(const device uint* record, uint row, int lane, uint shared) {
  const uint word = record[int(row) + (shared != 0u ? lane / 2 : lane)];
  return shared != 0u ? kv_mixed_spread(word, lane) : word;
}

// The entry of block b of one side, 0 keys, 1 values.
inline const device uint* kv_mixed_entry(const device uint* table, int side, int b) {
  return table + KV_MIXED_HEAD + (side * KV_MIXED_MOST + b) * KV_MIXED_ENTRY;
}

// A lane's eight codes of a block, minus the middle: [r][half][p].
inline void kv_mixed_levels(
    const device uint* record, const device uint* entry, int lane, thread float* levels) {
  const uint4 shifts = *(const device uint4*)entry;
  const uint other_row = entry[6];
  const uint more = entry[7];
  const uint row = entry[8];
  const float middle = as_type<float>(entry[10]);
  const uint flags = more >> 16;
  const uint shared = flags & KV_MIXED_HALF_ROW;
  const uint word = kv_mixed_word(record, shared != 0u ? other_row : row, lane, shared);
  uint x[2];
  x[0] = word >> (shifts.x & 31u);
  x[1] = word >> (shifts.y & 31u);
  if ((flags & KV_MIXED_EIGHT) != 0u) {
    x[1] = record[int(row) + 32 + lane];
  }
  const uint step = (more >> 8) & 31u;
  const uint top = shifts.z & 0xFFFFu;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint shift = (i % 2 ? step : 0u) + 16u * uint(i / 2 % 2);
    levels[i] = float((x[i / 4] >> shift) & top) - middle;
  }
  if ((flags & KV_MIXED_THIRD) != 0u) {
    const uint third =
        kv_mixed_word(record, other_row, lane, flags & KV_MIXED_THIRD_HALF_ROW) >> (more & 31u);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      levels[i] += float((third >> (i / 4 + 2 * (i % 2) + 16 * (i / 2 % 2))) & 1u) * 4.0f;
    }
  }
}

// What codes are larger by as `kv_mixed_halves`.
constant constexpr float KV_MIXED_OFFSET = 1024.0f;

// The codes of a block below a leading one: pairs[2 r + p] holds slots (r, p, half 0 and 1), those of p = 1 higher by
// the entry's step. word: of the block's row. TOP: the leading one.
template <uint TOP>
inline void kv_mixed_pairs(uint word, uint4 entry, thread uint* pairs) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const uint x = word >> (r ? entry.y : entry.x);
    pairs[2 * r] = (x & entry.z) | TOP;
    pairs[2 * r + 1] = (x & entry.w) | TOP;
  }
}

// A lane's codes of a block as halves, larger by KV_MIXED_OFFSET: `kv_mixed_pairs`, where codes of p = 1 are
// codes / entry[9]. at: first word of the record in `run`. table: the side's entries, three fours of words each.
inline void kv_mixed_halves(
    const device uint* run, uint at, KvMixedTable table, uint b, uint lane, thread uint* pairs) {
  uint4 first = table[3u * b];
  const uint own = at + table[3u * b + 2u].x + lane;
  const uint word = run[own];
  if (first.y < KV_MIXED_SPECIAL) {
    kv_mixed_pairs<0x64006400u>(word, first, pairs);
  } else {
    const uint4 rest = table[3u * b + 1u];
    const uint flags = rest.w >> 16;
    first.y &= 31u;
    if ((flags & KV_MIXED_EIGHT) != 0u) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const uint x = r ? run[own + 32u] : word;
        pairs[2 * r] = x & first.z;
        pairs[2 * r + 1] = (x >> 8) & first.z;
      }
    } else {
      const bool third = (flags & KV_MIXED_THIRD) != 0u;
      const bool shared = third ? (flags & KV_MIXED_THIRD_HALF_ROW) != 0u : true;
      uint other = run[at + rest.z + (shared ? lane / 2u : lane)];
      if (shared) {
        other = kv_mixed_spread(other, int(lane));
      }
      kv_mixed_pairs<0u>(third ? word : other, first, pairs);
      const uint high = third ? other >> (rest.w & 31u) : 0u;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        pairs[2 * r] |= (high << (2 - r)) & 0x00040004u;
        pairs[2 * r + 1] |= (high << (2 - r)) & 0x00100010u;
      }
    }
    // By another instruction than above, or a compiler would move it behind both ways of a branch.
#pragma unroll
    for (int i = 0; i < 4; i++) {
      pairs[i] += 0x64006400u;
    }
  }
}
#endif
