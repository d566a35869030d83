"""The rows of low rank that follows the text in the golden table."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from cuda_track import oja, salience, segments, stores
from cuda_track.attention import attend
from cuda_track.cache import View
from cuda_track.calibrated import Rotations
from cuda_track.golden import array, floats, tensor
from cuda_track.sealed import NAMES
from cuda_track.segments import Segments
from mlxkv import subspace
from mlxkv.bounds import OJA_BOUNDS, Row, read, rms
from mlxkv.config import PCA, CacheConfig, Side
from mlxkv.formats_lowrank import Half, LowRank

PAGE, WINDOW = 32, 8
RATES = {"pre": 0.10, "dec": 0.05, "one": 1.0}


def oja_rows() -> Iterator[Row]:
    tensors, _ = read("oja")
    for dims in (int(name[:-4]) for name in tensors if name.endswith(".out")):
        given = {n.removeprefix(f"{dims}."): x for n, x in tensors.items()}
        yield from _rows(dims, given)


def _rows(dims: int, given: dict[str, np.ndarray]) -> Iterator[Row]:
    q, k, v = (floats(given[name]) for name in "qkv")
    moment, u = given["moment"].astype(np.float64), given["u"]

    def row(table: str, name: str, found, bound: str) -> Row:
        spec = given[name]
        found = found if isinstance(found, np.ndarray) else array(found)
        return Row(table, f"{dims}.{name}", spec.size, 0, 0, rms(found, spec), OJA_BOUNDS[bound])

    def same(name: str, found: np.ndarray) -> Row:
        wrong = int((found != given[name]).sum())
        return Row("salience", f"{dims}.{name}", given[name].size, wrong=wrong)

    made = subspace.basis(moment, u.shape[-1])
    signs = np.sign((made * u).sum(-2, keepdims=True))  # of an eigenvector it is free
    yield row("subspace", "u", made * signs, "basis")
    yield same("ranks", subspace.ranks(moment, 0.95))
    seen = salience.importance(q[:, :, -WINDOW:], View((k, v)), dims**-0.5)
    batch = tensor(given["salient"]).long()
    yield same("salient", array(salience.salient(seen, batch.shape[1])))
    yield same("kept", array(salience.kept(salience.votes(seen), given["kept"].shape[-1])))
    x, start = salience.taken(k, batch), floats(u)[None]
    yield row("oja", "raw", oja.update(start, x, RATES["pre"], raw=True)[0], "update")
    for name, rate in RATES.items():
        yield row("oja", name, oja.update(start, x, rate)[0], "update")
    rows = array(x[0]).astype(np.float64)
    of_batch = np.einsum("gtd,gte->gde", rows, rows)
    yield row("subspace", "residual", subspace.residual(of_batch, u), "float16")
    yield row("subspace", "overlap", subspace.overlap(u, given["one"]), "basis")
    yield from _pages(dims, given, q, k, v, row)


def _pages(dims, given, q, k, v, row) -> Iterator[Row]:
    old, new = (oja.following(floats(given[name])[None]) for name in ("u", "one"))
    side = Side(Half(), PCA, low=LowRank(rank=given["u"].shape[-1], follows=True))
    config = CacheConfig(side, side, sink=0, recent=0, page=PAGE)
    make = partial(stores.store, config, (dims, dims), k.device)
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


TABLES = (oja_rows,)
