"""Rows of the golden table that kernels compute: sealing and decode attention by Triton, decode attention
by Metal."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cuda_track.cache.attention import DECODE_TOKENS, attend, why_not
from cuda_track.cache.stores import Paged, Records
from cuda_track.cache.view import View
from cuda_track.codec import packing
from cuda_track.codec.codec import Codec
from cuda_track.golden.table import TABLE
from cuda_track.kernels import launch, layout
from cuda_track.kernels.pool import Pool
from cuda_track.mps import attend as metal_kernel
from cuda_track.mps import pages as metal
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.records import NAMES
from mlxkv.spec.bounds import (
    Row,
    compare_codes,
    read,
    rms,
)
from mlxkv.spec.rows import encode_cases

WEIGHTS_BOUND = 2e-3  # queries and weights are float16 in the kernel of Triton
HEAD = 64  # dims of a head, where golden tensors have none that Triton reads
METAL_BOUND = 1e-4  # float32; exponentials are those of the machine


def seal_rows() -> Iterator[Row]:
    tensors, header = read("encode")
    for key, whole, dims in encode_cases(tensors, header):
        spec, x = whole.quantizer, TABLE.floats(tensors[f"x.{dims}"])
        page = x.shape[2]
        for keys in (True, False):
            if layout.why_not(spec, dims, page, keys):
                continue
            at = layout.PlaneLayout(spec, dims, page, keys)
            pool = Pool()
            places = pool.reserve(x.shape[0], (at.shapes(x.shape[1]),) * 2, x.device)
            launch.seal(TABLE.codec(whole, dims, page), x, at, pool.sides[0], places)
            side = {n: y[torch.tensor(places)][:, None] for n, y in pool.sides[0].items()}
            codes = packing.unpack(at.restore(side)["codes"], spec.bits, dims)
            case = f"{key}, {'keys' if keys else 'values'}"
            pair = TABLE.array(codes), tensors[f"{key}.codes"]
            yield compare_codes("seal", case, *pair, tensors[f"{key}.near"])


def attention_rows(table: str = "attention") -> Iterator[Row]:
    for case, it, spec in TABLE.attention_cases(table):
        mask = "causal" if it.mask is None else it.mask
        config = CacheConfig(*(Side(side.quantizer) for side in it.sides), page=it.page)
        if launch.why_not(config, (it.dims, it.dims)):
            continue
        store = Paged(config, TABLE.given(it).pages.codecs)
        store.restore(dict(zip(NAMES, it.stored, strict=True)), it.pages)
        view = View(it.live, it.sink, store.read(0, store.count))
        if why_not(it.q, view, mask) is None:
            out = attend(it.q, view, it.scale, mask, it.sink_logits, it.softcap)
            yield _row(case, out, spec, WEIGHTS_BOUND, table)


def softcap_rows() -> Iterator[Row]:
    return attention_rows("softcap")


def metal_rows(device: torch.device) -> Iterator[Row]:
    """Attention over page records on `device`; inputs are made on the CPU."""
    for case, it, spec in TABLE.attention_cases():
        mask = "causal" if it.mask is None else _moved(it.mask, device)
        dims, q = it.dims, it.q.to(device)
        config = CacheConfig(*(Side(side.quantizer) for side in it.sides), page=it.page)
        if metal.why_not(config, (dims, dims)) or metal_kernel.why_not(q, mask, DECODE_TOKENS):
            continue
        turns = (code.transform for code in TABLE.given(it).pages.codecs)
        codecs = tuple(
            Codec(Side(side.quantizer), dims, it.page, turn and turn.to(device), device)
            for side, turn in zip(it.sides, turns, strict=True)
        )
        pages = Records(config, codecs)
        pages.restore(dict(zip(NAMES, _moved(it.stored, device), strict=True)), it.pages)
        view = View(*(_moved(x, device) for x in (it.live, it.sink)), pages.read(0, it.pages))
        out = attend(q, view, it.scale, mask, _moved(it.sink_logits, device))
        yield _row(case, out, spec, METAL_BOUND)


def _row(case: str, out: torch.Tensor, spec, bound: float, table: str = "attention") -> Row:
    return Row(table, case, spec.size, rms=rms(TABLE.array(out), spec), bound=bound)


def _moved(x, device: torch.device):
    """Every tensor in tuples and dicts to `device`."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {name: _moved(y, device) for name, y in x.items()}
    return tuple(_moved(y, device) for y in x) if isinstance(x, tuple) else x


TABLES = (seal_rows, attention_rows, softcap_rows)
