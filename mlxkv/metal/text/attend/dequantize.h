// Decoding of dequantize.metal, with its wide stores.

inline uint kv_pack(half a, half b) {
  return uint(as_type<ushort>(a)) | (uint(as_type<ushort>(b)) << 16);
}
inline uint kv_pack(bfloat16_t a, bfloat16_t b) {
  return uint(as_type<ushort>(a)) | (uint(as_type<ushort>(b)) << 16);
}
inline uint kv_pack(float a, float b) {
  return 0u;
}

// Stores four values to dims first .. first + 3 of a row of `dims`; WHOLE: by one store.
template <typename T, int WHOLE>
inline void kv_store4(device T* row, int first, int dims, const thread T* values) {
  if (WHOLE) {
    if (first < dims) {
      if (sizeof(T) == 4) {
        float4 x;
        x.x = float(values[0]);
        x.y = float(values[1]);
        x.z = float(values[2]);
        x.w = float(values[3]);
        *(device float4*)(row + first) = x;
      } else {
        uint2 x;
        x.x = kv_pack(values[0], values[1]);
        x.y = kv_pack(values[2], values[3]);
        *(device uint2*)(row + first) = x;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (first + i < dims) {
        row[first + i] = values[i];
      }
    }
  }
}

// Stores eight values in the same way.
template <typename T, int WHOLE>
inline void kv_store8(device T* row, int first, int dims, const thread T* values) {
  if (WHOLE && sizeof(T) == 2) {
    if (first < dims) {
      uint4 x;
      x.x = kv_pack(values[0], values[1]);
      x.y = kv_pack(values[2], values[3]);
      x.z = kv_pack(values[4], values[5]);
      x.w = kv_pack(values[6], values[7]);
      *(device uint4*)(row + first) = x;
    }
  } else {
    kv_store4<T, WHOLE>(row, first, dims, values);
    kv_store4<T, WHOLE>(row, first + 4, dims, values + 4);
  }
}

// Copies up to 16 rows of DIMS values by a simdgroup, with many loads in flight.
template <typename T, int DIMS>
inline void kv_copy(device T* to, const device T* from, int rows, int lane) {
  constexpr int BYTES = DIMS * sizeof(T);
  if (BYTES % 16 == 0) {
    constexpr int MOST = 8;
    const int all = rows * (BYTES / 16);
    for (int start = 0; start < all; start += 32 * MOST) {
      uint4 run[MOST];
#pragma unroll
      for (int m = 0; m < MOST; m++) {
        const int i = start + 32 * m + lane;
        if (i < all) {
          run[m] = ((const device uint4*)from)[i];
        }
      }
#pragma unroll
      for (int m = 0; m < MOST; m++) {
        const int i = start + 32 * m + lane;
        if (i < all) {
          ((device uint4*)to)[i] = run[m];
        }
      }
    }
  } else {
    for (int i = lane; i < rows * DIMS; i += 32) {
      to[i] = from[i];
    }
  }
}

// Decodes one side of a record, 16 tokens, by one simdgroup: codes and numbers at `side`, the page's header
// at `header`, to rows [16, DIMS]. place: position of the record in its page.
template <
    typename T, int BITS, int DIMS, int GROUP, int SYMMETRIC, int CODEBOOK, int CHANNEL,
    int PAIRS, int TREE, int BOOKS, int KEYS>
inline void kv_dequantize_side(
    const device uint* side, const device uint* header, int place, device T* rows,
    const thread float* levels, const thread int* books, int lane) {
  constexpr int BLOCKS = (DIMS + 31) / 32;
  constexpr int GROUPS = CHANNEL ? 1 : (DIMS + GROUP - 1) / GROUP;
  constexpr int GROUP_BLOCKS = CHANNEL ? BLOCKS : (GROUP + 31) / 32;
  constexpr int RUN = KEYS ? 8 : 4;  // neighbouring dims of a lane in a block
  constexpr int WORDS = kv_lane_words<BITS>(BLOCKS);
  constexpr float STEPS = float(1 << BITS);
  const int g = lane / 4;
  const int t = lane % 4;
  const device half* numbers = (const device half*)(side + 32 * WORDS);
  const device half* page_numbers = (const device half*)header +
      (CHANNEL ? 16 * place / GROUP * (SYMMETRIC ? 1 : 2) * 32 * BLOCKS : 0);
  uint words[WORDS];
  kv_load_some<WORDS, WORDS>(side, 0u, uint(lane), 0u, words);
#if WITH_PAIRS
  // Radius and angle of pairs of key dims: the other half is BLOCKS / 2 blocks further.
#pragma unroll
  for (int j = 0; j < (PAIRS ? BLOCKS / 2 : 0); j++) {
    const int pair = 32 * j + 8 * t;
    const int other = j + BLOCKS / 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      T first[8];
      T second[8];
#pragma unroll
      for (int p = 0; p < 8; p++) {
        float numbers_of[2];  // radius, angle
#pragma unroll
        for (int half_ = 0; half_ < 2; half_++) {
          const int block = half_ ? other : j;
          const uint word = words[kv_slot_word<BITS>(block, r, p % 4)];
          const uint high = words[BITS == 3 ? kv_high_word(block) : 0];
          const float code = float(kv_code<BITS>(word, high, block, r, p % 4, p / 4));
          const int at = half_ * DIMS / 2 + pair + p;
          numbers_of[half_] = metal::fma(
              code + 0.5f, float(page_numbers[at]), float(page_numbers[DIMS + at]));
        }
        first[p] = T(-numbers_of[0] * metal::fast::cos(numbers_of[1] - KV_PI));
        second[p] = T(-numbers_of[0] * metal::fast::sin(numbers_of[1] - KV_PI));
      }
      device T* row = rows + (g + 8 * r) * DIMS;
      kv_store8<T, DIMS % 8 == 0>(row, pair, DIMS, first);
      kv_store8<T, DIMS % 8 == 0>(row, DIMS / 2 + pair, DIMS, second);
    }
  }
#endif
#if WITH_TREE
  KvTree tree = kv_tree<1, BOOKS>(books, page_numbers, lane);
  if (TREE == 2) {
    tree = kv_tree<2, 1>(books, page_numbers, lane);
  }
#pragma unroll
  for (int n = 0; n < (TREE ? 2 * BLOCKS : 0); n++) {
    const int j = n / 2;
    const int r = n % 2;
    const uint low = words[kv_slot_word<BITS>(j, r, 0)] >> (8 * r);
    const uint high = words[BITS == 3 ? kv_high_word(j) : 0] >> kv_high_bit(j, r, 0, 0);
    const int of = 2 * j + (KEYS ? t / 2 : g / 4);
    float x[8];
    if (KEYS) {
      const int at = kv_key_number(g + 8 * r, of, 0, GROUPS, 1);
      kv_tree_key(tree, kv_number_at(numbers, at, of < GROUPS), low, high, t, x);
    } else {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int at = kv_value_number(2 * t + 8 * r + h, of, 0, GROUPS);
        const uint other = simd_shuffle_xor(high, ushort(4)) >> (16 * h);
        kv_tree_value(
            tree, kv_number_at(numbers, at, of < GROUPS), low >> (16 * h), high >> (16 * h), other,
            g, x + 4 * h);
      }
    }
    T run[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      run[i] = T(x[i]);
    }
    const int dim = 32 * j + RUN * (KEYS ? t : g);
    device T* row = rows + (KEYS ? g + 8 * r : 2 * t + 8 * r) * DIMS;
    if (KEYS) {
      kv_store8<T, DIMS % 8 == 0>(row, dim, DIMS, run);
    } else {
      kv_store4<T, DIMS % 4 == 0>(row, dim, DIMS, run);
      kv_store4<T, DIMS % 4 == 0>(row + DIMS, dim, DIMS, run + 4);
    }
  }
#endif
#pragma unroll
  for (int group = 0; group < (PAIRS || TREE ? 0 : GROUPS); group++) {
    // Load all of a group before its first store: a load cannot move past a store that may alias it.
    float scales[4];
    float biases[4];
#pragma unroll
    for (int at = 0; at < 4; at++) {
      const int token = KEYS ? g + 4 * (at & 2) : 2 * t + 4 * (at & 2) + at % 2;
      if (!CHANNEL && BITS != 16) {
        const float scale = float(numbers[kv_number<KEYS>(token, group, 0, GROUPS, SYMMETRIC)]);
        const float bias = SYMMETRIC
            ? scale * -0.5f * STEPS
            : float(numbers[kv_number<KEYS>(token, group, 1, GROUPS, SYMMETRIC)]);
        scales[at] = scale * STEPS;
        biases[at] = bias - scale * STEPS;
      }
    }
#pragma unroll
    for (int j = group * GROUP_BLOCKS; j < (group + 1) * GROUP_BLOCKS && j < BLOCKS; j++) {
      const int dim = 32 * j + RUN * (KEYS ? t : g);
      float dim_scales[RUN];
      float dim_biases[RUN];
      if (CHANNEL) {
        kv_load_numbers<RUN>(page_numbers + dim, dim_scales);
        if (!SYMMETRIC) {
          kv_load_numbers<RUN>(page_numbers + 32 * BLOCKS + dim, dim_biases);
        }
#pragma unroll
        for (int i = 0; i < RUN; i++) {
          dim_scales[i] *= STEPS;
          dim_biases[i] = (SYMMETRIC ? -0.5f * dim_scales[i] : dim_biases[i]) - dim_scales[i];
        }
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        T run[8];
#pragma unroll
        for (int p = 0; p < 8; p++) {
          const int at = 2 * r + p / 4;
          const int i = p % RUN;
          const uint word = words[kv_slot_word<BITS>(j, r, p % 4)];
          const uint high = words[BITS == 3 ? kv_high_word(j) : 0];
          const float code = kv_one_plus<BITS>(kv_code<BITS>(word, high, j, r, p % 4, p / 4));
          float value = 0.0f;
          if (!CODEBOOK && BITS != 16) {
            value = CHANNEL ? metal::fma(dim_scales[i], code, dim_biases[i])
                            : metal::fma(scales[at], code, biases[at]);
          }
#if WITH_CODEBOOK
          if (CODEBOOK) {
            value = scales[at] * kv_level<BITS>(code, levels);
          }
#endif
#if WITH_HALVES
          if (BITS == 16) {
            value = kv_half_of(word, p / 4);
          }
#endif
          run[p] = T(value);
        }
        device T* row = rows + (KEYS ? g + 8 * r : 2 * t + 8 * r) * DIMS;
        if (KEYS) {
          kv_store8<T, DIMS % 8 == 0>(row, dim, DIMS, run);
        } else {
          kv_store4<T, DIMS % 4 == 0>(row, dim, DIMS, run);
          kv_store4<T, DIMS % 4 == 0>(row + DIMS, dim, DIMS, run + 4);
        }
      }
    }
  }
}

#if WITH_MIXED_BITS
// Stores two values to neighbouring dims, from an even one on.
template <typename T>
inline void kv_store2(device T* row, const thread T* values) {
  if (sizeof(T) == 4) {
    float2 x;
    x.x = float(values[0]);
    x.y = float(values[1]);
    *(device float2*)row = x;
  } else {
    *(device uint*)row = kv_pack(values[0], values[1]);
  }
}

// Copies `count` values, a multiple of 16, in a simdgroup.
template <typename T>
inline void kv_copy_words(device T* to, const device T* from, int count, int lane) {
  for (int i = lane; i < count * int(sizeof(T)) / 16; i += 32) {
    ((device uint4*)to)[i] = ((const device uint4*)from)[i];
  }
}

// Decodes one side of a record whose blocks have widths of their own (mixed_bits.h) to rows [16, stored dims].
template <typename T, int KEYS>
inline void kv_dequantize_blocks(
    const device uint* record, const device uint* table, device T* rows, int lane) {
  const int g = lane / 4;
  const int t = lane % 4;
  const int dims = int(table[KEYS ? 2 : 3]);
  const device half* numbers = (const device half*)(record + table[KEYS ? 1 : 0] - 8);
  float scales[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = KEYS ? g + 8 * (i / 2) : 2 * t + 8 * (i / 2) + i % 2;
    scales[i] = float(numbers[kv_number<KEYS>(token, 0, 0, 1, 1)]);
  }
#pragma unroll 1
  for (int b = 0; b < dims / 16; b++) {
    float x[8];
    kv_mixed_levels(record, kv_mixed_entry(table, KEYS ? 0 : 1, b), lane, x);
    T run[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      run[i] = T(x[i] * scales[i / 2]);
    }
    if (KEYS) {
      device T* row = rows + g * dims + 16 * b + 4 * t;
      kv_store4<T, 1>(row, 0, 4, run);
      kv_store4<T, 1>(row + 8 * dims, 0, 4, run + 4);
    } else {
      device T* row = rows + 2 * t * dims + 16 * b + 2 * g;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        kv_store2<T>(row + (8 * (i / 2) + i % 2) * dims, run + 2 * i);
      }
    }
  }
}
#endif
