"""Builds the CUDA form of a kernel with NVRTC: no GPU is needed, nothing is run.

Used when libnvrtc and the headers of the CUDA runtime are there:
    pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl
in this environment, or in another one whose site-packages folder EMULATOR_CUDA_SITE names.
"""

from __future__ import annotations

import ctypes
import functools
import os
import site
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emulator import dtypes, wrapper
from emulator.fault import EmulatorFault
from emulator.kernel import Kernel

CUDA_NAMES = {**dtypes.NAMES, "float16": "__half", "bfloat16": "__nv_bfloat16"}
UTILS = "mlx/backend/cuda/device/utils.cuh"

# What a body can see of MLX's own header, which is compiled into the library of MLX.
UTILS_TEXT = """
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
#include <cuda/std/limits>
#include <cuda/std/tuple>
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
}
"""


@functools.cache
def _sites() -> list[Path]:
    named = os.environ.get("EMULATOR_CUDA_SITE")
    folders = [named] if named else [*site.getsitepackages(), site.getusersitepackages()]
    return [Path(folder) for folder in folders]


def _find(*patterns: str) -> Path | None:
    for folder in _sites():
        for pattern in patterns:
            for path in sorted(folder.glob(pattern)):
                return path
    return None


@functools.cache
def include_paths() -> list[Path]:
    """Folders of headers, in the order in which MLX names them: MLX, CCCL, CUDA runtime."""
    mlx = _find("mlx/include")
    cccl = _find("mlx/include/cccl", "nvidia/*/include/cccl", "nvidia/*/cccl/include")
    runtime = _find("nvidia/*/include/cuda_fp16.h")
    found = [mlx, cccl, runtime.parent if runtime else None]
    return [path for path in found if path]


@functools.cache
def why_not() -> str | None:
    """The reason NVRTC cannot be used here."""
    if not _find("nvidia/*/lib/libnvrtc.so*"):
        return "no nvidia-cuda-nvrtc in this environment"
    if not _find("nvidia/*/include/cuda_fp16.h"):
        return "no headers of the CUDA runtime (nvidia-cuda-runtime)"
    if not any((path / "cuda" / "std" / "array").exists() for path in include_paths()):
        return "no CCCL headers (nvidia-cuda-cccl)"
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(_find("nvidia/*/lib/libnvrtc.so*")))


def cuda_text(
    kernel: Kernel, inputs: Sequence[Any], output_dtypes: Sequence[Any], template: Any = ()
) -> str:
    """The text that `mx.fast.cuda_kernel` writes for this call (custom_kernel.cpp of MLX)."""
    parameters = []
    for name, x in zip(kernel.input_names, map(dtypes.as_array, inputs), strict=True):
        parameters.append(f"const {CUDA_NAMES[dtypes.array_type(x)]}* {name}")
        types = {"shape": "Shape", "strides": "Strides", "ndim": "int"}
        for part in wrapper.info_in(kernel.source, name):
            parameters.append(f"const __grid_constant__ {types[part]} {name}_{part}")
    for name, dtype in zip(kernel.output_names, output_dtypes, strict=True):
        parameters.append(f"{CUDA_NAMES[dtypes.type_name(dtype)]}* {name}")
    constants = []
    for name, value in template:
        if isinstance(value, bool):
            constants.append(f"  constexpr bool {name} = {str(value).lower()};")
        elif isinstance(value, int):
            constants.append(f"  constexpr int {name} = {value};")
        else:
            constants.append(f"  using {name} = {CUDA_NAMES[dtypes.type_name(value)]};")
    return "\n".join(
        [
            f'#include "{UTILS}"\n#include <cooperative_groups.h>\n',
            kernel.header,
            "namespace mlx::core::cu {\nnamespace cg = cooperative_groups;",
            f"__global__ void custom_kernel_{kernel.name}(",
            "    " + ",\n    ".join(parameters) + ") {",
            *constants,
            f'#line 1 "{kernel.name}.metal"',
            kernel.source,
            "}\n} // namespace mlx::core::cu\n",
        ]
    )


def compile_cuda(
    kernel: Kernel,
    inputs: Sequence[Any],
    output_dtypes: Sequence[Any],
    template: Any = (),
    arch: str = "sm_90a",
) -> bytes:
    """The binary for one architecture; raises `EmulatorFault` of kind compile with NVRTC's log."""
    text = cuda_text(kernel, inputs, output_dtypes, template)
    nvrtc, program = _library(), ctypes.c_void_p()
    own = any((path / UTILS).exists() for path in include_paths())
    headers = (ctypes.c_char_p * 1)(UTILS_TEXT.encode())
    names = (ctypes.c_char_p * 1)(UTILS.encode())
    nvrtc.nvrtcCreateProgram(
        *(ctypes.byref(program), text.encode(), f"{kernel.name}.cu".encode()),
        *(0 if own else 1, headers, names),
    )
    try:
        expression = f"mlx::core::cu::custom_kernel_{kernel.name}".encode()
        nvrtc.nvrtcAddNameExpression(program, expression)
        flags = ["--device-as-default-execution-space", f"--gpu-architecture={arch}"]
        flags += [f"--include-path={path}" for path in include_paths()]
        arguments = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        if nvrtc.nvrtcCompileProgram(program, len(flags), arguments):
            raise EmulatorFault("compile", _read(program, "ProgramLog").decode()[:8000])
        return _read(program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(_library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(_library(), f"nvrtcGet{what}")(program, buffer)
    return buffer.raw
