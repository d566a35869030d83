"""Find the calibration of a model and fit a configuration to it.

In this order: the one passed in, the one shipped with the model, the user's own, a new one made on the spot and
saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.nn as nn

from mlxkv import console
from mlxkv.calibration import measure
from mlxkv.codec import maps
from mlxkv.codec.maps import LayerMaps
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.calibration import artifact, layers
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.formats.config import LEARNED, CacheConfig
from mlxkv.patching.mark import Origin, layer_name, origin_of, sizes
from mlxkv.patching.probe import ProbedShape
from mlxkv.patching.trees import Place


def read_calibration(calibration: Calibration | Path | str) -> Calibration:
    """Read a calibration from a file or folder; return a `Calibration` unchanged. Raises UserError."""
    return (
        calibration
        if isinstance(calibration, Calibration)
        else artifact.read_calibration(calibration)
    )


def find_calibration(model: nn.Module, config: CacheConfig | None = None) -> Calibration | None:
    """Return the calibration that `model` was loaded with, the one shipped with it, or the user's own; None if it must
    be made. config: skip calibrations that do not serve it, unless named by the user."""
    origin = origin_of(model)
    if origin is None or origin.calibration is not None:
        return origin and origin.calibration
    return artifact.find(origin.fingerprint, origin.folder, config)


def fit(
    model: nn.Module,
    config: CacheConfig,
    places: Mapping[Place, ProbedShape],
    calibration: Calibration | Path | str | None = None,
) -> dict[Place, tuple[CacheConfig, LayerMaps | None]]:
    """Return, for each of `places`, `config` with its layer's clips and ranks, and the layer's maps. `config` has a
    calibrated side. calibration: the one to use. Raises UserError if it is missing or does not fit.
    """
    origin = origin_of(model)
    if LEARNED in config.fitted and calibration is None and not (origin and origin.calibration):
        raise UserError(
            f"[attach] {config.label} needs learned transforms; got no calibration; make one with mlxkv "
            "calibrate --model MODEL --learn scale -o FILE, and name it by --calibration FILE"
        )
    calibration = (
        find_calibration(model, config) if calibration is None else read_calibration(calibration)
    )
    if calibration is None:
        if origin is None:
            raise UserError(
                f"[attach] {config.label} needs a calibration; got a model that mlxkv did not load; "
                "pass calibration=FILE (mlxkv calibrate makes one), or use mlxkv.load"
            )
        calibration = _on_the_spot(model, origin, config.label)
    calibration.check(sizes(places), origin and origin.fingerprint)
    if config.keys.calibrated and not all(shape.latent for shape in places.values()):
        artifact.tell_reach(calibration, origin and origin.context)
    names = {layer_name(place): place for place in places}
    fitted = layers.fitted(dict.fromkeys(names, config), calibration)
    by_kinds: dict = {}
    for name, layer in fitted.items():
        by_kinds.setdefault(layer.fitted, {})[name] = layer
    transforms: dict = {}
    for kinds, group in by_kinds.items():
        transforms |= maps.of(calibration, kinds, group)
    return {place: (fitted[name], transforms[name]) for name, place in names.items()}


def _on_the_spot(model: nn.Module, origin: Origin, label: str) -> Calibration:
    """Make a calibration and save it in the user's folder, if writable."""
    console.note(
        f"{origin.chosen or label}: no calibration of {origin.name} yet; making one (once, minutes without a GPU; "
        "Ctrl-C keeps what is measured, and --kv int4 starts at once)"
    )
    calibration = measure.from_corpus(model, origin)
    path = artifact.kept_path(origin.fingerprint)
    try:
        artifact.write_calibration(path, calibration)
    except MachineError as error:
        console.note(f"{error}; it serves this run only")
    else:
        console.note(f"calibrated on {calibration.tokens} tokens, kept in {path}")
    return calibration
