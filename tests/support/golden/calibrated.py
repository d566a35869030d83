"""Golden tensors of calibrated rotations, balanced and learned transforms."""

import numpy as np

from golden.affine import PAGE, SEED, coded, inputs, near
from mlxkv.spec import affine as ref
from mlxkv.spec import balanced as balanced_ref
from mlxkv.spec import learned as learned_ref
from mlxkv.spec import oscar as oscar_ref
from mlxkv.spec.cases import LEARNED_SPEC, PAGE_SIDES, SCALED_SIDES

BALANCED = ((16, 4, 2), (24, 2, 1))  # D, H, G
SCALED = ((32, 2, 2), (40, 2, 1))  # D, H, G
OSCAR = ((64, 4, 2), (80, 2, 1), (128, 2, 1), (16, 4, 2))  # D, H, G
RELEASED = (16, 4, 2)  # D, H, G
PARTS = {"none": "", "u": "u", "h": "h", "uh": "uh", "hp": "hp", "uhp": "uhp"}  # of a rotation


def oscar(rng) -> dict:
    """Calibrated rotations: second moments, R of each kv head, codes after R, attention over such a page.

    R is made from the moments as stored, in float32: their rounding would transform it.
    """
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
        transforms = {}
        for letter, target in targets.items():
            sigma = target.astype(np.float32)
            r = np.stack([oscar_ref.rotation(one.astype(np.float64)) for one in sigma])
            r = r.astype(np.float32)
            out[f"{key}.{letter}.sigma"], out[f"{key}.{letter}.r"] = sigma, r
            transforms[letter] = r, r.swapaxes(-1, -2)
        out |= page(key, q, {"k": k, "v": v}, transforms)
    return out


def oscar_released(rng) -> dict:
    """OSCAR as its code was released: the value target that weighs tokens by what reads them, one rotation for all
    kv heads of a layer, a page behind it; parts of the rotation of each kv head (table 4); rows after the clip, and
    their four levels, evenly spaced as released and those of Lloyd and Max."""
    dims, heads, kv_heads = RELEASED
    out, total, key = {}, PAGE + 16, f"{dims}"
    q = rng.standard_normal((1, heads, total, dims)) * np.exp(0.7 * rng.standard_normal(dims))
    q = q.astype(np.float16).astype(np.float64)
    tensors = {letter: inputs(rng, 1, kv_heads, total, dims) for letter in "kv"}
    targets = {
        "k": oscar_ref.key_target(q, kv_heads),
        "v": oscar_ref.released_value_target(q, *tensors.values()),
    }
    transforms = {}
    for letter, target in targets.items():
        sigma = target.astype(np.float32)
        r = oscar_ref.rotation(sigma.astype(np.float64).mean(0))[None].astype(np.float32)
        out[f"{key}.{letter}.sigma"], out[f"{key}.{letter}.r"] = sigma, r
        transforms[letter] = r, r.swapaxes(-1, -2)
        for name, parts in PARTS.items():
            own = [oscar_ref.rotation(one.astype(np.float64), parts) for one in sigma]
            out[f"{key}.{letter}.{name}"] = np.stack(own).astype(np.float32)
        clipped = ref.clip_rows(tensors[letter][:, :, PAGE:], PAGE_SIDES[letter].clip)
        out[f"{key}.{letter}.clipped"] = clipped.astype(np.float16)
        for name, exact in (("lloyd", False), ("centroids", True)):
            levels = oscar_ref.four_levels(clipped, exact)
            out[f"{key}.{letter}.{name}"] = levels.astype(np.float32)
    return out | page(key, q, tensors, transforms)


def balanced_pair(out: dict, key: str, noise: np.ndarray, reads: np.ndarray) -> list[np.ndarray]:
    """The pair (down, up), each [G, D, D] float32, made from the moments of each kv head, which goes into `out`."""
    made = []
    for two in zip(noise, reads, strict=True):
        two = (balanced_ref.regular(one.astype(np.float64)) for one in two)
        made.append(balanced_ref.pair(balanced_ref.balanced(*two)[0]))
    pair = [np.stack(x).astype(np.float32) for x in zip(*made, strict=True)]
    out[f"{key}.down"], out[f"{key}.up"] = pair
    return pair


def balanced(rng) -> dict:
    """Balanced transforms: second moments of what is stored and of what reads it, the pair (down, up) of
    each kv head made from them in float32, codes after it, attention over such a page."""
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
            pairs[letter] = balanced_pair(out, f"{dims}.{letter}", *both)
        out |= page(f"{dims}", q, {"k": k, "v": v}, pairs)
    return out


def scaled(rng) -> dict:
    """SRFT and a scale per channel: the peaks of each kv head, the pair (down, up) [1, D, D] of the layer made
    from them in float32, codes after it, attention over such a page; the same keys behind SRFT with one
    scale for the page of all heads."""
    out = {}
    for dims, heads, kv_heads in SCALED:
        total = PAGE + 16
        q = rng.standard_normal((1, heads, total, dims)).astype(np.float16).astype(np.float64)
        tensors, pairs = {n: inputs(rng, 1, kv_heads, total, dims) for n in "kv"}, {}
        for letter, x in tensors.items():
            transformed = ref.srft(x)
            peaks = np.abs(transformed).max((0, 2)).astype(np.float32)
            scale = 1.0 / peaks.astype(np.float64).max(0)
            np.testing.assert_allclose(scale, ref.channel_scale(transformed), rtol=1e-7)
            pair = ref.scaled(*ref.transform("srft", dims), scale)
            pairs[letter] = tuple(np.array(m[None], np.float32, order="C") for m in pair)
            out[f"{dims}.{letter}.peaks"] = peaks
            for name, m in zip(("down", "up"), pairs[letter], strict=True):
                out[f"{dims}.{letter}.{name}"] = m
        out |= page(f"{dims}", q, tensors, pairs, SCALED_SIDES)
        transformed = ref.srft(tensors["k"][0, :, :PAGE])
        codes, number = ref.tensor_encode(transformed, 4)
        number = np.full((1, kv_heads, PAGE, 1), number).astype(np.float16)
        out[f"{dims}.tensor.codes"], out[f"{dims}.tensor.scale"] = codes[None], number
        unsure = near(transformed.reshape(1, -1), 4, transformed.size, True, "token")
        out[f"{dims}.tensor.near"] = np.packbits(unsure)
    return out


def centred(rng) -> dict:
    """Keys with an offset: their second moment and mean, the pair (down, up) of each kv head made for what is left
    without the mean, codes of such keys after it, attention over such a page; and attention over the keys as they
    came, nothing coded, which is that over what is left.

    Keys are multiples of 1/64, each with its mirror image, so that float16 has what is left exactly.
    """
    out = {}
    for dims, heads, kv_heads in BALANCED[:1]:
        total, key = PAGE + 16, f"{dims}"
        q = rng.standard_normal((1, heads, total, dims)).astype(np.float16).astype(np.float64)
        half = np.rint(64 * inputs(rng, 1, kv_heads, total // 2, dims)) / 64
        left = np.take(np.concatenate([half, -half], 2), rng.permutation(total), 2)
        # Several standard deviations.
        came = left + np.rint(256 * rng.standard_normal((1, kv_heads, 1, dims))) / 64
        mean, noise = came.mean((0, 2)), oscar_ref.own_target(came).astype(np.float32)
        k = balanced_ref.centred(came, mean[:, None])
        for x in (came, k):
            np.testing.assert_array_equal(x, x.astype(np.float16))
        v, w = inputs(rng, 1, kv_heads, total, dims), rng.standard_normal((heads, dims, dims))
        reads = (
            oscar_ref.key_target(q, kv_heads).astype(np.float32),
            balanced_ref.output_moment(w, kv_heads),
        )
        below = [
            balanced_ref.about_mean(*two)
            for two in zip(noise.astype(np.float64), mean, strict=True)
        ]
        pairs = {}
        for letter, *both in zip("kv", (below, oscar_ref.own_target(v)), reads, strict=True):
            pairs[letter] = balanced_pair(out, f"{key}.{letter}", *both)
        out |= {f"{key}.k.came": came.astype(np.float16), f"{key}.k.mean": mean.astype(np.float32)}
        out |= {f"{key}.k.noise": noise, f"{key}.k.reads": reads[0]}
        out |= page(key, q, {"k": k, "v": v}, pairs)
        exact = ref.attention(q[:, :, -3:], came, v, dims**-0.5, ref.causal_mask(3, total))
        out[f"{key}.exact"] = exact.astype(np.float32)
    return out


def page(key: str, q, tensors: dict, pairs: dict, specs: dict = PAGE_SIDES) -> dict:
    """Code the first PAGE tokens of keys and values after a pair [G, D, D] per side, and let the last three
    queries attend to all tokens."""
    out, whole, dims, total = {f"{key}.q": q.astype(np.float16)}, [], q.shape[3], q.shape[2]
    for letter, spec in specs.items():
        x, (down, up) = tensors[letter], (one.astype(np.float64) for one in pairs[letter])
        form = spec.bits, spec.group, spec.symmetric, spec.axis, spec.clip
        made, decoded = coded(f"{key}.{letter}", x[:, :, :PAGE] @ down, form)
        out |= made | {f"{key}.{letter}.x": x.astype(np.float16)}
        whole.append(np.concatenate([decoded @ up, x[:, :, PAGE:]], 2))
    mask = ref.causal_mask(3, total)
    result = ref.attention(q[:, :, -3:], *whole, dims**-0.5, mask)
    return out | {f"{key}.out": result.astype(np.float32)}


LEARNED = (  # variant, base, D, G
    ("scale", "none", 16, 2),
    ("rotation+scale", "srft", 16, 2),
    ("householder", "srft", 24, 1),
    ("householder+scale", "none", 18, 1),  # an odd number of halves
)
ROWS = 24


def learned(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return, by "VARIANT.BASE.D.NAME" and in float32: float16-exact parameters [G, ...] and x [G, N, D];
    down, up [G, D, D]; loss [G]."""
    out = {}
    for variant, base, dims, heads in LEARNED:
        shapes = {
            "rotation": (heads, dims, dims),
            "householder": (heads, learned_ref.reflectors(dims), dims),
            "scale": (heads, dims),
        }
        free = {
            name: rng.standard_normal(shapes[name]).astype(np.float16).astype(np.float64)
            for name in variant.split("+")
        }
        if "scale" in free:
            free["scale"][:, 0] = 20  # clamped
        x = (3 * rng.standard_normal((heads, ROWS, dims))).astype(np.float16).astype(np.float64)
        pairs = [maps({k: v[g] for k, v in free.items()}, base, dims) for g in range(heads)]
        down, up = (np.stack(one) for one in zip(*pairs, strict=True))
        losses = [
            learned_ref.loss(*three, LEARNED_SPEC.bits, LEARNED_SPEC.group)
            for three in zip(x, down, up, strict=True)
        ]
        made = {**free, "x": x, "down": down, "up": up, "loss": np.array(losses)}
        key = f"{variant}.{base}.{dims}"
        for name, value in made.items():
            out[f"{key}.{name}"] = np.ascontiguousarray(value, np.float32)
    return out


def maps(free: dict[str, np.ndarray], base: str, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Make (down, up), each [D, D], of one kv head."""
    rotation = np.eye(dims)
    if "rotation" in free:
        rotation = learned_ref.exponential(free["rotation"])
    if "householder" in free:
        rotation = learned_ref.householder(free["householder"])
    return learned_ref.pair(
        base, rotation, learned_ref.scale(free["scale"]) if "scale" in free else np.ones(dims)
    )


TABLES = {  # name: seed, maker, what the header says beside version and seed
    "oscar": (SEED + 5, oscar, {}),
    "oscar_released": (SEED + 15, oscar_released, {}),
    "balanced": (SEED + 10, balanced, {}),
    "learned": (SEED + 11, learned, {}),
    "scaled": (SEED + 13, scaled, {}),
    "centred": (SEED + 14, centred, {}),
}
