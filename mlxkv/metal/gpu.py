"""Describe this machine's GPU: number of cores, for splitting work, and macOS version."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from functools import cache

import mlx.core as mx

from mlxkv.machine import machine_memory
from mlxkv.metal.launch import KernelBuilder, device_type

# Fallback number of cores if macOS reports none, by the last letter of MLX's architecture name (applegpu_g13s):
# phone, base, Pro, Max and Ultra, the smallest chip of each kind.
CORES = {"p": 5, "g": 8, "s": 14, "c": 24, "d": 48}
FEWEST = 8
TILES_SINCE = 15  # macOS: Metal 3.2, with `coherent` and `atomic_thread_fence`


@cache
def cores(builder: KernelBuilder | None) -> int | None:
    """Return the GPU cores of this Mac for kernels built by `builder`, None elsewhere."""
    return _apple_cores() if builder is mx.fast.metal_kernel else None


@cache
def known_cores() -> int | None:
    """Return the GPU cores that macOS reports, or None."""
    if sys.platform != "darwin":
        return None
    command = ["ioreg", "-r", "-d", "1", "-c", "IOAccelerator"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'"gpu-core-count"\s*=\s*(\d+)', text)
    return max(1, int(match[1])) if match else None


def _apple_cores() -> int:
    letter = str(mx.device_info().get("architecture", ""))[-1:]
    return known_cores() or CORES.get(letter, FEWEST)


@cache
def macos() -> int | None:
    """Return the major version of macOS, or None on other systems."""
    major = platform.mac_ver()[0].partition(".")[0]
    return int(major) if major.isdigit() else None


@cache
def has_tensor_units() -> bool:
    """Return whether MLX uses the tensor units of this GPU (`is_nax_available`): M5 and A19 on, macOS 26.2 on."""
    system = [int(n) for n in platform.mac_ver()[0].split(".") if n.isdigit()]
    match = re.search(r"_g(\d+)(\w)$", str(mx.device_info().get("architecture", "")))
    generation, kind = (int(match[1]), match[2]) if match else (0, "")
    return system >= [26, 2] and generation >= (18 if kind == "p" else 17)


def why_no_tiles() -> str | None:
    """Return why Metal on this Mac cannot build tile kernels, or None."""
    version = macos()
    if version is None or version >= TILES_SINCE:
        return None
    return f"tiles need macOS {TILES_SINCE} (Metal 3.2), this is macOS {version}"


def array_memory() -> int:
    """Return the bytes of memory that arrays have: the GPU's, on a Mac and a CPU the machine's."""
    info = mx.device_info()
    return int(info.get("memory_size") or info.get("total_memory") or machine_memory())


def device() -> dict[str, str]:
    """Return the backend in use and the name of its device."""
    return {"backend": device_type(), "device": str(mx.device_info().get("device_name", ""))}
