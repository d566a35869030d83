"""KVarN by plain MLX ops: x ~ outer (scale * code + bias). Spec: `spec.dual_scale`.
Stored: `DualScale.tensors`."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlxkv.codec import affine, packing
from mlxkv.formats.affine import HALF_MAX
from mlxkv.formats.tile import (
    GAIN,
    ITERATIONS,
    LOG_RANGE,
    SMALLEST_STD,
    STD_RANGE,
    DualScale,
)

Balance = Callable[[mx.array, str, bool], tuple[mx.array, mx.array]]


def _std(x: mx.array, axis) -> mx.array:
    """Standard deviation with n - 1, in two passes: `mx.std` subtracts squares, which is wrong for
    channels far from zero."""
    count = x.size // mx.mean(x, axis).size
    off = x - x.mean(axis, keepdims=True)
    return mx.sqrt(off.square().sum(axis, keepdims=True) / (count - 1))


def _imbalance(spreads) -> mx.array:
    """[..., 1, 1] from the standard deviations of channels and of tokens."""
    both = (
        s.max((-2, -1), keepdims=True) / mx.maximum(s.min((-2, -1), keepdims=True), SMALLEST_STD)
        for s in spreads
    )
    return sum(both)


def balance(x: mx.array, axis: str, unit_std: bool = False) -> tuple[mx.array, mx.array]:
    """Scales of the tokens [..., T, 1] and of the channels [..., 1, R] of tiles x: [..., T, R]
    float32. Spec: `spec.dual_scale.balance`."""
    if unit_std:
        std = _std(x, (-2, -1))
        x = x / mx.where(std > 0, std, 1.0)
    order = (-1, -2) if axis == "channel" else (-2, -1)  # -1: along the channels, so per token
    spreads = {over: _std(x, over) for over in order}
    logs = {over: mx.zeros_like(spreads[over]) for over in order}
    best, lowest, current = dict(logs), _imbalance(spreads.values()), x
    for _ in range(ITERATIONS):
        for over in order:
            spread = spreads[over] if over == order[0] else _std(current, over)
            step = mx.log(mx.clip(spread, *STD_RANGE))
            logs[over] = mx.clip(logs[over] + step, *LOG_RANGE)
            current = x / mx.exp(logs[-2]) / mx.exp(logs[-1])
        spreads = {over: _std(current, over) for over in order}
        reached = _imbalance(spreads.values())
        better = reached < lowest * (1 - GAIN)
        lowest = mx.where(better, reached, lowest)
        best = {over: mx.where(better, logs[over], best[over]) for over in order}
    return mx.exp(best[-1]), mx.exp(best[-2])


def _sorted(rows: mx.array) -> mx.array:
    """[..., n] in ascending order, in parts that the machine can sort."""
    flat, most = rows.reshape(-1, rows.shape[-1]), affine.rows_at_once()
    if len(flat) <= most:
        return mx.sort(rows, axis=-1)
    parts = flat.split(range(most, len(flat), most))
    return mx.concatenate([mx.sort(part, axis=-1) for part in parts]).reshape(rows.shape)


def _range(y: mx.array, over: int, quantile: float) -> tuple[mx.array, mx.array]:
    """Where the codes of a row begin and end."""
    if not quantile:
        return y.min(over, keepdims=True), y.max(over, keepdims=True)
    rows = _sorted(y if over == -1 else y.swapaxes(-1, -2))
    last = rows.shape[-1] - 1
    at, part = divmod(quantile * last, 1.0)
    at, after = int(at), min(int(at) + 1, last)
    low = rows[..., at] + part * (rows[..., after] - rows[..., at])
    high = rows[..., last - at] + part * (rows[..., last - after] - rows[..., last - at])
    return mx.expand_dims(low, over), mx.expand_dims(high, over)


def encode(
    spec: DualScale, x: mx.array, page: int, balance: Balance = balance
) -> dict[str, mx.array]:
    """x: [B, G, T, R], T a whole number of pages. balance: finds the scales."""
    tiles = _tiles(x.astype(mx.float32), page)
    tokens, channels = balance(tiles, spec.axis, spec.unit_std)
    return encode_balanced(spec, tiles, tokens if spec.axis == "channel" else channels)


def encode_balanced(spec: DualScale, tiles: mx.array, outer: mx.array) -> dict[str, mx.array]:
    """Encode tiles whose outer scales are known: of the tokens, [B, G, P, T/P, 1], for axis "channel";
    of the channels, [B, G, P, 1, R], for axis "token"."""
    outer = affine.half(outer)
    y, over = tiles / outer.astype(mx.float32), -2 if spec.axis == "channel" else -1
    low, high = _range(y, over, spec.quantile)
    top, bias = 2**spec.bits - 1, affine.half(low)
    start = bias.astype(mx.float32)
    scale = affine.half(mx.maximum(high - start, 0.0) / top)
    step = scale.astype(mx.float32)
    codes = mx.clip(mx.round((y - start) / mx.where(step > 0, step, 1.0)), 0, top)
    numbers = {"scale": scale, "bias": bias, "outer": outer}
    stored = {name: _rows(number) for name, number in numbers.items()}
    return {"codes": packing.pack(_rows(codes).astype(mx.uint32), spec.bits), **stored}


def _tiles(x: mx.array, page: int) -> mx.array:
    """[B, G, T, n] -> [B, G, P, page, n]."""
    return x.reshape(*x.shape[:2], -1, page, x.shape[3])


def _rows(x: mx.array) -> mx.array:
    """[B, G, P, m, n] -> [B, G, P m, n]."""
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def _parts(spec: DualScale, stored: dict[str, mx.array], dims: int, page: int):
    """codes [B, G, P, page, R], and scale, bias, outer that broadcast against them; float32."""
    codes = _tiles(packing.unpack(stored["codes"], spec.bits, dims).astype(mx.float32), page)
    rows = {"scale": 1, "bias": 1, "outer": page}
    if spec.axis == "token":
        rows = {"scale": page, "bias": page, "outer": 1}
    numbers = (_tiles(stored[name].astype(mx.float32), n) for name, n in rows.items())
    return codes, *numbers


def decode(
    spec: DualScale, stored: dict[str, mx.array], dims: int, page: int, dtype: mx.Dtype
) -> mx.array:
    """[B, G, T, R] in `dtype`."""
    codes, scale, bias, outer = _parts(spec, stored, dims, page)
    x = _rows(outer * (scale * codes + bias))
    if dtype == mx.float16:  # the middle of a step may lie beyond
        x = mx.clip(x, -HALF_MAX, HALF_MAX)
    return x.astype(dtype)


def scores(
    spec: DualScale, q: mx.array, stored: dict[str, mx.array], dims: int, page: int
) -> mx.array:
    """q: [B, G, N, R] float32 -> q . x^ for every stored token: [B, G, N, T]. Scales of channels go
    into the queries, scales of tokens onto the scores: codes are multiplied directly."""
    codes, scale, bias, outer = _parts(spec, stored, dims, page)
    q, codes = q[:, :, None], codes.swapaxes(-1, -2)
    if spec.axis == "channel":
        s = ((q * scale) @ codes + (q * bias).sum(-1, keepdims=True)) * outer.swapaxes(-1, -2)
    else:
        q = q * outer
        s = (q @ codes) * scale.swapaxes(-1, -2)
        s = s + q.sum(-1, keepdims=True) * bias.swapaxes(-1, -2)
    return s.swapaxes(2, 3).reshape(*s.shape[:2], s.shape[3], -1)


def mix(
    spec: DualScale, p: mx.array, stored: dict[str, mx.array], dims: int, page: int
) -> mx.array:
    """p: [B, G, N, T] float32 -> sum_t p_t x^_t: [B, G, N, R]."""
    codes, scale, bias, outer = _parts(spec, stored, dims, page)
    p = p.reshape(*p.shape[:3], -1, page).swapaxes(2, 3)  # [B, G, P, N, page]
    if spec.axis == "channel":
        p = p * outer.swapaxes(-1, -2)
        out = (p @ codes) * scale + p.sum(-1, keepdims=True) * bias
    else:
        shift = (p * bias.swapaxes(-1, -2)).sum(-1, keepdims=True)
        out = ((p * scale.swapaxes(-1, -2)) @ codes + shift) * outer
    return out.sum(2)
