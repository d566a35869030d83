"""The order in which Triton reads mixed bits, and what its kernels know of their widths.

Widths belong to blocks of 16 dims. In a step of 64 tokens a block is a matrix of 16 rows and 16 dims, and a row holds
four tokens, 16 apart: so a load brings codes of four steps of a matrix unit, nothing is shuffled, and each of them is
one shift and one mask away. All rows and dims have the same `8 W` bits, W = 32-bit words of a token in files: no byte
is added.

    words    int16 [P, G, page / 64, W / 2, 16, 16], *tiles*: tokens by dims of keys, dims by tokens of values
    odd      int8 [P, G, page / 64, 16, 16]: the last 8 bits, if W is odd
    numbers  int32 [P, G, page / 64, 2, 16]: scales, float16, of tokens r and 16 + r, then of tokens 32 + r and 48 + r
    codes    8 bits first, then 4, then 2 (and the low two of 3), then the high ones of 3, then 1: four tokens one
             behind the other, and none crosses a tile

P pages of the pool, G kv heads. Files never see this order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch.nn.functional import pad

from cuda_track.codec import mixed_bits
from cuda_track.codec.codec import Codec, Stored
from cuda_track.codec.transform import Transform
from mlxkv.formats.quantizers import DIMS, MixedBits

STEP = 64  # tokens of a tile
SHARED = 4  # of them in a row
ROWS = STEP // SHARED
TILE = 16  # bits


@dataclass(frozen=True)
class BlockLayout:
    """The order of one side. quantizer: its format, with widths. page: tokens of a page."""

    quantizer: MixedBits
    page: int
    keys: bool

    @property
    def dims(self) -> int:
        """Stored dims R."""
        return self.quantizer.dims

    @property
    def steps(self) -> int:
        return self.page // STEP

    @property
    def tiles(self) -> int:
        """Whole tiles of a step."""
        return self.quantizer.words // 2

    @property
    def odd(self) -> bool:
        """Return whether half a tile follows."""
        return self.quantizer.words % 2 == 1

    @cached_property
    def places(self) -> tuple[tuple[int, int, int], ...]:
        """(bits, first bit, first high bit of 3 or -1) of each block: token r + 16 k has its code k widths further."""
        widths = self.quantizer.widths
        lows, tops, start = {}, dict.fromkeys(range(len(widths)), -1), 0
        for size, of in ((8, (8,)), (4, (4,)), (2, (3, 2))):
            for i in (i for i, bits in enumerate(widths) if bits in of):
                lows[i], start = start, start + SHARED * size
        for places, of in ((tops, 3), (lows, 1)):
            for i in (i for i, bits in enumerate(widths) if bits == of):
                places[i], start = start, start + SHARED
        return tuple((bits, lows[i], tops[i]) for i, bits in enumerate(widths))

    @cached_property
    def pieces(self) -> tuple[tuple[int, int, int, int, int], ...]:
        """(block, its lowest bit, bits, token of a row, bit) of all that a row holds of a dim."""
        out = []
        for i, (bits, low, top) in enumerate(self.places):
            size = 2 if bits == 3 else bits
            out += [(i, 0, size, k, low + k * size) for k in range(SHARED)]
            out += [(i, 2, 1, k, top + k) for k in range(SHARED) if bits == 3]
        return tuple(out)

    def shapes(self, heads: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape of a page and the dtype of the tensors of a side in a pool, by name."""
        out = {
            "words": ((heads, self.steps, self.tiles, ROWS, DIMS), torch.int16),
            "numbers": ((heads, self.steps, 2, ROWS), torch.int32),
        }
        if self.odd:
            out["odd"] = (heads, self.steps, ROWS, DIMS), torch.int8
        return out

    def arrange(self, stored: Stored) -> Stored:
        """Convert stored pages [B, G, N T, ...] to tensors of a pool, [B, N, G, ...]."""
        codes = mixed_bits.unpack(self.quantizer, stored["codes"])
        batch, heads = codes.shape[:2]
        codes = codes.view(batch, heads, -1, self.steps, SHARED, ROWS, len(self.places), DIMS)
        tiles = codes.new_zeros(*codes.shape[:4], self.tiles + self.odd, ROWS, DIMS)
        for block, low, bits, k, bit in self.pieces:
            piece = (codes[..., k, :, block, :] >> low) & ((1 << bits) - 1)
            tiles[..., bit // TILE, :, :] |= piece << bit % TILE
        tiles = (tiles if self.keys else tiles.mT).swapaxes(1, 2)
        numbers = stored["scale"].view(batch, heads, -1, self.steps, 2, 2, ROWS)
        numbers = numbers.mT.contiguous().view(torch.int32).squeeze(-1).swapaxes(1, 2)
        out = {"words": _signed(tiles[..., : self.tiles, :, :], torch.int16)}
        out["numbers"] = numbers.contiguous()
        return out | ({"odd": _signed(tiles[..., -1, :, :], torch.int8)} if self.odd else {})

    def restore(self, pool: Stored) -> Stored:
        """Invert `arrange`."""
        tiles = pool["words"].int()
        if self.odd:
            tiles = torch.cat([tiles, pool["odd"].int()[..., None, :, :]], -3)
        tiles = (tiles if self.keys else tiles.mT).swapaxes(1, 2)
        codes = tiles.new_zeros(*tiles.shape[:4], SHARED, ROWS, len(self.places), DIMS)
        for block, low, bits, k, bit in self.pieces:
            piece = (tiles[..., bit // TILE, :, :] >> bit % TILE) & ((1 << bits) - 1)
            codes[..., k, :, block, :] |= piece << low
        codes = codes.flatten(6).flatten(2, 5)
        scale = pool["numbers"].swapaxes(1, 2)[..., None].contiguous().view(torch.float16).mT
        codes = mixed_bits.pack(self.quantizer, codes)
        return {"codes": codes, "scale": scale.flatten(2)[..., None].contiguous()}


def why_not(quantizer: MixedBits, dims: int, page: int) -> str | None:
    """Return why Triton does not read a side of heads of `dims`, or None. Without widths, which a calibration gives,
    no dims are stored yet."""
    if quantizer.dims > dims:
        return f"{quantizer.dims} stored dims are more than the {dims} of a head"
    return f"a page of {page} tokens is no multiple of {STEP}" if page % STEP else None


def whole(transform: Transform | None, dims: int) -> Transform | None:
    """Return a transform [dims, dims], with zeros where a head has more dims than it stores."""
    return transform and _whole(transform, dims)


@lru_cache(maxsize=512)
def _whole(transform: Transform, dims: int) -> Transform:
    more = dims - transform.down.shape[-1]
    if not more:
        return transform
    down, up = pad(transform.down, (0, more)), pad(transform.up, (0, 0, 0, more))
    return Transform(down.contiguous(), up.contiguous())


def matrices(
    codecs: tuple[Codec, Codec], layouts: tuple[BlockLayout, BlockLayout], dims: int, device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what queries and outputs are multiplied with, [G, dims, dims] or [dims, dims]. A code of b bits counts
    2^-b in the kernel: what makes up for it is here."""
    keys, values = (
        _scaled(code.transform, at, dims, device) for code, at in zip(codecs, layouts, strict=True)
    )
    return keys, values


@lru_cache(maxsize=512)
def _scaled(
    transform: Transform | None, at: BlockLayout, dims: int, device: torch.device
) -> torch.Tensor:
    gains = torch.tensor([2.0**bits for bits in at.quantizer.widths], device=device)
    gains = pad(gains.repeat_interleave(DIMS), (0, dims - at.dims))
    up = torch.eye(dims, device=device) if transform is None else _whole(transform, dims).up
    return (up * gains[:, None]).contiguous()


@lru_cache(maxsize=512)
def numbers_of_dims(at: BlockLayout, dims: int, device: torch.device) -> torch.Tensor:
    """Return float32 [3, dims] by which values become codes: steps, gains, half of the largest code."""
    numbers = torch.stack(mixed_bits.tables(at.quantizer.widths, device))
    return pad(numbers, (0, dims - at.dims)).contiguous()


@lru_cache(maxsize=512)
def recipe(at: BlockLayout, dims: int, device: torch.device) -> torch.Tensor:
    """Return int32 [W, 4, dims / 16]: which bits of the codes of each token of a row and of each block half a tile
    holds: a mask, from bit 16 on, of a code that goes down by the bits 8 .. 15, and up by the bits 0 .. 7."""
    out = torch.zeros(at.quantizer.words, SHARED, dims // DIMS, dtype=torch.int32)
    for block, low, bits, k, bit in at.pieces:
        out[bit // 8, k, block] = (1 << bits) - 1 << 16 | low << 8 | bit % 8
    return out.to(device)


@lru_cache(maxsize=512)
def places_of(at: BlockLayout, device: torch.device) -> torch.Tensor:
    """Return int32 [blocks, 3], `BlockLayout.places`."""
    return torch.tensor(at.places, dtype=torch.int32, device=device)


def _signed(tiles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert non-negative int32 to `dtype`, bit by bit."""
    size = torch.iinfo(dtype).bits
    return (tiles - ((tiles >> (size - 1)) << size)).to(dtype).contiguous()
