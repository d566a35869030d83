// Fourth part of attend: 32 tokens of a window, in threadgroups without records.
} else {
  for (int unit = part * each + 2 * int(team); unit < stop; unit += 2 * TEAMS) {
    // Partial scores of 16 tokens at a time: registers.
#pragma unroll 1
    for (int e = 0; e < 2; e++) {
      const bool of_sink = unit + e < sink_units;
      const int first = 16 * (of_sink ? unit + e : unit + e - sink_units);
      const int tokens = unit + e < stop ? (of_sink ? n_sink : n_recent) - first : 0;
      const uint at = uint(head * (of_sink ? size[3] : size[4]) + first) * uint(D);
      float s[2 * QT];
#pragma unroll
      for (int i = 0; i < 2 * QT; i++) {
        s[i] = 0.0f;
      }
#pragma unroll 1
      for (int n = 0; n < PD; n++) {
        const uint block = uint(PD) * own_part + uint(n);
        const int dim = 32 * int(block) + 8 * int(t);
        float k[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
          k[i] = 0.0f;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
          if (int(g) + 8 * r < tokens && dim < D) {
            const device T* row = (of_sink ? sink_k : recent_k) + (at + uint((int(g) + 8 * r) * D + dim));
            if (D % 8 == 0) {
              kv_load<8>(row, k + 8 * r);
            } else {
#pragma unroll
              for (int d = 0; d < 8; d++) {
                k[8 * r + d] = dim + d < D ? float(row[dim + d < D ? d : 0]) : 0.0f;
              }
            }
          }
        }
#pragma unroll
        for (int q = 0; q < QT; q++) {
#pragma unroll
          for (int pair = 0; pair < 2; pair++) {
            float query[4];  // dims 0, 1, 4, 5 of eight, then the others
            kv_four_queries<WIDE_Q>(queries, 2u * (eights_at + uint(q * QB * 4) + 4u * block) + uint(pair), query);
#pragma unroll
            for (int i = 0; i < 8; i++) {
              const int d = 2 * pair + i % 2 + i / 2 % 2 * 4;
              s[i / 4 * QT + q] = metal::fma(query[i % 4], k[i / 4 * 8 + d], s[i / 4 * QT + q]);
            }
          }
        }
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        kv_store_shared<QT>(shared, (16u * uint(e) + 8u * uint(r) + g) * TOKEN + 4u * own_part + t, s + r * QT);
      }
    }
    kv_team_barrier<PARTS>();
    float p[OWN];
    kv_scores<QT, OWN, PARTS, TOKEN>(shared, lane, own_part, p);
    const int own_unit = unit + int(lane / 16u);
    const bool in_sink = own_unit < sink_units;
    const int own = 16 * (in_sink ? own_unit : own_unit - sink_units) + int(lane % 16u);  // in its window
    const int position = in_sink ? own : total - n_recent + own;
    const bool exists = own_unit < stop && own < (in_sink ? n_sink : n_recent);
#pragma unroll
    for (int q = 0; q < OWN; q++) {
      const int last_seen = total - new_tokens + (first_row + int(first_own) + q) % new_tokens;
      p[q] = exists && position <= last_seen ? p[q] : -INFINITY;
    }
    float shrink[OWN];
    kv_probabilities<OWN>(p, top, shrink, LAZY, as_type<float>(CAP));
    float sum[SUMS];
    kv_load_shared<SUMS>(sums, lane, sum);
#pragma unroll
    for (int q = 0; q < OWN; q++) {
      sum[q * (1 + MORE)] = metal::fma(sum[q * (1 + MORE)], shrink[q], p[q]);
      weight_floats[(lane / 2u * uint(QT) + first_own + uint(q)) * 2u + lane % 2u] = p[q];
    }
    kv_store_shared<SUMS>(sums, lane, sum);
    if (lane < uint(OWN)) {
      ((kv_floats)shrinks)[first_own + lane] = kv_one_of<OWN>(shrink, lane);
    }
    kv_team_barrier<PARTS>();
    kv_rescale<QT, OB * 4>(shrinks, o);
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
      const bool of_sink = unit + i / 2 < sink_units;
      const int first = 16 * (of_sink ? unit + i / 2 : unit + i / 2 - sink_units);
      const int tokens = unit + i / 2 < stop ? (of_sink ? n_sink : n_recent) - first : 0;
      const uint at = uint(head * (of_sink ? size[3] : size[4]) + first) * uint(D);
      float of_tokens[2 * QT];
      kv_load_shared<2 * QT>(weights, uint(4 * i) + t, of_tokens);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int token = 2 * int(t) + 8 * (i % 2) + h;
        if (token < tokens) {
          const device T* row = (of_sink ? sink_v : recent_v) + (at + uint(token * D));
#pragma unroll
          for (int n = 0; n < PD; n++) {
            const int dim = 32 * (PD * int(own_part) + n) + 4 * int(g);
            float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (dim < D) {
              if (D % 4 == 0) {
                kv_load<4>(row + dim, v);
              } else {
#pragma unroll
                for (int d = 0; d < 4; d++) {
                  v[d] = dim + d < D ? float(row[dim + d < D ? dim + d : dim]) : 0.0f;
                }
              }
            }
#pragma unroll
            for (int d = 0; d < 4; d++) {
#pragma unroll
              for (int q = 0; q < QT; q++) {
                const int to = q * OB * 4 + 4 * n + d;
                o[to] = metal::fma(of_tokens[2 * q + h], v[d], o[to]);
              }
            }
          }
        }
      }
    }
  }
}
