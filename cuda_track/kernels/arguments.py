"""Make the arguments that launches of Triton's kernels share."""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from cuda_track.codec.transform import Transform

SEALED = 128  # tokens that a program encodes at most
SEAL_BLOCK, SEAL_STAGES = 32, 3  # dims that it multiplies at a time, and has in flight
PARTS = 3  # of 16 bits, that make up a matrix of 32


def interpreted() -> bool:
    """Return whether Triton's kernels run in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def down_of(
    transform: Transform | None, dtype: torch.dtype
) -> tuple[torch.Tensor | None, int, int]:
    """(down, its stride of a head, parts that it is split into) for inputs of `dtype`; (None, 0, 0) without one."""
    if transform is None:
        return None, 0, 0
    # Triton's interpreter multiplies the bits of bfloat16 as integers.
    exact = dtype == torch.float16 or (dtype == torch.bfloat16 and not interpreted())
    down = _parts(transform, dtype) if exact else transform.down
    return down, down.stride(0) if transform.down.ndim == 3 else 0, PARTS if exact else 0


@lru_cache(maxsize=512)
def _parts(transform: Transform, dtype: torch.dtype) -> torch.Tensor:
    """Split down [.., D, R] into a sum of parts of 16 bits, [.., PARTS, D, R], the largest first."""
    rest, out = transform.down, []
    for _ in range(PARTS):
        out.append(rest.to(dtype))
        rest = rest - out[-1].float()
    return torch.stack(out, -3).contiguous()


def given(x: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """x, or a tensor that stands in for an argument that is not read."""
    return stand_in if x is None else x


def per_head(turn: torch.Tensor | None) -> int:
    """The stride of a head in a transform, 0 where all heads share it."""
    return turn.stride(0) if turn is not None and turn.ndim == 3 else 0


def rows_together(x: torch.Tensor) -> torch.Tensor:
    """x with the tokens of a head one after the other; there may be room behind them."""
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()
