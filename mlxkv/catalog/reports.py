"""Reports of each layer's cache, and their lines. No framework is imported here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from mlxkv.console import human_bytes
from mlxkv.formats.config import CacheConfig

if TYPE_CHECKING:
    from mlxkv.cache.choose import KernelPlan

ASKED_FOR = "as asked for"
FAST, UNKNOWN = "mx.fast", "not known yet"
FOLDED = "folded"
# Why keys cannot be stored without their mean.
SINKS = "sink logits do not allow keys without their mean"
LATENT = "latent attention"
CAPPED = "capped scores do not all shift alike, as keys without their mean ask for"


@dataclass(frozen=True)
class LayerReport:
    """The treatment of one layer's cache.

    index: position in the model's list of caches; layers without a cache of their own do not count.
    kind: the sort of layer. reason: the preset if compressed, else why not.
    bits_per_value: stored bits per value inside the pages, 16 in full precision.
    attention: the attention code, if there is no plan. plan: the code that quantizes and reads its pages, and why no
    faster one; of several caches, that of one without kernels. grows: the cache grows with the context.
    kv_heads, key_dim, value_dim: sizes of a compressed layer;
        0 for others.
    fold: "folded" if the weights transform the values; the reason if folding was requested but not done.
    clips: of keys and values, if the calibration's differ from the preset's.
    bases: additional bytes for the bases of an online low-rank cache.
    """

    index: int
    kind: str
    compressed: bool
    reason: str
    bits_per_value: float = 16.0
    attention: str = FAST
    grows: bool = True
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    fold: str = ""
    clips: tuple[float, float] | None = None
    bases: int = 0
    plan: KernelPlan | None = None

    @property
    def kernel(self) -> str:
        """Return the attention code as printed in reports."""
        return self.attention if self.plan is None else self.plan.text

    def as_dict(self) -> dict:
        """Return plain data for `--json` and /v1/kv."""
        out = {"kernel" if name == "attention" else name: x for name, x in vars(self).items()}
        del out["plan"]
        return out | {"kernel": self.kernel}


def compressed(
    index: int,
    kind: str,
    config: CacheConfig,
    label: str,
    sizes: tuple[int, int, int],
    attention: str,
) -> LayerReport:
    """Return the report of a layer that `config` compresses, or the reason why its heads cannot be.

    label: the name of `config`. sizes: kv heads, key dim, value dim.
    """
    _, *dims = sizes
    if reason := config.why_not(*dims):
        return LayerReport(index, kind, False, reason)
    bits = config.bits_per_value(*dims)
    return LayerReport(index, kind, True, label, bits, attention, True, *sizes)


def of_latents(config: CacheConfig) -> str:
    """Return the reason column for a layer with latents: the name of `config`, and the keys' format if the values'
    differs."""
    keys, values = config.keys.quantizer, config.values.quantizer
    as_keys = "" if keys.code_bits == values.code_bits else f" ({config.keys.label}, as its keys)"
    rotary = "exact" if config.of_latents.rotary == 16 else "int8"
    return f"latent {config.label}{as_keys}, rotary keys {rotary}"


def with_own(report: LayerReport, config: CacheConfig, fitted: CacheConfig) -> LayerReport:
    """Return the report of a compressed layer whose calibration changed `config` to `fitted`: its clips, and the bits
    of the rank needed for its energy."""
    dims = report.key_dim, report.value_dim
    clips = _clips_of(fitted)
    return replace(
        report,
        clips=clips if clips != _clips_of(config) else None,
        bits_per_value=fitted.bits_per_value(*dims),
        bases=fitted.basis_bytes(report.kv_heads, *dims),
    )


def _clips_of(config: CacheConfig) -> tuple[float, ...]:
    return tuple(getattr(side.quantizer, "clip", 1.0) for side in (config.keys, config.values))


def left_out(reports: list[LayerReport]) -> list[LayerReport]:
    """Return the growing layers left in full precision although compression was requested."""
    return [r for r in reports if r.grows and not r.compressed and r.reason != ASKED_FOR]


def summarise(reports: list[LayerReport]) -> list[str]:
    """Return one line per kind of layer, after a warning if no layer is compressed."""
    lines = []
    groups: dict[tuple, list[LayerReport]] = {}
    for r in reports:
        key = (r.kind, r.compressed, r.reason, r.kernel, r.fold, r.bases)
        groups.setdefault(key, []).append(r)
    for (kind, compressed, reason, kernel, fold, bases), members in groups.items():
        indices = [r.index for r in members]
        name = "layer" if len(indices) == 1 else "layers"
        treatment = (
            f"{reason}, {_bits(members)}, {kernel}{_clips(members)}"
            if compressed
            else f"full precision, {reason}"
        )
        if bases:
            treatment += f", on top bases of {human_bytes(bases)} per cache"
        if fold == FOLDED:
            treatment += ", values transformed by the weights"
        elif fold:
            treatment += f", values transformed at run time ({fold})"
        lines.append(f"{name} {ranges(indices)} ({kind}): {treatment}")
    if silent := nothing_compressed(reports):
        lines.insert(0, silent)
    return lines


def _bits(reports: list[LayerReport]) -> str:
    """Return the bits per value of layers that share a line: range and mean over all values if they differ."""
    bits = [r.bits_per_value for r in reports]
    if min(bits) == max(bits):
        return f"{bits[0]:.3g} bits per value"
    sizes = [r.kv_heads * (r.key_dim + r.value_dim) for r in reports]
    mean = sum(x * size for x, size in zip(bits, sizes, strict=True)) / sum(sizes)
    return f"{min(bits):.3g} to {max(bits):.3g} bits per value, {mean:.3g} on average"


def _clips(reports: list[LayerReport]) -> str:
    """Return the searched clips of layers that share a line, as ranges."""
    if not (pairs := [r.clips for r in reports if r.clips]):
        return ""
    keys, values = (
        "-".join(f"{x:g}".lstrip("0") for x in sorted({min(side), max(side)}))
        for side in zip(*pairs, strict=True)
    )
    return f", searched clips {keys} / {values}"


def nothing_compressed(reports: list[LayerReport]) -> str | None:
    """Return a warning if compression was requested but no layer is compressed, or None."""
    out, is_deliberate = left_out(reports), any(r.reason == ASKED_FOR for r in reports)
    if any(r.compressed for r in reports) or (is_deliberate and not out):
        return None
    reason = (
        out[0].reason if out else "no layer of this model has a cache that grows with the context"
    )
    return f"NOTHING IS COMPRESSED: {reason}"


def ranges(indices: list[int]) -> str:
    """Format indices: [0, 1, 2, 5, 7, 8] -> "0-2, 5, 7-8"."""
    runs = []
    for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        runs.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(runs)
