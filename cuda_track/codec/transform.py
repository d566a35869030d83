"""The (down, up) pair of a side and its makers: stored = x @ down, x = stored @ up. Spec:
`mlxkv.spec.affine.transform`.

Attention transforms the query (`q @ up^T`) and the output (`o @ up`) once, so that the inner loop reads codes
only. Hadamard and the real FFT are made by torch; signs and random matrices, on which saved caches
depend bit by bit, come from `mlxkv.formats.matrices`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch

from mlxkv.formats import matrices


@dataclass(frozen=True, eq=False)
class Transform:
    """Matrices down [D, R] or [G, D, R] and up [R, D] or [G, R, D], float32."""

    down: torch.Tensor
    up: torch.Tensor

    def store(self, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Transform x [B, G, T, D] into the stored domain, [B, G, T, R] in `dtype`."""
        return x.to(dtype) @ self._in(dtype)[0]

    def restore(self, c: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Transform c [B, G, T, R] back, [B, G, T, D] in `dtype`."""
        return c.to(dtype) @ self._in(dtype)[1]

    def query(self, q: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Transform q [B, G, N, D] to [B, G, N, R] in `dtype`, so that q . restore(c) = query(q) . c."""
        return q.to(dtype) @ self._in(dtype)[1].mT

    def _in(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.down, self.up) if dtype == torch.float32 else _cast(self, dtype)

    def to(self, device: torch.device) -> Transform:
        """Return the transform on `device`; itself if it is there, since kernels cache what they derive from it."""
        if self.down.device == device:
            return self
        return Transform(self.down.to(device), self.up.to(device))


@lru_cache(maxsize=256)
def _cast(transform: Transform, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return transform.down.to(dtype), transform.up.to(dtype)


def of(down: np.ndarray | torch.Tensor, up: np.ndarray | torch.Tensor) -> Transform:
    """From float64 matrices."""
    return Transform(*(torch.as_tensor(np.ascontiguousarray(x)).float() for x in (down, up)))


def hadamard(dims: int, seed: int) -> Transform:
    """Sign-randomised Hadamard (QuaRot): Sylvester's doubling, then signs."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < dims:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    down = _signs(dims, seed)[:, None] * h / dims**0.5
    return of(down, down.T)


def srft(dims: int, seed: int) -> Transform:
    """Sign-randomised real FFT: (DC, Nyquist), then sqrt(2) (Re, Im) of each bin (SRFT paper, eq. 1, 2)."""
    bins = torch.fft.rfft(torch.diag(_signs(dims, seed)), norm="ortho")  # row i: of unit vector i
    down = torch.empty(dims, dims, dtype=torch.float64)
    down[:, 0], down[:, 1] = bins[:, 0].real, bins[:, -1].real
    down[:, 2::2], down[:, 3::2] = (2**0.5 * x[:, 1:-1] for x in (bins.real, bins.imag))
    return of(down, down.T)


def random(dims: int, seed: int) -> Transform:
    """Return a random rotation (TurboQuant, Alg. 1)."""
    down = matrices.random(dims, seed)
    return of(down, down.T)


def _signs(dims: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(matrices.signs(dims, seed))


MAKERS = {"hadamard": hadamard, "srft": srft, "random": random}


@cache
def make(
    name: str, dims: int, seed: int, device: torch.device = torch.device("cpu")
) -> Transform | None:
    """Return the transform called `name`, which all layers of these dims share; None for "none".

    Raises UserError for those whose matrices come from a calibration (`maps`).
    """
    if name == "none":
        return None
    with torch.device("cpu"):  # which has float64
        return MAKERS[matrices.computed(name, dims)](dims, seed).to(device)
