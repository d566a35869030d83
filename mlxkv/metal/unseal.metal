// Decodes one side of records into T: the scratch of a prefill, one layer at a time.
// records [heads, capacity, RECORD words]; out [heads, 16 size[0], DIMS].
// size: [records per head, capacity, heads, first word of the side]. Template: T, BITS, DIMS, GROUP,
// SYMMETRIC, KEYS, RECORD.
const int lane = thread_index_in_simdgroup;
const int unit = threadgroup_position_in_grid.x * (threads_per_threadgroup.x / 32) +
    simdgroup_index_in_threadgroup;
constexpr int BLOCKS = (DIMS + 31) / 32;
constexpr int GROUPS = (DIMS + GROUP - 1) / GROUP;
constexpr int GROUP_BLOCKS = (GROUP + 31) / 32;
constexpr int WORDS = kv_lane_words<BITS>(BLOCKS);
constexpr float STEPS = float(1 << BITS);

if (unit < size[0] * size[2]) {
  const int g = lane / 4;
  const int t = lane % 4;
  const int head = unit / size[0];
  const int record = unit % size[0];
  const device uint* side = records + (size_t(head) * size[1] + record) * RECORD + size[3];
  const device half* numbers = (const device half*)(side + 32 * WORDS);
  device T* rows = out + (size_t(head) * size[0] + record) * 16 * DIMS;
  uint words[WORDS];
  for (int m = 0; m < WORDS; m++) {
    words[m] = side[kv_word_at(m, lane, WORDS)];
  }
  for (int j = 0; j < BLOCKS; j++) {
    const int group = j / GROUP_BLOCKS;
    for (int r = 0; r < 2; r++) {
      for (int h = 0; h < 2; h++) {
        const int token = KEYS ? g + 8 * r : 2 * t + 8 * r + h;
        const float scale = float(numbers[kv_number<KEYS>(token, group, 0, GROUPS, SYMMETRIC)]);
        const float bias = SYMMETRIC
            ? scale * -0.5f * STEPS
            : float(numbers[kv_number<KEYS>(token, group, 1, GROUPS, SYMMETRIC)]);
        T run[4];
        for (int p = 0; p < 4; p++) {
          const uint word = words[kv_slot_word<BITS>(j, r, p)];
          const uint high = words[BITS == 3 ? kv_high_word(j) : 0];
          const float code = kv_one_plus<BITS>(kv_code<BITS>(word, high, j, r, p, h));
          run[p] = T(metal::fma(scale * STEPS, code, bias - scale * STEPS));
        }
        kv_store4<T, DIMS % 4 == 0>(
            rows + token * DIMS, KEYS ? 32 * j + 8 * t + 4 * h : 32 * j + 4 * g, DIMS, run);
      }
    }
  }
}
