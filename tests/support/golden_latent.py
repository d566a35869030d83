"""Golden tensors of latents: one page that attention reads as keys and as values, with rotary scores beside."""

from __future__ import annotations

import json

import golden_affine
import numpy as np

from mlxkv.spec import affine

PAGE, HEADS, ROTARY, SEED = 32, 2, 64, golden_affine.SEED + 40
SIDES = {  # transform, bits, group, symmetric, axis, clip
    "token-int8": ("none", 8, 64, False, "token", 1.0),
    "channel-int4": ("none", 4, 32, False, "channel", 1.0),
    "srft-int4": ("srft", 4, 32, True, "token", 1.0),
    "hadamard-int3": ("hadamard", 3, 64, False, "token", 1.0),
}


def normed(rng: np.random.Generator, dims: int) -> np.ndarray:
    """Latents [1, 1, PAGE, dims] as kv_a_layernorm leaves them: each of root mean square 1, then weights per
    channel."""
    x = golden_affine.inputs(rng, 1, 1, PAGE, dims)
    x /= np.sqrt((x**2).mean(-1, keepdims=True))
    return (x * np.exp(0.5 * rng.standard_normal(dims))).astype(np.float16).astype(np.float64)


def latents(rng: np.random.Generator) -> dict:
    """Codes of 512 latent dims, as nearly all models have, and attention over them with absorbed queries."""
    out = {}
    for dims in (512,):
        x = normed(rng, dims)
        out[f"x.{dims}"] = x.astype(np.float16)
        q = rng.standard_normal((1, HEADS, 1, dims)).astype(np.float16).astype(np.float64)
        q_pe, k_pe = (rng.standard_normal((1, n, t, ROTARY)) for n, t in ((HEADS, 1), (1, PAGE)))
        bias = affine.rotary_scores(q_pe, k_pe, ROTARY**-0.5).astype(np.float32)
        for name in SIDES:
            transform, bits, group, symmetric, axis, _ = SIDES[name]
            down, up = affine.transform(transform, dims, 0)
            group = affine.group_size(group, dims if axis == "token" else PAGE)
            y = x @ down
            codes, scale, low = affine.affine_encode(y, bits, group, symmetric, axis)
            key = f"{name}.{dims}"
            out[f"{key}.codes"], out[f"{key}.scale"] = codes, scale.astype(np.float16)
            if not symmetric:
                out[f"{key}.bias"] = low.astype(np.float16)
            near = golden_affine.near(y, bits, group, symmetric, axis)
            out[f"{key}.near"] = np.packbits(near)
            seen = affine.affine_decode(codes, scale, low, group, axis) @ up
            given = q, seen, seen, dims**-0.5, bias.astype(np.float64)
            out[f"{key}.q"], out[f"{key}.mask"] = q.astype(np.float16), bias
            out[f"{key}.out"] = affine.attention(*given).astype(np.float32)
    return out


TABLES = {"latent": (SEED, latents, {"sides": json.dumps(SIDES)})}
