"""Every method by name: configs and codecs, short names that tests use alone, and records as the spec stores them."""

import re
from dataclasses import dataclass, replace
from importlib import import_module

import numpy as np

from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.lowrank import LowRank
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS, low_rank
from mlxkv.formats.quantizers import METHODS as QUANTIZERS
from mlxkv.formats.quantizers import (
    Affine,
    Codebook,
    Full,
    Half,
    MixedBits,
    Polar,
    PolarTree,
    Quantizer,
)
from mlxkv.spec import affine as ref
from mlxkv.spec import cases, codebook, mixed_bits, polar
from mlxkv.spec import polar_tree as tree


def transform_at(transform: str, dims: int) -> str:
    """The transform `transform`, or SRFT where `dims` have no Hadamard matrix."""
    return "srft" if transform == "hadamard" and dims & (dims - 1) else transform


@dataclass(frozen=True)
class Method:
    """A pair of formats.

    transform: transform of both sides. dims: head dim of its kernels. kernels: whether records hold it.
    tiles, triton: whether the tile kernels and Triton read it.
    """

    keys: Quantizer
    values: Quantizer
    page: int = 64
    transform: str = "none"
    dims: int = 80
    kernels: bool = True
    tiles: bool = True
    triton: bool = False

    def config(self, dims: int) -> CacheConfig:
        """The config of a cache, for heads of `dims`."""
        sides = (Side(one, transform_at(self.transform, dims)) for one in (self.keys, self.values))
        return CacheConfig(*sides, sink=4, recent=16, page=self.page)


OWN_BOOKS = ((0.3, *(0.5 + 0.4 * i for i in range(15))),) + ((0.2, 0.6, 0.9, 1.3),) * 3
METHODS = {
    "affine": Method(Affine(4, 64), Affine(3, 64), 32, "srft", triton=True),
    "clipped": Method(
        Affine(2, 0, clip=0.92),
        Affine(2, 32, clip=0.92),
        transform="hadamard",
        dims=64,
        triton=True,
    ),
    "kivi": Method(Affine(2, 32, axis="channel"), Affine(2, 32), triton=True),
    "symmetric": Method(Affine(3, 32, True, axis="channel"), Affine(3, 32, True), 32, triton=True),
    "shared": Method(
        Affine(4, 0, True, shared=True),
        Affine(3, 0, True, shared=True),
        32,
        "srft",
        64,
    ),
    "groups of 16": Method(
        *(Affine(4, 16, True), Affine(4, 16)),
        transform="srft",
        kernels=False,
        tiles=False,
        triton=True,
    ),
    "channels of both": Method(
        Affine(3, 16, True, axis="channel"), Affine(4, 32, True, axis="channel"), 32, tiles=False
    ),
    "turbo": Method(Codebook(4), Codebook(2), transform="random", triton=True),
    "turbo-int3": Method(Codebook(3), Affine(4, 32), transform="hadamard", triton=True),
    "tree": Method(PolarTree(), PolarTree(), transform="random"),
    "tree of its own": Method(PolarTree(OWN_BOOKS), PolarTree()),
    "online": Method(
        *(PolarTree(online=True), PolarTree(online=True)),
        transform="random",
    ),
    "fill": Method(
        *(
            MixedBits(2.9, (4, 3, 2, 1)),
            MixedBits(2.9, (3, 3, 2, 1)),
        ),  # the second: an odd number of half words
        dims=64,
        triton=True,
    ),
    "polar": Method(Polar(4, 4), Affine(4, 64), dims=128, triton=True),
    "polar-tree": Method(Polar(2, 2), PolarTree(), dims=128),
}


WITHOUT_RECORDS = {
    kind for kind in QUANTIZERS.values() if not kind.exact and kind.layout is Quantizer.layout
}
for _name, _cases in cases.METHODS.items():
    _spec = next(iter(_cases.quantizers.values()))
    if type(_spec) in WITHOUT_RECORDS:
        METHODS[_name] = Method(_spec, _spec, kernels=False, tiles=False)


def names(**wanted: bool) -> list[str]:
    """Methods whose fields are as asked for: `names(tiles=True)`."""
    return [n for n, m in METHODS.items() if all(getattr(m, k) == v for k, v in wanted.items())]


READ = names(kernels=True)
# Presets that no kernel reads: groups of records are whole blocks of 32 dims; some methods have no records.
NO_KERNELS = {"srft-int4+g16", "fp16+keep0.5"} | {
    name for name, preset in PRESETS.items() if type(preset.keys.quantizer) in WITHOUT_RECORDS
}


SIZES = {"": "share", "r": "rank", "e": "energy"}
LOW = {
    "raw": {"raw": True},
    "fast": {"prefill_rate": 1.0, "decode_rate": 0.5},
    "prompt": {"decode_rate": 0.0},
    "all": {"salient": 1.0},
    "pinned": {"pinned": True},
    "transport": {"stored": "transport"},
    "stay": {"stored": "stay"},
    **{f"segments{n}": {"stored": "segments", "segments": n} for n in (1, 2, 3, 4)},
    "segments": {"stored": "segments"},
}


def config_named(name: str) -> CacheConfig:
    """Return the configuration of "oja-r24+int8+segments3+keep0.5", "int2+g32", "fp16+keep0.25", KEYS/VALUES.

    Behind `static-` or `oja-`: a share, r24 dims or e0.9 of the energy, then codes and entries of LOW. Then, of any:
    g32 (group), clip.92, keep, pages (`keep` by whole pages), page, sink, recent, rotary.
    """
    sides = [PRESETS[one] if one in PRESETS else _side(one) for one in name.split("/")]
    keys, values = sides[0], sides[-1]
    windows = keys if keys.compresses else values
    return replace(windows, keys=keys.keys, values=values.values, name=name)


def _side(name: str) -> CacheConfig:
    base, *extras = name.split("+")
    while extras and not base.startswith(("static-", "oja-")) and f"{base}+{extras[0]}" in PRESETS:
        base += f"+{extras.pop(0)}"
    if match := re.fullmatch(r"(static|oja)-([re]?)([\d.]+)", base):
        low = {SIZES[match[2]]: float(match[3]) if match[2] != "r" else int(match[3])}
        codes, windows, page = (Half(), Half()), 32 * (match[1] == "oja"), 64
        for extra in list(extras):
            if extra in LOW:
                low |= LOW[extra]
            elif extra in ("int8", "int4"):
                codes = (Affine(int(extra[3:]), 64),) * 2
            elif extra in PRESETS:
                preset = PRESETS[extra]
                codes, page = (preset.keys.quantizer, preset.values.quantizer), preset.page
            elif extra == "windows":
                windows = 32
            else:
                continue
            extras.remove(extra)
        config = low_rank(LowRank(follows=match[1] == "oja", **low), *codes, windows, page)
    else:
        config = parse_kv(base)
    for extra in extras:
        config = _changed(config, *re.fullmatch(r"([a-z]+)([\d.]+)", extra).groups())
    return config


def _changed(config: CacheConfig, what: str, number: str) -> CacheConfig:
    if what in ("keep", "pages"):
        return replace(config, keep=float(number), whole_pages=what == "pages")
    if what in ("page", "sink", "recent", "rotary"):
        return replace(config, **{what: int(number)})
    sides = {}
    for name in ("keys", "values"):
        side = getattr(config, name)
        if what == "g":
            sides[name] = replace(side, quantizer=replace(side.quantizer, group=int(number)))
        elif side.quantizer.clips:
            sides[name] = replace(side.clipped(float(number)), own_clip=True)
    return replace(config, **sides)


def _affine(x: np.ndarray, spec: Affine) -> np.ndarray:
    if spec.shared:
        codes, scale = ref.tensor_encode(x, spec.bits)
        return scale * (codes.astype(np.float64) - 2 ** (spec.bits - 1))
    group = ref.group_size(spec.group, x.shape[-1 if spec.axis == "token" else -2])
    codes = ref.affine_encode(x, spec.bits, group, spec.symmetric, spec.axis, spec.clip)
    return ref.affine_decode(*codes, group, spec.axis)


def _codebook(x: np.ndarray, spec: Codebook) -> np.ndarray:
    levels = codebook.sphere_levels(x.shape[-1], spec.bits)
    return codebook.codebook_decode(*codebook.codebook_encode(x, levels), levels)


def _tree(x: np.ndarray, spec: PolarTree) -> np.ndarray:
    """online: 8 steps of k-means for each head, codebooks rounded to float16."""
    out, books = [], [tree.angle_codebook(level) for level in range(1, tree.LEVELS + 1)]
    for head in x:
        fitted, sizes = books, head
        if spec.online:
            fitted = []
            for angle, book in zip(tree.to_polar(head)[1], books, strict=True):
                sizes = np.hypot(sizes[..., ::2], sizes[..., 1::2])
                fitted.append(ref.half(tree.fit_codebook(angle, sizes > 0, book, 8)))
        out.append(tree.tree_decode(*tree.tree_encode(head, fitted), fitted))
    return np.stack(out)


def _polar(x: np.ndarray, spec: Polar) -> np.ndarray:
    return polar.decode(polar.encode(x, spec.radius, spec.angle), spec.angle)


def _fill(x: np.ndarray, spec: MixedBits) -> np.ndarray:
    return mixed_bits.decode(*mixed_bits.encode(x, spec.widths), spec.widths)


def _by_spec(x: np.ndarray, spec: Quantizer) -> np.ndarray:
    module = import_module(f"mlxkv.spec.{spec.file or spec.method}")
    return module.decode(module.encode(x, spec), spec)


# A page of all heads, [G, page, R] -> the same, decoded.
LAWS = {  # of the others: `encode` and `decode` of the spec
    Affine: _affine,
    Codebook: _codebook,
    PolarTree: _tree,
    Polar: _polar,
    MixedBits: _fill,
}


def _transform(side: Side, dims: int) -> tuple[np.ndarray, np.ndarray]:
    if side.transform == "random":
        down = codebook.random_rotation(dims, side.seed)
        return down, down.T
    return ref.transform(side.transform, dims, side.seed)


def stored(x: np.ndarray, side: Side, sink: int, pages: int, page: int) -> np.ndarray:
    """Return x [B, G, T, D] as attention sees it: pages transformed, encoded and decoded, windows exact."""
    out = np.array(x, np.float64)
    if isinstance(side.quantizer, Full | Half):
        return out
    (down, up), law = _transform(side, x.shape[-1]), LAWS.get(type(side.quantizer), _by_spec)
    for b, n in np.ndindex(len(x), pages):
        inside = slice(sink + n * page, sink + (n + 1) * page)
        out[b, :, inside] = law(out[b, :, inside] @ down, side.quantizer) @ up
    return out
