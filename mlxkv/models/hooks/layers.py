"""Which layers of a model are compressed, and why the others are not: never silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.nn as nn
from mlx_lm._version import __version__ as mlx_lm_version

from mlxkv.formats.config import CacheConfig
from mlxkv.models.catalog.reports import (
    ASKED_FOR,
    CAPPED,
    LATENT,
    SINKS,
    UNKNOWN,
    LayerReport,
    compressed,
    of_latents,
    with_own,
)
from mlxkv.models.hooks import latent
from mlxkv.models.hooks.probe import Findings, Place, Shape, leaves, probe
from mlxkv.models.hooks.rebind import files_of
from mlxkv.models.hooks.refused import refusal


@dataclass(frozen=True)
class Rule:
    """What a cache class of mlx-lm says about its layer; `{...}` is an attribute of the cache."""

    kind: str
    grows: bool
    reason: str


PLAIN = "KVCache"  # the class that ours replace
RULES = {
    PLAIN: Rule("full attention", True, ""),
    "RotatingKVCache": Rule("sliding window {max_size}", False, "small by nature"),
    "ChunkedKVCache": Rule("chunks of {chunk_size}", False, "never more than one chunk"),
    "ArraysCache": Rule("state space or linear attention", False, "constant size"),
    "MambaCache": Rule("state space or linear attention", False, "constant size"),
}


def find(model: nn.Module, make_cache: Callable[[], list]) -> Findings:
    """Find what the plain caches of `make_cache()` hold, and why some cannot be replaced by ours.

    The attention function must be rebound (`rebind.bind`).
    """
    plain = [place for place, cache in leaves(make_cache()) if type(cache).__name__ == PLAIN]
    if refused := refusal([file.__name__ for file in files_of(model)], mlx_lm_version):
        return Findings({}, dict.fromkeys(plain, refused))
    return latent.find(model, make_cache, plain) or probe(model, make_cache, plain)


def examine(
    model: nn.Module, make_cache: Callable[[], list], config: CacheConfig, label: str
) -> tuple[list[LayerReport], dict[Place, Shape]]:
    """Decide which caches of `make_cache()` are compressed. Returns a report for each layer, and the
    places of compressed caches with their shapes.

    label: the name of `config` in reports. The attention function must be rebound (`rebind.bind`).
    """
    caches = leaves(make_cache())
    shapes: dict[Place, Shape] = {}
    if not config.compresses:
        reasons = {place: ASKED_FOR for place, _ in caches}
    else:
        found = find(model, make_cache)
        shapes, reasons = found.shapes, found.refused

    by_layer: dict[int, list[LayerReport]] = {}
    chosen = {}
    for place, cache in caches:
        shape, reason = shapes.get(place), reasons.get(place)
        if config.centred and shape is not None and (shape.sinks or shape.softcap):
            shape, reason = None, SINKS if shape.sinks else CAPPED
        report = _judge(place[0], cache, shape, reason, config, label)
        if report.compressed:
            chosen[place] = shapes[place]
        by_layer.setdefault(place[0], []).append(report)
    return [_merge(parts) for parts in by_layer.values()], chosen


def _judge(
    index: int, cache, shape: Shape | None, reason: str | None, config: CacheConfig, label: str
) -> LayerReport:
    name = type(cache).__name__
    rule = RULES.get(name) or Rule(f"cache of class {name}", True, "mlxkv does not know this class")
    kind = rule.kind.format_map(vars(cache))
    if reason == latent.INDEX_KEYS:
        kind = latent.INDEX_KEYS
    if shape is not None and shape.latent:
        if reason := config.why_no_latents:
            return LayerReport(index, LATENT, False, reason)
        of, sizes = config.of_latents, (1, shape.key_dim, shape.value_dim)
        return compressed(index, LATENT, of, of_latents(config, label), sizes, UNKNOWN)
    if shape is None:
        return LayerReport(index, kind, False, reason or rule.reason, grows=rule.grows)
    sizes = (shape.heads, shape.key_dim, shape.value_dim)
    return compressed(index, kind, config, label, sizes, UNKNOWN)


def _merge(parts: list[LayerReport]) -> LayerReport:
    """One report for a layer with several caches: the one of a cache that grows, if there is one."""
    if len(parts) == 1:
        return parts[0]
    growing = [part for part in parts if part.grows and part.kind != latent.INDEX_KEYS] or parts
    worst = min(growing, key=lambda part: part.compressed)
    return replace(worst, kind=" + ".join(dict.fromkeys(part.kind for part in parts)))


def with_searched(
    reports: list[LayerReport], config: CacheConfig, used: dict[Place, CacheConfig]
) -> list[LayerReport]:
    """The reports with the clips and ranks that a calibration gives each layer. used: configs by place."""
    found = {place[0]: own for place, own in used.items()}
    return [with_own(r, config, found[r.index]) if r.compressed else r for r in reports]
