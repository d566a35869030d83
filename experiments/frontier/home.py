"""What a model's layers were calibrated to, and the coders made of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from experiments.frontier import filled, published
from experiments.frontier.coding import KEYS, VALUES, AffineCoder, Codes, Maps, learned
from experiments.frontier.filled import Directions, Filled
from experiments.frontier.published import Preset
from mlxkv.formats.calibration import layers
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.models.calibration.measure import bos_of, calibrate
from mlxkv.models.calibration.moments import Sample

AnyCodes = Codes | Filled | Preset


class FilledCoder:
    """Keys and values of one layer with bits by direction."""

    def __init__(self, keys: filled.Coder, values: filled.Coder):
        self.sides, self.dims = (keys, values), keys.up.shape[-1]
        self.bits = keys.bits + values.bits
        self.exact = keys.how.exact

    def coded(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        (keys, scale), (values, _) = (
            s.coded(x) for s, x in zip(self.sides, (keys, values), strict=True)
        )
        return keys, values, scale


@dataclass
class Home:
    """layers: maps and levels by layer. calibration, samples: by layer's name, where there are any."""

    layers: dict[int, Maps]
    calibration: Calibration | None = None
    samples: dict[str, Sample] = field(default_factory=dict)
    _coders: dict = field(default_factory=dict)
    _directions: dict = field(default_factory=dict)

    def coder(self, codes: AnyCodes, layer: int):
        """Return the coder of a layer: coded(keys, values) -> (keys, values, steps or scales or None)."""
        codes = codes.kept if isinstance(codes, Filled) else codes
        if codes not in self._coders:
            self._coders[codes] = self._make(codes)
        return self._coders[codes][layer]

    def bits(self, codes: AnyCodes | None) -> float:
        """Return bits per value read, headers and exact tokens counted; a mean over layers of one head dim."""
        if codes is None:
            return 16.0
        if isinstance(codes, Codes):
            return codes.read
        own = [self.coder(codes, layer) for layer in self.layers]
        read = sum(x.bits for x in own) / sum(2 * x.dims for x in own)
        exact = codes.exact if isinstance(codes, Filled) else 0
        return read + exact * (16 - read) / 128

    def directions(self) -> dict[int, tuple[Directions, Directions]]:
        """Return balanced maps of keys without their mean and of values."""
        if not self._directions:
            for index in self.layers:
                layer, sides = self.calibration.layers[str(index)], []
                for name in (KEYS, VALUES):
                    basis = getattr(layer, name)
                    down, sigma = layers.directions(basis, name == KEYS)
                    mean = basis.mean[:, None].astype(np.float32) if name == KEYS else None
                    rows = np.array(self.samples[str(index)].rows(name))
                    sides.append(Directions(name, down, sigma, mean, rows))
                self._directions[index] = tuple(sides)
        return self._directions

    def _make(self, codes: AnyCodes) -> dict:
        if isinstance(codes, Codes):
            return {index: AffineCoder(codes, maps) for index, maps in self.layers.items()}
        if isinstance(codes, Preset):
            return published.coders(self.calibration, codes.name)
        pairs = filled.coders(self.directions(), codes)
        return {index: FilledCoder(*pair) for index, pair in pairs.items()}


def calibrated(loaded, text, count: int) -> Home:
    """Calibrate: the balanced maps of every layer, and levels that fit what they store."""
    samples: dict = {}
    made = calibrate(
        loaded.model,
        text.tokens,
        text=text.name,
        window=min(4096, count),
        bos=bos_of(loaded.tokenizer),
        samples=samples,
    )
    out = {}
    for name, layer in made.layers.items():
        pairs = {
            s: tuple(map(mx.array, getattr(layer, s).balance.pair(made.parts)))
            for s in (KEYS, VALUES)
        }
        levels = {s: learned(samples[name].rows(s), s, pairs[s][0]) for s in pairs}
        out[int(name)] = Maps(pairs[KEYS], pairs[VALUES], levels)
    return Home(out, made, samples)
