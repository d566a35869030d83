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
constexpr int HELD = 4;
constexpr int ROWS = 8;  // that are summed between two barriers

threadgroup float peaks[ROWS * S];
threadgroup float sums[ROWS * S];
threadgroup float peak_of[ROWS];
threadgroup float share_of[ROWS];  // one over the sum
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
  const int here = metal::min(ROWS, rows - from);
  const device float* log_of = logs + (size_t(head) * rows + from) * units;
  for (int row = 0; row < here; row++) {
    const device float* own = log_of + size_t(row) * units;
    float peak = -1.0e30f;
    for (int i = thread_id; i < units; i += THREADS) {
      peak = metal::max(peak, own[i]);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      peak = metal::max(peak, simd_shuffle_xor(peak, ushort(step)));
    }
    float sum = 0.0f;
    for (int i = thread_id; i < units; i += THREADS) {
      sum += metal::fast::exp2(own[i] - peak);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      sum += simd_shuffle_xor(sum, ushort(step));
    }
    if (lane == 0) {
      peaks[row * S + group] = peak;
      sums[row * S + group] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int row = group; row < here; row += S) {
    const float mine = lane < S ? peaks[row * S + lane] : -1.0e30f;
    float peak = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      peak = metal::max(peak, simd_shuffle_xor(peak, ushort(step)));
    }
    float sum = lane < S ? sums[row * S + lane] * metal::fast::exp2(mine - peak) : 0.0f;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      sum += simd_shuffle_xor(sum, ushort(step));
    }
    if (lane == 0) {
      peak_of[row] = peak;
      share_of[row] = 1.0f / sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int row = 0; row < here; row++) {
    const device float* own = log_of + size_t(row) * units + start;
    const float peak = peak_of[row];
    const float share = share_of[row];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      if (start + k < stop) {
        held[k] = metal::fma(metal::fast::exp2(own[k] - peak), share, held[k]);
      }
    }
    for (int i = start + HELD; i < stop; i++) {
      const float old = from + row > 0 ? weight[i] : 0.0f;
      weight[i] = metal::fma(metal::fast::exp2(own[i - start] - peak), share, old);
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
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      above[n] += simd_shuffle_xor(above[n], ushort(step));
    }
    if (lane == 0) {
      counts[turn + 3 * group + n] = above[n];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int step_up = 0;
#pragma unroll
  for (int n = 0; n < 3; n++) {
    int whole = lane < S ? counts[turn + 3 * lane + n] : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      whole += simd_shuffle_xor(whole, ushort(step));
    }
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
int all_more = more_there;
int more_first = lane < group ? more_there : 0;
int equal_first = lane < group ? before[2 * lane + 1] : 0;
#pragma unroll
for (int step = 1; step < 32; step *= 2) {
  all_more += simd_shuffle_xor(all_more, ushort(step));
  more_first += simd_shuffle_xor(more_first, ushort(step));
  equal_first += simd_shuffle_xor(equal_first, ushort(step));
}
more_before += more_first - more;
equal_before += equal_first - equal;
const int equals = wanted - all_more;  // of the equal ones, that are read
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
