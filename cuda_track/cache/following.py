"""Bases of low rank that follow the text: Oja's rule. Spec: `mlxkv.spec.oja`.

U: [B, G, D, R] float32, orthonormal columns.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from cuda_track.cache.view import Pair
from cuda_track.codec.maps import LayerMaps
from cuda_track.codec.transform import Transform
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.lowrank import RIDGE
from mlxkv.formats.records import NAMES

TINY = torch.finfo(torch.float32).tiny


def update(u: torch.Tensor, x: torch.Tensor, rate: float, raw: bool = False) -> torch.Tensor:
    """U after a batch x [B, G, N, D]; as it was where the batch holds NaN or infinity."""
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
        # LAPACK refuses NaN.
        moment = torch.where(_sound(moment), moment, eye)
        step = torch.linalg.solve(moment, step.mT).mT
    moved = u + rate * step
    sound = _sound(moved)
    return torch.where(sound, orthonormal(torch.where(sound, moved, u)), u)


def orthonormal(a: torch.Tensor) -> torch.Tensor:
    """Q of A = QR [..., D, R] with a positive diagonal of R."""
    q, r = torch.linalg.qr(a.float())
    positive = r.diagonal(dim1=-2, dim2=-1) >= 0
    return q * torch.where(positive, 1.0, -1.0)[..., None, :]


def _sound(x: torch.Tensor) -> torch.Tensor:
    return x.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)


def taught(basis: LayerMaps, config: CacheConfig, batch: Pair, prompt: bool) -> LayerMaps:
    """Return `basis` after a batch of keys and values [B, G, N, D], of a prompt or decoded."""
    transforms = {}
    for name, x in zip(NAMES, batch, strict=True):
        low = getattr(config, name).low
        if low is not None and (rate := low.rate(prompt)):
            down = getattr(basis, name).down
            u = down.expand(*x.shape[:2], *down.shape[-2:]).to(x.device)
            transforms[name] = transform_of(update(u, x, rate, low.raw))
    return replace(basis, **transforms) if transforms else basis


def transform_of(u: torch.Tensor) -> Transform:
    return Transform(u, u.mT)
