"""Which store the quantized pages of a cache get: a pool for Triton where its kernels run, else codes for plain ops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cuda_track.cache.stores import Codes, Paged, codecs_of
from cuda_track.codec.maps import LayerMaps
from cuda_track.kernels import launch
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig

OPS, TRITON = "ops", "triton"
_forced = [""]  # "": what the device has


@contextmanager
def using(way: str) -> Iterator[None]:
    """Make the caches inside take plain ops, or the kernels of `way` and nothing else."""
    _forced.append(way)
    try:
        yield
    finally:
        _forced.pop()


def why_not(config: CacheConfig, dims: tuple[int, int], device: torch.device) -> str | None:
    """Return why a cache keeps its pages for plain ops, or None."""
    if _forced[-1] == OPS:
        return "plain ops were asked for"
    if device.type != "cuda" and not (_forced[-1] == TRITON and launch.interpreted()):
        return f"no Triton kernels on {device.type}"
    return launch.absent() or launch.why_not(config, dims)


def store(
    config: CacheConfig, dims: tuple[int, int], device: torch.device, maps: LayerMaps | None = None
) -> Codes | Paged:
    """Return an empty store for heads of these (key, value) dims.

    maps: of the layer, for calibrated sides. Raises UserError where kernels were asked for and cannot
    run.
    """
    codecs, reason = codecs_of(config, dims, maps, device), why_not(config, dims, device)
    if reason is None:
        return Paged(config, codecs)
    if _forced[-1] == TRITON:
        raise UserError(f"[store] {TRITON} was asked for; got {reason}; choose ops")
    return Codes(config, codecs)
