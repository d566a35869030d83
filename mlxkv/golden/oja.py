"""The rows of low rank that follows the text in the golden table."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np

from mlxkv import oja, salience, sealed, segments, subspace
from mlxkv.attention import attend
from mlxkv.bounds import OJA_BOUNDS, Row, read, rms
from mlxkv.cache import View
from mlxkv.calibrated import Rotations
from mlxkv.config import PCA, CacheConfig, Side
from mlxkv.formats_lowrank import Half, LowRank
from mlxkv.sealed import NAMES
from mlxkv.segments import Segments

PAGE, WINDOW = 32, 8
RATES = {"pre": 0.10, "dec": 0.05, "one": 1.0}


def oja_rows():
    tensors, _ = read("oja")
    for dims in (int(name[:-4]) for name in tensors if name.endswith(".out")):
        given = {n.removeprefix(f"{dims}."): x for n, x in tensors.items()}
        yield from _rows(dims, given)


def _rows(dims: int, given: dict[str, np.ndarray]):
    q, k, v = (mx.array(given[name].astype(np.float32)) for name in "qkv")
    moment, u = given["moment"].astype(np.float64), given["u"]
    rank = u.shape[-1]

    def row(table: str, name: str, found, bound: str) -> Row:
        spec = given[name]
        error = rms(np.array(found, np.float64), spec)
        return Row(table, f"{dims}.{name}", spec.size, rms=error, bound=OJA_BOUNDS[bound])

    def same(name: str, found) -> Row:
        wrong = int((np.array(found) != given[name]).sum())
        return Row("salience", f"{dims}.{name}", given[name].size, wrong=wrong)

    made = subspace.basis(moment, rank)
    signs = np.sign((made * u).sum(-2, keepdims=True))  # of an eigenvector it is free
    yield row("subspace", "u", made * signs, "basis")
    yield same("ranks", subspace.ranks(moment, 0.95))
    seen = salience.importance(q[:, :, -WINDOW:], View((k, v)), dims**-0.5)
    batch = mx.array(given["salient"])
    yield same("salient", salience.salient(seen, batch.shape[1]))
    yield same("kept", salience.kept(salience.votes(seen), given["kept"].shape[-1]))
    x, start = salience.taken(k, batch), mx.array(u)[None]
    yield row("oja", "raw", oja.update(start, x, RATES["pre"], raw=True)[0], "update")
    for name, rate in RATES.items():
        yield row("oja", name, oja.update(start, x, rate)[0], "update")
    rows = np.array(x[0], np.float64)
    of_batch = np.einsum("gtd,gte->gde", rows, rows)
    yield row("subspace", "residual", subspace.residual(of_batch, u), "float16")
    yield row("subspace", "overlap", subspace.overlap(u, given["one"]), "basis")
    yield from _pages(dims, given, q, k, v, row)


def _pages(dims, given, q, k, v, row):
    old, new = (oja.following(mx.array(given[name])[None]) for name in ("u", "one"))
    rank = given["u"].shape[-1]
    side = Side(Half(), PCA, low=LowRank(rank=rank, follows=True))
    config = CacheConfig(side, side, sink=0, recent=0, page=PAGE)
    make = partial(sealed.store, config, (dims, dims), mx.float32)
    first, then = Rotations(old, old), Rotations(new, new)
    store = Segments(make, first, first, PAGE, side.low)
    store.append((k, v), 1)
    store.rebase(then)
    store.append((k, v), 1, PAGE)
    moved = segments.transported(store.runs[0], store.runs[1].codecs)
    yield row("oja", "moved", moved[NAMES[0]]["values"][0], "float16")
    view = View((k[:, :, 2 * PAGE :], v[:, :, 2 * PAGE :]), None, store.read(0, 2))
    out = attend(q[:, :, -given["out"].shape[2] :], view, dims**-0.5, "causal")
    yield row("attention", "out", out, "attention")
