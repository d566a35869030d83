"""Mixed bits: the law, the budget, names, and caches whose layers differ in widths."""

import mlx.core as mx
import numpy as np
import pytest
from calibration_inputs import TEXT, logits, rms
from methods import config_named
from mlx_lm.models import openelm
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.calibration import measure
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact, mixed_bits
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.quantizers import DIMS, ERRORS, GAINS, STEPS, Affine, MixedBits
from mlxkv.loading.attach import attach, detach
from mlxkv.spec import mixed_bits as spec

pytestmark = pytest.mark.usefixtures("detached")

WINDOWS = "+sink16+recent16+page16"


def falling(heads, dims, spread, seed=0):
    x = np.exp(spread * np.random.default_rng(seed).standard_normal((heads, dims)))
    return np.sort(x)[:, ::-1]


# -- the law


def test_steps_are_the_best_for_gaussian_numbers_and_keep_their_size(subtests):
    for bits in STEPS:
        with subtests.test(bits=bits):
            step, gain = spec.best_step(bits), spec.gain(bits)
            assert STEPS[bits] == pytest.approx(step, rel=1e-7)
            assert GAINS[bits] == pytest.approx(gain, rel=1e-7)
            assert ERRORS[bits] == pytest.approx(spec.error(bits), abs=1e-9)
            for other in (0.99, 1.01):
                assert spec.uniform_error(bits, other * step) > spec.uniform_error(bits, step)
            x = np.random.default_rng(bits).standard_normal(200_000)
            levels = np.clip(np.floor(x / step), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 0.5
            back = gain * step * levels
            assert np.mean(back**2) == pytest.approx(1, rel=0.01)
            assert np.mean((back - x) ** 2) == pytest.approx(ERRORS[bits], rel=0.05)


# -- the budget


def test_the_budget_is_kept_and_used(subtests):
    for rate in [1.0, 1.6, 2.25, 3.0, 5.0]:
        with subtests.test(rate=rate):
            sides = [
                (side, falling(2, 128, 1.5, seed)) for seed in (0, 2) for side in artifact.SIDES
            ]
            found = mixed_bits.allot(sides, rate)
            bits = sum(spec.stored_bits(widths) for widths in found)
            assert rate * 512 - 64 < bits <= rate * 512
            for (_, sigma), widths in zip(sides, found, strict=True):
                assert MixedBits(rate, widths).why_not(len(widths) * DIMS, 64) is None
                assert len(widths) * DIMS <= sigma.shape[1]


def test_more_bits_never_cost_more_and_no_pattern_is_better():
    sigma = falling(2, 64, 1.2)
    known = {}
    for widths in spec.patterns(4):
        total = sum(widths)
        known[total] = min(known.get(total, np.inf), spec.cost(sigma, widths))
    found = {sum(widths): cost for cost, widths in mixed_bits.curve(sigma)}
    assert known.keys() == found.keys()
    for total, cost in known.items():
        assert found[total] == pytest.approx(cost, rel=1e-5)


def test_too_few_bits_are_refused():
    sigma = falling(2, 16, 1.0)
    with pytest.raises(UserError, match=r"\[--kv\] fill-0.5 leaves no bits.*16 dims.*fill-2.25"):
        mixed_bits.allot([("keys", sigma), ("values", sigma)], 0.5)


# -- names and data


def test_any_number_is_a_name():
    config = parse_kv("fill-2.6")
    assert config.keys.quantizer == MixedBits(2.6) == config.values.quantizer
    assert config.keys.centred and not config.values.centred
    assert config.calibrated and config.mixed_bits
    assert config.bits_per_value(128, 128) == 2.6
    assert config.keys.quantizer.label.startswith("2.6 bits a value in the mean, by blocks of 16")
    assert MixedBits(2.6, (4, 2)).label.startswith("4/2 bits by blocks of 16")
    assert parse_kv("fill-3/fill-2").values.quantizer.rate == 2
    assert isinstance(parse_kv("fill-3/int4").values.quantizer, Affine)
    own = CacheConfig(
        Side(MixedBits(2.6, (4, 2)), "fill-centred"), Side(MixedBits(2.6, (3, 1, 1)), "fill")
    )
    assert CacheConfig.from_dict(own.as_dict()) == own
    assert own.fitted == ("fill-centred 4,2", "fill 3,1,1") and own.dims(64, 64) == (32, 48)
    assert own.keys.bits_per_value(64, 64) == (6 * 16 + 16) / 64
    assert own.values.bits_per_value(64, 64) == (5 * 16 + 16 + 16) / 64  # half a word is empty


def test_what_is_no_number_of_bits_is_one_line(subtests):
    for name in ["fill-", "fill-x", "fill-0.1", "fill-9", "fill-r4", "fill-2+int4"]:
        with subtests.test(name=name):
            with pytest.raises(
                UserError,
                match=r"\[--kv\] no such number of bits.*write bits a value from 0.5 to 8.25",
            ):
                parse_kv(name)


def test_wrong_data_is_one_line():
    for widths in ((2, 3), (5,), (4, 0)):
        with pytest.raises(UserError, match=r"\[MixedBits\] widths must"):
            MixedBits(2.0, widths)
    with pytest.raises(UserError, match=r"\[MixedBits\] bits a value"):
        MixedBits(0.1)
    with pytest.raises(UserError, match=r"\[Side\] .*is for MixedBits"):
        Side(Affine(4), "fill")
    assert "do not divide 72" in Side(MixedBits(2.0), "fill").why_not(72, 64)
    assert "more than the 32" in Side(MixedBits(2.0, (2, 2, 2)), "fill").why_not(32, 64)


# -- caches


def mean_bits(reports) -> float:
    """Bits per value inside the pages, over all layers, each by its values."""
    sizes = [r.kv_heads * (r.key_dim + r.value_dim) for r in reports]
    return sum(s * r.bits_per_value for s, r in zip(sizes, reports, strict=True)) / sum(sizes)


def test_layers_share_a_budget_and_the_error_falls_with_it(leaning, leaning_made):
    exact = logits(leaning)
    errors, shapes = [], [one.keys.values.shape[1] for one in leaning_made.layers.values()]
    for rate in (1.5, 2.5, 4, 8):
        reports = attach(leaning, config_named(f"fill-{rate}{WINDOWS}"), calibration=leaning_made)
        bits = [report.bits_per_value for report in reports]
        assert np.average(bits, weights=shapes) <= rate + 1e-9
        caches = make_prompt_cache(leaning)
        assert all(one.config.keys.quantizer.widths for one in caches)
        errors.append(rms(logits(leaning, caches), exact))
        detach(leaning)
    assert errors == sorted(errors)[::-1] and errors[-1] < 0.01 < errors[0]


def test_a_model_whose_layers_differ_in_kv_heads_keeps_the_rate():
    mx.random.seed(0)
    args = {"num_query_heads": [2, 4, 6], "num_kv_heads": [1, 2, 6], "ffn_multipliers": [1, 1, 1]}
    sizes = {"num_transformer_layers": 3, "model_dim": 64, "vocab_size": 64, "ffn_dim_divisor": 16}
    one = openelm.Model(openelm.ModelArgs("openelm", head_dim=64, **sizes, **args))
    for n, layer in enumerate(
        one.layers
    ):  # the first and the last are as easy and as hard as can be
        layer.attn.qkv_proj.weight *= (0.2, 1, 5)[n]
    found = measure.calibrate(one, TEXT)
    for rate in (1.5, 2.25, 3):
        reports = attach(one, config_named(f"fill-{rate}{WINDOWS}"), calibration=found)
        assert [r.kv_heads for r in reports] == args["num_kv_heads"]
        assert rate - 0.25 < mean_bits(reports) <= rate + 1e-9
        detach(one)
