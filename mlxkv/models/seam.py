"""Give a model of mlx-lm compressed caches (`attach`), and take them away (`detach`).

After `attach`, mlx-lm's own `make_prompt_cache(model)` returns compressed caches, so everything in
mlx-lm that makes or takes a prompt cache runs on them unchanged.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlxkv import console
from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.latent.own import IndexedLatentKVCache, LatentKVCache
from mlxkv.codec import encoding, maps
from mlxkv.errors import UserError
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import canonical, check_rotary, parse_kv, stand_in
from mlxkv.formats.presets import PRESETS
from mlxkv.models.calibration.fitting import fit
from mlxkv.models.catalog.asked import check_fold
from mlxkv.models.catalog.reports import FOLDED, LayerReport, left_out, nothing_compressed, ranges
from mlxkv.models.compiled.weights import kept
from mlxkv.models.decoders import question, with_kernels
from mlxkv.models.hooks.fold import Fold, as_folded, check_maps, fold_of, fold_values
from mlxkv.models.hooks.layers import examine, with_searched
from mlxkv.models.hooks.mark import (
    cached_part,
    mark,
    own_make_cache,
    steps_to_come,
    unmark,
)
from mlxkv.models.hooks.probe import Place, Shape
from mlxkv.models.hooks.rebind import bind, release


def attach(
    model: nn.Module,
    kv: str | CacheConfig,
    strict: bool = False,
    calibration: Calibration | Path | str | None = None,
    fold: bool = False,
    group: mx.distributed.Group | None = None,
    encode: str = encoding.KERNEL,
) -> list[LayerReport]:
    """Compress the KV cache of `model` (any model of mlx-lm or mlx-vlm) as `kv` says: a preset's name, a pair or a
    configuration. A vision model of mlx-vlm is attached at its `language_model`, which makes the caches there.

    Returns one report per cache; in all of them, whether the model's decode steps can be traced. Attaching
    again replaces what was attached. A configuration that compresses nothing (`fp16`) leaves mlx-lm's own
    caches. Copies of an attached model, deep or unpickled, are attached themselves. mlx-lm's `max_kv_size`,
    and `kv_bits` on compressed layers, have no effect on an attached model, and warn.

    calibration: for a preset that needs one, a file or `owner/name` on the hub; by default the one
    that came with the model, or the user's own, or one that is made on the spot, for models that
    `mlxkv.models.load` has loaded.

    fold: apply the map of values in the weights of the model, where they are plain linear maps,
    instead of at run time; the reports say where and why not. Same tokens within rounding. Folding
    is for good, as in `load(fold=True)`: later calls find the weights folded, with `fold` or
    without, and the original weights come back by loading the model again. Caches that were filled
    before hold values that the model no longer reads.

    group: the processes over which `model.shard(group)` of mlx-lm is to spread the model, afterwards:
    caches hold this process's kv heads, and calibrated maps are cut to them.

    encode: how pages are encoded: "kernel", or on the CPU "cpu" or "cpu-columns".

    Where some layers of a kind are compressed and others are not (beside a sparse index), caches
    have no `merge` and no `to_batch`: no mask of a batch fits both, and hosts answer one request at a time.

    Raises UserError for what is no model, an unknown preset, a calibration that does not fit, and calibrated values
    where the weights are folded for other maps; with `strict` also if any layer whose cache grows
    with the context would stay in full precision. Then the model is left as it was. Without
    `strict`, warns if nothing at all is compressed.
    """
    _check_model(model)
    model = cached_part(model)
    config, label = read_kv(kv), name_of(kv)
    encoding.check(encode)
    check_fold(config, label, fold)
    own = own_make_cache(model)
    slots = bind(model)
    try:
        with kept(model):
            reports, places = examine(model, own, config, label)
            if not places and (other := stand_in(config)):
                config, label = parse_kv(other), f"{other} in place of {label}"
                reports, places = examine(model, own, config, label)
        if strict:
            _insist(model, reports, label)
        if any(shape.latent for shape in places.values()):
            config = config.of_latents
            check_fold(config, f"{label} for latents", fold)
        else:
            check_rotary(config, label)
        fitted = _shares(fit(model, config, places, label, calibration), places, group, fold)
        check_maps(model, fitted)
    except BaseException:
        release(slots)
        raise
    _detach(model)
    reports = with_searched(reports, config, {p: own for p, (own, _) in fitted.items()})
    if not places:
        release(slots)
        if message := nothing_compressed(reports):
            warnings.warn(f"[attach] {message}", stacklevel=2)
        return reports
    try:
        folded = fold_of(model)
        if fold:
            folded = fold_values(model, own, {p: turns for p, (_, turns) in fitted.items()})
        if folded is not None:
            reports = [_with_fold(report, folded, fold) for report in reports]
        fitted = as_folded(model, fitted)
        questions = {p: question(*fitted[p], shape) for p, shape in places.items()}
        reports, plans = with_kernels(reports, questions)
    except BaseException:  # such as Ctrl-C while kernels are built
        release(slots)
        raise

    kinds = {p: _kind(fitted[p][0], shape) for p, shape in places.items()}
    mark(model, slots, {p: partial(kinds[p], *fitted[p], plans[p], encode) for p in places})
    if group is None or group.size() == 1:  # else the model is cut to its share afterwards
        with kept(model):
            steps = steps_to_come(model, config.window + config.page + 1)
        reports = [replace(report, steps=steps) for report in reports]
    return reports


def _kind(config: CacheConfig, shape: Shape) -> type[CompressedKVCache]:
    """The class of a cache for what was found of it."""
    if shape.latent:
        return IndexedLatentKVCache if shape.selects else LatentKVCache
    return AdaptiveKVCache if config.listens else CompressedKVCache


def _shares(
    fitted: dict, places: dict[Place, Shape], group: mx.distributed.Group | None, fold: bool
) -> dict:
    """Cut the maps of `fitted` to this process's kv heads; every process holds all of a latent. Raises UserError
    where `fold` is asked for."""
    if group is None or group.size() == 1:
        return fitted
    if fold:
        raise UserError(
            f"[--fold] changes the weights of a whole model; got a group of {group.size()} processes; "
            "leave one of them out"
        )
    cut = {}
    for place, (config, turns) in fitted.items():
        whole = places[place].latent or turns is None
        own = turns if whole else maps.cut(turns, group.rank(), group.size())
        cut[place] = config, own
    return cut


def _with_fold(report: LayerReport, folded: Fold, asked: bool) -> LayerReport:
    """The report of a layer with what the weights do to its values; reasons why not only if `asked`."""
    own = [place for place in folded.reasons if place[0] == report.index]
    if not own or not report.compressed:
        return report
    worst = min(own, key=lambda place: place in folded.layer_maps)
    reason = folded.reasons[worst]
    return replace(report, fold=reason) if asked or reason == FOLDED else report


def read_kv(kv: str | CacheConfig) -> CacheConfig:
    """Return the configuration that `kv` is or names. Raises UserError."""
    if isinstance(kv, str):
        return parse_kv(kv)
    if not isinstance(kv, CacheConfig):
        raise UserError(
            f"[--kv] is the name of a preset or a CacheConfig; got {kv!r}; choose from "
            f"{', '.join(PRESETS)}"
        )
    return kv


def _check_model(model: nn.Module) -> None:
    """Raises UserError unless it may be a model of mlx-lm, or of mlx-vlm."""
    one = cached_part(model) if isinstance(model, nn.Module) else None
    if one is not None and (hasattr(one, "layers") or hasattr(one, "make_cache")):
        return
    raise UserError(
        f"[attach] takes a model of mlx-lm, which has layers; got {type(model).__name__}; choose the "
        "first of what mlx_lm.load or mlx_vlm.load returns, or the .model of what mlxkv.load returns"
    )


def name_of(kv: str | CacheConfig) -> str:
    """The name of `kv` in reports, or the labels of its sides."""
    if isinstance(kv, str):
        return canonical(kv)
    return f"{kv.keys.label} / {kv.values.label}"


def detach(model: nn.Module) -> None:
    """Undo `attach`; nothing happens to a model that is not attached.

    Folded weights stay folded, with a note on stderr: the model computes the same as before `attach`,
    its caches hold turned values. Raises UserError for what is no model.
    """
    if _detach(model) and fold_of(model) is not None:
        console.note("[detach] the weights stay folded; load the model again for the original ones")


def _detach(model: nn.Module) -> bool:
    """Undo `attach` without a word. Returns whether the model was attached."""
    if not isinstance(model, nn.Module):
        _check_model(model)
    slots = unmark(cached_part(model))
    release(slots or [])
    return slots is not None


def _insist(model: nn.Module, reports: list[LayerReport], label: str) -> None:
    """Raises UserError if a layer that grows stays in full precision."""
    if not (out := left_out(reports)):
        return
    name = getattr(model, "model_type", type(model).__name__)
    where = ranges([report.index for report in out])
    raise UserError(
        f"[--kv-strict] layers {where} of {name} stay in full precision; got {label}; "
        f"{out[0].reason}; choose another preset, or leave --kv-strict out"
    )
