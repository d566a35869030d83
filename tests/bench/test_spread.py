"""Random directions that differ in weight: mixed bits in the benchmarks, with kernels."""

import mlx.core as mx
import numpy as np
import pytest
from on_emulator import make
from random_models import config_of, random_model

from mlxkv.bench.kernels import attend, encode
from mlxkv.bench.kernels.case import KernelShape
from mlxkv.bench.spread import allotted, falling, spread
from mlxkv.bench.subject import Subject
from mlxkv.calibration.measure import random
from mlxkv.formats.calibration import layers
from mlxkv.formats.names import parse_kv
from mlxkv.metal import launch

SHAPE = KernelShape(1, 2, 1, 64)


def widths(config):
    return config.keys.quantizer.widths, config.values.quantizer.widths


def test_layers_differ_and_get_bits_of_their_own():
    model = random_model("llama", num_hidden_layers=4)
    made = spread(random(model))
    for n, layer in enumerate(made.layers.values()):
        found = falling(layer.kv_heads, 64, 2 * n)
        assert (np.diff(found) <= 0).all() and (np.diff(layer.keys.values) >= 0).all()
        np.testing.assert_allclose(layers.directions(layer.keys, True)[1], found, rtol=0.02)
    configs = layers.fitted({name: parse_kv("fill-2.25") for name in made.layers}, made)
    assert len({widths(config) for config in configs.values()}) == 4
    bits = [config.bits_per_value(64, 64) for config in configs.values()]
    assert 2.0 < np.mean(bits) <= 2.25


def test_a_cache_without_a_model_has_the_bits_of_one_layer(subtests):
    for name, rate in [("fill-2.25", 2.25), ("fill-3/fill-2", 2.5)]:
        with subtests.test(name=name, rate=rate):
            made = allotted(parse_kv(name), 128)
            assert made.bits_per_value(128, 128) == pytest.approx(rate, abs=0.3)
            assert made.why_not(128, 128) is None and all(len(set(one)) > 1 for one in widths(made))
            assert allotted(parse_kv("int4"), 128) == parse_kv("int4")


def test_kernels_are_timed(monkeypatch, trusted):
    monkeypatch.setattr(encode, "PAGES", 1)
    monkeypatch.setattr(encode, "REPEATS", 1)
    presets, dtype = {"fill-2.25": parse_kv("fill-2.25")}, mx.float32
    with launch.using(make):
        options = {"dtype": dtype, "bandwidth": 1e9, "calls": 2, "rounds": 1, "with_mlx_lm": False}
        (row,) = attend.rows(SHAPE, 320, presets=presets, **options)
        assert row["by"] == "kernels" and not row["wrong"] and row["us"] > 0
        row = encode.row("fill-2.25", presets["fill-2.25"], SHAPE, 128, dtype, 1e9)
        assert row["by"] == "kernels" and row["page_us"] > 0
        sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
        model = random_model("llama", **sizes, head_dim=64)
        subject = Subject(model, config_of("llama") | sizes, "random", mx.float32)
        assert subject.decoded_by("fill-2.25") == "kernels"
