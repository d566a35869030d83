// What the simd operations compute, once the 32 lanes of a simdgroup have met in one.
#include "state.h"

namespace emu {

static const char* kNames[] = {"simd_shuffle",
                               "simd_shuffle_xor",
                               "simd_any",
                               "simdgroup 8x8 matrix operation",
                               "16x8x16 tile product",
                               "simdgroup_barrier",
                               "threadgroup_barrier"};
const char* op_name(int op) { return kNames[op]; }

static void move(Lane* lane, int op, int first) {
  for (int i = 0; i < kSimd; i++) {
    unsigned argument = lane[i].argument;
    if (argument >= unsigned(kSimd) || (op == kShuffleXor && argument != lane[0].argument)) {
      Fault fault{"shuffle-argument",
                  text("%s by %u in lane %d, by %u in lane 0", op_name(op), argument, i,
                       lane[0].argument),
                  {first + i}};
      report(fault.loaded_model(lane[i].at));
    }
    int from = op == kShuffleXor ? i ^ int(argument) : int(argument);
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
  switch (lane->op) {
    case kSimdBarrier:
      return order_simd_barrier(simdgroup, lane->flags);
    case kMatrix8:
      return matrix8(lane);
    case kMatrix16:
      return matrix16(lane);
    case kAny: {
      bool any = false;
      for (int i = 0; i < kSimd; i++) any |= lane[i].bits != 0;
      for (int i = 0; i < kSimd; i++) lane[i].result = any;
      return;
    }
    default:
      return move(lane, lane->op, first);
  }
}

}  // namespace emu
