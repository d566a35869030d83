"""The rows of codebook codes and polar trees in the golden table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from cuda_track import packing, transform
from cuda_track.attention import attend
from cuda_track.golden import array, codec_of, floats, tensor, view_of
from cuda_track.quantizers import polar_tree
from mlxkv.bounds import (
    BOUNDS,
    FITTED_BOUND,
    NORM_BOUND,
    Row,
    compare_codes,
    read,
    rms,
    steps_off,
)
from mlxkv.config import Codebook, PolarTree, Side


def _dims(tensors: dict) -> list[int]:
    return [int(name[:-4]) for name in tensors if name.endswith(".out")]


def codebook_rows() -> Iterator[Row]:
    """Rotations, codes and scales of every width; the residual stage; outlier channels."""
    tensors, _ = read("codebook")
    for dims in _dims(tensors):
        x, page = floats(tensors[f"{dims}.x"]), tensors[f"{dims}.x"].shape[2]
        made = array(transform.make("random", dims, 0).down)[:3]
        spec = tensors[f"{dims}.rotation"]
        yield Row("rotations", f"random.{dims}", spec.size, 0, 0, rms(made, spec), 1e-6)
        for bits in (1, 2, 3, 4):
            key = f"{dims}.{bits}"
            stored = codec_of(Side(Codebook(bits), "random"), dims, page).encode(x)
            codes = array(packing.unpack(stored["codes"], bits, dims))
            near = tensors[f"{key}.near"]
            row = compare_codes("codebook", key, codes, tensors[f"{key}.codes"], near)
            yield _with(row, _off(stored["scale"], tensors[f"{key}.scale"]))
            side = Side(Codebook(bits, corrected=True), "random")
            stored = codec_of(side, dims, page).encode(x)
            wrong = _off(stored["scale"], tensors[f"{key}.corrected"])
            yield Row("codebook", f"{key}.corrected", page, wrong=wrong)
        yield from _residual_rows(tensors, dims, x, page)
        yield from _outlier_rows(tensors, dims, x, page)


def _off(ours: torch.Tensor, spec: np.ndarray) -> int:
    return steps_off(array(ours), spec)


def _with(row: Row, wrong: int) -> Row:
    return replace(row, wrong=row.wrong + wrong)


def _residual_rows(tensors: dict, dims: int, x: torch.Tensor, page: int) -> Iterator[Row]:
    key, side = f"{dims}.qjl", Side(Codebook(3, residual=True), "random")
    code = codec_of(side, dims, page)
    made = code.encode(x)
    signs = array(packing.unpack(made["signs"], 1, dims))
    row = compare_codes("codebook", key, signs, tensors[f"{key}.signs"], tensors[f"{key}.near"])
    yield _with(row, _off(made["length"], tensors[f"{key}.length"]))
    words = {
        "codes": packing.pack(tensor(tensors[f"{dims}.2.codes"]), 2),
        "scale": tensor(tensors[f"{dims}.2.scale"]),
    }
    signs = packing.pack(tensor(tensors[f"{key}.signs"]), 1)
    given = {**words, "signs": signs, "length": tensor(tensors[f"{key}.length"])}
    decoded, spec = array(code.decode_stored(given, torch.float32)), tensors[f"{key}.decoded"]
    error = rms(decoded[:, :, :: page // spec.shape[2]], spec)
    yield Row("decode", f"codebook.{key}", spec.size, rms=error, bound=BOUNDS["decode"])
    codecs = code, codec_of(Side(Codebook(2), "random"), dims, page)
    yield _attended(tensors, f"codebook.{key}", dims, codecs, (given, words))


def _outlier_rows(tensors: dict, dims: int, x: torch.Tensor, page: int) -> Iterator[Row]:
    code, key = codec_of(Side(Codebook(2, outliers=True)), dims, page), f"{dims}.split"
    stored = code.encode(x)
    chosen = array(packing.unpack(stored["channels"], 1, dims))[0, 0, 0].astype(bool)
    wrong = int((chosen != tensors[f"{key}.channels"]).sum())
    yield Row("codebook", f"{key}.channels", dims, wrong=wrong)
    decoded, spec = array(code.decode(stored, torch.float32))[0, 0], tensors[f"{key}.decoded"]
    error = rms(decoded[:: page // spec.shape[0]], spec)
    yield Row("decode", f"codebook.{key}", spec.size, rms=error, bound=NORM_BOUND)


def polar_tree_rows() -> Iterator[Row]:
    """Codes and radii; codebooks fitted to a page."""
    tensors, _ = read("polar_tree")
    for dims in _dims(tensors):
        x, page = floats(tensors[f"{dims}.x"]), tensors[f"{dims}.x"].shape[2]
        code = codec_of(Side(PolarTree(), "random"), dims, page)
        stored = code.encode(x)
        for level, ours in enumerate(polar_tree.codes_of(stored, dims, page), 1):
            spec = tensors[f"{dims}.codes.{level}"]
            near = tensors[f"{dims}.near.{level}"]
            ours = array(ours).reshape(spec.shape)
            yield compare_codes("polar-tree", f"{dims}.{level}", ours, spec, near)
        spec = tensors[f"{dims}.radii"]
        yield Row("polar-tree", f"{dims}.radii", spec.size, wrong=_off(stored["radii"], spec))
        codes = [tensor(tensors[f"{dims}.codes.{i}"]) for i in range(1, 5)]
        given = polar_tree.stored_of(codes, tensor(tensors[f"{dims}.radii"]))
        decoded, spec = array(code.decode_stored(given, torch.float32)), tensors[f"{dims}.decoded"]
        error = rms(decoded[:, :, :: page // spec.shape[2]], spec)
        yield Row("decode", f"polar-tree.{dims}", spec.size, rms=error, bound=BOUNDS["decode"])
        yield _attended(tensors, f"polar-tree.{dims}", dims, (code, code), (given, given))
    for level, book in enumerate(polar_tree.fit(floats(tensors["online.x"])), 1):
        spec = tensors[f"online.book.{level}"]
        error = rms(np.array(book), spec)
        yield Row("levels", f"online.{level}", spec.size, rms=error, bound=FITTED_BOUND)


def _attended(tensors: dict, case: str, dims: int, codecs, stored) -> Row:
    """Attention over one page of given codes and nothing else."""
    spec = tensors[f"{dims}.out"]
    out = array(attend(floats(tensors[f"{dims}.q"]), view_of(codecs, stored), dims**-0.5))
    return Row("attention", case, spec.size, rms=rms(out, spec), bound=BOUNDS["attention"])


TABLES = (codebook_rows, polar_tree_rows)
