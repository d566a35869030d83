// Fifth part of attend_tile: adds up the simdgroups; the last threadgroup merges the splits.
// The simdgroups of a threadgroup are rescaled to a common maximum, then added up.
#pragma unroll
for (int i = 0; i < 2; i++) {
  sum[i] = tile_column_sum(sum[i]);
  if (g == 0) {
    tile_max[group * 8 + 2 * t + i] = top[i];
    tile_sum[group * 8 + 2 * t + i] = sum[i];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
for (int i = 0; i < 2; i++) {
  float peak = NOTHING;
  for (int n = 0; n < S; n++) {
    peak = metal::max(peak, tile_max[n * 8 + 2 * t + i]);
  }
  const float shrink = metal::fast::exp2(top[i] - peak);
#pragma unroll
  for (int n = 0; n < 2 * OB; n++) {
    o[n].v[i] *= shrink;
    o[n].v[2 + i] *= shrink;
  }
}
#pragma unroll
for (int first = 0; first < 2 * OB; first += 4) {
  const int many = metal::min(4, 2 * OB - first);
#pragma unroll
  for (int n = 0; n < many; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      pool[((group * 4 + n) * 32 + lane) * 4 + i] = o[first + n].v[i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_id; i < 128 * many; i += 32 * S) {
    const int owner = i / 4 % 32;
    const int row = tile_column(owner) + i % 2;
    int dim = 16 * first + 32 * (i / 256) + 4 * tile_row(owner) + i / 128 % 2 * 2 + i % 4 / 2;
#if WITH_MIXED_BITS
    dim = paged ? 16 * first + 16 * (i / 128) + 2 * tile_row(owner) + i % 4 / 2 : dim;
#endif
    float value = 0.0f;
    for (int n = 0; n < S; n++) {
      value += pool[512 * n + i];
    }
    tile_rows[row * ROW + dim] = value;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

const int slot0 = (head * rows + first_row) * splits;  // + row * splits + split
coherent(device) device float* partials = (coherent(device) device float*)partial_out;
for (int i = thread_id; i < tile_height * WIDTH; i += 32 * S) {
  const int row = i / WIDTH;
  partials[(slot0 + row * splits + split) * STRIDE + i % WIDTH] = tile_rows[row * ROW + i % WIDTH];
}
if (thread_id < tile_height) {
  float peak = NOTHING;
  for (int n = 0; n < S; n++) {
    peak = metal::max(peak, tile_max[n * 8 + thread_id]);
  }
  float all = 0.0f;
  for (int n = 0; n < S; n++) {
    all += tile_sum[n * 8 + thread_id] * metal::fast::exp2(tile_max[n * 8 + thread_id] - peak);
  }
  const int at = (slot0 + thread_id * splits + split) * STRIDE + WIDTH;
  partials[at] = peak;
  partials[at + 1] = all;
  partials[at + 2] = 0.0f;
  partials[at + 3] = 0.0f;
}
atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
threadgroup_barrier(mem_flags::mem_device);
if (thread_id == 0) {
  device atomic_uint* place = (device atomic_uint*)counter + unit_of_merge;
  arrived[0] = atomic_fetch_add_explicit(place, 1u, memory_order_relaxed);
}
threadgroup_barrier(mem_flags::mem_threadgroup);

if (arrived[0] + 1u == uint(splits)) {
  atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
  if (thread_id == 0) {
    atomic_store_explicit(
        (device atomic_uint*)counter + unit_of_merge, 0u, memory_order_relaxed);
  }
  // Weights of the splits, one row per simdgroup, in pool; sums after them.
  for (int row = group; row < tile_height; row += S) {
    const int at = (slot0 + row * splits) * STRIDE + WIDTH;
    float peaks[4];  // at most 128 splits
    float counts[4];
    float all = 0.0f;
    float peak = NOTHING;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      peaks[i] = lane + 32 * i < splits ? partials[at + (lane + 32 * i) * STRIDE] : NOTHING;
      counts[i] = lane + 32 * i < splits ? partials[at + (lane + 32 * i) * STRIDE + 1] : 0.0f;
      peak = metal::max(peak, peaks[i]);
    }
    for (ushort step = 1; step < 32; step *= 2) {
      peak = metal::max(peak, simd_shuffle_xor(peak, step));
    }
    float logit = NOTHING;
    if (HAS_SINKS) {
      const int q_row = first_row + row;
      logit = sinks[kv_head * (rows / new_tokens) + q_row / new_tokens] * as_type<float>(size[10]);
      peak = metal::max(peak, logit);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int n = lane + 32 * i;
      if (n < splits) {
        const float weight = metal::fast::exp2(peaks[i] - peak);
        pool[row * splits + n] = weight;
        all += weight * counts[i];
      }
    }
    for (ushort step = 1; step < 32; step *= 2) {
      all += simd_shuffle_xor(all, step);
    }
    if (HAS_SINKS) {
      all += metal::fast::exp2(logit - peak);
    }
    const float share = all > 0.0f ? 1.0f / all : 0.0f;
    for (int n = lane; n < splits; n += 32) {
      pool[row * splits + n] *= share;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // Four dims a lane, AHEAD loads in flight. With more simdgroups than rows, several share the splits of
  // a row. Sums of the windows are kept apart, in row S + job; the runs of pages are added to them, each
  // mapped back by its own map.
  const int ways = metal::max(1, int(S / uint(tile_height)));
#pragma unroll 1
  for (int r = 0; r < RUNS; r++) {
    const int low = r == 1 ? first_splits : 0;
    const int high = r == 0 ? first_splits : page_splits;
    const int last = r == 0 ? splits : page_splits;  // the windows' splits come with the first run
    for (int job = group; job < tile_height * ways; job += S) {
      const int row = job % uint(tile_height);
      for (int quad = lane; quad < WIDTH / 4; quad += 32) {
        const coherent(device) device float* from =
            partials + (slot0 + row * splits) * STRIDE + 4 * quad;
        float a[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
          a[i] = 0.0f;
        }
        for (int first = low + job / uint(tile_height); first < last; first += AHEAD * ways) {
          float4 x[AHEAD];
#pragma unroll
          for (int n = 0; n < AHEAD; n++) {
            const int at = metal::min(first + n * ways, splits - 1);
            x[n] = *(const coherent(device) device float4*)(from + size_t(at) * STRIDE);
          }
#pragma unroll
          for (int n = 0; n < AHEAD; n++) {
            const int at = first + n * ways;
            const float weight = at < last ? pool[row * splits + at] : 0.0f;
            const float of_pages = at < high ? weight : 0.0f;
            const float of_windows = at < page_splits ? 0.0f : weight;
            a[0] = metal::fma(of_pages, x[n].x, a[0]);
            a[1] = metal::fma(of_pages, x[n].y, a[1]);
            a[2] = metal::fma(of_pages, x[n].z, a[2]);
            a[3] = metal::fma(of_pages, x[n].w, a[3]);
            a[4] = metal::fma(of_windows, x[n].x, a[4]);
            a[5] = metal::fma(of_windows, x[n].y, a[5]);
            a[6] = metal::fma(of_windows, x[n].z, a[6]);
            a[7] = metal::fma(of_windows, x[n].w, a[7]);
          }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
          if (i < 4 || r == 0) {
            pool[1024 + (S * (i / 4) + job) * WIDTH + 4 * quad + i % 4] = a[i];
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_id; i < 8 * WIDTH; i += 32 * S) {
      const int row = i / WIDTH;
      const int dim = i % WIDTH;
      float of_pages = 0.0f;
      float of_windows = 0.0f;
      for (int n = row; row < tile_height && n < tile_height * ways; n += tile_height) {
        of_pages += pool[1024 + n * WIDTH + dim];
        of_windows += r == 0 ? pool[1024 + (S + n) * WIDTH + dim] : 0.0f;
      }
      tile_rows[row * ROW + dim] =
          r == 1 && !HAS_V ? tile_rows[row * ROW + dim] + of_pages : of_pages;
      if (r == 0 && row < tile_height) {
        pool[1024 + (S + row) * WIDTH + dim] = of_windows;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (HAS_V) {
#pragma unroll 1
      for (int m = group; m < 2 * BD; m += S) {
        const device uint* map = r == 1 ? map_v_2 : map_v;
        const int at = (size[22] & 2 ? head : kv_head) * size[8] + (m * 2 * BV * 32 + 4 * g + t) * 4;
        TileC c;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          c.v[i] = 0.0f;
        }
#pragma unroll 8
        for (int k = 0; k < 2 * BV; k++) {
          const uint4 x = *(const device uint4*)(map + (at + k * 128));
          TileA a;
          a.w[0] = x.x;
          a.w[1] = x.y;
          a.w[2] = x.z;
          a.w[3] = x.w;
          TileB b;
#pragma unroll
          for (int half_ = 0; half_ < 2; half_++) {
            const int dim = 16 * k + 8 * half_;
            b.w[half_] = kv_halves(
                tile_rows[tile_b_column(lane, 0) * ROW + dim + tile_b_row(lane, 0)],
                tile_rows[tile_b_column(lane, 1) * ROW + dim + tile_b_row(lane, 1)]);
          }
          tile_multiply(c, a, b);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int row = 2 * t + i % 2;
          if (row < tile_height) {
            pool[1024 + (S + row) * WIDTH + 16 * m + g + 8 * (i / 2)] += c.v[i];
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
#pragma unroll 1
  for (int i = thread_id; i < tile_height * D; i += 32 * S) {
    const int row = i / D;
    const int dim = i % D;
    const float of_pages = HAS_V ? 0.0f : tile_rows[row * ROW + dim];
    out[(head * rows + first_row + row) * D + dim] =
        T(of_pages + pool[1024 + (S + row) * WIDTH + dim]);
  }
}
