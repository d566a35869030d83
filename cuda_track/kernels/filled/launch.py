"""Launch the kernels of bits by direction (`kernels`): what `launch` does for other formats."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch.nn.functional import pad

from cuda_track.codec import fill
from cuda_track.codec.codec import Codec, Stored
from cuda_track.codec.transform import Transform
from cuda_track.kernels import layout
from cuda_track.kernels.arguments import (
    SEAL_BLOCK,
    SEAL_STAGES,
    SEALED,
    down_of,
    given,
    rows_together,
)
from cuda_track.kernels.pool import PoolPages


def turns(pages: PoolPages, dims: int) -> list[torch.Tensor | None]:
    """What turns queries, divided by the gains of keys, and outputs: [G or 1, D, D] or [D, D], zeros behind the
    stored dims; None for values that are not turned."""
    keys, values = pages.codecs
    device = pages.sides[0]["words"].device
    up = _square(values.transform, dims).up if values.transform is not None else None
    return [_without_gains(keys.transform, pages.layouts[0], dims, device), up]


@lru_cache(maxsize=512)
def _square(transform: Transform, dims: int) -> Transform:
    """The transform with zeros where a head has more dims than it stores."""
    more = dims - transform.down.shape[-1]
    return Transform(pad(transform.down, (0, more)), pad(transform.up, (0, 0, 0, more)))


@lru_cache(maxsize=512)
def _without_gains(
    transform: Transform | None, at: layout.FillLayout, dims: int, device: torch.device
) -> torch.Tensor:
    gains = torch.tensor([2.0 ** (plane[2] % 8) for plane in at.planes], device=device)
    gains = pad(gains.repeat_interleave(layout.LEAST), (0, dims - at.dims), value=1.0)
    up = torch.eye(dims, device=device) if transform is None else _square(transform, dims).up
    return (up / gains[:, None]).contiguous()


@lru_cache(maxsize=512)
def _tables(
    at: layout.FillLayout, dims: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `fill_seal_kernel` reads of widths: `dims` and `pieces`."""
    numbers = torch.stack(fill.tables(at.spec.widths, device))
    blocks = dims // layout.LEAST
    pieces = torch.zeros(len(at.fields), 4, blocks, dtype=torch.int32)
    for block, low, bits, field, bit in at.pieces:
        first = 2 if low else 0
        pieces[field, first, block], pieces[field, first + 1, block] = (1 << bits) - 1, bit
    return pad(numbers, (0, dims - at.dims)).contiguous(), pieces.to(device)


def read(pages: PoolPages, dims: int) -> tuple[object, tuple, dict]:
    """As `launch._read`: the kernel that reads codes, its tensors and what it has to know of them."""
    from cuda_track.kernels.filled.kernels import fill_attend_kernel

    codes, kinds = [], {"D": dims}
    for letter, at, side in zip("KV", pages.layouts, pages.sides, strict=True):
        codes += [side["words"], side["numbers"]]
        kinds |= {f"{letter}_PLANES": at.planes, f"{letter}_FIELDS": at.fields}
    return fill_attend_kernel, tuple(codes), kinds


def seal(code: Codec, x: torch.Tensor, at: layout.FillLayout, side: Stored, places) -> None:
    """As `launch.seal`."""
    from cuda_track.kernels.filled.kernels import fill_seal_kernel

    batch, heads, tokens, dims = x.shape
    x, block = rows_together(x), math.gcd(tokens, SEALED if dims <= 128 else SEALED // 2)
    square = None if code.transform is None else _square(code.transform, dims)
    down, of_head, parts = down_of(square, x.dtype)
    fill_seal_kernel[(tokens // block, heads, batch)](
        *(x, given(down, x), side["words"], side["numbers"]),
        torch.as_tensor(places, device=x.device),
        *_tables(at, dims, x.device),
        *(x.stride(0), x.stride(1), of_head, tokens // at.page),
        **{"D": dims, "R": at.dims, "T": block, "TURN": at.turn, "PAGE": at.page},
        **{"FIELDS": at.fields, "KEYS": at.keys, "TURNED": down is not None},
        **{"PARTS": parts, "BLOCK": SEAL_BLOCK},
        num_warps=8 if block == SEALED or dims > 128 else 4,
        num_stages=SEAL_STAGES if block >= SEALED else 2,
    )


def unseal(pages: PoolPages, side: int, out: torch.Tensor, start: int) -> None:
    """As `launch.unseal`."""
    from cuda_track.kernels.filled.kernels import fill_unseal_kernel

    at, stored = pages.layouts[side], pages.sides[side]
    batch, heads = out.shape[:2]
    most = pages.table.shape[1]
    fill_unseal_kernel[(most * (at.page // at.turn), heads, batch)](
        *(stored["words"], stored["numbers"], pages.table, pages.counts, out),
        *(most, start, out.stride(0), out.stride(1)),
        **{"T": at.turn, "PAGE": at.page, "PLANES": at.planes, "FIELDS": at.fields},
        KEYS=at.keys,
        num_warps=4,
    )
