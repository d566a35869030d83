"""The emulator: good kernels give what NumPy gives, each seeded fault is caught and named."""

import emulator
import numpy as np
import pytest

REASON = emulator.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
needs_checks = pytest.mark.skipif(
    not emulator.can_check(), reason="the checked build needs g++ on Linux x86-64"
)
F32 = np.float32
START = """
uint i = thread_position_in_grid.x;
uint t = thread_index_in_threadgroup;
uint lane = thread_index_in_simdgroup;
uint sg = simdgroup_index_in_threadgroup;
uint g = threadgroup_position_in_grid.x;
"""
HEADER = """inline float seeded_sum(float v) {
  for (uint n = 16; n > 0; n /= 2) v += simd_shuffle_xor(v, ushort(n));
  return v;
}
"""
MEET = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SHARED = "threadgroup float a[64]; a[t] = x[i];"


@pytest.fixture(params=["checked", "plain"])
def checks(request) -> bool:
    if request.param == "checked" and not emulator.can_check():
        pytest.skip("the checked build needs g++ on Linux x86-64")
    return request.param == "checked"


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(F32)


def launch(source: str, checks: bool = True, **options) -> np.ndarray:
    """Four threadgroups of 64 threads: `x` float[256], `h` half[256], `n` int[1] (one), `o` float[256],
    `c` uint[8] in and out (zero)."""
    x = normal(256)
    kernel = emulator.metal_kernel(
        *("seeded", ["x", "h", "n", "c"], ["o"], START + source, HEADER),
        checks=checks,
        writable=["c"],
        **options,
    )
    (o,) = kernel(
        inputs=[x, x.astype(np.float16), np.array([1], np.int32), np.zeros(8, np.uint32)],
        grid=(256, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(256,)],
        output_dtypes=[F32],
    )
    return o


def fault_of(source: str, **options) -> emulator.EmulatorFault | None:
    try:
        launch(source, **options)
    except emulator.EmulatorFault as fault:
        return fault
    return None


# -- good kernels

SAXPY = """
uint i = thread_position_in_grid.x;
o[i] = T(fma(float(x[i]), a[0], float(x[uint(x_shape[1]) + i])));
"""
# 16 x 16 by 16 x 8, every lane placing its elements by the lane map of the header.
TILE = """
uint lane = thread_index_in_simdgroup;
uint row = tile_row(lane), column = tile_column(lane);
TileA a;
for (uint r = 0; r < 4; r++) {
  a.w[r] = *(const device uint*)(x + (row + 8 * (r % 2)) * 16 + column + 8 * (r / 2));
}
TileB b;
for (uint r = 0; r < 2; r++) {
  uint word = 0;
  for (uint i = 0; i < 2; i++) {
    half value = y[(tile_b_row(lane, i) + 8 * r) * 8 + tile_b_column(lane, i)];
    word |= uint(as_type<ushort>(value)) << (16 * i);
  }
  b.w[r] = word;
}
TileC c;
for (uint i = 0; i < 4; i++) c.v[i] = 1.0f;
tile_multiply(c, a, b);
for (uint i = 0; i < 4; i++) o[(row + 8 * (i / 2)) * 8 + column + i % 2] = c.v[i];
"""


def test_types_and_shapes(checks):
    for dtype, bound in ((F32, 1e-6), (np.float16, 2e-3), (emulator.bfloat16, 1e-2)):
        x = normal(2, 256)
        x = emulator.to_bfloat16(x) if dtype is emulator.bfloat16 else x.astype(dtype)
        (o,) = emulator.metal_kernel("saxpy", ["x", "a"], ["o"], SAXPY, checks=checks)(
            inputs=[x, np.array([0.7], F32)],
            template=[("T", dtype)],
            grid=(256, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(256,)],
            output_dtypes=[dtype],
        )
        x = emulator.to_float32(x)
        np.testing.assert_allclose(emulator.to_float32(o), 0.7 * x[0] + x[1], bound, bound)


def test_one_tile_body_under_both_lane_maps(checks):
    x, y = normal(16, 16).astype(np.float16), normal(16, 8, seed=1).astype(np.float16)
    for lane_map in ("simdgroup", "mma"):
        header = emulator.tile_header(lane_map)
        (o,) = emulator.metal_kernel("tile", ["x", "y"], ["o"], TILE, header, checks=checks)(
            inputs=[x, y],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(16, 8)],
            output_dtypes=[F32],
        )
        np.testing.assert_allclose(o, x.astype(F32) @ y.astype(F32) + 1, 1e-4, 1e-4)


def test_simd_operations(checks):
    x = normal(256).reshape(8, 32)
    for call, right in {
        "simd_shuffle(x[i], ushort(31 - lane))": x[:, ::-1],
        "simd_shuffle_xor(x[i], ushort(5))": x[:, np.arange(32) ^ 5],
        "float(simd_any(x[i] > 2.0f))": (x > 2).any(1, keepdims=True).repeat(32, 1),
    }.items():
        o = launch(f"o[i] = {call};", checks)
        np.testing.assert_array_equal(o.reshape(8, 32), right, err_msg=call)


RIGHT = {
    "whole simdgroups leave before a simd operation": "o[i] = x[i]; if (sg == 1) return; o[i] = seeded_sum(x[i]);",
    "a simdgroup barrier orders its simdgroup": f"""
        {SHARED} simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = a[t ^ 1];""",
    "a device barrier orders device memory": """
        o[i] = x[i]; threadgroup_barrier(mem_flags::mem_device);
        float y = o[i ^ 1]; threadgroup_barrier(mem_flags::mem_device); o[i] = y;""",
    "bytes next to each other belong to different threads": f"""
        threadgroup uchar a[(32 * 2)], b[2][(4)]; a[t] = uchar(t);
        if (t < 8) b[t / 4][t % 4] = uchar(t); {MEET} o[i] = float(a[63 - t]);""",
    "lanes part and meet again": """
        float s = x[i];
        if (lane < 4) s *= 2.0f;
        else if (lane < 9) { for (uint k = 0; k < lane; k++) s += float(k); }
        s = seeded_sum(s);
        for (uint k = 0; k < 3; k++) {
          float v = (lane + k) % 3 == 0 ? metal::fast::exp2(-metal::abs(s)) : x[i];
          s = seeded_sum(v) + (simd_any(v > 1.0f) ? seeded_sum(s) : 0.0f);
        }
        o[i] = s;""",
}


def test_right_kernels_raise_nothing(checks):
    assert {name: fault_of(body, checks=checks) for name, body in RIGHT.items()} == dict.fromkeys(
        RIGHT
    )


# -- seeded faults: (kind, body)

FAULTS = [
    ("uninitialised", f"{SHARED} o[i] = a[63 - t];"),
    ("uninitialised", "o[i] = o[i] + x[i];"),
    ("unwritten-output", "if (i != 100) o[i] = x[i];"),
    ("race", f"{SHARED} {MEET} float y = a[63 - t]; a[t] = y; {MEET} o[i] = a[t];"),
    ("race", f"threadgroup float a[32]; a[lane] = x[i]; {MEET} o[i] = a[lane];"),
    ("race", f"{SHARED} float s = seeded_sum(x[i]); o[i] = a[t ^ 1] + s;"),
    (
        "race",
        f"{SHARED} {MEET} a[t] = a[t] + 1.0f; simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = a[t ^ 32];",
    ),
    ("divergence", f"if (t < 32) {MEET} o[i] = x[i];"),
    ("divergence", f"o[i] = x[i]; if (sg == 1) return; {MEET}"),
    ("divergence", "o[i] = lane < 16 ? seeded_sum(x[i]) : seeded_sum(x[i] + 1.0f);"),
    ("shuffle-argument", "o[i] = simd_shuffle(x[i], ushort(32));"),
    ("out-of-bounds", "o[i] = x[i + 1];"),
    ("out-of-bounds", "o[i] = (*(const device float4*)(x + (i & ~3u) + (i / 255) * 4)).x;"),
    (
        "out-of-bounds",
        f"""threadgroup float a[32]; threadgroup float b[32]; threadgroup float* p = a; p[t] = x[i];
        if (t < 32) b[t] = x[i]; {MEET} o[i] = p[t] + b[t & 31];""",
    ),
    ("input-write", "((device float*)x)[i] = 0.0f; o[i] = x[i];"),
    ("array-index", "float v[4] = {0.0f, 1.0f, 2.0f, 3.0f}; v[n[0] + 3] = x[i]; o[i] = v[0];"),
    ("threadgroup-memory", "threadgroup float a[8193]; a[t] = x[i]; o[i] = a[t];"),
    ("misaligned", f"{SHARED} {MEET} o[i] = (*(threadgroup float4*)(a + (t & ~3u))).x;"),
    ("shift", "o[i] = float(i >> (32 * n[0]));"),
    ("float-to-int", "o[i] = float(int(x[i] * 1e20f));"),
    ("divide", "o[i] = float(int(i) / (n[0] - 1));"),
    ("integer-overflow", "o[i] = float(2147483647 * (n[0] + 1));"),
    ("null", "const device float* p = n[0] ? nullptr : x; o[i] = p[0];"),
    ("race-across-threadgroups", "if (i != 255) o[i] = x[i]; if (t == 0) o[255] = 1.0f;"),
    ("race-across-threadgroups", "o[i] = x[i] + (g > 0 ? o[i - 64] : 0.0f);"),
    (
        "stack",
        "float v[60000]; for (uint k = 0; k < 60000; k++) v[(k * 7) % 60000] = x[i]; o[i] = v[t * 900];",
    ),
    ("timeout", "while (n[0] == 1) { } o[i] = x[i];"),
    ("dialect", "{ threadgroup float a[64]; a[t] = x[i]; o[i] = a[t]; }"),
    ("compile", "float v; o[i] = v + x[i];"),
]


@needs_checks
def test_seeded_faults_are_caught():
    wrong = []
    for kind, body in FAULTS:
        fault = fault_of(body, timeout=1.0 if kind == "timeout" else 300.0)
        if fault is None or fault.kind != kind:
            wrong.append((kind, body, str(fault)))
    assert not wrong


@needs_checks
def test_a_fault_says_who_and_where():
    source = "threadgroup float a[64];\na[t] = x[i];\no[i] = a[t ^ 33];"
    fault = fault_of(source)
    assert fault.line == (START + source)[: (START + source).index("o[i]")].count("\n") + 1
    assert fault.threads == (0,) and fault.group == 0 and "a[33]" in str(fault)
    fault = fault_of("o[i] = x[i];\nif (t == 40) o[i - 1] = 1.0f;")
    assert fault.kind == "race" and set(fault.threads) == {39, 40}
    fault = fault_of(
        "float s = x[i];\nif (lane % 8 != 3) s = simd_shuffle(s, ushort(0));\no[i] = s;"
    )
    assert fault.threads == (3, 11, 19, 27), "every thread of the smaller party"


# -- the last threadgroup to arrive adds up what the others wrote

MERGE = """
threadgroup uint arrived[1];
uint t = thread_index_in_threadgroup;
uint group = threadgroup_position_in_grid.x;
partial[group * 64 + t] = x[group * 64 + t] * 2.0f;
{publish}
if (t == 0) {{
  {before}
  device atomic_uint* place = (device atomic_uint*)counter;
  arrived[0] = atomic_fetch_add_explicit(place, 1u, memory_order_relaxed);
  {after}
}}
{see}
if (arrived[0] == threadgroups_per_grid.x - 1) {{
  {all}
  float sum = 0.0f;
  for (uint g = 0; g < threadgroups_per_grid.x; g++) sum += partial[g * 64 + t];
  o[t] = sum;
}}
"""
FENCE = "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);"
WEAK = FENCE.replace("seq_cst", "relaxed")
NARROW = FENCE.replace("scope_device", "scope_threadgroup")
DEVICE = "threadgroup_barrier(mem_flags::mem_device);"
BOTH = "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);"
NONE = "threadgroup_barrier(mem_flags::mem_none);"
# (right, publish, before, after, see, all)
ORDERS = {
    "every thread fences its own writes": (True, FENCE + NONE, "", "", MEET, FENCE),
    "thread 0 fences for all": (True, DEVICE, FENCE, "", MEET, FENCE),
    "thread 0 fences on both sides": (True, DEVICE, FENCE, FENCE, BOTH, ""),
    "no fence before the counter": (False, DEVICE, "", "", MEET, FENCE),
    "no fence after the counter": (False, DEVICE, FENCE, "", BOTH, ""),
    "no barrier before the counter": (False, "", FENCE, "", MEET, FENCE),
    "a relaxed fence": (False, WEAK + NONE, "", "", MEET, FENCE),
    "a fence of the threadgroup": (False, DEVICE, NARROW, "", MEET, FENCE),
}


@needs_checks
def test_orders_of_memory_across_threadgroups():
    x, wrong = normal(7, 64), []
    for name, (right, *parts) in ORDERS.items():
        words = dict(zip(("publish", "before", "after", "see", "all"), parts, strict=True))
        kernel = emulator.metal_kernel(
            *("merge", ["x", "counter"], ["partial", "o"], MERGE.format(**words)),
            writable=["counter"],
        )
        try:
            _, o = kernel(
                inputs=[x, np.zeros(8, np.uint32)],
                grid=(64 * 7, 1, 1),
                threadgroup=(64, 1, 1),
                output_shapes=[(7, 64), (64,)],
                output_dtypes=[F32, F32],
            )
            outcome = np.allclose(o, 2 * x.sum(axis=0), atol=1e-5)
        except emulator.EmulatorFault as fault:
            outcome = not fault.kind.startswith("race")
        if outcome != right:
            wrong.append(name)
    assert not wrong


# -- what is refused before it runs


def test_grid_and_sizes_are_checked():
    kernel = emulator.metal_kernel("grid", ["x"], ["o"], "o[0] = x[0];")
    common = {"output_shapes": [(4,)], "output_dtypes": [F32]}
    for arrays, grid, threads, what in (
        ([normal(4)], 100, 64, "no multiple"),
        ([normal(4)], 96, 48, "multiple of 32"),
        ([normal(4)] * 2, 64, 64, "size 1 but got size 2"),
    ):
        with pytest.raises(ValueError, match=what):
            kernel(inputs=arrays, grid=(grid, 1, 1), threadgroup=(threads, 1, 1), **common)
    kernel = emulator.metal_kernel("counter", ["c"], ["o"], "o[0] = 1.0f;", writable=["c"])
    with pytest.raises(emulator.EmulatorFault, match="constant"):
        kernel.text([np.zeros(1, np.uint32)], ["float32"])
