"""Prepare this process for MLX and mlx-lm, before either is imported."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from mlxkv import console, files
from mlxkv.errors import UserError

DESCRIPTORS = 4096  # mlx-lm sets this limit on import, and ends where a process may not have it


def prepare() -> None:
    """Make MLX multiply with OpenBLAS on Linux, and mlx-lm importable at any limit of descriptors."""
    preload_openblas()
    allow_few_descriptors()


def whole_float32() -> None:
    """Make MLX on CUDA multiply float32 as such: TF32 has the precision of float16. Before the first product, unless
    the user says otherwise."""
    os.environ.setdefault("MLX_ENABLE_TF32", "0")


def allow_few_descriptors() -> None:
    """Make mlx-lm importable where this process may have fewer descriptors than it asks for."""
    if (
        not 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < DESCRIPTORS
    ):  # RLIM_INFINITY is below 0
        return
    usual = resource.setrlimit

    def capped(kind: int, limits: tuple[int, int]) -> None:
        """Set what there is, in the next call for descriptors: mlx-lm's."""
        if kind == resource.RLIMIT_NOFILE:
            resource.setrlimit = usual
            hard = resource.getrlimit(kind)[1]
            limits = min(limits[0], hard), min(limits[1], hard)
        usual(kind, limits)

    resource.setrlimit = capped


# -- NumPy's OpenBLAS for MLX's matrices, on Linux
#
# MLX's wheel for Linux contains Netlib's reference BLAS, a tenth as fast as the OpenBLAS in NumPy's wheel, whose names
# have an affix and whose integers have 64 bits. A library of three functions, compiled once by the C compiler of this
# machine and kept in the user's cache folder, forwards the products. Without a compiler MLX multiplies by itself.

# One row times a large matrix is a product with a vector, which OpenBLAS gives to all cores.
TEXT = """
#include <stdint.h>
#define FORWARD(NAME, T, SCALAR) \\
  void scipy_##NAME##64_(int, int, int, int64_t, int64_t, int64_t, SCALAR, const T*, int64_t, const T*, int64_t, \\
                         SCALAR, T*, int64_t); \\
  void NAME(int layout, int ta, int tb, int m, int n, int k, SCALAR alpha, const T* a, int lda, const T* b, int ldb, \\
            SCALAR beta, T* c, int ldc) { \\
    BEFORE scipy_##NAME##64_(layout, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc); \\
  }
#define BEFORE
FORWARD(cblas_dgemm, double, double)
FORWARD(cblas_cgemm, void, const void*)
#undef BEFORE
#define BEFORE \\
    if (m == 1 && layout == 101 && ta == 111 && (int64_t)n * k > 1 << 18) { \\
      int plain = tb == 111; \\
      scipy_cblas_sgemv64_(101, plain ? 112 : 111, plain ? k : n, plain ? n : k, alpha, b, ldb, a, 1, beta, c, 1); \\
      return; \\
    }
void scipy_cblas_sgemv64_(int, int, int64_t, int64_t, float, const float*, int64_t, const float*, int64_t, float,
                          float*, int64_t);
FORWARD(cblas_sgemm, float, float)
"""
THREADS = "scipy_openblas_{}_num_threads64_"
has_openblas = False  # whether OpenBLAS multiplies
_openblas_library: ctypes.CDLL | None = None


def preload_openblas() -> None:
    """Load the library before MLX is imported, if this machine can have one."""
    global has_openblas, _openblas_library
    if sys.platform != "linux" or "mlx.core" in sys.modules or has_openblas:
        return
    openblas, compiler = _openblas(), shutil.which("cc") or shutil.which("gcc")
    if openblas is None or compiler is None:
        return
    with suppress(OSError, UserError, subprocess.SubprocessError):
        # Global names are looked up before those that MLX's library brings along.
        ctypes.CDLL(str(_library(openblas, compiler)), os.RTLD_NOW | os.RTLD_GLOBAL)
        _openblas_library = ctypes.CDLL(str(openblas))
        has_openblas = True


@contextmanager
def one_thread() -> Iterator[None]:
    """Let OpenBLAS multiply by one thread in this block, where MLX multiplies by it.

    For long work of small products: threads wait for each other by spinning, which takes most of the processor's time
    when other programs want the same cores.
    """
    if _openblas_library is None:
        yield
        return
    before = getattr(_openblas_library, THREADS.format("get"))()
    limit = getattr(_openblas_library, THREADS.format("set"))
    limit(1)
    try:
        yield
    finally:
        limit(before)


def _openblas() -> Path | None:
    """Return the OpenBLAS of NumPy 2's wheels; other builds of NumPy have none, or use another name."""
    numpy = find_spec("numpy")
    origin = numpy.origin if numpy else None
    folder = Path(origin).parents[1] / "numpy.libs" if origin else Path()
    return next(folder.glob("libscipy_openblas64_*.so"), None)


def _library(openblas: Path, compiler: str) -> Path:
    folder = console.cache_dir() / "blas"
    os.close(files.own_folder(folder, "blas"))
    path = folder / f"{sha256(f'{TEXT}{openblas}'.encode()).hexdigest()[:24]}.so"
    if not path.exists():
        draft = path.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O1", "-fPIC", "-shared", "-x", "c", "-", "-x", "none", str(openblas)]
        command += [f"-Wl,-rpath,{openblas.parent}", "-o", str(draft)]
        try:
            subprocess.run(
                command, input=TEXT, text=True, capture_output=True, check=True, timeout=60
            )
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    return path
