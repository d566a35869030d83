"""Builds and launches kernels: one body for Metal, CUDA and, in tests, the emulator.

A builder is a function with the signature of `mx.fast.metal_kernel`. Bodies are files in `text/`.
Kernels are built at the first call and kept for the process.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path

import mlx.core as mx

from mlxkv.metal import sources
from mlxkv.metal.sources import (
    FEATURES,
    SIGNATURES,
    bodies,
    body,
    features,
    header,
    headers,
    read_source,
)

Template = tuple[tuple[str, object], ...]
TYPES = {  # names on Metal, on CUDA
    mx.float32: ("float", "float"),
    mx.float16: ("half", "__half"),
    mx.bfloat16: ("bfloat16_t", "__nv_bfloat16"),
}
KernelBuilder = Callable[..., Callable[..., list[mx.array]]]
PER_LINE = 6  # constants per source line
SWITCH = "MLXKV_KERNELS"  # environment variable; 0: plain ops only
TILES_SWITCH = "MLXKV_TILES"  # environment variable; 0: the portable kernel decodes
LAYERS = 2  # layers in flight during a prefill


def device_type() -> str:
    """Return the type of MLX's default device: "metal", "cuda", or "cpu", which has no kernels."""
    if mx.default_device() != mx.Device(mx.gpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


TILES, KERNELS, OFF = "tiles", "kernels", "switched off after an error"


@dataclass
class _Choice:
    """The kernel builder in use.

    is_forced: use `builder` on any machine (None: plain ops) in place of the machine's own. off: TILES or
    KERNELS -> the error that switched them off.
    """

    is_forced: bool = False
    builder: KernelBuilder | None = None
    off: dict[str, str] = field(default_factory=dict)


_choices = [_Choice()]  # the last one is in use: `using` pushes one


def switch_off(part: str, reason: str) -> None:
    """Switch off TILES, or all KERNELS, for the rest of this process."""
    _choices[-1].off[part] = reason


def switched_off(part: str) -> str | None:
    """Return why `part` (TILES or KERNELS) is switched off, or None."""
    reason = _choices[-1].off.get(part)
    return None if reason is None else f"{OFF}: {reason}"


def kernel_builder() -> KernelBuilder | None:
    """Return the function that builds kernels on this machine.

    None without a GPU, with MLXKV_KERNELS=0, or once kernels are switched off.
    """
    choice = _choices[-1]
    if KERNELS in choice.off:
        return None
    if choice.is_forced:
        return choice.builder
    if os.environ.get(SWITCH) == "0":
        return None
    return {"metal": mx.fast.metal_kernel, "cuda": mx.fast.cuda_kernel}.get(device_type())


def state() -> tuple[KernelBuilder | None, bool]:
    """Return the state that a choice of kernels depends on: choose again when it changes."""
    return kernel_builder(), TILES in _choices[-1].off or os.environ.get(TILES_SWITCH) == "0"


def absent() -> str:
    """Return why `kernel_builder` returns None."""
    if off := switched_off(KERNELS):
        return off
    is_switched = not _choices[-1].is_forced and os.environ.get(SWITCH) == "0"
    return f"{SWITCH}=0" if is_switched else "no GPU here"


@contextmanager
def using(builder: KernelBuilder | None) -> Iterator[None]:
    """Make caches created inside use kernels built by `builder` (None: plain ops) on any machine.

    Restores on exit which kernels are switched off.
    """
    _choices.append(_Choice(True, builder))
    try:
        yield
    finally:
        _choices.pop()


def include(name: str) -> str:
    """Return an #include of file `name` for NVRTC, since MLX copies the source at every call, at 0.2 us per KB.

    Returns the file's text if the package is not in a folder (a zip, for instance).
    """
    path = sources.path(name)
    usable = isinstance(path, Path) and '"' not in str(path)
    return f'#include "{path}"\n' if usable else read_source(name)


def constants(template: Template, on_cuda: bool = False) -> str:
    """Return template values as source constants, which cost nothing at a call."""
    lines, numbers = [], []
    for name, value in template:
        if isinstance(value, mx.Dtype):
            lines.append(f"typedef {TYPES[value][on_cuda]} {name};\n")
        elif isinstance(value, tuple):
            numbers.append(f"{name}[{len(value)}] = {{{', '.join(map(str, value))}}}")
        else:
            numbers.append(f"{name} = {value}")
    for i in range(0, len(numbers), PER_LINE):
        lines.append(f"constexpr int {', '.join(numbers[i : i + PER_LINE])};\n")
    return "".join(lines)


@cache
def build(
    name: str, template: Template, builder: KernelBuilder, shared_memory: int = 0, bounds: str = ""
):
    """Return the kernel `name` for these template values, built by `builder`.

    shared_memory, bounds: CUDA only: bytes of dynamic shared memory, launch bounds.
    """
    on_cuda = builder is mx.fast.cuda_kernel
    parts = features(dict(template))
    source = constants(template, on_cuda) + body(name, parts)
    head = header(name, on_cuda, parts)
    # MLX caches compiled kernels by name.
    digest = sha256(f"{head}{source}{bounds}".encode()).hexdigest()[:12]
    if on_cuda:
        switches = "".join(f"#define {name} {int(name in parts)}\n" for name in FEATURES)
        source = constants(template, on_cuda) + "".join(map(include, bodies(name)))
        head = switches + "".join(map(include, headers(name, on_cuda)))
    options = {"shared_memory": shared_memory} if on_cuda else {}
    if on_cuda and bounds:
        head += f"#define __global__ __attribute__((global)) __launch_bounds__({bounds})\n"
    inputs, outputs = SIGNATURES[name]
    return builder(
        name=f"mlxkv_{name}_{digest}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=head,
        **options,
    )


def launch(
    name: str,
    inputs: Sequence[mx.array],
    template: dict[str, object],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    builder: KernelBuilder,
    bounds: str = "",
) -> list[mx.array]:
    """Run one kernel.

    grid: threads, a multiple of the threadgroup. outputs: shapes and dtypes. bounds: see `build`.
    """
    if any(n % m for n, m in zip(grid, threadgroup, strict=True)):
        raise ValueError(f"[launch] the grid is no multiple of the threadgroup; got {grid}")
    return build(name, tuple(template.items()), builder, bounds=bounds)(
        inputs=list(inputs),
        template=[],
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )


def begin(arrays: Sequence[mx.array]) -> None:
    """Start to compute arrays, so that they hold none that they follow from."""
    mx.async_eval(arrays)


_local = threading.local()  # per thread, as MLX's streams are


def ahead(arrays: Sequence[mx.array]) -> None:
    """Let a GPU compute layers of a prompt while Python builds the next ones, `LAYERS` ahead at most.

    Each layer decodes its pages into a scratch buffer, and MLX allocates those of all layers built but not computed.
    Waiting for the layer before the last frees its scratch.
    """
    first = arrays[0]
    # A separate scalar: a view of `first` would keep its memory.
    mark = first[(slice(0, 1),) * first.ndim] + 0
    mx.async_eval([*arrays, mark])
    marks = vars(_local).setdefault("marks", deque())
    marks.append(mark)
    while len(marks) > LAYERS:
        mx.eval(marks.popleft())
