"""The emulator: good kernels give what NumPy gives, each seeded fault is caught and named."""

from __future__ import annotations

import re

import emulator
import numpy as np
import pytest
from emulator_faults import FAULTS, HEADER, START
from emulator_kernels import (
    HADAMARD_ENCODE,
    HADAMARD_HEADER,
    MATRIX_8X8,
    ROW_SUM,
    SAXPY,
    SPLIT_K,
    TILE,
)

REASON = emulator.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
needs_checks = pytest.mark.skipif(
    not emulator.can_check(), reason="the checked build needs g++ on Linux x86-64"
)

TYPES = {"float": np.float32, "half": np.float16, "bfloat": emulator.bfloat16}
TOLERANCE = {"float": 1e-5, "half": 2e-3, "bfloat": 1e-2}


@pytest.fixture(params=["checked", "plain"])
def checks(request) -> bool:
    if request.param == "checked" and not emulator.can_check():
        pytest.skip("the checked build needs g++ on Linux x86-64")
    return request.param == "checked"


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    return emulator.to_bfloat16(x) if dtype == "bfloat" else x.astype(TYPES[dtype])


def assert_close(got: np.ndarray, want: np.ndarray, dtype: str = "float") -> None:
    got, want = emulator.to_float32(got), np.asarray(want, np.float64)
    assert got.shape == want.shape
    error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
    assert error < TOLERANCE[dtype], f"rms error {error:.2g}"


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("dtype", TYPES)
def test_saxpy(dtype, checks):
    kernel = emulator.metal_kernel("saxpy", ["x", "y", "a"], ["o"], SAXPY, checks=checks)
    x, y = cast(normal(4, 256), dtype), cast(normal(4, 256, seed=1), dtype)
    (o,) = kernel(
        inputs=[x, y, np.array([0.7], np.float32)],
        template=[("T", TYPES[dtype])],
        grid=(1024, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(4, 256)],
        output_dtypes=[TYPES[dtype]],
    )
    assert o.dtype == (np.uint16 if dtype == "bfloat" else TYPES[dtype])
    assert_close(o, 0.7 * emulator.to_float32(x) + emulator.to_float32(y), dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_sums_of_rows(dtype, checks):
    kernel = emulator.metal_kernel("rows", ["x"], ["o"], ROW_SUM, checks=checks)
    x = cast(normal(12, 257), dtype)
    (o,) = kernel(
        inputs=[x],
        template=[("T", TYPES[dtype])],
        grid=(32 * 12, 1, 1),
        threadgroup=(96, 1, 1),
        output_shapes=[(12,)],
        output_dtypes=[TYPES[dtype]],
    )
    assert_close(o, emulator.to_float32(x).sum(axis=1), dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_hadamard_encode(dtype, checks):
    names = ["codes", "scales"]
    kernel = emulator.metal_kernel(
        "encode", ["x"], names, HADAMARD_ENCODE, HADAMARD_HEADER, checks=checks
    )
    x = cast(normal(64, 128), dtype)
    codes, scales = kernel(
        inputs=[x],
        template=[("T", TYPES[dtype])],
        grid=(32 * 64, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(64, 32), (64,)],
        output_dtypes=[np.uint16, np.float32],
    )
    matrix = np.array([[1.0]])
    while len(matrix) < 128:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    y = emulator.to_float32(x).astype(np.float64) @ matrix / np.sqrt(128)
    scale = np.abs(y).max(axis=1) / 7
    assert_close(scales, scale)
    got = (codes[..., None] >> np.arange(0, 16, 4)) & 15
    exact = (y / scale[:, None]).reshape(got.shape) + 8
    ties = np.abs(exact - np.floor(exact) - 0.5) < 1e-4
    assert ((got == np.rint(exact)) | ties).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_split_attention(dtype, checks):
    names = ["q", "k", "v", "length"]
    kernel = emulator.metal_kernel("split", names, ["out", "stats"], SPLIT_K, checks=checks)
    q, k, v = (cast(normal(*shape, seed=3), dtype) for shape in [(64,), (203, 64), (203, 64)])
    out, stats = kernel(
        inputs=[q, k, v, np.array([203], np.int32)],
        template=[("D", 64)],
        grid=(256 * 3, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(3, 64), (3, 2)],
        output_dtypes=[np.float32, np.float32],
    )
    weight = np.exp(stats[:, 0] - stats[:, 0].max())
    got = (out * weight[:, None]).sum(axis=0) / (stats[:, 1] * weight).sum()
    q, k, v = (emulator.to_float32(x).astype(np.float64) for x in (q, k, v))
    p = np.exp(k @ q - (k @ q).max())
    assert_close(got, p @ v / p.sum())


@pytest.mark.parametrize("dtype", TYPES)
def test_matrices_of_a_simdgroup(dtype, checks):
    kernel = emulator.metal_kernel("matrix", ["x", "y"], ["o"], MATRIX_8X8, checks=checks)
    x, y = cast(normal(16, 32), dtype), cast(normal(32, 8, seed=1), dtype)
    (o,) = kernel(
        inputs=[x, y],
        template=[("T", TYPES[dtype])],
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(16, 8)],
        output_dtypes=[np.float32],
    )
    assert_close(o, emulator.to_float32(x).astype(np.float64) @ emulator.to_float32(y))


@pytest.mark.parametrize("lane_map", ["simdgroup", "mma"])
def test_one_tile_body_under_both_lane_maps(lane_map, checks):
    header = emulator.tile_header(lane_map)
    kernel = emulator.metal_kernel("tile", ["x", "y"], ["o"], TILE, header, checks=checks)
    x, y = normal(16, 16).astype(np.float16), normal(16, 8, seed=1).astype(np.float16)
    (o,) = kernel(
        inputs=[x, y],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(16, 8)],
        output_dtypes=[np.float32],
    )
    assert_close(o, x.astype(np.float64) @ y.astype(np.float64) + 1)


def launch(source: str, checks: bool = True, **options) -> np.ndarray:
    """Four threadgroups of 64 threads, the arguments that emulator_faults.py describes."""
    x = normal(256)
    names = ["x", "h", "n", "c"]
    kernel = emulator.metal_kernel(
        *("seeded", names, ["o"], source, HEADER),
        checks=checks,
        writable=["c"],
        **options,
    )
    (o,) = kernel(
        inputs=[x, x.astype(np.float16), np.array([1], np.int32), np.zeros(8, np.uint32)],
        grid=(256, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(256,)],
        output_dtypes=[np.float32],
    )
    return o


@needs_checks
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_seeded_fault_is_caught(fault):
    with pytest.raises(emulator.EmulatorFault) as caught:
        launch(fault.source, timeout=1.0 if fault.kind == "timeout" else 300.0)
    assert caught.value.kind == fault.kind, caught.value


def test_plain_mode_compares_two_orders():
    """Without a watch, a missing barrier shows as a result that depends on the order."""
    source = next(fault.source for fault in FAULTS if fault.name == "no_barrier")
    with pytest.raises(emulator.EmulatorFault) as caught:
        launch(source, checks=False)
    assert caught.value.kind == "order"


def test_plain_mode_survives_a_broken_kernel():
    source = START + "((device float*)x)[i] = 0.0f; o[i + 100000000] = x[i];"
    for _ in range(2):
        with pytest.raises(emulator.EmulatorFault) as caught:
            launch(source, checks=False)
        assert caught.value.kind in {"input-write", "out-of-bounds", "crash"}


@needs_checks
def test_a_fault_says_who_and_where():
    source = START + "threadgroup float a[64];\na[t] = x[i];\no[i] = a[t ^ 33];"
    with pytest.raises(emulator.EmulatorFault) as caught:
        launch(source)
    assert caught.value.kind == "uninitialised"
    assert caught.value.line == source[: source.index("o[i]")].count("\n") + 1
    assert caught.value.threads == (0,) and caught.value.group == 0
    assert "a[33]" in str(caught.value)

    source = START + "o[i] = x[i];\nif (t == 40) o[i - 1] = 1.0f;"
    with pytest.raises(emulator.EmulatorFault) as caught:
        launch(source)
    assert caught.value.kind == "race" and set(caught.value.threads) == {39, 40}
    assert caught.value.other.endswith(f":{caught.value.line - 1}") or caught.value.other


@needs_checks
def test_every_thread_of_the_smaller_party_is_named():
    source = START + "float s = x[i];\nif (lane % 8 != 3) s = simd_sum(s);\no[i] = s;"
    with pytest.raises(emulator.EmulatorFault) as caught:
        launch(source)
    assert caught.value.threads == (3, 11, 19, 27)


RIGHT = {
    "whole simdgroups leave before a simd operation": """
        o[i] = x[i];
        if (sg == 1) return;
        o[i] = simd_sum(x[i]);""",
    "a simdgroup barrier orders its simdgroup": """
        threadgroup float a[64]; a[t] = x[i];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = a[t ^ 1];""",
    "a device barrier orders device memory": """
        o[i] = x[i];
        threadgroup_barrier(mem_flags::mem_device);
        float y = o[i ^ 1];
        threadgroup_barrier(mem_flags::mem_device);
        o[i] = y;""",
    "atomics of all threads meet in one place": """
        o[i] = x[i];
        atomic_fetch_add_explicit((device atomic_uint*)c, 1u, memory_order_relaxed);""",
    "bytes next to each other belong to different threads": """
        threadgroup uchar a[(32 * 2)], b[2][(4)]; a[t] = uchar(t);
        if (t < 8) b[t / 4][t % 4] = uchar(t);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = float(a[63 - t]);""",
    "threadgroup memory is used again after a barrier": """
        threadgroup float a[64];
        float s = 0.0f;
        for (uint k = 0; k < 4; k++) {
          a[t] = x[i];
          threadgroup_barrier(mem_flags::mem_threadgroup);
          s += a[63 - t];
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        o[i] = s;""",
    "wide loads of threadgroup memory of the wide type": """
        threadgroup float4 a[16];
        ((threadgroup float*)a)[t] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = a[t / 4].z;""",
    "lanes part and meet again": """
        float s = x[i];
        if (lane < 4) s *= 2.0f;
        else if (lane < 9) { for (uint k = 0; k < lane; k++) s += float(k); }
        s = seeded_sum(s);
        for (uint k = 0; k < 3; k++) {
          float v = (lane + k) % 3 == 0 ? metal::exp(-metal::abs(s)) : x[i];
          s = seeded_sum(v) + (simd_any(v > 1.0f) ? seeded_sum(s) : 0.0f);
        }
        o[i] = s;""",
    "an array of a thread is indexed by a variable": """
        float v[4];
        for (uint k = 0; k < 4; k++) v[k] = x[i] * float(k);
        o[i] = v[t & 3];""",
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_raise_nothing(name, checks):
    launch(START + RIGHT[name], checks=checks)


def test_shuffle_from_any_lane_when_asked():
    source = START + "o[i] = simd_shuffle(x[i], ushort(31 - lane));"
    o = launch(source, any_lane=True)
    assert (o.reshape(-1, 32) == normal(256).reshape(-1, 32)[:, ::-1]).all()


SIMD = {
    "simd_max(x[i])": lambda x: x.max(axis=1, keepdims=True),
    "simd_min(x[i])": lambda x: x.min(axis=1, keepdims=True),
    "simd_prefix_inclusive_sum(x[i])": lambda x: x.cumsum(axis=1),
    "simd_prefix_exclusive_sum(x[i])": lambda x: x.cumsum(axis=1) - x,
    "simd_broadcast(x[i], ushort(7))": lambda x: x[:, 7:8],
    "simd_shuffle_up(x[i], ushort(3))": lambda x: np.hstack([x[:, :3], x[:, :-3]]),
    "simd_shuffle_down(x[i], ushort(3))": lambda x: np.hstack([x[:, 3:], x[:, -3:]]),
    "simd_shuffle_xor(x[i], ushort(5))": lambda x: x[:, np.arange(32) ^ 5],
    "float(simd_sum(uint(lane)))": lambda x: np.full((8, 1), 496.0),
    "float(simd_max(-int(lane)))": lambda x: np.zeros((8, 1)),
    "float(simd_any(x[i] > 2.0f))": lambda x: (x > 2).any(axis=1, keepdims=True),
    "float(simd_all(x[i] < 2.0f))": lambda x: (x < 2).all(axis=1, keepdims=True),
    "float(popcount(simd_vote::vote_t(simd_ballot(x[i] > 0.0f))))": lambda x: (x > 0).sum(
        axis=1, keepdims=True
    ),
}


@pytest.mark.parametrize("call", SIMD)
def test_simd_operations(call, checks):
    got = launch(START + f"o[i] = {call};", checks=checks).reshape(8, 32)
    want = np.broadcast_to(SIMD[call](normal(256).reshape(8, 32).astype(np.float64)), got.shape)
    assert np.allclose(got, want, atol=1e-5)


def test_a_counter_of_one_element_is_constant_on_metal():
    kernel = emulator.metal_kernel("counter", ["c"], ["o"], "o[0] = 1.0f;", writable=["c"])
    with pytest.raises(emulator.EmulatorFault, match="constant"):
        kernel.text([np.zeros(1, np.uint32)], ["float32"])


def test_grid_and_sizes_are_checked():
    kernel = emulator.metal_kernel("grid", ["x"], ["o"], SAXPY)
    common = {"output_shapes": [(4,)], "output_dtypes": [np.float32]}
    with pytest.raises(ValueError, match="no multiple"):
        kernel(inputs=[normal(4)], grid=(100, 1, 1), threadgroup=(64, 1, 1), **common)
    with pytest.raises(ValueError, match="multiple of 32"):
        kernel(inputs=[normal(4)], grid=(96, 1, 1), threadgroup=(48, 1, 1), **common)
    with pytest.raises(ValueError, match="size 1 but got size 2"):
        kernel(inputs=[normal(4)] * 2, grid=(64, 1, 1), threadgroup=(64, 1, 1), **common)


def test_the_signature_is_that_of_mlx(capfd, tmp_path):
    """Names and types of the parameters, as MLX writes them for the same call."""
    import mlx.core as mx

    source = """
    // a comment that says max_shape adds x_shape
    uint i = thread_position_in_grid.x + thread_index_in_simdgroup;
    o[i] = T(x[i] + y_ndim * int(y_strides[0]) + n[0]);
    """
    names = {"input_names": ["x", "n", "y"], "output_names": ["o", "p"]}
    call = {
        "template": [("T", mx.float16), ("D", 128), ("B", True)],
        "grid": (64, 1, 1),
        "threadgroup": (32, 1, 1),
        "output_shapes": [(64,), (2, 2)],
        "output_dtypes": [mx.float16, mx.uint8],
    }
    theirs = mx.fast.metal_kernel(name="both", source=source, **names)
    arrays = mx.zeros((64,), mx.bfloat16), mx.zeros((1,), mx.int32), mx.zeros((4, 16))

    def traced(*inputs):
        return theirs(inputs=list(inputs), verbose=True, **call)

    try:
        mx.export_function(str(tmp_path / "both.mlxfn"), traced, *arrays)
    except RuntimeError as error:
        pytest.skip(f"this MLX writes kernels only where it can run them: {error}")
    text = capfd.readouterr().out
    want = re.findall(r"^\s+(\S.*?) (?:\[\[.*?\]\])[,)]", text, flags=re.M)
    ours = emulator.metal_kernel("both", source=source, **names)
    inputs = [emulator.as_array(x) for x in arrays]
    text = ours.text(inputs, ["float16", "uint8"], call["template"])
    got = text[text.index("emu_kernel(") + 11 : text.index(") {\n#line")].split(",")
    assert [" ".join(p.split()) for p in got] == want
    assert "template <typename T, int D, bool B>" in text
