"""Choose the backend of a format: one request, made when a model is attached.

`plan` returns the backend that quantizes and reads the pages of a cache on this machine, and why no faster one does.
Caches hold the plan, their pages the backend; attention and reports use these. A plan is valid while `launch.state` is
unchanged: new caches plan again after kernels were switched off.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

from mlxkv.cache import selftest
from mlxkv.cache.backends import (
    PLAIN_OPS,
    Backend,
    LatentBackend,
    OpsBackend,
    PortableBackend,
    RowsBackend,
    TileBackend,
)
from mlxkv.cache.selftest import AttentionShape
from mlxkv.cache.stores import Codes, Records
from mlxkv.codec.maps import LayerMaps
from mlxkv.formats.config import CacheConfig
from mlxkv.metal import launch
from mlxkv.metal.launch import KernelBuilder

INDEXED = "this model's code picks single latents"
FAILED = "its kernels failed their test here"  # or were switched off: they should run and do not


# The config, dims and type of `plan`, and `launch.state` at that time.
Request = tuple[CacheConfig, tuple[int, int], mx.Dtype, tuple[KernelBuilder | None, bool]]


@dataclass(frozen=True)
class KernelPlan:
    """The backend for pages of one format on this machine.

    reason: why no faster backend runs, None for the fastest. request: argument of `plan`. failed: whether a faster
    backend should run here and does not. device: the kernels' device.
    """

    backend: Backend
    reason: str | None = None
    request: Request | None = field(default=None, compare=False, repr=False)
    failed: bool = field(default=False, compare=False)
    device: str = field(default="", compare=False)

    @property
    def by_kernels(self) -> bool:
        """Return whether kernels read the pages."""
        return not isinstance(self.backend, OpsBackend)

    @property
    def label(self) -> str:
        """Return the backend's name, for plain ops with the reason."""
        name = self.backend.name
        return name if self.by_kernels else f"{name} ({self.reason})"

    @property
    def text(self) -> str:
        """Return its line in reports."""
        return f"{self.device} {self.label}" if self.by_kernels else self.label

    def __deepcopy__(self, memo: dict[int, Any]) -> KernelPlan:
        return self

    def __reduce__(self):
        """Pickle without the request, which belongs to a process."""
        return KernelPlan, (self.backend, self.reason, None, self.failed, self.device)


@dataclass(frozen=True)
class KernelRequest:
    """Parameters of a choice of kernels.

    config: the cache's. dims: key and value head dims. dtype: dtype of the windows. shape: the model's attention, if
    known. latent: whether keys are latents. indexed: whether the model's code selects single latents.
    """

    config: CacheConfig
    dims: tuple[int, int]
    dtype: mx.Dtype
    shape: AttentionShape | None = None
    latent: bool = False
    indexed: bool = False

    def backends(self, builder: KernelBuilder | None) -> tuple[Backend, ...]:
        """Return the backends with kernels for such pages, the fastest first."""
        if self.latent:
            return (LatentBackend(builder),)
        one_body = TileBackend(builder), PortableBackend(builder)
        on_mac = builder is mx.fast.metal_kernel
        asked = self.config, self.dims, self.dtype
        both = on_mac and RowsBackend(builder).can_run(*asked) is None
        return (RowsBackend(builder), *one_body) if both else one_body

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
    """Return the plan with the fastest backend that runs here.

    The first request for a format builds and tests its kernels, the portable ones only if tiles do not run.
    """
    request = KernelRequest(config, dims, dtype, shape, latent, indexed)
    key = (config, dims, dtype, launch.state())
    builder = launch.kernel_builder()
    by = partial(KernelPlan, request=key, device=launch.device_type())
    if builder is None:
        off = launch.switched_off(launch.KERNELS) is not None
        return by(PLAIN_OPS, launch.absent(), failed=off)
    if reason := request.unsupported:
        return by(PLAIN_OPS, reason)
    off, tried = launch.switched_off(launch.TILES) is not None, False
    reasons: list[str] = []
    for backend in request.backends(builder):
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
    """Return an empty store for the backend of `plan`. layer_maps: the layer's, for calibrated sides."""
    assert plan.request is not None  # set by `plan`
    config, dims, *_ = plan.request
    if isinstance(plan.backend, PortableBackend):
        return Records(config, dims, plan.backend, layer_maps)
    return Codes(config, dims, layer_maps)
