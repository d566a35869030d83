"""Golden tensors of transforms, affine codes, packing, attention and latents, and the inputs of other tables.

Inputs are float16-exact, so every backend starts from the same numbers.
"""

import json
from itertools import product

import numpy as np

from mlxkv.spec import affine as ref

SEED = 20260
DIMS = (64, 80, 96, 128, 192, 256, 512)
# A code within MARGIN * 2^bits of a rounding boundary may come out one off in float32; so may all
# codes of a group whose scale or bias lies within HALF_MARGIN float16 steps of the middle between
# two float16 values.
MARGIN = 2e-5
HALF_MARGIN = 1e-2
DECODED = 4  # one token in so many is kept as decoded values: the files have to stay small


def inputs(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return heavy-tailed values with an outlier channel and a constant offset, as real keys have."""
    x = rng.standard_normal(shape) * np.exp(0.3 * rng.standard_normal(shape[-1]))
    x[..., 3] *= 8
    x[..., shape[-1] // 2] += 6
    return x.astype(np.float16).astype(np.float64)


def half_near(x: np.ndarray) -> np.ndarray:
    """Mark where rounding x to float16 could go either way."""
    step = np.spacing(np.abs(x).astype(np.float16)).astype(np.float64)
    down = np.floor(x / step) * step
    return np.abs((x - down) / step - 0.5) < HALF_MARGIN


def near(
    x: np.ndarray, bits: int, group: int, symmetric: bool, axis: str, clip: float = 1.0
) -> np.ndarray:
    """Mark, in the shape of x, where a float32 backend may be one code off.

    A clip needs no margin of its own: its limit is one of the values and moves no more than they do.
    """
    codes, scale, bias = ref.affine_encode(x, bits, group, symmetric, axis, clip)
    g = ref._grouped(ref.clip_rows(x, clip), group, axis)
    value = (g - bias[..., None]) / np.where(scale > 0, scale, 1.0)[..., None]
    edge = np.abs(value - np.floor(value) - 0.5) < MARGIN * 2**bits
    if symmetric:
        unsure = half_near(np.abs(g).max(-1) / (2 ** (bits - 1) - 1))
    else:
        unsure = half_near(g.min(-1)) | half_near((g.max(-1) - bias) / (2**bits - 1))
    return ref._ungrouped(edge | unsure[..., None], axis, x.shape[-1])


def coded(
    key: str,
    x: np.ndarray,
    form: tuple[int, int, bool, str, float],
    parts: tuple[str, ...] = ("codes", "scale", "bias", "near"),
) -> tuple[dict, np.ndarray]:
    """Encode x [..., T, D]: (these parts of what is stored, by "KEY.PART"; what it decodes to).

    form: bits, group (0: the whole vector or page), symmetric, axis, clip. Symmetric codes have no bias.
    """
    bits, group, symmetric, axis, share = form
    group = ref.group_size(group, x.shape[-1 if axis == "token" else -2])
    codes, scale, bias = ref.affine_encode(x, bits, group, symmetric, axis, share)
    made = {"codes": codes, "scale": scale.astype(np.float16)}
    if not symmetric:
        made["bias"] = bias.astype(np.float16)
    if "near" in parts:
        made["near"] = np.packbits(near(x, bits, group, symmetric, axis, share))
    decoded = ref.affine_decode(codes, scale, bias, group, axis)
    return {f"{key}.{name}": y for name, y in made.items() if name in parts}, decoded


def transforms(rng) -> dict:
    out = {}
    for dims in DIMS:
        x = inputs(rng, 4, dims)
        for name in ("hadamard", "srft"):
            if name == "hadamard" and dims & (dims - 1):
                continue
            down, up = ref.transform(name, dims, seed=1)
            assert np.allclose(x @ down @ up, x)
            out[f"{name}.{dims}.x"] = x.astype(np.float16)
            out[f"{name}.{dims}.y"] = (x @ down).astype(np.float32)
    return out


def affine(rng) -> dict:
    """Codes of untransformed inputs: every width, group and axis; group 0 is the whole vector or page."""
    out = {}
    shapes = ("token", 16), ("token", 32), ("token", 0), ("channel", 32), ("channel", 0)
    for dims in (64, 80):
        x = inputs(rng, 1, 1, PAGE, dims)
        x[0, 0, 5] = 0.0  # a group of zeros
        x[0, 0, 6] = 1.5  # a constant group
        out[f"x.{dims}"] = x.astype(np.float16)
        for bits, symmetric, (axis, group) in product((2, 3, 4, 8), (False, True), shapes):
            key = f"{dims}.{bits}.{'sym' if symmetric else 'asym'}.{axis}.{group}"
            made, decoded = coded(key, x, (bits, group, symmetric, axis, 1.0))
            out |= made | {f"{key}.decoded": decoded[:, :, ::DECODED].astype(np.float32)}
    return out


def clip(rng) -> dict:
    """Clipped codes of untransformed inputs, whose limit is exact in float32. The hard rows come first."""
    out = {}
    for dims in (64, 80, 96, 128, 256):
        x = inputs(rng, 1, 1, 16, dims)
        x[0, 0, 0] = 0.0
        x[0, 0, 1] = -1.5
        x[0, 0, 2] = np.where(np.arange(dims) % 3 > 0, 0.75, -0.75)  # one size, two signs
        x[0, 0, 3] = np.round(2 * x[0, 0, 3]) / 2  # many ties, at the limit too
        x[0, 0, 4, 7] = 60000.0  # one huge value
        x[0, 0, 5, 2:] = 0.0  # fewer values than are clipped: the limit is 0
        x[0, 0, 6] = np.arange(dims) - dims // 3  # the largest values are neighbours
        x[0, 0, 7] = -np.abs(x[0, 0, 7])
        out[f"x.{dims}"] = x.astype(np.float16)
        whole = [0] if dims > 64 else []
        plain = [
            (b, g, False, c) for b in (2, 3, 4) for g in (*whole, 64, 32) for c in (0.96, 0.92)
        ]
        for bits, group, symmetric, share in (*plain, (3, 0, True, 0.92), (4, 32, True, 0.88)):
            key = f"{dims}.{bits}.{'sym' if symmetric else 'asym'}.{group}.{share * 100:.0f}"
            out |= coded(key, x, (bits, group, symmetric, "token", share))[0]
    return out


def packing(rng) -> dict:
    out = {}
    for dims in (64, 80, 96, 128):
        for bits in (2, 3, 4, 8):
            codes = rng.integers(0, 2**bits, (5, dims), dtype=np.uint8)
            out[f"{dims}.{bits}.codes"], out[f"{dims}.{bits}.words"] = codes, ref.pack(codes, bits)
    return out


PAGE = 64
SIDES = {  # transform, bits, group, symmetric, axis, clip
    "naive-int4": ("none", 4, 64, False, "token", 1.0),
    "hadamard-int4": ("hadamard", 4, 64, False, "token", 1.0),
    "srft-int4": ("srft", 4, 32, True, "token", 1.0),
    "srft-int2": ("srft", 2, 32, False, "token", 1.0),
    "srft-int3": ("srft", 3, 64, False, "token", 1.0),
    "hadamard-int8": ("hadamard", 8, 0, False, "token", 1.0),
    "channel-int2": ("none", 2, 32, False, "channel", 1.0),
    "hadamard-int2-clip": ("hadamard", 2, 0, False, "token", 0.96),
    "srft-int2-clip": ("srft", 2, 64, False, "token", 0.92),
}


def encode(rng) -> dict:
    """Transform, then codes, as a page is quantized."""
    out = {}
    for dims in (64, 96, 128, 256):
        x = inputs(rng, 1, 2, PAGE, dims)
        out[f"x.{dims}"] = x.astype(np.float16)
        for name, (transform, *form) in SIDES.items():
            if transform != "hadamard" or dims != 96:
                y = x @ ref.transform(transform, dims, 0)[0]
                out |= coded(f"{name}.{dims}", y, form, ("codes", "scale", "near"))[0]
    return out


# name: (D, H, G, sink, pages, recent, L, key side, value side, mask, attention sinks)
CASES = {
    "one": (128, 8, 2, 16, 2, 40, 1, "srft-int4", "srft-int4", "none", False),
    "verify8": (64, 6, 2, 16, 2, 24, 8, "hadamard-int4", "srft-int2", "causal", False),
    "ratio5": (64, 5, 1, 0, 1, 1, 1, "srft-int3", "naive-int4", "none", False),
    "gemma": (256, 4, 1, 32, 1, 31, 3, "srft-int4", "srft-int4", "causal", False),
    "window": (96, 4, 4, 16, 2, 33, 4, "srft-int4", "srft-int3", "window", False),
    "additive": (80, 4, 2, 16, 1, 17, 2, "channel-int2", "channel-int2", "additive", False),
    "gpt-oss": (64, 8, 1, 16, 2, 16, 1, "hadamard-int8", "hadamard-int8", "none", True),
    "prefill": (128, 4, 2, 16, 2, 63, 40, "srft-int4", "hadamard-int4", "causal", False),
    "d192": (192, 4, 2, 16, 1, 20, 2, "srft-int4", "srft-int4", "causal", False),
    "d512": (512, 2, 1, 16, 1, 5, 1, "hadamard-int4", "srft-int4", "none", False),
}


# The same, and the cap of the scores.
CAPPED = {
    "gemma2": (256, 4, 2, 8, 1, 12, 1, "srft-int4", "srft-int4", "none", False, 2.0),
    "verify4": (64, 6, 2, 8, 1, 24, 4, "hadamard-int4", "srft-int2", "causal", False, 1.0),
    "window": (64, 4, 2, 0, 1, 17, 3, "channel-int2", "channel-int2", "window", False, 2.0),
    "prefill": (64, 4, 2, 8, 1, 33, 30, "srft-int4", "hadamard-int4", "causal", False, 1.0),
}


def softcap(rng) -> dict:
    """Attention with capped scores over given codes."""
    return attention(rng, CAPPED)


def attention(rng, cases=None) -> dict:
    """Attention over given codes, so that no encoder's ties blur it."""
    out = {}
    for case, row in (cases or CASES).items():
        dims, heads, kv_heads, sink, pages, recent, new, *names, mask, logits = row[:11]
        total, body = sink + pages * PAGE + recent, slice(sink, sink + pages * PAGE)
        q = rng.standard_normal((1, heads, new, dims)).astype(np.float16).astype(np.float64)
        out[f"{case}.q"] = q.astype(np.float16)
        whole = []
        for letter, name in zip("kv", names, strict=True):
            x, key = inputs(rng, 1, kv_heads, total, dims), f"{case}.{letter}"
            transform, *form = SIDES[name]
            down, up = ref.transform(transform, dims, 0)
            out[f"{key}.sink"] = x[:, :, :sink].astype(np.float16)
            out[f"{key}.live"] = x[:, :, body.stop :].astype(np.float16)
            form[-1] = 1.0  # no clip
            made, decoded = coded(key, x[:, :, body] @ down, form, ("codes", "scale", "bias"))
            out |= made
            x[:, :, body] = decoded @ up
            whole.append(x)
        m = None
        if mask != "none":
            m = ref.causal_mask(new, total, 50 if mask == "window" else None)
        if mask == "additive":
            m = np.where(m, rng.standard_normal(m.shape), -1e9).astype(np.float32)
        if mask in ("additive", "window"):
            out[f"{case}.mask"] = m
        if mask == "additive":
            m = m.astype(np.float64)
        sinks = None
        if logits:
            sinks = rng.standard_normal(heads).astype(np.float16).astype(np.float64)
            out[f"{case}.sinks"] = sinks.astype(np.float16)
        cap = row[11] if len(row) > 11 else None
        out[f"{case}.out"] = ref.attention(q, *whole, dims**-0.5, m, sinks, cap).astype(np.float32)
    return out


HEADS, ROTARY, LATENT_PAGE = 2, 64, 32
LATENT_SIDES = {  # transform, bits, group, symmetric, axis, clip
    "token-int8": ("none", 8, 64, False, "token", 1.0),
    "channel-int4": ("none", 4, 32, False, "channel", 1.0),
    "srft-int4": ("srft", 4, 32, True, "token", 1.0),
    "hadamard-int3": ("hadamard", 3, 64, False, "token", 1.0),
}


def latents(rng) -> dict:
    """Codes of 512 latent dims, as nearly all models have, and of 64, one page of which attention with absorbed
    queries reads as keys and as values, with rotary scores beside."""
    return latents_of(rng, 512) | latents_of(rng, 64)


def latents_of(rng, dims: int) -> dict:
    x = inputs(rng, 1, 1, LATENT_PAGE, dims)
    x /= np.sqrt(
        (x**2).mean(-1, keepdims=True)
    )  # as kv_a_layernorm leaves them: of size 1, then weights
    x = (x * np.exp(0.5 * rng.standard_normal(dims))).astype(np.float16).astype(np.float64)
    out = {f"x.{dims}": x.astype(np.float16)}
    q = rng.standard_normal((1, HEADS, 1, dims)).astype(np.float16).astype(np.float64)
    q_pe, k_pe = (rng.standard_normal((1, n, t, ROTARY)) for n, t in ((HEADS, 1), (1, LATENT_PAGE)))
    bias = ref.rotary_scores(q_pe, k_pe, ROTARY**-0.5).astype(np.float32)
    for name, (transform, *form) in LATENT_SIDES.items():
        down, up = ref.transform(transform, dims, 0)
        made, decoded = coded(key := f"{name}.{dims}", x @ down, form)
        given = q, decoded @ up, decoded @ up, dims**-0.5, bias.astype(np.float64)
        out |= made | {f"{key}.q": q.astype(np.float16), f"{key}.mask": bias}
        out[f"{key}.out"] = ref.attention(*given).astype(np.float32)
    return out


def attention_cases(cases: dict) -> dict:
    """How the pages of each case are coded, for the header."""
    fields = ("transform", "bits", "group", "symmetric", "axis")
    sides = {name: dict(zip(fields, side[:-1], strict=True)) for name, side in SIDES.items()}
    out = {}
    for case, row in cases.items():
        keys, values, mask = row[7:10]
        out[case] = {"keys": sides[keys], "values": sides[values], "mask": mask, "page": PAGE}
        if len(row) > 11:
            out[case]["softcap"] = row[11]
    return out


TABLES = {  # name: seed, maker, what the header says beside version and seed
    "transforms": (SEED, transforms, {}),
    "affine": (SEED + 1, affine, {}),
    "packing": (SEED + 2, packing, {}),
    "encode": (SEED + 3, encode, {"sides": json.dumps(SIDES)}),
    "clip": (SEED + 4, clip, {}),
    "attention": (SEED + 9, attention, {"cases": json.dumps(attention_cases(CASES))}),
    "softcap": (SEED + 40, softcap, {"cases": json.dumps(attention_cases(CAPPED))}),
    "latent": (SEED + 40, latents, {"sides": json.dumps(LATENT_SIDES)}),
}
