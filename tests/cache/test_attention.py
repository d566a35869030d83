"""Masks, sinks and shapes of `attend`; decode and prefill agree with each other."""

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.cache import attention
from mlxkv.cache.attention import attend, decode_all
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.quantizers import Affine
from mlxkv.spec import affine as ref

CONFIG = CacheConfig(Side(Affine(4), "srft"), Side(Affine(3), "srft"), sink=16, recent=32, page=32)


def setup(heads, kv_heads, dims, length, value_dims=None, seed=0):
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((2, kv_heads, length, dims)).astype(np.float32)
    values = rng.standard_normal((2, kv_heads, length, value_dims or dims)).astype(np.float32)
    cache = CompressedKVCache(CONFIG)
    cache.update_and_fetch(mx.array(keys), mx.array(values))
    view, _ = cache.keys_and_values()
    assert view.pages is not None
    q = rng.standard_normal((2, heads, 8, dims)).astype(np.float32)
    return q, view


def exact(view):
    """Keys and values as stored, in float64."""
    return tuple(np.array(x, np.float64) for x in decode_all(view, mx.float32))


def rms(x, spec):
    return np.sqrt(np.mean((np.array(x, np.float64) - spec) ** 2) / np.mean(spec**2))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dims", "value_dims"),
    [(1, 1, 64, 64), (6, 2, 80, 80), (5, 1, 512, 512), (7, 7, 192, 128)],
)
@pytest.mark.parametrize("new", (1, 8))
def test_any_shape(heads, kv_heads, dims, value_dims, new):
    q, view = setup(heads, kv_heads, dims, 200, value_dims)
    q = q[:, :, :new]
    out = attend(mx.array(q), view, dims**-0.5, "causal" if new > 1 else None)
    spec = ref.attention(q, *exact(view), dims**-0.5, ref.causal_mask(new, 200))
    assert out.shape == (2, heads, new, value_dims) and rms(out, spec) < 2e-6


@pytest.mark.parametrize("new", (1, 8, 40))
def test_masks_and_sinks(new):
    q, view = setup(6, 2, 64, 200)
    rng = np.random.default_rng(9)
    q = rng.standard_normal((2, 6, new, 64)).astype(np.float32)
    window = ref.causal_mask(new, 200, window=70)
    additive = np.where(window, rng.standard_normal(window.shape), -1e9).astype(np.float32)
    per_batch = np.stack([window, np.roll(window, 3, -1)])[:, None]
    sinks = rng.standard_normal(6).astype(np.float32)
    for mask in (window, additive, per_batch, None):
        for s in (None, sinks):
            out = attend(
                mx.array(q),
                view,
                0.125,
                None if mask is None else mx.array(mask),
                None if s is None else mx.array(s),
            )
            spec = ref.attention(q, *exact(view), 0.125, mask, s)
            assert rms(out, spec) < 3e-6


def test_a_prefill_in_blocks_gives_each_block_its_rows_of_a_mask(monkeypatch):
    """Blocks of 8 rows, as a long prompt is read where MLX has no fused kernel."""
    monkeypatch.setattr(attention, "device_type", lambda: "cpu")
    monkeypatch.setattr(attention, "SCORE_BYTES", 1)
    _, view = setup(6, 2, 64, 200)
    rng = np.random.default_rng(9)
    q = rng.standard_normal((2, 6, 42, 64)).astype(np.float32)
    causal = ref.causal_mask(42, 200)
    shuffled = rng.permuted(causal, axis=1)
    bias = np.where(causal, rng.standard_normal(causal.shape), -1e9).astype(np.float32)
    for mask, law in (("causal", causal), (causal, causal), (shuffled, shuffled), (bias, bias)):
        given = mask if isinstance(mask, str) else mx.array(mask)
        for cap in (None, 3.0):
            out = attend(mx.array(q), view, 0.125, given, None, cap)
            assert rms(out, ref.attention(q, *exact(view), 0.125, law, softcap=cap)) < 3e-6


@pytest.mark.parametrize("new", (1, 8, 40))
def test_rows_that_may_see_nothing_are_numbers(new):
    """Left padding: as `mx.fast` does it, such a row is the mean of all values, not NaN."""
    _, view = setup(6, 2, 64, 200)
    q = np.random.default_rng(9).standard_normal((2, 6, new, 64)).astype(np.float32)
    out = attend(mx.array(q), view, 0.125, mx.zeros((2, 1, new, 200), mx.bool_))
    mean = np.repeat(exact(view)[1].mean(2, keepdims=True), 3, 1)  # [B, H, 1, D]
    assert rms(out, np.broadcast_to(mean, out.shape)) < 3e-6


def test_an_unknown_mask_is_refused():
    _, view = setup(6, 2, 64, 200)
    with pytest.raises(ValueError, match="mask"):
        attend(mx.zeros((2, 6, 40, 64)), view, 0.125, "full")


@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16))
def test_sixteen_bit_models(dtype):
    """The error of 16-bit windows and outputs, not of the codes, is what is left."""
    rng = np.random.default_rng(4)
    keys, values = (rng.standard_normal((1, 2, 200, 64)) for _ in range(2))
    cache = CompressedKVCache(CONFIG)
    cache.update_and_fetch(mx.array(keys, dtype), mx.array(values, dtype))
    view, _ = cache.keys_and_values()
    for new in (1, 30):
        q = mx.array(rng.standard_normal((1, 4, new, 64)), dtype)
        mask = "causal" if new > 1 else None
        out = attend(q, view, 0.125, mask)
        assert out.dtype == dtype
        spec = ref.attention(
            np.array(q.astype(mx.float32)), *exact(view), 0.125, ref.causal_mask(new, 200)
        )
        assert rms(out.astype(mx.float32), spec) < (2e-3 if dtype == mx.float16 else 1.2e-2)
