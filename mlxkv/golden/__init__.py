"""The golden table: does this machine give the numbers of the spec?

`run()` feeds the golden tensors (made from the `reference*.py` by `tests/make_golden.py`) to the
MLX code on the default device. Codes have to be equal, except where the spec's own value lies at a
rounding boundary: there one step is allowed and counted. Floats are compared by rms(x - spec) /
rms(spec).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlxkv import balance, learn, learnable, packing, rotation, sealed, transform
from mlxkv.attention import attend
from mlxkv.bounds import BOUNDS, LEARNED_SPEC, PAGE_SIDES, Row, compare_codes, read, rms
from mlxkv.cache import View
from mlxkv.calibrate import second_moment
from mlxkv.calibrated import Rotations
from mlxkv.codec import Codec
from mlxkv.config import BALANCED, CALIBRATED, Affine, CacheConfig, Side
from mlxkv.quantizers import affine
from mlxkv.transform import Transform


def transform_rows():
    tensors, _ = read("transforms")
    for key in (name[:-2] for name in tensors if name.endswith(".x")):
        name, dims = key.split(".")
        made = transform.make(name, int(dims), 1)
        x = mx.array(tensors[f"{key}.x"].astype(np.float32))[None, None]
        y = made.store(x)
        spec = tensors[f"{key}.y"]
        back = np.array(made.restore(y))[0, 0]
        error = max(rms(np.array(y)[0, 0], spec), rms(back, tensors[f"{key}.x"]))
        yield Row("transforms", key, spec.size, rms=error, bound=BOUNDS["transforms"])


def affine_rows():
    tensors, _ = read("affine")
    for key in (name.removesuffix(".codes") for name in tensors if name.endswith(".codes")):
        dims, bits, kind, axis, group = key.split(".")
        x = mx.array(tensors[f"x.{dims}"].astype(np.float32))
        spec = Affine(int(bits), int(group), kind == "sym", axis)
        stored = affine.encode(spec, x, x.shape[2])
        codes = np.array(packing.unpack(stored["codes"], spec.bits, int(dims)))
        yield compare_codes("encode", key, codes, tensors[f"{key}.codes"], tensors[f"{key}.near"])
        given = _stored(tensors, key, spec.bits)
        decoded = np.array(affine.decode(spec, given, int(dims), x.shape[2], mx.float32))
        kept = tensors[f"{key}.decoded"]  # of evenly spaced tokens
        yield Row(
            "decode",
            key,
            kept.size,
            rms=rms(decoded[:, :, :: x.shape[2] // kept.shape[2]], kept),
            bound=BOUNDS["decode"],
        )


def clip_rows():
    tensors, _ = read("clip")
    for key in (name.removesuffix(".codes") for name in tensors if name.endswith(".codes")):
        dims, bits, kind, group, share = key.split(".")
        x = mx.array(tensors[f"x.{dims}"].astype(np.float32))
        spec = Affine(int(bits), int(group), kind == "sym", clip=int(share) / 100)
        stored = affine.encode(spec, x, x.shape[2])
        codes = np.array(packing.unpack(stored["codes"], spec.bits, int(dims)))
        row = compare_codes("clip", key, codes, tensors[f"{key}.codes"], tensors[f"{key}.near"])
        # Codes alone say little about the limit: scales and biases to a float16 step.
        pairs = ((np.array(stored[n]), tensors[f"{key}.{n}"]) for n in stored if n != "codes")
        off = sum(int((np.abs(a - b) > np.spacing(np.abs(b))).sum()) for a, b in pairs)
        yield replace(row, wrong=row.wrong + off)


def packing_rows():
    tensors, _ = read("packing")
    for key in (name.removesuffix(".codes") for name in tensors if name.endswith(".codes")):
        dims, bits = map(int, key.split("."))
        codes, words = tensors[f"{key}.codes"], tensors[f"{key}.words"]
        packed = np.array(packing.pack(mx.array(codes.astype(np.uint32)), bits))
        back = np.array(packing.unpack(mx.array(words), bits, dims))
        yield Row(
            "packing", key, codes.size, wrong=int((packed != words).sum() + (back != codes).sum())
        )


def encode_rows():
    tensors, header = read("encode")
    sides = json.loads(header["sides"])
    for key in (name.removesuffix(".codes") for name in tensors if name.endswith(".codes")):
        name, dims = key.split(".")
        kind, bits, group, symmetric, axis, clip = sides[name]
        x = mx.array(tensors[f"x.{dims}"].astype(np.float32))
        code = Codec(Side(Affine(bits, group, symmetric, axis, clip), kind), int(dims), x.shape[2])
        codes = np.array(packing.unpack(code.encode(x)["codes"], bits, int(dims)))
        yield compare_codes("seal", key, codes, tensors[f"{key}.codes"], tensors[f"{key}.near"])


def attention_rows():
    tensors, header = read("attention")
    for case, info in json.loads(header["cases"]).items():
        spec = tensors[f"{case}.out"]
        out = np.array(attend(*_attention_inputs(tensors, case, info)))
        yield Row("attention", case, spec.size, rms=rms(out, spec), bound=BOUNDS["attention"])


def _stored(tensors: dict, key: str, bits: int) -> dict[str, mx.array]:
    """The spec's codes and scales in the physical order of this package."""
    stored = {"codes": packing.pack(mx.array(tensors[f"{key}.codes"].astype(np.uint32)), bits)}
    for name in ("scale", "bias"):
        if f"{key}.{name}" in tensors:
            stored[name] = mx.array(tensors[f"{key}.{name}"])
    return stored


def _attention_inputs(tensors: dict, case: str, info: dict):
    """(queries, view, scale, mask, sinks) of one attention case."""

    def floats(name):
        return mx.array(tensors[f"{case}.{name}"].astype(np.float32))

    sides, pages = [], {}
    for letter, name in (("k", "keys"), ("v", "values")):
        side = info[name]
        spec = Affine(side["bits"], side["group"], side["symmetric"], side["axis"])
        sides.append(Side(spec, side["transform"]))
        pages[name] = _stored(tensors, f"{case}.{letter}", side["bits"])
    _, _, paged, dims = tensors[f"{case}.k.codes"].shape
    count = paged // info["page"]
    store = sealed.store(CacheConfig(*sides, page=info["page"]), (dims, dims), mx.float32)
    store.restore(pages, count)
    sink = (floats("k.sink"), floats("v.sink")) if tensors[f"{case}.k.sink"].shape[2] else None
    view = View((floats("k.live"), floats("v.live")), sink, store.read(0, count))
    mask = {"none": None, "causal": "causal"}.get(info["mask"])
    if info["mask"] in ("window", "additive"):
        mask = mx.array(tensors[f"{case}.mask"])
    sinks = floats("sinks") if f"{case}.sinks" in tensors else None
    q = floats("q")
    return q, view, q.shape[-1] ** -0.5, mask, sinks


def oscar_rows():
    """Calibration as `mlxkv calibrate` does it, and a cache with the spec's rotations."""
    for dims, given in _by_dims("oscar"):
        turns = {}
        q, k, v = _tensors(given)
        seen = mx.fast.scaled_dot_product_attention(q, k, v, scale=dims**-0.5, mask="causal")
        for letter, rows in (("k", q), ("v", seen)):
            sigma, r, case = given[f"{letter}.sigma"], given[f"{letter}.r"], f"{dims}.{letter}"
            yield _moments(case, rows, sigma)
            made = rotation.compose(rotation.eigenbasis(sigma.astype(np.float64))[1])
            yield Row("rotations", case, r.size, rms=rms(made, r), bound=BOUNDS["transforms"])
            turns[letter] = r, np.ascontiguousarray(r.swapaxes(-1, -2))
        yield from _page_rows("oscar", CALIBRATED, dims, given, turns)


def balanced_rows():
    """The same of balanced transforms."""
    for dims, given in _by_dims("balanced"):
        pairs = {}
        q, k, v = _tensors(given)
        for letter, rows in (("k", k), ("v", v)):
            noise, reads = (given[f"{letter}.{name}"] for name in ("noise", "reads"))
            case = f"balanced.{dims}.{letter}"
            yield _moments(case, rows, noise)
            if letter == "k":
                yield _moments(f"{case}.reads", q, reads)
            down = balance.balance(noise.astype(np.float64), reads.astype(np.float64))[0]
            pairs[letter] = given[f"{letter}.down"], given[f"{letter}.up"]
            error = max(map(rms, balance.mixed(down, rotation.PARTS), pairs[letter]))
            yield Row("balances", case, down.size, rms=error, bound=BOUNDS["transforms"])
        yield from _page_rows("balanced", BALANCED, dims, given, pairs)


def learned_rows():
    """Maps of given parameters, and what codes behind them lose."""
    tensors, _ = read("learned")
    for key in (name.removesuffix(".x") for name in tensors if name.endswith(".x")):
        variant, base, dims = key.split(".")
        turn = transform.make(base, int(dims), 0)
        turn = mx.eye(int(dims)) if turn is None else turn.down
        params = {name: mx.array(tensors[f"{key}.{name}"]) for name in variant.split("+")}
        pair = [np.array(x) for x in learnable.pair(params, turn)]
        spec = [tensors[f"{key}.{name}"] for name in ("down", "up")]
        error = max(map(rms, pair, spec))
        yield Row("learned", key, spec[0].size, rms=error, bound=BOUNDS["learned"])
        loss = learn.loss(params, mx.array(tensors[f"{key}.x"]), turn, LEARNED_SPEC)
        error = rms(np.array(loss), tensors[f"{key}.loss"].mean())
        yield Row("learned", f"{key}, loss", 1, rms=error, bound=BOUNDS["learned"])


def _by_dims(table: str):
    """(dims, its tensors) of each case."""
    tensors, _ = read(table)
    for dims in (int(name[:-4]) for name in tensors if name.endswith(".out")):
        start = f"{dims}."
        yield dims, {n.removeprefix(start): x for n, x in tensors.items() if n.startswith(start)}


def _tensors(given: dict[str, np.ndarray]) -> list[mx.array]:
    return [mx.array(given[name].astype(np.float32)) for name in ("q", "k.x", "v.x")]


def _moments(case: str, rows: mx.array, spec: np.ndarray) -> Row:
    kv_heads, dims = spec.shape[:2]
    found = np.array(second_moment(rows, kv_heads)) / (rows.size // (kv_heads * dims))
    return Row("moments", case, spec.size, rms=rms(found, spec), bound=BOUNDS["moments"])


def _page_rows(table: str, kind: str, dims: int, given: dict[str, np.ndarray], pairs: dict):
    """Codes of a page behind pairs [G, D, D], and attention over the spec's own."""
    q, k, v = _tensors(given)
    page = given["k.codes"].shape[2]
    turns, sides, pages = [], [], {}
    for letter, x in (("k", k), ("v", v)):
        spec, case = PAGE_SIDES[letter], f"{table}.{dims}.{letter}"
        turn, side = Transform(*map(mx.array, pairs[letter])), Side(spec, kind)
        code = Codec(side, dims, page, turn)
        codes = np.array(packing.unpack(code.encode(x[:, :, :page])["codes"], spec.bits, dims))
        near = given[f"{letter}.near"]
        yield compare_codes("seal", case, codes, given[f"{letter}.codes"], near)
        turns.append(turn)
        sides.append(side)
        pages["keys" if letter == "k" else "values"] = _stored(given, letter, spec.bits)
    store = sealed.store(
        CacheConfig(*sides, page=page), (dims, dims), mx.float32, Rotations(*turns)
    )
    store.restore(pages, 1)
    view = View(tuple(x[:, :, page:] for x in (k, v)), None, store.read(0, 1))
    spec = given["out"]
    out = np.array(attend(q[:, :, -spec.shape[2] :], view, dims**-0.5, "causal"))
    yield Row(
        "attention", f"{table}.{dims}", spec.size, rms=rms(out, spec), bound=BOUNDS["attention"]
    )


TABLES = (
    transform_rows,
    packing_rows,
    affine_rows,
    clip_rows,
    encode_rows,
    attention_rows,
    oscar_rows,
    balanced_rows,
    learned_rows,
)


def rows() -> Iterator[Row]:
    """Every row of the table, on the default device, as it is computed."""
    from mlxkv.golden import codebook, oja, tile  # which read the helpers above

    for table in (*TABLES, *codebook.TABLES, tile.dual_scale_rows, tile.polar_rows, oja.oja_rows):
        yield from table()


def run() -> list[Row]:
    return list(rows())
