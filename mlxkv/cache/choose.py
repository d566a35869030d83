"""Chooses the kernels of a format: one question, asked when a model is attached.

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
from mlxkv.cache.selftest import Case
from mlxkv.cache.stores import Codes, Records
from mlxkv.cache.view import OPS, PORTABLE, TILES, KernelPlan
from mlxkv.codec.maps import LayerMaps
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.records import RecordLayout, record_layout, why_no_records
from mlxkv.metal import latents, launch, tiles, trust

PICKED = "this model's code picks single latents"
FAILED = "its kernels failed their test here"  # or were switched off: what should run and does not


@dataclass(frozen=True)
class Question:
    """Which kernels? config: as a cache stores. dims: of key and value heads. dtype: of the windows.
    case: how the model attends, where that is known. latent: whether keys are latents. picked: whether the model's
    code takes single ones."""

    config: CacheConfig
    dims: tuple[int, int]
    dtype: mx.Dtype
    case: Case | None = None
    latent: bool = False
    picked: bool = False

    @property
    def layout(self) -> RecordLayout:
        return record_layout(self.config, *self.config.dims(*self.dims))

    @property
    def heads(self) -> int:
        """Query heads that a kernel for latents is tried with."""
        return selftest.LATENT_HEADS if self.case is None else self.case.heads

    @property
    def has_kernels(self) -> bool:
        """Return whether any machine has kernels for such pages."""
        return _no_records(self) is None


def plan(
    config: CacheConfig,
    dims: tuple[int, int],
    dtype: mx.Dtype,
    case: Case | None = None,
    latent: bool = False,
    picked: bool = False,
) -> KernelPlan:
    """The fastest kernels that run here. The first question for a format builds them and tries them;
    the portable ones only where tiles do not run."""
    question = Question(config, dims, dtype, case, latent, picked)
    key = (config, dims, dtype, launch.state())
    make, by = launch.factory(), partial(KernelPlan, question=key, backend=launch.backend())
    if make is None:
        return by(OPS, launch.absent(), failed=launch.switched_off(launch.KERNELS) is not None)
    if reason := _no_records(question):
        return by(OPS, reason)
    off = launch.switched_off(launch.TILES) is not None
    if latent:
        if reason := _tiles_off() or latents.why_not_here(make):
            return by(OPS, reason, failed=off)
        if reason := selftest.latent_fault(config, dims[0], dtype, make, question.heads):
            return by(OPS, f"{FAILED}: {reason}", failed=True)
        return by(TILES, None, make)
    slower = _tiles_off() or _distrust(question, tiled=True)
    if slower is None:
        return by(TILES, None, make)
    if reason := _distrust(question, tiled=False):
        return by(OPS, f"{FAILED}: {reason}", failed=True)
    return by(PORTABLE, slower, make, failed=off)


def current(
    previous: KernelPlan | None,
    config: CacheConfig,
    dims: tuple[int, int],
    dtype: mx.Dtype,
    latent: bool = False,
) -> KernelPlan:
    """`before` where it still answers this question, else a new plan."""
    if previous is not None and previous.question == (config, dims, dtype, launch.state()):
        return previous
    return plan(config, dims, dtype, latent=latent)


def store(plan: KernelPlan, layer_maps: LayerMaps | None = None) -> Codes | Records:
    """An empty store as `plan` has chosen. layer_maps: of the layer, for calibrated sides."""
    config, dims, *_ = plan.question
    if plan.body == OPS:
        return Codes(config, dims, layer_maps)
    return Records(config, dims, plan.make, plan.body == TILES, layer_maps)


# -- parts of the decision: each answers a question by why not, or None


def _no_records(question: Question) -> str | None:
    """For any machine."""
    config, dims = question.config, question.dims
    if question.picked:
        return PICKED
    if question.latent:
        side = config.keys
        return latents.why_not(side.quantizer, side.dims(dims[0]), config.page, question.dtype)
    return why_no_records(config, *dims)


def _tiles_off() -> str | None:
    if os.environ.get(launch.TILES_SWITCH) == "0":
        return f"{launch.TILES_SWITCH}=0"
    return launch.switched_off(launch.TILES)


def _distrust(question: Question, tiled: bool) -> str | None:
    """Return what the format itself, the notes of earlier processes on a Mac, or trying the kernels say."""
    config, dims, dtype, make = question.config, question.dims[0], question.dtype, launch.factory()
    layout, on_mac, reason = question.layout, make is mx.fast.metal_kernel, None
    if on_mac:
        on_trial = selftest.representative_config(config, dims)
        layout = record_layout(on_trial, *on_trial.dims(*question.dims))
    if tiled:
        reason = tiles.why_not(layout, dims, dtype, make)
    elif on_mac:
        reason = trust.why_not(layout, dims, dtype, tiled)
    return reason or selftest.test(config, dims, dtype, make, tiled, question.case).reason
