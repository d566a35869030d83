"""Which layers of a model are compressed, and why the others are not: never silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby

import mlx.nn as nn
from mlx_lm import __version__ as mlx_lm_version

from mlxkv.config import CacheConfig
from mlxkv.console import human_bytes
from mlxkv.models.probe import Findings, Place, Shape, leaves, probe
from mlxkv.models.rebind import files_of
from mlxkv.models.refused import refusal

ASKED_FOR = "as asked for"
OPS, FAST, UNKNOWN = "plain ops", "mx.fast", "not known yet"
FOLDED = "folded"


@dataclass(frozen=True)
class LayerReport:
    """What happens to the cache of one layer.

    index: position in the model's list of caches (its layers, less those that have no cache of
    their own).
    kind: what sort of layer it is. reason: the preset if compressed, else why not.
    bits_per_value: stored bits per value inside the pages, 16 for what is kept in full precision.
    kernel: what computes attention (`decoders.with_kernels` finds it out). grows: the cache grows with the context.
    kv_heads, key_dim, value_dim: sizes of a compressed layer, 0 for others.
    fold: "folded" where the weights turn the values, why they do not where that was asked for.
    clips: of keys and values, where the model's calibration has other ones than the preset.
    bases: bytes of the bases of a cache of low rank that follows the text, which come on top.
    """

    index: int
    kind: str
    compressed: bool
    reason: str
    bits_per_value: float = 16.0
    kernel: str = FAST
    grows: bool = True
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    fold: str = ""
    clips: tuple[float, float] | None = None
    bases: int = 0


@dataclass(frozen=True)
class Rule:
    """What a cache class of mlx-lm says of its layer; `{...}` is an attribute of the cache."""

    kind: str
    grows: bool
    reason: str


PLAIN = "KVCache"  # the one that we replace
RULES = {
    PLAIN: Rule("full attention", True, ""),
    "RotatingKVCache": Rule("sliding window {max_size}", False, "small by nature"),
    "ChunkedKVCache": Rule("chunks of {chunk_size}", False, "never more than one chunk"),
    "ArraysCache": Rule("state space or linear attention", False, "constant size"),
    "MambaCache": Rule("state space or linear attention", False, "constant size"),
}


def find(model: nn.Module, make_cache: Callable[[], list]) -> Findings:
    """What the plain caches of `make_cache()` hold, and why some cannot be replaced by ours.

    The attention function must be rebound (`rebind.bind`).
    """
    plain = [place for place, cache in leaves(make_cache()) if type(cache).__name__ == PLAIN]
    if refused := refusal([file.__name__ for file in files_of(model)], mlx_lm_version):
        return Findings({}, dict.fromkeys(plain, refused))
    return probe(model, make_cache, plain)


def examine(
    model: nn.Module, make_cache: Callable[[], list], config: CacheConfig, label: str
) -> tuple[list[LayerReport], dict[Place, Shape]]:
    """Decide for every cache of `make_cache()`. Returns one report each, and the places to fill
    with ours, with what they hold.

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
        report = _judge(place[0], cache, shapes.get(place), reasons.get(place), config, label)
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
    if shape is not None:
        reason = config.why_not(shape.key_dim, shape.value_dim)
    if shape is None or reason:
        return LayerReport(index, kind, False, reason or rule.reason, grows=rule.grows)
    bits = config.bits_per_value(shape.key_dim, shape.value_dim)
    label += config.keys.note(shape.key_dim)
    sizes = (shape.heads, shape.key_dim, shape.value_dim)
    return LayerReport(index, kind, True, label, bits, UNKNOWN, True, *sizes)


def _merge(parts: list[LayerReport]) -> LayerReport:
    """One report for a layer with several caches: that of the one that grows, if there is one."""
    if len(parts) == 1:
        return parts[0]
    growing = [part for part in parts if part.grows] or parts
    worst = min(growing, key=lambda part: part.compressed)
    return replace(worst, kind=" + ".join(dict.fromkeys(part.kind for part in parts)))


def with_searched(
    reports: list[LayerReport], config: CacheConfig, used: dict[Place, CacheConfig]
) -> list[LayerReport]:
    """The reports, with the clips of layers that have other ones than `config`, and the bits that the
    rank takes which a layer's energy has asked for."""

    def clips(one: CacheConfig) -> tuple[float, ...]:
        return tuple(getattr(side.quantizer, "clip", 1.0) for side in (one.keys, one.values))

    found = {place[0]: own for place, own in used.items()}

    def searched(report: LayerReport) -> LayerReport:
        if not report.compressed:
            return report
        own, dims = found[report.index], (report.key_dim, report.value_dim)
        return replace(
            report,
            clips=clips(own) if clips(own) != clips(config) else None,
            bits_per_value=own.bits_per_value(*dims),
            bases=own.basis_bytes(report.kv_heads, *dims),
        )

    return [searched(report) for report in reports]


def left_out(reports: list[LayerReport]) -> list[LayerReport]:
    """The layers that grow and stay in full precision, though compression was asked for."""
    return [r for r in reports if r.grows and not r.compressed and r.reason != ASKED_FOR]


def summarise(reports: list[LayerReport]) -> list[str]:
    """One line per kind of layer, and first of all a loud one if nothing at all is compressed."""
    lines = []
    groups: dict[tuple, list[LayerReport]] = {}
    for r in reports:
        key = (r.kind, r.compressed, r.reason, r.bits_per_value, r.kernel, r.fold, r.bases)
        groups.setdefault(key, []).append(r)
    for (kind, compressed, reason, bits, kernel, fold, bases), members in groups.items():
        indices = [r.index for r in members]
        name = "layer" if len(indices) == 1 else "layers"
        what = (
            f"{reason}, {bits:.3g} bits per value, {kernel}{_clips(members)}"
            if compressed
            else f"full precision, {reason}"
        )
        if bases:
            what += f", on top bases of {human_bytes(bases)} per cache"
        if fold == FOLDED:
            what += ", values turned by the weights"
        elif fold:
            what += f", values turned at run time ({fold})"
        lines.append(f"{name} {ranges(indices)} ({kind}): {what}")
    if silent := nothing_compressed(reports):
        lines.insert(0, silent)
    return lines


def _clips(reports: list[LayerReport]) -> str:
    """Searched clips of layers that are reported in one line, as ranges."""
    if not (found := [r.clips for r in reports if r.clips]):
        return ""
    keys, values = (
        "-".join(f"{x:g}".lstrip("0") for x in sorted({min(side), max(side)}))
        for side in zip(*found, strict=True)
    )
    return f", searched clips {keys} / {values}"


def nothing_compressed(reports: list[LayerReport]) -> str | None:
    """The line to say if no layer is compressed though that was asked for, or None."""
    if any(r.compressed or r.reason == ASKED_FOR for r in reports):
        return None
    out = left_out(reports)
    why = out[0].reason if out else "no layer of this model has a cache that grows with the context"
    return f"NOTHING IS COMPRESSED: {why}"


def ranges(indices: list[int]) -> str:
    """[0, 1, 2, 5, 7, 8] -> "0-2, 5, 7-8"."""
    runs = []
    for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        runs.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(runs)
