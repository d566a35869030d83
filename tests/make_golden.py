"""Writes the golden tensors from the spec: `python tests/make_golden.py`.

Inputs are float16-exact, so every backend starts from the same numbers. Each file's header holds
the version, the seed and the hash of the spec's files; a test fails when the spec has changed since.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import golden_codebook
import golden_oja
import numpy as np
from golden_learned import learned
from safetensors.numpy import save_file

from mlxkv import reference as ref
from mlxkv import reference_balanced as balanced_ref
from mlxkv import reference_oscar as oscar_ref

ROOT = Path(__file__).parents[1]
OUT = ROOT / "mlxkv" / "golden"
SEED = 20260
DIMS = (64, 80, 96, 128, 192, 256, 512)
# A code within MARGIN * 2^bits of a rounding boundary may come out one off in float32; so may all
# codes of a group whose scale or bias lies within HALF_MARGIN float16 steps of the middle between
# two float16 values.
MARGIN = 2e-5
HALF_MARGIN = 1e-2
DECODED = 4  # every so many tokens are kept as decoded values: the files have to stay small


SPEC = {  # what a table is made from
    "oscar": ("reference", "reference_oscar"),
    **golden_codebook.SPEC,
    **golden_oja.SPEC,
    "balanced": ("reference", "reference_oscar", "reference_balanced"),
    "dual_scale": ("reference", "reference_dual_scale"),
    "polar": ("reference", "reference_polar"),
    "learned": ("reference", "reference_learned"),
}


def spec_hash(table: str) -> str:
    files = SPEC.get(table, ("reference",))
    text = b"".join((ROOT / "mlxkv" / f"{name}.py").read_bytes() for name in files)
    return hashlib.sha256(text).hexdigest()[:16]


def inputs(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Heavy-tailed values with two outlier channels and a constant offset, as real keys have;
    float16-exact."""
    x = rng.standard_normal(shape) * np.exp(0.3 * rng.standard_normal(shape[-1]))
    x[..., 3] *= 8
    x[..., shape[-1] // 2] += 6
    return x.astype(np.float16).astype(np.float64)


def half_near(x: np.ndarray) -> np.ndarray:
    """Where rounding x to float16 could go either way."""
    step = np.spacing(np.abs(x).astype(np.float16)).astype(np.float64)
    down = np.floor(x / step) * step
    return np.abs((x - down) / step - 0.5) < HALF_MARGIN


def near(
    x: np.ndarray, bits: int, group: int, symmetric: bool, axis: str, clip: float = 1.0
) -> np.ndarray:
    """Boolean like x: where a float32 backend may be one code off.

    A clip needs no margin of its own: its limit moves by no more than the values it is one of.
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
    """Codes of plain inputs, every width, group and axis; group 0 is the whole vector or page."""
    out = {}
    for dims in (64, 80):
        x = inputs(rng, 1, 1, PAGE, dims)
        x[0, 0, 5] = 0.0  # a group of zeros
        x[0, 0, 6] = 1.5  # a constant group
        out[f"x.{dims}"] = x.astype(np.float16)
        for bits in (2, 3, 4, 8):
            for symmetric in (False, True):
                for axis, group in (
                    ("token", 16),
                    ("token", 32),
                    ("token", 0),
                    ("channel", 32),
                    ("channel", 0),
                ):
                    size = ref.group_size(group, dims if axis == "token" else PAGE)
                    codes, scale, bias = ref.affine_encode(x, bits, size, symmetric, axis)
                    key = f"{dims}.{bits}.{'sym' if symmetric else 'asym'}.{axis}.{group}"
                    out[f"{key}.codes"] = codes
                    out[f"{key}.scale"] = scale.astype(np.float16)
                    if not symmetric:
                        out[f"{key}.bias"] = bias.astype(np.float16)
                    out[f"{key}.near"] = np.packbits(near(x, bits, size, symmetric, axis))
                    decoded = ref.affine_decode(codes, scale, bias, size, axis)
                    out[f"{key}.decoded"] = decoded[:, :, ::DECODED].astype(np.float32)
    return out


def clip(rng) -> dict:
    """Clipped codes of plain inputs, whose limit is exact in float32: the hard rows come first."""
    out = {}
    for dims in (64, 80, 96, 128, 256):
        x = inputs(rng, 1, 1, 16, dims)
        x[0, 0, 0] = 0.0
        x[0, 0, 1] = -1.5
        x[0, 0, 2] = np.where(np.arange(dims) % 3 > 0, 0.75, -0.75)  # one size, two signs
        x[0, 0, 3] = np.round(2 * x[0, 0, 3]) / 2  # many ties, at the limit too
        x[0, 0, 4, 7] = 60000.0  # one huge value
        x[0, 0, 5, 2:] = 0.0  # fewer values than are clipped: the limit is 0
        x[0, 0, 6] = np.arange(dims) - dims // 3  # the largest all behind each other
        x[0, 0, 7] = -np.abs(x[0, 0, 7])
        out[f"x.{dims}"] = x.astype(np.float16)
        whole = [0] if dims > 64 else []
        plain = [
            (b, g, False, c) for b in (2, 3, 4) for g in (*whole, 64, 32) for c in (0.96, 0.92)
        ]
        for bits, group, symmetric, share in (*plain, (3, 0, True, 0.92), (4, 32, True, 0.88)):
            size = ref.group_size(group, dims)
            codes, scale, bias = ref.affine_encode(x, bits, size, symmetric, "token", share)
            key = f"{dims}.{bits}.{'sym' if symmetric else 'asym'}.{group}.{share * 100:.0f}"
            out[f"{key}.codes"] = codes
            out[f"{key}.scale"] = scale.astype(np.float16)
            if not symmetric:
                out[f"{key}.bias"] = bias.astype(np.float16)
            out[f"{key}.near"] = np.packbits(near(x, bits, size, symmetric, "token", share))
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
    """Transform and quantizer in a row, as a page is sealed."""
    out = {}
    for dims in (64, 96, 128, 256):
        x = inputs(rng, 1, 2, PAGE, dims)
        out[f"x.{dims}"] = x.astype(np.float16)
        for name, (transform, bits, group, symmetric, axis, share) in SIDES.items():
            if transform == "hadamard" and dims == 96:
                continue
            y = x @ ref.transform(transform, dims, 0)[0]
            group = ref.group_size(group, dims if axis == "token" else PAGE)
            codes, scale, _ = ref.affine_encode(y, bits, group, symmetric, axis, share)
            out[f"{name}.{dims}.codes"] = codes
            out[f"{name}.{dims}.scale"] = scale.astype(np.float16)
            out[f"{name}.{dims}.near"] = np.packbits(near(y, bits, group, symmetric, axis, share))
    return out


# name: (D, H, G, sink, pages, live, L, key side, value side, mask, attention sinks)
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


def attention(rng) -> tuple[dict, dict]:
    """Attention over given codes, so that no encoder's ties blur it."""
    out, cases = {}, {}
    for case, (
        dims,
        heads,
        kv_heads,
        sink,
        pages,
        live,
        new,
        k_side,
        v_side,
        mask,
        has_sinks,
    ) in CASES.items():
        total = sink + pages * PAGE + live
        q = rng.standard_normal((1, heads, new, dims)).astype(np.float16).astype(np.float64)
        out[f"{case}.q"] = q.astype(np.float16)
        whole = []
        for letter, name in (("k", k_side), ("v", v_side)):
            x = inputs(rng, 1, kv_heads, total, dims)
            transform, bits, group, symmetric, axis, _ = SIDES[name]
            down, up = ref.transform(transform, dims, 0)
            body = slice(sink, sink + pages * PAGE)
            group = ref.group_size(group, dims if axis == "token" else PAGE)
            codes, scale, bias = ref.affine_encode(
                x[:, :, body] @ down, bits, group, symmetric, axis
            )
            out[f"{case}.{letter}.sink"] = x[:, :, :sink].astype(np.float16)
            out[f"{case}.{letter}.live"] = x[:, :, body.stop :].astype(np.float16)
            out[f"{case}.{letter}.codes"] = codes
            out[f"{case}.{letter}.scale"] = scale.astype(np.float16)
            if not symmetric:
                out[f"{case}.{letter}.bias"] = bias.astype(np.float16)
            x[:, :, body] = ref.affine_decode(codes, scale, bias, group, axis) @ up
            whole.append(x)
        window = 50 if mask == "window" else None
        m = None if mask == "none" else ref.causal_mask(new, total, window)
        if mask == "additive":
            m = np.where(m, rng.standard_normal(m.shape), -1e9)
        if mask in ("additive", "window"):
            out[f"{case}.mask"] = m.astype(np.float32) if mask == "additive" else m
            m = m.astype(np.float32).astype(np.float64) if mask == "additive" else m
        sinks = (
            rng.standard_normal(heads).astype(np.float16).astype(np.float64) if has_sinks else None
        )
        if has_sinks:
            out[f"{case}.sinks"] = sinks.astype(np.float16)
        out[f"{case}.out"] = ref.attention(q, *whole, dims**-0.5, m, sinks).astype(np.float32)
        sides = [
            dict(
                zip(("transform", "bits", "group", "symmetric", "axis"), SIDES[n][:-1], strict=True)
            )
            for n in (k_side, v_side)
        ]
        cases[case] = {"keys": sides[0], "values": sides[1], "mask": mask, "page": PAGE}
    return out, cases


def oscar(rng) -> dict:
    """Calibrated rotations: moments of queries, keys and values, R of each kv head (from the float32
    moments, so that a rounding of those cannot turn it), codes after it, attention over such a page."""
    out = {}
    for dims, heads, kv_heads in OSCAR:
        key = f"{dims}"
        total = PAGE + 16
        q = rng.standard_normal((1, heads, total, dims))
        q *= np.exp(0.7 * rng.standard_normal((1, 1, 1, dims)))  # some directions are read more
        q = q.astype(np.float16).astype(np.float64)
        k, v = (inputs(rng, 1, kv_heads, total, dims) for _ in range(2))
        scale, causal = dims**-0.5, ref.causal_mask(total, total)
        targets = {
            "k": oscar_ref.key_target(q, kv_heads),
            "v": oscar_ref.value_target(q, k, v, scale, causal),
        }
        turns = {}
        for letter, target in targets.items():
            sigma = target.astype(np.float32)
            r = np.stack([oscar_ref.rotation(one.astype(np.float64)) for one in sigma])
            r = r.astype(np.float32)
            out[f"{key}.{letter}.sigma"], out[f"{key}.{letter}.r"] = sigma, r
            turns[letter] = r, r.swapaxes(-1, -2)
        out |= page(key, q, {"k": k, "v": v}, turns)
    return out


def balanced(rng) -> dict:
    """Balanced transforms: second moments of what is stored and of what reads it, the pair of each kv
    head (from the float32 moments), codes after it, attention over such a page."""
    out = {}
    for dims, heads, kv_heads in BALANCED:
        total = PAGE + 16
        scale = np.exp(rng.standard_normal(dims))
        q = (rng.standard_normal((1, heads, total, dims)) / scale).astype(np.float16)
        q = q.astype(np.float64)
        k = inputs(rng, 1, kv_heads, total, dims) * scale
        k, v = k.astype(np.float16).astype(np.float64), inputs(rng, 1, kv_heads, total, dims)
        w = rng.standard_normal((heads, dims, dims)) * np.exp(rng.standard_normal((dims, 1)))
        reads = {
            "k": oscar_ref.key_target(q, kv_heads),
            "v": balanced_ref.output_moment(w, kv_heads),
        }
        pairs = {}
        for letter, x in (("k", k), ("v", v)):
            both = [y.astype(np.float32) for y in (oscar_ref.own_target(x), reads[letter])]
            out[f"{dims}.{letter}.noise"], out[f"{dims}.{letter}.reads"] = both
            made = []
            for two in zip(*both, strict=True):
                two = (balanced_ref.regular(one.astype(np.float64)) for one in two)
                made.append(balanced_ref.pair(balanced_ref.balanced(*two)[0]))
            pairs[letter] = tuple(np.stack(x).astype(np.float32) for x in zip(*made, strict=True))
            for name, x in zip(("down", "up"), pairs[letter], strict=True):
                out[f"{dims}.{letter}.{name}"] = x
        out |= page(f"{dims}", q, {"k": k, "v": v}, pairs)
    return out


def page(key: str, q, tensors: dict, pairs: dict) -> dict:
    """Keys and values whose first PAGE tokens are codes behind a pair [G, D, D] per side, and attention
    of the last three queries over them."""
    out, whole, dims, total = {f"{key}.q": q.astype(np.float16)}, [], q.shape[3], q.shape[2]
    for letter, (bits, group, share) in (("k", (2, 32, 0.96)), ("v", (2, 0, 0.92))):
        x, (down, up) = tensors[letter], (one.astype(np.float64) for one in pairs[letter])
        stored = x[:, :, :PAGE] @ down
        size = ref.group_size(group, dims)
        codes, numbers, bias = ref.affine_encode(stored, bits, size, False, "token", share)
        out[f"{key}.{letter}.x"] = x.astype(np.float16)
        out[f"{key}.{letter}.codes"] = codes
        out[f"{key}.{letter}.scale"] = numbers.astype(np.float16)
        out[f"{key}.{letter}.bias"] = bias.astype(np.float16)
        out[f"{key}.{letter}.near"] = np.packbits(near(stored, bits, size, False, "token", share))
        x = x.copy()
        x[:, :, :PAGE] = ref.affine_decode(codes, numbers, bias, size, "token") @ up
        whole.append(x)
    mask = ref.causal_mask(3, total)
    result = ref.attention(q[:, :, -3:], *whole, dims**-0.5, mask)
    return out | {f"{key}.out": result.astype(np.float32)}


BALANCED = ((16, 4, 2), (24, 2, 1))  # D, H, G
OSCAR = ((64, 4, 2), (80, 2, 1), (128, 2, 1))  # D, H, G


def main() -> None:
    import golden_tile  # which reads the helpers above

    header = {"spec_version": str(ref.SPEC_VERSION), "seed": str(SEED)}
    tables = {
        "transforms": transforms,
        "affine": affine,
        "packing": packing,
        "encode": encode,
        "clip": clip,
        "oscar": oscar,
    }
    makers = [*enumerate(tables.items()), (10, ("balanced", balanced)), (11, ("learned", learned))]
    for i, (name, make) in makers:
        extra = {"spec_hash": spec_hash(name)}
        if name == "encode":
            extra["sides"] = json.dumps(SIDES)
        save_file(
            make(np.random.default_rng(SEED + i)), OUT / f"{name}.safetensors", {**header, **extra}
        )
    for i, (name, make) in enumerate(golden_codebook.TABLES.items()):
        extra = {"spec_hash": spec_hash(name)}
        save_file(
            make(np.random.default_rng(SEED + 20 + i)),
            OUT / f"{name}.safetensors",
            {**header, **extra},
        )
    tensors, cases = attention(np.random.default_rng(SEED + 9))
    extra = {"spec_hash": spec_hash("attention"), "cases": json.dumps(cases)}
    save_file(tensors, OUT / "attention.safetensors", {**header, **extra})
    for name, (seed, make) in {**golden_tile.TABLES, **golden_oja.TABLES}.items():
        extra = {"spec_hash": spec_hash(name), "seed": str(seed)}
        save_file(
            make(np.random.default_rng(seed)), OUT / f"{name}.safetensors", {**header, **extra}
        )
    for path in sorted(OUT.glob("*.safetensors")):
        print(f"{path.name:24} {path.stat().st_size:>9,} bytes")


if __name__ == "__main__":
    main()
