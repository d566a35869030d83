"""The calibrated transforms of a layer, from a calibration of either track."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from cuda_track.codec.transform import Transform
from mlxkv.formats.calibration import layers
from mlxkv.formats.calibration.artifact import SIDES, Calibration, Kinds
from mlxkv.formats.config import CALIBRATED


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """The transforms of one layer, of keys and of values: [D, R] or [G, D, R].

    digest: of the calibration, "" for none. layer: its name there. mean: [G, 1, D] float32, which is taken
    from keys as they arrive, for a configuration that says so; attention needs nothing back
    (`mlxkv.spec.balanced`).
    """

    keys: Transform
    values: Transform
    digest: str = ""
    layer: str = ""
    mean: torch.Tensor | None = None

    def __deepcopy__(self, memo) -> LayerMaps:
        return self  # as constant as weights: copies of a cache share it

    def to(self, device: torch.device) -> LayerMaps:
        mean = None if self.mean is None else self.mean.to(device)
        return replace(self, keys=self.keys.to(device), values=self.values.to(device), mean=mean)

    def subtract_mean(self, keys: torch.Tensor) -> torch.Tensor:
        """Return keys [B, G, L, D] without the mean, in their dtype."""
        return keys if self.mean is None else (keys.float() - self.mean).to(keys.dtype)

    def add_mean(self, keys: torch.Tensor) -> torch.Tensor:
        """Undo `subtract_mean`."""
        return keys if self.mean is None else (keys.float() + self.mean).to(keys.dtype)


def of(
    calibration: Calibration,
    kinds: Kinds = (CALIBRATED, CALIBRATED),
    names: Iterable[str] | None = None,
) -> dict[str, LayerMaps]:
    """Return the maps of each layer, or of those with these `names`. kinds: `CacheConfig.fitted`.

    Raises UserError for balanced or learned maps of a calibration without them.
    """
    calibration.check_kinds(kinds)
    return {
        name: LayerMaps(
            *(pair(*both) for both in layers.pairs(calibration, kinds, name)),
            digest=calibration.digest,
            layer=name,
            mean=_mean(layers.key_mean(calibration, kinds, name)),
        )
        for name in (calibration.layers if names is None else names)
    }


def _mean(mean: np.ndarray | None) -> torch.Tensor | None:
    """[G, D] -> [G, 1, D]"""
    return None if mean is None else torch.from_numpy(mean[:, None].copy())


def pair(down: np.ndarray, up: np.ndarray) -> Transform:
    """Return the transform of two float64 arrays [G, D, R] and [G, R, D]; a single head's serves all."""
    both = (np.ascontiguousarray(x[0] if len(x) == 1 else x) for x in (down, up))
    return Transform(*(torch.from_numpy(x).float() for x in both))


def cut(maps: LayerMaps, rank: int, size: int) -> LayerMaps:
    """Return the maps of the kv heads that the `rank`-th of `size` processes has. Raises UserError."""
    made = {}
    if maps.mean is not None:
        own = layers.share(len(maps.mean), rank, size, maps.layer)
        made["mean"] = maps.mean[own].contiguous()
    for name in SIDES:
        side = getattr(maps, name)
        if side.down.ndim == 3:
            own = layers.share(len(side.down), rank, size, maps.layer)
            side = Transform(side.down[own].contiguous(), side.up[own].contiguous())
        made[name] = side
    return replace(maps, **made, digest=maps.digest and f"{maps.digest} {rank} of {size}")
