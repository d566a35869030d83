// The tiles of mlxkv/metal/text/tile/tile_cuda.h for the emulator: the lane map of mma.sync m16n8k16. What the maps share
// is tile_metal.h's.
inline uint tile_row(uint lane) { return lane / 4; }
inline uint tile_column(uint lane) { return lane % 4 * 2; }
inline uint tile_lane(uint row, uint column) { return row * 4 + column / 2; }
inline uint tile_b_row(uint lane, uint i) { return lane % 4 * 2 + i; }
inline uint tile_b_column(uint lane, uint i) { return lane / 4; }

inline void tile_multiply(thread TileC& c, TileA a, TileB b, emu::Site at = emu::Site::current()) {
  float fa[8], fb[4], sum[4];
  for (uint r = 0; r < 4; r++) {
    half2 pair = as_type<half2>(a.w[r]);
    fa[2 * r] = float(pair.x), fa[2 * r + 1] = float(pair.y);
  }
  for (uint r = 0; r < 2; r++) {
    half2 pair = as_type<half2>(b.w[r]);
    fb[2 * r] = float(pair.x), fb[2 * r + 1] = float(pair.y);
  }
  emu_matrix(emu::kMatrix16, fa, fb, c.v, sum, at);
  for (uint i = 0; i < 4; i++) c.v[i] = sum[i];
}

// c + a b, c kept.
inline TileC tile_product(TileC c, TileA a, TileB b) {
  tile_multiply(c, a, b);
  return c;
}

inline float tile_column_max(float value) {
  value = metal::max(value, simd_shuffle_xor(value, ushort(4)));
  value = metal::max(value, simd_shuffle_xor(value, ushort(8)));
  return metal::max(value, simd_shuffle_xor(value, ushort(16)));
}
inline float tile_column_sum(float value) {
  value += simd_shuffle_xor(value, ushort(4));
  value += simd_shuffle_xor(value, ushort(8));
  return value + simd_shuffle_xor(value, ushort(16));
}

// What movmatrix does: word (row, pair) of an 8 x 8 of halves -> word of its transpose.
inline uint kv_transposed(uint word) {
  uint lane = emu_lane(), row = lane / 4, pair = lane % 4, out = 0;
  for (uint i = 0; i < 2; i++) {
    uint from = simd_shuffle(word, ushort((2 * pair + i) * 4 + row / 2));
    out |= (row % 2 ? from >> 16 : from & 0xFFFFu) << (16 * i);
  }
  return out;
}
inline TileB tile_b_of(TileC c) {
  TileB b;
  b.w[0] = kv_transposed(kv_halves(c.v[0], c.v[1]));
  b.w[1] = kv_transposed(kv_halves(c.v[2], c.v[3]));
  return b;
}
inline uint tile_b_numbers(uint pair, uint lane) { return pair; }
