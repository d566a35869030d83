"""The (down, up) pair of a side and its makers.

stored = x @ down [D, R], x = stored @ up [R, D]; both float32. Attention transforms the query once
(`q @ up^T`) and the output once (`o @ up`), so the inner loop reads codes only. Spec:
`reference.transform`. Hadamard and the real FFT are made here by torch; what saved caches depend on
bit by bit (signs, random matrices) comes from `mlxkv.rotation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch

from mlxkv import rotation
from mlxkv.errors import UserError


@dataclass(frozen=True, eq=False)
class Transform:
    """down: [D, R] or [G, D, R]; up: [R, D] or [G, R, D]; float32."""

    down: torch.Tensor
    up: torch.Tensor

    def store(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, G, T, D] -> [B, G, T, R] float32."""
        return x.float() @ self.down

    def restore(self, c: torch.Tensor) -> torch.Tensor:
        """c: [B, G, T, R] -> [B, G, T, D] float32."""
        return c.float() @ self.up

    def query(self, q: torch.Tensor) -> torch.Tensor:
        """q: [B, G, N, D] -> [B, G, N, R] float32, such that q . restore(c) = query(q) . c."""
        return q.float() @ self.up.mT

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """`store` in the dtype of x: [B, G, T, D] -> [B, G, T, R]."""
        return x @ _cast(self, x.dtype)[0]

    def turned_query(self, q: torch.Tensor) -> torch.Tensor:
        """`query` in the dtype of q: [B, G, N, D] -> [B, G, N, R]."""
        return q @ _cast(self, q.dtype)[1].mT

    def turned_back(self, x: torch.Tensor) -> torch.Tensor:
        """`restore` in the dtype of x: [B, G, T, R] -> [B, G, T, D]."""
        return x @ _cast(self, x.dtype)[1]

    def to(self, device: torch.device) -> Transform:
        """Itself where it is there already: kernels keep what they made of it."""
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
    """Sign-randomised real FFT, packed as (DC, Nyquist), then sqrt(2) (Re, Im) per bin (SRFT paper,
    eq. 1 and 2)."""
    bins = torch.fft.rfft(torch.diag(_signs(dims, seed)), norm="ortho")  # row i: of unit vector i
    down = torch.empty(dims, dims, dtype=torch.float64)
    down[:, 0], down[:, 1] = bins[:, 0].real, bins[:, -1].real
    down[:, 2::2], down[:, 3::2] = (2**0.5 * x[:, 1:-1] for x in (bins.real, bins.imag))
    return of(down, down.T)


def random(dims: int, seed: int) -> Transform:
    """A random rotation (TurboQuant, Alg. 1)."""
    down = rotation.random(dims, seed)
    return of(down, down.T)


def hadamard_srft(dims: int, seed: int) -> Transform:
    """Hadamard where `dims` is a power of two, else the real FFT."""
    return srft(dims, seed) if dims & (dims - 1) else hadamard(dims, seed)


def _signs(dims: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(rotation.signs(dims, seed))


MAKERS = {"hadamard": hadamard, "srft": srft, "hadamard-srft": hadamard_srft, "random": random}


@cache
def make(
    name: str, dims: int, seed: int, device: torch.device = torch.device("cpu")
) -> Transform | None:
    """The transform called `name`, shared by all layers of these dims; None for "none".

    Raises UserError for "oscar", "balanced" and "learned", whose matrices come from a calibration
    (`cuda_track.calibrated`).
    """
    if name not in MAKERS and name != "none":
        raise UserError(
            f"[transform] {name} needs the rotations of a calibration; got none; choose "
            f"{', '.join(MAKERS)}, or attach the preset to a model"
        )
    if name == "none":
        return None
    with torch.device("cpu"):  # in float64, whatever the default device is
        return MAKERS[name](dims, seed).to(device)
