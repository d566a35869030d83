"""What a calibration holds, transforms of keys and values by layer, and its file: safetensors with a versioned header.

Tensors, float32: `LAYER.SIDE.vectors` [G, D, D] with an eigenvector per column, and
`LAYER.SIDE.values` [G, D], the eigenvalues. LAYER is the position in the model's list of
caches (`3`, or `3.1` inside a CacheList), SIDE is `keys` or `values`. `LAYER.SIDE.down` [G, D, D] and
`LAYER.SIDE.sigma` [G, D] are a balanced transform (`mlxkv.formats.calibration.balance`); if the header has an entry
`learned` (`mlxkv.formats.calibration.learned`), `down` is a learned transform instead, and `sigma` the
rms of what it stores. `LAYER.SIDE.peaks` [G, D]: the largest absolute values of the channels after SRFT with seed 0,
from which presets with a scale per channel make their scales. `LAYER.keys.mean` [G, D]: the mean of the keys of each
kv head, which presets with centred keys take from them.

Where it was measured, `LAYER.exchange` [2, G] of every layer, what errors of keys and of values cost the model
(`mlxkv.spec.mixed_bits`), by which mixed bits are shared out; without it all layers count alike. And
`LAYER.keys.queries` [G, D, D], the second moment of queries, mostly by what errors of their scores cost, for which
maps of centred keys are made; without it all queries count alike.

The metadata entry `mlxkv` holds the header as JSON. `positions`: moments of keys are averages over so many
positions, from 0 (`mlxkv.spec.positions`). Searched clips stand there by layer, side and format: `"clips":
[{"int2 g128": 0.9}, {"int2 g128": 0.94}]`, or null where none were searched. The formats of other transforms than a
rotation per kv head begin with their name: "balanced int2 g128", "learned int2 g64", "srft-scaled int4 g32 symmetric".
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
from mlxkv.errors import MachineError, UserError, cut
from mlxkv.formats import matrices
from mlxkv.formats.calibration import balance as balances
from mlxkv.formats.calibration.balance import Balance
from mlxkv.formats.calibration.learned import Learned
from mlxkv.formats.config import (
    BALANCED,
    CENTRED,
    LEARNED,
    MIXED_BITS,
    PAIRED,
    PCA,
    SCALED,
    CacheConfig,
)
from mlxkv.untrusted import Unsound, whole

FORMAT = 5
PARTS = b"uhp"  # the factors of rotations: U, H and P
NAME = "mlxkv-calibration"
LARGEST = 1 << 30  # bytes; the maps of 80 layers with 8 kv heads of 128 dims have 340 MB
SIDES = ("keys", "values")
# Tensors of a side: of its balanced transform, of every side, and of keys alone (queries may be missing).
MAPS, TENSORS, OF_KEYS = ("down", "sigma"), ("values", "vectors", "peaks"), ("mean", "queries")
SQUARE = ("vectors", "down", "queries")  # [G, D, D]; others are [G, D]
POSITIVE = {"values": "eigenvalues", "sigma": "sigmas", "peaks": "peaks"}  # and what to call them
EXCHANGE = "exchange"
ORTHONORMAL = 1e-4  # largest entry of |U^T U - I| in a sound file
FIELDS = {
    **dict.fromkeys(("fingerprint", "model", "model_type", "text", "text_digest", "version"), str),
    **dict.fromkeys(("tokens", "positions"), int),
}
BALANCES = {BALANCED, PCA, MIXED_BITS}  # transforms that are made of balanced ones
Kinds = tuple[str, str]  # of keys and values: `CacheConfig.fitted`


@dataclass(frozen=True, eq=False)
class Basis:
    """Calibration of one side of a layer.

    values, vectors: eigenvalues [G, D], ascending, and eigenvectors [G, D, D], float32.
    balance: the balanced or learned transform.
    peaks: largest absolute values [G, D] after SRFT, above 0.
    floored: number of eigenvalues that were below float32 resolution.
    clips: searched clips, by `Side.format`; other formats keep the preset's.
    mean: of keys, [G, D]; None for values.
    queries: the second moment [G, D, D] of queries, mostly by what errors of their scores cost
    (`mlxkv.spec.mixed_bits`);
        None for values, and where that was not measured.
    """

    values: np.ndarray
    vectors: np.ndarray
    balance: Balance
    peaks: np.ndarray
    floored: int = 0
    clips: Mapping[str, float] = field(default_factory=dict)
    mean: np.ndarray | None = None
    queries: np.ndarray | None = None

    def is_like(self, basis: Basis, form: str) -> bool:
        """Return whether a side has the transform that the clips of `form` were searched for."""
        sides = [self, basis]
        if form.startswith(tuple(CENTRED)):
            if not _close(self.mean, basis.mean):
                return False
            if not (self.queries is basis.queries is None or _close(self.queries, basis.queries)):
                return False
        if form.startswith(PAIRED):
            sides = [side.balance.down for side in sides]
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
        keys, and of values lost as a whole (`mlxkv.spec.mixed_bits`); None where that was not measured.
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
    positions: how many, from 0, the moments of keys hold for.
    learned: how the transforms were learned, None where they are balanced.
    """

    fingerprint: str
    model: str
    model_type: str
    tokens: int
    text: str
    text_digest: str
    layers: dict[str, Layer]
    positions: int
    version: str = __version__
    path: Path | None = field(default=None, compare=False)
    learned: Learned | None = None

    def shortfall(self, context: int | None) -> str | None:
        """Return what to say where a model's context is longer than it holds for, or None."""
        if context is None or self.positions >= context:
            return None
        name = self.path or "this one"
        return f"[calibration] {name} holds for positions up to {self.positions:,}; longer contexts lose quality"

    @cached_property
    def digest(self) -> str:
        """16 hex digits of a hash of the transforms; saved caches name this, not a file."""
        total = sha256(PARTS)
        if self.learned:
            total.update(repr(self.learned).encode())
        for name, x in sorted(self._tensors().items()):
            total.update(f"{name} {x.shape}".encode())
            total.update(np.ascontiguousarray(x, "<f4").tobytes())
        return total.hexdigest()[:16]

    def serves(self, kinds: Kinds) -> bool:
        """Return whether it has balanced maps, where sides of these kinds (`CacheConfig.fitted`) are made of them."""
        names = (kind.split()[0] for kind in kinds)
        return self.learned is None or not BALANCES & {CENTRED.get(name, name) for name in names}

    def check_kinds(self, kinds: Kinds) -> None:
        """Raise UserError where sides of these kinds (`CacheConfig.fitted`) need maps that it does not hold."""
        if not self.serves(kinds):
            raise self._fault("holds learned transforms in place of balanced ones")
        if LEARNED in kinds and self.learned is None:
            raise self._fault("holds no learned transforms", " --learn scale")

    def _tensors(self) -> dict[str, np.ndarray]:
        out = {}
        for name, layer in self.layers.items():
            if layer.exchange is not None:
                out[f"{name}.{EXCHANGE}"] = layer.exchange
            for side in SIDES:
                basis = getattr(layer, side)
                parts = {part: getattr(basis.balance, part) for part in MAPS}
                parts |= {part: getattr(basis, part) for part in TENSORS + OF_KEYS}
                out |= {f"{name}.{side}.{p}": x for p, x in parts.items() if x is not None}
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
                "lacking": [side.balance.floored for side in sides],
                "clips": clips if any(clips) else None,
            }
        fields = {name: getattr(self, name) for name in FIELDS}
        if self.learned:
            fields["learned"] = self.learned.as_dict()
        return {"format": FORMAT, "digest": self.digest, **fields, "layers": layers}

    def check(self, shapes: Mapping[str, tuple[int, int, int]], fingerprint: str | None) -> None:
        """Raise UserError unless made for this model. shapes: (kv heads, key dim, value dim) of each
        layer that needs rotations. fingerprint: the model's, None if unknown."""
        if fingerprint is not None and self.fingerprint != fingerprint:
            raise self._fault(
                f"belongs to another model; got one for {cut(self.model)} ({cut(self.fingerprint)}), this "
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

    def _fault(self, problem: str, options: str = "") -> UserError:
        return fault(self.path or "it", problem, options)


def fault(path: Path | str, problem: str, options: str = "") -> UserError:
    return UserError(
        f"[calibration] {path} {problem}; make one with mlxkv calibrate --model MODEL{options} -o FILE"
    )


# -- the file


def write_calibration(path: Path, calibration: Calibration) -> None:
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


def read_calibration(path: Path | str) -> Calibration:
    """Read and check a file, or the one in a folder. Raises UserError on any fault."""
    path = console.user_path(path, "--calibration")
    if path.is_dir():
        path = path / f"{NAME}.safetensors"
    header, tensors = _open(path, True)
    try:
        layers = {
            name: _layer(path, name, entry, tensors) for name, entry in header["layers"].items()
        }
        if len({layer.exchange is None for layer in layers.values()}) == 2:
            raise ValueError(EXCHANGE)
        fields = {name: header[name] for name in FIELDS}
        for name, kind in FIELDS.items():
            if type(fields[name]) is not kind:
                raise TypeError(name)
        whole(fields["positions"], "positions", 1)
        learned = Learned.of(header.get("learned"))
        if not layers:
            raise ValueError("layers")
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise fault(path, f"has a header or tensors with parts missing ({error})") from None
    out = Calibration(**fields, layers=layers, path=path, learned=learned)
    if out.digest != header.get("digest"):
        raise fault(path, "was changed after it was made: its digest differs")
    return out


def _layer(path: Path, name: str, entry: dict, tensors: Mapping[str, np.ndarray]) -> Layer:
    """Check one layer of a file. Raises UserError, and what `read_calibration` takes for parts missing."""
    heads = whole(entry["kv_heads"], "kv_heads", 1)
    counts = zip(SIDES, entry["floored"], entry["clips"] or ({}, {}), entry["lacking"], strict=True)
    keys, values = (
        _basis(path, f"{name}.{side}", heads, floored, clips, lacking, tensors)
        for side, floored, clips, lacking in counts
    )
    if (exchange := tensors.get(f"{name}.{EXCHANGE}")) is not None:
        _check_numbers(path, f"layer {name}", exchange, (len(SIDES), heads), "costs")
    return Layer(heads, keys, values, exchange)


def _basis(
    path: Path,
    name: str,
    heads: int,
    floored: int,
    clips: Mapping[str, float],
    lacking: int,
    tensors: Mapping[str, np.ndarray],
) -> Basis:
    """Check one side of a layer, whose tensors begin with `name`."""
    layer, _, side = name.rpartition(".")
    place, needed = f"layer {layer}, {side}", MAPS + TENSORS
    if side == "keys":
        needed += OF_KEYS if f"{name}.queries" in tensors else OF_KEYS[:1]
    stored = {part: tensors[f"{name}.{part}"] for part in needed}
    dims = stored["values"].shape[1]
    for part, x in stored.items():
        shape = (heads, dims, dims) if part in SQUARE else (heads, dims)
        _check_numbers(path, place, x, shape, POSITIVE.get(part, ""))
    if (off := matrices.off_orthonormal(stored["vectors"])) > ORTHONORMAL:
        raise fault(path, f"is not orthonormal in {place}: off by {off:.2g}")
    for form, clip in clips.items():
        if type(clip) not in (int, float) or not 0 < clip <= 1:  # NaN is neither
            problem = (
                f"has a clip that is no share above 0 and up to 1 in {place}; got {form}: {clip}"
            )
            raise fault(path, problem)
    down, sigma = map(stored.pop, MAPS)
    balance = Balance(down, sigma, whole(lacking, "lacking"))
    if reason := balances.fault(balance.down):
        raise fault(path, f"holds a transform that is not invertible in {place}: {reason}")
    if "queries" in stored and not balances.is_moment(stored["queries"]):
        raise fault(path, f"holds no second moment of queries in {place}")
    return Basis(floored=whole(floored, "floored"), clips=clips, balance=balance, **stored)


def _open(path: Path, tensors: bool) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the header, and the tensors if asked for, of a file of a known format. Raises UserError."""
    try:
        file = untrusted.safetensors(path)
        if file.size > LARGEST:
            raise Unsound(f"larger than {LARGEST} bytes")
    except FileNotFoundError:
        raise fault(path, "is not there") from None
    except Unsound as error:
        raise fault(path, f"is no safetensors file, or only part of one ({error})") from None
    try:
        header = untrusted.parse(file.metadata["mlxkv"])
        version = header["format"]
    except (KeyError, TypeError):
        raise fault(path, "is not a calibration of mlxkv: it has no such header") from None
    except Unsound as error:
        raise fault(path, f"is not a calibration of mlxkv: its header {error}") from None
    if type(version) is not int or version != FORMAT:
        raise fault(path, f"has format {str(version)[:20]}; this version reads {FORMAT}")
    try:
        return header, load_file(path) if tensors else {}
    except (SafetensorError, OSError, ValueError, TypeError):  # it may be another file by now
        raise fault(path, "is no safetensors file, or only part of one") from None


def _check_numbers(
    path: Path, place: str, x: np.ndarray, shape: tuple[int, ...], positive: str = ""
) -> None:
    """Raise ValueError for another shape, UserError for numbers that are not float32 and finite. positive: what to call
    numbers that have to be above 0."""
    if x.shape != shape:
        raise ValueError(f"{place}: shape {x.shape}")
    if x.dtype != np.float32 or not np.isfinite(x).all():
        raise fault(path, f"holds NaN, infinity or no float32 numbers in {place}")
    if positive and (x <= 0).any():
        raise fault(path, f"holds {positive} that are not positive in {place}")


def folder() -> Path:
    """Return the folder of the user's own calibrations, one file per model."""
    return console.cache_dir() / "calibration"


def kept_path(fingerprint: str, suffix: str = "") -> Path:
    """Return where the user's calibration of a model is kept. suffix: of its name, for one that stands beside it."""
    return folder() / f"{fingerprint}{suffix}.safetensors"


def find(
    fingerprint: str, model_folder: Path | None, config: CacheConfig | None = None
) -> Calibration | None:
    """Find the calibration shipped with the model, else the user's own, else None.

    config: pass over a shipped one that does not serve it. Raises UserError if the file to use is faulty.
    """
    shipped = sorted(model_folder.glob(f"{NAME}*.safetensors")) if model_folder else []
    for path in shipped:
        mark = _open(path, False)[0].get("fingerprint")
        if len(shipped) == 1 or mark == fingerprint:
            calibration = read_calibration(path)
            if config is None or calibration.serves(config.fitted):
                return calibration
            break
    return read_calibration(path) if (path := kept_path(fingerprint)).exists() else None


def tell_reach(
    calibration: Calibration,
    context: int | None,
    advice: str = "; a new calibration may reach further",
) -> None:
    """Warn, once a process, where the context of a model is longer than its calibration holds for."""
    line = calibration.shortfall(context)
    if line is not None:
        console.warn_once(line + advice)


def with_digest(digest: str) -> Calibration | None:
    """Find the user's calibration with this digest, or None."""
    return next(
        (read_calibration(path) for path, header in _headers() if header.get("digest") == digest),
        None,
    )


def _headers() -> Iterator[tuple[Path, dict]]:
    for path in sorted(folder().glob("*.safetensors")):
        try:
            yield path, _open(path, False)[0]
        except UserError:
            continue  # a broken file of another model does not matter here
