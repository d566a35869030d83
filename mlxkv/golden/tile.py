"""Rows of the golden table for the formats whose scales belong to a tile: KVarN, PolarQuant.

Each case: codes of given inputs (for KVarN behind the spec's outer scales, which are compared too),
then values, scores and mixtures of the spec's codes.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from mlxkv import packing
from mlxkv.bounds import BALANCE_BOUND, BOUNDS, PRODUCT_BOUND, Row, compare_codes, read, rms
from mlxkv.config import DualScale, Polar
from mlxkv.quantizers import dual_scale, polar


def dual_scale_rows() -> Iterator[Row]:
    for key, dims, case in _cases("dual_scale"):
        bits, axis, unit, thousandths = key.split(".")[1:]
        spec = DualScale(int(bits), axis, unit == "1", int(thousandths) / 1000)
        tiles, key = mx.array(case["x"].astype(np.float32))[:, :, None], f"kvarn.{key}"
        scales = dual_scale.balance(tiles, axis, spec.unit_std)[0 if axis == "channel" else 1]
        error = rms(np.array(scales)[:, :, 0], case["exact"])
        yield Row("balance", key, scales.size, rms=error, bound=BALANCE_BOUND)
        given = dual_scale.encode_balanced(spec, tiles, mx.array(case["outer"])[:, :, None])
        codes, right = (_unpacked(y, spec.bits, dims) for y in (given["codes"], case["codes"]))
        yield compare_codes("encode", key, codes, right, _mask(case["near"], codes.size))
        yield from _read_rows(dual_scale, spec, key, dims, case)


def polar_rows() -> Iterator[Row]:
    for key, dims, case in _cases("polar"):
        radius, angle = map(int, key.split(".")[1:])
        spec, key = Polar(radius, angle), f"polar.{key}"
        x = mx.array(case["x"].astype(np.float32))
        stored = polar.encode(spec, x, x.shape[2])["codes"]
        pairs = [_unpacked(y, spec.pair_bits, dims // 2) for y in (stored, case["codes"])]
        for name, shift, bits in (("radius", angle, radius), ("angle", 0, angle)):
            codes, right = ((y >> shift) & (2**bits - 1) for y in pairs)
            near = _mask(case[f"near_{name}"], codes.size)
            yield compare_codes("encode", f"{key}.{name}", codes, right, near)
        yield from _read_rows(polar, spec, key, dims, case)


def _cases(table: str) -> Iterator[tuple[str, int, dict[str, np.ndarray]]]:
    """(key, head dim, the tensors of the case and those shared by its head dim)."""
    tensors, _ = read(table)
    for key in (name.removesuffix(".codes") for name in tensors if name.endswith(".codes")):
        dims, start = key.split(".")[0], f"{key}."
        shared = {name: tensors[f"{dims}.{name}"] for name in ("x", "q", "p")}
        own = {n.removeprefix(start): x for n, x in tensors.items() if n.startswith(start)}
        yield key, int(dims), shared | own


def _unpacked(words, bits: int, dims: int) -> np.ndarray:
    return np.array(packing.unpack(mx.array(words), bits, dims))


def _mask(places: np.ndarray, size: int) -> np.ndarray:
    """Packed bits, as `compare_codes` takes them."""
    mask = np.zeros(size, bool)
    mask[places] = True
    return np.packbits(mask)


def _read_rows(method, spec, key: str, dims: int, case: dict[str, np.ndarray]) -> Iterator[Row]:
    """What the spec's codes stand for, and their products."""
    page = case["x"].shape[2]
    stored = {name: mx.array(case[name]) for name in method.names(spec)}
    q, p = (mx.array(case[name].astype(np.float32)) for name in ("q", "p"))
    decoded = method.decode(spec, stored, dims, page, mx.float32)
    step = page // case["decoded"].shape[2]
    found = {
        "decode": (decoded[:, :, ::step], case["decoded"], BOUNDS["decode"]),
        "scores": (method.scores(spec, q, stored, dims, page), case["scores"], PRODUCT_BOUND),
        "mix": (method.mix(spec, p, stored, dims, page), case["mix"], PRODUCT_BOUND),
    }
    for table, (ours, right, bound) in found.items():
        yield Row(table, key, right.size, rms=rms(np.array(ours), right), bound=bound)
