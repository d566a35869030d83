"""The presets of `--kv NAME`. `mlxkv.formats.names` parses all other names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mlxkv.formats.config import (
    BALANCED,
    CALIBRATED,
    LEARNED,
    MIXED_BITS,
    PCA,
    SCALED,
    SHARED,
    CacheConfig,
    Side,
)
from mlxkv.formats.lowrank import LowRank
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

FULL = Side(Full())


def _alike(bits: int, transform: str, group: int = 64, symmetric: bool = False) -> CacheConfig:
    side = Side(Affine(bits, group, symmetric), transform)
    return CacheConfig(side, side)


def _oscar(
    bits: int, keys: float = 1.0, values: float = 1.0, transform: str = CALIBRATED
) -> CacheConfig:
    """Use the windows of the OSCAR paper. keys, values: clips where none were searched."""
    sides = (Side(Affine(bits, 128, clip=clip), transform) for clip in (keys, values))
    return CacheConfig(*sides, sink=64, recent=256)


def _balanced(keys: Affine, values: Affine, page: int = 64) -> CacheConfig:
    """Balanced maps of both sides. The clips serve models without searched ones."""
    return CacheConfig(Side(keys, BALANCED), Side(values, BALANCED), page=page)


def _transformed(quantizer: Quantizer, transform: str = "random") -> CacheConfig:
    return CacheConfig(Side(quantizer, transform), Side(quantizer, transform))


def _kivi(bits: int) -> CacheConfig:
    """KIVI: keys per channel, values per token, groups of 32, the paper's windows."""
    keys, values = Side(Affine(bits, 32, axis="channel")), Side(Affine(bits, 32))
    return CacheConfig(keys, values, sink=0, recent=128)


def _polar(bits: int, group: int) -> CacheConfig:
    """Radius and angle of keys at `bits` each; values per token, as in KIVI."""
    sides = Side(Polar(bits, bits)), Side(Affine(bits, group))
    return CacheConfig(*sides, sink=0, recent=128, page=128)


def low_rank(
    low: LowRank, keys: Quantizer, values: Quantizer, windows: int = 32, page: int = 64
) -> CacheConfig:
    """Store both sides by the same `low`, dims mixed where they are coded. windows: as in the OjaKV paper."""
    sides = (Side(q, PCA, low=replace(low, mixed=q.codes)) for q in (keys, values))
    return CacheConfig(*sides, sink=windows, recent=windows, page=page)


def _oja(share: float, quantizer: Quantizer | None = None) -> CacheConfig:
    return low_rank(LowRank(share, follows=True), quantizer or Half(), quantizer or Half())


def mixed_bits(rate: float) -> CacheConfig:
    """Mixed bits, `rate` a value: keys without their mean. Of 128 exact tokens the first four and the last 124
    cost least (docs/results/history.md)."""
    sides = (Side(MixedBits(rate), name) for name in (f"{MIXED_BITS}-centred", MIXED_BITS))
    return CacheConfig(*sides, sink=4, recent=124)


def _centred(config: CacheConfig) -> CacheConfig:
    """Return the same with a calibrated mean taken from every key, which softmax does not see (OptR)."""
    return replace(config, keys=replace(config.keys, transform=f"{config.keys.transform}-centred"))


def _short(config: CacheConfig) -> CacheConfig:
    """Return the same with rotary keys of 8 bits, where a model has latents."""
    return replace(config, rotary=8)


def _widths(
    method: str, widths: tuple[int, ...], make: Callable[[int], CacheConfig]
) -> dict[str, CacheConfig]:
    """{"METHOD-intN": make(N)} of each width N."""
    return {f"{method}-int{bits}": make(bits) for bits in widths}


PRESETS: dict[str, CacheConfig] = {
    "fp16": CacheConfig(FULL, FULL),
    # int8 and int4 need no calibration. int3 and int2 do.
    "int8": CacheConfig(Side(Affine(8, 64, axis="channel")), Side(Affine(8, 64))),
    # Beside latents these three have rotary keys of 8 bits.
    "int4": _short(CacheConfig(Side(Affine(4, 64, axis="channel")), Side(Affine(4, 64)))),
    "int3": _short(  # better than 3 bits for both: keys are the sensitive half
        _balanced(Affine(4, 128), Affine(2, 128, clip=0.94))
    ),
    "int2": _short(_balanced(Affine(2, 128, axis="channel"), Affine(2, 128, clip=0.94), page=128)),
    # Min-max in groups of 64 without a transform, as mlx-lm's --kv-bits.
    **_widths("naive", (8, 4, 3, 2), lambda bits: _alike(bits, "none")),
    # Sign-randomised Hadamard (QuaRot).
    **_widths("hadamard", (8, 4, 3, 2), lambda bits: _alike(bits, "hadamard")),
    # Sign-randomised FFT, abs-max codes per group of 32 (SRFT paper, section 3, its kernel g32).
    **_widths("srft", (8, 4, 3, 2), lambda bits: _alike(bits, "srft", group=32, symmetric=True)),
    # One scale per token, and per page of all kv heads (section 4.1); groups of 16 (5.6).
    "srft-int4+token": _alike(4, "srft", group=0, symmetric=True),
    "srft-int4+tensor": _transformed(Affine(4, 0, True, shared=True), transform="srft"),
    "srft-int4+g16": _alike(4, "srft", group=16, symmetric=True),
    # With a calibrated scale per channel behind the FFT: the deployment kernel (7.1), the fix for Qwen (5.6).
    **_widths("srft-scaled", (8, 4, 3, 2), lambda bits: _alike(bits, SCALED, 32, symmetric=True)),
    # Min-max codes, better at these widths.
    "srft-int4+g64": _alike(4, "srft"),
    "srft-int3+g64": _alike(3, "srft"),
    "srft-int2+g32": _alike(2, "srft", group=32),
    # Calibrated rotations and the windows of the OSCAR paper; extras: smaller groups.
    **_widths("oscar", (4, 3), _oscar),
    "oscar-int2": _oscar(2, keys=0.96, values=0.92),
    # One rotation per layer, as its first release has; the second has one per kv head.
    "oscar-int2+layer": _oscar(2, keys=0.96, values=0.92, transform=SHARED),
    # Calibrated invertible maps that give what is stored and what reads it the same second moment; keys without
    # their mean; OSCAR's rotation of such keys.
    "balanced-int4": _balanced(Affine(4, 128), Affine(4, 128)),
    "balanced-int3": _balanced(Affine(3, 128, clip=0.98), Affine(3, 128, clip=0.98)),
    "balanced-int2": _balanced(Affine(2, 128, clip=0.92), Affine(2, 128, clip=0.94)),
    "centred-int3": _centred(_balanced(Affine(3, 128, clip=0.98), Affine(3, 128, clip=0.98))),
    "centred-int2": _centred(_balanced(Affine(2, 128, clip=0.92), Affine(2, 128, clip=0.94))),
    "oscar-int2+centred": _centred(_oscar(2, keys=0.96, values=0.92)),
    # Learned scales and rotations (SRFT paper, section 5), from mlxkv calibrate --learn.
    **_widths("learned", (4, 3, 2), lambda bits: _alike(bits, LEARNED)),
    # TurboQuant: a random rotation and the best codebook for it.
    **_widths("turbo", (4, 3, 2), lambda bits: _transformed(Codebook(bits))),
    # PolarQuant (Han et al.): a random rotation, then radii and angles. The paper's row without preconditioning
    # reads a prompt as slowly as its online codebooks, so these are what it has.
    "polar-tree": _transformed(PolarTree()),
    "polar-tree+online": _transformed(PolarTree(online=True)),
    "polar-tree+plain": _transformed(PolarTree(online=True), transform="none"),
    # KIVI: keys per channel.
    **_widths("kivi", (4, 2), _kivi),
    # PolarQuant (Wu et al.): radius and angle of pairs of key channels.
    "polar": _polar(4, 128),
    "polar-int3": _polar(3, 64),
    "polar-int2": _polar(2, 32),
    # Low rank: fixed, and following the text (OjaKV). Other ranks and settings: `low_rank(LowRank(...), ...)`.
    "static-0.75": low_rank(LowRank(0.75), Half(), Half(), windows=0),
    "static-0.75+int4": low_rank(LowRank(0.75), Affine(4, 64), Affine(4, 64), windows=0),
    "static-0.75+windows": low_rank(LowRank(0.75), Half(), Half()),
    "oja-0.75": _oja(0.75),
    "oja-0.75+pinned": low_rank(LowRank(0.75, follows=True, pinned=True), Half(), Half()),
    "oja-0.75+int8": _oja(0.75, Affine(8, 64)),
    "oja-0.75+int4": _oja(0.75, Affine(4, 64)),
}
# SnapKV: the half of a prompt that its last queries attend to most. Other shares: `replace(CONFIG, keep=...)`.
PRESETS.update(
    {f"{name}+keep0.5": replace(PRESETS[name], keep=0.5) for name in ("fp16", "int4", "oja-0.75")}
)

# Full precision in pages: they save nothing, and no `--kv` names them. `mlxkv bench decode` compares with them.
FULL_PAGES = CacheConfig(Side(Half()), Side(Half()))

# Slower at decode than full precision on a GPU (docs/internals/kernels.md; those that no kernel reads): for comparison,
# not offered.
COMPARED = ("polar-int3", "srft-int4+g16")
