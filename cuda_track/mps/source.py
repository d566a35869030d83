"""Write a kernel of mlxkv as the whole Metal text that `torch.mps.compile_shader` takes, and launch it.

MLX writes the function around a body itself (`mlxkv/metal/README.md`). Here it has a buffer for each input and
output, in the order of `SIGNATURES`, and the attributes that the body names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from mlxkv.metal.sources import SIGNATURES, body, features, header

TYPES = {
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bfloat",
    torch.int32: "int",
}
WORDS = {"records", "headers", "records_2", "headers_2"}  # held as int32, read as uint
ATTRIBUTES = {
    "thread_index_in_simdgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threads_per_threadgroup": "uint3",
    "threads_per_grid": "uint3",
}
BEFORE = "#include <metal_stdlib>\nusing namespace metal;\ntypedef bfloat bfloat16_t;\n"
Template = tuple[tuple[str, object], ...]
Compile = Callable[[str], object]  # text -> library with a function per kernel
_compilers: list[Compile] = []


@contextmanager
def using(compiler: Compile) -> Iterator[None]:
    """Build the kernels inside by `compiler`, on any machine."""
    _compilers.append(compiler)
    try:
        yield
    finally:
        _compilers.pop()


def compiler() -> Compile | None:
    """Return the function that compiles Metal on this machine, or None."""
    if _compilers:
        return _compilers[-1]
    return torch.mps.compile_shader if torch.backends.mps.is_available() else None


def text(name: str, types: tuple[torch.dtype, ...], template: Template) -> str:
    """Return the whole text of the kernel `name`. types: of inputs, then of outputs."""
    inputs, outputs = SIGNATURES[name]
    enabled = features(dict(template))
    source, parameters = body(name, enabled), []
    for i, (name_of, kind) in enumerate(zip((*inputs, *outputs), types, strict=True)):
        space = "const device" if i < len(inputs) else "device"
        type_name = "uint" if name_of in WORDS else TYPES[kind]
        parameters.append(f"{space} {type_name}* {name_of} [[buffer({i})]]")
    for name_of, kind in ATTRIBUTES.items():
        if re.search(rf"\b{name_of}\b", source):
            parameters.append(f"{kind} {name_of} [[{name_of}]]")
    lines = ",\n".join(parameters)
    inside = constants(template) + source
    return (
        f"{BEFORE}{header(name, parts=enabled)}kernel void mlxkv_{name}(\n{lines}) {{\n{inside}}}\n"
    )


def constants(template: Template) -> str:
    """Template values as text."""
    lines = []
    for name, value in template:
        if isinstance(value, torch.dtype):
            lines.append(f"typedef {TYPES[value]} {name};\n")
        elif isinstance(value, tuple):
            lines.append(
                f"constexpr int {name}[{len(value)}] = {{{', '.join(map(str, value))}}};\n"
            )
        else:
            lines.append(f"constexpr int {name} = {value};\n")
    return "".join(lines)


@cache
def _build(name: str, types: tuple[torch.dtype, ...], template: Template, compile_: Compile):
    return getattr(compile_(text(name, types, template)), f"mlxkv_{name}")


def launch(
    name: str,
    inputs: Sequence[torch.Tensor],
    template: dict[str, object],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    outputs: Sequence[tuple[tuple[int, ...], torch.dtype]],
) -> list[torch.Tensor]:
    """Run one kernel. grid: in threads, a multiple of the threadgroup. outputs: shapes and dtypes."""
    results = [torch.empty(shape, dtype=kind, device=inputs[0].device) for shape, kind in outputs]
    buffers = [*(x.contiguous() for x in inputs), *results]
    types = tuple(x.dtype for x in buffers)
    run = _build(name, types, tuple(template.items()), compiler())
    run(*buffers, threads=list(grid), group_size=list(threadgroup))
    return results
