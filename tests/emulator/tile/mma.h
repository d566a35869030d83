// The tile product under the lane map of CUDA's mma.sync m16n8k16, for the emulator alone.
// Same names and layout as simdgroup.h; only the four functions that say who holds what differ.
struct TileA {
  uint w[4];
};
struct TileB {
  uint w[2];
};
struct TileC {
  float v[4];
};

inline uint tile_row(uint lane) { return lane / 4; }
inline uint tile_column(uint lane) { return lane % 4 * 2; }
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
