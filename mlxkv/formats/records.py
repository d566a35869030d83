"""Describe page records: the physical order of codes and scales that the kernels read and files hold.

A record holds 16 tokens of one kv head, keys and values together, as uint32 words. `metal/text/codes.h`
explains the order in memory; `code_fields` and `number_places` are the only other description. Both tracks pack and
unpack by them (`codec/records.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mlxkv.formats import levels
from mlxkv.formats.config import Affine, CacheConfig, Codebook, Full, Polar, PolarTree, Quantizer
from mlxkv.formats.lowrank import DIMS, Half, MixedBits
from mlxkv.formats.quantizers import TREE, TREE_BITS

TOKENS = 16  # in a record
BLOCK = 32  # dims in a block
LANES = 32
PAIR_PAGE = 64  # tokens that a threadgroup reads at a time with one table of pairs
MAX_PAIR_DIMS = 256  # the tables of more do not fit in threadgroup memory
HALF = 16  # bits of a code that is a float16 number itself
TREE_CODE = 3  # bits per dim of a polar tree: 46 of the 48 bits of 16 dims are used
TREE_ANGLES = sum(2**bits for bits in TREE_BITS)  # angles in the codebooks of a page
NAMES = ("keys", "values")
MOST_BLOCKS = 16  # of 16 dims with widths of their own
# Parts of 8 bits of a lane's word: a block of 16 dims has one for each bit of its codes.
QUARTERS = 4


@dataclass(frozen=True)
class SideLayout:
    """Lay out one side, keys or values, of a record and of the page's header.

    kind: what codes are. Affine: "token" with a scale per token and group, "channel" per channel, in the page's header,
        "shared" with one for the page, repeated for every token (as only quantizing needs to know), "blocks" with bits
        that differ by block of 16 dims (`MixedBits`). "pairs": keys as radius and angle (`codes.h`). "codebook":
        indices of levels beside the norm of a token. "tree": polar trees, "online tree"
        with angles of their own for each page, in its header. "numbers": float16 numbers of 16 bits, without scales.
    dims: stored dims R. bits, group, symmetric: as in `Affine`.
    page: tokens in a page, 0 without a header.
    books: angles of a "tree", the int32 bits of float32 numbers. widths: bits of each of "blocks", () for others.
    """

    kind: str
    keys: bool
    dims: int
    bits: int
    group: int
    symmetric: bool = True
    page: int = 0
    books: tuple[int, ...] = (0,)
    widths: tuple[int, ...] = ()

    @property
    def channel(self) -> bool:
        """Return whether scales (and biases), or steps of pairs, are per channel, in the page's header."""
        return self.kind in ("channel", "pairs")

    @property
    def pairs(self) -> bool:
        return self.kind == "pairs"

    @property
    def codebook(self) -> bool:
        return self.kind == "codebook"

    @property
    def tree(self) -> int:
        """Return 1 for trees with the angles of `books`, 2 with the codebooks in the page's header, 0 for none."""
        return {"tree": 1, "online tree": 2}.get(self.kind, 0)

    @property
    def quantized_by_kernel(self) -> bool:
        """Return whether the quantize kernel can write it: the kernel sees one record, not a page, and multiplies by
        no projections."""
        return not (self.header_words or self.tree or self.kind == "shared")

    @property
    def blocks(self) -> int:
        return -(-self.dims // BLOCK)

    @property
    def raw(self) -> bool:
        """Return whether codes are the float16 numbers themselves."""
        return self.bits == HALF

    def saves_nothing(self, dims: int) -> bool:
        """Return whether raw numbers, padded to whole blocks, take as much room as `dims` dims in float16."""
        return self.raw and self.blocks * BLOCK >= dims

    @property
    def groups(self) -> int:
        """Number of scales per token in the record."""
        if self.channel or self.raw:
            return 0
        return -(-self.dims // self.group)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the numbers in the record beside the codes."""
        if self.channel or self.raw:
            return ()
        return ("scale",) if self.symmetric else ("scale", "bias")

    def source(self, name: str) -> str:
        """Return the stored tensor (`Method.tensors`) of a number of the record."""
        if self.tree and name == "scale":
            return "radii"
        return name

    @property
    def quarters(self) -> int:
        """Quarters of words, 8 bits each, that a lane holds of a side whose blocks have widths: an even number."""
        return sum(self.widths) + sum(self.widths) % 2

    @property
    def lane_words(self) -> int:
        if self.widths:
            return -(-self.quarters // QUARTERS)
        if self.bits == 3:
            return 3 * -(-self.blocks // 2)
        return self.bits * self.blocks // 2

    @property
    def code_words(self) -> int:
        if self.widths:
            return LANES * self.quarters // QUARTERS
        return LANES * self.lane_words

    @property
    def words(self) -> int:
        return self.code_words + 8 * self.groups * len(self.numbers)

    @property
    def header_names(self) -> tuple[str, ...]:
        """Names of the numbers in a page's header."""
        if self.pairs:
            return ("radius_step", "angle_step", "radius_low", "angle_low")
        if self.channel:
            return ("scale",) if self.symmetric else ("scale", "bias")
        if self.tree == 2:
            return ("books",)
        return ()

    @property
    def header_rows(self) -> int:
        """Groups of tokens with numbers of their own in a header."""
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


def side_layout(spec: Quantizer, dims: int, page: int, keys: bool) -> SideLayout:
    """Make the layout of a side; the spec passes `why_no_record`."""
    assert not isinstance(spec, Full)
    if isinstance(spec, Codebook):
        return SideLayout("codebook", keys, dims, spec.bits, dims)
    if isinstance(spec, PolarTree):
        if spec.online:
            return SideLayout("online tree", keys, dims, TREE_CODE, TREE, page=page)
        return SideLayout("tree", keys, dims, TREE_CODE, TREE, books=_angles(spec))
    if isinstance(spec, Half):
        return SideLayout("numbers", keys, dims, HALF, dims)
    if isinstance(spec, MixedBits):
        return SideLayout("blocks", keys, dims, 0, dims, widths=spec.widths)
    kind = "pairs" if isinstance(spec, Polar) else spec.axis
    if isinstance(spec, Affine) and spec.shared:
        kind = "shared"
    group, header = spec.group_size(dims, page), page if spec.axis == "channel" else 0
    return SideLayout(kind, keys, dims, spec.bits, group, spec.symmetric, header)


def _angles(spec: PolarTree) -> tuple[int, ...]:
    books = spec.codebooks or [levels.angles(i, bits) for i, bits in enumerate(TREE_BITS, 1)]
    return tuple(int(n) for n in np.concatenate(books).astype(np.float32).view(np.int32))


def why_no_record(
    spec, dims: int, page: int, keys: bool = True, blocks: bool = False
) -> str | None:
    """Return why a side cannot be stored in records, or None. blocks: whether the caller reads codes whose bits
    differ by block (`MixedBits`)."""
    if isinstance(spec, Half | PolarTree):
        return None
    if isinstance(spec, Codebook):
        return "codes of 1 bit have no record" if spec.bits == 1 else None
    if isinstance(spec, Full):
        return "full-precision pages have no record"
    if isinstance(spec, MixedBits):
        if not blocks:
            return "mixed bits have no kernel here"
        if not spec.widths:
            return "a calibration has to give mixed bits their widths"
        too_many = len(spec.widths) > MOST_BLOCKS
        return f"more than {DIMS * MOST_BLOCKS} dims with bits of their own" if too_many else None
    if isinstance(spec, Polar):
        return _why_no_pairs(spec, dims, page, keys)
    if not isinstance(spec, Affine):
        return f"no record for {type(spec).__name__} codes"
    group = spec.group_size(dims, page)
    if spec.axis == "channel":
        return f"groups of {group} tokens are no multiple of {TOKENS}" if group % TOKENS else None
    if group % BLOCK and group != dims:
        return f"groups of {group} are no multiple of {BLOCK}"
    return None


def why_no_records(config: CacheConfig, key_dim: int, value_dim: int) -> str | None:
    """Return why pages of heads of these dims have no records that a kernel reads, on any machine, or None."""
    sides = config.keys, config.values
    if sum(isinstance(side.quantizer, MixedBits) for side in sides) == 1:
        return "mixed bits beside other codes have no kernel"
    for i, (side, dim) in enumerate(zip(sides, (key_dim, value_dim), strict=True)):
        stored = side.dims(dim)
        if reason := why_no_record(side.quantizer, stored, config.page, i == 0, blocks=True):
            return reason
        layout = side_layout(side.quantizer, stored, config.page, i == 0)
        if side.low is not None and layout.saves_nothing(dim):
            return f"{stored} float16 dims would take the room of {dim} in records"
    if key_dim != value_dim:
        return f"keys of {key_dim} and values of {value_dim} dims have no kernel yet"
    return None


def _why_no_pairs(spec: Polar, dims: int, page: int, keys: bool) -> str | None:
    if not keys:
        return "values as radius and angle have no record"
    if spec.radius != spec.angle or spec.radius == 1:
        return f"no record for radius int{spec.radius} and angle int{spec.angle}"
    if dims % (2 * BLOCK) or dims > MAX_PAIR_DIMS:
        return f"pairs of {dims} dims are not read by single lanes from one table"
    return f"a page of {page} tokens is no multiple of {PAIR_PAGE}" if page % PAIR_PAGE else None


@dataclass(frozen=True)
class RecordLayout:
    """Keys and values of a record."""

    keys: SideLayout
    values: SideLayout

    @property
    def words(self) -> int:
        return self.keys.words + self.values.words

    @property
    def header_words(self) -> int:
        return self.keys.header_words + self.values.header_words

    @property
    def quantized_by_kernel(self) -> bool:
        return self.keys.quantized_by_kernel and self.values.quantized_by_kernel

    @property
    def mixed_bits(self) -> bool:
        """Return whether bits differ by block (`MixedBits`): of both sides, or of none, which no kernel reads
        together."""
        return bool(self.keys.widths)

    @property
    def page(self) -> int:
        """Tokens that share a header, or the 16 of a record without one."""
        return max(TOKENS, self.keys.page, self.values.page)


@lru_cache(maxsize=64)
def record_layout(config: CacheConfig, key_dims: int, value_dims: int) -> RecordLayout:
    """Make the layout of a cache; both sides pass `why_no_record`, dims are stored dims (`CacheConfig.dims`)."""
    return RecordLayout(
        side_layout(config.keys.quantizer, key_dims, config.page, keys=True),
        side_layout(config.values.quantizer, value_dims, config.page, keys=False),
    )


def spans(layout: RecordLayout) -> list[tuple[str, SideLayout, slice, slice]]:
    """(name, layout, its words in a record, its words in a header) of each side."""
    keys, values = layout.keys, layout.values
    words, shared = slice(keys.words, layout.words), slice(keys.header_words, layout.header_words)
    first = NAMES[0], keys, slice(keys.words), slice(keys.header_words)
    return [first, (NAMES[1], values, words, shared)]


def layout_of(codecs: Sequence) -> RecordLayout:
    """Make the layout for the codecs (with `spec`, `dims`, `page`) of keys and values, of either track."""
    sides = zip(codecs, (True, False), strict=True)
    return RecordLayout(
        *(side_layout(code.spec, code.dims, code.page, keys) for code, keys in sides)
    )


def _in_memory(axes: tuple[int, ...], memory: tuple[int, ...]) -> np.ndarray:
    """Return the flat indices of an array of shape `axes` in the order of axes `memory`."""
    return np.arange(np.prod(axes)).reshape(axes).transpose(memory).ravel()


def vector(words: int) -> int:
    """Return how many words a lane reads at once: the longest vector that divides `words`."""
    return next(v for v in (4, 2, 1) if words % v == 0)


@dataclass(frozen=True)
class Field:
    """Some bits of every code of a record, and the words that hold them.

    low: the lowest of the bits in a code. width: how many. words: [n] places of words. codes: [n, 32 / width],
    which code, of [16 tokens, padded dims] flattened, stands at bit `width * i` of a word; 16 * padded dims
    for none.
    """

    low: int
    width: int
    words: np.ndarray
    codes: np.ndarray


@dataclass(frozen=True)
class BlockPart:
    """Where the codes of a block of 16 dims stand, or some bits of them: `width` bits from bit `low` of a code on.

    row: words before it in a lane. quarter: the first of its quarters in that word; 4 bits take all of them, 8 bits a
    row for each of r = 0 and 1.
    """

    block: int
    low: int
    width: int
    row: int
    quarter: int


@lru_cache(maxsize=256)
def parts(widths: tuple[int, ...]) -> tuple[BlockPart, ...]:
    """Return the parts of blocks of these widths, in the order in which they fill the words of a lane: codes of 8 and
    of 4 bits, the two low bits of 3-bit codes and codes of 2 bits, the third bits, codes of 1 bit."""
    out, place = [], 0
    for width, low, of in ((8, 0, (8,)), (4, 0, (4,)), (2, 0, (3, 2)), (1, 2, (3,)), (1, 0, (1,))):
        for block, bits in enumerate(widths):
            if bits in of:
                out.append(BlockPart(block, low, width, *divmod(place, QUARTERS)))
                place += width
    return tuple(out)


def block_bit(part: BlockPart, r: int, p: int, half: int) -> int:
    """Return the lowest bit of the code of slot (r, p, half) of a block of 16 dims in its word (`codes.h`)."""
    if part.width == 8:
        return 8 * p + 16 * half
    if part.width == 4:
        return 4 * (2 * r + p) + 16 * half
    return 4 * part.quarter + (2 * p + r if part.width == 1 else 4 * r + 2 * p) + 16 * half


def block_slot(keys: bool, lane: int, r: int, p: int, half: int) -> tuple[int, int]:
    """(token, dim in its block of 16) of a slot of a lane (`codes.h`)."""
    g, t = divmod(lane, 4)
    return (g + 8 * r, 4 * t + 2 * half + p) if keys else (2 * t + 8 * r + half, 2 * g + p)


def _block_fields(at: SideLayout) -> tuple[Field, ...]:
    """`code_fields` of codes whose bits differ by block. Fields share words."""
    dims = at.blocks * BLOCK
    empty, full_rows = TOKENS * dims, at.quarters // QUARTERS
    by_field: dict[tuple[int, int], dict[int, np.ndarray]] = {}
    for part in parts(at.widths):
        words = by_field.setdefault((part.low, part.width), {})
        for lane, r, p, half in np.ndindex(LANES, 2, 2, 2):
            token, dim = block_slot(at.keys, lane, r, p, half)
            row, bit = part.row + (r if part.width == 8 else 0), block_bit(part, r, p, half)
            word = LANES * row + lane
            # Half a row: the low quarters of both halves of a word, for two lanes.
            if row == full_rows:
                word, bit = LANES * row + lane // 2, bit % 16 + 8 * half + 16 * (lane % 2)
            codes = words.setdefault(word, np.full(32 // part.width, empty))
            codes[bit // part.width] = token * dims + DIMS * part.block + dim
    return tuple(
        Field(low, width, np.array(list(words)), np.stack(list(words.values())))
        for (low, width), words in by_field.items()
    )


@lru_cache(maxsize=64)
def code_fields(at: SideLayout) -> tuple[Field, ...]:
    """Return where the codes of a record stand: one field, of 3 bits two."""
    if at.widths:
        return _block_fields(at)
    count = TOKENS * at.blocks * BLOCK
    # [g, t, j, r, p, half]: lane (g, t), block j (`codes.h`).
    if at.keys:  # token (r, g), dim (j, t, half, p)
        slots = _in_memory((2, 8, at.blocks, 4, 2, 4), (1, 3, 2, 0, 5, 4))
    else:  # token (r, t, half), dim (j, g, p)
        slots = _in_memory((2, 4, 2, at.blocks, 8, 4), (4, 1, 3, 0, 5, 2))
    slots = slots.reshape(LANES, at.blocks, 8, 2)  # the last axis: halves of a word
    if at.bits != 3:
        places = _places(at, np.arange(at.lane_words))
        return (Field(0, at.bits, places, _by_bits(slots, at.bits)),)
    # A pair of blocks has a word with the low bits of each, and one with the high bits of both.
    slots = np.pad(slots, [(0, 0), (0, at.blocks % 2), (0, 0), (0, 0)], constant_values=count)
    word = np.arange(at.lane_words).reshape(-1, 3)
    low, high = _places(at, word[:, :2].ravel()), _places(at, word[:, 2])
    return Field(0, 2, low, _by_bits(slots, 2)), Field(2, 1, high, _by_bits(slots, 1))


def _by_bits(slots: np.ndarray, width: int) -> np.ndarray:
    """[lanes, blocks, 8, half] -> [words, 32 / width], lane by lane."""
    words = slots.reshape(LANES, -1, HALF // width, 2).swapaxes(-1, -2)
    return words.reshape(-1, 32 // width)


def _places(at: SideLayout, words: np.ndarray) -> np.ndarray:
    """Places in memory of these words of every lane: vectors of some words, lane by lane."""
    size = vector(at.lane_words)
    first, offset = np.divmod(words, size)
    return ((first * LANES + np.arange(LANES)[:, None]) * size + offset).ravel()


@lru_cache(maxsize=64)
def number_places(at: SideLayout) -> np.ndarray:
    """Return which of the float16 numbers, [names, 16 tokens, groups] flattened, stand one behind the other."""
    if at.keys:  # token (r, g)
        return _in_memory((len(at.numbers), 2, 8, at.groups), (2, 1, 0, 3))
    # Scales, then biases; token (r, t, half).
    axes, memory = (2, 4, 2, at.groups), ((1, 3, 0, 2), (3, 1, 0, 2))
    parts = [i * np.prod(axes) + _in_memory(axes, memory[i]) for i in range(len(at.numbers))]
    return np.concatenate(parts)
