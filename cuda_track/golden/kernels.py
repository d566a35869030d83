"""Rows of the golden table that kernels can compute: sealing and decode attention by Triton, decode
attention by Metal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import torch

from cuda_track import kernels, packing
from cuda_track.attention import DECODE_TOKENS, attend, why_not
from cuda_track.cache import View
from cuda_track.codec import Codec
from cuda_track.golden import _attention_inputs, _keys, array, codec_of, floats
from cuda_track.kernels import layout
from cuda_track.kernels.pool import Paged, Pool
from cuda_track.mps import attend as metal_kernel
from cuda_track.mps import store as metal
from mlxkv.bounds import Row, compare_codes, read, rms
from mlxkv.config import Affine, CacheConfig, Side

WEIGHTS_BOUND = 2e-3  # queries and weights are float16 in the kernel of Triton
METAL_BOUND = 1e-4  # float32; exponentials are those of the machine


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


def metal_rows(device: torch.device) -> Iterator[Row]:
    """Attention over page records on `device`; inputs are made on the CPU."""
    tensors, header = read("attention")
    for case, info in json.loads(header["cases"]).items():
        given = {n.removeprefix(f"{case}."): x for n, x in tensors.items() if n.startswith(case)}
        q, view, scale, mask, sinks = _moved(_attention_inputs(given, info), device)
        codecs, dims = view.pages.codecs, q.shape[-1]
        config = CacheConfig(*(Side(c.spec) for c in codecs), page=info["page"])
        mask = "causal" if mask is None else mask
        if metal.why_not(config, (dims, dims)) or metal_kernel.why_not(q, mask, DECODE_TOKENS):
            continue
        turned = (c.transform and c.transform.to(device) for c in codecs)
        sides = zip(codecs, turned, strict=True)
        codecs = tuple(Codec(Side(c.spec), dims, info["page"], t, device) for c, t in sides)
        pages = metal.Records(config, codecs)
        count = view.pages.tokens // info["page"]
        pages.restore(dict(zip(("keys", "values"), view.pages.stored, strict=True)), count)
        view = View(view.live, view.sink, pages.read(0, count))
        out, spec = attend(q, view, scale, mask, sinks), tensors[f"{case}.out"]
        yield Row("attention", case, spec.size, rms=rms(array(out), spec), bound=METAL_BOUND)


def _moved(x, device: torch.device):
    """Every tensor in tuples, dicts and views to `device`."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {name: _moved(y, device) for name, y in x.items()}
    if isinstance(x, tuple):
        return tuple(_moved(y, device) for y in x)
    if isinstance(x, View):
        pages = replace(x.pages, stored=_moved(x.pages.stored, device))
        return View(_moved(x.live, device), _moved(x.sink, device), pages)
    return x


TABLES = (seal_rows, attention_rows)
