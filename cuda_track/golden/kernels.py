"""Rows of the golden table that Triton computes: quantizing and decode attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.nn.functional import pad

from cuda_track.cache.attention import attend, why_not
from cuda_track.cache.stores import Paged
from cuda_track.cache.view import View
from cuda_track.codec import mixed_bits, packing
from cuda_track.codec.codec import Stored, both
from cuda_track.codec.transform import Transform
from cuda_track.golden.table import TABLE
from cuda_track.kernels import launch, layout
from cuda_track.kernels.blocks import SHARED
from cuda_track.kernels.pool import Pool, PoolPages
from cuda_track.kernels.record import Record
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.quantizers import POLAR_NUMBERS, Affine, Codebook, MixedBits, Polar
from mlxkv.formats.records import NAMES
from mlxkv.spec import affine, bounds, codebook, polar
from mlxkv.spec import mixed_bits as spec
from mlxkv.spec.bounds import (
    BOUNDS,
    Row,
    compare_codes,
    mask_at,
    read_golden,
    rms,
    steps_off,
    under,
)
from mlxkv.spec.cases import METHODS
from mlxkv.spec.rows import encode_cases

HEAD = 64  # dims of a head whose 48 stored ones mixed bits have in the golden table
WEIGHTS_BOUND = 2e-3  # queries and weights are float16 in the kernel of Triton


def quantize_rows() -> Iterator[Row]:
    tensors, header = read_golden("encode")
    for key, side, dims in encode_cases(tensors, header):
        quantizer, x = side.quantizer, TABLE.floats(tensors[f"x.{dims}"])
        page = x.shape[2]
        for keys in (True, False):
            if not isinstance(quantizer, Affine) or layout.why_not(quantizer, dims, page, keys):
                continue
            codes = packing.unpack(_quantized(side, x, keys)["codes"], quantizer.bits, dims)
            case = f"{key}, {'keys' if keys else 'values'}"
            pair = TABLE.array(codes), tensors[f"{key}.codes"]
            yield compare_codes("seal", case, *pair, tensors[f"{key}.near"])


def _quantized(side: Side, x: torch.Tensor, keys: bool) -> Stored:
    """Quantize a page x [1, G, T, D] into a pool: its tensors as files have them."""
    (_, heads, page, dims), quantizer = x.shape, side.quantizer
    assert isinstance(quantizer, Affine | Codebook | Polar)
    at, pool = layout.PlaneLayout(quantizer, dims, page, keys), Pool()
    places = pool.reserve(1, Record((at, at)), heads, x.device)
    launch.quantize_pages(TABLE.codec(side, dims, page), x, at, pool.sides[0], places)
    return at.restore({n: y[torch.tensor(places)][:, None] for n, y in pool.sides[0].items()})


def encode_rows() -> Iterator[Row]:
    """Yield rows of codes and numbers that Triton makes of codebooks and of polar keys."""
    for table, numbers in (("codebook", ("scale",)), ("polar", POLAR_NUMBERS)):
        golden, _ = read_golden(table)
        for key in bounds.keys(golden):
            dims, bits = map(int, key.split(".")[:2])
            case, x = under(golden, key), TABLE.floats(golden[f"{dims}.x"])
            quantizer = Codebook(bits) if table == "codebook" else METHODS[table].quantizers[key]
            for keys in (True, False):
                if layout.why_not(quantizer, dims, x.shape[2], keys):
                    continue
                side = Side(quantizer, "random" if table == "codebook" else "none")
                found, end = _quantized(side, x, keys), ", keys" if keys else ", values"
                off = {n: steps_off(TABLE.array(found[n]), case[n]) for n in numbers}
                if table == "codebook":
                    codes = TABLE.array(packing.unpack(found["codes"], bits, dims))
                    row = compare_codes(table, f"{key}{end}", codes, case["codes"], case["near"])
                    yield replace(row, wrong=row.wrong + off["scale"])
                    continue
                pair = TABLE.words(found["codes"]), case["codes"]
                ours, right = (METHODS[table].codes(quantizer, y, dims) for y in pair)
                for part, codes in ours.items():
                    ties, label = mask_at(case[f"near_{part}"], codes.size), f"{table}.{key}.{part}"
                    yield compare_codes("encode", f"{label}{end}", codes, right[part], ties)
                for name, wrong in off.items():
                    yield Row("encode", f"{table}.{key}.{name}{end}", case[name].size, wrong=wrong)


def attention_rows(table: str = "attention") -> Iterator[Row]:
    for case, inputs, expected in TABLE.attention_cases(table):
        mask = "causal" if inputs.mask is None else inputs.mask
        plain = both(lambda side: Side(side.quantizer), inputs.sides)
        config = CacheConfig(*plain, page=inputs.page)
        if launch.why_not(config, (inputs.dims, inputs.dims)):
            continue
        store = Paged(config, TABLE.codecs(inputs))
        store.restore(dict(zip(NAMES, inputs.stored, strict=True)), inputs.pages)
        view = View(inputs.recent, inputs.sink, store.read(0, store.count))
        if why_not(inputs.q, view, mask) is None:
            out = attend(inputs.q, view, inputs.scale, mask, inputs.sink_logits, inputs.softcap)
            far = rms(TABLE.array(out), expected)
            yield Row(table, case, expected.size, rms=far, bound=WEIGHTS_BOUND)


def mixed_bits_rows() -> Iterator[Row]:
    """Mixed bits of a head that stores fewer dims than it has: encoded, decoded, attended to as keys and values. Each
    of the four tokens of a row has the golden tokens in another order."""
    golden, _ = read_golden("fill")
    for key in bounds.keys(golden):
        case, dims = under(golden, key), int(key.split(".")[0])
        tokens = golden[f"{dims}.x"].shape[2]
        order = np.concatenate([np.roll(np.arange(tokens), i) for i in range(SHARED)])
        quantizer = MixedBits(2.0, tuple(int(bits) for bits in case["widths"]))
        some = torch.eye(HEAD)[:, :dims]
        code = TABLE.codec(Side(quantizer), HEAD, len(order), Transform(some, some.mT))
        x = pad(TABLE.floats(golden[f"{dims}.x"][:, :, order]), (0, HEAD - dims))
        q = pad(TABLE.floats(golden[f"{dims}.q"]), (0, HEAD - dims))
        right = TABLE.array(mixed_bits.unpack(quantizer, TABLE.tensor(case["codes"][:, :, order])))
        near = np.zeros(case["codes"].shape[2] * dims, bool)
        near[case["near"]] = True
        near = np.flatnonzero(near.reshape(-1, dims)[order])
        scale = case["scale"][:, :, order]
        decoded = spec.decode(right, scale.astype(np.float64), quantizer.widths)
        layouts, pool = layout.layouts((code, code)), Pool()
        pool.reserve(1, Record(layouts), 1, x.device)
        table, counts = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        pages = PoolPages((code, code), layouts, pool.sides, table, counts, len(order))
        for i, (name, at, side) in enumerate(zip(NAMES, layouts, pool.sides, strict=True)):
            launch.quantize_pages(code, x, at, side, [0])
            found = at.restore({n: y[:1, None] for n, y in side.items()})
            codes = TABLE.array(mixed_bits.unpack(quantizer, found["codes"]))
            ties = mask_at(near, right.size)
            yield compare_codes("encode", f"fill.{key}, {name}", codes, right, ties)
            off = steps_off(TABLE.array(found["scale"]), scale)
            yield Row("encode", f"fill.{key}.scale, {name}", scale.size, wrong=off)
            given = {
                "codes": TABLE.tensor(case["codes"][:, :, order]),
                "scale": TABLE.tensor(scale),
            }
            for n, y in at.arrange(given).items():  # from here on what the spec stores
                side[n][:1] = y[0]
            out = x.new_empty(1, 1, len(order), dims)
            launch.dequantize(pages, i, out, 0)
            far = rms(TABLE.array(out), decoded)
            yield Row("decode", f"fill.{key}, {name}", out.numel(), rms=far, bound=BOUNDS["decode"])
        scores = case["scores"][0, 0, 0, order].astype(np.float64) * HEAD**-0.5
        weights = np.exp(scores - scores.max())
        none = x[:, :, :0], x[:, :, :0]
        out = TABLE.array(launch.attend(q, pages, None, none, HEAD**-0.5)[..., :dims])
        far = rms(out, weights / weights.sum() @ decoded)
        yield Row("fill", f"attention.{key}", out.size, rms=far, bound=WEIGHTS_BOUND)


def codes_rows() -> Iterator[Row]:
    """Yield rows of the spec's codes, in a pool: keys as levels of a codebook or as radius and angle, values as levels;
    given back, decoded, attended to."""
    for table in ("codebook", "polar"):
        golden, _ = read_golden(table)
        for key in bounds.keys(golden):
            case, dims = under(golden, key), int(key.split(".")[0])
            bits = int(key.split(".")[1])
            if table == "codebook":
                quantizer, book = Codebook(bits), codebook.sphere_levels(dims, bits)
                levels = case["codes"], case["scale"]
                decoded = codebook.codebook_decode(levels[0], levels[1].astype(np.float64), book)
                stored, of_values, mixed = _levels(*levels, bits), quantizer, decoded
            else:
                quantizer, of_values = METHODS["polar"].quantizers[key], Codebook(4)
                assert isinstance(quantizer, Polar)
                codes = affine.unpack(case["codes"], quantizer.pair_bits, dims // 2)
                numbers = {name: case[name].astype(np.float64) for name in POLAR_NUMBERS}
                decoded = polar.decode({"codes": codes, **numbers}, quantizer.angle)
                stored = {n: TABLE.tensor(case[n]) for n in POLAR_NUMBERS}
                stored["codes"] = packing.pack(
                    TABLE.tensor(codes.astype(np.int32)), quantizer.pair_bits
                )
                book = codebook.sphere_levels(dims, 4)
                levels = codebook.codebook_encode(golden[f"{dims}.x"], book)
                mixed = codebook.codebook_decode(*levels, book)
            tokens = decoded.shape[2]
            config = CacheConfig(Side(quantizer), Side(of_values), page=tokens)
            if launch.why_not(config, (dims, dims)):
                continue
            values = _levels(*levels, of_values.bits)
            codecs = (
                TABLE.codec(config.keys, dims, tokens),
                TABLE.codec(config.values, dims, tokens),
            )
            store = Paged(config, codecs)
            store.restore(dict(zip(NAMES, (stored, values), strict=True)), 1)
            pages = store.read(0, 1)
            again = pages.stored[0]
            wrong = sum(int((again[name] != x).sum()) for name, x in stored.items())
            yield Row("encode", f"{table}.{key}, restored", decoded.size, wrong=wrong)
            for i, right in enumerate((decoded, mixed)):
                out = torch.empty(1, 1, tokens, dims)
                launch.dequantize(pages, i, out, 0)
                far = rms(TABLE.array(out), right)
                yield Row(
                    table, f"decode.{key}, {NAMES[i]}", out.numel(), rms=far, bound=BOUNDS["decode"]
                )
            q = TABLE.floats(golden[f"{dims}.q"])
            scores = golden[f"{dims}.q"].astype(np.float64) @ decoded.swapaxes(-1, -2) * dims**-0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            none = torch.zeros(1, 1, 0, dims), torch.zeros(1, 1, 0, dims)
            out = TABLE.array(launch.attend(q, pages, None, none, dims**-0.5))
            far = rms(out, weights / weights.sum(-1, keepdims=True) @ mixed)
            yield Row(table, f"attention.{key}", out.size, rms=far, bound=WEIGHTS_BOUND)


def _levels(codes: np.ndarray, scale: np.ndarray, bits: int) -> Stored:
    """Return the tensors of pages of a codebook."""
    packed = packing.pack(TABLE.tensor(codes.astype(np.int32)), bits)
    return {"codes": packed, "scale": TABLE.tensor(scale.astype(np.float16))}


TABLES = (
    quantize_rows,
    attention_rows,
    partial(attention_rows, "softcap"),
    mixed_bits_rows,
    encode_rows,
    codes_rows,
)
