"""Chooses the kernels of a format: one request, made when a model is attached.

`plan` says which code quantizes and reads the pages of a cache on this machine and why nothing faster
does. The cache is given the plan, its views carry it, attention and reports follow it. A plan holds
as long as the machine is what it was (`launch.state`): after kernels were switched off, caches that
are made ask again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from mlxkv.cache import selftest
from mlxkv.cache.selftest import AttentionShape
from mlxkv.cache.stores import Codes, Records
from mlxkv.cache.view import OPS, PORTABLE, TILES, KernelPlan
from mlxkv.codec.maps import LayerMaps
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.records import RecordLayout, record_layout, why_no_records
from mlxkv.metal import latents, launch, tiles, trust
from mlxkv.metal.launch import Factory

INDEXED = "this model's code picks single latents"
FAILED = "its kernels failed their test here"  # or were switched off: what should run and does not


@dataclass(frozen=True)
class KernelRequest:
    """Which kernels? config: as a cache stores. dims: of key and value heads. dtype: of the windows.
    shape: how the model attends, where that is known. latent: whether keys are latents. indexed: whether the model's
    code takes single ones."""

    config: CacheConfig
    dims: tuple[int, int]
    dtype: mx.Dtype
    shape: AttentionShape | None = None
    latent: bool = False
    indexed: bool = False

    @property
    def layout(self) -> RecordLayout:
        return record_layout(self.config, *self.config.dims(*self.dims))

    @property
    def heads(self) -> int:
        """Query heads that a kernel for latents is tried with."""
        return selftest.LATENT_HEADS if self.shape is None else self.shape.heads

    @property
    def has_kernels(self) -> bool:
        """Return whether any machine has kernels for such pages."""
        return _no_records(self) is None


def plan(
    config: CacheConfig,
    dims: tuple[int, int],
    dtype: mx.Dtype,
    shape: AttentionShape | None = None,
    latent: bool = False,
    indexed: bool = False,
) -> KernelPlan:
    """Return the fastest kernels that run here. The first request for a format builds them and tries them;
    the portable ones only where tiles do not run."""
    request = KernelRequest(config, dims, dtype, shape, latent, indexed)
    key = (config, dims, dtype, launch.state())
    make, by = launch.factory(), partial(KernelPlan, request=key, backend=launch.backend())
    if make is None:
        return by(OPS, launch.absent(), failed=launch.switched_off(launch.KERNELS) is not None)
    if reason := _no_records(request):
        return by(OPS, reason)
    off = launch.switched_off(launch.TILES) is not None
    if latent:
        if reason := _tiles_off() or latents.why_not_here(make):
            return by(OPS, reason, failed=off)
        if reason := selftest.latent_fault(config, dims[0], dtype, make, request.heads):
            return by(OPS, f"{FAILED}: {reason}", failed=True)
        return by(TILES, None, make)
    slower = _tiles_off() or _rejection_reason(request, make, tiled=True)
    if slower is None:
        return by(TILES, None, make)
    if reason := _rejection_reason(request, make, tiled=False):
        return by(OPS, f"{FAILED}: {reason}", failed=True)
    return by(PORTABLE, slower, make, failed=off)


def current(
    previous: KernelPlan | None,
    config: CacheConfig,
    dims: tuple[int, int],
    dtype: mx.Dtype,
    latent: bool = False,
) -> KernelPlan:
    """Return `previous` if it is still valid, else plan again."""
    if previous is not None and previous.request == (config, dims, dtype, launch.state()):
        return previous
    return plan(config, dims, dtype, latent=latent)


def store(plan: KernelPlan, layer_maps: LayerMaps | None = None) -> Codes | Records:
    """Return an empty store as `plan` has chosen. layer_maps: of the layer, for calibrated sides."""
    assert plan.request is not None  # a plan of `plan`
    config, dims, *_ = plan.request
    if plan.body == OPS:
        return Codes(config, dims, layer_maps)
    return Records(config, dims, plan.builder, plan.body == TILES, layer_maps)


# -- parts of the decision: each answers by why not, or None


def _no_records(request: KernelRequest) -> str | None:
    """For any machine."""
    config, dims = request.config, request.dims
    if request.indexed:
        return INDEXED
    if request.latent:
        side = config.keys
        return latents.why_not(side.quantizer, side.dims(dims[0]), config.page, request.dtype)
    return why_no_records(config, *dims)


def _tiles_off() -> str | None:
    if os.environ.get(launch.TILES_SWITCH) == "0":
        return f"{launch.TILES_SWITCH}=0"
    return launch.switched_off(launch.TILES)


def _rejection_reason(request: KernelRequest, make: Factory, tiled: bool) -> str | None:
    """Return what the format itself, the notes of earlier processes on a Mac, or trying the kernels say."""
    config, dims, dtype = request.config, request.dims[0], request.dtype
    layout, on_mac, reason = request.layout, make is mx.fast.metal_kernel, None
    if on_mac:
        on_trial = selftest.representative_config(config, dims)
        layout = record_layout(on_trial, *on_trial.dims(*request.dims))
    if tiled:
        reason = tiles.why_not(layout, dims, dtype, make)
    elif on_mac:
        reason = trust.why_not(layout, dims, dtype, tiled)
    return reason or selftest.test(config, dims, dtype, make, tiled, request.shape).reason
