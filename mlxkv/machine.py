"""Describe this machine: system, chip, memory and installed packages. Imports no framework."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from mlxkv import __version__

USABLE = 0.75  # share of the memory that macOS allows the GPU to wire


def machine() -> dict[str, object]:
    """Return Python's version, the operating system, chip and memory."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "chip": _chip(),
        "memory_bytes": machine_memory(),
    }


def _chip() -> str:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def footprint() -> int:
    """Return the bytes of memory that this process uses: phys_footprint on macOS, which includes compressed memory and
    the GPU's, resident bytes on Linux; 0 if unknown."""
    if sys.platform == "darwin":
        # rusage_info_v0: a UUID, seven numbers, ri_phys_footprint.
        about = ctypes.create_string_buffer(512)
        if ctypes.CDLL(None).proc_pid_rusage(os.getpid(), 0, about):
            return 0
        return int.from_bytes(about.raw[72:80], sys.byteorder)
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def machine_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory of this machine, or the limit of this process's container on Linux if that is lower.
    root: the folder of /proc and /sys."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    for line in lines:
        _, controllers, group = line.split(":", 2)
        folder, name = root / "sys/fs/cgroup", "memory.max"
        if controllers:  # of version 1
            folder, name = folder / "memory", "memory.limit_in_bytes"
            if "memory" not in controllers.split(","):
                continue
        folder /= group.strip("/")
        # Parent groups have limits, too; in a container the path may be that of the host.
        for place in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # "max"
                limits.append(int((place / name).read_text(encoding="ascii")))
    return min(limits)


# -- versions of packages

PACKAGES = ("mlx", "mlx-lm", "numpy", "safetensors", "transformers", "huggingface-hub")
OPTIONAL = ("mlx-vlm", "mlx-metal", "mlx-cpu", "mlx-cuda-13", "mlx-cuda-12", "torch", "triton")


def versions() -> dict[str, str | None]:
    """Return installed versions by name; None for a missing required package. Missing optional ones are left out."""
    found = {"mlxkv": __version__}
    found |= {name: _version(name) for name in PACKAGES + OPTIONAL}
    return {name: text for name, text in found.items() if text or name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def out_of_range() -> list[str]:
    """Return dependencies outside the ranges of pyproject.toml: 'mlx 0.1, wanted >=0.32'."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in requires("mlxkv") or []]
    except PackageNotFoundError:
        return []  # a source tree that is not installed
    wrong = []
    for need in wanted:
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        found = _version(need.name)
        if found is None or not need.specifier.contains(found, prereleases=True):
            wrong.append(f"{need.name} {found or 'missing'}, wanted {need.specifier}")
    return wrong
