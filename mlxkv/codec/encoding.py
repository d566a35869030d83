"""How pages are encoded: by a kernel, or by matrix products on the CPU (SRFT paper, section 6).

On a Mac MLX's products on the CPU stream go through Accelerate, which has matrix units there, and
memory is shared with the GPU. ROWS and COLUMNS are the paper's layouts: tokens as rows of the
product, or as columns. Where no kernel runs, KERNEL stands for plain ops, with tokens as rows.
"""

from __future__ import annotations

import mlx.core as mx

from mlxkv.errors import UserError

KERNEL, ROWS, COLUMNS = "kernel", "cpu", "cpu-columns"
WAYS = (KERNEL, ROWS, COLUMNS)


def check(way: str, option: str = "--encode") -> str:
    """Return `way`. Raises UserError for an unknown one."""
    if way not in WAYS:
        raise UserError(f"[{option}] unknown; got {way!r}; choose from {', '.join(WAYS)}")
    return way


def rotated(down: mx.array, x: mx.array, way: str) -> mx.array:
    """x @ down for x: [B, G, T, D], down: [D, R] or [G, D, R], in float32: [B, G, T, R]."""
    x = x.astype(mx.float32)
    if way == COLUMNS:
        return (down.swapaxes(-1, -2) @ x.swapaxes(-1, -2)).swapaxes(-1, -2)
    return x @ down
