"""Codes -> float16 numbers for matrix units, and packed scales -> float32, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

OFFSET = tl.constexpr(1024.0)
MAGIC = tl.constexpr(0x6400)

# Neighbouring words -> planes of two float16 each: what a lane needs of a fragment. A code may stay
# where it is in the mantissa, where it counts `gain` times: fewer shifts.
FOUR_BITS = tl.constexpr("""{
    .reg .b32 lo, hi, t;
    prmt.b32 lo, $8, $9, 0x5410;
    prmt.b32 hi, $8, $9, 0x7632;
    lop3.b32 $0, lo, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, lo, 0x00f000f0, 0x64006400, 0xea;
    shr.b32 t, lo, 8;
    lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $3, t, 0x00f000f0, 0x64006400, 0xea;
    lop3.b32 $4, hi, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $5, hi, 0x00f000f0, 0x64006400, 0xea;
    shr.b32 t, hi, 8;
    lop3.b32 $6, t, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $7, t, 0x00f000f0, 0x64006400, 0xea;
}""")
FOUR_BITS_SHORT = tl.constexpr("""{
    .reg .b32 t;
    lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
    shr.b32 t, $4, 8;
    lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $3, t, 0x00f000f0, 0x64006400, 0xea;
}""")
TWO_BITS = tl.constexpr("""{
    .reg .b32 t;
    lop3.b32 $0, $8, 0x00030003, 0x64006400, 0xea;
    lop3.b32 $1, $8, 0x000c000c, 0x64006400, 0xea;
    lop3.b32 $2, $8, 0x00300030, 0x64006400, 0xea;
    lop3.b32 $3, $8, 0x00c000c0, 0x64006400, 0xea;
    lop3.b32 $4, $8, 0x03000300, 0x64006400, 0xea;
    shr.b32 t, $8, 10;
    lop3.b32 $5, t, 0x00030003, 0x64006400, 0xea;
    lop3.b32 $6, t, 0x000c000c, 0x64006400, 0xea;
    lop3.b32 $7, t, 0x00300030, 0x64006400, 0xea;
}""")

# The same for values: around the middle code, so that sums of them stay small. Matrix units cut off
# the lowest bits of what they add up, which of 1024 and more would be bits of the output.
FOUR_BITS_SHORT_CENTRED = tl.constexpr(
    FOUR_BITS_SHORT.value
    + """{
    .reg .b32 a, b;
    mov.b32 a, 0x64086408;
    mov.b32 b, 0x64806480;
    sub.rn.f16x2 $0, $0, a;
    sub.rn.f16x2 $1, $1, b;
    sub.rn.f16x2 $2, $2, a;
    sub.rn.f16x2 $3, $3, b;
}"""
)
FOUR_BITS_CENTRED = tl.constexpr(
    FOUR_BITS.value
    + """{
    .reg .b32 a, b;
    mov.b32 a, 0x64086408;
    mov.b32 b, 0x64806480;
    sub.rn.f16x2 $0, $0, a;
    sub.rn.f16x2 $1, $1, b;
    sub.rn.f16x2 $2, $2, a;
    sub.rn.f16x2 $3, $3, b;
    sub.rn.f16x2 $4, $4, a;
    sub.rn.f16x2 $5, $5, b;
    sub.rn.f16x2 $6, $6, a;
    sub.rn.f16x2 $7, $7, b;
}"""
)
TWO_BITS_CENTRED = tl.constexpr(
    TWO_BITS.value
    + """{
    .reg .b32 a, b, c, d, e;
    mov.b32 a, 0x64026402;
    mov.b32 b, 0x64086408;
    mov.b32 c, 0x64206420;
    mov.b32 d, 0x64806480;
    mov.b32 e, 0x66006600;
    sub.rn.f16x2 $0, $0, a;
    sub.rn.f16x2 $1, $1, b;
    sub.rn.f16x2 $2, $2, c;
    sub.rn.f16x2 $3, $3, d;
    sub.rn.f16x2 $4, $4, e;
    sub.rn.f16x2 $5, $5, a;
    sub.rn.f16x2 $6, $6, b;
    sub.rn.f16x2 $7, $7, c;
}"""
)


@triton.jit
def gain_bits(i, BITS: tl.constexpr):
    """log2 of what a code of plane i counts for: where it stays in the mantissa of 1024."""
    return (i % 2) * 4 if BITS == 4 else (i % 5) * 2 if BITS == 2 else i * 0


@triton.jit
def middle(BITS: tl.constexpr):
    """The code around which values are centred."""
    return 1 << (BITS - 1)


@triton.jit
def _plane(words, high, i: tl.constexpr, BITS: tl.constexpr, CENTRED: tl.constexpr):
    """1024 + gain * code of plane i, or gain * (code - middle), float16."""
    wide = words.to(tl.int32)
    if BITS == 4:
        code = (wide >> (i // 2 * 8)) & (15 << (i % 2 * 4))
    elif BITS == 2:
        code = (wide >> (i // 5 * 10)) & (3 << (i % 5 * 2))
    elif BITS == 3:
        code = ((wide >> (2 * i)) & 3) | (((high.to(tl.int32) >> i) & 1) << 2)
    else:
        code = (wide >> (BITS * i)) & ((1 << BITS) - 1)
    value = (code | MAGIC).to(tl.int16).to(tl.float16, bitcast=True)
    if CENTRED:
        shift: tl.constexpr = i % 2 * 4 if BITS == 4 else i % 5 * 2 if BITS == 2 else 0
        value = value - tl.full(value.shape, 1024 + ((1 << (BITS - 1)) << shift), tl.float16)
    return value


@triton.jit
def planes(
    words,
    high,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    ASM: tl.constexpr,
    CENTRED: tl.constexpr = False,
):
    """All planes; of four the last four are repeats that nobody reads."""
    if ASM and BITS == 4 and PLANES == 8:
        return tl.inline_asm_elementwise(
            FOUR_BITS_CENTRED if CENTRED else FOUR_BITS,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
            [words],
            (tl.float16,) * 8,
            is_pure=True,
            pack=2,
        )
    if ASM and BITS == 2 and PLANES == 8:
        return tl.inline_asm_elementwise(
            TWO_BITS_CENTRED if CENTRED else TWO_BITS,
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [words],
            (tl.float16,) * 8,
            is_pure=True,
            pack=2,
        )
    if ASM and BITS == 4 and PLANES == 4:
        a, b, c, d = tl.inline_asm_elementwise(
            FOUR_BITS_SHORT_CENTRED if CENTRED else FOUR_BITS_SHORT,
            "=r,=r,=r,=r,r",
            [words],
            (tl.float16,) * 4,
            is_pure=True,
            pack=2,
        )
        return a, b, c, d, a, a, a, a
    a = _plane(words, high, 0, BITS, CENTRED)
    b = _plane(words, high, 1, BITS, CENTRED)
    c = _plane(words, high, 2, BITS, CENTRED)
    d = _plane(words, high, 3, BITS, CENTRED)
    if PLANES == 4:
        return a, b, c, d, a, a, a, a
    e = _plane(words, high, 4, BITS, CENTRED)
    f = _plane(words, high, 5, BITS, CENTRED)
    g = _plane(words, high, 6, BITS, CENTRED)
    h = _plane(words, high, 7, BITS, CENTRED)
    return a, b, c, d, e, f, g, h


@triton.jit
def halves(numbers):
    """(scale, bias) float32 of packed float16 pairs."""
    scale = (numbers & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    bias = (numbers >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), bias.to(tl.float32)
