"""The golden table of mlxkv, computed by torch: the same tensors, ties and bounds (`mlxkv.bounds`).

`run()` computes on the default device of torch (`with torch.device("cuda"): golden.run()`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from cuda_track import packing, transform
from cuda_track.attention import attend
from cuda_track.cache import View
from cuda_track.calibrate import second_moment
from cuda_track.codec import Codec
from cuda_track.quantizers import affine
from cuda_track.sealed import CodePages
from cuda_track.transform import Transform
from mlxkv.bounds import BOUNDS, PAGE_SIDES, Row, compare_codes, read, rms, steps_off
from mlxkv.config import BALANCED, CALIBRATED, Affine, Side


def tensor(x: np.ndarray) -> torch.Tensor:
    """On the default device; words as this package holds them."""
    x = torch.from_numpy(np.ascontiguousarray(x)).to(torch.get_default_device())
    return packing.from_file(x)


def floats(x: np.ndarray) -> torch.Tensor:
    return tensor(x.astype(np.float32))


def array(x: torch.Tensor) -> np.ndarray:
    return x.cpu().numpy()


def codec_of(side: Side, dims: int, page: int, turn: Transform | None = None) -> Codec:
    return Codec(side, dims, page, turn, torch.get_default_device())


def view_of(
    codecs: tuple[Codec, Codec],
    stored: tuple[dict, dict],
    live: tuple[torch.Tensor, torch.Tensor] | None = None,
    sink: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> View:
    """A cache whose pages hold given codes. live: none means no tokens behind the pages."""
    batch, heads, tokens = next(x for name, x in stored[0].items() if name in TOKEN_ROWS).shape[:3]
    if live is None:
        live = tuple(torch.zeros(batch, heads, 0, code.dims) for code in codecs)
    return View(live, sink, CodePages(codecs, stored, tokens))


TOKEN_ROWS = ("codes", "first")  # stored tensors with a row per token


def transform_rows() -> Iterator[Row]:
    tensors, _ = read("transforms")
    for key in (name[:-2] for name in tensors if name.endswith(".x")):
        name, dims = key.split(".")
        made = transform.make(name, int(dims), 1, torch.get_default_device())
        y = made.store(floats(tensors[f"{key}.x"])[None, None])
        spec = tensors[f"{key}.y"]
        back = array(made.restore(y))[0, 0]
        error = max(rms(array(y)[0, 0], spec), rms(back, tensors[f"{key}.x"]))
        yield Row("transforms", key, spec.size, rms=error, bound=BOUNDS["transforms"])


def packing_rows() -> Iterator[Row]:
    tensors, _ = read("packing")
    for key in _keys(tensors, ".codes"):
        dims, bits = map(int, key.split("."))
        codes, words = tensors[f"{key}.codes"], tensors[f"{key}.words"]
        packed = array(packing.as_file(packing.pack(tensor(codes), bits)))
        back = array(packing.unpack(tensor(words), bits, dims))
        wrong = int((packed != words).sum() + (back != codes).sum())
        yield Row("packing", key, codes.size, wrong=wrong)


def affine_rows() -> Iterator[Row]:
    tensors, _ = read("affine")
    for key in _keys(tensors, ".codes"):
        dims, bits, kind, axis, group = key.split(".")
        x = floats(tensors[f"x.{dims}"])
        spec, page = Affine(int(bits), int(group), kind == "sym", axis), x.shape[2]
        stored = affine.encode(spec, x, page)
        codes = array(packing.unpack(stored["codes"], spec.bits, int(dims)))
        yield compare_codes("encode", key, codes, tensors[f"{key}.codes"], tensors[f"{key}.near"])
        given = _stored(tensors, f"{key}.", spec.bits)
        decoded = array(affine.decode(spec, given, int(dims), page, torch.float32))
        kept = tensors[f"{key}.decoded"]  # of evenly spaced tokens
        error = rms(decoded[:, :, :: page // kept.shape[2]], kept)
        yield Row("decode", key, kept.size, rms=error, bound=BOUNDS["decode"])


def clip_rows() -> Iterator[Row]:
    tensors, _ = read("clip")
    for key in _keys(tensors, ".codes"):
        dims, bits, kind, group, share = key.split(".")
        x = floats(tensors[f"x.{dims}"])
        spec = Affine(int(bits), int(group), kind == "sym", clip=int(share) / 100)
        stored = affine.encode(spec, x, x.shape[2])
        codes = array(packing.unpack(stored["codes"], spec.bits, int(dims)))
        row = compare_codes("clip", key, codes, tensors[f"{key}.codes"], tensors[f"{key}.near"])
        # Codes alone say little about the limit: scales and biases to a float16 step.
        numbers = (n for n in stored if n != "codes")
        off = sum(steps_off(array(stored[n]), tensors[f"{key}.{n}"]) for n in numbers)
        yield replace(row, wrong=row.wrong + off)


def encode_rows() -> Iterator[Row]:
    tensors, header = read("encode")
    sides = json.loads(header["sides"])
    for key in _keys(tensors, ".codes"):
        name, dims = key.split(".")
        kind, bits, group, symmetric, axis, clip = sides[name]
        x = floats(tensors[f"x.{dims}"])
        side = Side(Affine(bits, group, symmetric, axis, clip), kind)
        stored = codec_of(side, int(dims), x.shape[2]).encode(x)
        codes = array(packing.unpack(stored["codes"], bits, int(dims)))
        yield compare_codes("seal", key, codes, tensors[f"{key}.codes"], tensors[f"{key}.near"])


def attention_rows() -> Iterator[Row]:
    tensors, header = read("attention")
    for case, info in json.loads(header["cases"]).items():
        spec = tensors[f"{case}.out"]
        given = {n.removeprefix(f"{case}."): x for n, x in tensors.items() if n.startswith(case)}
        out = array(attend(*_attention_inputs(given, info)))
        yield Row("attention", case, spec.size, rms=rms(out, spec), bound=BOUNDS["attention"])


def oscar_rows() -> Iterator[Row]:
    """Moments of a calibration, and pages behind the spec's rotations."""
    for dims, given in _by_dims("oscar"):
        q, k, v = _tensors(given)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        turns = {}
        for letter, rows in (("k", q), ("v", seen)):
            yield _moments(f"{dims}.{letter}", rows, given[f"{letter}.sigma"])
            r = given[f"{letter}.r"]
            turns[letter] = r, r.swapaxes(-1, -2)
        yield from _page_rows("oscar", CALIBRATED, dims, given, turns)


def balanced_rows() -> Iterator[Row]:
    """The same of balanced transforms."""
    for dims, given in _by_dims("balanced"):
        q, k, v = _tensors(given)
        pairs = {}
        for letter, rows in (("k", k), ("v", v)):
            case = f"balanced.{dims}.{letter}"
            yield _moments(case, rows, given[f"{letter}.noise"])
            if letter == "k":
                yield _moments(f"{case}.reads", q, given["k.reads"])
            pairs[letter] = given[f"{letter}.down"], given[f"{letter}.up"]
        yield from _page_rows("balanced", BALANCED, dims, given, pairs)


def _keys(tensors: dict, ending: str) -> list[str]:
    return [name.removesuffix(ending) for name in tensors if name.endswith(ending)]


def _stored(given: dict, prefix: str, bits: int) -> dict[str, torch.Tensor]:
    """The spec's codes and scales as this package holds them."""
    stored = {"codes": packing.pack(tensor(given[f"{prefix}codes"]), bits)}
    numbers = (name for name in ("scale", "bias") if f"{prefix}{name}" in given)
    return stored | {name: tensor(given[f"{prefix}{name}"]) for name in numbers}


def _attention_inputs(given: dict, info: dict):
    """(queries, view, scale, mask, sinks) of one attention case."""
    q, dims = floats(given["q"]), given["q"].shape[-1]
    codecs, stored = [], []
    for letter, name in (("k", "keys"), ("v", "values")):
        side = info[name]
        spec = Affine(side["bits"], side["group"], side["symmetric"], side["axis"])
        codecs.append(codec_of(Side(spec, side["transform"]), dims, info["page"]))
        stored.append(_stored(given, f"{letter}.", side["bits"]))
    live, sink = (
        tuple(floats(given[f"{letter}.{part}"]) for letter in "kv") for part in ("live", "sink")
    )
    view = view_of(tuple(codecs), tuple(stored), live, sink if sink[0].shape[2] else None)
    mask = {"none": None, "causal": "causal"}.get(info["mask"])
    if info["mask"] in ("window", "additive"):
        mask = tensor(given["mask"])
    sinks = floats(given["sinks"]) if "sinks" in given else None
    return q, view, dims**-0.5, mask, sinks


def _by_dims(table: str) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """(dims, its tensors) of each case."""
    tensors, _ = read(table)
    for dims in (int(name) for name in _keys(tensors, ".out")):
        start = f"{dims}."
        yield dims, {n.removeprefix(start): x for n, x in tensors.items() if n.startswith(start)}


def _tensors(given: dict[str, np.ndarray]) -> list[torch.Tensor]:
    return [floats(given[name]) for name in ("q", "k.x", "v.x")]


def _moments(case: str, rows: torch.Tensor, spec: np.ndarray) -> Row:
    kv_heads, dims = spec.shape[:2]
    found = array(second_moment(rows, kv_heads)) / (rows.numel() // (kv_heads * dims))
    return Row("moments", case, spec.size, rms=rms(found, spec), bound=BOUNDS["moments"])


def _page_rows(table: str, kind: str, dims: int, given: dict[str, np.ndarray], pairs: dict):
    """Codes of a page behind pairs [G, D, D], and attention over the spec's own."""
    q, k, v = _tensors(given)
    page = given["k.codes"].shape[2]
    codecs, pages = [], []
    for letter, x in (("k", k), ("v", v)):
        spec, case = PAGE_SIDES[letter], f"{table}.{dims}.{letter}"
        code = codec_of(Side(spec, kind), dims, page, Transform(*map(floats, pairs[letter])))
        codes = array(packing.unpack(code.encode(x[:, :, :page])["codes"], spec.bits, dims))
        near = given[f"{letter}.near"]
        yield compare_codes("seal", case, codes, given[f"{letter}.codes"], near)
        codecs.append(code)
        pages.append(_stored(given, f"{letter}.", spec.bits))
    view = view_of(tuple(codecs), tuple(pages), tuple(x[:, :, page:] for x in (k, v)))
    spec, case = given["out"], f"{table}.{dims}"
    out = array(attend(q[:, :, -spec.shape[2] :], view, dims**-0.5, "causal"))
    yield Row("attention", case, spec.size, rms=rms(out, spec), bound=BOUNDS["attention"])


TABLES = (
    transform_rows,
    packing_rows,
    affine_rows,
    clip_rows,
    encode_rows,
    attention_rows,
    oscar_rows,
    balanced_rows,
)


def tables() -> tuple[Callable[[], Iterator[Row]], ...]:
    """One per golden set, named after it."""
    from cuda_track.golden import codebook, oja, tile  # which read the helpers above

    return (*TABLES, *codebook.TABLES, *tile.TABLES, *oja.TABLES)


def by_set() -> Iterator[tuple[str, Row]]:
    """Every row with the golden set it belongs to, on the default device, as it is computed."""
    for table in tables():
        for row in table():
            yield table.__name__.removesuffix("_rows"), row


def run() -> list[Row]:
    return [row for _, row in by_set()]
