"""Good kernels for the tests of the emulator: bodies in the dialect, and the same in NumPy."""

from __future__ import annotations

SAXPY = """
uint i = thread_position_in_grid.x;
o[i] = T(fma(float(x[i]), a[0], float(y[i])));
"""

# One simdgroup for each row; the first lane writes.
ROW_SUM = """
uint row = thread_position_in_grid.x / 32;
uint lane = thread_index_in_simdgroup;
float sum = 0.0f;
for (uint j = lane; j < uint(x_shape[1]); j += 32) sum += float(x[row * x_shape[1] + j]);
sum = simd_sum(sum);
if (lane == 0) o[row] = T(sum);
"""

HADAMARD_HEADER = """
template <typename U>
inline float hadamard_step(float value, uint lane, ushort step) {
  float other = simd_shuffle_xor(value, step);
  return (lane & step) ? other - value : value + other;
}
"""

# 128 values for each simdgroup, four in a lane: rotated, then four bits each with one scale.
HADAMARD_ENCODE = """
uint row = thread_position_in_grid.x / 32;
uint lane = thread_index_in_simdgroup;
float v[4];
for (uint j = 0; j < 4; j++) v[j] = float(x[row * 128 + lane * 4 + j]);
float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
v[0] = a + c;
v[1] = b + d;
v[2] = a - c;
v[3] = b - d;
for (ushort step = 1; step < 32; step *= 2) {
  for (uint j = 0; j < 4; j++) v[j] = hadamard_step<T>(v[j], lane, step);
}
float peak = 0.0f;
for (uint j = 0; j < 4; j++) {
  v[j] *= 0.08838834764831845f;
  peak = metal::max(peak, metal::abs(v[j]));
}
float scale = simd_max(peak) / 7.0f;
uint word = 0;
for (uint j = 0; j < 4; j++) {
  uint code = uint(metal::clamp(metal::rint(v[j] / scale), -8.0f, 7.0f) + 8.0f);
  word |= code << (4 * j);
}
codes[row * 32 + lane] = ushort(word);
if (lane == 0) scales[row] = scale;
"""

# Each threadgroup sums its share of the keys, then its simdgroups meet in threadgroup memory.
SPLIT_K = """
threadgroup float part[8][D], norm[8], peak[8];
uint lane = thread_index_in_simdgroup;
uint group = simdgroup_index_in_threadgroup;
uint split = threadgroup_position_in_grid.x;
float top = -INFINITY, sum = 0.0f;
float acc[D / 32];
for (uint j = 0; j < D / 32; j++) acc[j] = 0.0f;
for (uint t = split * 8 + group; t < uint(length[0]); t += 8 * threadgroups_per_grid.x) {
  float score = 0.0f;
  for (uint j = 0; j < D / 32; j++) {
    score += float(q[lane + 32 * j]) * float(k[t * D + lane + 32 * j]);
  }
  score = simd_sum(score);
  float above = metal::max(top, score);
  float shrink = metal::exp(top - above);
  float p = metal::exp(score - above);
  top = above;
  sum = sum * shrink + p;
  for (uint j = 0; j < D / 32; j++) acc[j] = acc[j] * shrink + p * float(v[t * D + lane + 32 * j]);
}
for (uint j = 0; j < D / 32; j++) part[group][lane + 32 * j] = acc[j];
if (lane == 0) {
  norm[group] = sum;
  peak[group] = top;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (group == 0) {
  float best = lane < 8 ? peak[lane] : -INFINITY;
  best = simd_max(best);
  float total = 0.0f;
  for (uint s = 0; s < 8; s++) total += norm[s] * metal::exp(peak[s] - best);
  for (uint j = 0; j < D / 32; j++) {
    float x = 0.0f;
    for (uint s = 0; s < 8; s++) x += part[s][lane + 32 * j] * metal::exp(peak[s] - best);
    out[split * D + lane + 32 * j] = x;
  }
  if (lane == 0) {
    stats[split * 2] = best;
    stats[split * 2 + 1] = total;
  }
}
"""

MATRIX_8X8 = """
simdgroup_matrix<T, 8, 8> a, b;
simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
uint row = simdgroup_index_in_threadgroup * 8;
for (uint k = 0; k < 32; k += 8) {
  simdgroup_load(a, x + row * 32 + k, 32);
  simdgroup_load(b, y + k * 8, 8);
  simdgroup_multiply_accumulate(c, a, b, c);
}
simdgroup_store(c, o + row * 8, 8);
"""

# 16 x 16 by 16 x 8, every lane placing its elements by the lane map of the header.
TILE = """
uint lane = thread_index_in_simdgroup;
uint row = tile_row(lane), column = tile_column(lane);
TileA a;
for (uint r = 0; r < 4; r++) {
  a.w[r] = *(const device uint*)(x + (row + 8 * (r % 2)) * 16 + column + 8 * (r / 2));
}
TileB b;
for (uint r = 0; r < 2; r++) {
  uint word = 0;
  for (uint i = 0; i < 2; i++) {
    half value = y[(tile_b_row(lane, i) + 8 * r) * 8 + tile_b_column(lane, i)];
    word |= uint(as_type<ushort>(value)) << (16 * i);
  }
  b.w[r] = word;
}
TileC c;
for (uint i = 0; i < 4; i++) c.v[i] = 1.0f;
tile_multiply(c, a, b);
for (uint i = 0; i < 4; i++) o[(row + 8 * (i / 2)) * 8 + column + i % 2] = c.v[i];
"""

# The last threadgroup to arrive adds up what the others wrote, and sets the counter back.
FUSED_MERGE = """
threadgroup uint arrived[1];
uint t = thread_index_in_threadgroup;
uint group = threadgroup_position_in_grid.x;
uint groups = threadgroups_per_grid.x;
partial[group * 64 + t] = x[group * 64 + t] * 2.0f;
atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
threadgroup_barrier(mem_flags::mem_device);
if (t == 0) {
  device atomic_uint* place = (device atomic_uint*)counter;
  arrived[0] = atomic_fetch_add_explicit(place, 1u, memory_order_relaxed);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (arrived[0] == groups - 1) {
  atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
  float sum = 0.0f;
  for (uint g = 0; g < groups; g++) sum += partial[g * 64 + t];
  o[t] = sum;
  if (t == 0) {
    atomic_store_explicit((device atomic_uint*)counter, 0u, memory_order_relaxed);
  }
}
"""
