"""Builds and launches kernels: one body for Metal, CUDA and, in tests, the emulator.

A backend is a factory with the signature of `mx.fast.metal_kernel`. Bodies are files in `text/`.
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
TYPES = {  # on Metal, on CUDA
    mx.float32: ("float", "float"),
    mx.float16: ("half", "__half"),
    mx.bfloat16: ("bfloat16_t", "__nv_bfloat16"),
}
Factory = Callable[..., Callable[..., list[mx.array]]]
PER_LINE = 6  # constants in a line of text
SWITCH = "MLXKV_KERNELS"  # an environment variable; 0: plain ops alone
TILES_SWITCH = "MLXKV_TILES"  # 0: the portable body decodes
LAYERS = 2  # in flight during a prefill


def backend() -> str:
    """Return where MLX runs by default: "metal", "cuda", or "cpu", which has no kernels."""
    if mx.default_device() != mx.Device(mx.gpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


TILES, KERNELS, OFF = "tiles", "kernels", "switched off after an error"


@dataclass
class _Choice:
    """What kernels are built by. is_forced: `make` is used whatever the machine, None for plain ops; otherwise the
    machine's own. off: TILES or KERNELS -> the error that switched them off."""

    is_forced: bool = False
    make: Factory | None = None
    off: dict[str, str] = field(default_factory=dict)


_choices = [_Choice()]  # the last one counts: `using` adds one


def switch_off(part: str, reason: str) -> None:
    """Use no TILES, or no KERNELS at all, in this process from now on."""
    _choices[-1].off[part] = reason


def switched_off(part: str) -> str | None:
    """Return why they are switched off, or None."""
    reason = _choices[-1].off.get(part)
    return None if reason is None else f"{OFF}: {reason}"


def factory() -> Factory | None:
    """Return the function that builds kernels on this machine. None without a GPU, with MLXKV_KERNELS=0, or
    once they are switched off."""
    choice = _choices[-1]
    if KERNELS in choice.off:
        return None
    if choice.is_forced:
        return choice.make
    if os.environ.get(SWITCH) == "0":
        return None
    return {"metal": mx.fast.metal_kernel, "cuda": mx.fast.cuda_kernel}.get(backend())


def state() -> tuple:
    """Return the part of this module that a choice of kernels depends on: ask again when it changes."""
    return factory(), TILES in _choices[-1].off or os.environ.get(TILES_SWITCH) == "0"


def absent() -> str:
    """Return why there is no factory."""
    if off := switched_off(KERNELS):
        return off
    is_switched = not _choices[-1].is_forced and os.environ.get(SWITCH) == "0"
    return f"{SWITCH}=0" if is_switched else "no GPU here"


@contextmanager
def using(make: Factory | None) -> Iterator[None]:
    """Have caches made inside use kernels built by `make` (None: plain ops), whatever the machine.
    Afterwards kernels are switched on or off as before."""
    _choices.append(_Choice(True, make))
    try:
        yield
    finally:
        _choices.pop()


def include(name: str) -> str:
    """`read` for NVRTC, as an #include: MLX copies a text at every call, at 0.2 us a KB. The whole text
    where this package is not in a folder."""
    path = sources.path(name)
    usable = isinstance(path, Path) and '"' not in str(path)
    return f'#include "{path}"\n' if usable else read_source(name)


def constants(template: Template, on_cuda: bool = False) -> str:
    """Template values as text. Baked in, they cost nothing at a call."""
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
def build(name: str, template: Template, make: Factory, shared_memory: int = 0, bounds: str = ""):
    """Return the kernel `name` for these template values, built by `make`.

    shared_memory, bounds: for CUDA alone, bytes of dynamic shared memory and launch bounds.
    """
    on_cuda = make is mx.fast.cuda_kernel
    parts = features(dict(template))
    source = constants(template, on_cuda) + body(name, parts)
    head = header(name, on_cuda, parts)
    # MLX keeps compiled kernels by name.
    digest = sha256(f"{head}{source}{bounds}".encode()).hexdigest()[:12]
    if on_cuda:
        switches = "".join(f"#define {name} {int(name in parts)}\n" for name in FEATURES)
        source = constants(template, on_cuda) + "".join(map(include, bodies(name)))
        head = switches + "".join(map(include, headers(name, on_cuda)))
    options = {"shared_memory": shared_memory} if on_cuda else {}
    if on_cuda and bounds:
        head += f"#define __global__ __attribute__((global)) __launch_bounds__({bounds})\n"
    inputs, outputs = SIGNATURES[name]
    return make(
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
    make: Factory,
    bounds: str = "",
) -> list[mx.array]:
    """Run one kernel. grid in threads, a multiple of the threadgroup; outputs: shape and dtype.
    bounds: see `build`."""
    if any(n % m for n, m in zip(grid, threadgroup, strict=True)):
        raise ValueError(f"[launch] the grid is no multiple of the threadgroup; got {grid}")
    return build(name, tuple(template.items()), make, bounds=bounds)(
        inputs=list(inputs),
        template=[],
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )


_local = threading.local()  # MLX's streams are of a thread, too


def ahead(arrays: Sequence[mx.array]) -> None:
    """Let a GPU compute a layer of a prompt while Python builds the next ones, but not far behind it.

    Each layer decodes its pages into a scratch. The scratches of all layers that are built and not computed are
    allocated at once, so this waits for the layer before the last, whose scratch is free then.
    """
    first = arrays[0]
    # A number of its own: a view of `first` would keep its memory.
    mark = first[(slice(0, 1),) * first.ndim] + 0
    mx.async_eval([*arrays, mark])
    marks = vars(_local).setdefault("marks", deque())
    marks.append(mark)
    while len(marks) > LAYERS:
        mx.eval(marks.popleft())
