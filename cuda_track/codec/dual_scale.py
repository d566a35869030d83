"""KVarN by torch ops: x ~ outer (scale * code + bias). Spec: `mlxkv.spec.dual_scale`; stored: `DualScale.tensors`.

Tiles are [B, G, P, page, R], P pages.
"""

from __future__ import annotations

import torch

from cuda_track.codec import packing
from cuda_track.codec.affine import half, in_range
from mlxkv.formats import tile
from mlxkv.formats.tile import DualScale

TOKENS, CHANNELS = -1, -2  # the axis that a scale of a token, or of a channel, sums over


def balance(
    x: torch.Tensor, axis: str, unit_std: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of the tokens [..., T, 1] and of the channels [..., 1, R] of float32 tiles x [..., T, R]."""
    if unit_std:
        std = x.std((-2, -1), keepdim=True)
        x = x / std.where(std > 0, 1.0)
    order = (TOKENS, CHANNELS) if axis == "channel" else (CHANNELS, TOKENS)
    logs = {over: torch.zeros_like(x.std(over, keepdim=True)) for over in order}
    best, lowest, current = dict(logs), _imbalance(x), x
    for _ in range(tile.ITERATIONS):
        for over in order:
            step = current.std(over, keepdim=True).clamp(*tile.STD_RANGE).log()
            logs[over] = (logs[over] + step).clamp(*tile.LOG_RANGE)
            current = x / logs[CHANNELS].exp() / logs[TOKENS].exp()
        reached = _imbalance(current)
        better = reached < lowest * (1 - tile.GAIN)
        lowest = reached.where(better, lowest)
        best = {over: log.where(better, best[over]) for over, log in logs.items()}
    return best[TOKENS].exp(), best[CHANNELS].exp()


def _imbalance(x: torch.Tensor) -> torch.Tensor:
    """[..., 1, 1]: how far the standard deviations of channels, and of tokens, lie apart."""
    apart = 0.0
    for over in (TOKENS, CHANNELS):
        spread = x.std(over, keepdim=True)
        least = spread.amin((-2, -1), keepdim=True).clamp(min=tile.SMALLEST_STD)
        apart = apart + spread.amax((-2, -1), keepdim=True) / least
    return apart


def encode(spec: DualScale, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R], T a whole number of pages."""
    tiles = x.float().unflatten(2, (-1, page))
    of_tokens, of_channels = balance(tiles, spec.axis, spec.unit_std)
    return encode_balanced(spec, tiles, of_tokens if spec.axis == "channel" else of_channels)


def encode_balanced(
    spec: DualScale, tiles: torch.Tensor, outer: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Encode tiles with known outer scales: of the tokens, [B, G, P, page, 1], for axis "channel", of the
    channels, [B, G, P, 1, R], for axis "token"."""
    over, outer = -2 if spec.axis == "channel" else -1, half(outer)
    y = tiles / outer.float()
    low, high = _range(y, over, spec.quantile)
    bias, top = half(low), 2**spec.bits - 1
    scale = half((high - bias.float()).clamp(min=0.0) / top)
    step = scale.float()
    codes = ((y - bias.float()) / step.where(step > 0, 1.0)).round().clamp(0, top)
    return {
        "codes": packing.pack(codes.flatten(2, 3), spec.bits),
        "scale": scale.flatten(2, 3),
        "bias": bias.flatten(2, 3),
        "outer": outer.flatten(2, 3),
    }


def _range(y: torch.Tensor, over: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the codes of a row begin and end; `share` of its values lie outside at either end."""
    if not share:
        return y.aminmax(dim=over, keepdim=True)
    rows, last = y.sort(over).values, y.shape[over] - 1
    at, part = divmod(share * last, 1.0)
    at, after = int(at), min(int(at) + 1, last)

    def between(first: int, second: int) -> torch.Tensor:
        first, second = (rows.narrow(over, i, 1) for i in (first, second))
        return first + part * (second - first)

    return between(at, after), between(last - at, last - after)


def decode(
    spec: DualScale, stored: dict[str, torch.Tensor], dims: int, page: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, G, T, R] in `dtype`."""
    codes = packing.unpack(stored["codes"], spec.bits, dims).float().unflatten(2, (-1, page))
    pages = codes.shape[2]
    scale, bias, outer = (
        stored[name].float().unflatten(2, (pages, -1)) for name in ("scale", "bias", "outer")
    )
    return in_range((outer * (scale * codes + bias)).flatten(2, 3), dtype)
