"""OpenBLAS for MLX on Linux, whose wheel brings Netlib's reference BLAS: a tenth of its speed.

NumPy's wheel brings OpenBLAS. A library of three functions (fast_blas.cpp) goes in front of MLX's own
and hands their work over. Processes that tests start do the same (processes/sitecustomize.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path

TEXT = Path(__file__).with_suffix(".cpp")


def put_in_front() -> tuple[Path | None, str]:
    """Before MLX is imported. What multiplies MLX's matrices from here on: the library,
    or None for MLX's own, and the header's words for it."""
    if platform.system() != "Linux":
        return None, "MLX's own"
    if "mlx.core" in sys.modules:
        return None, "MLX's own, slow (MLX was imported before the tests)"
    from emulator import build

    openblas = _openblas()
    if openblas is None or build.compiler() is None:
        return None, "MLX's own, slow (no NumPy 2 from a wheel, or no C++ compiler)"
    library = _library(openblas)
    # Global names are looked up before those that MLX's library brings along.
    ctypes.CDLL(str(library), os.RTLD_NOW | os.RTLD_GLOBAL)
    return library, "NumPy's OpenBLAS"


def _openblas() -> Path | None:
    """The OpenBLAS of NumPy 2's wheels; other builds of NumPy have none or name it otherwise."""
    folder = Path(find_spec("numpy").origin).parents[1] / "numpy.libs"
    return next(folder.glob("libscipy_openblas64_*.so"), None)


def _library(openblas: Path) -> Path:
    """Compiled once, kept beside the emulator's kernels."""
    from emulator import build

    key = hashlib.sha256(f"{TEXT.read_text()}{openblas}".encode()).hexdigest()[:24]
    path = build.cache_dir() / f"blas-{key}.so"
    if not path.exists():
        link = [str(openblas), f"-Wl,-rpath,{openblas.parent}"]
        build.compile_to([build.compiler(), "-O1", "-fPIC", "-shared", str(TEXT), *link], path)
    return path
