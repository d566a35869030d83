"""Make calibrated transforms that differ in one thing each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from mlxkv.codec.maps import ROTATED, Kinds
from mlxkv.formats import matrices
from mlxkv.formats.calibration import balance
from mlxkv.formats.calibration.artifact import SIDES, Basis, Calibration, Layer
from mlxkv.formats.calibration.balance import Balance
from mlxkv.formats.config import BALANCED, CALIBRATED, CacheConfig
from mlxkv.models.calibration.measure import WINDOW, bos_of, calibrate
from mlxkv.texts.sources import Text

Weigh = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Recipe:
    """target, parts, per_layer: as in `mlxkv.models.calibration.measure`. change: applied to the bases.
    weigh: of keys and of values, applied to the moments of balanced transforms. kinds: the transforms
    of keys and of values."""

    target: str = "attention"
    parts: str = matrices.PARTS
    per_layer: bool = False
    change: Callable[[np.ndarray], np.ndarray] | None = None
    weigh: tuple[Weigh | None, Weigh | None] = (None, None)
    kinds: Kinds = ROTATED

    def applied(self, config: CacheConfig) -> CacheConfig:
        """Return `config` with the transforms of this recipe."""
        keys, values = (
            replace(side, transform=kind)
            for side, kind in zip((config.keys, config.values), self.kinds, strict=True)
        )
        return replace(config, keys=keys, values=values)


def spread(vectors: np.ndarray) -> np.ndarray:
    """Return U P without the H between, [G, D, D]. `matrices.compose` has P only after H, so H's
    inverse removes H again. If D is no power of two there is no such P, and U is returned."""
    dims = vectors.shape[-1]
    if dims & (dims - 1):
        return vectors
    return vectors @ np.rint(matrices.hadamard(dims).T @ matrices.ordered(dims))


def signed(vectors: np.ndarray) -> np.ndarray:
    """Return random signs before H, as in the "hadamard" transform, [G, D, D]. If D is no power of
    two, the matrix in place of H has them already."""
    dims = vectors.shape[-1]
    return vectors if dims & (dims - 1) else vectors * matrices.signs(dims, 0)


def diagonal(noise: np.ndarray, reads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return moments without correlations of channels, [G, D, D] each: a scale per channel balances
    them."""
    eye = np.eye(noise.shape[-1])
    return noise * eye, reads * eye


def alike(noise: np.ndarray, reads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return moments as if errors in all directions counted the same."""
    return noise, np.broadcast_to(np.eye(reads.shape[-1]), reads.shape)


# The rows of the paper's ablation (OSCAR, section 4) and some between them, then balanced transforms,
# whole and with one thing left out. All are calibrations, so that arms run the same kernels and
# differ only in their matrices.
BOTH: Kinds = (BALANCED, BALANCED)
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
    "balanced": Recipe(kinds=BOTH),
    "balanced without H": Recipe(parts="u", kinds=BOTH),
    "balanced without P": Recipe(parts="uh", kinds=BOTH),
    "balanced keys": Recipe(kinds=(BALANCED, CALIBRATED)),
    "balanced values": Recipe(kinds=(CALIBRATED, BALANCED)),
    "balanced values alike": Recipe(weigh=(None, alike), kinds=BOTH),
    "balanced channels": Recipe(weigh=(diagonal, diagonal), kinds=BOTH),
}


@dataclass
class Kitchen:
    """Calibrations of one model on one text; each pass over the text is done once."""

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
        if any(recipe.weigh):
            layers = {name: _reweighed(one, recipe.weigh) for name, one in made.layers.items()}
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


def _reweighed(layer: Layer, weigh: tuple[Weigh | None, Weigh | None]) -> Layer:
    sides = {}
    for name, change in zip(SIDES, weigh, strict=True):
        basis = getattr(layer, name)
        if change is not None:
            down, sigma, _ = balance.balance(*change(*_moments(basis.balance)))
            made = Balance(down.astype(np.float32), sigma.astype(np.float32))
            basis = replace(basis, balance=made)
        sides[name] = basis
    return replace(layer, **sides)


def _moments(made: Balance) -> tuple[np.ndarray, np.ndarray]:
    """Return the moments (noise, reads) of a balanced transform T, [G, D, D] float64: T^T noise T =
    diag(sigma) = T^-1 reads T^-T."""
    down, sigma = made.down.astype(np.float64), made.sigma.astype(np.float64)
    up = np.linalg.inv(down)
    return up.swapaxes(-1, -2) * sigma[:, None] @ up, down * sigma[:, None] @ down.swapaxes(-1, -2)
