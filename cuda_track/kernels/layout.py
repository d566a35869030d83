"""The order in which Triton reads codes, made from the logical codes when a page is quantized.

A page of one kv head holds, for each side, `words` and `numbers`. A word holds `planes` codes of one
token: plane i of word j is the code of dim `J i + j`, at bits `i b`. So a plane of all words is a
matrix of J neighbouring dims, as matrix units multiply: queries are cut into the same runs of J dims,
nothing is shuffled, and a scale belongs to whole planes.

    keys    words [P, G, T, J]        a token's words together
    values  words [P, G, J, T]        a word's tokens together
    both    numbers int32 [P, G, groups, T]: scale in the low half, bias in the high half, float16;
            [P, G, rows, R] for keys with a scale per channel, T / rows tokens sharing it
    3 bits  two sets of words: the low 2 bits, and the high bit
    codebooks   numbers hold the norm and 0; a code is a sign and the rank of a size
    polar keys  the codes of R/2 radii, then of R/2 angles; numbers are step and low

P pages of the pool, T tokens of a page, G kv heads. Words are int8, int16 or int32. Files never see
this order. Mixed bits have another (`blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce

import torch

from cuda_track.codec import packing, polar
from cuda_track.codec.affine import bias_of
from cuda_track.codec.codec import Codec, Stored
from cuda_track.kernels import blocks
from cuda_track.kernels.blocks import BlockLayout
from mlxkv.formats.quantizers import (
    POLAR_NUMBERS,
    Affine,
    Codebook,
    MixedBits,
    Polar,
    Quantizer,
)

LEAST = 16  # dims that a matrix unit sums over at least
PLANES = 8  # accumulators of a program
DIMS = (64, 128, 256)
STEP_TOKENS = 64  # tokens that a program of one warp holds in registers
GROUP = 256  # tokens that share scales per channel at most: one program quantizes them
WORDS = {8: torch.int8, 16: torch.int16, 32: torch.int32}


@dataclass(frozen=True)
class PlaneLayout:
    """The order of one side. quantizer: its format. dims: stored dims R. page: tokens of a page."""

    quantizer: Affine | Codebook | Polar
    dims: int
    page: int
    keys: bool

    @property
    def kind(self) -> str:
        """How codes become numbers: "affine", "codebook" or "polar"."""
        return self.quantizer.method

    @property
    def bits(self) -> int:
        """Bits of a code; of polar codes those of the wider of radius and angle."""
        assert self.quantizer.code_bits is not None  # of these methods
        return self.quantizer.code_bits

    @property
    def group(self) -> int:
        """Values that share a scale: dims of a token, or tokens of a page."""
        if isinstance(self.quantizer, Affine):
            return self.quantizer.group_size(self.dims, self.page)
        return self.page if self.channel else self.dims

    @property
    def channel(self) -> bool:
        if isinstance(self.quantizer, Affine):
            return self.quantizer.axis == "channel"
        return isinstance(self.quantizer, Polar)

    @property
    def channel_tokens(self) -> int:
        """Tokens that share scales per channel; 0: scales are per token."""
        return self.group if self.channel else 0

    @property
    def groups(self) -> int:
        """Scales of a token, or of a channel of a page."""
        return (self.page if self.channel else self.dims) // self.group

    @property
    def step_tokens(self) -> int:
        """Tokens that a program reads at a time at most."""
        most = (
            STEP_TOKENS // 2 if self.kind == "polar" else STEP_TOKENS
        )  # those are rebuilt in float32
        return min(most, self.group if self.channel else self.page)

    @property
    def planes(self) -> int:
        """Codes of a word. For 4 bits words of 16 bits unpack with the fewest instructions; groups then have
        to be multiples of their planes."""
        planes = min(PLANES, 32 // self.bits, self.dims // LEAST)
        if self.bits == 4 and (self.channel or self.group % (self.dims // 4) == 0):
            return min(planes, 4)
        return planes

    @property
    def words(self) -> int:
        """J: words of a token, and dims of a plane."""
        return self.dims // self.planes

    @cached_property
    def fields(self) -> dict[str, tuple[int, int]]:
        """(lowest bit of the code, bits) of each set of words, by name."""
        if self.bits == 3:
            return {"words": (0, 2), "high": (2, 1)}
        return {"words": (0, self.bits)}

    def folded(self, code):
        """Fold codes of a codebook into a sign and the rank of a size. Levels are symmetric. Its own inverse."""
        middle = 1 << (self.bits - 1)
        return code ^ ((code < middle) * (middle - 1))

    def dtype(self, bits: int) -> torch.dtype:
        """Return the type of words whose planes have `bits` bits."""
        return WORDS[max(8, self.planes * bits)]

    def shapes(self, heads: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape of a page and the dtype of the tensors of a side in a pool, by name."""
        words = (self.page, self.words) if self.keys else (self.words, self.page)
        out = {name: ((heads, *words), self.dtype(bits)) for name, (_, bits) in self.fields.items()}
        last = self.dims if self.channel else self.page
        return out | {"numbers": ((heads, self.groups, last), torch.int32)}

    def arrange(self, stored: Stored) -> Stored:
        """Convert stored pages [B, G, N T, ...] to tensors of a pool, [B, N, G, ...]."""
        codes, scale, bias = self._parts(stored)
        batch, heads = codes.shape[:2]
        planes = codes.view(batch, heads, -1, self.page, self.planes, self.words)
        out = {}
        for name, (low, bits) in self.fields.items():
            shifts = torch.arange(self.planes, device=codes.device)[:, None] * bits
            field = (planes >> low) & ((1 << bits) - 1)
            words = (field.long() << shifts).sum(-2)  # [B, G, N, T, J]
            words = words if self.keys else words.mT
            out[name] = _narrow(words, self.dtype(bits)).swapaxes(1, 2).contiguous()
        numbers = torch.stack([scale, bias], -1).contiguous().view(torch.int32)
        if self.channel:
            numbers = numbers.view(batch, heads, -1, self.groups, self.dims).swapaxes(1, 2)
        else:
            numbers = numbers.view(batch, heads, -1, self.page, self.groups).permute(0, 2, 1, 4, 3)
        return out | {"numbers": numbers.contiguous()}

    def restore(self, pool: Stored) -> Stored:
        """Invert `arrange`."""
        parts = []
        for name, (low, bits) in self.fields.items():
            words = pool[name].swapaxes(1, 2)
            words = (words if self.keys else words.mT).int()
            shifts = torch.arange(self.planes, device=words.device, dtype=torch.int32)[:, None]
            parts.append(((words[..., None, :] >> (shifts * bits)) & ((1 << bits) - 1)) << low)
        codes = reduce(torch.bitwise_or, parts)
        batch, heads = codes.shape[:2]
        codes = codes.reshape(batch, heads, -1, self.dims)
        numbers = pool["numbers"].swapaxes(1, 2)
        numbers = (numbers if self.channel else numbers.mT).flatten(2, 3)
        scale, bias = numbers.flatten().view(torch.float16).view(*numbers.shape, 2).unbind(-1)
        return self._joined(codes, scale.contiguous(), bias.contiguous())

    def _parts(self, stored: Stored) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return codes [B, G, N T, R], and numbers in pairs: scale and bias, norm and nothing, or step and low, of
        all radii and then of all angles."""
        if isinstance(self.quantizer, Polar):
            step, low = (
                torch.cat([stored[f"radius_{name}"], stored[f"angle_{name}"]], -1)
                for name in ("step", "low")
            )
            return polar.split(self.quantizer, stored["codes"], self.dims), step, low
        codes = packing.unpack(stored["codes"], self.bits, self.dims)
        if isinstance(self.quantizer, Codebook):
            return self.folded(codes), stored["scale"], torch.zeros_like(stored["scale"])
        return codes, stored["scale"], bias_of(self.quantizer, stored)

    def _joined(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> Stored:
        """Invert `_parts`."""
        if isinstance(self.quantizer, Polar):
            (rho_step, phi_step), (rho_low, phi_low) = scale.chunk(2, -1), bias.chunk(2, -1)
            made = rho_step, rho_low, phi_step, phi_low
            numbers = {str(name): x for name, x in zip(POLAR_NUMBERS, made, strict=True)}
            return polar.join(self.quantizer, codes, numbers)
        if isinstance(self.quantizer, Codebook):
            return {"codes": packing.pack(self.folded(codes), self.bits), "scale": scale}
        stored = {"codes": packing.pack(codes, self.bits), "scale": scale}
        return stored if self.quantizer.symmetric else stored | {"bias": bias}


Layout = PlaneLayout | BlockLayout


def layouts(codecs: tuple[Codec, Codec]) -> tuple[Layout, Layout]:
    """Return the layouts of keys and of values."""
    keys, values = codecs
    return of_side(keys.quantizer, keys.dims, keys.page, True), of_side(
        values.quantizer, values.dims, values.page, False
    )


def of_side(quantizer: Quantizer, dims: int, page: int, keys: bool) -> Layout:
    """Return the layout of a side with `dims` stored dims, which `why_not` has no reason against."""
    if isinstance(quantizer, MixedBits):
        return BlockLayout(quantizer, page, keys)
    assert isinstance(quantizer, Affine | Codebook | Polar)  # by `why_not`
    return PlaneLayout(quantizer, dims, page, keys)


def why_not(quantizer, dims: int, page: int, keys: bool = True) -> str | None:
    """Return why Triton does not read a side of heads of `dims`, or None."""
    if not isinstance(quantizer, Affine | MixedBits | Codebook | Polar):
        return f"{quantizer.label} has no Triton kernel"
    if isinstance(quantizer, Polar) and not keys:
        return "values as radius and angle have no Triton kernel"
    if isinstance(quantizer, Codebook) and quantizer.bits == 1:
        return "codebooks of 1 bit have no Triton kernel"
    if isinstance(quantizer, Affine) and quantizer.shared:
        return "a scale that kv heads share has no Triton kernel"
    if isinstance(quantizer, Affine) and quantizer.axis == "channel" and not keys:
        return "values with scales per channel have no Triton kernel"
    if dims not in DIMS:
        return f"Triton reads heads of {', '.join(map(str, DIMS))} dims; got {dims}"
    if isinstance(quantizer, MixedBits):
        return blocks.why_not(quantizer, dims, page)
    at = PlaneLayout(quantizer, dims, page, keys)
    if at.channel and at.group & (at.group - 1):
        return f"groups of {at.group} tokens are no power of two"
    if at.channel and at.group > GROUP:
        return f"groups of {at.group} tokens are more than the {GROUP} that a program quantizes"
    if not at.channel and (dims % at.group or at.group % at.words):
        return f"groups of {at.group} are no multiple of planes of {at.words} dims"
    if page & (page - 1):
        return f"a page of {page} tokens is no power of two"
    return None


def _narrow(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert non-negative int64 words to `dtype`, bit by bit."""
    size = torch.iinfo(dtype).bits
    return (words - ((words >> (size - 1)) << size)).to(dtype)
