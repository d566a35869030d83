// Encodes one side of a record whose blocks have widths of their own (mixed_bits.h), by one simdgroup.
#if WITH_MIXED_BITS
// A lane's values of block b, in the order of `kv_mixed_levels`. x: [16, dims].
template <typename T, int KEYS>
inline void kv_mixed_eight(const device T* x, int dims, int b, int lane, thread float* v) {
  const int g = lane / 4;
  const int t = lane % 4;
  if (KEYS) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      kv_load<4>(x + (g + 8 * r) * dims + 16 * b + 4 * t, v + 4 * r);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint words[2];
      kv_load_words<int(sizeof(T)) / 2>(
          x + (2 * t + 8 * (i / 2) + i % 2) * dims + 16 * b + 2 * g, words);
      v[2 * i] = kv_value<T>(words, 0);
      v[2 * i + 1] = kv_value<T>(words, 1);
    }
  }
}

// The same as codes. steps: the scale of each pair of them, with its rounded inverse.
template <typename T, int KEYS>
inline void kv_mixed_codes(
    const device T* x, int dims, int b, const device float* entry, const thread float* steps,
    const thread float* inverses, int lane, thread uint* codes) {
  float v[8];
  kv_mixed_eight<T, KEYS>(x, dims, b, lane, v);
  const float gain = entry[1];
  const float middle = entry[2];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    // Adding 2^23 rounds half to even and leaves the integer in the last bits.
    const float code = kv_divide(v[i] * gain, steps[i / 2], inverses[i / 2]) + middle;
    const float kept = metal::max(metal::min(code, 2.0f * middle), 0.0f) + 8388608.0f;
    codes[i] = as_type<uint>(kept) & 0xFFu;
  }
}

// Codes, or one bit of each, as a part of a word: code [r][half][p] at bit 16 half + r_step r + p_step p.
inline uint kv_mixed_part(
    const thread uint* codes, uint low, uint mask, int r_step, int p_step) {
  uint word = 0u;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int shift = 16 * (i / 2 % 2) + r_step * (i / 4) + p_step * (i % 2);
    word |= ((codes[i] >> low) & mask) << shift;
  }
  return word;
}

// table: `template.mixed_bits_quantizing`.
template <typename T, int KEYS>
inline void kv_quantize_mixed(const device T* x, const device float* table, device uint* out, int lane) {
  const int g = lane / 4;
  const int t = lane % 4;
  const int blocks = int(table[0]);
  const int dims = int(table[1]);
  const int words = int(table[2]);
  const device float* entries = table + 8;
  float squares[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    squares[i] = 0.0f;
  }
#pragma unroll 1
  for (int b = 0; b < blocks; b++) {
    float v[8];
    kv_mixed_eight<T, KEYS>(x, dims, b, lane, v);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float y = v[i] * entries[8 * b];
      squares[KEYS ? i / 4 : i / 2] = metal::fma(y, y, squares[KEYS ? i / 4 : i / 2]);
    }
  }
  const float square = kv_together<KEYS, 1>(squares, lane);
  const float length = metal::sqrt(square * table[3]);
  // NaN stays NaN.
  const half scale = half(length > 65504.0f ? 65504.0f : length);
  if (KEYS ? t < 2 : g < 4) {
    device ushort* numbers = (device ushort*)(out + words);
    numbers[kv_number<KEYS>(kv_ranged<KEYS>(lane), 0, 0, 1, 1)] = as_type<ushort>(scale);
  }
  const float step = float(scale) > 0.0f ? float(scale) : 1.0f;
  float steps[4];
  float inverses[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    steps[i] = simd_shuffle(step, ushort(KEYS ? 4 * g + i / 2 : 4 * i + t));
    inverses[i] = 1.0f / steps[i];
  }
  uint codes[8];
  device uint* row = out;
  uint word = 0u;
  int quarter = 0;  // of the word that are filled
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {  // whole words and parts of 2 bits, then parts of 1 bit
#pragma unroll 1
    for (int b = 0; b < blocks; b++) {
      const int bits = int(entries[8 * b + 3]);
      if (bits == 8 && pass == 0) {
        kv_mixed_codes<T, KEYS>(x, dims, b, entries + 8 * b, steps, inverses, lane, codes);
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const thread uint* some = codes + 4 * r;
          row[32 * r + lane] = some[0] | (some[1] << 8) | (some[2] << 16) | (some[3] << 24);
        }
        row += 64;
      } else if (bits == 4 && pass == 0) {
        kv_mixed_codes<T, KEYS>(x, dims, b, entries + 8 * b, steps, inverses, lane, codes);
        row[lane] = kv_mixed_part(codes, 0u, 15u, 8, 4);
        row += 32;
      } else if (pass == 0 ? bits == 3 || bits == 2 : bits == 3 || bits == 1) {
        kv_mixed_codes<T, KEYS>(x, dims, b, entries + 8 * b, steps, inverses, lane, codes);
        const uint part = pass == 0 ? kv_mixed_part(codes, 0u, 3u, 4, 2)
                                    : kv_mixed_part(codes, bits == 3 ? 2u : 0u, 1u, 1, 2);
        word |= part << (4 * quarter);
        quarter += pass == 0 ? 2 : 1;
        if (quarter == 4) {
          row[lane] = word;
          row += 32;
          word = 0u;
          quarter = 0;
        }
      }
    }
  }
  if (quarter == 3) {
    row[lane] = word;
  } else if (quarter > 0) {  // half a row: two lanes share a word
    const uint own = (word & 0xFFu) | ((word >> 8) & 0xFF00u);
    const uint other = simd_shuffle_xor(own, ushort(1));
    if (lane % 2 == 0) {
      row[lane / 2] = own | (other << 16);
    }
  }
}
#endif
