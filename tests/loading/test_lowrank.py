"""Low rank: its names, its bases out of a calibration, models that run on it, the table of subspaces."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from low_rank_cache import DIMS, KV_HEADS, RANK, close
from methods import config_named

from mlxkv.errors import UserError
from mlxkv.formats.calibration import subspace
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.lowrank import LowRank
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS, low_rank
from mlxkv.spec import oja as spec


def test_ranks_are_even_and_no_larger_than_a_head():
    sizes = {(0.3, 64): 20, (0.7, 80): 56, (0.01, 64): 8, (1.0, 96): 96, (0.05, 4): 4}
    assert {at: LowRank(share=at[0]).dims(at[1]) for at in sizes} == sizes


def test_low_rank_is_saved_as_it_is():
    low = LowRank(rank=96, follows=True, stored="transport", raw=True)
    codes = [side.quantizer for side in (PRESETS["srft-int3"].keys, PRESETS["srft-int3"].values)]
    one = replace(low_rank(low, *codes), keep=0.25)
    assert one.keys.low == replace(low, mixed=True) and (one.sink, one.recent) == (32, 32)
    for config in (one, *(PRESETS[name] for name in ("oja-0.75", "oja-0.75+int4", "fp16+keep0.5"))):
        assert CacheConfig.from_dict(config.as_dict()) == config
    assert PRESETS["static-0.75"].sink == 0 and PRESETS["static-0.75+windows"].recent == 32
    assert PRESETS["oja-0.75"].bits_per_value(128, 128) == 12
    with pytest.raises(UserError, match="rank must be even"):
        LowRank(rank=7)
    with pytest.raises(UserError, match="keep must be above 0"):
        replace(one, keep=0.0)


def test_names_of_older_versions_say_what_to_write():
    for name in ("oja-r96", "static-0.6+windows", "int4+keep0.3", "int2+g32", "int4+rope16"):
        with pytest.raises(UserError, match=r"unknown preset; got .*attach\(model, replace\("):
            parse_kv(name)
    with pytest.raises(UserError, match="unknown preset; got 'oja'.*lists$"):
        parse_kv("oja")


def test_bases_that_follow_are_counted_on_top():
    assert parse_kv("oja-0.75").basis_bytes(8, 128, 64) == 4 * 8 * (128 * 96 + 64 * 48) * 2
    assert config_named("oja-r96+transport/int4").basis_bytes(1, 128, 128) == 4 * 128 * 96
    assert config_named("int4/oja-r96+segments3").basis_bytes(1, 128, 128) == 3 * 4 * 128 * 96
    assert parse_kv("static-0.75").basis_bytes(8, 128, 128) == 0


def test_bases_come_from_what_a_calibration_holds_already():
    """The moments of queries and keys, out of eigenvectors and balanced transforms."""
    from mlxkv.formats import matrices
    from mlxkv.formats.calibration import balance

    rng = np.random.default_rng(0)
    q, k = (
        rng.standard_normal((KV_HEADS, 4000, DIMS)) * np.exp(-0.08 * np.arange(DIMS)) for _ in "qk"
    )
    reads, noise = (x.swapaxes(-1, -2) @ x / 4000 for x in (q, k))
    down, sigma, _ = balance.balance(noise, reads)
    found = balance.Balance(down.astype(np.float32), sigma.astype(np.float32))
    assert close(subspace.stored_moment(found), noise, 1e-3)
    values, vectors, _ = matrices.eigenbasis(reads)
    both = subspace.stored_moment(found) + subspace.read_moment(values, vectors)
    u = subspace.basis(both, RANK)
    rows = np.concatenate([q, k], axis=1)
    _, _, v = np.linalg.svd(rows, full_matrices=False)  # the paper's own words
    assert (subspace.overlap(u, v.swapaxes(-1, -2)[..., :RANK]) > 0.999).all()
    assert (subspace.ranks(both, 0.95) == spec.ranks(spec.stacked(noise, reads), 0.95)).all()
    mixed = subspace.basis(both, RANK, mixed=True)
    assert close(mixed @ mixed.swapaxes(-1, -2), u @ u.swapaxes(-1, -2), 1e-9)


def test_models_run_on_it(tmp_path):
    """A random model with calibrated bases: attach, generate, save, load; rank by energy per layer."""
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
    from random_models import random_model

    from mlxkv.calibration.measure import calibrate
    from mlxkv.catalog.reports import summarise
    from mlxkv.loading.attach import attach, detach

    mx.random.seed(0)
    model = random_model("llama")
    tokens = np.random.default_rng(0).integers(0, 64, 600).tolist()
    made = calibrate(model, tokens)
    prompt = mx.array(tokens[:280])
    for kv in ("oja-e0.97+int8", "oja-0.75+keep0.5"):
        reports = attach(model, config_named(kv), calibration=made)
        assert all(r.compressed for r in reports)
        cache = make_prompt_cache(model)
        found = [t for t, _ in generate_step(prompt, model, prompt_cache=cache, max_tokens=4)]
        assert len(found) == 4
        if "e0.97" in kv:
            ranks = [c.config.keys.low.rank for c in cache]
            dims = made.layers["0"].keys.values.shape[1]
            assert all(8 <= r <= dims and r % 2 == 0 for r in ranks)
            assert [r.bits_per_value for r in reports] == [
                c.config.bits_per_value(dims, dims) for c in cache
            ]
            assert not any(r.clips for r in reports) and "on top bases of" in summarise(reports)[0]
        save_prompt_cache(str(tmp_path / "x.safetensors"), cache)
        again = load_prompt_cache(str(tmp_path / "x.safetensors"))
        step = mx.array([[3]])
        assert mx.array_equal(model(step, cache=again), model(step, cache=cache))
        detach(model)
