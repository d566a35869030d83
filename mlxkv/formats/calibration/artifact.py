"""Read, check, write and find calibration files: safetensors with a versioned header.

Tensors, float32: `LAYER.SIDE.vectors` [G or 1, D, D] with an eigenvector per column, and
`LAYER.SIDE.values` [G or 1, D], the eigenvalues. LAYER is the position in the model's list of
caches (`3`, or `3.1` inside a CacheList), SIDE is `keys` or `values`. The metadata entry `mlxkv`
holds the header as JSON.

Since format 2 a side may have a balanced transform (`mlxkv.formats.calibration.balance`):
`LAYER.SIDE.down` [G or 1, D, D] and `LAYER.SIDE.sigma` [G or 1, D]. If the header has an entry
`learned` (`mlxkv.formats.calibration.learned`), `down` is a learned transform instead, and `sigma` the
rms of what it stores.

Since format 3 a side may have `LAYER.SIDE.peaks` [G or 1, D], the largest absolute values of the channels
after SRFT with seed 0, from which presets with a scale per channel make their scales; and there may be
`LAYER.keys.mean` [G, D], the mean of the keys of each kv head, which presets with centred keys take from them.

The header holds searched clips by layer, side and format: `"clips": [{"int2 g128": 0.9}, {"int2 g128":
0.94}]`, or null where none were searched. An entry `plan` is a preset for each layer, found on this model
(`formats.plans.files` describes it). The formats of other transforms than a rotation per
kv head begin with their name: "balanced int2 g128", "learned int2 g64", "srft-scaled int4 g32 symmetric".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from mlxkv import __version__, console, files, untrusted
from mlxkv.errors import MachineError, UserError
from mlxkv.formats import matrices
from mlxkv.formats.calibration import balance
from mlxkv.formats.calibration.balance import Balance
from mlxkv.formats.calibration.learned import Learned
from mlxkv.formats.config import CENTRED, PAIRED, SCALED, CacheConfig
from mlxkv.formats.saved.marks import names, same_model
from mlxkv.untrusted import Unsound, whole

FORMAT = 3
LARGEST = 1 << 30  # bytes; the maps of 80 layers with 8 kv heads of 128 dims have 340 MB
FORMATS = (1, 2, 3)  # that this version reads
NAME = "mlxkv-calibration"
SIDES = ("keys", "values")
TENSORS, MORE = ("values", "vectors"), ("down", "sigma")  # of every side; of a balanced transform
PEAKS, MEAN = "peaks", "mean"
ORTHONORMAL = 1e-4  # largest entry of |U^T U - I| in a sound file
FIELDS = {
    "fingerprint": str,
    "model": str,
    "model_type": str,
    "target": str,
    "parts": str,
    "per_layer": bool,
    "tokens": int,
    "text": str,
    "text_digest": str,
    "version": str,
}


@dataclass(frozen=True, eq=False)
class Basis:
    """Calibration of one side of a layer.

    values, vectors: eigenvalues [G, D], ascending, and eigenvectors [G, D, D], float32; G is 1 where all
        kv heads share a basis.
    floored: number of eigenvalues that were below float32 resolution.
    clips: searched clips, by `Side.format`; other formats keep the preset's.
    balance: the balanced or learned transform, None in files without.
    peaks: largest absolute values [G, D] after SRFT, above 0, None in files without.
    mean: of keys, [G, D] of every kv head even where they share the rest; None for values, and in files without.
    """

    values: np.ndarray
    vectors: np.ndarray
    floored: int = 0
    clips: Mapping[str, float] = field(default_factory=dict)
    balance: Balance | None = None
    peaks: np.ndarray | None = None
    mean: np.ndarray | None = None

    @property
    def condition(self) -> float:
        """Largest over smallest eigenvalue, of the worst kv head."""
        return float((self.values[:, -1] / self.values[:, 0]).max())

    def is_like(self, other: Basis, form: str) -> bool:
        """Return whether `other` has the same transform that the clips of `form` were searched for."""
        sides = [self, other]
        if form.startswith(tuple(CENTRED)) and not _close(self.mean, other.mean):
            return False
        if form.startswith(PAIRED):
            sides = [side.balance and side.balance.down for side in sides]
        elif form.startswith(SCALED):
            sides = [side.peaks for side in sides]
        else:
            sides = [side.vectors for side in sides]
        return _close(*sides)

    def rotation(self, parts: str) -> np.ndarray:
        """Return R [G, D, D] float32: stored = x @ R, x = stored @ R^T."""
        return matrices.compose(self.vectors.astype(np.float64), parts).astype(np.float32)


def _close(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Whether both are there, and differ by no more than two runs of one calibration."""
    if one is None or other is None or one.shape != other.shape:
        return False
    return bool(np.abs(one - other).max() <= ORTHONORMAL * np.abs(one).max())


@dataclass(frozen=True, eq=False)
class Layer:
    """Calibration of one layer; kv_heads: G."""

    kv_heads: int
    keys: Basis
    values: Basis


@dataclass(frozen=True, eq=False)
class Calibration:
    """Contents of a calibration file.

    fingerprint, model, model_type: the model that it belongs to.
    target: what the bases are eigenvectors of.
    parts: the factors U, H, P that rotations use.
    per_layer: one basis for all kv heads of a layer.
    tokens, text, text_digest: the text that was read.
    layers: by LAYER, as in the file.
    version: version of mlxkv that wrote it.
    learned: how the transforms were learned, None where they are balanced or absent.
    plan: a preset for each layer, as a plan's file holds it, or None.
    """

    fingerprint: str
    model: str
    model_type: str
    target: str
    parts: str
    per_layer: bool
    tokens: int
    text: str
    text_digest: str
    layers: dict[str, Layer]
    version: str = __version__
    path: Path | None = field(default=None, compare=False)
    learned: Learned | None = None
    plan: Mapping | None = None

    @cached_property
    def digest(self) -> str:
        """16 hex digits of a hash of the transforms; saved caches name this, not a file."""
        total = sha256(self.parts.encode())
        if self.learned:
            total.update(repr(self.learned).encode())
        for name, x in sorted(self._tensors().items()):
            total.update(f"{name} {x.shape}".encode())
            total.update(np.ascontiguousarray(x, "<f4").tobytes())
        return total.hexdigest()[:16]

    @property
    def balanced(self) -> bool:
        """Whether every side has a balanced transform."""
        return self.learned is None and self._paired

    @property
    def scaled(self) -> bool:
        """Whether every side has the peaks that scales per channel are made from."""
        return all(
            getattr(layer, side).peaks is not None
            for layer in self.layers.values()
            for side in SIDES
        )

    @property
    def centred(self) -> bool:
        """Whether every layer has the mean of its keys."""
        return all(layer.keys.mean is not None for layer in self.layers.values())

    def serves(self, config: CacheConfig) -> bool:
        """Whether it has what balanced, low-rank, scaled and centred sides of `config` need; learned maps are
        always named by their file."""
        needs = (
            (config.balanced or config.low, self.balanced),
            (config.scaled, self.scaled),
            (config.centred, self.centred),
        )
        return all(has for needed, has in needs if needed)

    @property
    def _paired(self) -> bool:
        return all(
            getattr(layer, side).balance is not None
            for layer in self.layers.values()
            for side in SIDES
        )

    def _tensors(self) -> dict[str, np.ndarray]:
        out = {}
        for name, layer in self.layers.items():
            for side in SIDES:
                basis = getattr(layer, side)
                out |= {f"{name}.{side}.{part}": getattr(basis, part) for part in TENSORS}
                if basis.balance is not None:
                    out |= {f"{name}.{side}.{p}": getattr(basis.balance, p) for p in MORE}
                if basis.peaks is not None:
                    out[f"{name}.{side}.{PEAKS}"] = basis.peaks
                if basis.mean is not None:
                    out[f"{name}.{side}.{MEAN}"] = basis.mean
        return out

    def with_clips_of(self, old: Calibration) -> tuple[Calibration, int]:
        """Add the clips of `old` for formats without one here.

        Returns the calibration and how many clips were left out because their transform has changed by more
        than two runs of one calibration differ.
        """
        layers, lost = {}, 0
        for name, layer in self.layers.items():
            sides = {}
            for side in SIDES:
                basis, before = getattr(layer, side), getattr(old.layers.get(name), side, None)
                clips = dict(before.clips) if before is not None else {}
                kept = {form: clip for form, clip in clips.items() if basis.is_like(before, form)}
                lost += len(clips) - len(kept)
                sides[side] = replace(basis, clips={**kept, **basis.clips})
            layers[name] = replace(layer, **sides)
        return replace(self, layers=layers), lost

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
        known = {name: getattr(self, name) for name in FIELDS}
        if self.learned:
            known["learned"] = self.learned.as_dict()
        if self.plan:
            known["plan"] = dict(self.plan)
        return {"format": FORMAT, "digest": self.digest, **known, "layers": layers}

    def check(self, shapes: Mapping[str, tuple[int, int, int]], fingerprint: str | None) -> None:
        """Raise UserError unless made for this model. shapes: (kv heads, key dim, value dim) of each
        layer that needs rotations. fingerprint: the model's, None if unknown."""
        if fingerprint is not None and not same_model(self.fingerprint, fingerprint):
            raise self._fault(
                f"belongs to another model; got one for {self.model} ({self.fingerprint}), this "
                f"model is {fingerprint}"
            )
        for name, wanted in shapes.items():
            layer = self.layers.get(name)
            if layer is None:
                raise self._fault(
                    f"has no rotation for layer {name}; got {len(self.layers)} layers"
                )
            got = (layer.kv_heads, layer.keys.values.shape[1], layer.values.values.shape[1])
            if got != tuple(wanted):
                words = "{} kv heads of {} and {} dims"
                raise self._fault(
                    f"is of another shape in layer {name}; got {words.format(*got)}, this model has "
                    f"{words.format(*wanted)}"
                )

    def check_balanced(self) -> None:
        """Raise UserError if balanced transforms are missing."""
        if not self.balanced:
            raise self._fault(
                "holds no balanced transforms: an older version made it, or another --target than "
                "attention, or it has learned ones"
            )

    def check_scaled(self) -> None:
        """Raise UserError if the peaks of channels are missing."""
        if not self.scaled:
            raise self._fault("holds no scales per channel: an older version made it")

    def check_centred(self) -> None:
        """Raise UserError if the means of keys are missing."""
        if not self.centred:
            raise self._fault("holds no means of keys: an older version made it")

    def check_learned(self) -> None:
        """Raise UserError if learned transforms are missing."""
        if self.learned is None:
            raise self._fault("holds no learned transforms", " --learn scale")

    def _fault(self, what: str, more: str = "") -> UserError:
        return _fault(self.path or "it", what, more)


def _fault(path: Path | str, what: str, more: str = "") -> UserError:
    return UserError(
        f"[calibration] {path} {what}; make one with mlxkv calibrate --model MODEL{more} -o FILE"
    )


def write(path: Path, calibration: Calibration) -> None:
    """Write the file, private, whole or not at all. Raises MachineError if that fails."""
    metadata = {"mlxkv": json.dumps(calibration.header())}
    tensors = {k: np.ascontiguousarray(x) for k, x in calibration._tensors().items()}
    try:
        files.make_folder(path.parent)
        with files.written(path) as file:
            file.write(save(tensors, metadata))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise MachineError(f"[calibration] could not write {path}: {reason}") from None


def read(path: Path | str) -> Calibration:
    """Read and check a file, or the one in a folder. Raises UserError on any fault."""
    path = console.user_path(path, "--calibration")
    if path.is_dir():
        path = path / f"{NAME}.safetensors"
    header, tensors = _open(path, True)
    try:
        layers = {}
        for name, entry in header["layers"].items():
            sides = {}
            parts = (
                entry["floored"],
                entry.get("clips") or ({}, {}),
                entry.get("lacking") or (None, None),
            )
            for side, floored, clips, lacking in zip(SIDES, *parts, strict=True):
                where = f"layer {name}, {side}"
                values, vectors = (tensors[f"{name}.{side}.{part}"] for part in TENSORS)
                _check_basis(path, where, values, vectors, entry["kv_heads"])
                _check_clips(path, where, clips)
                found = None
                if lacking is not None:
                    down, sigma = (tensors[f"{name}.{side}.{part}"] for part in MORE)
                    found = Balance(down, sigma, whole(lacking, "lacking"))
                    _check_balance(path, where, found, values.shape)
                peaks = tensors.get(f"{name}.{side}.{PEAKS}")
                _check_peaks(path, where, peaks, values.shape)
                mean = tensors.get(f"{name}.{side}.{MEAN}") if side == "keys" else None
                if mean is not None and mean.shape != (entry["kv_heads"], values.shape[1]):
                    raise ValueError(f"{where}: shape {mean.shape}")
                if mean is not None:
                    _check_numbers(path, where, mean)
                floored = whole(floored, "floored")
                sides[side] = Basis(values, vectors, floored, clips, found, peaks, mean)
            layers[name] = Layer(whole(entry["kv_heads"], "kv_heads", 1), **sides)
        known = {name: header[name] for name in FIELDS}
        learned = Learned.of(header.get("learned"))
        for name, kind in FIELDS.items():
            if type(known[name]) is not kind:
                raise TypeError(name)
        if not layers or not set(known["parts"]) <= set(matrices.PARTS):
            raise ValueError("layers" if not layers else "parts")
        if learned and any(x.balance is None for y in layers.values() for x in (y.keys, y.values)):
            raise ValueError("down")
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _fault(path, f"has a header or tensors with parts missing ({error})") from None
    plan = header.get("plan")  # looked at where it is asked for: `--kv FILE`
    if plan is not None and not isinstance(plan, dict):
        raise _fault(path, "holds a plan that is none")
    out = Calibration(**known, layers=layers, path=path, learned=learned, plan=plan)
    if out.digest != header.get("digest"):
        raise _fault(path, "was changed after it was made: its digest differs")
    return out


def _open(path: Path, tensors: bool) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the header, and the tensors if asked for, of a file of a known format. Raises UserError."""
    try:
        file = untrusted.safetensors(path)
        if file.size > LARGEST:
            raise Unsound(f"larger than {LARGEST} bytes")
    except FileNotFoundError:
        raise _fault(path, "is not there") from None
    except Unsound as error:
        raise _fault(path, f"is no safetensors file, or only part of one ({error})") from None
    try:
        header = untrusted.parse(file.metadata["mlxkv"])
        version = header["format"]
    except (KeyError, TypeError):
        raise _fault(path, "is not a calibration of mlxkv: it has no such header") from None
    except Unsound as error:
        raise _fault(path, f"is not a calibration of mlxkv: its header {error}") from None
    if type(version) is not int or version not in FORMATS:
        choices = ", ".join(map(str, FORMATS))
        raise _fault(path, f"has format {str(version)[:20]}; this version reads {choices}")
    try:
        return header, load_file(path) if tensors else {}
    except (SafetensorError, OSError, ValueError, TypeError):  # it may be another file by now
        raise _fault(path, "is no safetensors file, or only part of one") from None


def _check_basis(
    path: Path, where: str, values: np.ndarray, vectors: np.ndarray, kv_heads: int
) -> None:
    heads, dims = values.shape
    if vectors.shape != (heads, dims, dims) or heads not in (1, kv_heads):
        raise ValueError(f"{where}: shapes {values.shape}, {vectors.shape}")
    _check_numbers(path, where, values, vectors)
    if (values <= 0).any():
        raise _fault(path, f"holds eigenvalues that are not positive in {where}")
    if (off := matrices.off_orthonormal(vectors)) > ORTHONORMAL:
        raise _fault(path, f"is not orthonormal in {where}: off by {off:.2g}")


def _check_balance(path: Path, where: str, found: Balance, shape: tuple[int, int]) -> None:
    """Raise UserError or ValueError on a faulty transform. shape: the eigenvalues', already checked."""
    if found.sigma.shape != shape or found.down.shape != (*shape, shape[1]):
        raise ValueError(f"{where}: shapes {found.sigma.shape}, {found.down.shape}")
    _check_numbers(path, where, found.sigma, found.down)
    if (found.sigma <= 0).any():
        raise _fault(path, f"holds sigmas that are not positive in {where}")
    if reason := balance.fault(found.down):
        raise _fault(path, f"holds a transform that is not invertible in {where}: {reason}")


def _check_peaks(path: Path, where: str, peaks: np.ndarray | None, shape: tuple[int, int]) -> None:
    """Raise UserError or ValueError on faulty peaks. shape: the eigenvalues', already checked."""
    if peaks is None:
        return
    if peaks.shape != shape:
        raise ValueError(f"{where}: shape {peaks.shape}")
    _check_numbers(path, where, peaks)
    if (peaks <= 0).any():
        raise _fault(path, f"holds peaks that are not positive in {where}")


def _check_numbers(path: Path, where: str, *many: np.ndarray) -> None:
    for x in many:
        if x.dtype != np.float32 or not np.isfinite(x).all():
            raise _fault(path, f"holds NaN, infinity or no float32 numbers in {where}")


def _check_clips(path: Path, where: str, clips: Mapping[str, float]) -> None:
    for form, clip in clips.items():
        if type(clip) not in (int, float) or not 0 < clip <= 1:  # NaN is neither
            raise _fault(
                path,
                f"has a clip that is no share above 0 and up to 1 in {where}; got {form}: {clip}",
            )


def folder() -> Path:
    """Return the folder of the user's own calibrations, one file per model."""
    return console.cache_dir() / "calibration"


def kept_path(fingerprint: str, more: str = "") -> Path:
    """Where the user's calibration of a model is kept. more: of its name, for one that stands beside it."""
    return folder() / f"{names(fingerprint)[0]}{more}.safetensors"


def find(
    fingerprint: str, model_folder: Path | None, config: CacheConfig | None = None
) -> Calibration | None:
    """Find the calibration shipped with the model, else the user's own, else None.

    config: accept only one that serves it. Raises UserError if the file to use is faulty.
    """
    shipped = sorted(model_folder.glob(f"{NAME}*.safetensors")) if model_folder else []
    for path in shipped:
        # The hard form of an embedded model shares the folder with the plain one; each has a file.
        mark = _open(path, False)[0].get("fingerprint")
        if len(shipped) == 1 or same_model(str(mark), fingerprint):
            found = read(path)
            if config is None or found.serves(config):
                return found
            break
    for mark in names(fingerprint):  # one that an earlier version kept has the older name
        if (path := kept_path(mark)).exists():
            found = read(path)
            return found if config is None or found.serves(config) else None
    return None


def with_digest(digest: str) -> Calibration | None:
    """Find the user's calibration with this digest, or None."""
    return next((read(path) for path, header in _kept() if header.get("digest") == digest), None)


def _kept() -> Iterator[tuple[Path, dict]]:
    for path in sorted(folder().glob("*.safetensors")):
        try:
            yield path, _open(path, False)[0]
        except UserError:
            continue  # a broken file of another model does not matter here
