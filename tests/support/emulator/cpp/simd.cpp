// What the simd operations compute, once the 32 lanes of a simdgroup have met in one.
#include <cmath>
#include <cstring>

#include "state.h"

namespace emu {

static const char* kNames[] = {"simd_sum",
                               "simd_product",
                               "simd_max",
                               "simd_min",
                               "simd_and",
                               "simd_or",
                               "simd_xor",
                               "simd_prefix_inclusive_sum",
                               "simd_prefix_exclusive_sum",
                               "simd_broadcast",
                               "simd_broadcast_first",
                               "simd_shuffle",
                               "simd_shuffle_xor",
                               "simd_shuffle_up",
                               "simd_shuffle_down",
                               "simd_any",
                               "simd_all",
                               "simd_ballot",
                               "simdgroup 8x8 matrix operation",
                               "16x8x16 tile product",
                               "simdgroup_barrier",
                               "threadgroup_barrier"};
const char* op_name(int op) { return kNames[op]; }

static float from_half(uint64_t bits) {
  uint16_t word = uint16_t(bits);
  _Float16 value;
  memcpy(&value, &word, 2);
  return float(value);
}
static uint64_t to_half(float x) {
  _Float16 value = _Float16(x);
  uint16_t word;
  memcpy(&word, &value, 2);
  return word;
}
static float from_word(uint32_t word) {
  float value;
  memcpy(&value, &word, 4);
  return value;
}
static uint32_t to_word(float value) {
  uint32_t word;
  memcpy(&word, &value, 4);
  return word;
}

static float to_float(int type, uint64_t bits) {
  if (type == kF16) return from_half(bits);
  return from_word(type == kBF16 ? uint32_t(bits) << 16 : uint32_t(bits));
}
static uint64_t from_float(int type, float value) {
  if (type == kF32) return to_word(value);
  if (type == kF16) return to_half(value);
  uint32_t word = to_word(value);
  if (std::isnan(value)) return (word >> 16) | 64;
  return (word + 0x7fff + ((word >> 16) & 1)) >> 16;
}
static int64_t to_integer(int type, uint64_t bits) {
  switch (type) {
    case kI32:
      return int32_t(bits);
    case kI16:
      return int16_t(bits);
    case kI8:
      return int8_t(bits);
    default:
      return int64_t(bits);
  }
}

template <class N>
static N combine(int op, N a, N b) {
  switch (op) {
    case kProduct:
      return a * b;
    case kMax:
      return b != b || a >= b ? a : b;
    case kMin:
      return b != b || a <= b ? a : b;
    default:
      return a + b;
  }
}

// A butterfly over the lanes, as both machines do it: the sum is rounded in the type of the lanes.
static uint64_t reduce(const Lane* lane, int op, int type) {
  if (type <= kBF16) {
    float value[kSimd];
    for (int i = 0; i < kSimd; i++) value[i] = to_float(type, lane[i].bits);
    for (int step = kSimd / 2; step; step /= 2)
      for (int i = 0; i < step; i++)
        value[i] = to_float(type, from_float(type, combine(op, value[i], value[i + step])));
    return from_float(type, value[0]);
  }
  int64_t total = to_integer(type, lane[0].bits);
  for (int i = 1; i < kSimd; i++) {
    int64_t next = to_integer(type, lane[i].bits);
    if (op == kAnd)
      total &= next;
    else if (op == kOr)
      total |= next;
    else if (op == kXor)
      total ^= next;
    else
      total = to_integer(type, uint64_t(combine(op, total, next)) & 0xffffffff);
  }
  return uint64_t(total);
}

static void prefix_sums(Lane* lane, int op, int type) {
  bool inclusive = op == kPrefixInclusiveSum;
  float sum = 0;
  int64_t total = 0;
  for (int i = 0; i < kSimd; i++) {
    float before = sum;
    int64_t count = total;
    if (type <= kBF16)
      sum += to_float(type, lane[i].bits);
    else
      total += to_integer(type, lane[i].bits);
    if (type <= kBF16)
      lane[i].result = from_float(type, inclusive ? sum : before);
    else
      lane[i].result = uint64_t(inclusive ? total : count);
  }
}

static void move(Lane* lane, int op, int first) {
  bool uniform = op != kShuffle || !launch.any_lane;
  for (int i = 0; i < kSimd; i++) {
    unsigned argument = lane[i].argument;
    Fault fault{"shuffle-argument", "", {first + i}};
    fault.site(lane[i].at);
    if (uniform && argument != lane[0].argument) {
      fault.message =
          text("%s takes one argument for the whole simdgroup; lane 0 gives %u, lane %d gives %u",
               op_name(op), lane[0].argument, i, argument);
      report(fault);
    }
    if (argument >= unsigned(kSimd)) {
      fault.message = text("%s by %u in a simdgroup of %d", op_name(op), argument, kSimd);
      report(fault);
    }
    int from = int(argument);
    if (op == kShuffleXor) from = i ^ from;
    if (op == kShuffleUp) from = i - from < 0 ? i : i - from;
    if (op == kShuffleDown) from = i + from >= kSimd ? i : i + from;
    lane[i].result = lane[from].bits;
  }
}

// Element (row, column) of an 8x8 matrix is value column % 2 of this lane.
static int lane_of(int row, int column) {
  return (row & 4) * 4 + (column & 4) * 2 + (row & 3) * 2 + (column & 2) / 2;
}

static void matrix8(Lane* lane) {
  for (int row = 0; row < 8; row++)
    for (int column = 0; column < 8; column++) {
      Lane& out = lane[lane_of(row, column)];
      float sum = out.c[column & 1];
      for (int k = 0; k < 8; k++)
        sum += lane[lane_of(row, k)].a[k & 1] * lane[lane_of(k, column)].b[column & 1];
      out.d[column & 1] = sum;
    }
}

// mma.sync.m16n8k16: lane 4g + t holds a[row g + 8h][2t + 8k + i], b[2t + 8k + i][g], c[g + 8h][2t
// + i].
static void matrix16(Lane* lane) {
  for (int row = 0; row < 16; row++)
    for (int column = 0; column < 8; column++) {
      Lane& out = lane[row % 8 * 4 + column / 2];
      int at = row / 8 * 2 + column % 2;
      float sum = out.c[at];
      for (int k = 0; k < 16; k++) {
        int pair = k % 8 / 2, half = k / 8, odd = k % 2;
        sum += lane[row % 8 * 4 + pair].a[half * 4 + row / 8 * 2 + odd] *
               lane[column * 4 + pair].b[half * 2 + odd];
      }
      out.d[at] = sum;
    }
}

void complete_simd(int simdgroup) {
  int first = simdgroup * kSimd;
  Lane* lane = &lanes[first];
  int op = lane->op, type = lane->type;
  uint64_t result = 0;
  switch (op) {
    case kSimdBarrier:
      return order_simd_barrier(simdgroup, lane->flags);
    case kMatrix8:
      return matrix8(lane);
    case kMatrix16:
      return matrix16(lane);
    case kPrefixInclusiveSum:
    case kPrefixExclusiveSum:
      return prefix_sums(lane, op, type);
    case kBroadcast:
    case kShuffle:
    case kShuffleXor:
    case kShuffleUp:
    case kShuffleDown:
      return move(lane, op, first);
    case kBroadcastFirst:
      result = lane->bits;
      break;
    case kAny:
    case kAll:
    case kBallot: {
      for (int i = 0; i < kSimd; i++) result |= uint64_t(lane[i].bits != 0) << i;
      if (op == kAny) result = result != 0;
      if (op == kAll) result = result == 0xffffffffu;
      break;
    }
    default:
      result = reduce(lane, op, type);
  }
  for (int i = 0; i < kSimd; i++) lane[i].result = result;
}

}  // namespace emu
