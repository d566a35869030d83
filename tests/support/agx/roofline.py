"""Predict decode attention on Apple's GPUs: bytes that `attend_tile` reads against instructions that it issues.

From the project's root, after `make agx`: PYTHONPATH=tests/support python -m agx.roofline

A prediction, nothing measured: the loop over records, by Mesa's code for G13, all issue slots filled, memory at its
published rate, the ends (queries, windows, merge) left out. A product of 8 x 8 matrices is 512 multiply-adds, on 32
lanes 16 cycles. A cell: issue time over memory's time (above 1 instructions are the limit), and time against bfloat16.
"""

import sys
from dataclasses import replace

from metal import texts

from agx import compiler
from agx.__main__ import chosen
from mlxkv.formats.records import record_layout
from mlxkv.metal.predict import CHIPS, CYCLES, SCHEDULERS, token_bytes

SHOWN = ("M1", "M1 Max", "M2 Ultra", "M3 Max", "M4 Max")
# Queries that no scale multiplies: a compiler would leave out products with what is never set.
HELD = "TileB folded[2 * KEPT];\n"
UNSCALED = "#pragma unroll\nfor (int i = 0; i < 2 * KEPT; i++) folded[i] = kv_query<1>(folded, queries, i, lane);\n"
# Cycles of a product of 8 x 8 matrices, and of what stands for it in the code.
MATRIX, MODELLED = 16, 2


def cycles(preset: str, dims: int) -> float:
    """Issue cycles of a simdgroup for a record of 16 tokens and up to 8 query rows."""
    config = texts.config_of(preset, dims)
    layout = record_layout(config, *config.dims(dims, dims))
    keys, blocks, wide = layout.keys, -(-dims // 32), dims > 128
    _, _, _, text = next(chosen([preset], [dims], ["attend_tile"]))
    # Neither happens for every record: scales of channels change, and the running maximum is raised.
    header = text.kernel.header.replace("if (simd_any(exceeds))", "if (false)")
    source = text.kernel.source.replace("if (FOLDED && unit >= fold)", "if (false)")
    source = source.replace(HELD, HELD + UNSCALED)
    assert header != text.kernel.header
    usual = compiler.takes(replace(text.kernel, source=source, header=header), text.threads)
    windows = 2 if wide else 1  # loops before
    loop = _large(usual)[windows]
    at_once = 2 if keys.bits + layout.values.bits < 7 and not wide else 1
    products = 4 * (4 * blocks + 2)
    out = loop.cycles / at_once + products * (MATRIX - MODELLED)
    if keys.channel:
        whole = compiler.takes(replace(text.kernel, header=header), text.threads)
        # Above 128 dims a loop of its own over blocks.
        more = _large(whole)[windows].cycles
        more = more * blocks if wide else more - loop.cycles
        out += (more + 4 * 4 * blocks * (MATRIX - MODELLED)) * 16 / keys.group
    return out


def _large(took: compiler.Takes) -> list[compiler.Loop]:
    return [x for x in took.loops if x.instructions >= 100]


def main() -> None:
    if reason := compiler.why_not():
        sys.exit(f"[agx] {reason}")
    heads = "| preset | dims | bytes a token | cycles a record | "
    print(heads + " | ".join(SHOWN) + " |\n|" + "---|" * (4 + len(SHOWN)))
    for preset in CYCLES:  # the loop of fill-NUMBER depends on the widths of a layer
        for dims in (64, 128, 256):
            read = token_bytes(preset, dims)
            full, issue = 4 * dims, cycles(preset, dims)
            cells = []
            for cores, clock, bandwidth in map(CHIPS.get, SHOWN):
                memory = 16 * read / bandwidth  # ns
                instructions = issue / (SCHEDULERS * cores * clock)
                gain = 16 * full / bandwidth / max(memory, instructions)
                cells.append(f"{instructions / memory:.2f}, {gain:.1f}x")
            row = preset, dims, f"{read:.0f}", f"{issue:.0f}", *cells
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
