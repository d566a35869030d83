"""The CUDA form of a body builds with NVRTC, as MLX would build it; skipped where NVRTC is not there."""

from __future__ import annotations

import emulator
import numpy as np
import pytest
from emulator import nvrtc
from emulator_kernels import SAXPY, TILE

from mlxkv.metal.launch import read

pytestmark = pytest.mark.skipif(nvrtc.why_not() is not None, reason=str(nvrtc.why_not()))

# The few words of the dialect that these bodies use; the project's own cuda.h has the rest.
WORDS = """
#define device
#define constant
#define thread
typedef unsigned int uint;
typedef unsigned short ushort;
#define thread_position_in_grid (uint3{blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y, blockIdx.z})
#define thread_index_in_simdgroup (threadIdx.x % 32)
template <class To, class From> inline To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From));
  return *reinterpret_cast<To*>(&value);
}
"""


@pytest.mark.parametrize("dtype", [np.float32, np.float16, emulator.bfloat16])
def test_saxpy_builds(dtype):
    kernel = emulator.metal_kernel("saxpy", ["x", "y", "a"], ["o"], SAXPY, WORDS)
    x = emulator.to_bfloat16(np.zeros(64)) if dtype is emulator.bfloat16 else np.zeros(64, dtype)
    binary = nvrtc.compile_cuda(kernel, [x, x, np.zeros(1, np.float32)], [dtype], [("T", dtype)])
    assert binary[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_tile_product_builds(arch):
    header = read("cuda.h") + emulator.tile_header("mma_sync")
    kernel = emulator.metal_kernel("tile", ["x", "y"], ["o"], TILE, header)
    x = np.zeros((16, 16), np.float16)
    assert nvrtc.compile_cuda(kernel, [x, x], [np.float32], arch=arch)[:4] == b"\x7fELF"


def test_errors_are_shown():
    kernel = emulator.metal_kernel("broken", ["x"], ["o"], "o[0] = nothing(x[0]);", WORDS)
    with pytest.raises(emulator.EmulatorFault, match="nothing") as caught:
        nvrtc.compile_cuda(kernel, [np.zeros(64, np.float32)], [np.float32])
    assert caught.value.kind == "compile"
