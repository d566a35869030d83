// Fourth part of attend_tile: the windows, in threadgroups without records.
} else {
  for (; unit < stop; unit += S) {
    const int mine = unit < 0 ? 0 : lane;
    if (POOLED) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    const bool in_sink = unit < sink_units;
    const int token0 = in_sink ? 16 * unit : 16 * (unit - sink_units);
    const int tokens = (in_sink ? n_sink : n_live) - token0;
    const int position0 = in_sink ? token0 : total - n_live + token0;
    const size_t base = (size_t(head) * (in_sink ? size[3] : size[4]) + token0) * D;
    const device uint* keys =
        (const device uint*)((in_sink ? sink_k : live_k) + (base + uint(g * D + 8 * t)));
    const device uint* values =
        (const device uint*)((in_sink ? sink_v : live_v) + (base + uint(2 * t * D + 4 * g)));
    TileC s[1];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      s[0].v[i] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < BD; j++) {
      uint x[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        x[i] = 0u;
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        if (g + 8 * r < tokens && 32 * j + 8 * t < D) {
          const uint4 w = *(const device uint4*)(keys + (8 * r * D + 32 * j) / 2);
          x[4 * r] = w.x;
          x[4 * r + 1] = w.y;
          x[4 * r + 2] = w.z;
          x[4 * r + 3] = w.w;
        }
      }
#pragma unroll
      for (int u = 0; u < 2; u++) {
        TileA a;
#pragma unroll
        for (int m = 0; m < 4; m++) {
          const int r = m % 2;
          const int at = 4 * r + u;
          a.w[m] = m / 2 ? kv_halves(kv_high<BF16>(x[at]), kv_high<BF16>(x[at + 2]))
                         : kv_halves(kv_low<BF16>(x[at]), kv_low<BF16>(x[at + 2]));
        }
        tile_multiply(s[0], a, kv_query<POOLED>(q_tile, queries, 2 * j + u, mine));
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (CAP) {
        s[0].v[i] = kv_capped(s[0].v[i] * KV_SCORE, as_type<float>(CAP)) / KV_SCORE;
      }
      const int token = g + 8 * (i / 2);
      const int position = position0 + token;
      if (token >= tokens || position > last_seen[i % 2]) {
        s[0].v[i] = -INFINITY;
      }
    }
    TileB p[1];
    kv_probabilities<2 * OB + EXTRA, 1>(s, p, top, sum, o, KV_SCORE);
#pragma unroll
    for (int j = 0; j < BD; j++) {
      uint x[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        x[i] = 0u;
      }
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const int token = 2 * t + 8 * (n / 2) + n % 2;
        if (token < tokens && 32 * j + 4 * g < D) {
          const uint2 w = *(const device uint2*)(values + ((8 * (n / 2) + n % 2) * D + 32 * j) / 2);
          x[2 * n] = w.x;
          x[2 * n + 1] = w.y;
        }
      }
#pragma unroll
      for (int u = 0; u < 2; u++) {
        TileA a;
#pragma unroll
        for (int m = 0; m < 4; m++) {
          const int at = 4 * (m / 2) + u;
          a.w[m] = m % 2 ? kv_halves(kv_high<BF16>(x[at]), kv_high<BF16>(x[at + 2]))
                         : kv_halves(kv_low<BF16>(x[at]), kv_low<BF16>(x[at + 2]));
        }
        tile_multiply(o[2 * j + u], a, p[0]);
      }
    }
  }
}
