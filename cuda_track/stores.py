"""Which store the sealed pages of a cache get: a pool for Triton, records for Metal, where their kernels
run, else codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cuda_track import kernels
from cuda_track.calibrated import Rotations
from cuda_track.kernels.pool import Paged
from cuda_track.mps import store as metal
from cuda_track.mps.store import Records
from cuda_track.sealed import Codes, codecs_of
from mlxkv.config import CacheConfig
from mlxkv.errors import UserError

OPS, TRITON, METAL = "ops", "triton", "metal"
_asked = [""]  # "": what the device has


@contextmanager
def using(way: str) -> Iterator[None]:
    """Caches made inside take plain ops, or the kernels of `way` and nothing else."""
    _asked.append(way)
    try:
        yield
    finally:
        _asked.pop()


def way(device: torch.device) -> str:
    """Whose kernels caches on `device` would take."""
    return _asked[-1] or (METAL if device.type == "mps" else TRITON)


def why_not(config: CacheConfig, dims: tuple[int, int], device: torch.device) -> str | None:
    """Why a cache keeps its pages for plain ops, or None."""
    asked = way(device)
    if asked == OPS:
        return "plain ops were asked for"
    if asked == METAL:
        return metal.why_not(config, dims)
    if _asked[-1] != TRITON and device.type != "cuda":
        return f"no Triton kernels on {device.type}"
    if config.low:
        return "low rank has no Triton kernel"
    return kernels.why_not(config, dims, device)


def store(
    config: CacheConfig,
    dims: tuple[int, int],
    device: torch.device,
    rotations: Rotations | None = None,
) -> Codes | Paged | Records:
    """An empty store for heads of these (key, value) dims.

    rotations: of the layer, for calibrated sides. Raises UserError where kernels were asked for and
    cannot run.
    """
    codecs, reason = codecs_of(config, dims, rotations, device), why_not(config, dims, device)
    if reason is None:
        if way(device) == METAL:
            return Records(config, codecs)
        return Paged(config, codecs, seal=kernels.seal)
    if _asked[-1] in (TRITON, METAL):
        raise UserError(f"[store] {way(device)} was asked for; got {reason}; choose ops")
    return Codes(config, codecs)
