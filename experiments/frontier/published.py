"""What a preset of mlxkv reads back of pages, by its own codec: published methods beside the arms."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxkv.codec import maps
from mlxkv.codec.codec import Codec
from mlxkv.formats.calibration import layers
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.formats.names import parse_kv

METHODS = (
    *("oscar-int2", "kivi-int2", "kvarn-int2", "kitty-int2", "centred-int2", "turbo-int2"),
    *("hadamard-int2", "naive-int2", "balanced-int2", "turbo-int3", "kvarn-int3", "oscar-int3"),
    *("naive-int3", "centred-int3", "kivi-int4", "naive-int4", "hadamard-int4", "srft-int4"),
    *("srft-scaled-int4", "oscar-int4", "polar", "polar-tree", "turbo-int4"),
)


@dataclass(frozen=True)
class Preset:
    """A preset by its name; windows are those of the study."""

    name: str


class PresetCoder:
    """A preset in one layer: x [B, G, N, D] -> what is read back."""

    def __init__(self, config, made: maps.LayerMaps, dims: int):
        own = (x if side.calibrated else None for x, side in _sides(config, made))
        self.codecs = [
            Codec(side, dims, config.page, own=x)
            for x, side in zip(own, (config.keys, config.values), strict=True)
        ]
        self.mean = 0.0 if made.centre is None else made.centre.mean
        self.dims = dims
        self.bits = config.bits_per_value(dims, dims) * 2 * dims  # of keys and values of a token

    def coded(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, None]:
        got = [
            codec.decode(codec.encode(x), mx.float32)
            for codec, x in zip(self.codecs, (keys - self.mean, values), strict=True)
        ]
        return got[0] + self.mean, got[1], None


def _sides(config, made):
    return (made.keys, config.keys), (made.values, config.values)


def coders(calibration: Calibration, name: str) -> dict[int, PresetCoder]:
    """Return the preset in each layer of full attention."""
    found = layers.fitted(dict.fromkeys(calibration.layers, parse_kv(name)), calibration)
    out = {}
    for layer, config in found.items():
        made = maps.of(calibration, config.fitted, [layer])[layer]
        out[int(layer)] = PresetCoder(config, made, calibration.layers[layer].keys.values.shape[1])
    return out
