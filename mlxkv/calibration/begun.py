"""Keep the sums of a calibration that is broken off, so that the next one goes on from there.

Whole windows of the text, and the gradients before them; the window that was being read is read again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from mlxkv import files, untrusted
from mlxkv.calibration.exchange import ExchangeMeasure
from mlxkv.calibration.moments import Moments
from mlxkv.errors import UserError
from mlxkv.formats.calibration.artifact import LARGEST
from mlxkv.formats.calibration.sums import Sums
from mlxkv.patching.mark import layer_name
from mlxkv.patching.trees import Place

EXCHANGE, PEAKS = "exchange", "peaks"
COUNTS = ("fisher", "keys", "values", "queries")  # of ExchangeMeasure


@dataclass
class Begun:
    """Sums of a calibration on their way. path: of the file that keeps them. of: the model, and the text it reads.
    windows: whole ones in the sums. sums: arrays by layer, sum and field; {} before the gradients are known."""

    path: Path
    of: dict[str, Any]
    windows: int = 0
    sums: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, of: dict[str, Any]) -> Begun:
        """Read a file, if it is whole and of the same model and text; otherwise nothing is begun."""
        with suppress(OSError, ValueError, SafetensorError, KeyError):
            header = untrusted.parse(untrusted.safetensors(path).metadata["begun"])
            windows = untrusted.whole(header.pop("windows"), "windows")
            if header == of:
                return cls(path, of, windows, load(untrusted.read_tensors(path, LARGEST)))
        return cls(path, of)

    def hold(self, moments: Mapping[Place, Moments], windows: int) -> None:
        """Hold the sums after so many whole windows. Nothing is copied: sums replace their arrays."""
        self.windows, self.sums = windows, {}
        for place, layer in moments.items():
            found = {name: vars(x) for name, x in layer.sums.items()} | {PEAKS: layer.peaks}
            if layer.exchange is not None:
                found[EXCHANGE] = {name: getattr(layer.exchange, name) for name in COUNTS}
            for name, fields in found.items():
                for key, x in fields.items():
                    self.sums[f"{layer_name(place)}/{name}/{key}"] = np.asarray(x)

    def restore(self, moments: Mapping[Place, Moments]) -> None:
        """Put the sums into those of new layers."""
        layers = {layer_name(place): layer for place, layer in moments.items()}
        for name, layer in layers.items():
            if (fisher := self.sums.get(f"{name}/{EXCHANGE}/fisher")) is not None:
                layer.exchange = ExchangeMeasure(fisher)
        for path, x in self.sums.items():
            place, name, key = path.split("/")
            layer = layers[place]
            if name == PEAKS:
                layer.peaks[key] = x
            elif name == EXCHANGE:
                setattr(layer.exchange, key, int(x) if key == "queries" else x)
            else:
                sums = layer.sums.setdefault(name, Sums(self.sums[f"{place}/{name}/centre"]))
                setattr(sums, key, x)

    def write(self) -> bool:
        """Write the file, private. Returns whether there is something to go on from."""
        if not self.sums:
            return False
        header = {"begun": json.dumps(self.of | {"windows": self.windows})}
        with suppress(OSError, UserError):
            files.make_folder(self.path.parent)
            with files.written(self.path) as file:
                file.write(save({k: np.array(x, order="C") for k, x in self.sums.items()}, header))
            return True
        return False

    def delete(self) -> None:
        """Delete the file, if there is one."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
