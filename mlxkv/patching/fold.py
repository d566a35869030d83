"""Fold the map of values into a model's weights (OSCAR, section 1.3 of its code; QuaRot).

For a kv head with maps (down, up) [D, D] (stored = v @ down, v = stored @ up; of a rotation up is
down^T): its rows of W_v become down^T W_v, its bias b down; the columns of W_o that belong to its
query heads become W_o up^T. The cache is then given v down, and the output of attention needs no
map. Products are computed in float32 and cast back to the dtype of the weights.

Weights are found by value, not by name: by a dry run, the map that returns exactly the values passed to a cache and the
one whose input is exactly the output of attention. A second run checks that the model's outputs are unchanged. Folding
is permanent: the model records it, and `attach`, calibration and saved caches read this record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import mlx.nn as nn

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.selftest import relative_rms
from mlxkv.catalog.reports import FOLDED
from mlxkv.codec import maps
from mlxkv.codec.maps import LayerMaps
from mlxkv.codec.transform import Transform
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.patching.trees import Place, leaves

if TYPE_CHECKING:
    from mlxkv.patching.projections import DryRun
    from mlxkv.patching.record import LinearCall

# Largest relative rms change of an output projection or of the logits that counts as rounding.
# Measured on a CPU at up to 24 layers: 1.4e-6, 2.4e-3, 0.025; with heads mixed up: 1.3. Float32 leaves
# room for GPUs that round the factors of products.
BOUNDS = {mx.float32: 5e-3, mx.float16: 3e-2, mx.bfloat16: 0.15}
_FOLD = "_mlxkv_fold"

Replaced = list[tuple[nn.Module, str, mx.array]]  # a linear map, the name of its array, the array


class NotFolded(Exception):
    """The reason why the values of a cache stay transformed at run time."""


@dataclass(frozen=True)
class Site:
    """The linear maps before and after the values of one cache.

    source: its output is [B, L, blocks, D], and block blocks[g] is the value of kv head g (a fused
    projection has other blocks too). target: its input is [B, L, H * D].
    """

    source: nn.Linear
    blocks: tuple[int, ...]
    target: nn.Linear


@dataclass(frozen=True)
class Fold:
    """The transforms that a model's weights apply to values. layer_maps: by folded cache. reasons: by tried cache,
    FOLDED or why not."""

    layer_maps: dict[Place, LayerMaps]
    reasons: dict[Place, str]

    def check(self, place: Place, rotations: LayerMaps) -> None:
        """Raise UserError unless `rotations` match the transform in the weights."""
        have = self.layer_maps.get(place)
        if have is not None and _values_map(have) != _values_map(rotations):
            raise UserError(
                f"[fold] the weights of this model transform values by {have.kinds[1]} maps of calibration "
                f"{have.digest}; got {rotations.kinds[1]} maps of {rotations.digest}; load the model "
                "again for another calibration or kind of preset"
            )


def fold_of(model: nn.Module) -> Fold | None:
    """Return the recorded fold of `model`, or None."""
    return vars(model).get(_FOLD)


def refuse_folded(model: nn.Module, command: str) -> None:
    """Raise UserError if the weights of `model` transform values: `command` needs plain values."""
    if fold_of(model) is not None:
        raise UserError(
            f"[{command}] the weights of this model transform values (fold); got folded values; load the "
            "model again without fold"
        )


def check_maps(
    model: nn.Module, fitted: Mapping[Place, tuple[CacheConfig, LayerMaps | None]]
) -> None:
    """Raise UserError if the value maps of caches differ from those folded into the weights."""
    if (fold := fold_of(model)) is not None:
        for place, (config, rotations) in fitted.items():
            if rotations is not None and config.values.calibrated:
                fold.check(place, rotations)


def as_folded(
    model: nn.Module, fitted: Mapping[Place, tuple[CacheConfig, LayerMaps | None]]
) -> dict[Place, tuple[CacheConfig, LayerMaps | None]]:
    """Return `fitted` with value maps marked as folded where the weights apply them."""
    fold = fold_of(model)
    return {
        place: (
            config,
            rotations and maps.folded(rotations, _weights_transform(fold, place, config)),
        )
        for place, (config, rotations) in fitted.items()
    }


def match_fold(model: nn.Module, caches: list) -> None:
    """Transform the values of `caches`, possibly of a differently folded model, to those that `model` reads.

    Raises UserError if the caches were made with another calibration than the weights.
    """
    fold = fold_of(model)
    for place, cache in leaves(caches):
        if isinstance(cache, CompressedKVCache) and cache.layer_maps is not None:
            if fold is not None and cache.config.values.calibrated:
                fold.check(place, cache.layer_maps)
            cache.transform_values(_weights_transform(fold, place, cache.config))


def _weights_transform(fold: Fold | None, place: Place, config: CacheConfig) -> bool:
    return fold is not None and place in fold.layer_maps and config.values.calibrated


def _values_map(rotations: LayerMaps) -> tuple[str, str, str]:
    return rotations.digest, rotations.layer, rotations.kinds[1]


def fold_values(model: nn.Module, rotations: Mapping[Place, LayerMaps]) -> Fold:
    """Fold all possible maps, record the fold on the model and return it, with reasons for the other caches.

    The attention function must be patched. A folded model is left unchanged. An error in the model's own code becomes
    a reason and is not raised.
    """
    if (fold := fold_of(model)) is not None:
        return fold
    from mlxkv.patching.projections import run_dry

    places, reasons = list(rotations), {}
    try:
        plain = run_dry(model, places)
    except Exception as error:  # a foreign model may raise any error
        reason = f"a dry run of the model failed ({type(error).__name__})"
        return Fold({}, dict.fromkeys(places, reason))
    sites = {}
    for place in places:
        try:
            sites[place] = _site(plain, place)
        except NotFolded as refused:
            reasons[place] = str(refused)
    for place in _shared(sites):
        del sites[place]
        reasons[place] = "its weights serve other layers too"
    replaced: dict[Place, Replaced] = {}
    try:
        for place, site in sites.items():
            replaced[place] = _replace(site, rotations[place].values)
        reasons |= _check(replaced, plain, lambda: run_dry(model, places), sites)
    except BaseException:
        _put_back(replaced, list(replaced))
        raise
    reasons |= dict.fromkeys(replaced, FOLDED)
    # Store folded maps: plain ones kept alive would look like those of a plain model (`maps.reads_folded`).
    out = Fold({place: maps.folded(rotations[place]) for place in replaced}, reasons)
    if replaced:
        setattr(model, _FOLD, out)
    return out


def _put_back(replaced: dict[Place, Replaced], places: list[Place]) -> None:
    for place in places:
        for module, name, array in replaced.pop(place):
            module[name] = array


def _site(dry_run: DryRun, place: Place) -> Site:
    """Find the maps around one cache. Raises NotFolded."""
    trace = dry_run.traces[place]
    if not trace.is_read_once:
        raise NotFolded("its values are read more than once")
    source, blocks = _source(trace.sources, trace.values[0])
    target = trace.output_projection()
    if target is None:
        raise NotFolded("a gate or a norm comes between attention and its output projection")
    return Site(_plain(source, "values"), blocks, _plain(target, "outputs"))


def _plain(module: nn.Module, role: str) -> nn.Linear:
    """Return `module`. Raises NotFolded if it is not a plain linear map."""
    if type(module) is nn.Linear:
        return module
    kind = type(module).__name__
    kind = "are quantised" if "Quantized" in kind else f"belong to a {kind}"
    raise NotFolded(f"the weights of {role} {kind}")


def _source(linears: list[LinearCall], values: mx.array) -> tuple[nn.Module, tuple[int, ...]]:
    """Return the nearest linear map whose output holds `values` [1, G, T, D], and the blocks that hold them."""
    _, heads, count, dims = values.shape
    for module, _, y in reversed(linears):
        if y.shape[:-1] != (1, count) or y.shape[-1] % dims or y.shape[-1] < heads * dims:
            continue
        blocks = y.astype(values.dtype).reshape(count, -1, dims).swapaxes(0, 1)  # [blocks, T, D]
        match = (blocks[None] == values[0][:, None]).all(axis=(2, 3))  # [G, blocks]
        rows = cast(list[list[bool]], match.tolist())
        columns = [[b for b, yes in enumerate(row) if yes] for row in rows]
        if not all(columns):
            continue
        if any(len(row) > 1 for row in columns) or len({row[0] for row in columns}) < heads:
            raise NotFolded("kv heads share one value")
        return module, tuple(row[0] for row in columns)
    raise NotFolded(
        "values are not the output of a linear map (a norm or another change comes first)"
    )


def _shared(sites: Mapping[Place, Site]) -> list[Place]:
    """Return the places that share a linear map with another place."""
    ids = [id(m) for site in sites.values() for m in (site.source, site.target)]
    return [
        p for p, s in sites.items() if max(ids.count(id(s.source)), ids.count(id(s.target))) > 1
    ]


def _replace(site: Site, transform: Transform) -> Replaced:
    """Fold maps [D, D] or [G, D, D] into both linear maps. Returns the replaced arrays."""
    heads, dims = len(site.blocks), transform.down.shape[-1]
    down, up = (mx.broadcast_to(x, (heads, dims, dims)) for x in (transform.down, transform.up))
    rows = mx.array(site.blocks)

    def source(x: mx.array) -> mx.array:  # [blocks * D, hidden], or a bias with hidden = 1
        parts = x.astype(mx.float32).reshape(-1, dims, x.size // x.shape[0])
        parts[rows] = down.swapaxes(-1, -2) @ parts[rows]
        return parts.reshape(x.shape)

    def target(x: mx.array) -> mx.array:  # [hidden, H * D]: query heads of a kv head are adjacent
        parts = x.astype(mx.float32).reshape(x.shape[0], heads, -1, dims).swapaxes(0, 1)
        transformed_parts = parts.reshape(heads, -1, dims) @ up.swapaxes(-1, -2)
        return transformed_parts.reshape(parts.shape).swapaxes(0, 1).reshape(x.shape)

    plan = [(site.source, "weight", source), (site.target, "weight", target)]
    if "bias" in site.source:
        plan.append((site.source, "bias", source))
    # On the CPU: GPUs may round the factors of float32 products to 11 bits.
    with mx.stream(mx.cpu):
        out = [
            (m, name, m[name], change(m[name]).astype(m[name].dtype)) for m, name, change in plan
        ]
        mx.eval([transformed for *_, transformed in out])  # one layer's float32 copies at a time
    for module, name, _, transformed in out:
        module[name] = transformed
    return [(module, name, array) for module, name, array, _ in out]


def _check(
    replaced: dict[Place, Replaced],
    plain: DryRun,
    rerun: Callable[[], DryRun],
    sites: Mapping[Place, Site],
) -> dict[Place, str]:
    """Undo folds that change the model beyond rounding, those of the places responsible first. Returns the reasons by
    place; `replaced` keeps the remaining folds."""
    bounds = {}  # for the coarsest dtype of weights and values
    for place, site in sites.items():
        arrays = site.source.weight, site.target.weight, plain.traces[place].values[0]
        bounds[place] = max(BOUNDS.get(x.dtype, 0.0) for x in arrays)
    reasons = {}
    while replaced:
        folded = rerun()
        for place in list(replaced):
            pair = (_output(dry_run, place, sites[place].target) for dry_run in (folded, plain))
            change = relative_rms(*pair)
            if not change <= bounds[place]:
                break
        else:
            change = relative_rms(folded.logits, plain.logits)
            if not change <= max(bounds[place] for place in replaced):
                places = list(replaced)
                _put_back(replaced, places)
                reasons |= dict.fromkeys(places, f"the model's output changed by {change:.0%}")
            return reasons
        _put_back(replaced, [place])
        reasons[place] = f"the output of its attention changed by {change:.0%}"
    return reasons


def _output(dry_run: DryRun, place: Place, target: nn.Module) -> mx.array:
    return next(y for module, _, y in dry_run.traces[place].readers if module is target)
