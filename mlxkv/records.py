"""Page records: the physical order of codes and scales that the kernels read.

A record holds 16 tokens of one kv head, keys and values together, as uint32 words. The twin of
`metal/codes.h`, where the order is explained; these two files alone know it. Plain MLX ops here, to
save, load and trim pages without a kernel, and to check the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxkv import levels
from mlxkv.config import Affine, Codebook, DualScale, Polar, PolarTree
from mlxkv.formats_codebook import TREE, TREE_BITS
from mlxkv.formats_lowrank import Half

TOKENS = 16  # of a record
BLOCK = 32  # dims of a block
LANES = 32
PAIR_PAGE = 64  # tokens that the simdgroups of a threadgroup read at a time: one table serves them
MAX_PAIR_DIMS = 256  # whose tables fit in threadgroup memory
HALF = 16  # bits of a code that is a float16 number itself
TREE_CODE = 3  # bits of a dim of a polar tree: 46 of 48 for 16 dims are used


@dataclass(frozen=True)
class SideLayout:
    """Where one side of a record lies. dims: stored dims R; bits, group, symmetric as in Affine; 16
    bits: float16 numbers in the places of codes, and no scales.

    codebook: codes stand for levels, and the only number of a token is its norm; corrected: by what
        `Codebook.corrected` says, which only sealing has to know.
    channel: scales (and biases) are per channel and stand in the page's header. outer: one more
        scale, per token in the record (channel), or per channel in the header. page: tokens of a
        page, 0 where there is no header. pairs: keys as radius and angle (`codes.h`).
    tree: polar trees, 1: with the angles of `books`, as the integers of their float32 bits, 2: with
        those of the page, in its header. signs: the highest bit of a key's code is the sign of a
        residual stage, whose length takes the place of a bias.
    """

    dims: int
    bits: int
    group: int
    symmetric: bool
    keys: bool
    channel: bool = False
    outer: bool = False
    page: int = 0
    pairs: bool = False
    codebook: bool = False
    corrected: bool = False
    tree: int = 0
    books: tuple[int, ...] = (0,)
    signs: bool = False

    @property
    def sealed_by_kernel(self) -> bool:
        """Whether the seal kernel writes it: that sees a record at a time, no page, and has no products
        with projections."""
        return not (self.header_words or self.tree or self.signs)

    @property
    def blocks(self) -> int:
        return -(-self.dims // BLOCK)

    @property
    def raw(self) -> bool:
        """Whether its codes are the numbers themselves."""
        return self.bits == HALF

    def saves_nothing(self, dims: int) -> bool:
        """Whether its numbers, padded to whole blocks, are as many as those of `dims` dims in float16."""
        return self.raw and self.blocks * BLOCK >= dims

    @property
    def groups(self) -> int:
        """Scales of a token in the record."""
        if self.channel or self.raw:
            return 1 if self.outer else 0
        return -(-self.dims // self.group)

    @property
    def numbers(self) -> tuple[str, ...]:
        """What stands in the record beside the codes."""
        if self.channel or self.raw:
            return ("outer",) if self.outer else ()
        return ("scale",) if self.symmetric else ("scale", "bias")

    @property
    def lane_words(self) -> int:
        if self.bits == 3:
            return 3 * -(-self.blocks // 2)
        return self.bits * self.blocks // 2

    @property
    def code_words(self) -> int:
        return LANES * self.lane_words

    @property
    def words(self) -> int:
        return self.code_words + 8 * self.groups * len(self.numbers)

    @property
    def header_names(self) -> tuple[str, ...]:
        """What stands in the header of a page."""
        if self.pairs:
            return ("radius_step", "angle_step", "radius_low", "angle_low")
        if self.channel:
            return ("scale",) if self.symmetric else ("scale", "bias")
        if self.tree == 2:
            return ("books",)
        return ("outer",) if self.outer else ()

    @property
    def header_rows(self) -> int:
        """Groups of tokens that have numbers of their own in a header."""
        return self.page // self.group if self.channel else 1

    @property
    def header_words(self) -> int:
        return self.header_rows * len(self.header_names) * self.header_dims // 2

    @property
    def header_dims(self) -> int:
        """Numbers of one name in a row, padded to whole blocks."""
        if self.tree:
            return BLOCK
        return self.dims // 2 if self.pairs else self.blocks * BLOCK


Spec = Affine | Codebook | DualScale | Half | Polar | PolarTree


def layout(spec: Spec, dims: int, page: int, keys: bool) -> SideLayout:
    """The layout of a side that the kernels can read (`why_not` says which they can)."""
    if isinstance(spec, Codebook):
        return SideLayout(
            *(dims, spec.bits, dims, not spec.residual, keys),
            **{"codebook": True, "corrected": spec.corrected, "signs": spec.residual},
        )
    if isinstance(spec, PolarTree):
        shared = {"page": page, "tree": 2} if spec.online else {"tree": 1, "books": _angles(spec)}
        return SideLayout(dims, TREE_CODE, TREE, True, keys, **shared)
    if isinstance(spec, Half):
        return SideLayout(dims, HALF, dims, True, keys)
    group, channel = spec.group_size(dims, page), spec.axis == "channel"
    shared = page if channel or spec.outer else 0
    pairs = isinstance(spec, Polar)
    return SideLayout(
        dims, spec.bits, group, spec.symmetric, keys, channel, spec.outer, shared, pairs
    )


def _angles(spec: PolarTree) -> tuple[int, ...]:
    books = spec.codebooks or [levels.angles(i, bits) for i, bits in enumerate(TREE_BITS, 1)]
    return tuple(int(n) for n in np.concatenate(books).astype(np.float32).view(np.int32))


def why_not(spec, dims: int, page: int, keys: bool = True) -> str | None:
    """Why a side cannot be kept in records, or None."""
    if isinstance(spec, Half | PolarTree):
        return None
    if isinstance(spec, Codebook):
        return _why_no_levels(spec, dims, keys)
    if not hasattr(spec, "bits"):
        return "full-precision pages have no record"
    if isinstance(spec, Polar):
        return _why_no_pairs(spec, dims, page, keys)
    group = spec.group_size(dims, page)
    if spec.axis == "channel":
        return f"groups of {group} tokens are no multiple of {TOKENS}" if group % TOKENS else None
    if group % BLOCK and group != dims:
        return f"groups of {group} are no multiple of {BLOCK}"
    return None


def _why_no_levels(spec: Codebook, dims: int, keys: bool) -> str | None:
    if spec.residual and not keys:
        return "values with a residual stage have no record"
    if spec.residual and (spec.bits == 2 or dims % BLOCK):
        return f"no record for signs beside codes of {spec.level_bits} bits and {dims} dims"
    return spec.no_record


def _why_no_pairs(spec: Polar, dims: int, page: int, keys: bool) -> str | None:
    if not keys:
        return "values as radius and angle have no record"
    if spec.radius != spec.angle or spec.radius == 1:
        return f"no record for radius int{spec.radius} and angle int{spec.angle}"
    if dims % (2 * BLOCK) or dims > MAX_PAIR_DIMS:
        return f"pairs of {dims} dims are not read by single lanes from one table"
    return f"a page of {page} tokens is no multiple of {PAIR_PAGE}" if page % PAIR_PAGE else None


def pack_side(codes: mx.array, scale: mx.array, bias: mx.array | None, at: SideLayout) -> mx.array:
    """codes: [..., T, R] unsigned, scale, bias: [..., T, ceil(R/g)] float16 -> [..., T/16, words]."""
    return pack(codes, {"scale": scale, "bias": bias}, at)


def unpack_side(words: mx.array, at: SideLayout) -> tuple[mx.array, mx.array, mx.array | None]:
    """The inverse of `pack_side`: [..., N, words] -> codes, scale, bias."""
    codes, numbers = unpack(words, at)
    return codes, numbers["scale"], numbers.get("bias")


def pack(codes: mx.array, stored: dict[str, mx.array], at: SideLayout) -> mx.array:
    """codes: [..., T, R] unsigned and the float16 numbers of the record, [..., T, groups] ->
    [..., T/16, words]."""
    *lead, tokens, dims = codes.shape
    pad = at.blocks * BLOCK - dims
    codes = codes.astype(mx.uint32)
    if pad:
        codes = mx.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, pad)])
    slots = _slots(codes.reshape(*lead, tokens // TOKENS, TOKENS, at.blocks * BLOCK), at)
    words = _vectors(_words(slots, at), at)
    parts = [words.reshape(*lead, tokens // TOKENS, at.code_words)]
    shape = (*lead, tokens // TOKENS, TOKENS, at.groups)
    numbers = [stored[name].reshape(shape) for name in at.numbers]
    return mx.concatenate([*parts, *_pack_numbers(numbers, at)], axis=-1)


def unpack(words: mx.array, at: SideLayout) -> tuple[mx.array, dict[str, mx.array]]:
    """The inverse of `pack`."""
    *lead, records, _ = words.shape
    slots = _from_words(_from_vectors(words[..., : at.code_words], at), at)
    codes = _from_slots(slots, at).reshape(*lead, records * TOKENS, at.blocks * BLOCK)
    shape, numbers = (*lead, records * TOKENS, at.groups), []
    if at.numbers:
        numbers = mx.contiguous(words[..., at.code_words :]).view(mx.float16)
        numbers = _unpack_numbers(numbers, at)
    numbers = {name: x.reshape(shape) for name, x in zip(at.numbers, numbers, strict=True)}
    return codes[..., : at.dims], numbers


# [..., 16, groups] scales and biases <-> the order in memory, as in codes.h
_ORDERS = ((1, 3, 0, 2), (3, 1, 0, 2))  # of the values: tokens (r, t, half), groups


def _pack_numbers(numbers: list[mx.array], at: SideLayout) -> list[mx.array]:
    if not numbers:
        return []
    lead = numbers[0].shape[:-2]
    if at.keys:  # token (r, g)
        x = mx.stack(numbers, -2).reshape(*lead, 2, 8, -1)
        out = [x.swapaxes(-2, -3)]
    else:
        x = (x.reshape(*lead, 2, 4, 2, at.groups) for x in numbers)
        out = [_moved(x, order) for x, order in zip(x, _ORDERS, strict=False)]
    return [mx.contiguous(x).reshape(*lead, -1).view(mx.uint32) for x in out]


def _unpack_numbers(numbers: mx.array, at: SideLayout) -> list[mx.array]:
    lead, kinds, out = numbers.shape[:-1], len(at.numbers), []
    if at.keys:
        x = numbers.reshape(*lead, 8, 2, kinds, at.groups).swapaxes(-3, -4)
        return [x[..., i, :] for i in range(kinds)]
    sizes = (2, 4, 2, at.groups)
    for i, order in enumerate(_ORDERS[:kinds]):
        part = numbers[..., 16 * at.groups * i : 16 * at.groups * (i + 1)]
        part = part.reshape(*lead, *(sizes[n] for n in order))
        out.append(_moved(part, tuple(order.index(n) for n in range(len(order)))))
    return out


def _moved(x: mx.array, order: tuple[int, ...]) -> mx.array:
    n = x.ndim - len(order)
    return x.transpose(*range(n), *(n + i for i in order))


# [..., 16, 32 J] <-> [..., g, t, j, r, p, half]; the axes of tokens and dims, as in codes.h


def _slots(codes: mx.array, at: SideLayout) -> mx.array:
    lead, n = codes.shape[:-2], codes.ndim - 2
    if at.keys:  # token (r, g), dim (j, t, half, p)
        x = codes.reshape(*lead, 2, 8, at.blocks, 4, 2, 4)
        order = (1, 3, 2, 0, 5, 4)
    else:  # token (r, t, half), dim (j, g, p)
        x = codes.reshape(*lead, 2, 4, 2, at.blocks, 8, 4)
        order = (4, 1, 3, 0, 5, 2)
    return x.transpose(*range(n), *(n + i for i in order))


def _from_slots(slots: mx.array, at: SideLayout) -> mx.array:
    n = slots.ndim - 6
    order = (3, 0, 2, 1, 5, 4) if at.keys else (3, 1, 5, 2, 0, 4)
    x = slots.transpose(*range(n), *(n + i for i in order))
    return x.reshape(*slots.shape[:n], TOKENS, at.blocks * BLOCK)


def _sum_bits(x: mx.array, step: int) -> mx.array:
    """[..., n, half] codes -> [...] words: entry i of a half at bit `step` * i."""
    shift = mx.arange(x.shape[-2], dtype=mx.uint32)[:, None] * step
    shift = shift + mx.array([0, 16], dtype=mx.uint32)
    return (x << shift).sum((-1, -2))


def _take_bits(words: mx.array, count: int, step: int, mask: int) -> mx.array:
    """The inverse of `_sum_bits`."""
    shift = mx.arange(count, dtype=mx.uint32)[:, None] * step
    shift = shift + mx.array([0, 16], dtype=mx.uint32)
    return (words[..., None, None] >> shift) & mask


def _words(slots: mx.array, at: SideLayout) -> mx.array:
    """[..., g, t, j, r, p, half] -> [..., lane, m]."""
    lead = slots.shape[:-6]
    x = slots.reshape(*lead, LANES, at.blocks, 2, 4, 2)
    if at.bits == 4:
        return _sum_bits(x, 4).reshape(*lead, LANES, -1)
    if at.bits == 8:
        x = x.reshape(*lead, LANES, at.blocks, 2, 2, 2, 2)  # p = (word, byte)
        return _sum_bits(x, 8).reshape(*lead, LANES, -1)
    if at.raw:
        return _sum_bits(x[..., None, :], HALF).reshape(*lead, LANES, -1)
    x = x.reshape(*lead, LANES, at.blocks, 8, 2)
    if at.bits == 2:
        return _sum_bits(x, 2)
    if at.blocks % 2:
        x = mx.pad(x, [(0, 0)] * (x.ndim - 3) + [(0, 1), (0, 0), (0, 0)])
    pairs = x.reshape(*lead, LANES, -1, 2, 8, 2)
    low = _sum_bits(pairs & 3, 2)  # [..., pair, 2]
    high = _sum_bits((pairs >> 2).reshape(*lead, LANES, -1, 16, 2), 1)
    return mx.concatenate([low, high[..., None]], -1).reshape(*lead, LANES, -1)


def _from_words(words: mx.array, at: SideLayout) -> mx.array:
    lead = words.shape[:-2]
    if at.bits == 4:
        x = _take_bits(words, 4, 4, 15)
    elif at.bits == 8:
        x = _take_bits(words, 2, 8, 255)
    elif at.raw:
        x = _take_bits(words, 1, HALF, 0xFFFF)
    elif at.bits == 2:
        x = _take_bits(words, 8, 2, 3)
    else:
        pairs = words.reshape(*lead, LANES, -1, 3)
        low = _take_bits(pairs[..., :2], 8, 2, 3)
        high = _take_bits(pairs[..., 2], 16, 1, 1).reshape(low.shape)
        x = (low | (high << 2)).reshape(*lead, LANES, -1, 8, 2)[..., : at.blocks, :, :]
    return x.reshape(*lead, 8, 4, at.blocks, 2, 4, 2)


def _vectors(words: mx.array, at: SideLayout) -> mx.array:
    """[..., lane, m] -> the order in memory: vectors of v words, lane by lane."""
    v = _vector(at.lane_words)
    x = words.reshape(*words.shape[:-2], LANES, at.lane_words // v, v)
    return x.swapaxes(-2, -3)


def _from_vectors(words: mx.array, at: SideLayout) -> mx.array:
    v = _vector(at.lane_words)
    x = words.reshape(*words.shape[:-1], at.lane_words // v, LANES, v)
    return x.swapaxes(-2, -3).reshape(*words.shape[:-1], LANES, at.lane_words)


def _vector(words: int) -> int:
    return next(v for v in (4, 2, 1) if words % v == 0)
