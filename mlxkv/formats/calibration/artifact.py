"""Read, check, write and find calibration files: safetensors with a versioned header.

Tensors, float32: `LAYER.SIDE.vectors` [G, D, D] with an eigenvector per column, and
`LAYER.SIDE.values` [G, D], the eigenvalues. LAYER is the position in the model's list of
caches (`3`, or `3.1` inside a CacheList), SIDE is `keys` or `values`. The metadata entry `mlxkv`
holds the header as JSON.

Since format 2 a side may have a balanced transform (`mlxkv.formats.calibration.balance`):
`LAYER.SIDE.down` [G, D, D] and `LAYER.SIDE.sigma` [G, D]. If the header has an entry
`learned` (`mlxkv.formats.calibration.learned`), `down` is a learned transform instead, and `sigma` the
rms of what it stores.

Since format 3 a side may have `LAYER.SIDE.peaks` [G, D], the largest absolute values of the channels
after SRFT with seed 0, from which presets with a scale per channel make their scales; and there may be
`LAYER.keys.mean` [G, D], the mean of the keys of each kv head, which presets with centred keys take from them.

Since format 4 the header has an entry `positions`: moments of keys are averages over so many positions, from 0
(`mlxkv.spec.positions`), or null. Those of older files are of the positions of the text.

Since format 5 there may be `LAYER.exchange` [2, G] of every layer, what errors of keys and of values cost the model
(`mlxkv.spec.fill`), by which bits by direction are shared out; without it all layers count alike. And
`LAYER.keys.queries` [G, D, D], the second moment of queries, half by what errors of their scores cost, for which
maps of centred keys are made; without it all queries count alike.

The header holds searched clips by layer, side and format: `"clips": [{"int2 g128": 0.9}, {"int2 g128":
0.94}]`, or null where none were searched. The formats of other transforms than a rotation per
kv head begin with their name: "balanced int2 g128", "learned int2 g64", "srft-scaled int4 g32 symmetric".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from mlxkv import console, files, untrusted
from mlxkv.errors import MachineError, UserError
from mlxkv.formats import matrices
from mlxkv.formats.calibration import balance as balances
from mlxkv.formats.calibration.balance import Balance
from mlxkv.formats.calibration.contents import (
    EXCHANGE,
    FIELDS,
    MEAN,
    MORE,
    ORTHONORMAL,
    PARTS,
    PEAKS,
    QUERIES,
    SIDES,
    TENSORS,
    Basis,
    Calibration,
    Layer,
    fault,
)
from mlxkv.formats.calibration.learned import Learned
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.saved.marks import DIGITS, same_model
from mlxkv.untrusted import Unsound, whole

LARGEST = 1 << 30  # bytes; the maps of 80 layers with 8 kv heads of 128 dims have 340 MB
FORMATS = (1, 2, 3, 4, 5)  # that this version reads
NAME = "mlxkv-calibration"
_warnings: set[str] = set()  # warnings of this process


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
                place = f"layer {name}, {side}"
                check = partial(_check_numbers, path, place)
                values, vectors = (tensors[f"{name}.{side}.{part}"] for part in TENSORS)
                heads, dims = values.shape
                if heads != entry["kv_heads"]:
                    raise ValueError(f"{place}: {heads} heads")
                check(values, (heads, dims), "eigenvalues")
                check(vectors, (heads, dims, dims))
                if (off := matrices.off_orthonormal(vectors)) > ORTHONORMAL:
                    raise fault(path, f"is not orthonormal in {place}: off by {off:.2g}")
                _check_clips(path, place, clips)
                balance = None
                if lacking is not None:
                    down, sigma = (tensors[f"{name}.{side}.{part}"] for part in MORE)
                    balance = Balance(down, sigma, whole(lacking, "lacking"))
                    check(sigma, (heads, dims), "sigmas")
                    check(down, (heads, dims, dims))
                    if reason := balances.fault(down):
                        raise fault(
                            path, f"holds a transform that is not invertible in {place}: {reason}"
                        )
                if (peaks := tensors.get(f"{name}.{side}.{PEAKS}")) is not None:
                    check(peaks, (heads, dims), "peaks")
                mean, queries = (
                    tensors.get(f"{name}.{side}.{part}") if side == "keys" else None
                    for part in (MEAN, QUERIES)
                )
                if mean is not None:
                    check(mean, (heads, dims))
                if queries is not None:
                    check(queries, (heads, dims, dims))
                    if not balances.is_moment(queries):
                        raise fault(path, f"holds no second moment of queries in {place}")
                floored = whole(floored, "floored")
                sides[side] = Basis(values, vectors, floored, clips, balance, peaks, mean, queries)
            if (exchange := tensors.get(f"{name}.{EXCHANGE}")) is not None:
                shape = len(SIDES), entry["kv_heads"]
                _check_numbers(path, f"layer {name}", exchange, shape, "costs")
            layers[name] = Layer(
                whole(entry["kv_heads"], "kv_heads", 1), **sides, exchange=exchange
            )
        if len({layer.exchange is None for layer in layers.values()}) == 2:
            raise ValueError(EXCHANGE)
        fields = {name: header[name] for name in FIELDS}
        positions = header["positions"] if header["format"] >= 4 else None
        if positions is not None:
            whole(positions, "positions", 1)
        learned = Learned.of(header.get("learned"))
        for name, kind in FIELDS.items():
            if type(fields[name]) is not kind:
                raise TypeError(name)
        if not layers or header.get("parts", PARTS) != PARTS:
            raise ValueError("layers" if not layers else "parts")
        if learned and any(x.balance is None for y in layers.values() for x in (y.keys, y.values)):
            raise ValueError("down")
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise fault(path, f"has a header or tensors with parts missing ({error})") from None
    out = Calibration(**fields, layers=layers, path=path, learned=learned, positions=positions)
    if out.digest != header.get("digest"):
        raise fault(path, "was changed after it was made: its digest differs")
    return out


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
    if type(version) is not int or version not in FORMATS:
        choices = ", ".join(map(str, FORMATS))
        raise fault(path, f"has format {str(version)[:20]}; this version reads {choices}")
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


def _check_clips(path: Path, place: str, clips: Mapping[str, float]) -> None:
    for form, clip in clips.items():
        if type(clip) not in (int, float) or not 0 < clip <= 1:  # NaN is neither
            raise fault(
                path,
                f"has a clip that is no share above 0 and up to 1 in {place}; got {form}: {clip}",
            )


def folder() -> Path:
    """Return the folder of the user's own calibrations, one file per model."""
    return console.cache_dir() / "calibration"


def kept_path(fingerprint: str, suffix: str = "") -> Path:
    """Return where the user's calibration of a model is kept. suffix: of its name, for one that stands beside it."""
    return folder() / f"{fingerprint[:DIGITS]}{suffix}.safetensors"


def find(
    fingerprint: str, model_folder: Path | None, config: CacheConfig | None = None
) -> Calibration | None:
    """Find the calibration shipped with the model, else the user's own, else None.

    config: accept only one that serves it. Raises UserError if the file to use is faulty.
    """
    shipped = sorted(model_folder.glob(f"{NAME}*.safetensors")) if model_folder else []
    for path in shipped:
        mark = _open(path, False)[0].get("fingerprint")
        if len(shipped) == 1 or same_model(str(mark), fingerprint):
            calibration = read(path)
            if config is None or calibration.serves(config):
                return calibration
            break
    if not (path := kept_path(fingerprint)).exists():
        return None
    calibration = read(path)
    return calibration if config is None or calibration.serves(config) else None


def tell_reach(calibration: Calibration, context: int | None) -> None:
    """Warn, once a process, where the context of a model is longer than its calibration holds for."""
    line = calibration.shortfall(context)
    if line is not None and line not in _warnings:
        _warnings.add(line)
        console.warn(line)


def with_digest(digest: str) -> Calibration | None:
    """Find the user's calibration with this digest, or None."""
    return next((read(path) for path, header in _headers() if header.get("digest") == digest), None)


def _headers() -> Iterator[tuple[Path, dict]]:
    for path in sorted(folder().glob("*.safetensors")):
        try:
            yield path, _open(path, False)[0]
        except UserError:
            continue  # a broken file of another model does not matter here
