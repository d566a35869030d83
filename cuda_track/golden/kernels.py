"""Rows of the golden table that Triton computes: quantizing and decode attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from cuda_track.cache.attention import attend, why_not
from cuda_track.cache.stores import Paged
from cuda_track.cache.view import View
from cuda_track.codec import packing
from cuda_track.codec.codec import both
from cuda_track.golden.table import TABLE
from cuda_track.kernels import launch, layout
from cuda_track.kernels.pool import Pool
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.quantizers import Affine
from mlxkv.formats.records import NAMES
from mlxkv.spec.bounds import Row, compare_codes, read_golden, rms
from mlxkv.spec.rows import encode_cases

WEIGHTS_BOUND = 2e-3  # queries and weights are float16 in the kernel of Triton


def quantize_rows() -> Iterator[Row]:
    tensors, header = read_golden("encode")
    for key, side, dims in encode_cases(tensors, header):
        quantizer, x = side.quantizer, TABLE.floats(tensors[f"x.{dims}"])
        page = x.shape[2]
        for keys in (True, False):
            if not isinstance(quantizer, Affine) or layout.why_not(quantizer, dims, page, keys):
                continue
            at = layout.PlaneLayout(quantizer, dims, page, keys)
            pool, shapes = Pool(), at.shapes(x.shape[1])
            places = pool.reserve(x.shape[0], (shapes, shapes), x.device)
            launch.quantize_pages(TABLE.codec(side, dims, page), x, at, pool.sides[0], places)
            pages = {n: y[torch.tensor(places)][:, None] for n, y in pool.sides[0].items()}
            codes = packing.unpack(at.restore(pages)["codes"], quantizer.bits, dims)
            case = f"{key}, {'keys' if keys else 'values'}"
            pair = TABLE.array(codes), tensors[f"{key}.codes"]
            yield compare_codes("seal", case, *pair, tensors[f"{key}.near"])


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


TABLES = (quantize_rows, attention_rows, partial(attention_rows, "softcap"))
