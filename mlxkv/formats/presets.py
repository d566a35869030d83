"""The presets of `--kv NAME`. `mlxkv.formats.names` parses all other names."""

from __future__ import annotations

from dataclasses import replace

from mlxkv.formats.affine import Affine, Full
from mlxkv.formats.codebook import Codebook, PolarTree
from mlxkv.formats.config import (
    BALANCED,
    CALIBRATED,
    FILLED,
    LEARNED,
    PCA,
    SCALED,
    SHARED,
    SPREAD,
    CacheConfig,
    Quantizer,
    Side,
)
from mlxkv.formats.lowrank import Fill, Half, LowRank
from mlxkv.formats.tile import DualScale, Kitty, Polar

FULL = Side(Full())


def _both(bits: int, transform: str, group: int = 64, symmetric: bool = False) -> CacheConfig:
    side = Side(Affine(bits, group, symmetric), transform)
    return CacheConfig(side, side)


def _saw(keys: str, values: str) -> CacheConfig:
    return CacheConfig(Side(Affine(4, 0), keys), Side(Affine(4, 0), values), sink=0, recent=0)


def _scaled(bits: int, group: int = 32) -> CacheConfig:
    """Abs-max codes behind SRFT and a calibrated scale per channel: the SRFT paper's deployment kernel."""
    return _both(bits, SCALED, group, symmetric=True)


def _oscar(
    bits: int,
    group: int = 128,
    keys: float = 1.0,
    values: float = 1.0,
    own: bool = False,
    how: str = CALIBRATED,
) -> CacheConfig:
    """Use the windows of the OSCAR paper. keys, values: clips where none were searched, or always (own)."""
    sides = (Side(Affine(bits, group, clip=clip), how, own_clip=own) for clip in (keys, values))
    return CacheConfig(*sides, sink=64, recent=256)


BALANCED_CLIPS = {2: (0.92, 0.94), 3: (0.98, 0.98), 4: (1.0, 1.0)}  # bits: of keys, of values


def _balanced(keys: int, values: int, group: int = 128) -> CacheConfig:
    """keys, values: bits. The clips serve models without searched ones."""
    clips = BALANCED_CLIPS[keys][0], BALANCED_CLIPS[values][1]
    sides = (
        Side(Affine(bits, group, clip=clip), BALANCED)
        for bits, clip in zip((keys, values), clips, strict=True)
    )
    return CacheConfig(*sides, sink=64, recent=64)


def _channels(keys: int, values: int) -> CacheConfig:
    """Balanced transforms, with keys on a scale and bias per channel, which remove what a page's keys share."""
    sides = (
        Side(Affine(keys, 128, axis="channel"), BALANCED),
        Side(Affine(values, 128, clip=BALANCED_CLIPS[values][1]), BALANCED),
    )
    return CacheConfig(*sides, sink=64, recent=64, page=128)


def _turned(keys: Quantizer, values: Quantizer | None = None, how: str = "random") -> CacheConfig:
    return CacheConfig(Side(keys, how), Side(values or keys, how))


def _kivi(bits: int) -> CacheConfig:
    """KIVI: keys per channel, values per token, groups of 32, the paper's windows."""
    keys, values = Side(Affine(bits, 32, axis="channel")), Side(Affine(bits, 32))
    return CacheConfig(keys, values, sink=0, recent=128)


def _kivi_srft(keys: int, values: int) -> CacheConfig:
    """Keys per channel without a transform, values after SRFT; groups of a page."""
    sides = Side(Affine(keys, 64, axis="channel")), Side(Affine(values, 64), "srft")
    return CacheConfig(*sides)


def _kvarn(keys: int, values: int, unit_std: bool = False) -> CacheConfig:
    sides = (
        Side(DualScale(bits, axis, unit_std), SPREAD)
        for bits, axis in ((keys, "channel"), (values, "token"))
    )
    return CacheConfig(*sides, page=128)


def _polar(bits: int, group: int) -> CacheConfig:
    """Radius and angle of keys at `bits` each; values per token, as in KIVI."""
    sides = Side(Polar(bits, bits)), Side(Affine(bits, group))
    return CacheConfig(*sides, sink=0, recent=128, page=128)


def _kitty(share: float) -> CacheConfig:
    """Keys per channel, with wider codes for a share of the channels, values per token; windows as released."""
    keys, values = Side(Kitty(share)), Side(Affine(2, 128))
    return CacheConfig(keys, values, sink=32, recent=128, page=128)


def low_rank(
    low: LowRank, keys: Quantizer, values: Quantizer, windows: int = 32, page: int = 64
) -> CacheConfig:
    """Store both sides by the same `low`, dims mixed where they are coded. windows: as in the OjaKV paper."""
    sides = (Side(q, PCA, low=replace(low, mixed=type(q) is not Half)) for q in (keys, values))
    return CacheConfig(*sides, sink=windows, recent=windows, page=page)


def _oja(share: float, quantizer: Quantizer | None = None) -> CacheConfig:
    return low_rank(LowRank(share, follows=True), quantizer or Half(), quantizer or Half())


def filled(rate: float) -> CacheConfig:
    """Bits by direction, `rate` a value: keys without their mean. Of 128 exact tokens the first four and the last 124
    cost least (docs/results/selection.md)."""
    sides = (Side(Fill(rate), name) for name in (f"{FILLED}-centred", FILLED))
    return CacheConfig(*sides, sink=4, recent=124)


def _centred(config: CacheConfig) -> CacheConfig:
    """The same with a calibrated mean taken from every key, which softmax does not see (OptR)."""
    return replace(config, keys=replace(config.keys, transform=f"{config.keys.transform}-centred"))


def _short(config: CacheConfig) -> CacheConfig:
    """The same with rotary keys of 8 bits, where a model has latents."""
    return replace(config, short_rotary=True)


CLIPPED = Side(Affine(2, 64, clip=0.92), "hadamard")

PRESETS: dict[str, CacheConfig] = {
    "fp16": CacheConfig(FULL, FULL),
    # int8 and int4 need no calibration; int3, int2 and bits by direction do.
    "int8": _both(8, "none"),
    # Beside latents these three have rotary keys of 8 bits (docs/results/latents.md).
    "int4": _short(CacheConfig(Side(Affine(4, 64, axis="channel")), Side(Affine(4, 64)))),
    "int3": _short(_balanced(4, 2)),  # better than 3 bits for both: keys are the sensitive half
    "int2": _short(_channels(2, 2)),
    # Min-max in groups of 64 without a transform, as mlx-lm's --kv-bits.
    "naive-int8": _both(8, "none"),
    "naive-int4": _both(4, "none"),
    "naive-int3": _both(3, "none"),
    "naive-int2": _both(2, "none"),
    # Sign-randomised Hadamard (QuaRot).
    "hadamard-int8": _both(8, "hadamard"),
    "hadamard-int4": _both(4, "hadamard"),
    "hadamard-int3": _both(3, "hadamard"),
    "hadamard-int2": _both(2, "hadamard"),
    # SAW-INT4: keys behind Hadamard blocks, one scale and bias a token and head; no window. With values rotated
    # too, and with blocks of 16.
    "saw-int4": _saw("hadamard-128", "none"),
    "saw-int4+values": _saw("hadamard-128", "hadamard-128"),
    "saw-int4+b16": _saw("hadamard-16", "none"),
    # Sign-randomised FFT, abs-max codes per group of 32 (SRFT paper, section 3, its kernel g32).
    "srft-int8": _both(8, "srft", group=32, symmetric=True),
    "srft-int4": _both(4, "srft", group=32, symmetric=True),
    "srft-int3": _both(3, "srft", group=32, symmetric=True),
    "srft-int2": _both(2, "srft", group=32, symmetric=True),
    # One scale per token, and per page of all kv heads (section 4.1); groups of 16 (5.6).
    "srft-int4+token": _both(4, "srft", group=0, symmetric=True),
    "srft-int4+tensor": _turned(Affine(4, 0, True, shared=True), how="srft"),
    "srft-int4+g16": _both(4, "srft", group=16, symmetric=True),
    # With a calibrated scale per channel behind the FFT: the deployment kernel (7.1), the fix for Qwen (5.6).
    "srft-scaled-int8": _scaled(8),
    "srft-scaled-int4": _scaled(4),
    "srft-scaled-int3": _scaled(3),
    "srft-scaled-int2": _scaled(2),
    "srft-scaled-int4+token": _scaled(4, 0),
    "srft-scaled-int4+g16": _scaled(4, 16),
    # Min-max codes, better at these widths.
    "srft-int4+g64": _both(4, "srft"),
    "srft-int3+g64": _both(3, "srft"),
    "srft-int2+g32": _both(2, "srft", group=32),
    # Calibrated rotations and the windows of the OSCAR paper; extras: smaller groups.
    "oscar-int4": _oscar(4),
    "oscar-int3": _oscar(3),
    "oscar-int2": _oscar(2, keys=0.96, values=0.92),
    "oscar-int2+g64": _oscar(2, 64, keys=0.96, values=0.92),
    "oscar-int2+g32": _oscar(2, 32, keys=0.96, values=0.92),
    # One rotation per layer, as its first release has; the second has one per kv head.
    "oscar-int2+layer": _oscar(2, keys=0.96, values=0.92, how=SHARED),
    "oscar-int2+clip92": _oscar(2, keys=0.92, values=0.92, own=True),
    # Calibrated invertible maps that give what is stored and what reads it the same second moment.
    "balanced-int4": _balanced(4, 4),
    "balanced-int4+g64": _balanced(4, 4, 64),
    "balanced-int3": _balanced(3, 3),
    "balanced-k3v2": _balanced(3, 2),
    "balanced-int2": _balanced(2, 2),
    "balanced-int2+channels": _channels(2, 2),
    "balanced-k3v2+channels": _channels(3, 2),
    "balanced-int2+g64": _balanced(2, 2, 64),
    "balanced-int2+g32": _balanced(2, 2, 32),
    # Keys without their mean: balanced maps of what is left, and OSCAR's rotation.
    "centred-int3": _centred(_balanced(3, 3)),
    "centred-int2": _centred(_balanced(2, 2)),
    "oscar-int2+centred": _centred(_oscar(2, keys=0.96, values=0.92)),
    # Learned scales and rotations (SRFT paper, section 5), from mlxkv calibrate --learn.
    "learned-int4": _both(4, LEARNED),
    "learned-int3": _both(3, LEARNED),
    "learned-int2": _both(2, LEARNED),
    # A Hadamard rotation and a clip: OSCAR without calibration.
    "hadamard-int2+clip": CacheConfig(CLIPPED, CLIPPED),
    # TurboQuant: a random rotation and the best codebook for it; 2.5 and 3.5 have outlier channels. The
    # residual stage corrects products with queries, so only keys have it.
    "turbo-int4": _turned(Codebook(4)),
    "turbo-int3": _turned(Codebook(3)),
    "turbo-int2": _turned(Codebook(2)),
    "turbo-3.5": _turned(Codebook(3, outliers=True), how="none"),
    "turbo-2.5": _turned(Codebook(2, outliers=True), how="none"),
    "turbo-int4+qjl": _turned(Codebook(4, residual=True), Codebook(4)),
    "turbo-int3+qjl": _turned(Codebook(3, residual=True), Codebook(3)),
    # PolarQuant (Han et al.): a random rotation, then radii and angles. The paper's row without preconditioning
    # reads a prompt as slowly as its online codebooks, so these are what it has.
    "polar-tree": _turned(PolarTree()),
    "polar-tree+online": _turned(PolarTree(online=True)),
    "polar-tree+plain": _turned(PolarTree(online=True), how="none"),
    # KIVI: keys per channel.
    "kivi-int4": _kivi(4),
    "kivi-int2": _kivi(2),
    "kivi-int4+srft": _kivi_srft(4, 4),
    "kivi-k4v2+srft": _kivi_srft(4, 2),
    # Kitty, and Kitty-Pro: an eighth and a quarter of the key channels at 4 bits.
    "kitty-int2": _kitty(0.125),
    "kitty-int2+pro": _kitty(0.25),
    # KVarN as published; extra: tiles divided by their standard deviation first.
    "kvarn-int4": _kvarn(4, 4),
    "kvarn-int3": _kvarn(3, 3),
    "kvarn-int2": _kvarn(2, 2),
    "kvarn-k4v2": _kvarn(4, 2),
    "kvarn-int4+fixed": _kvarn(4, 4, unit_std=True),
    "kvarn-int3+fixed": _kvarn(3, 3, unit_std=True),
    "kvarn-int2+fixed": _kvarn(2, 2, unit_std=True),
    # PolarQuant (Wu et al.): radius and angle of pairs of key channels.
    "polar": _polar(4, 128),
    "polar-int3": _polar(3, 64),
    "polar-int2": _polar(2, 32),
    # Low rank: fixed, and following the text (OjaKV). `mlxkv.formats.names` reads other ranks and extras.
    "static-0.75": low_rank(LowRank(0.75), Half(), Half(), windows=0),
    "static-0.75+windows": low_rank(LowRank(0.75), Half(), Half()),
    "oja-0.8": _oja(0.8),
    "oja-0.75": _oja(0.75),
    "oja-0.75+pinned": low_rank(LowRank(0.75, follows=True, pinned=True), Half(), Half()),
    "oja-0.6": _oja(0.6),
    "oja-0.75+int8": _oja(0.75, Affine(8, 64)),
    "oja-0.75+int4": _oja(0.75, Affine(4, 64)),
}

# Full precision in pages: they save nothing, and no `--kv` names them. `mlxkv bench decode` compares with them.
FULL_PAGES = CacheConfig(Side(Half()), Side(Half()))

# Slower at decode than full precision on a GPU (docs/internals/kernels.md; those that no kernel reads): for comparison,
# not offered.
COMPARED = (
    *("turbo-3.5", "turbo-2.5", "polar-int3", "srft-int4+g16", "srft-scaled-int4+g16"),
    *("kitty-int2", "kitty-int2+pro"),
)
