"""Lay out one side, keys or values, of a page record: its words, its numbers and the page's header.

`mlxkv.formats.records` defines the position of each code in the words.
"""

from __future__ import annotations

from dataclasses import dataclass

TOKENS = 16  # in a record
BLOCK = 32  # dims in a block
LANES = 32
HALF = 16  # bits of a code that is a float16 number itself
TREE_BITS = (4, 2, 2, 2)  # bits of an angle of a polar tree, by level: Han et al., section 4.1
TREE_ANGLES = sum(2**bits for bits in TREE_BITS)  # angles in the codebooks of a page
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
        """Return whether raw numbers, padded to whole blocks, need as many bytes as `dims` dims in float16."""
        return self.raw and self.blocks * BLOCK >= dims

    @property
    def groups(self) -> int:
        """Number of scales per token in the record."""
        if self.channel or self.raw:
            return 0
        return -(-self.dims // self.group)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the tensors (`Quantizer.tensors`) in the record beside the codes."""
        if self.channel or self.raw:
            return ()
        if self.tree:
            return ("radii",)
        return ("scale",) if self.symmetric else ("scale", "bias")

    @property
    def quarters(self) -> int:
        """Quarters of words, 8 bits each, per lane of a mixed-bits side: an even number."""
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
