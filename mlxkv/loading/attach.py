"""Attach compressed caches to a model of mlx-lm (`attach`), and remove them (`detach`).

After `attach`, mlx-lm's own `make_prompt_cache(model)` returns compressed caches, so every function of mlx-lm that
makes or accepts a prompt cache works with them unchanged. `attach` has five steps, defined below in this order:
`examine`, `fit`, `transform_weights`, `choose_kernels`, `complete`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from mlxkv import console
from mlxkv.cache import choose, selftest
from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.cache.choose import KernelPlan, KernelRequest
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.latent import IndexedLatentKVCache, LatentKVCache
from mlxkv.catalog.reports import (
    ASKED_FOR,
    CAPPED,
    FOLDED,
    LATENT,
    SINKS,
    UNKNOWN,
    LayerReport,
    compressed,
    left_out,
    nothing_compressed,
    of_latents,
    ranges,
    with_own,
)
from mlxkv.codec import maps
from mlxkv.codec.maps import LayerMaps
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import check_fold, fallback_preset, parse_kv
from mlxkv.formats.quantizers import Quantizer
from mlxkv.metal import launch
from mlxkv.patching.fold import Fold, as_folded, check_maps, fold_of, fold_values
from mlxkv.patching.mark import mark, unmark
from mlxkv.patching.patch import patch, unpatch
from mlxkv.patching.probe import INDEX_KEYS, ProbedShape, find
from mlxkv.patching.traced_weights import unchanged
from mlxkv.patching.trees import Place, cached_part, class_of, leaves, own_caches

if TYPE_CHECKING:
    from mlxkv.formats.calibration.artifact import Calibration

Fitted = dict[Place, tuple[CacheConfig, LayerMaps | None]]  # by compressed cache


def attach(
    model: nn.Module,
    kv: str | float | CacheConfig | Quantizer,
    strict: bool = False,
    calibration: Calibration | Path | str | None = None,
    fold: bool = False,
    group: mx.distributed.Group | None = None,
) -> list[LayerReport]:
    """Compress the KV cache of `model` (any model of mlx-lm or mlx-vlm). `kv`: a preset's name, a pair, a
    configuration or a `Method`. A vision model of mlx-vlm is attached at its `language_model`, which makes the caches
    there.

    Returns one report per cache. Attaching again replaces the previous caches. A configuration that compresses nothing
    (`fp16`) leaves mlx-lm's own caches. Deep or unpickled copies of an attached model are attached too.
    mlx-lm's `max_kv_size`, and `kv_bits` on compressed layers, have no effect on an attached model, and warn.

    calibration: for presets that need one: a calibration or its file. The default is the calibration shipped with
    the model, else the user's own, else, for models loaded by `mlxkv.load`, a new one made on the spot.

    fold: apply the map of values in the model's weights, where these are plain linear maps, instead of at run time;
    the reports say which layers are folded, and why others are not. Tokens are the same within rounding. Folding is
    permanent, as in `load(fold=True)`: later calls use the folded weights whether `fold` is set or not; only
    reloading the model restores the original ones. The folded model cannot read caches filled before.

    group: the processes over which mlx-lm's `model.shard(group)` will shard the model after this call: caches hold
    this process's kv heads, and calibrated maps are cut to them.

    Where only some layers of a kind are compressed (as with a sparse index), caches have no `merge` and no
    `to_batch`: no batch mask fits both, so hosts serve one request at a time.

    Raises UserError if `model` is not a model, for an unknown preset, a calibration that does not fit, and
    calibrated values where the weights are folded for other maps; with `strict` also if any layer whose cache grows
    with the context would stay in full precision. On an error the model is unchanged. Without `strict`, warns if
    no layer is compressed.
    """
    _check_model(model)
    model, config = cached_part(model), parse_kv(kv)
    check_fold(config, fold)
    slots = patch(model)
    try:
        config, reports, shapes = examine(model, config, strict, fold)
        fitted = fit(model, config, shapes, calibration, group, fold)
        unmark(model)
        if shapes:
            fitted, folded = transform_weights(model, fitted, fold)
            plans = choose_kernels(fitted, shapes)
    except BaseException:  # such as Ctrl-C while kernels are built
        unpatch(slots)
        raise
    if not shapes:
        unpatch(slots)
        if message := nothing_compressed(reports):
            warnings.warn(f"[attach] {message}", stacklevel=2)
        return reports
    mark(
        model,
        slots,
        {p: partial(_kind(fitted[p][0], shapes[p]), *fitted[p], plans[p]) for p in shapes},
    )
    return [
        complete(r, config, fitted, plans, folded, fold) if r.compressed else r for r in reports
    ]


def _check_model(model: nn.Module) -> None:
    """Raise UserError unless `model` looks like a model of mlx-lm or mlx-vlm."""
    part = cached_part(model) if isinstance(model, nn.Module) else None
    if part is not None and (hasattr(part, "layers") or hasattr(part, "make_cache")):
        return
    raise UserError(
        f"[attach] takes a model of mlx-lm, which has layers; got {type(model).__name__}; choose the "
        "first of what mlx_lm.load or mlx_vlm.load returns, or the .model of what mlxkv.load returns"
    )


# -- 1. examine: which layers are compressed, and why the others are not


def examine(
    model: nn.Module, config: CacheConfig, strict: bool, fold: bool
) -> tuple[CacheConfig, list[LayerReport], dict[Place, ProbedShape]]:
    """Decide which of the model's own caches are compressed. Returns `config` adapted to this model (another one
    replaces mixed bits; latents have their own), a report for each layer, and the shapes of the compressed caches.

    Raises UserError, with `strict`, if a growing layer stays in full precision, and for settings that do not apply to
    this model. The attention function must be patched (`patch.patch`).
    """
    with unchanged(model):
        reports, shapes = _examined(model, config)
        if not shapes and (name := fallback_preset(config)):
            config = replace(parse_kv(name), name=f"{name} in place of {config.label}")
            reports, shapes = _examined(model, config)
    if strict and (out := left_out(reports)):
        raise UserError(
            f"[--kv-strict] layers {ranges([report.index for report in out])} of "
            f"{getattr(model, 'model_type', type(model).__name__)} stay in full precision; got {config.label}; "
            f"{out[0].reason}; choose another preset, or leave --kv-strict out"
        )
    if any(shape.latent for shape in shapes.values()):
        config = config.of_latents
        check_fold(replace(config, name=f"{config.label} for latents"), fold)
    return config, reports, shapes


def _examined(
    model: nn.Module, config: CacheConfig
) -> tuple[list[LayerReport], dict[Place, ProbedShape]]:
    """Return a report for each layer, and the shapes of the caches that `config` compresses."""
    caches = leaves(own_caches(model))
    shapes: dict[Place, ProbedShape] = {}
    if config.compresses:
        findings = find(model)
        shapes, reasons = findings.shapes, findings.refused
    else:
        reasons = {place: ASKED_FOR for place, _ in caches}
    by_layer: dict[int, list[LayerReport]] = {}
    compressed_shapes = {}
    for place, cache in caches:
        report = _judge(place[0], cache, shapes.get(place), reasons.get(place), config)
        if report.compressed:
            compressed_shapes[place] = shapes[place]
        by_layer.setdefault(place[0], []).append(report)
    return [_merge(parts) for parts in by_layer.values()], compressed_shapes


def _judge(
    index: int, cache, shape: ProbedShape | None, reason: str | None, config: CacheConfig
) -> LayerReport:
    """Return the report of one cache. shape: None if it is not compressed. reason: why not;
    None for that of its class."""
    known = class_of(cache)
    kind = INDEX_KEYS if reason == INDEX_KEYS else known.label.format_map(vars(cache))
    if config.centred and shape is not None and (shape.sinks or shape.softcap):
        shape, reason = None, SINKS if shape.sinks else CAPPED
    if shape is None:
        return LayerReport(index, kind, False, reason or known.reason, grows=known.grows)
    sizes, label = (shape.heads, shape.key_dim, shape.value_dim), config.label
    if shape.latent:
        if objection := config.why_no_latents:
            return LayerReport(index, LATENT, False, objection)
        kind, label, config = LATENT, of_latents(config), config.of_latents
    return compressed(index, kind, config, label, sizes, UNKNOWN)


def _merge(parts: list[LayerReport]) -> LayerReport:
    """Choose the report of a layer with several caches: that of a growing cache, if any."""
    if len(parts) == 1:
        return parts[0]
    growing = [part for part in parts if part.grows and part.kind != INDEX_KEYS] or parts
    worst = min(growing, key=lambda part: part.compressed)
    return replace(worst, kind=" + ".join(dict.fromkeys(part.kind for part in parts)))


# -- 2. fit: clips, ranks and maps of each layer, from a calibration


def fit(
    model: nn.Module,
    config: CacheConfig,
    shapes: Mapping[Place, ProbedShape],
    calibration: Calibration | Path | str | None,
    group: mx.distributed.Group | None,
    fold: bool,
) -> Fitted:
    """Return the config and maps of each compressed cache, cut to this process's kv heads (latents are not cut).
    Raises UserError for a calibration that is missing or does not fit, for `fold` with several processes, and if the
    weights are folded for other maps."""
    fitted: Fitted = dict.fromkeys(shapes, (config, None))
    if shapes and config.calibrated:
        from mlxkv.calibration import fitting  # imported late: it reads texts

        fitted = fitting.fit(model, config, shapes, calibration)
    if group is not None and group.size() > 1:
        if fold:
            raise UserError(
                f"[fold] changes the weights of a whole model; got a group of {group.size()} processes; "
                "leave one of them out"
            )
        for place, (layer, layer_maps) in fitted.items():
            if layer_maps is not None and not shapes[place].latent:
                fitted[place] = layer, maps.cut(layer_maps, group.rank(), group.size())
    check_maps(model, fitted)
    return fitted


# -- 3. transform_weights: maps of values that the weights apply


def transform_weights(model: nn.Module, fitted: Fitted, fold: bool) -> tuple[Fitted, Fold | None]:
    """Fold maps of values into the weights if `fold`. Returns `fitted`, with the folded maps marked, and the fold, if
    there is one."""
    folded = fold_of(model)
    if fold:
        by_place = {p: of_layer for p, (_, of_layer) in fitted.items() if of_layer is not None}
        folded = fold_values(model, by_place)
    return as_folded(model, fitted), folded


# -- 4. choose_kernels: built and tried when a model is loaded, not in the middle of a prompt


_tried: set[tuple[KernelRequest, launch.KernelBuilder]] = set()  # in this process


def choose_kernels(fitted: Fitted, shapes: Mapping[Place, ProbedShape]) -> dict[Place, KernelPlan]:
    """Return the kernel plan of each cache. Builds and tries all kernels that the caches need, with a line of
    progress."""
    requests = {place: _request(*fitted[place], shape) for place, shape in shapes.items()}
    unique = list(dict.fromkeys(requests.values()))
    representatives = {
        q: replace(q, config=selftest.representative_config(q.config, q.dims[0])) for q in unique
    }
    builder, answers = launch.kernel_builder(), {}
    new = {(q, builder) for q in representatives.values() if builder and not q.unsupported} - _tried
    _tried.update(new)
    with console.progress("building kernels", len(new), f"{len(new)} to go, once") as step:
        for q in unique:
            if builder and (representatives[q], builder) in new:
                new.remove((representatives[q], builder))
                step()
            answers[q] = choose.plan(q.config, q.dims, q.dtype, q.shape, q.latent, q.indexed)
    return {place: answers[q] for place, q in requests.items()}


def _request(
    config: CacheConfig, layer_maps: LayerMaps | None, shape: ProbedShape
) -> KernelRequest:
    stored = config.folded if layer_maps is not None and layer_maps.folded else config
    attention_shape = None
    if shape.queries:
        attention_shape = selftest.AttentionShape(
            shape.queries, shape.heads, shape.sinks, shape.softcap
        )
    dims = shape.key_dim, shape.value_dim
    return KernelRequest(stored, dims, shape.dtype, attention_shape, shape.latent, shape.selects)


def _kind(config: CacheConfig, shape: ProbedShape) -> type[CompressedKVCache]:
    """Return the cache class for this format and shape."""
    if shape.latent:
        return IndexedLatentKVCache if shape.selects else LatentKVCache
    return AdaptiveKVCache if config.needs_queries else CompressedKVCache


# -- 5. complete: the reports


def complete(
    report: LayerReport,
    config: CacheConfig,
    fitted: Fitted,
    plans: Mapping[Place, KernelPlan],
    folded: Fold | None,
    tell_all: bool,
) -> LayerReport:
    """Return the report of a compressed layer with its clips and ranks, with the plan that decodes worst among its
    caches, and with whether its values are folded; why not, only with `tell_all`."""
    own = [place for place in fitted if place[0] == report.index]
    report = with_own(report, config, fitted[own[-1]][0])
    reason, reasons = "", {} if folded is None else folded.reasons
    if tried := [place for place in own if place in reasons]:
        reason = reasons[min(tried, key=lambda place: reasons[place] == FOLDED)]
    plan = min((plans[place] for place in own), key=lambda plan: plan.by_kernels)
    return replace(report, plan=plan, fold=reason if tell_all or reason == FOLDED else "")


# -- undo


def detach(model: nn.Module) -> None:
    """Undo `attach`; leave a model that is not attached unchanged.

    Folded weights stay folded, with a note on stderr: outputs are as before `attach`, but caches hold transformed
    values. Raises UserError if `model` is not a model.
    """
    if not isinstance(model, nn.Module):
        _check_model(model)
    if unmark(cached_part(model)) and fold_of(model) is not None:
        console.note("[detach] the weights stay folded; load the model again for the original ones")
