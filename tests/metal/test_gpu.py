"""What is known of the GPU decides how work is split, which bodies can be built, what MLX prefills fused."""

import subprocess

import emulator
import mlx.core as mx
import pytest
from on_emulator import make, make_tiles
from samples import data, rms

from mlxkv.cache import attention
from mlxkv.cache.attention import attend
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.quantizers import Affine
from mlxkv.formats.records import record_layout
from mlxkv.metal import attend as kernels
from mlxkv.metal import gpu, launch, tiles

pytestmark = pytest.mark.usefixtures("trusted")

SMALL = CacheConfig(Side(Affine(4), "none"), Side(Affine(4), "none"), sink=40, recent=64, page=64)
needs_emulator = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))


@pytest.fixture(autouse=True)
def _fresh():
    for known in (gpu.cores, gpu.known_cores, gpu.macos):
        known.cache_clear()
    yield
    for known in (gpu.cores, gpu.known_cores, gpu.macos):
        known.cache_clear()


@needs_emulator
def test_attention_is_the_same_however_it_is_split(subtests, monkeypatch):
    for factory, dtype, both in ((make, mx.float32, (4, 64)), (make_tiles, mx.float16, (64,))):
        for cores in both:
            with subtests.test(factory=factory, dtype=dtype, cores=cores):
                monkeypatch.setattr(gpu, "cores", lambda make, cores=cores: cores)
                keys, values = (
                    mx.array(data(1, 2, 500, 64, seed=i)).astype(dtype) for i in range(2)
                )
                q = mx.array(data(1, 6, 1, 64, seed=2)).astype(dtype)
                with launch.using(factory):
                    ours = CompressedKVCache(SMALL)
                    ours.update_and_fetch(keys, values)
                    out = attend(q, ours.keys_and_values()[0], 0.125)
                monkeypatch.undo()
                plain = CompressedKVCache(SMALL)
                plain.update_and_fetch(keys, values)
                bound = 1e-5 if dtype == mx.float32 else 3e-3
                assert rms(out, attend(q, plain.keys_and_values()[0], 0.125)) < bound


IOREG = (
    '+-o AGXAcceleratorG13X\n  {\n    "gpu-core-count" = 14\n    "model" = "Apple M1 Pro"\n  }\n'
)


@pytest.mark.parametrize(
    ("said", "architecture", "cores"),
    [
        (IOREG, "applegpu_g13s", 14),
        ("", "applegpu_g14g", 8),
        ("", "applegpu_g13d", 48),
        ("", "", 8),
    ],
)
def test_cores_of_a_mac(monkeypatch, said, architecture, cores):
    monkeypatch.setattr(gpu.sys, "platform", "darwin")
    done = subprocess.CompletedProcess([], 0, stdout=said)
    monkeypatch.setattr(gpu.subprocess, "run", lambda *args, **kw: done)
    monkeypatch.setattr(gpu.mx, "device_info", lambda: {"architecture": architecture})
    assert gpu.cores(mx.fast.metal_kernel) == cores
    assert gpu.cores(make) is None


def test_tiles_need_metal_3_2(subtests, monkeypatch):
    for release, reason in (("14.6", "macOS 14"), ("15.1", None), ("26.0", None)):
        with subtests.test(release=release, reason=reason):
            gpu.macos.cache_clear()
            monkeypatch.setattr(
                gpu.platform, "mac_ver", lambda release=release: (release, ("", "", ""), "arm64")
            )
            layout = record_layout(SMALL, 64, 64)
            found = tiles.why_not(layout, 64, mx.float16, mx.fast.metal_kernel)
            assert (found is None) == (reason is None)
            assert reason is None or (reason in found and "macOS 15" in found)


def test_head_dims_that_mlx_prefills_fused(subtests):
    for backend, mlx, fused, not_fused in [
        ("metal", "0.31.2", (64, 80, 128), (72, 96, 192, 256)),
        ("metal", "0.32.0", (64, 80, 128), (72, 96, 192, 256)),
        ("metal", "0.32.1", (64, 72, 80, 96, 128), (192, 256)),
        ("metal", "0.32.4", (64, 72, 80, 96, 128), (192, 256)),
        ("cuda", "0.31.2", (64, 72, 80, 96, 112, 128), (100, 192, 256)),
        ("cpu", "0.32.4", (), (64, 128)),
    ]:
        with subtests.test(backend=backend, mlx=mlx, fused=fused):
            found = attention.fused_dims(backend, mlx)
            assert found.issuperset(fused) and not found.intersection(not_fused)


def test_gpus_with_tensor_units(subtests, monkeypatch):
    for release, architecture, has in [
        ("26.2", "applegpu_g17s", True),
        ("26.1", "applegpu_g17s", False),
        ("15.7.1", "applegpu_g17s", False),
        ("27.0", "applegpu_g16d", False),
        ("27.0", "applegpu_g17p", False),
        ("27.0", "applegpu_g18p", True),
        ("", "x86_64", False),
    ]:
        with subtests.test(release=release, architecture=architecture):
            system, info = (release, ("",) * 3, "arm64"), {"architecture": architecture}
            monkeypatch.setattr(gpu.platform, "mac_ver", lambda system=system: system)
            monkeypatch.setattr(gpu.mx, "device_info", lambda info=info: info)
            assert gpu.has_tensor_units.__wrapped__() == has


@pytest.mark.parametrize(
    ("where", "dims", "units", "blocks"),
    (
        ("metal", 256, False, 8),
        ("metal", 256, True, 1),
        ("metal", 128, False, 1),
        ("cpu", 64, False, 64),
    ),
)
def test_where_mlx_is_not_fused_no_score_matrix_is_whole(monkeypatch, where, dims, units, blocks):
    """Gemma's heads of 256 dims on Metal: 8 heads x 2048 x 32768 scores would be 2 GiB."""
    monkeypatch.setattr(attention, "device_type", lambda: where)
    monkeypatch.setattr(attention, "WIDE_TOKENS", 512)
    monkeypatch.setattr(attention.gpu, "has_tensor_units", lambda: units)
    seen = []
    real = mx.fast.scaled_dot_product_attention

    def spy(q, k, v, **more):
        seen.append(4 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
        return real(q, k, v, **more)

    monkeypatch.setattr(attention.mx.fast, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(attention, "SCORE_BYTES", 1 << 16)
    monkeypatch.setattr(attention, "SCORE_BYTES_GPU", 1 << 19)
    keys, values = (mx.array(data(1, 1, 1024, dims, seed=i)) for i in range(2))
    cache = CompressedKVCache(SMALL)
    cache.update_and_fetch(keys, values)
    q = mx.array(data(1, 2, 512, dims, seed=2)).astype(mx.float16 if units else mx.float32)
    out = attend(q, cache.keys_and_values()[0], dims**-0.5, "causal")
    most = 1 << (16 if where == "cpu" else 19)
    assert len(seen) == blocks and (blocks == 1 or max(seen) <= most)
    assert out.shape == q.shape


def test_a_long_prefill_is_dequantized_a_side_at_a_time(monkeypatch):
    """MLX's arrays have fewer than 2^31 elements along a dim."""
    sides = []

    def one(run, dtype, make, sink, recent, first, number):
        sides.append(number)
        return [None] * number

    monkeypatch.setattr(kernels, "_dequantize", one)
    layout = record_layout(SMALL, 128, 128)
    for tokens in (1 << 16, 1 << 20):
        buffer = mx.zeros((1, 8, tokens // 16, 0), mx.uint32)
        kernels.dequantize(kernels.Run(buffer, tokens // 16, layout), mx.bfloat16, make)
    assert sides == [2, 1, 1]


@pytest.mark.parametrize(
    ("info", "bytes_"), [({"memory_size": 5}, 5), ({"total_memory": 7}, 7), ({}, 11)]
)
def test_arrays_have_the_memory_of_the_gpu_where_it_has_its_own(monkeypatch, info, bytes_):
    monkeypatch.setattr(gpu.mx, "device_info", lambda: info)  # Metal, CUDA, a CPU
    monkeypatch.setattr(gpu, "machine_memory", lambda: 11)
    assert gpu.array_memory() == bytes_
