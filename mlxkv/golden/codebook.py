"""The rows of codebook codes and polar trees in the golden table."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlxkv import levels, packing, sealed, transform
from mlxkv.attention import attend
from mlxkv.bounds import (
    BOUNDS,
    FITTED_BOUND,
    LEVELS_BOUND,
    NORM_BOUND,
    Row,
    compare_codes,
    read,
    rms,
    steps_off,
)
from mlxkv.cache import View
from mlxkv.codec import Codec
from mlxkv.config import CacheConfig, Codebook, PolarTree, Side
from mlxkv.formats_codebook import TREE_BITS
from mlxkv.quantizers import polar_tree


def _floats(tensors: dict, name: str) -> mx.array:
    return mx.array(tensors[name].astype(np.float32))


def _steps_off(ours: mx.array, spec: np.ndarray) -> int:
    return steps_off(np.array(ours), spec)


def _dims(tensors: dict) -> list[int]:
    return [int(name[:-4]) for name in tensors if name.endswith(".out")]


def codebook_rows():
    """Levels, rotations, codes and scales of every width; the residual stage; outlier channels."""
    tensors, _ = read("codebook")
    for dims in _dims(tensors):
        x, page = _floats(tensors, f"{dims}.x"), tensors[f"{dims}.x"].shape[2]
        made = np.array(transform.make("random", dims, 0).down)[:3]
        spec = tensors[f"{dims}.rotation"]
        yield Row("rotations", f"random.{dims}", spec.size, 0, 0, rms(made, spec), 1e-6)
        for bits in (1, 2, 3, 4):
            key = f"{dims}.{bits}"
            spec = tensors[f"{key}.levels"]
            error = rms(levels.sphere(dims, bits), spec)
            yield Row("levels", key, spec.size, rms=error, bound=LEVELS_BOUND)
            stored = Codec(Side(Codebook(bits), "random"), dims, page).encode(x)
            codes = np.array(packing.unpack(stored["codes"], bits, dims))
            row = compare_codes(
                "codebook", key, codes, tensors[f"{key}.codes"], tensors[f"{key}.near"]
            )
            yield _with(row, _steps_off(stored["scale"], tensors[f"{key}.scale"]))
            stored = Codec(Side(Codebook(bits, corrected=True), "random"), dims, page).encode(x)
            wrong = _steps_off(stored["scale"], tensors[f"{key}.corrected"])
            yield Row("codebook", f"{key}.corrected", page, wrong=wrong)
        yield from _residual_rows(tensors, dims, x, page)
        yield from _outlier_rows(tensors, dims, x, page)


def _with(row: Row, wrong: int) -> Row:
    return Row(row.table, row.case, row.values, row.differ, row.wrong + wrong)


def _residual_rows(tensors: dict, dims: int, x: mx.array, page: int):
    key, side = f"{dims}.qjl", Side(Codebook(3, residual=True), "random")
    code = Codec(side, dims, page)
    signs = np.array(packing.unpack(code.encode(x)["signs"], 1, dims))
    row = compare_codes("codebook", key, signs, tensors[f"{key}.signs"], tensors[f"{key}.near"])
    yield _with(row, _steps_off(code.encode(x)["length"], tensors[f"{key}.length"]))
    words = {
        "codes": packing.pack(mx.array(tensors[f"{dims}.2.codes"]), 2),
        "scale": mx.array(tensors[f"{dims}.2.scale"]),
    }
    given = {
        **words,
        "signs": packing.pack(mx.array(tensors[f"{key}.signs"]), 1),
        "length": mx.array(tensors[f"{key}.length"]),
    }
    decoded, spec = np.array(code.decode_stored(given, mx.float32)), tensors[f"{key}.decoded"]
    error = rms(decoded[:, :, :: page // spec.shape[2]], spec)
    yield Row("decode", f"codebook.{key}", spec.size, rms=error, bound=BOUNDS["decode"])
    sides = side, Side(Codebook(2), "random")
    yield _attended(tensors, f"codebook.{key}", dims, sides, (given, words))


def _outlier_rows(tensors: dict, dims: int, x: mx.array, page: int):
    code = Codec(Side(Codebook(2, outliers=True)), dims, page)
    stored = code.encode(x)
    chosen = np.array(packing.unpack(stored["channels"], 1, dims))[0, 0, 0].astype(bool)
    key = f"{dims}.split"
    wrong = int((chosen != tensors[f"{key}.channels"]).sum())
    yield Row("codebook", f"{key}.channels", dims, wrong=wrong)
    decoded, spec = np.array(code.decode(stored, mx.float32))[0, 0], tensors[f"{key}.decoded"]
    error = rms(decoded[:: page // spec.shape[0]], spec)
    yield Row("decode", f"codebook.{key}", spec.size, rms=error, bound=NORM_BOUND)


def polar_tree_rows():
    """Codebooks, codes and radii; codebooks fitted to a page."""
    tensors, _ = read("polar_tree")
    for level, bits in enumerate(TREE_BITS, 1):
        spec = tensors[f"book.{level}"]
        error = rms(levels.angles(level, bits), spec)
        yield Row("levels", f"polar-tree.{level}", spec.size, rms=error, bound=LEVELS_BOUND)
    for dims in _dims(tensors):
        x, page = _floats(tensors, f"{dims}.x"), tensors[f"{dims}.x"].shape[2]
        side = Side(PolarTree(), "random")
        code = Codec(side, dims, page)
        stored = code.encode(x)
        codes = polar_tree.codes_of(stored, dims, page)
        for level, ours in enumerate(codes, 1):
            spec = tensors[f"{dims}.codes.{level}"]
            ours = np.array(ours).reshape(spec.shape)
            near = tensors[f"{dims}.near.{level}"]
            yield compare_codes("polar-tree", f"{dims}.{level}", ours, spec, near)
        wrong = _steps_off(stored["radii"], tensors[f"{dims}.radii"])
        yield Row("polar-tree", f"{dims}.radii", tensors[f"{dims}.radii"].size, wrong=wrong)
        given = polar_tree.stored_of(
            [mx.array(tensors[f"{dims}.codes.{i}"]) for i in range(1, 5)],
            mx.array(tensors[f"{dims}.radii"]),
        )
        decoded, spec = np.array(code.decode_stored(given, mx.float32)), tensors[f"{dims}.decoded"]
        error = rms(decoded[:, :, :: page // spec.shape[2]], spec)
        yield Row("decode", f"polar-tree.{dims}", spec.size, rms=error, bound=BOUNDS["decode"])
        yield _attended(tensors, f"polar-tree.{dims}", dims, (side, side), (given, given))
    x = _floats(tensors, "online.x")
    for level, book in enumerate(polar_tree.fit(x), 1):
        spec = tensors[f"online.book.{level}"]
        error = rms(np.array(book), spec)
        yield Row("levels", f"online.{level}", spec.size, rms=error, bound=FITTED_BOUND)


def _attended(tensors: dict, case: str, dims: int, sides, stored) -> Row:
    """Attention over one page of given codes and nothing else."""
    spec, page = tensors[f"{dims}.out"], tensors[f"{dims}.x"].shape[2]
    store = sealed.store(CacheConfig(*sides, page=page), (dims, dims), mx.float32)
    store.restore(dict(zip(("keys", "values"), stored, strict=True)), 1)
    empty = mx.zeros((1, 1, 0, dims))
    view = View((empty, empty), None, store.read(0, 1))
    out = np.array(attend(_floats(tensors, f"{dims}.q"), view, dims**-0.5))
    return Row("attention", case, spec.size, rms=rms(out, spec), bound=BOUNDS["attention"])


TABLES = (codebook_rows, polar_tree_rows)
