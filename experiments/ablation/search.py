"""Search the best preset of each width: transforms, codes, groups, clips, keys against values,
protected layers. All arms have the same windows and the model's calibration; judged like `parts`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.ablation import parts
from experiments.ablation.asked import Asked
from mlxkv import console
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.tasks.part import Progress, Results
from mlxkv.formats.calibration.artifact import SIDES
from mlxkv.formats.codebook import Codebook
from mlxkv.formats.config import BALANCED, CALIBRATED, SPREAD, Affine, CacheConfig, Quantizer, Side
from mlxkv.formats.tile import DualScale
from mlxkv.models import load
from mlxkv.models.hooks.held import layers_of
from mlxkv.models.hooks.probe import leaves, put

SINK, RECENT = 64, 64
COLUMNS = ("codes", "bits", *parts.COLUMNS, *parts.ASKED)
MORE = {4: 8, 3: 4, 2: 3}  # the next width, for protected layers
SPLITS = ((4, 3), (4, 2), (3, 2), (2, 3))  # bits of keys, of values


@dataclass(frozen=True)
class Arm:
    """A candidate. protected: layers that store the next width, by their number among the compressed
    ones (-1 is the last)."""

    config: CacheConfig
    protected: tuple[int, ...] = ()


def affine(bits: int, group: int, clip: float = 1.0, transform: str = BALANCED) -> Side:
    return Side(Affine(bits, group, clip=clip), transform, own_clip=True)


def both(keys: Side, values: Side | None = None, page: int = 64) -> CacheConfig:
    return CacheConfig(keys, values or keys, SINK, RECENT, page)


def coded(keys: Quantizer, values: Quantizer | None = None, how: str = BALANCED) -> CacheConfig:
    tiles = any(isinstance(x, DualScale) for x in (keys, values))
    return both(Side(keys, how), Side(values or keys, how), 128 if tiles else 64)


def candidates() -> dict[str, Arm]:
    """Return candidates by name, widest first: each changes one thing of balanced int codes."""
    out: dict[str, Arm] = {}
    for bits in (4, 3, 2):
        for how in ("none", "srft", SPREAD, CALIBRATED):
            out[f"int{bits} {how} g64"] = Arm(both(affine(bits, 64, transform=how)))
        for group in (128, 64, 32):
            out[f"int{bits} balanced g{group}"] = Arm(both(affine(bits, group)))
        for clip in (0.98, 0.96, 0.94, 0.92) if bits < 4 else (0.98, 0.96):
            name = f"int{bits} balanced clip {clip:g}".replace("0.", ".")
            out[name] = Arm(both(affine(bits, 128, clip)))
        out[f"int{bits} balanced clips searched"] = Arm(both(Side(Affine(bits, 128), BALANCED)))
        out[f"int{bits} balanced codebook"] = Arm(coded(Codebook(bits)))
        tiles = DualScale(bits, "channel", True), DualScale(bits, "token", True)
        out[f"int{bits} balanced dual scale"] = Arm(coded(*tiles))
        channel = Side(Affine(bits, 64, axis="channel"), BALANCED)
        out[f"int{bits} balanced keys per channel"] = Arm(both(channel, affine(bits, 128)))
        keys, values = affine(bits, 64), affine(bits, 64, transform="srft")
        out[f"int{bits} keys balanced values srft g64"] = Arm(both(keys, values))
        out[f"int{bits} keys srft values balanced g64"] = Arm(
            both(affine(bits, 64, transform="srft"), keys)
        )
        base = both(affine(bits, 128, 0.96 if bits == 2 else 1.0))
        for where, layers in {"first": (0,), "last": (-1,)}.items():
            out[f"int{bits} balanced {where} layer at {MORE[bits]}"] = Arm(base, layers)
    for keys, values in SPLITS:
        clips = (0.96 if bits == 2 else 1.0 for bits in (keys, values))
        sides = (affine(bits, 128, clip) for bits, clip in zip((keys, values), clips, strict=True))
        out[f"keys int{keys} values int{values} balanced"] = Arm(both(*sides))
    return out


def names(asked: Asked) -> list[str]:
    return [BASELINE, *asked.chosen(list(candidates()), "--only")]


def steps(asked: Asked) -> int:
    return parts.steps(asked)


def measure(asked: Asked, names: list[str], progress: Progress) -> Results:
    """Return rows as in `parts`, with the bits per value of pages over all compressed layers."""
    loaded = load(asked.model, "fp16")
    dims = [(s.key_dim, s.value_dim) for s in layers_of(loaded.model) if s.kind == "full"]
    found = candidates()
    wanted = {name: found[name] for name in names if name != BASELINE}
    arms = Protecting(
        loaded,
        {name: arm.config for name, arm in wanted.items()},
        protected={name: arm.protected for name, arm in wanted.items() if arm.protected},
    )
    rows = parts.judge(asked, arms, names, progress)
    for name, arm in wanted.items():
        bits = [arm.config.bits_per_value(*pair) for pair in dims]
        for i in arm.protected:
            bits[i] = wider(arm.config).bits_per_value(*dims[i])
        rows[name]["bits_per_value"] = sum(bits) / len(bits)
    return rows


def wider(config: CacheConfig) -> CacheConfig:
    """Return the config of protected layers: affine codes of the next width, not clipped."""
    sides = {}
    for name in SIDES:
        side = getattr(config, name)
        spec = replace(side.quantizer, bits=MORE[side.quantizer.bits], clip=1.0)
        sides[name] = replace(side, quantizer=spec)
    return replace(config, **sides)


class Protecting(Arms):
    """Arms with layers that store more bits than the others. protected: layers by arm."""

    def __init__(self, *args, protected: dict[str, tuple[int, ...]], **kwargs):
        super().__init__(*args, **kwargs)
        self.protected = protected

    def _attach(self, name: str) -> None:
        super()._attach(name)
        if not (layers := self.protected.get(name)):
            return
        model = self.loaded.model
        usual = model.make_cache  # of this attachment; detach removes it

        def make_cache() -> list:
            caches = usual()
            ours = [(p, c) for p, c in leaves(caches) if isinstance(c, CompressedKVCache)]
            for place, cache in (ours[i] for i in layers):
                put(caches, place, CompressedKVCache(wider(cache.config), cache.layer_maps))
            return caches

        model.make_cache = make_cache


def show(asked: Asked, rows: Results) -> None:
    cells = []
    for name, row in rows.items():
        line = [name, f"{row.get('bits_per_value', 16):.3f}", *parts.of_row(row)]
        cells.append(line)
    columns = COLUMNS if asked.questions else COLUMNS[: 2 + len(parts.COLUMNS)]
    title = f"{asked.model}, {asked.decode} tokens after {asked.context}"
    console.print_table(columns, cells, title)
