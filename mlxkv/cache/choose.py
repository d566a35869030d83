"""Chooses the backend of a format: one request, made when a model is attached.

`plan` says which code quantizes and reads the pages of a cache on this machine and why nothing faster
does. The cache is given the plan, its pages carry the backend, attention and reports follow it. A plan holds
as long as the machine is what it was (`launch.state`): after kernels were switched off, caches that
are made ask again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from mlxkv.cache import selftest
from mlxkv.cache.backends import (
    PLAIN_OPS,
    Backend,
    LatentBackend,
    OpsBackend,
    PortableBackend,
    TileBackend,
)
from mlxkv.cache.selftest import AttentionShape
from mlxkv.cache.stores import Codes, Records
from mlxkv.codec.maps import LayerMaps
from mlxkv.formats.config import CacheConfig
from mlxkv.metal import launch
from mlxkv.metal.launch import Factory

INDEXED = "this model's code picks single latents"
FAILED = "its kernels failed their test here"  # or were switched off: what should run and does not


@dataclass(frozen=True)
class KernelPlan:
    """Which code quantizes and reads the pages of one format on this machine.

    reason: why no faster backend, None for the fastest. request: the one that `plan` answered. failed: whether a faster
    backend should run here, and does not. device: that kernels run on.
    """

    backend: Backend
    reason: str | None = None
    request: tuple | None = field(default=None, compare=False, repr=False)
    failed: bool = field(default=False, compare=False)
    device: str = field(default="", compare=False)

    @property
    def by_kernels(self) -> bool:
        """Return whether kernels read the pages."""
        return not isinstance(self.backend, OpsBackend)

    @property
    def label(self) -> str:
        """The backend; plain ops say why."""
        name = self.backend.name
        return name if self.by_kernels else f"{name} ({self.reason})"

    @property
    def text(self) -> str:
        """Return its line in reports."""
        return f"{self.device} {self.label}" if self.by_kernels else self.label

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        """Leave out what belongs to a process: the question."""
        return KernelPlan, (self.backend, self.reason, None, self.failed, self.device)


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

    def backends(self, make: Factory | None) -> tuple[Backend, ...]:
        """Return the backends with kernels for such pages, the fastest first."""
        if self.latent:
            return (LatentBackend(make),)
        return TileBackend(make), PortableBackend(make)

    @property
    def unsupported(self) -> str | None:
        """Return why no machine has kernels for such pages, or None."""
        slowest = self.backends(None)[-1]
        return INDEXED if self.indexed else slowest.supports(self.config, self.dims, self.dtype)


def plan(
    config: CacheConfig,
    dims: tuple[int, int],
    dtype: mx.Dtype,
    shape: AttentionShape | None = None,
    latent: bool = False,
    indexed: bool = False,
) -> KernelPlan:
    """Return the fastest backend that runs here. The first request for a format builds its kernels and tries them;
    the portable ones only where tiles do not run."""
    request = KernelRequest(config, dims, dtype, shape, latent, indexed)
    key = (config, dims, dtype, launch.state())
    make, by = launch.factory(), partial(KernelPlan, request=key, device=launch.backend())
    if make is None:
        off = launch.switched_off(launch.KERNELS) is not None
        return by(PLAIN_OPS, launch.absent(), failed=off)
    if reason := request.unsupported:
        return by(PLAIN_OPS, reason)
    off, reasons, tried = launch.switched_off(launch.TILES) is not None, [], False
    for backend in request.backends(make):
        reason = backend.can_run(config, dims, dtype)
        if tried := reason is None:
            reason = selftest.why_not(config, dims[0], dtype, backend, shape)
        if reason is None:
            return by(backend, next(iter(reasons), None), failed=off)
        reasons.append(reason)
    if tried:
        return by(PLAIN_OPS, f"{FAILED}: {reasons[-1]}", failed=True)
    return by(PLAIN_OPS, reasons[-1], failed=off)


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
    if isinstance(plan.backend, PortableBackend):
        return Records(config, dims, plan.backend, layer_maps)
    return Codes(config, dims, layer_maps)
