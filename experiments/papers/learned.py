"""Learn scales and rotations in front of abs-max codes (SRFT, arXiv 2605.05699, section 5), by torch in float32.

Spec: `mlxkv.spec.learned`. As the paper has them: a map for each layer and side, which all kv heads share, and one
scale a token; `mlxkv calibrate --learn` has a map for each kv head, and min-max codes in groups. `L` maps, `N` rows,
`D` head dim, `K` reflectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log

import torch

from mlxkv.formats.calibration.learned import Learned
from mlxkv.spec.learned import LARGEST, reflectors

Pair = tuple[torch.Tensor, torch.Tensor]
BATCH = 512  # rows a step
RATE = {"scale": 0.02, "rotation": 0.01, "householder": 0.01}  # of Adam, falling to 0


def maps(free: Mapping[str, torch.Tensor], base: torch.Tensor) -> Pair:
    """Return (down, up) [L, D, D] of free parameters behind a base [D, D]: rotation [L, D, D], householder
    [L, K, D], scale [L, D]."""
    down = base[None]
    if "rotation" in free:
        lower = free["rotation"].tril(-1)
        down = down @ torch.linalg.matrix_exp(lower - lower.mT)
    if "householder" in free:  # H_1 .. H_K = I - V^T S^-1 V (Joffrain et al. 2006)
        v = torch.nn.functional.normalize(free["householder"], dim=-1)
        s = (v @ v.mT).triu(1) + torch.eye(v.shape[-2], device=v.device) / 2
        down = down - down @ v.mT @ torch.linalg.solve_triangular(s, v, upper=True)
    up = down.mT
    if "scale" in free:
        bound = log(LARGEST)
        by = (free["scale"] - free["scale"].mean(-1, keepdim=True)).clamp(-bound, bound).exp()
        down, up = down * by[:, None], up / by[..., None]
    return down, up


def loss(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the relative error [L] of x [L, N, D] behind abs-max codes, one scale a row, with gradients (5.1)."""
    stored = x @ down
    top = 2 ** (bits - 1) - 1
    step = (stored.abs().amax(-1, keepdim=True) / top).clamp(min=1e-30)
    code = stored / step
    code = code + (code.round() - code).detach()
    return ((code * step) @ up - x).square().sum((1, 2)) / x.square().sum((1, 2))


def train(x: torch.Tensor, base: torch.Tensor, learned: Learned, bits: int) -> Pair:
    """Learn (down, up) [L, D, D] by Adam for rows x [L, N, D]; the base alone where that is better."""
    count, dims = len(x), x.shape[-1]
    draw = torch.Generator().manual_seed(0)
    free = {}
    if learned.rotation == "rotation":
        free["rotation"] = torch.zeros(count, dims, dims)
    if learned.rotation == "householder":  # equal pairs cancel, and turn as soon as they differ
        half = torch.randn(count, reflectors(dims) // 2, dims, generator=draw)
        free["householder"] = half.repeat_interleave(2, 1)
    if learned.scaled:
        free["scale"] = torch.zeros(count, dims)
    free = {name: p.to(x.device).requires_grad_() for name, p in free.items()}
    adam = torch.optim.Adam([{"params": [p], "lr": RATE[name]} for name, p in free.items()])
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(adam, learned.steps)
    with torch.no_grad():
        first = maps(free, base)
    with torch.enable_grad():
        for _ in range(learned.steps):
            rows = torch.randint(x.shape[1], (BATCH,), generator=draw).to(x.device)
            adam.zero_grad()
            loss(x[:, rows], *maps(free, base), bits).sum().backward()
            adam.step()
            falling.step()
    with torch.no_grad():
        last = maps(free, base)
        better = (loss(x, *last, bits) < loss(x, *first, bits))[:, None, None]
        down, up = (torch.where(better, a, b) for a, b in zip(last, first, strict=True))
        return down, up
