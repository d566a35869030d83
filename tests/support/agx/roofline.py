"""Predict decode attention on Apple's GPUs: bytes that a body reads against instructions that it issues.

From the project's root, after `make agx`: PYTHONPATH=tests/support python -m agx.roofline [PRESETS [DIMS [ROWS]]]

A prediction, nothing measured: the loop over records, by Mesa's code for G13, all issue slots filled, memory at its
published rate, the ends (queries, windows, merge) left out. A product of 8 x 8 matrices is 512 multiply-adds, on 32
lanes 16 cycles. A cell: issue time over memory's time (above 1 instructions are the limit), and time against bfloat16.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from metal import texts

from agx import compiler
from mlxkv.formats.layout import BLOCK, TOKENS
from mlxkv.formats.records import RecordLayout, record_layout
from mlxkv.metal import attend
from mlxkv.metal.predict import CHIPS, SCHEDULERS, TILE_ROWS, token_bytes

SHOWN = ("M1", "M1 Max", "M2 Ultra", "M3 Max", "M4 Max")
PRESETS = (
    "int8",
    "int4",
    "int3",
    "int2",
)  # the loop of fill-NUMBER depends on the widths of a layer
DIMS, ROWS = (64, 128, 256), (1, 2, 3, 4, 8)
RAISED = "if (simd_any(exceeds))"  # the running maximum, which few records do
# Queries that no scale multiplies: a compiler would leave out products with what is never set.
HELD = "TileB folded[2 * KEPT];\n"
UNSCALED = "#pragma unroll\nfor (int i = 0; i < 2 * KEPT; i++) folded[i] = kv_query<1>(folded, queries, i, lane);\n"
# Cycles of a product of 8 x 8 matrices, and of what stands for it in the code.
MATRIX, MODELLED = 16, 2
LARGE = 90  # instructions of a loop over dims or records, at least


@dataclass(frozen=True)
class Count:
    """Cycles of a simdgroup for a record of 16 tokens. moves: of these, copies between registers, and spills.
    rows: query rows that they serve."""

    cycles: float
    moves: float
    rows: int


def layout_of(preset: str, dims: int) -> RecordLayout:
    config = texts.config_of(preset, dims)
    return record_layout(config, *config.dims(dims, dims))


def text_of(preset: str, dims: int, rows: int, name: str) -> texts.Text:
    """The text of a chat with `rows` query heads to a kv head, in bfloat16."""
    make = texts.Recorder()
    with texts.reading_once():
        texts.record(preset, dims, "bfloat16", make, groups=(rows,))
    found = (text for text in make.texts.values() if text.name == name)
    return next(text for text in found if any(use.step == "attend 1" for use in text.uses))


def by_multiply_adds(preset: str, dims: int, rows: int) -> Count:
    """Count `attend`: the loop over pairs of records, and of those inside it one over blocks of dims, which comes last,
    and one over query rows, where scales of channels are multiplied into queries."""
    layout, text = layout_of(preset, dims), text_of(preset, dims, rows, "attend")
    header = text.kernel.header.replace(RAISED, "if (false)")
    assert header != text.kernel.header
    took = compiler.takes(replace(text.kernel, header=header), text.threads)
    tile, parts, _ = attend.tile_of(layout, dims, rows)
    blocks = -(-layout.keys.blocks // parts)
    record = max(took.nests, key=lambda nest: nest.unpacks)
    *folds, keys = record.inner
    pairs_of_fold = (layout.keys.group if layout.keys.channel else 2 * TOKENS) // (2 * TOKENS)
    rows_at_once = max(1, 4 // blocks) if blocks != 3 else 1
    own = record.cycles - record.first  # what comes before the loop over blocks is for each fold
    folded = record.first + sum(fold.cycles for fold in folds) * -(-tile // rows_at_once)
    cycles = own + blocks * keys.whole("cycles") + folded / pairs_of_fold
    moves = record.moves + blocks * keys.whole("moves")
    return Count(cycles * parts / 2, moves * parts / 2, tile)


def by_tiles(preset: str, dims: int) -> Count:
    """Count `attend_tile`, which takes as long for one query row as for eight."""
    layout = layout_of(preset, dims)
    keys, blocks, wide = layout.keys, -(-dims // BLOCK), dims > 128
    text = text_of(preset, dims, 4, "attend_tile")
    # Neither happens for every record: scales of channels change, and the running maximum is raised.
    header = text.kernel.header.replace(RAISED, "if (false)")
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
    return Count(out, 0.0, TILE_ROWS)


def _large(took: compiler.Takes) -> list[compiler.Loop]:
    return [x for x in took.loops if x.instructions >= LARGE]


def cells(preset: str, dims: int, rows: int, count: Count) -> list[str]:
    """Issue time over memory's time, and the gain over bfloat16 bound by memory, of each chip."""
    read, full, out = token_bytes(preset, dims), 4 * dims, []
    for cores, clock, bandwidth in map(CHIPS.__getitem__, SHOWN):
        memory = TOKENS * read / bandwidth  # ns
        issue = -(-rows // count.rows) * count.cycles / (SCHEDULERS * cores * clock)
        out.append(f"{issue / memory:.2f}, {TOKENS * full / bandwidth / max(memory, issue):.1f}x")
    return out


def main() -> None:
    if reason := compiler.why_not():
        sys.exit(f"[agx] {reason}")
    given = sys.argv[1:] + [""] * 3
    presets: Sequence[str] = given[0].split(",") if given[0] else PRESETS
    dims, rows = (
        [int(n) for n in x.split(",")] if x else usual
        for x, usual in zip(given[1:3], (DIMS, ROWS), strict=True)
    )
    heads = "| preset | dims | rows | body | bytes a token | cycles a record | of these moves | "
    print(heads + " | ".join(SHOWN) + " |\n|" + "---|" * (7 + len(SHOWN)), flush=True)
    for preset in presets:
        for dim in dims:
            tiles = by_tiles(preset, dim)
            for row in rows:
                counts = {"attend": by_multiply_adds(preset, dim, row), "attend_tile": tiles}
                for body, count in counts.items():
                    read, times = token_bytes(preset, dim), -(-row // count.rows)
                    numbers = (
                        f"{read:.0f}",
                        f"{times * count.cycles:.0f}",
                        f"{times * count.moves:.0f}",
                    )
                    line = preset, dim, row, body, *numbers, *cells(preset, dim, row, count)
                    print(f"| {' | '.join(map(str, line))} |", flush=True)


if __name__ == "__main__":
    main()
