"""Scales per channel in kernels: page headers, their records, and every kernel that reads them."""

import mlx.core as mx
import numpy as np
import pytest
from methods import METHODS
from on_emulator import make
from samples import data

from mlxkv.cache.stores import Codes, Records
from mlxkv.formats.config import Affine, Polar
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.records import why_no_record

pytestmark = pytest.mark.usefixtures("trusted")


def stores(name, dims, pages=3, heads=2):
    """(pages as records, the same as codes) of a format."""
    config, page = METHODS[name].config(dims), METHODS[name].page
    pair = tuple(mx.array(data(1, heads, pages * page, dims, seed=i)) for i in range(2))
    ours, plain = Records(config, (dims, dims), make), Codes(config, (dims, dims))
    for store in (ours, plain):
        store.append(pair, 1)
        store.append(pair, pages - 1, page)
    return ours, plain


def test_nothing_is_stored_twice():
    """At whole blocks of dims records and headers take what the codes of plain ops take."""
    for name in ("kivi", "channels of both", "polar"):
        ours, plain = stores(name, 128)
        assert sum(x.nbytes for x in ours.arrays()) == sum(x.nbytes for x in plain.arrays()), name


def test_each_number_is_read_where_it_belongs():
    """One scale of the second page changed: what the kernels give changes there alone."""
    ours, plain = stores("kivi", 64)
    scale = np.array(plain.state["keys"]["scale"])
    scale[0, 1, 2, 5] *= 3  # group 0 of page 1
    state = plain.state | {"keys": {**plain.state["keys"], "scale": mx.array(scale)}}
    other = Records(ours.config, (64, 64), make)
    other.restore(state, 3)
    before, after = (np.array(s.read(0, 3).decode(0, mx.float32)) for s in (ours, other))
    where = np.argwhere(before != after)
    assert len(where) > 10
    assert {tuple(n) for n in where[:, [0, 1, 3]]} == {(0, 1, 5)}
    assert where[:, 2].min() >= 64 and where[:, 2].max() < 96


def test_what_headers_cannot_hold_says_why():
    spec = Affine(2, 24, axis="channel")
    assert why_no_record(spec, 64, 48) == "groups of 24 tokens are no multiple of 16"
    for given, why in {
        ("polar", 80, 128, True): "pairs of 80 dims",
        ("polar", 512, 128, True): "pairs of 512 dims",
        ("polar", 128, 96, True): "a page of 96 tokens is no multiple of 64",
        ("polar", 128, 128, False): "values as radius and angle",
    }.items():
        name, dims, page, keys_ = given
        assert why in why_no_record(PRESETS[name].keys.quantizer, dims, page, keys_)
    assert "radius int2 and angle int4" in why_no_record(Polar(2, 4), 64, 64)
