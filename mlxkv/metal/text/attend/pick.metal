// Chooses the chunks that are read: those with the largest sum, over the query rows of a kv head, of their shares of all
// the mass; the earlier one of equal ones. In order, without a word from the host.
// Threadgroup: S simdgroups, for one kv head of a sequence; grid: (32 S, 1, heads of the batch). Every thread has a run of
// neighbouring chunks, HELD of them in registers.
//
// logs: of rank.metal. lengths: as in attend.metal
// size [rows, kv heads, chunks, units, share in 256 parts, chunks of a row of the list, 0, 0]
// list [heads, size[5]]: as many as `count` of spec/reading.py says, then zeros
// weights [heads, chunks]: the sums, and room for those that no register holds
constexpr int THREADS = 32 * S;
constexpr int HELD = 8;
constexpr int ROWS = 4;  // that are weighed between two barriers
constexpr float NOTHING = -1.0e30f;

threadgroup float peaks[ROWS * S];
threadgroup float sums[ROWS * S];
threadgroup int counts[6 * S];  // of this round and of the one before
threadgroup int before[2 * S];

const int lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup;
const int thread_id = 32 * group + lane;
const int head = threadgroup_position_in_grid.z;
const int rows = size[0];
const int units = size[3];
const int most = size[5];
const int chunks = lengths[5 * (head / size[1])] / LIST;
const int wanted = metal::min(chunks, metal::max(1, (chunks * size[4] + 128) / 256));
device float* weight = weights + size_t(head) * size[2];
const int each = (chunks + THREADS - 1) / THREADS;
const int start = metal::min(chunks, thread_id * each);
const int stop = metal::min(chunks, start + each);

float held[HELD];
#pragma unroll
for (int k = 0; k < HELD; k++) {
  held[k] = 0.0f;
}
for (int from = 0; from < rows; from += ROWS) {
  const device float* log_of = logs + (size_t(head) * rows + from) * units;
  float mass[ROWS * HELD];  // first the logarithms
  float peak[ROWS];
  float sum[ROWS];
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    const bool there = from + row < rows;
    const device float* own = log_of + size_t(there ? row : 0) * units;
    peak[row] = NOTHING;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      mass[row * HELD + k] = there && start + k < stop ? own[start + k] : NOTHING;
      peak[row] = metal::max(peak[row], mass[row * HELD + k]);
    }
    for (int i = start + HELD; i < stop; i++) {
      peak[row] = metal::max(peak[row], own[i]);
    }
    for (int i = size[2] + thread_id; i < units; i += THREADS) {  // windows
      peak[row] = metal::max(peak[row], own[i]);
    }
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      peak[row] = metal::max(peak[row], simd_shuffle_xor(peak[row], ushort(step)));
    }
  }
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    const device float* own = log_of + size_t(from + row < rows ? row : 0) * units;
    sum[row] = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      mass[row * HELD + k] = metal::fast::exp2(mass[row * HELD + k] - peak[row]);
      sum[row] += mass[row * HELD + k];
    }
    for (int i = start + HELD; i < stop; i++) {
      sum[row] += metal::fast::exp2(own[i] - peak[row]);
    }
    for (int i = size[2] + thread_id; i < units; i += THREADS) {
      sum[row] += metal::fast::exp2(own[i] - peak[row]);
    }
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      sum[row] += simd_shuffle_xor(sum[row], ushort(step));
    }
  }
  if (lane == 0) {
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      peaks[row * S + group] = peak[row];
      sums[row * S + group] = sum[row];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float highest[ROWS];
  float whole[ROWS];
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    highest[row] = lane < S ? peaks[row * S + lane] : NOTHING;
    whole[row] = highest[row];
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      highest[row] = metal::max(highest[row], simd_shuffle_xor(highest[row], ushort(step)));
    }
  }
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    const float scaled = metal::fast::exp2(whole[row] - highest[row]);
    whole[row] = lane < S ? sums[row * S + lane] * scaled : 0.0f;
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      whole[row] += simd_shuffle_xor(whole[row], ushort(step));
    }
  }
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    if (from + row < rows) {
      const device float* own = log_of + size_t(row) * units;
      const float share = 1.0f / whole[row];
      const float by = share * metal::fast::exp2(peak[row] - highest[row]);
#pragma unroll
      for (int k = 0; k < HELD; k++) {
        held[k] = metal::fma(mass[row * HELD + k], by, held[k]);
      }
      for (int i = start + HELD; i < stop; i++) {
        const float old = from + row > 0 ? weight[i] : 0.0f;
        weight[i] = metal::fma(metal::fast::exp2(own[i] - highest[row]), share, old);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The weight of the last chunk that is read, as bits: two at a time, since floats that are not negative are ordered as
// their bits are; and no further than it takes to tell the chunks that are read from the others.
uint least = 0u;
int found = chunks;  // whose bits are `least` or more
int turn = 0;
for (int shift = 30; shift >= 0 && found > wanted; shift -= 2) {
  int above[3] = {0, 0, 0};
#pragma unroll
  for (int k = 0; k < HELD; k++) {
#pragma unroll
    for (int n = 0; n < 3; n++) {
      above[n] += as_type<uint>(held[k]) >= least + (uint(n + 1) << shift) ? 1 : 0;
    }
  }
  for (int i = start + HELD; i < stop; i++) {
    const uint bits = as_type<uint>(weight[i]);
#pragma unroll
    for (int n = 0; n < 3; n++) {
      above[n] += bits >= least + (uint(n + 1) << shift) ? 1 : 0;
    }
  }
#pragma unroll
  for (int n = 0; n < 3; n++) {
    above[n] = simd_sum(above[n]);
    if (lane == 0) {
      counts[turn + 3 * group + n] = above[n];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int step_up = 0;
#pragma unroll
  for (int n = 0; n < 3; n++) {
    const int whole = simd_sum(lane < S ? counts[turn + 3 * lane + n] : 0);
    step_up = whole >= wanted ? n + 1 : step_up;
    found = whole >= wanted ? whole : found;
  }
  least += uint(step_up) << shift;
  turn = 3 * S - turn;
}

// Those of the threads before it come first.
int more = 0;
int equal = 0;
#pragma unroll
for (int k = 0; k < HELD; k++) {
  const uint bits = as_type<uint>(held[k]);
  more += start + k < stop && bits > least ? 1 : 0;
  equal += start + k < stop && bits == least ? 1 : 0;
}
for (int i = start + HELD; i < stop; i++) {
  const uint bits = as_type<uint>(weight[i]);
  more += bits > least ? 1 : 0;
  equal += bits == least ? 1 : 0;
}
int more_before = more;
int equal_before = equal;
#pragma unroll
for (int step = 1; step < 32; step *= 2) {
  const int from = lane >= step ? lane - step : lane;
  const int more_there = simd_shuffle(more_before, ushort(from));
  const int equal_there = simd_shuffle(equal_before, ushort(from));
  more_before += lane >= step ? more_there : 0;
  equal_before += lane >= step ? equal_there : 0;
}
if (lane == 31) {
  before[2 * group] = more_before;
  before[2 * group + 1] = equal_before;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const int more_there = lane < S ? before[2 * lane] : 0;
more_before += simd_sum(lane < group ? more_there : 0) - more;
equal_before += simd_sum(lane < group ? before[2 * lane + 1] : 0) - equal;
const int equals = wanted - simd_sum(more_there);  // of the equal ones, that are read
device int* row_of_list = list + size_t(head) * most;
for (int i = start; i < stop; i++) {
  uint bits = 0u;
  if (i < start + HELD) {
#pragma unroll
    for (int k = 0; k < HELD; k++) {  // a register has no index that varies
      bits = i == start + k ? as_type<uint>(held[k]) : bits;
    }
    weight[i] = as_type<float>(bits);
  } else {
    bits = as_type<uint>(weight[i]);
  }
  const bool is_equal = bits == least;
  if (bits > least || (is_equal && equal_before < equals)) {
    row_of_list[more_before + metal::min(equal_before, equals)] = i;
  }
  more_before += bits > least ? 1 : 0;
  equal_before += is_equal ? 1 : 0;
}
for (int i = wanted + thread_id; i < most; i += THREADS) {
  row_of_list[i] = 0;
}
for (int i = chunks + thread_id; i < size[2]; i += THREADS) {
  weight[i] = 0.0f;
}
