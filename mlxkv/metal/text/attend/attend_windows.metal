// Fourth part of attend: scores and products for 16 tokens of a window, in threadgroups without records.
} else {
  for (int unit = part * each + group; unit < stop; unit += S) {
    const bool in_sink = unit < sink_units;
    const int token0 = in_sink ? 16 * unit : 16 * (unit - sink_units);
    const int tokens = (in_sink ? n_sink : n_recent) - token0;
    const int position0 = in_sink ? token0 : total - n_recent + token0;
    const int at_window = (head * (in_sink ? size[3] : size[4]) + token0) * D;
    float s[QT * 2];
#pragma unroll
    for (int i = 0; i < QT * 2; i++) {
      s[i] = 0.0f;
    }
    const device T* keys = (in_sink ? sink_k : recent_k) + at_window;
#pragma unroll 1
    for (int j = 0; j < BD; j++) {
      const int dim = 32 * j + 8 * t;
      float k[16];
#pragma unroll
      for (int i = 0; i < 16; i++) {
        k[i] = 0.0f;
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        if (g + 8 * r < tokens && dim < D) {
          const device T* row = keys + (g + 8 * r) * D + dim;
          if (D % 8 == 0) {
            kv_load<8>(row, k + 8 * r);
          } else {
#pragma unroll
            for (int i = 0; i < 8; i++) {
              k[8 * r + i] = dim + i < D ? float(row[dim + i < D ? i : 0]) : 0.0f;
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int q = 0; q < QT; q++) {
          const float query = q_tile[q * 32 * BD + dim + i];
          s[2 * q] = metal::fma(query, k[i], s[2 * q]);
          s[2 * q + 1] = metal::fma(query, k[8 + i], s[2 * q + 1]);
        }
      }
    }
    kv_probabilities<QT, OB * 4>(
        s, top, sum, o, last_seen, position0, tokens, g, LAZY, as_type<float>(CAP));
    const device T* values = (in_sink ? sink_v : recent_v) + at_window;
    // A token at a time: the values of all would not fit in registers.
#pragma unroll 1
    for (int n = 0; n < 4; n++) {
      const int token = 2 * t + 8 * (n / 2) + n % 2;
      float p[QT];  // moves from the lanes of the keys to those of the values
#pragma unroll
      for (int q = 0; q < QT; q++) {
        p[q] = simd_shuffle(n < 2 ? s[2 * q] : s[2 * q + 1], ushort(8 * t + 4 * (n % 2)));
      }
      if (token < tokens) {
        const device T* row = values + token * D + 4 * g;
#pragma unroll
        for (int j = 0; j < BD; j++) {
          float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          if (32 * j + 4 * g < D) {
            if (D % 4 == 0) {
              kv_load<4>(row + 32 * j, v);
            } else {
#pragma unroll
              for (int d = 0; d < 4; d++) {
                v[d] = 32 * j + 4 * g + d < D ? float(row[32 * j + d]) : 0.0f;
              }
            }
          }
#pragma unroll
          for (int d = 0; d < 4; d++) {
#pragma unroll
            for (int q = 0; q < QT; q++) {
              const int i = q * OB * 4 + 4 * j + d;
              o[i] = metal::fma(p[q], v[d], o[i]);
            }
          }
        }
      }
    }
  }
}
