// Fourth part of attend_tile: the windows, in threadgroups without records.
} else {
  const int sinks_from = head * size[3] * D;
  const int recent_from = head * size[4] * D;
  for (; unit < stop; unit += S) {
    const int mine = POOLED && unit < 0 ? 0 : lane;
    if (POOLED) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    const bool in_sink = unit < sink_units;
    const int token0 = in_sink ? 16 * unit : 16 * (unit - sink_units);
    const int tokens = (in_sink ? n_sink : n_recent) - token0;
    const int position0 = in_sink ? token0 : total - n_recent + token0;
    const int base = (in_sink ? sinks_from : recent_from) + token0 * D;
    const device T* keys = in_sink ? sink_k : recent_k;
    const device T* values = in_sink ? sink_v : recent_v;
    const int key = base + g * D + 8 * t;
    const int value = base + 2 * t * D + 4 * g;
    // Tokens from that key, and from that value on.
    const int key_tokens = tokens - g;
    const int value_tokens = tokens - 2 * t;
    TileC s[1];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      s[0].v[i] = 0.0f;
    }
    constexpr int AT_ONCE = POOLED ? 1 : BD;  // instructions have to fit in a cache
#pragma unroll AT_ONCE
    for (int j = 0; j < BD; j++) {
      uint x[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        x[i] = 0u;
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        if (8 * r < key_tokens && 32 * j + 8 * t < D) {
          const uint4 w = *(const device uint4*)(keys + (key + 8 * r * D + 32 * j));
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
      const int position = position0 + g + 8 * (i / 2);
      if (8 * (i / 2) >= key_tokens || position > last_seen[i % 2]) {
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
        const int token = 8 * (n / 2) + n % 2;
        if (token < value_tokens && 32 * j + 4 * g < D) {
          const uint2 w = *(const device uint2*)(values + (value + token * D + 32 * j));
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
