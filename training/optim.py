"""Muon for matrices (Jordan et al., 2024), batched over matrices of one shape."""

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """Approximate the nearest (semi-)orthogonal matrices to g [N, rows, cols] by Newton-Schulz."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, Nesterov, then the orthogonal part of the update; decoupled weight decay."""

    def __init__(
        self, params, lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.02
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                by_shape[p.shape].append(p)
            for shape, params in by_shape.items():
                self._update(group, shape, params)

    def _update(self, group: dict, shape: torch.Size, params: list[nn.Parameter]) -> None:
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        grads = [p.grad for p in params]
        momenta = [self.state[p]["momentum"] for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, momenta, group["momentum"])
        update = orthogonal(torch.stack(updates)).to(params[0].dtype)
        lr = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, list(update.unbind(0)), alpha=-lr)


def optimizers(model: nn.Module, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks and AdamW for embeddings, norms and biases."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n]
    fused = rest[0].is_cuda
    return [
        Muon(matrices, lr=muon_lr),
        torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused),
    ]
