"""Quantize a pair of keys and values in the emulator, and check its codes against the spec."""

import mlx.core as mx
import numpy as np
from on_emulator import make
from record_sides import unpack_side

from mlxkv.formats.quantizers import Affine
from mlxkv.formats.records import RecordLayout
from mlxkv.metal import quantize
from mlxkv.spec import affine as ref

NEAR = 1e-3  # of a code from where rounding transforms
INT8, INT4, INT3, INT2 = (
    Affine(8, 64),
    Affine(4, 32, symmetric=True),
    Affine(3, 64),
    Affine(2, 0, symmetric=True),
)


def data(*shape, seed=0, dtype=mx.float32):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    x[..., 3] *= 6
    return mx.array(x.astype(np.float32)).astype(dtype)


def layout(specs, dims):
    keys, values = (
        s.layout(d, 64, i == 0) for i, (s, d) in enumerate(zip(specs, dims, strict=True))
    )
    return RecordLayout(keys, values)


def check(words, x, spec, at, down=None):
    """The side `at` of records against the spec's codes of x @ down, rounding ties aside."""
    codes, scale, bias = (None if y is None else np.array(y) for y in unpack_side(words, at))
    stored = np.array(x.astype(mx.float32), np.float64)
    if down is not None:
        stored = stored @ np.array(down, np.float64)
    stored = ref.clip_rows(stored, spec.clip)
    group = spec.group_size(at.dims, 64)
    want, want_scale, want_bias = ref.affine_encode(stored, spec.bits, group, spec.symmetric)
    # Scales and biases: float16 of values that differ in the last bits of a float32.
    for ours, theirs in ((scale, want_scale), (bias, want_bias)):
        if ours is not None:
            off = np.abs(ours - theirs)
            assert (off <= np.maximum(np.abs(theirs), 1e-4) / 1000).all()
            assert (off > 0).mean() < 0.01
    # Codes by our own scales, so that each stands for itself.
    start = -(2 ** (spec.bits - 1)) * scale.astype(float) if bias is None else bias.astype(float)
    wide = [np.repeat(y, group, -1)[..., : at.dims] for y in (start, scale.astype(float))]
    exact = (stored - wide[0]) / np.where(wide[1] > 0, wide[1], 1)
    low, top = (1 if spec.symmetric else 0), 2**spec.bits - 1
    nearest = np.clip(np.rint(exact), low, top)
    if spec.symmetric:
        nearest = np.where(wide[1] > 0, nearest, 2 ** (spec.bits - 1))
    wrong = codes != nearest
    tie = np.abs(np.abs(exact - np.rint(exact)) - 0.5) < NEAR
    assert not (wrong & ~tie).any()
    assert wrong.mean() < 2e-3
    assert (codes != want).mean() < 2e-2


def quantize_and_check(pair, specs, transforms, start=0, tokens=None):
    downs = [None if t is None else t.down for t in transforms]
    dims = [x.shape[3] if d is None else d.shape[-1] for x, d in zip(pair, downs, strict=True)]
    whole = layout(specs, dims)
    ranks = tuple(spec.clip_rank(n) for spec, n in zip(specs, dims, strict=True))
    words = quantize.quantize_pages(pair, whole, make, transforms, start, tokens, ranks)
    stop = pair[0].shape[2] if tokens is None else start + tokens
    assert words.shape == (*pair[0].shape[:2], (stop - start) // 16, whole.words)
    split = whole.keys.words
    sides = (words[..., :split], whole.keys), (words[..., split:], whole.values)
    for x, spec, down, (side, at) in zip(pair, specs, downs, sides, strict=True):
        check(side, x[:, :, start:stop], spec, at, down)
    return words


def orthogonal(dims, seed, *lead):
    rng = np.random.default_rng(seed)
    return np.linalg.qr(rng.standard_normal((*lead, dims, dims)))[0].astype(np.float32)
