// The tile product on CUDA: what `cuda.h` holds, with the lane map that mma.h emulates.
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

inline void tile_multiply(thread TileC& c, TileA a, TileB b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
      : "r"(a.w[0]), "r"(a.w[1]), "r"(a.w[2]), "r"(a.w[3]), "r"(b.w[0]), "r"(b.w[1]));
}
