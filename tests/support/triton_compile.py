"""Triton's kernels, or those named behind the folder, compiled for an NVIDIA GPU that need not be there: prints a
line per kernel.

A program of its own: in the process of the tests the interpreter takes the place of the compiler.
"""

import re
import subprocess
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cuda_track.kernels.blocks import BlockLayout
from cuda_track.kernels.decode import Constants, SideConstants, attend_kernel
from cuda_track.kernels.dequantize import dequantize_kernel
from cuda_track.kernels.encode import quantize_kernel, quantize_polar_kernel
from cuda_track.kernels.mixed_bits import (
    MixedConstants,
    attend_mixed_kernel,
    block_constants,
    dequantize_mixed_kernel,
    quantize_mixed_kernel,
)
from cuda_track.kernels.transform import (
    many_merge_kernel,
    many_queries_kernel,
    merge_kernel,
    queries_kernel,
)
from cuda_track.vllm import kernels as vllm
from mlxkv.formats.quantizers import MixedBits

TYPES = {
    attend_kernel: {
        **dict.fromkeys(("plain", "sink_k", "sink_v", "recent_k", "recent_v"), "*bf16"),
        **dict.fromkeys(("sums", "factors", "part_out", "part_top", "part_sum"), "*fp32"),
        **dict.fromkeys(("k_numbers", "v_numbers", "table", "pages"), "*i32"),
        **{
            "q": "*fp16",
            "k_high": "*i8",
            "v_high": "*i8",
            "mask": "*u8",
            "plain_scale": "fp32",
            "cap": "fp32",
        },
    },
    queries_kernel: {
        **{"q": "*bf16", "up": "*fp32", "out": "*fp16", "sums": "*fp32", "factors": "*fp32"},
        "scale": "fp32",
    },
    merge_kernel: {
        **dict.fromkeys(("part_out", "part_top", "part_sum", "up", "sinks"), "*fp32"),
        "out": "*bf16",
    },
    dequantize_kernel: {
        "high": "*i8",
        **dict.fromkeys(("numbers", "table", "pages"), "*i32"),
        "out": "*bf16",
    },
    quantize_kernel: {
        **{"x": "*bf16", "down": "*bf16", "high": "*i8", "numbers": "*i32", "places": "*i64"}
    },
}
TYPES[quantize_polar_kernel] = TYPES[quantize_kernel]
TYPES[attend_mixed_kernel] = {
    **TYPES[attend_kernel],
    **dict.fromkeys(("k_words", "v_words"), "*i16"),
    **dict.fromkeys(("k_odd", "v_odd"), "*i8"),
}
TYPES[quantize_mixed_kernel] = {
    **{"x": "*bf16", "down": "*bf16", "words": "*i16", "odd": "*i8", "numbers": "*i32"},
    **{"places": "*i64", "dims": "*fp32", "recipe": "*i32"},
}
TYPES[dequantize_mixed_kernel] = {
    **{"words": "*i16", "odd": "*i8", "out": "*bf16"},
    **dict.fromkeys(("numbers", "table", "pages", "block_places"), "*i32"),
}
TYPES[many_queries_kernel], TYPES[many_merge_kernel] = TYPES[queries_kernel], TYPES[merge_kernel]
FILLED = dict.fromkeys(("numbers", "lengths", "starts", "near_table", "table"), "*i32")
TYPES[vllm.attend_blocks_kernel] = {
    **TYPES[attend_kernel],
    **{"exact": "*bf16", "near_table": "*i32"},
    **dict.fromkeys(("lengths", "starts", "part_used"), "*i32"),
}
TYPES[vllm.keep_kernel] = {
    **{"key": "*bf16", "value": "*bf16", "mean": "*fp32", "exact": "*bf16", "slots": "*i64"}
}
TYPES[vllm.quantize_filled_kernel] = {**FILLED, "exact": "*bf16", "down": "*bf16", "high": "*i8"}
TYPES[vllm.quantize_filled_mixed_kernel] = {
    **{**FILLED, "exact": "*bf16", "down": "*bf16", "words": "*i16", "odd": "*i8"},
    **{"dims": "*fp32", "recipe": "*i32"},
}
WORDS = {("int4", 128): "*i16", ("int2", 128): "*i16", ("int4", 64): "*i16"}
STRIDES = ("_stride", "_row", "_head")  # multiples of 16 in every call
SIZES = {"R": 128, "N": 8}
PAGES = {
    "T": 64,
    "PAGE": 64,
    "RECORD": 64 * 36,
    "CHANNEL": 0,
    "WINDOW": 32,
    "MASKED": False,
    "CAPPED": False,
    "ASM": True,
}
PAGES |= {"STAGES": 3, "WIDE": False}
SIDE = {"BITS": 4, "PLANES": 4, "GROUPS": 2}


def attending(side: dict, values: dict | None = None, **sizes: int) -> dict:
    sides = {"K": SideConstants(**side), "V": SideConstants(**(values or side))}
    return {"C": Constants(**{**sides, **SIZES, **PAGES, **sizes}), "CHAINED": True, "EARLY": False}


INT2 = {"BITS": 2, "PLANES": 8, "GROUPS": 1}
SHORT = {"BITS": 4, "PLANES": 4, "GROUPS": 1}
POLAR = {"BITS": 4, "PLANES": 4, "GROUPS": 1, "KIND": "polar"}
CODEBOOKS = {
    bits: {"BITS": bits, "PLANES": 4 if bits == 4 else 8, "GROUPS": 1} for bits in (2, 3, 4)
}
CODEBOOKS = {bits: side | {"KIND": "codebook"} for bits, side in CODEBOOKS.items()}
STEP_TOKENS = {"D": 128, **SIZES, "TURNED": True, "CHAINED": True}
QUANTIZE = {
    "D": 128,
    "R": 128,
    "T": 128,
    "SYMMETRIC": False,
    "TURNED": True,
    "PARTS": 3,
    "BLOCK": 32,
}
QUANTIZE |= {"FUSED": True, "KIND": "affine"}
BY_TOKEN, BY_CHANNEL = {"PAGE": 64, "CHANNEL": 0}, {"PAGE": 128, "CHANNEL": 128}


def attending_blocks(keys: tuple[int, ...], values: tuple[int, ...], **sizes: int) -> dict:
    """Constants of attention over mixed bits with these widths."""
    of_keys, of_values = (
        block_constants(BlockLayout(MixedBits(2.0, x), 64, x is keys)) for x in (keys, values)
    )
    same = {name: x for name, x in PAGES.items() if name not in ("T", "CHANNEL")}
    constants = MixedConstants(of_keys, of_values, **{**SIZES, **same, **sizes})
    return {"C": constants, "CHAINED": True}


MIXED = (4, 4, 3, 3, 2, 2, 1, 1), (3, 3, 2, 2, 2, 1, 1)  # 128 dims, the values in half a tile more
WIDE = (8, *(4,) * 3, *(3,) * 4, *(2,) * 4, *(1,) * 4), (*(3,) * 3, *(2,) * 8, *(1,) * 2)
EXACT = vllm.Exact(16, 64, 64, 4096)
PAGE_OF_BLOCKS = {"D": 128, "PAGE": 64, "TOKENS": 16, "SINK": 64, "BLOCK": 32}
PLANES = {**PAGE_OF_BLOCKS, "R": 128, "SYMMETRIC": False, "RANK": 1, "FUSED": True}


def attending_vllm(constants: dict, mixed: bool) -> dict:
    return {"C": constants["C"], "X": EXACT, "MIXED": mixed, "CHAINED": True}


CASES = {
    "attend mixed bits": (attend_mixed_kernel, attending_blocks(*MIXED), None, 1),
    "attend mixed bits 64": (
        attend_mixed_kernel,
        attending_blocks((8, 4, 3, 1), (3, 2, 2), R=64),
        *(None, 1),
    ),
    "attend mixed bits 256": (
        attend_mixed_kernel,
        attending_blocks(*WIDE, R=256, WINDOW=16),
        *(None, 1),
    ),
    "quantize mixed bits": (
        quantize_mixed_kernel,
        {
            **{n: QUANTIZE[n] for n in ("D", "T", "TURNED", "PARTS", "BLOCK")},
            "PAGE": 64,
            "KEYS": True,
        },
        *(None, 8),
    ),
    "dequantize mixed bits": (dequantize_mixed_kernel, {"PAGE": 64, "KEYS": False}, None, 4),
    "vllm attend int4": (
        vllm.attend_blocks_kernel,
        attending_vllm(attending(SIDE, WINDOW=16, CHANNEL=64, STAGES=5), False),
        *(("int4", 128), 1),
    ),
    "vllm attend mixed bits": (
        vllm.attend_blocks_kernel,
        attending_vllm(attending_blocks(*MIXED, WINDOW=16), True),
        *(("int4", 128), 1),
    ),
    "vllm keep": (vllm.keep_kernel, {"D": 128, "TOKENS": 16, "CENTRED": True}, None, 1),
    "vllm quantize channels": (
        vllm.quantize_filled_kernel,
        {**PLANES, **SHORT, "CHANNEL": 64, "KEYS": True, "TURNED": False, "PARTS": 0},
        *(("int4", 128), 4),
    ),
    "vllm quantize": (
        vllm.quantize_filled_kernel,
        {**PLANES, **SIDE, "CHANNEL": 0, "KEYS": False, "TURNED": True, "PARTS": 3},
        *(("int4", 128), 4),
    ),
    "vllm quantize mixed bits": (
        vllm.quantize_filled_mixed_kernel,
        {**PAGE_OF_BLOCKS, "KEYS": True, "TURNED": True, "PARTS": 3},
        *(None, 4),
    ),
    "attend int4": (attend_kernel, attending(SIDE), ("int4", 128), 1),
    "attend int2 channels": (*(attend_kernel, attending(INT2, **BY_CHANNEL), ("int2", 128), 1),),
    **{
        f"attend codebook of {bits} bits": (
            attend_kernel,
            attending(side),
            ("int4", 128),
            1 + bits // 4,
        )
        for bits, side in CODEBOOKS.items()
    },
    "attend codebook of 256 dims": (
        attend_kernel,
        attending(CODEBOOKS[4], R=256),
        *(("int4", 128), 2),
    ),
    "attend polar keys": (
        attend_kernel,
        attending(POLAR, SHORT, T=32, PAGE=128, CHANNEL=128),
        *(("int4", 128), 2),
    ),
    "queries of many": (many_queries_kernel, {**STEP_TOKENS, **SIDE, "M": 8}, None, 8),
    "merge of many": (
        many_merge_kernel,
        {**STEP_TOKENS, "SPLITS": 16, "SINKS": True, "CHUNK": 16, "M": 8},
        *(None, 8),
    ),
    "quantize": (
        *(
            quantize_kernel,
            {**QUANTIZE, **INT2, **BY_TOKEN, "RANK": 6, "KEYS": False},
            ("int2", 128),
            8,
        ),
    ),
    "quantize channels": (
        *(
            quantize_kernel,
            {**QUANTIZE, **INT2, **BY_CHANNEL, "RANK": 1, "KEYS": True},
            ("int2", 128),
            4,
        ),
    ),
    **{
        f"quantize codebook of {bits} bits": (
            quantize_kernel,
            {**QUANTIZE, **side, **BY_TOKEN, "RANK": 1, "KEYS": True},
            *(("int4", 128), 8),
        )
        for bits, side in CODEBOOKS.items()
    },
    **{
        f"quantize polar keys of {bits} bits": (
            quantize_polar_kernel,
            {
                **{"R": 128, "PAGE": 128, "BITS": bits, "PLANES": CODEBOOKS[bits]["PLANES"]},
                **{"RADIUS": bits, "ANGLE": bits, "PAIRS": 32},
            },
            *(("int4", 128), 4),
        )
        for bits in (2, 3, 4)
    },
    "dequantize": (
        *(
            dequantize_kernel,
            {"R": 128, "T": 64, **INT2, **BY_TOKEN, "KEYS": False, "KIND": "affine"},
            ("int2", 128),
            4,
        ),
    ),
    "dequantize codebook": (
        dequantize_kernel,
        {"R": 128, "T": 64, **CODEBOOKS[4], **BY_TOKEN, "KEYS": False},
        *(("int4", 128), 4),
    ),
    "dequantize polar keys": (
        dequantize_kernel,
        {"R": 128, "T": 32, **POLAR, **BY_CHANNEL, "KEYS": True},
        *(("int4", 128), 4),
    ),
}


def compiled(kernel, constants: dict, words: str, warps: int):
    types = TYPES[kernel]
    signature = {
        name: "constexpr"
        if name.isupper()
        else types.get(name, words if name.endswith("words") else "i32")
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or (name.endswith(STRIDES) and name != "mask_row")
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps})


def main() -> None:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin = Path(sys.argv[1]) / "kernel.cubin"
    for name in sys.argv[2:] or CASES:
        kernel, constants, words, warps = CASES[name]
        made = compiled(kernel, constants, WORDS.get(words, "*i32"), warps)
        cubin.write_bytes(made.asm["cubin"])
        command = [tool, "-res-usage", cubin]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
        print(f"{name}: {registers} registers, {stack} stack, {made.metadata.shared} shared")


if __name__ == "__main__":
    main()
