"""Builds and launches kernels: one body for Metal, CUDA and, in tests, the emulator.

A backend is a factory with the signature of `mx.fast.metal_kernel`. Bodies are files beside this
one; the rules they follow are in README.md. Built at the first call, kept for the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files

import mlx.core as mx

# name: (inputs, outputs), in the order in which the body names them
SIGNATURES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "seal": (("keys", "values", "table_k", "table_v", "size"), ("records",)),
    "unseal": (("records", "size"), ("out",)),
    "attend": (
        (
            *("q_pages", "q_window", "records", "sink_k", "sink_v", "live_k", "live_v"),
            *("size", "lengths", "scale"),
        ),
        ("partial_out", "partial_stats"),
    ),
    "merge": (("partial_out", "partial_stats", "up", "sinks", "scale", "size"), ("out",)),
}
HEADERS = {"seal": ("codes.h", "butterflies.h", "seal.h")}  # before the others stands codes.h alone
Factory = Callable[..., Callable[..., list[mx.array]]]


def read(name: str) -> str:
    """The text of a file of this folder without comments: MLX looks for names in comments too, and
    long texts cost time at every call."""
    text = files("mlxkv.metal").joinpath(name).read_text(encoding="ascii")
    text = re.sub(r"//[^\n]*", "", text)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"


def backend() -> str:
    """Where MLX runs by default: "metal", "cuda", or "cpu", which has no kernels."""
    if mx.default_device() != mx.Device(mx.gpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


_given: list[Factory | None] = []


def factory() -> Factory | None:
    """What builds kernels on this machine, or None."""
    if _given:
        return _given[-1]
    return {"metal": mx.fast.metal_kernel, "cuda": mx.fast.cuda_kernel}.get(backend())


@contextmanager
def using(make: Factory | None) -> Iterator[None]:
    """Kernels built by `make` (None: plain ops) for caches made inside, whatever the machine."""
    _given.append(make)
    try:
        yield
    finally:
        _given.pop()


def header(name: str, cuda: bool = False) -> str:
    """What stands before the body `name`."""
    names = HEADERS.get(name, ("codes.h",))
    return "".join(map(read, ("cuda.h", *names) if cuda else names))


@cache
def build(name: str, make: Factory):
    """The kernel `name`, built by `make`."""
    inputs, outputs = SIGNATURES[name]
    return make(
        name=f"mlxkv_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=read(f"{name}.metal"),
        header=header(name, cuda=make is mx.fast.cuda_kernel),
    )


def launch(
    name: str,
    inputs: Sequence[mx.array],
    template: dict[str, object],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    make: Factory,
) -> list[mx.array]:
    """Run one kernel. grid in threads, a multiple of the threadgroup; outputs: shape and dtype."""
    if any(n % m for n, m in zip(grid, threadgroup, strict=True)):
        raise ValueError(f"[launch] the grid is no multiple of the threadgroup; got {grid}")
    return build(name, make)(
        inputs=list(inputs),
        template=list(template.items()),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )
