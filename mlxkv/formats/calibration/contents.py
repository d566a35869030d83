"""What a calibration holds: transforms of keys and values by layer, and of which model. Its file: `artifact`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np

from mlxkv import __version__
from mlxkv.errors import UserError
from mlxkv.formats import matrices
from mlxkv.formats.calibration.balance import Balance
from mlxkv.formats.calibration.learned import Learned
from mlxkv.formats.config import CENTRED, PAIRED, SCALED, CacheConfig
from mlxkv.formats.saved.marks import same_model

FORMAT = 5
PARTS = "uhp"  # what files of earlier versions call the factors of rotations: U, H and P
WINDOW = 4096  # most tokens of a window of older formats, which hold for its positions alone
SIDES = ("keys", "values")
TENSORS, MORE = ("values", "vectors"), ("down", "sigma")  # of every side; of a balanced transform
PEAKS, MEAN, QUERIES, EXCHANGE = "peaks", "mean", "queries", "exchange"
ORTHONORMAL = 1e-4  # largest entry of |U^T U - I| in a sound file
FIELDS = {
    "fingerprint": str,
    "model": str,
    "model_type": str,
    "tokens": int,
    "text": str,
    "text_digest": str,
    "version": str,
}

# What to say where a part is missing, and the options that make it.
MISSING = {
    "centred": ("holds no means of keys: an older version made it", ""),
    "balanced": (
        "holds no balanced transforms: an older version made it, or it has learned ones",
        "",
    ),
    "scaled": ("holds no scales per channel: an older version made it", ""),
    "learned": ("holds no learned transforms", " --learn scale"),
}


@dataclass(frozen=True, eq=False)
class Basis:
    """Calibration of one side of a layer.

    values, vectors: eigenvalues [G, D], ascending, and eigenvectors [G, D, D], float32.
    floored: number of eigenvalues that were below float32 resolution.
    clips: searched clips, by `Side.format`; other formats keep the preset's.
    balance: the balanced or learned transform, None in files without.
    peaks: largest absolute values [G, D] after SRFT, above 0, None in files without.
    mean: of keys, [G, D]; None for values, and in files without.
    queries: the second moment [G, D, D] of queries, half by what errors of their scores cost (`mlxkv.spec.fill`);
        None for values, and where that was not measured.
    """

    values: np.ndarray
    vectors: np.ndarray
    floored: int = 0
    clips: Mapping[str, float] = field(default_factory=dict)
    balance: Balance | None = None
    peaks: np.ndarray | None = None
    mean: np.ndarray | None = None
    queries: np.ndarray | None = None

    def is_like(self, basis: Basis, form: str) -> bool:
        """Return whether `other` has the same transform that the clips of `form` were searched for."""
        sides = [self, basis]
        if form.startswith(tuple(CENTRED)):
            if not _close(self.mean, basis.mean):
                return False
            if not (self.queries is basis.queries is None or _close(self.queries, basis.queries)):
                return False
        if form.startswith(PAIRED):
            sides = [side.balance and side.balance.down for side in sides]
        elif form.startswith(SCALED):
            sides = [side.peaks for side in sides]
        else:
            sides = [side.vectors for side in sides]
        return _close(*sides)

    def rotation(self) -> np.ndarray:
        """Return R [G, D, D] float32: stored = x @ R, x = stored @ R^T."""
        return matrices.compose(self.vectors.astype(np.float64)).astype(np.float32)


def _close(first: np.ndarray | None, second: np.ndarray | None) -> bool:
    """Return whether both are there, and differ by no more than two runs of one calibration."""
    if first is None or second is None or first.shape != second.shape:
        return False
    return bool(np.abs(first - second).max() <= ORTHONORMAL * np.abs(first).max())


@dataclass(frozen=True, eq=False)
class Layer:
    """Calibration of one layer.

    kv_heads: G. exchange: [2, G] float32, above 0, what errors cost the model: of one nat^2 of noise in the scores of
        keys, and of values lost as a whole (`mlxkv.spec.fill`); None where that was not measured.
    """

    kv_heads: int
    keys: Basis
    values: Basis
    exchange: np.ndarray | None = None

    def costs(self, side: str) -> np.ndarray | None:
        """Return what errors of "keys" or "values" cost, [G] float64, or None."""
        if self.exchange is None:
            return None
        return self.exchange[SIDES.index(side)].astype(np.float64)


@dataclass(frozen=True, eq=False)
class Calibration:
    """Contents of a calibration file.

    fingerprint, model, model_type: the model that it belongs to.
    tokens, text, text_digest: the text that was read.
    layers: by LAYER, as in the file.
    version: version of mlxkv that wrote it.
    learned: how the transforms were learned, None where they are balanced or absent.
    positions: how many, from 0, the moments of keys hold for; None in older files.
    """

    fingerprint: str
    model: str
    model_type: str
    tokens: int
    text: str
    text_digest: str
    layers: dict[str, Layer]
    version: str = __version__
    path: Path | None = field(default=None, compare=False)
    learned: Learned | None = None
    positions: int | None = None

    @property
    def reach(self) -> int | None:
        """Return how many positions it holds for (of an older file: its window); None for all: no text
        was read."""
        if self.positions is not None or not self.tokens:
            return self.positions
        return -(-self.tokens // -(-self.tokens // WINDOW))

    def shortfall(self, context: int | None) -> str | None:
        """Return what to say where a model's context is longer than its reach, or None."""
        if context is None or self.reach is None or self.reach >= context:
            return None
        mend = "; mlxkv calibrate makes it anew" if self.positions is None else ""
        name = self.path or "this one"
        return f"[calibration] {name} holds for positions up to {self.reach:,}; longer contexts lose quality{mend}"

    @cached_property
    def digest(self) -> str:
        """16 hex digits of a hash of the transforms; saved caches name this, not a file."""
        total = sha256(PARTS.encode())
        if self.learned:
            total.update(repr(self.learned).encode())
        for name, x in sorted(self._tensors().items()):
            total.update(f"{name} {x.shape}".encode())
            total.update(np.ascontiguousarray(x, "<f4").tobytes())
        return total.hexdigest()[:16]

    @property
    def balanced(self) -> bool:
        """Return whether every side has a balanced transform."""
        return self.learned is None and all(side.balance is not None for side in self.sides)

    @property
    def scaled(self) -> bool:
        """Return whether every side has the peaks that scales per channel are made from."""
        return all(side.peaks is not None for side in self.sides)

    @property
    def centred(self) -> bool:
        """Return whether every layer has the mean of its keys."""
        return all(layer.keys.mean is not None for layer in self.layers.values())

    @property
    def sides(self) -> list[Basis]:
        """Keys and values of all layers."""
        return [getattr(layer, side) for layer in self.layers.values() for side in SIDES]

    def serves(self, config: CacheConfig) -> bool:
        """Return whether it has what `config` needs; learned maps are always named by their file."""
        return all(getattr(self, part) for part in config.needs - {"learned"})

    def _tensors(self) -> dict[str, np.ndarray]:
        out = {}
        for name, layer in self.layers.items():
            if layer.exchange is not None:
                out[f"{name}.{EXCHANGE}"] = layer.exchange
            for side in SIDES:
                basis = getattr(layer, side)
                out |= {f"{name}.{side}.{part}": getattr(basis, part) for part in TENSORS}
                if basis.balance is not None:
                    out |= {f"{name}.{side}.{p}": getattr(basis.balance, p) for p in MORE}
                for part in (PEAKS, MEAN, QUERIES):
                    if (x := getattr(basis, part)) is not None:
                        out[f"{name}.{side}.{part}"] = x
        return out

    def with_clips_of(self, old: Calibration) -> tuple[Calibration, int]:
        """Add the clips of `old` for formats without one here.

        Returns the calibration and how many clips were left out because their transform has changed by more
        than two runs of one calibration differ.
        """
        layers, dropped = {}, 0
        for name, layer in self.layers.items():
            sides = {}
            for side in SIDES:
                basis, old_basis = getattr(layer, side), getattr(old.layers.get(name), side, None)
                clips = dict(old_basis.clips) if old_basis is not None else {}
                valid = {
                    form: clip for form, clip in clips.items() if basis.is_like(old_basis, form)
                }
                dropped += len(clips) - len(valid)
                sides[side] = replace(basis, clips={**valid, **basis.clips})
            layers[name] = replace(layer, **sides)
        return replace(self, layers=layers), dropped

    def header(self) -> dict:
        """Return the header of the file."""
        layers = {}
        for name, layer in self.layers.items():
            sides = (layer.keys, layer.values)
            clips = [dict(side.clips) for side in sides]
            layers[name] = {
                "kv_heads": layer.kv_heads,
                "floored": [side.floored for side in sides],
                "lacking": [side.balance.floored if side.balance else None for side in sides],
                "clips": clips if any(clips) else None,
            }
        fields = {name: getattr(self, name) for name in FIELDS}
        fields["positions"] = self.positions
        if self.learned:
            fields["learned"] = self.learned.as_dict()
        return {"format": FORMAT, "digest": self.digest, **fields, "layers": layers}

    def check(self, shapes: Mapping[str, tuple[int, int, int]], fingerprint: str | None) -> None:
        """Raise UserError unless made for this model. shapes: (kv heads, key dim, value dim) of each
        layer that needs rotations. fingerprint: the model's, None if unknown."""
        if fingerprint is not None and not same_model(self.fingerprint, fingerprint):
            raise self._fault(
                f"belongs to another model; got one for {self.model} ({self.fingerprint}), this "
                f"model is {fingerprint}"
            )
        for name, shape in shapes.items():
            layer = self.layers.get(name)
            if layer is None:
                raise self._fault(
                    f"has no rotation for layer {name}; got {len(self.layers)} layers"
                )
            shape_here = (layer.kv_heads, layer.keys.values.shape[1], layer.values.values.shape[1])
            if shape_here != tuple(shape):
                words = "{} kv heads of {} and {} dims"
                raise self._fault(
                    f"is of another shape in layer {name}; got {words.format(*shape_here)}, this model has "
                    f"{words.format(*shape)}"
                )

    def check_parts(self, needs: Collection[str]) -> None:
        """Raise UserError if one of these parts is missing (`config.needs_of`)."""
        for part, (problem, options) in MISSING.items():
            if part in needs and not getattr(self, part):
                raise self._fault(problem, options)

    def _fault(self, problem: str, options: str = "") -> UserError:
        return fault(self.path or "it", problem, options)


def fault(path: Path | str, problem: str, options: str = "") -> UserError:
    return UserError(
        f"[calibration] {path} {problem}; make one with mlxkv calibrate --model MODEL{options} -o FILE"
    )
