"""How pages are encoded: by a kernel, or by matrix products on the CPU (SRFT paper, section 6).

On a Mac MLX's products on the CPU stream go through Accelerate, which has matrix units there, and
memory is shared with the GPU. Both layouts of the paper: tokens as rows of the product, or as columns.
Where no kernel runs, "kernel" is the plain ops that take its place: rows, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from mlxkv.errors import UserError

KERNEL, ROWS, COLUMNS = "kernel", "cpu", "cpu-columns"
WAYS = (KERNEL, ROWS, COLUMNS)

_asked = [KERNEL]


def check(way: str, option: str = "--encode") -> str:
    """Raises UserError for a way there is none of."""
    if way not in WAYS:
        raise UserError(f"[{option}] unknown; got {way!r}; choose from {', '.join(WAYS)}")
    return way


@contextmanager
def using(way: str) -> Iterator[None]:
    """Caches made inside encode their pages this way. Raises UserError."""
    _asked.append(check(way))
    try:
        yield
    finally:
        _asked.pop()


def now() -> str:
    return _asked[-1]


def rotated(down: mx.array, x: mx.array, way: str) -> mx.array:
    """x @ down for x: [B, G, T, D], down: [D, R] or [G, D, R], in float32: [B, G, T, R]."""
    x = x.astype(mx.float32)
    if way == COLUMNS:
        return (down.swapaxes(-1, -2) @ x.swapaxes(-1, -2)).swapaxes(-1, -2)
    return x @ down
