// Chooses the chunks that are read: those with the largest sum, over the query rows of a kv head, of their shares of all
// the mass; the earlier one of equal ones. In order, without a word from the host.
// Threadgroup: S simdgroups, for one kv head of a sequence; grid: (32 S, 1, heads of the batch).
//
// logs: of rank.metal. lengths: as in attend.metal
// size [rows, kv heads, chunks, units, share in 256 parts, chunks of a row of the list, 0, 0]
// list [heads, size[5]]: as many as `count` of spec/reading.py says, then zeros. weights [heads, chunks]
constexpr int THREADS = 32 * S;
constexpr int MOST_ROWS = 64;  // whose peaks and sums are kept; more take part in pieces

threadgroup float peaks[MOST_ROWS];
threadgroup float sums[MOST_ROWS];
threadgroup int counts[3 * S];
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

for (int from = 0; from < rows; from += MOST_ROWS) {
  const int here = metal::min(MOST_ROWS, rows - from);
  const device float* log_of = logs + (size_t(head) * rows + from) * units;
  for (int row = group; row < here; row += S) {
    float peak = -1.0e30f;
    for (int i = lane; i < units; i += 32) {
      peak = metal::max(peak, log_of[size_t(row) * units + i]);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      peak = metal::max(peak, simd_shuffle_xor(peak, ushort(step)));
    }
    float sum = 0.0f;
    for (int i = lane; i < units; i += 32) {
      sum += metal::fast::exp2(log_of[size_t(row) * units + i] - peak);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      sum += simd_shuffle_xor(sum, ushort(step));
    }
    if (lane == 0) {
      peaks[row] = peak;
      sums[row] = 1.0f / sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_id; i < chunks; i += THREADS) {
    float share = from > 0 ? weight[i] : 0.0f;
    for (int row = 0; row < here; row++) {
      share = metal::fma(metal::fast::exp2(log_of[size_t(row) * units + i] - peaks[row]), sums[row], share);
    }
    weight[i] = share;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The weight of the last chunk that is read, as bits: two at a time, since floats that are not negative are ordered as
// their bits are.
threadgroup_barrier(mem_flags::mem_device);
uint least = 0u;
for (int shift = 30; shift >= 0; shift -= 2) {
  int above[3] = {0, 0, 0};
  for (int i = thread_id; i < chunks; i += THREADS) {
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
      counts[3 * group + n] = above[n];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int step_up = 0;
#pragma unroll
  for (int n = 0; n < 3; n++) {
    int all = 0;
#pragma unroll
    for (int i = 0; i < S; i++) {
      all += counts[3 * i + n];
    }
    step_up = all >= wanted ? n + 1 : step_up;
  }
  least += uint(step_up) << shift;
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Every thread has a run of neighbouring chunks; those of the threads before it come first.
const int each = (chunks + THREADS - 1) / THREADS;
const int start = metal::min(chunks, thread_id * each);
const int stop = metal::min(chunks, start + each);
int more = 0;
int equal = 0;
for (int i = start; i < stop; i++) {
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
more_before -= more;
equal_before -= equal;
int all_more = 0;
#pragma unroll
for (int i = 0; i < S; i++) {
  more_before += i < group ? before[2 * i] : 0;
  equal_before += i < group ? before[2 * i + 1] : 0;
  all_more += before[2 * i];
}
const int equals = wanted - all_more;  // of the equal ones, that are read
device int* row_of_list = list + size_t(head) * most;
for (int i = start; i < stop; i++) {
  const uint bits = as_type<uint>(weight[i]);
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
