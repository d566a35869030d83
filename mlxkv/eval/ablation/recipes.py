"""Rotations that differ in one thing each, made in this process and used again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from mlxkv import rotation
from mlxkv.artifact import Basis, Calibration
from mlxkv.calibrate import WINDOW, bos_of, calibrate
from mlxkv.eval.texts import Text


@dataclass(frozen=True)
class Recipe:
    """target, parts, per_layer: as in `mlxkv.calibrate`. change: made to the bases afterwards."""

    target: str = "attention"
    parts: str = rotation.PARTS
    per_layer: bool = False
    change: Callable[[np.ndarray], np.ndarray] | None = None


def spread(vectors: np.ndarray) -> np.ndarray:
    """U P without the H between: [G, D, D]. `rotation.compose` has P only behind H, whose inverse
    takes it off again. Where D is no power of two there is no such P: U alone."""
    dims = vectors.shape[-1]
    if dims & (dims - 1):
        return vectors
    return vectors @ np.rint(rotation.hadamard(dims).T @ rotation.ordered(dims))


def signed(vectors: np.ndarray) -> np.ndarray:
    """Random signs before H, as in the "hadamard" transform: [G, D, D]. Where D is no power of two
    what stands for H has them already."""
    dims = vectors.shape[-1]
    return vectors if dims & (dims - 1) else vectors * rotation.signs(dims, 0)


# The rows of the paper's ablation (OSCAR, section 4) and some that lie between them. All are stored
# as calibrations, so that every arm runs the same kernels and differs in its matrices only.
RECIPES: dict[str, Recipe] = {
    "full": Recipe(),
    "without U": Recipe(parts="hp"),
    "without H": Recipe(parts="u", change=spread),
    "without P": Recipe(parts="uh"),
    "U alone": Recipe(parts="u"),
    "per layer": Recipe(per_layer=True),
    "tensor target": Recipe("tensor"),
    "surrogate values": Recipe("surrogate"),
    "random": Recipe("random", "u"),
    "hadamard": Recipe("none", "uh", change=signed),  # signs stand where U does
    "none": Recipe("none", ""),
}


@dataclass
class Kitchen:
    """Calibrations of one model on one text, each pass over it done once."""

    loaded: object
    text: Text
    _passes: dict[tuple[str, bool], Calibration] = field(default_factory=dict)

    def make(self, recipe: Recipe) -> Calibration:
        made = self._read(recipe.target, recipe.per_layer)
        if recipe.change:
            layers = {
                name: replace(
                    layer,
                    keys=_changed(layer.keys, recipe.change),
                    values=_changed(layer.values, recipe.change),
                )
                for name, layer in made.layers.items()
            }
            made = replace(made, layers=layers)
        return replace(made, parts=recipe.parts)

    def _read(self, target: str, per_layer: bool) -> Calibration:
        key = (target, per_layer)
        if key not in self._passes:
            self._passes[key] = calibrate(
                self.loaded.model,
                self.text.tokens,
                text=self.text.name,
                target=target,
                per_layer=per_layer,
                window=min(WINDOW, self.loaded.context or WINDOW),
                bos=bos_of(self.loaded.tokenizer),
            )
        return self._passes[key]


def _changed(basis: Basis, change: Callable[[np.ndarray], np.ndarray]) -> Basis:
    return replace(basis, vectors=change(basis.vectors.astype(np.float64)).astype(np.float32))
