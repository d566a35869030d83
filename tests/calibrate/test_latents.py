"""Calibrations of latents: what is measured against the spec, and what the maps are good for."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from random_models import latent_model, tokens

from mlxkv.calibration import clips, measure
from mlxkv.calibration.moments import Readers
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.quantizers import Affine
from mlxkv.loading.attach import attach, detach
from mlxkv.patching.probe import modules_of
from mlxkv.spec import affine as spec

WINDOWS = {"sink": 16, "recent": 16, "page": 16}
TEXT = tokens(700, seed=4).tolist()


def logits(model, text: mx.array) -> mx.array:
    cache = make_prompt_cache(model)
    parts = [model(x[None], cache=cache) for x in (text[:60], text[60:140])]
    parts += [model(text[None, i : i + 1], cache=cache) for i in range(140, len(text))]
    return mx.concatenate(parts, axis=1)[0]


def divergence(plain: mx.array, other: mx.array) -> float:
    p, q = (x - mx.logsumexp(x, -1, keepdims=True) for x in (plain, other))
    return (mx.exp(p) * (p - q)).sum(-1)[-30:].mean().item()


def test_what_reads_latents_is_what_the_spec_says():
    model = latent_model("deepseek_v3")
    module = modules_of(model)[0]
    rng = np.random.default_rng(1)
    q = rng.standard_normal((1, 4, 50, 24)).astype(np.float32)
    x = rng.standard_normal((300, 64))
    covariance, readers = x.T @ x / 300, Readers(module, 64)
    rows = np.array(readers.rows(mx.array(q), 0.3, covariance), np.float64)[0]
    found = readers.whole(np.einsum("hmr,hms->rs", rows, rows)[None] / (4 * 50))[0]
    up_keys = np.array(module.embed_q.weight, np.float64).swapaxes(-1, -2)  # [H, D, R]
    wanted = spec.latent_readers(
        q[0].astype(np.float64) @ up_keys,
        np.array(module.unembed_out.weight, np.float64),
        covariance,
        0.3,
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    # The same of queries that have their rotary part behind them.
    wide = np.concatenate([q, rng.standard_normal((1, 4, 50, 16)).astype(np.float32)], -1)
    again = Readers(module, 64).rows(mx.array(wide), 0.3, covariance)
    np.testing.assert_allclose(np.array(again)[0], rows, rtol=1e-5)


def test_balanced_latents_lose_less(tmp_path):
    """Than plain ones at 2 bits, from a calibration that was written and read."""
    model, text = latent_model("longcat_flash"), tokens(170)
    plain = logits(model, text)
    made, path = measure.calibrate(model, TEXT), tmp_path / "calibration.safetensors"
    artifact.write_calibration(path, made)
    layer = next(iter(made.layers.values()))
    assert layer.kv_heads == 1 and layer.keys.values.shape == (1, 64)
    lost = {}
    for transform in ("none", "balanced"):
        side = Side(Affine(2, 64), transform)
        attach(model, CacheConfig(side, side, **WINDOWS), calibration=path, strict=True)
        lost[transform] = divergence(plain, logits(model, text))
        detach(model)
    assert 0 < lost["balanced"] < lost["none"], lost


def test_what_latents_cannot_be_calibrated_by():
    model = latent_model("deepseek_v3")
    made = measure.calibrate(model, TEXT)
    with pytest.raises(UserError, match="a latent is both"):
        clips.search(model, made, CacheConfig(*[Side(Affine(2, 64), "oscar")] * 2, **WINDOWS), TEXT)
    assert measure.random(model).layers
