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


@triton.constexpr_function
def _levels(dims, bits):
    """Return levels by code, as a pool has them: the sign, then the rank of the size."""
    from mlxkv.formats import levels  # here, since what kernels refer to has to be Triton's

    table, middle = levels.sphere(dims, bits).tolist(), 1 << (bits - 1)
    return table[:middle][::-1] + table[middle:]


@triton.constexpr_function
def level(dims, bits, i):
    """Return level i of a codebook."""
    return _levels(dims, bits)[i]


@triton.constexpr_function
def boundary(dims, bits, i):
    """Return what parts levels i and i + 1 of a codebook."""
    table = _levels(dims, bits)
    return (table[i] + table[i + 1]) / 2


@triton.constexpr_function
def lookup(dims, bits):
    """Return PTX that makes two words of 16 bits, of codes of 2 or 4 bits, into planes of two levels each, float16.

    `prmt` looks four codes up in a table of 8 bytes: one has the low bytes of levels, one the high ones. 4 bits are a
    sign and a table of 8 sizes. 21 instructions for 8 codes, 27 for 16 of 2 bits; affine codes take 5 and 9.
    """
    import numpy as np

    table = _levels(dims, bits)
    sizes = np.array(table[8:] if bits == 4 else table, np.float16).view(np.uint16)
    low, high = (sum(int(x) << 8 * i for i, x in enumerate(y)) for y in (sizes & 255, sizes >> 8))
    parts = {name: (x & 0xFFFFFFFF, x >> 32) for name, x in (("low", low), ("high", high))}
    count = 16 // bits
    # Nibbles of the words a and b: s0 is a0 b0 a2 b2, s1 is a1 b1 a3 b3.
    lines = [
        ".reg .b32 t, u, s0, s1, low, high;",
        f"and.b32 t, ${count}, 0x0f0f;",
        f"shr.b32 u, ${count}, 12;",
        "lop3.b32 s0, t, u, 0xf0f0, 0xf8;",
        f"shr.b32 t, ${count}, 4;",
        "and.b32 t, t, 0x0f0f;",
        f"shr.b32 u, ${count}, 16;",
        "lop3.b32 s1, t, u, 0xf0f0, 0xf8;",
    ]
    for i in range(count // 2):  # planes i and i + count / 2
        nibbles, odd = f"s{i // (count // 4)}", bits == 2 and i % 2
        lines += [f"shr.b32 u, {nibbles}, 2;"] if odd else []
        used = "0x3333" if bits == 2 else "0x7777"
        lines += [f"and.b32 t, {'u' if odd else nibbles}, {used};"]
        lines += [f"prmt.b32 {name}, {a:#x}, {b:#x}, t;" for name, (a, b) in parts.items()]
        for out, bytes_of in ((i, "0x5140"), (i + count // 2, "0x7362")):
            lines.append(f"prmt.b32 ${out}, low, high, {bytes_of};")
            if bits == 4:  # without a 1 on top a level is negative
                lines.append(f"shl.b32 u, ${count}, {12 - 4 * out};")
                lines.append(f"lop3.b32 ${out}, ${out}, u, 0x80008000, 0xf2;")
    return "{ " + " ".join(lines) + " }"


@triton.jit
def gain_bits(i, BITS: tl.constexpr):
    """log2 of the gain of plane i: the bit of the mantissa of 1024 at which its code starts."""
    return (i % 2) * 4 if BITS == 4 else (i % 5) * 2 if BITS == 2 else i * 0


@triton.jit
def _code(words, high, i: tl.constexpr, BITS: tl.constexpr):
    """Codes of plane i, int32."""
    wide = words.to(tl.int32)
    if BITS == 3:
        return ((wide >> (2 * i)) & 3) | (((high.to(tl.int32) >> i) & 1) << 2)
    return (wide >> (BITS * i)) & ((1 << BITS) - 1)


@triton.jit
def _plane(words, high, i: tl.constexpr, BITS: tl.constexpr):
    """1024 + gain * code of plane i, float16."""
    wide = words.to(tl.int32)
    if BITS == 4:
        code = (wide >> (i // 2 * 8)) & (15 << (i % 2 * 4))
    elif BITS == 2:
        code = (wide >> (i // 5 * 10)) & (3 << (i % 5 * 2))
    else:
        code = _code(words, high, i, BITS)
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
def level_of(code, R: tl.constexpr, BITS: tl.constexpr):
    """Levels of int32 codes, float32."""
    x = tl.full(code.shape, level(R, BITS, 0), tl.float32)
    for i in tl.static_range(1, 2**BITS):
        x = tl.where(code == i, level(R, BITS, i), x)
    return x


@triton.jit
def level_planes(
    words, high, R: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, ASM: tl.constexpr
):
    """All planes of levels, float16."""
    if ASM and BITS == 4 and PLANES == 4:
        return tl.inline_asm_elementwise(
            lookup(R, BITS), "=r,=r,=r,=r,r", [words], (tl.float16,) * 4, is_pure=True, pack=2
        )
    if ASM and BITS == 2 and PLANES == 8:
        return tl.inline_asm_elementwise(
            lookup(R, BITS),
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [words],
            (tl.float16,) * 8,
            is_pure=True,
            pack=2,
        )
    out = ()
    for i in tl.static_range(PLANES):
        out += (level_of(_code(words, high, i, BITS), R, BITS).to(tl.float16),)
    return out


@triton.jit
def cos_and_sin(angle, ASM: tl.constexpr):
    """(cos, sin) of angles between 0 and 2 pi; by PTX within 2^-20, which float16 does not see."""
    if ASM:
        return tl.inline_asm_elementwise(
            "cos.approx.f32 $0, $2; sin.approx.f32 $1, $2;",
            "=&f,=f,f",
            [angle],
            (tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return tl.cos(angle), tl.sin(angle)


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
