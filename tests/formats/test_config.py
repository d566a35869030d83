"""Presets, names of --kv and byte counts."""

import dataclasses
import json
import subprocess
import sys

import mlx.core as mx
import pytest

from mlxkv.cache.stores import Codes
from mlxkv.codec.maps import sample
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.names import fallback_preset, parse_kv
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.quantizers import Affine

DIMS = (64, 80, 192)


def test_bits_per_value_is_what_pages_take(subtests):
    for dims in DIMS[:2]:
        for name in PRESETS:
            with subtests.test(dims=dims, name=name):
                config = PRESETS[name]
                if config.why_not(dims, dims):
                    assert config.keys.transform == "hadamard"
                    assert dims & (dims - 1)
                    continue
                x = mx.random.normal((1, 2, 2 * config.page, dims)).astype(mx.float16)
                own = sample(2, (dims, dims), config.fitted) if config.calibrated else None
                store = Codes(config, (dims, dims), own)
                store.append((x, x), 2)
                nbytes = sum(array.nbytes for array in store.arrays())
                bits = config.bits_per_value(dims, dims) / config.keep
                assert nbytes * 8 / (2 * x.size) == pytest.approx(bits)


def test_only_hadamard_is_refused_at_the_usual_head_dims():
    for name, config in PRESETS.items():
        for dims in DIMS:
            reason = config.why_not(dims, dims)
            assert (reason is not None) == ("hadamard" in name and dims in (80, 192))


def test_pairs_take_each_side_from_its_preset():
    pair = parse_kv("int8/int4")
    assert pair.keys == PRESETS["int8"].keys
    assert pair.values == PRESETS["int4"].values
    assert parse_kv("fp16/int4").compresses
    assert not parse_kv("fp16").compresses


def test_a_pair_has_the_windows_of_the_side_that_compresses():
    for text in ("fp16/kivi-int4", "kivi-int4/fp16", "kivi-int4/int4"):
        assert (parse_kv(text).sink, parse_kv(text).recent) == (0, 128), text
    assert (parse_kv("int4/kivi-int4").sink, parse_kv("int4/kivi-int4").recent) == (64, 64)


def test_a_stand_in_takes_no_more_bits_than_the_smaller_side():
    """Of keys or of values, whichever has fewer bits."""
    named = {"fill-4": "int4", "fill-3": "int3", "fill-2.25": "int2"}
    named |= {"fill-4/fill-2.25": "int2", "fill-3/fill-4": "int3", "fill-4.5/fill-4": "int4"}
    assert {name: fallback_preset(parse_kv(name)) for name in named} == named
    assert fallback_preset(parse_kv("fill-4/int4")) is fallback_preset(parse_kv("int4")) is None


def test_unknown_presets_name_the_choices(subtests):
    for text in ("int5", "", "int4/", "int4/int4/int4", "INT5"):
        with subtests.test(text=text):
            with pytest.raises(
                UserError,
                match=r"\[--kv\] unknown preset; got .*; (did you mean .+ )?choose from fp16, ",
            ):
                parse_kv(text)


def test_configurations_survive_json(subtests):
    for name in PRESETS:
        with subtests.test(name=name):
            config = PRESETS[name]
            data = config.as_dict()
            assert CacheConfig.from_dict(data) == config
            assert json.loads(json.dumps(data)) == data  # results on disk are keyed by it


def test_a_changed_configuration_loses_its_name():
    config = parse_kv("Q8_0/q4_0")
    assert config.label == "int8/int4" and parse_kv(config) is config
    changed = parse_kv(dataclasses.replace(config, sink=16))
    assert changed.label == f"{config.keys.label} / {config.values.label}"
    assert CacheConfig.from_dict(config.as_dict()).name == ""
    own = dataclasses.replace(changed, name="mine")  # which names no preset
    assert parse_kv(own) is own and own.label == "mine"


INT4 = PRESETS["int4"].as_dict()


@pytest.mark.parametrize(
    "data",
    # The last is of a file from when sliding windows could be compressed.
    ({}, None, {"keys": 1}, {**INT4, "page": 7}, {**INT4, "sliding": 1024}),
)
def test_broken_configurations_are_one_line(data):
    with pytest.raises(UserError, match="CacheConfig"):
        CacheConfig.from_dict(data)


def test_bad_values_are_refused():
    with pytest.raises(UserError, match=r"got 5; choose from 2, 3, 4, 8"):
        Affine(5)
    with pytest.raises(UserError, match="unknown transform"):
        Side(Affine(4), "fourier")
    with pytest.raises(UserError, match="unknown axis"):
        Affine(4, axis="rows")
    with pytest.raises(UserError, match="page must be a multiple of 16"):
        dataclasses.replace(PRESETS["int4"], page=40)
    with pytest.raises(UserError, match="windows must be 0 or more"):
        dataclasses.replace(PRESETS["int4"], sink=-1)
    with pytest.raises(UserError, match="group must be 0 or at least 16; got 8"):
        Affine(4, 8)
    assert "no multiple of the group 48" in Affine(4, 48, axis="channel").why_not(128, 64)


def test_config_imports_no_framework(with_torch):
    code = "import sys, mlxkv.formats.config; print({'mlx', 'torch', 'numpy'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
