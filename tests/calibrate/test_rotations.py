"""What keys rotate by, measured on models of many families, against the formulas of their configs."""

import mlx.core as mx
import numpy as np
import pytest
from calibration_inputs import LLAMA3, YARN
from random_models import random_model

from mlxkv.calibration import moments
from mlxkv.calibration.moments import rotations
from mlxkv.formats.calibration import rotary
from mlxkv.formats.calibration.sums import PROBES
from mlxkv.patching.trees import leaves, own_caches
from mlxkv.spec import positions


def plain(dims, base=1e4):
    return base ** (-np.arange(0, dims, 2) / dims)


def llama3(dims, base=1e4):
    wave = 2 * np.pi / plain(dims, base)
    smooth = np.clip((64 / wave - 1) / 3, 0, 1)
    return plain(dims, base) * ((1 - smooth) / 8 + smooth)


def measure(family, longest=32768, dtype=None, **changes):
    model = random_model(family, **changes)
    if dtype is not None:
        model.set_dtype(dtype)
    caches = leaves(own_caches(model))
    places = [place for place, cache in caches if type(cache).__name__.endswith("KVCache")]
    found = rotations(model, places, mx.arange(PROBES) % 64, longest)
    return [found[place] for place in places]


def test_pairs_and_frequencies_are_those_of_the_config(subtests):
    for family, changes, pairs, frequencies in (
        ("llama", {}, positions.rotary_pairs(64), plain(64)),
        ("llama", {"rope_theta": 1e6}, positions.rotary_pairs(64), plain(64, 1e6)),
        (
            "llama",
            {"rope_traditional": True},
            positions.rotary_pairs(64, interleaved=True),
            plain(64),
        ),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            positions.rotary_pairs(64),
            plain(64) / 4,
        ),
        ("llama", {"rope_scaling": LLAMA3}, positions.rotary_pairs(64), llama3(64)),
        ("qwen2", {"rope_theta": 1e6}, positions.rotary_pairs(64), plain(64, 1e6)),
        ("stablelm", {}, positions.rotary_pairs(32), plain(32)),
    ):
        with subtests.test(family=family, changes=changes, pairs=pairs):
            for one in measure(family, **changes):
                np.testing.assert_array_equal(one.pairs, pairs)
                np.testing.assert_allclose(one.frequencies, frequencies, rtol=1e-4, atol=1e-7)


def test_layers_of_gemma_have_bases_of_their_own():
    local, whole, *_ = measure("gemma3_text", rope_theta=1e6)
    np.testing.assert_allclose(local.frequencies, plain(64, 1e4), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(whole.frequencies, plain(64, 1e6), rtol=1e-4, atol=1e-7)


def test_yarn_is_measured_with_its_factor():
    (one, *_) = measure("llama", rope_scaling=YARN)
    fast, slow = one.frequencies[0], one.frequencies[-1]
    assert fast == pytest.approx(1.0, rel=1e-4)
    assert slow == pytest.approx(plain(64)[-1] / 4, rel=1e-3)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "falcon_h1", "deepseek_v2"])
def test_half_precision_is_as_exact_far_away(family, dtype):
    """The keys that a cache gets are rounded: slow pairs of a base of a million would not be seen to move."""
    rope = mx.fast.rope
    bases = {} if family == "falcon_h1" else {"rope_theta": 1e6}
    for one, exact in zip(
        measure(family, dtype=dtype, **bases), measure(family, **bases), strict=True
    ):
        np.testing.assert_array_equal(one.pairs, exact.pairs)
        np.testing.assert_allclose(one.frequencies * 32768, exact.frequencies * 32768, atol=0.05)
    assert mx.fast.rope is rope


def rows(kind, count=PROBES, dims=8):
    x = np.random.default_rng(0).standard_normal((count, dims))
    pairs = positions.rotary_pairs(dims)
    out = {}
    for t in rotary.positions(4096):
        frequencies = plain(dims) * (t > 1000 and kind == "bends") + plain(dims)
        rotated = positions.rotate(x, np.full(count, t), pairs, frequencies)
        out[t] = {"none": x, "grows": x * (1 + 1e-3 * t), "added": x + np.sin(t)}.get(kind, rotated)
    return out


def test_keys_without_positions_do_not_turn():
    assert len(rotary.measured(rows("none"), 2**-23).pairs) == 0


def test_a_layer_whose_input_is_rounded_at_each_position_rotates(monkeypatch):
    """As behind attention sinks: RoPE's results are float32, what is rotated is not the same twice."""
    turns, rng = rows("turns"), np.random.default_rng(1)
    still = rng.standard_normal((PROBES, 4))
    kept = {t: np.concatenate([x, still], axis=1) for t, x in turns.items()}
    noisy = {t: x * (1 + 2**-9 * rng.uniform(-1, 1, x.shape)) for t, x in kept.items()}
    monkeypatch.setattr(moments.rotary, "measured", lambda rows, *given: asked.append(given))
    asked = []
    measure("llama", longest=64, dtype=mx.bfloat16)
    assert {*asked} == {(2**-23, 2**-7)}
    monkeypatch.undo()
    assert rotary.measured(noisy, 2**-23) is None
    found = rotary.measured(noisy, 2**-23, 2**-7)
    np.testing.assert_array_equal(found.pairs, rotary.measured(kept, 2**-23).pairs)


def test_other_dependence_on_position_is_no_rotation(subtests):
    for kind in ("grows", "added", "bends"):
        with subtests.test(kind=kind):
            assert rotary.measured(rows("turns"), 2**-23) is not None
            assert rotary.measured(rows(kind), 2**-23) is None


def test_other_families(subtests):
    for family, pairs in (
        ("gpt_oss", positions.rotary_pairs(64)),  # YaRN, sinks
        (
            "gemma4_text",
            np.array([(i, i + 64) for i in range(16)]),
        ),  # a quarter of the pairs rotates
        (
            "deepseek_v2",
            positions.rotary_pairs(32, 32, interleaved=True),
        ),  # rotary channels come last
        ("falcon_h1", positions.rotary_pairs(64)),  # base 1e11: slow pairs stand still
        ("jamba", np.zeros((0, 2), int)),  # no RoPE
    ):
        with subtests.test(family=family, pairs=pairs):
            wanted = {tuple(one) for one in pairs}
            got = {tuple(pair) for pair in measure(family, longest=16384)[-1].pairs}
            assert got <= wanted and (family == "falcon_h1" or got == wanted)
