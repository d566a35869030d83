"""Bases of low rank that follow the text: Oja's rule. Spec: `reference_oja`.

U: [B, G, D, R] float32, orthonormal columns.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from cuda_track.calibrated import Rotations
from cuda_track.transform import Transform
from mlxkv.config import CacheConfig

RIDGE = 0.1  # as in the spec
TINY = torch.finfo(torch.float32).tiny
Pair = tuple[torch.Tensor, torch.Tensor]


def orthonormal(a: torch.Tensor) -> torch.Tensor:
    """Q of A = QR [..., D, R], the diagonal of R positive."""
    q, r = torch.linalg.qr(a.float())
    positive = r.diagonal(dim1=-2, dim2=-1) >= 0
    return q * torch.where(positive, 1.0, -1.0)[..., None, :]


def update(u: torch.Tensor, x: torch.Tensor, rate: float, raw: bool = False) -> torch.Tensor:
    """U after a batch x [B, G, N, D]. Where the batch holds NaN or infinity U stays as it is."""
    if u.device.type == "mps":  # which has no factorisations
        return update(u.cpu(), x.cpu(), rate, raw).to(u.device)
    x = x.float()
    y = x @ u
    step = (x - y @ u.mT).mT @ y
    if not raw:
        eye = torch.eye(u.shape[-1], device=u.device)
        moment = y.mT @ y
        mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        moment = moment + (RIDGE * mean + TINY) * eye
        # A factorisation of NaN is an error in LAPACK: what is not sound does not get there.
        moment = torch.where(_sound(moment), moment, eye)
        step = torch.linalg.solve(moment, step.mT).mT
    made = u + rate * step
    sound = _sound(made)
    return torch.where(sound, orthonormal(torch.where(sound, made, u)), u)


def _sound(x: torch.Tensor) -> torch.Tensor:
    return x.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)


def taught(
    now: Rotations, config: CacheConfig, batch: Pair, prompt: bool, heads: tuple[int, int]
) -> Rotations:
    """`now` after a batch of keys and values [B, G, N, D], of a prompt or decoded. heads: (B, G)."""
    made = {}
    for name, x in zip(("keys", "values"), batch, strict=True):
        side = getattr(config, name)
        if not side.follows:
            continue
        rate = side.low.prefill_rate if prompt else side.low.decode_rate
        if rate:
            before = whole(getattr(now, name), heads).to(x.device)
            made[name] = following(update(before, x, rate, side.low.raw))
    return replace(now, **made) if made else now


def whole(transform: Transform, heads: tuple[int, int]) -> torch.Tensor:
    """Its U for every one of (B, G)."""
    down = transform.down
    return down.expand(*heads, *down.shape[-2:])


def following(u: torch.Tensor) -> Transform:
    return Transform(u, u.mT)
