"""The origin of a loaded model, and the names of its caches in calibrations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.models.hooks.probe import Place, ProbedShape

_ORIGIN = "_mlxkv_origin"


@dataclass(frozen=True)
class Origin:
    """The source of a loaded model.

    context: the longest context it was made for, in tokens, or None. calibration: the one that
    `load` was given, or None.
    """

    name: str
    fingerprint: str
    folder: Path
    tokenizer: Any
    context: int | None = None
    calibration: Calibration | None = None


def set_origin(model: nn.Module, origin: Origin) -> None:
    """Record on `model` where it comes from; `attach` reads it."""
    setattr(model, _ORIGIN, origin)


def origin_of(model: nn.Module) -> Origin | None:
    """Return the origin that `load` recorded, or None for a model from elsewhere."""
    return vars(model).get(_ORIGIN)


def layer_name(place: Place) -> str:
    """Return the name of a cache in calibrations: (3,) -> "3", (3, 1) -> "3.1"."""
    return ".".join(map(str, place))


def sizes(shapes: Mapping[Place, ProbedShape]) -> dict[str, tuple[int, int, int]]:
    """(kv heads, key dim, value dim) of each cache, by its name in calibrations."""
    return {layer_name(p): (s.heads, s.key_dim, s.value_dim) for p, s in shapes.items()}
