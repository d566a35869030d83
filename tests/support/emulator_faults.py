"""Seeded faults: small kernels, each with one mistake, and the kind of fault that must be raised.

All run with four threadgroups of 64 threads: `x` float[256], `h` half[256], `n` int[1], `o` float[256], `c` uint[8]
in and out (zero). Every body is right but for its mistake.
"""

from __future__ import annotations

from dataclasses import dataclass

HEADER = """
inline float seeded_sum(float v) {
  float s = simd_sum(v);
  return s * 2.0f;
}
"""

START = """
uint i = thread_position_in_grid.x;
uint t = thread_index_in_threadgroup;
uint lane = thread_index_in_simdgroup;
uint sg = simdgroup_index_in_threadgroup;
uint g = threadgroup_position_in_grid.x;
"""


@dataclass(frozen=True)
class Seeded:
    name: str
    kind: str
    body: str

    @property
    def source(self) -> str:
        return START + self.body


FAULTS = [
    Seeded(
        "no_barrier",
        "uninitialised",
        """threadgroup float a[64]; a[t] = x[i]; o[i] = a[63 - t];""",
    ),
    Seeded(
        "no_barrier_before_overwriting",
        "race",
        """threadgroup float a[64]; a[t] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float y = a[63 - t]; a[t] = y;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = a[t];""",
    ),
    Seeded(
        "two_threads_write_one_place",
        "race",
        """threadgroup float a[32]; a[lane] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = a[lane];""",
    ),
    Seeded(
        "barrier_orders_no_memory",
        "race",
        """threadgroup float a[64]; a[t] = x[i];
        threadgroup_barrier(mem_flags::mem_none);
        o[i] = a[63 - t];""",
    ),
    Seeded(
        "barrier_orders_the_other_memory",
        "race",
        """o[i] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float y = o[i ^ 1];
        threadgroup_barrier(mem_flags::mem_device);
        o[i] = y;""",
    ),
    Seeded(
        "simd_operation_as_barrier",
        "race",
        """threadgroup float a[64]; a[t] = x[i];
        float s = simd_sum(x[i]);
        o[i] = a[t ^ 1] + s;""",
    ),
    Seeded(
        "simdgroup_barrier_across_simdgroups",
        "race",
        """threadgroup float a[64]; a[t] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        a[t] = a[t] + 1.0f;
        simdgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = a[t ^ 32];""",
    ),
    Seeded(
        "divergent_barrier",
        "divergence",
        """if (t < 32) threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = x[i];""",
    ),
    Seeded(
        "two_different_barriers",
        "divergence",
        """if (t < 32) { threadgroup_barrier(mem_flags::mem_none); }
        else { threadgroup_barrier(mem_flags::mem_none); }
        o[i] = x[i];""",
    ),
    Seeded(
        "early_return_before_barrier",
        "divergence",
        """o[i] = x[i];
        if (t == 5) return;
        threadgroup_barrier(mem_flags::mem_threadgroup);""",
    ),
    Seeded(
        "early_return_of_a_simdgroup",
        "divergence",
        """o[i] = x[i];
        if (sg == 1) return;
        threadgroup_barrier(mem_flags::mem_threadgroup);""",
    ),
    Seeded(
        "simd_operation_in_a_branch",
        "divergence",
        """float s = x[i];
        if (lane < 7) s = simd_sum(s);
        o[i] = s;""",
    ),
    Seeded(
        "helper_called_in_two_branches",
        "divergence",
        """o[i] = lane < 16 ? seeded_sum(x[i]) : seeded_sum(x[i] + 1.0f);""",
    ),
    Seeded(
        "loop_of_different_length",
        "divergence",
        """float s = x[i];
        for (uint k = 0; k < 1 + lane / 31; k++) s = simd_max(s);
        o[i] = s;""",
    ),
    Seeded(
        "shuffle_lane_not_uniform",
        "shuffle-argument",
        """o[i] = simd_shuffle(x[i], ushort(31 - lane));""",
    ),
    Seeded(
        "shuffle_xor_not_uniform",
        "shuffle-argument",
        """o[i] = simd_shuffle_xor(x[i], ushort(1 + lane / 16));""",
    ),
    Seeded(
        "shuffle_too_far", "shuffle-argument", """o[i] = simd_shuffle_down(x[i], ushort(32));"""
    ),
    Seeded("read_past_the_end", "out-of-bounds", """o[i] = x[i + 1];"""),
    Seeded("read_before_the_start", "out-of-bounds", """o[i] = x[int(i) - 1];"""),
    Seeded(
        "wide_read_past_the_end",
        "out-of-bounds",
        """o[i] = (*(const device float4*)(x + (i & ~3u) + (i / 255) * 4)).x;""",
    ),
    Seeded("write_past_the_end", "out-of-bounds", """o[i] = x[i]; if (i == 255) o[256] = 0.0f;"""),
    Seeded("wild_pointer", "out-of-bounds", """o[i] = x[i + (i == 77 ? 1000000 : 0)];"""),
    Seeded("constant_past_the_end", "out-of-bounds", """o[i] = float(n[1]);"""),
    Seeded("write_to_an_input", "input-write", """((device float*)x)[i] = 0.0f; o[i] = x[i];"""),
    Seeded(
        "threadgroup_read_before_write",
        "uninitialised",
        """threadgroup float a[64];
        if (t != 9) a[t] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = a[t];""",
    ),
    Seeded(
        "threadgroup_memory_of_the_last_group",
        "uninitialised",
        """threadgroup float a[64];
        if (g == 0) a[t] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = a[t];""",
    ),
    Seeded("output_read_before_write", "uninitialised", """o[i] = o[i] + x[i];"""),
    Seeded("output_not_written", "unwritten-output", """if (i != 100) o[i] = x[i];"""),
    Seeded(
        "threadgroup_array_overflow",
        "array-index",
        """threadgroup float a[32]; a[t] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = a[t];""",
    ),
    Seeded(
        "threadgroup_overflow_by_pointer",
        "out-of-bounds",
        """threadgroup float a[32]; threadgroup float b[32];
        threadgroup float* p = a; p[t] = x[i];
        if (t < 32) b[t] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = p[t] + b[t & 31];""",
    ),
    Seeded(
        "too_much_threadgroup_memory",
        "threadgroup-memory",
        """threadgroup float a[8193]; a[t] = x[i]; o[i] = a[t];""",
    ),
    Seeded(
        "private_array_overflow",
        "array-index",
        """float v[4] = {0.0f, 1.0f, 2.0f, 3.0f}; v[n[0] + 3] = x[i]; o[i] = v[0];""",
    ),
    Seeded(
        "misaligned_uint4",
        "misaligned",
        """uint4 v = *(const device uint4*)(x + (i & ~3u) / 2); o[i] = float(v.x);""",
    ),
    Seeded(
        "uint4_from_a_float_array",
        "misaligned",
        """threadgroup float a[64]; a[t] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = (*(threadgroup float4*)(a + (t & ~3u))).x;""",
    ),
    Seeded("shift_by_32", "shift", """o[i] = float(i >> (32 * n[0]));"""),
    Seeded("shift_by_minus_1", "shift", """o[i] = float(i << (n[0] - 2));"""),
    Seeded("float_too_big_for_int", "float-to-int", """o[i] = float(int(x[i] * 1e20f));"""),
    Seeded("nan_to_int", "float-to-int", """o[i] = float(int(x[i] * NAN));"""),
    Seeded("infinity_to_uchar", "float-to-int", """o[i] = float(uchar(300.0f * float(n[0])));"""),
    Seeded("division_by_zero", "divide", """o[i] = float(int(i) / (n[0] - 1));"""),
    Seeded("signed_overflow", "integer-overflow", """o[i] = float(2147483647 * (n[0] + 1));"""),
    Seeded("null_pointer", "null", """const device float* p = n[0] ? nullptr : x; o[i] = p[0];"""),
    Seeded(
        "race_across_threadgroups",
        "race-across-threadgroups",
        """if (i != 255) o[i] = x[i];
        if (t == 0) o[255] = 1.0f;""",
    ),
    Seeded(
        "read_from_another_threadgroup",
        "race-across-threadgroups",
        """o[i] = x[i] + (g > 0 ? o[i - 64] : 0.0f);""",
    ),
    Seeded(
        "merge_without_fence",
        "race-across-threadgroups",
        """threadgroup uint last[1];
        o[i] = x[i];
        threadgroup_barrier(mem_flags::mem_device);
        if (t == 0) {
          last[0] = atomic_fetch_add_explicit((device atomic_uint*)c, 1u, memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (last[0] == 3 && g != 0) o[i] = x[i] + o[t];""",
    ),
    Seeded(
        "plain_and_atomic_access",
        "race-across-threadgroups",
        """o[i] = x[i];
        if (t == 0 && g < 3) {
          atomic_fetch_add_explicit((device atomic_uint*)c, 1u, memory_order_relaxed);
        }
        if (g == 3) o[i] = float(c[0]);""",
    ),
    Seeded(
        "private_array_beyond_the_stack",
        "stack",
        """float v[60000];
        for (uint k = 0; k < 60000; k++) v[(k * 7) % 60000] = x[i];
        o[i] = v[t * 900];""",
    ),
    Seeded("endless_loop", "timeout", """while (n[0] == 1) { } o[i] = x[i];"""),
    Seeded(
        "threadgroup_memory_in_a_block",
        "dialect",
        """{ threadgroup float a[64]; a[t] = x[i]; o[i] = a[t]; }""",
    ),
    Seeded("local_without_a_value", "compile", """float v; o[i] = v + x[i];"""),
    Seeded("does_not_compile", "compile", """o[i] = metal::max(x[i], 0);"""),
]
