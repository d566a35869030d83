"""Rows of the golden table that Triton's kernels can compute: sealing, and decode attention."""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch

from cuda_track import kernels, packing
from cuda_track.attention import attend, why_not
from cuda_track.cache import View
from cuda_track.golden import _attention_inputs, _keys, array, codec_of, floats
from cuda_track.kernels import layout
from cuda_track.kernels.pool import Paged, Pool
from mlxkv.bounds import Row, compare_codes, read, rms
from mlxkv.config import Affine, CacheConfig, Side

WEIGHTS_BOUND = 2e-3  # queries and weights are float16 in the kernel


def seal_rows() -> Iterator[Row]:
    tensors, header = read("encode")
    sides = json.loads(header["sides"])
    for key in _keys(tensors, ".codes"):
        name, dims = key.split(".")
        kind, bits, group, symmetric, axis, clip = sides[name]
        x, dims = floats(tensors[f"x.{dims}"]), int(dims)
        spec, page = Affine(bits, group, symmetric, axis, clip), x.shape[2]
        for keys in (True, False):
            if layout.why_not(spec, dims, page, keys):
                continue
            at = layout.SideLayout(spec, dims, page, keys)
            pool = Pool()
            places = pool.reserve(x.shape[0], (at.shapes(x.shape[1]),) * 2, x.device)
            kernels.seal(codec_of(Side(spec, kind), dims, page), x, at, pool.sides[0], places)
            side = {n: y[torch.tensor(places)][:, None] for n, y in pool.sides[0].items()}
            codes = array(packing.unpack(layout.restore(side, at)["codes"], bits, dims))
            case = f"{key}, {'keys' if keys else 'values'}"
            near = tensors[f"{key}.near"]
            yield compare_codes("seal", case, codes, tensors[f"{key}.codes"], near)


def attention_rows() -> Iterator[Row]:
    tensors, header = read("attention")
    for case, info in json.loads(header["cases"]).items():
        given = {n.removeprefix(f"{case}."): x for n, x in tensors.items() if n.startswith(case)}
        q, view, scale, mask, sinks = _attention_inputs(given, info)
        mask = "causal" if mask is None else mask
        codecs, dims = view.pages.codecs, q.shape[-1]
        config = CacheConfig(*(Side(c.spec) for c in codecs), page=info["page"])
        if kernels.why_not(config, (dims, dims), q.device):
            continue
        store = Paged(config, codecs)
        count = view.pages.tokens // config.page
        store.restore(dict(zip(("keys", "values"), view.pages.stored, strict=True)), count)
        view = View(view.live, view.sink, store.read(0, store.count))
        if why_not(q, view, mask) is None:
            out, spec = array(attend(q, view, scale, mask, sinks)), tensors[f"{case}.out"]
            yield Row("attention", case, spec.size, rms=rms(out, spec), bound=WEIGHTS_BOUND)


TABLES = (seal_rows, attention_rows)
