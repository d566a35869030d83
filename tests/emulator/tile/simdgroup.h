// The tile product on Metal: 16 x 8 += 16 x 16 by 16 x 8, halves in, floats out, in 8 x 8 matrices.
// In the dialect: this text is what the Metal header holds, and the emulator runs it as it stands.
// Each lane holds pairs of neighbours. Word r of A: row tile_row + 8 (r % 2), columns
// tile_column + 8 (r / 2) + 0, 1. Value 2 h + i of C: row tile_row + 8 h, column tile_column + i.
// Word r of B holds elements i = 0, 1 at row tile_b_row(lane, i) + 8 r, column tile_b_column(lane,
// i).
struct TileA {
  uint w[4];
};
struct TileB {
  uint w[2];
};
struct TileC {
  float v[4];
};

inline uint tile_row(uint lane) { return ((lane / 4) & 4u) + (lane / 2) % 4; }
inline uint tile_column(uint lane) { return ((lane / 4) & 2u) * 2 + (lane % 2) * 2; }
inline uint tile_b_row(uint lane, uint i) { return tile_row(lane); }
inline uint tile_b_column(uint lane, uint i) { return tile_column(lane) + i; }

inline void tile_multiply(thread TileC& c, TileA a, TileB b) {
  for (uint h = 0; h < 2; h++) {
    simdgroup_float8x8 sum;
    sum.thread_elements()[0] = c.v[2 * h];
    sum.thread_elements()[1] = c.v[2 * h + 1];
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
