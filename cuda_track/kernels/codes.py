"""Unpack codes to float16 for matrix units, and scales to float32, in Triton."""

# Kernels are in Triton's language, which its stubs do not make Python: constants are not numbers, loops no iterables.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

OFFSET = tl.constexpr(1024.0)
MAGIC = tl.constexpr(0x6400)

# Neighbouring words become planes of two float16 each, as a lane holds them of a fragment. A code may stay
# where it is in the mantissa and count `gain` times, which saves shifts.
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


@triton.jit
def gain_bits(i, BITS: tl.constexpr):
    """log2 of the gain of plane i: the bit of the mantissa of 1024 at which its code starts."""
    return (i % 2) * 4 if BITS == 4 else (i % 5) * 2 if BITS == 2 else i * 0


@triton.jit
def _plane(words, high, i: tl.constexpr, BITS: tl.constexpr):
    """1024 + gain * code of plane i, float16."""
    wide = words.to(tl.int32)
    if BITS == 4:
        code = (wide >> (i // 2 * 8)) & (15 << (i % 2 * 4))
    elif BITS == 2:
        code = (wide >> (i // 5 * 10)) & (3 << (i % 5 * 2))
    elif BITS == 3:
        code = ((wide >> (2 * i)) & 3) | (((high.to(tl.int32) >> i) & 1) << 2)
    else:
        code = (wide >> (BITS * i)) & ((1 << BITS) - 1)
    return (code | MAGIC).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def planes(words, high, BITS: tl.constexpr, PLANES: tl.constexpr, ASM: tl.constexpr):
    """All planes. ASM: by PTX, where there is some."""
    if ASM and BITS == 4 and PLANES == 8:
        return tl.inline_asm_elementwise(
            FOUR_BITS,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
            [words],
            (tl.float16,) * 8,
            is_pure=True,
            pack=2,
        )
    if ASM and BITS == 2 and PLANES == 8:
        return tl.inline_asm_elementwise(
            TWO_BITS, "=r,=r,=r,=r,=r,=r,=r,=r,r", [words], (tl.float16,) * 8, is_pure=True, pack=2
        )
    if ASM and BITS == 4 and PLANES == 4:
        return tl.inline_asm_elementwise(
            FOUR_BITS_SHORT, "=r,=r,=r,=r,r", [words], (tl.float16,) * 4, is_pure=True, pack=2
        )
    out = ()
    for i in tl.static_range(PLANES):
        out += (_plane(words, high, i, BITS),)
    return out


@triton.jit
def at_record(field, place, RECORD):
    """Return where tensor `field` of record `place` lies. RECORD: 32-bit words of a record."""
    return field + place * (RECORD * (32 // field.dtype.element_ty.primitive_bitwidth))


@triton.jit
def halves(numbers):
    """(scale, bias) float32 of packed float16 pairs."""
    scale = (numbers & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    bias = (numbers >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), bias.to(tl.float32)
