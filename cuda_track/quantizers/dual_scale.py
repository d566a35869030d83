"""KVarN by torch ops: x ~ outer (scale * code + bias). Spec: `reference_dual_scale`.

Stored per side, T a whole number P of pages:
    codes        int32   [B, G, T, W]
    scale, bias  float16 [B, G, P, R] (axis channel) or [B, G, T, 1] (axis token)
    outer        float16 [B, G, T, 1] (axis channel) or [B, G, P, R] (axis token)
"""

from __future__ import annotations

import torch

from cuda_track import packing
from cuda_track.quantizers.affine import HALF_MAX, half
from mlxkv.config import DualScale

ITERATIONS = 16
STD_RANGE = (1e-3, 1e3)
LOG_RANGE = (-0.3, 10.0)
SMALLEST_STD = 1e-8
GAIN = 1e-3


def names(spec: DualScale) -> set[str]:
    """The tensors that a page is stored in."""
    return {"codes", "scale", "bias", "outer"}


def _std(x: torch.Tensor, axis) -> torch.Tensor:
    return x.std(axis, correction=1, keepdim=True)


def _imbalance(spreads) -> torch.Tensor:
    """[..., 1, 1] from the standard deviations of channels and of tokens."""
    both = (
        s.amax((-2, -1), keepdim=True) / s.amin((-2, -1), keepdim=True).clamp(min=SMALLEST_STD)
        for s in spreads
    )
    return sum(both)


def balance(
    x: torch.Tensor, axis: str, unit_std: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of the tokens [..., T, 1] and of the channels [..., 1, R] of tiles x: [..., T, R]
    float32. Spec: `reference_dual_scale.balance`."""
    if unit_std:
        std = _std(x, (-2, -1))
        x = x / torch.where(std > 0, std, 1.0)
    order = (-1, -2) if axis == "channel" else (-2, -1)  # -1: along the channels, so per token
    spreads = {over: _std(x, over) for over in order}
    logs = {over: torch.zeros_like(spreads[over]) for over in order}
    best, lowest, current = dict(logs), _imbalance(spreads.values()), x
    for _ in range(ITERATIONS):
        for over in order:
            step = _std(current, over).clamp(*STD_RANGE).log()
            logs[over] = (logs[over] + step).clamp(*LOG_RANGE)
            current = x / logs[-2].exp() / logs[-1].exp()
        reached = _imbalance(_std(current, over) for over in order)
        better = reached < lowest * (1 - GAIN)
        lowest = torch.where(better, reached, lowest)
        best = {over: torch.where(better, logs[over], best[over]) for over in order}
    return best[-1].exp(), best[-2].exp()


def _range(y: torch.Tensor, over: int, quantile: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the codes of a row begin and end."""
    if not quantile:
        return y.amin(over, keepdim=True), y.amax(over, keepdim=True)
    rows = y.sort(over).values.movedim(over, -1)
    last = rows.shape[-1] - 1
    at, part = divmod(quantile * last, 1.0)
    at, after = int(at), min(int(at) + 1, last)
    low = rows[..., at] + part * (rows[..., after] - rows[..., at])
    high = rows[..., last - at] + part * (rows[..., last - after] - rows[..., last - at])
    return low.unsqueeze(over), high.unsqueeze(over)


def encode(spec: DualScale, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R], T a whole number of pages."""
    tiles = _tiles(x.float(), page)
    tokens, channels = balance(tiles, spec.axis, spec.unit_std)
    return encode_balanced(spec, tiles, tokens if spec.axis == "channel" else channels)


def encode_balanced(
    spec: DualScale, tiles: torch.Tensor, outer: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The same where the outer scales are known: of the tokens, [B, G, P, T/P, 1], for axis
    "channel", of the channels, [B, G, P, 1, R], for axis "token"."""
    outer = half(outer)
    y, over = tiles / outer.float(), -2 if spec.axis == "channel" else -1
    low, high = _range(y, over, spec.quantile)
    top, bias = 2**spec.bits - 1, half(low)
    start = bias.float()
    scale = half((high - start).clamp(min=0.0) / top)
    step = scale.float()
    codes = ((y - start) / torch.where(step > 0, step, 1.0)).round().clamp(0, top)
    numbers = {"scale": scale, "bias": bias, "outer": outer}
    stored = {name: _rows(number) for name, number in numbers.items()}
    return {"codes": packing.pack(_rows(codes), spec.bits), **stored}


def _tiles(x: torch.Tensor, page: int) -> torch.Tensor:
    """[B, G, T, n] -> [B, G, P, page, n]."""
    return x.reshape(*x.shape[:2], -1, page, x.shape[3])


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[B, G, P, m, n] -> [B, G, P m, n]."""
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def _parts(spec: DualScale, stored: dict[str, torch.Tensor], dims: int, page: int):
    """codes [B, G, P, page, R], and scale, bias, outer that broadcast against them; float32."""
    codes = _tiles(packing.unpack(stored["codes"], spec.bits, dims).float(), page)
    rows = {"scale": 1, "bias": 1, "outer": page}
    if spec.axis == "token":
        rows = {"scale": page, "bias": page, "outer": 1}
    return codes, *(_tiles(stored[name].float(), n) for name, n in rows.items())


def decode(
    spec: DualScale, stored: dict[str, torch.Tensor], dims: int, page: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, G, T, R] in `dtype`."""
    codes, scale, bias, outer = _parts(spec, stored, dims, page)
    x = _rows(outer * (scale * codes + bias))
    if dtype == torch.float16:  # the middle of a step may lie beyond
        x = x.clamp(-HALF_MAX, HALF_MAX)
    return x.to(dtype)


def scores(
    spec: DualScale, q: torch.Tensor, stored: dict[str, torch.Tensor], dims: int, page: int
) -> torch.Tensor:
    """q: [B, G, N, R] float32 -> q . x^ for every stored token: [B, G, N, T]."""
    return q @ decode(spec, stored, dims, page, q.dtype).mT


def mix(
    spec: DualScale, p: torch.Tensor, stored: dict[str, torch.Tensor], dims: int, page: int
) -> torch.Tensor:
    """p: [B, G, N, T] float32 -> sum_t p_t x^_t: [B, G, N, R]."""
    return p @ decode(spec, stored, dims, page, p.dtype)
