// Numbers that rank.metal multiplies. Comes after loads.h.

// Numbers 4 at .. 4 at + 3 of a row of DIMS, zeros behind its end.
template <int DIMS, typename T>
inline void kv_four(const device T* row, int at, thread float* four) {
#pragma unroll
  for (int n = 0; n < 4; n++) {
    four[n] = 0.0f;
  }
  if (DIMS % 4 == 0) {
    if (4 * at < DIMS) {
      kv_load<4>(row + 4 * at, four);
    }
  } else {
#pragma unroll
    for (int n = 0; n < 4; n++) {
      if (4 * at + n < DIMS) {
        four[n] = float(row[4 * at + n]);
      }
    }
  }
}
