"""The seam into mlx-lm: `attach` gives a model compressed caches, `detach` takes them away.

After `attach`, mlx-lm's own `make_prompt_cache(model)` returns compressed caches, so everything in
mlx-lm that makes or takes a prompt cache runs on them unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mlxkv import calibrated
from mlxkv.adaptive import AdaptiveKVCache
from mlxkv.artifact import Calibration
from mlxkv.cache import CompressedKVCache
from mlxkv.calibrated import Attached
from mlxkv.config import CacheConfig, parse_kv
from mlxkv.errors import UserError
from mlxkv.models.calibrations import fit
from mlxkv.models.decoders import with_kernels
from mlxkv.models.fold import Fold, fold_values
from mlxkv.models.layers import (
    LayerReport,
    examine,
    left_out,
    nothing_compressed,
    ranges,
    with_searched,
)
from mlxkv.models.probe import put
from mlxkv.models.rebind import Slot, bind, release
from mlxkv.presets import PRESETS

_MARK = "_mlxkv_attachment"
_MAKE = "make_cache"


@dataclass(frozen=True)
class _Attachment:
    """What `attach` changed. before: the instance's own make_cache, if it had one. entry: what its
    caches know of it. fold: the weights that were replaced, or None."""

    slots: list[Slot]
    before: Callable[[], list] | None
    entry: Attached
    fold: Fold | None = None


def attach(
    model: nn.Module,
    kv: str | CacheConfig,
    strict: bool = False,
    calibration: Calibration | Path | str | None = None,
    fold: bool = False,
    group: mx.distributed.Group | None = None,
) -> list[LayerReport]:
    """Compress the KV cache of `model` (any model of mlx-lm) as `kv` says: a preset's name, a pair,
    or a configuration.

    Returns one report per cache. Attaching again replaces what was attached. A configuration that
    compresses nothing (`fp16`) leaves mlx-lm's own caches. The `max_kv_size` of make_prompt_cache
    has no effect on an attached model.

    calibration: for a preset that needs one, a file or `owner/name` on the hub; by default the one
    that came with the model, or the user's own, or one that is made on the spot, for models that
    `mlxkv.models.load` has loaded.

    fold: turn values by the weights of the model, where they are plain linear maps, instead of at
    run time; the reports say where and why not. Same tokens within rounding. The weights that are
    replaced stay in memory (`folded_bytes`), and `detach` puts them back. mlx-lm's own caches that
    were filled before hold values that this model no longer reads; ours follow.

    group: the processes over which `model.shard(group)` of mlx-lm is to spread the model, afterwards:
    caches hold this process's kv heads, and calibrated maps are cut to them.

    Raises UserError for an unknown preset and a calibration that does not fit; with `strict` also
    if any layer whose cache grows with the context would stay in full precision. Then the model is
    left as it was. Without `strict`, warns if nothing at all is compressed.
    """
    config, label = parse_kv(kv) if isinstance(kv, str) else kv, name_of(kv)
    check_fold(config, label, fold)
    own = own_make_cache(model)
    slots = bind(model)
    try:
        reports, places = examine(model, own, config, label)
        if strict:
            _insist(model, reports, label)
        fitted = _shares(fit(model, config, places, label, calibration), group, fold)
    except BaseException:
        release(slots)
        raise
    detach(model)
    reports = with_searched(reports, config, {p: own for p, (own, _) in fitted.items()})
    if not places:
        release(slots)
        if message := nothing_compressed(reports):
            warnings.warn(f"[attach] {message}", stacklevel=2)
        return reports

    folded = None
    if fold:
        try:
            folded = fold_values(model, own, {p: turns for p, (_, turns) in fitted.items()})
        except BaseException:
            release(slots)
            raise
        fitted = {
            p: (one, calibrated.folded(turns, p in folded.arrays))
            for p, (one, turns) in fitted.items()
        }
        reports = [_with_fold(report, folded) for report in reports]
    try:
        reports = with_kernels(reports, {p: (fitted[p], shape) for p, shape in places.items()})
    except BaseException:  # a user who does not want to wait for the compiler
        if folded is not None:
            folded.swap(False)
        release(slots)
        raise

    def make_cache() -> list:
        caches = own()
        for place in places:
            put(
                caches,
                place,
                (AdaptiveKVCache if config.listens else CompressedKVCache)(*fitted[place]),
            )
        return caches

    entry = calibrated.enter(turns for _, turns in fitted.values() if turns is not None)
    attachment = _Attachment(slots, vars(model).get(_MAKE), entry, folded)
    setattr(model, _MARK, attachment)
    setattr(model, _MAKE, make_cache)
    return reports


def _shares(fitted: dict, group: mx.distributed.Group | None, fold: bool) -> dict:
    """The rotations of this process's kv heads."""
    if group is None or group.size() == 1:
        return fitted
    if fold:
        raise UserError(
            f"[--fold] turns the weights of a whole model; got a group of {group.size()} processes; "
            "leave one of them out"
        )
    cut = {}
    for place, (config, turns) in fitted.items():
        own = turns and calibrated.cut(turns, group.rank(), group.size())
        cut[place] = config, own
    return cut


def check_fold(config: CacheConfig, label: str, fold: bool) -> None:
    """Raises UserError where there is nothing to fold."""
    if fold and (not config.values.calibrated or config.values.low):
        found = ((name, one.values) for name, one in PRESETS.items())
        choices = ", ".join(name for name, side in found if side.calibrated and not side.low)
        raise UserError(
            f"[--fold] folds calibrated maps of values into the weights; got {label}, which has "
            f"none; choose from {choices}"
        )


def _with_fold(report: LayerReport, folded: Fold) -> LayerReport:
    own = [place for place in folded.reasons if place[0] == report.index]
    if not own or not report.compressed:
        return report
    worst = min(own, key=lambda place: place in folded.arrays)
    return replace(report, fold=folded.reasons[worst])


def name_of(kv: str | CacheConfig) -> str:
    """What reports call `kv`: its own name, or what its sides do."""
    return kv.strip() if isinstance(kv, str) else f"{kv.keys.label} / {kv.values.label}"


def detach(model: nn.Module) -> None:
    """Undo `attach`; nothing happens to a model that is not attached."""
    attachment = vars(model).get(_MARK)
    if attachment is None:
        return
    delattr(model, _MARK)
    delattr(model, _MAKE)
    if attachment.before is not None:
        setattr(model, _MAKE, attachment.before)
    if attachment.fold is not None:
        attachment.fold.undo()
    calibrated.leave(attachment.entry)
    release(attachment.slots)


def folded_bytes(model: nn.Module) -> int:
    """Memory of the weights that `attach(fold=True)` replaced and keeps for `detach`."""
    attachment = vars(model).get(_MARK)
    return attachment.fold.kept_bytes if attachment and attachment.fold else 0


@contextmanager
def plain_weights(model: nn.Module) -> Iterator[None]:
    """Inside, the model has the weights that it had before `attach`: for what looks at values."""
    attachment = vars(model).get(_MARK)
    folded = attachment and attachment.fold
    if not folded:
        yield
        return
    folded.swap(False)
    try:
        yield
    finally:
        folded.swap(True)


def on_plain_weights(function: Callable) -> Callable:
    """For functions of (model, ...) that have to see the weights as they were before `attach`."""

    @wraps(function)
    def wrapped(model: nn.Module, *args, **kwargs):
        with plain_weights(model):
            return function(model, *args, **kwargs)

    return wrapped


def own_make_cache(model: nn.Module) -> Callable[[], list]:
    """The model's own way to make its caches, as `make_prompt_cache` would find it without us."""
    attachment = vars(model).get(_MARK)
    if attachment is None:
        make = getattr(model, _MAKE, None)
    else:
        inherited = getattr(type(model), _MAKE, None)
        make = attachment.before or (inherited and inherited.__get__(model))
    return make or (lambda: [KVCache() for _ in model.layers])


def _insist(model: nn.Module, reports: list[LayerReport], label: str) -> None:
    if not (out := left_out(reports)):
        return
    name = getattr(model, "model_type", type(model).__name__)
    where = ranges([report.index for report in out])
    raise UserError(
        f"[--kv-strict] layers {where} of {name} stay in full precision; got {label}; "
        f"{out[0].reason}; choose another preset, or leave --kv-strict out"
    )
