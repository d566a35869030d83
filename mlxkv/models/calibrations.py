"""Which calibration a model gets: the one it is given, else the one that came with it, else the
user's own, else one that is made on the spot and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlxkv import artifact, calibrated, console
from mlxkv.artifact import SIDES, Calibration, Layer
from mlxkv.calibrated import Rotations
from mlxkv.config import CacheConfig
from mlxkv.errors import MachineError, UserError
from mlxkv.models.aliases import REPO
from mlxkv.models.hub import Words, fetch_file
from mlxkv.models.probe import Place, Shape

FILE = f"{artifact.NAME}.safetensors"
ON_THE_HUB = Words(
    "calibration",
    "no such file here and no such repository on the hub",
    "the hub cannot be reached and this calibration is not on this machine",
    "make one with mlxkv calibrate --model MODEL -o FILE",
)
_ORIGIN = "_mlxkv_origin"


@dataclass(frozen=True)
class Origin:
    """Where a loaded model comes from. context: the longest it was made for, in tokens, or None.
    calibration: the one that it was loaded with."""

    name: str
    fingerprint: str
    folder: Path
    tokenizer: Any
    context: int | None = None
    calibration: Calibration | None = None


def introduce(model: nn.Module, origin: Origin) -> None:
    """Let `attach` know where `model` comes from."""
    setattr(model, _ORIGIN, origin)


def origin_of(model: nn.Module) -> Origin | None:
    return vars(model).get(_ORIGIN)


def layer_name(place: Place) -> str:
    """(3,) -> "3", (3, 1) -> "3.1": what calibrations call a cache."""
    return ".".join(map(str, place))


def sizes(shapes: Mapping[Place, Shape]) -> dict[str, tuple[int, int, int]]:
    """(kv heads, key dim, value dim) by the layer's name."""
    return {layer_name(p): (s.heads, s.key_dim, s.value_dim) for p, s in shapes.items()}


def given(calibration: Calibration | Path | str) -> Calibration:
    """The calibration itself, or that of a file or folder on this machine, or of `owner/name` on the
    hub. Raises UserError."""
    if isinstance(calibration, Calibration):
        return calibration
    if isinstance(calibration, str):
        name = calibration.strip()
        # A path that is not there stays a path: "calibrations/mine.safetensors" is no repository.
        is_path = Path(name).expanduser().exists() or name.endswith(".safetensors")
        if REPO.fullmatch(name) and not is_path:
            calibration = fetch_file(name, FILE, ON_THE_HUB)
    return artifact.read(calibration)


def known(model: nn.Module, balanced: bool = False) -> Calibration | None:
    """The one that `model` was loaded with, that came with it, or that is the user's own; None: it
    would have to be made. balanced: of those that were not named, one with balanced transforms."""
    origin = origin_of(model)
    if origin is None or origin.calibration is not None:
        return origin and origin.calibration
    return artifact.find(origin.fingerprint, origin.folder, balanced)


def fit(
    model: nn.Module,
    config: CacheConfig,
    places: Mapping[Place, Shape],
    label: str,
    chosen: Calibration | Path | str | None = None,
) -> dict[Place, tuple[CacheConfig, Rotations | None]]:
    """`config` with the clips that were searched for each of `places`, and its rotations; as it is
    and None where it needs no calibration. Raises UserError."""
    if not config.calibrated or not places:
        return dict.fromkeys(places, (config, None))
    origin = origin_of(model)
    if config.learned and chosen is None and not (origin and origin.calibration):
        raise UserError(
            f"[attach] {label} needs learned transforms; got no calibration; make one with mlxkv "
            "calibrate --model MODEL --learn scale -o FILE, and name it by --calibration FILE"
        )
    paired = config.balanced or config.low
    calibration = given(chosen) if chosen is not None else known(model, paired)
    if calibration is None and origin is None:
        raise UserError(
            f"[attach] {label} needs a calibration; got a model that mlxkv did not load; pass "
            "calibration=FILE (mlxkv calibrate makes one), or use mlxkv.models.load"
        )
    if calibration is None:
        calibration = _on_the_spot(model, origin, label)
    calibration.check(sizes(places), origin and origin.fingerprint)
    out, by_kinds = {}, {}
    for place in places:
        name = layer_name(place)
        layer = calibration.layers[name]
        own = with_clips(calibrated.with_ranks(config, layer), layer)
        by_kinds.setdefault(own.fitted, {})[name] = place, own
    for kinds, found in by_kinds.items():
        made = calibrated.of(calibration, kinds, found)
        out |= {place: (own, made[name]) for name, (place, own) in found.items()}
    return {place: out[place] for place in places}


def with_clips(config: CacheConfig, layer: Layer) -> CacheConfig:
    """`config` with the clips that were searched for its formats in this layer, if there are any."""
    sides = {}
    for name in SIDES:
        side, basis = getattr(config, name), getattr(layer, name)
        if side.searchable:
            form = side.format(basis.values.shape[1], config.page)
            side = side.clipped(basis.clips.get(form, side.quantizer.clip))
        sides[name] = side
    return replace(config, **sides)


def _on_the_spot(model: nn.Module, origin: Origin, label: str) -> Calibration:
    from mlxkv import calibrate  # it attaches itself, by the parts of this package

    console.note(f"{label}: no calibration of {origin.name} yet; making one, once")
    made = calibrate.from_corpus(model, origin)
    path = artifact.kept_path(origin.fingerprint)
    try:
        artifact.write(path, made)
    except MachineError as error:
        console.note(f"{error}; it serves this run only")
    else:
        console.note(f"calibrated on {made.tokens} tokens, kept in {path}")
    return made
