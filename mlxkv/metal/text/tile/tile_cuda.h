// Tiles on CUDA, by mma.sync: names and layout as in tile_metal.h, but another lane map: the pairs of B lie
// along its rows.
struct TileA {
  uint w[4];
};
struct TileB {
  uint w[2];
};
struct TileC {
  float v[4];
};

inline uint tile_row(uint lane) {
  return lane / 4;
}
inline uint tile_column(uint lane) {
  return lane % 4 * 2;
}
inline uint tile_lane(uint row, uint column) {
  return row * 4 + column / 2;
}
inline uint tile_b_row(uint lane, uint i) {
  return lane % 4 * 2 + i;
}
inline uint tile_b_column(uint lane, uint i) {
  return lane / 4;
}

inline void tile_multiply(thread TileC& c, TileA a, TileB b) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
      : "r"(a.w[0]), "r"(a.w[1]), "r"(a.w[2]), "r"(a.w[3]), "r"(b.w[0]), "r"(b.w[1]));
}

inline TileC tile_product(TileC c, TileA a, TileB b) {
  TileC d;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d.v[0]), "=f"(d.v[1]), "=f"(d.v[2]), "=f"(d.v[3])
      : "r"(a.w[0]), "r"(a.w[1]), "r"(a.w[2]), "r"(a.w[3]), "r"(b.w[0]), "r"(b.w[1]), "f"(c.v[0]),
        "f"(c.v[1]), "f"(c.v[2]), "f"(c.v[3]));
  return d;
}

inline float tile_column_max(float value) {
  value = metal::max(value, simd_shuffle_xor(value, ushort(4)));
  value = metal::max(value, simd_shuffle_xor(value, ushort(8)));
  return metal::max(value, simd_shuffle_xor(value, ushort(16)));
}
inline float tile_column_sum(float value) {
  value += simd_shuffle_xor(value, ushort(4));
  value += simd_shuffle_xor(value, ushort(8));
  return value + simd_shuffle_xor(value, ushort(16));
}

inline uint kv_halves(float low, float high) {
  return as_type<uint>(__floats2half2_rn(low, high));
}
// The low or the high halves of two words.
inline uint kv_both(uint a, uint b, int high) {
  return __byte_perm(a, b, high ? 0x7632 : 0x5410);
}
inline uint kv_multiply_halves(uint a, uint b) {
  return as_type<uint>(__hmul2(as_type<half2>(a), as_type<half2>(b)));
}
inline uint kv_add_halves(uint a, uint b) {
  return as_type<uint>(__hadd2(as_type<half2>(a), as_type<half2>(b)));
}
inline uint kv_add_multiplied_halves(uint a, uint b, uint c) {
  return as_type<uint>(__hfma2(as_type<half2>(b), as_type<half2>(c), as_type<half2>(a)));
}

inline uint kv_transposed(uint word) {
  uint out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(word));
  return out;
}
inline TileB tile_b_of(TileC c) {
  TileB b;
  b.w[0] = kv_transposed(kv_halves(c.v[0], c.v[1]));
  b.w[1] = kv_transposed(kv_halves(c.v[2], c.v[3]));
  return b;
}
inline uint tile_b_numbers(uint pair, uint lane) {
  return pair;
}

// Copies the records of a simdgroup, every S-th pair, to shared memory in the background, STAGES pairs ahead:
// loads into registers alone do not keep the memory of a large GPU busy.
typedef uint KvRecord;  // byte address in shared memory
inline uint kv_read1(KvRecord from, int word) {
  uint x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from + 4 * word));
  return x;
}
inline uint2 kv_read2(KvRecord from, int word) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(x.x), "=r"(x.y)
               : "r"(from + 4 * word));
  return x;
}
inline uint4 kv_read4(KvRecord from, int word) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from + 4 * word));
  return x;
}
inline KvRecord kv_record_after(KvRecord record, int words) {
  return record + 4 * words;
}
struct KvPipe {
  const uint* next;  // to be fetched
  int words;  // of a record
  int stages;  // as many as fit in STAGES times RECORD words
  int left;  // records to be fetched, those between this simdgroup's pairs included
  uint barrier;  // shared addresses of stage 0
  uint data;
  int stage;
  uint phase;
  uint record;  // the last that was waited for, or the one behind it
};
#define KV_PIPE template <int RECORD, int STAGES, int S, int STEP>
#define KV_OF_PIPE RECORD, STAGES, S, STEP
KV_PIPE
inline void kv_pipe_fetch(KvPipe& pipe, int stage, int lane) {
  if (pipe.left > 0) {
    const uint* next = pipe.next;
    pipe.next += STEP * pipe.words;
    if (lane == 0) {
      const uint bytes = 4 * pipe.words * metal::min(pipe.left, 2);
      const uint barrier = pipe.barrier + 8 * stage;
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(bytes)
                   : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(pipe.data + stage * 4 * pipe.words * 2),
          "l"(next), "r"(bytes), "r"(barrier)
          : "memory");
    }
    pipe.left -= STEP;
  }
}
KV_PIPE
inline KvPipe kv_pipe_start(
    const uint* buffer, size_t at, int words, int count, int group, int lane) {
  extern __shared__ __align__(128) uint kv_pipe_words[];
  constexpr int BARRIERS = (2 * STAGES * S + 31) / 32 * 32;  // words
  KvPipe pipe;
  pipe.next = buffer + at;
  pipe.words = words;
  pipe.stages = metal::min(STAGES, STAGES * RECORD / words);
  pipe.left = count;
  pipe.stage = 0;
  pipe.phase = 0u;
  const uint base = uint(__cvta_generic_to_shared(kv_pipe_words));
  pipe.barrier = base + 8 * group * STAGES;
  pipe.data = base + 4 * (BARRIERS + group * STAGES * RECORD * 2);
  if (lane == 0) {
    for (int n = 0; n < STAGES; n++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(pipe.barrier + 8 * n) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  for (int n = 0; n < pipe.stages; n++) {
    kv_pipe_fetch<KV_OF_PIPE>(pipe, n, lane);
  }
  return pipe;
}
KV_PIPE
inline KvRecord kv_pipe_wait(KvPipe& pipe, bool second) {
  if (!second) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "KV_WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra KV_DONE;\n"
        "bra KV_WAIT;\n"
        "KV_DONE:\n}" ::"r"(pipe.barrier + 8 * pipe.stage),
        "r"(pipe.phase)
        : "memory");
    pipe.record = pipe.data + pipe.stage * 4 * pipe.words * 2;
  } else {
    pipe.record += 4 * pipe.words;
  }
  return pipe.record;
}
KV_PIPE
inline void kv_pipe_release(KvPipe& pipe, int lane) {
  __syncwarp();
  kv_pipe_fetch<KV_OF_PIPE>(pipe, pipe.stage, lane);
  pipe.stage += 1;
  if (pipe.stage == pipe.stages) {
    pipe.stage = 0;
    pipe.phase ^= 1u;
  }
}
