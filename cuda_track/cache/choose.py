"""Which store the quantized pages of a cache get: a pool for Triton or records for Metal, where their kernels
run, else codes for plain ops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cuda_track.cache.stores import Codes, Paged, Records, codecs_of
from cuda_track.codec.maps import LayerMaps
from cuda_track.kernels import launch
from cuda_track.mps import pages as metal
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig

OPS, TRITON, METAL = "ops", "triton", "metal"
_forced = [""]  # "": what the device has


@contextmanager
def using(way: str) -> Iterator[None]:
    """Make the caches inside take plain ops, or the kernels of `way` and nothing else."""
    _forced.append(way)
    try:
        yield
    finally:
        _forced.pop()


def way(device: torch.device) -> str:
    """Return whose kernels caches on `device` would take."""
    return _forced[-1] or (METAL if device.type == "mps" else TRITON)


def why_not(config: CacheConfig, dims: tuple[int, int], device: torch.device) -> str | None:
    """Return why a cache keeps its pages for plain ops, or None."""
    forced = way(device)
    if forced == OPS:
        return "plain ops were asked for"
    if forced == METAL:
        return metal.why_not(config, dims)
    if device.type != "cuda" and not (_forced[-1] == TRITON and launch.interpreted()):
        return f"no Triton kernels on {device.type}"
    return launch.absent() or launch.why_not(config, dims)


def store(
    config: CacheConfig, dims: tuple[int, int], device: torch.device, maps: LayerMaps | None = None
) -> Codes | Paged | Records:
    """Return an empty store for heads of these (key, value) dims.

    maps: of the layer, for calibrated sides. Raises UserError where kernels were asked for and cannot
    run.
    """
    codecs, reason = codecs_of(config, dims, maps, device), why_not(config, dims, device)
    if reason is None:
        if way(device) == METAL:
            return Records(config, codecs)
        return Paged(config, codecs)
    if _forced[-1] in (TRITON, METAL):
        raise UserError(f"[store] {way(device)} was asked for; got {reason}; choose ops")
    return Codes(config, codecs)
