"""Predict decode attention on Apple's GPUs: bytes that a body reads against instructions that it issues.

From the project's root, after `make agx`: PYTHONPATH=tests/support python -m agx.roofline [PRESETS [DIMS [ROWS]]]

A prediction, nothing measured: the loop over records, by Mesa's code for G13, all issue slots filled, memory at its
published rate. First table: the ends (queries, windows, merge) left out; a product of 8 x 8 matrices is 512
multiply-adds, on 32 lanes 16 cycles; last cells: issue time over memory's time (above 1 instructions are the limit),
and time against bfloat16 bound by memory. Second table: calls of `attend` with their ends and with the threadgroups
that a chip has cores for. Third: what is added to a prompt's attention.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from metal import texts

from agx import compiler
from mlxkv.formats.layout import BLOCK, TOKENS
from mlxkv.formats.records import RecordLayout, record_layout
from mlxkv.metal import attend
from mlxkv.metal.predict import CHIPS, SCHEDULERS, TILE_ROWS, token_bytes

SHOWN = ("M1", "M1 Max", "M2 Ultra", "M3 Max", "M4 Max")
# The loop of fill-NUMBER depends on the widths of a layer: all its blocks have codes of 1, 2 or 4 bits, or all of 3.
FILL, FILL_3 = "fill-2.25", "fill-3"
PRESETS = ("int8", "int4", "int3", FILL_3, FILL, "int2")
SPECIAL = "first.y < KV_MIXED_SPECIAL"
WIDTHS = {  # of the text of mixed bits: what is always so
    FILL: {SPECIAL: "true"},
    FILL_3: {
        SPECIAL: "false",
        "(flags & KV_MIXED_EIGHT) != 0u": "false",
        "(flags & KV_MIXED_THIRD) != 0u": "true",
        "(flags & KV_MIXED_THIRD_HALF_ROW) != 0u": "false",
    },
}
TILE_SPECIAL = "if (int(entry.y) < 0)"
DIMS, ROWS = (64, 128, 256), (1, 2, 3, 4, 8)
RAISED = "if (simd_any(exceeds))"  # the running maximum, which few records do
# Queries that no scale multiplies: a compiler would leave out products with what is never set.
HELD = "TileB folded[2 * KEPT];\n"
UNSCALED = "#pragma unroll\nfor (int i = 0; i < 2 * KEPT; i++) folded[i] = kv_query<1>(folded, queries, i, lane);\n"
# Cycles of a product of 8 x 8 matrices, and of what stands for it in the code.
MATRIX, MODELLED = 16, 2
LARGE = 90  # instructions of a loop over dims or records, at least


TOKENS_OF_CALL, KV_HEADS, BATCHES = 8192, 8, (1, 8)  # of the second table
CHUNK = 2048  # tokens of a prompt that are read at once
FLOPS = 64  # of a scheduler and cycle: 32 multiply-adds


@dataclass(frozen=True)
class Count:
    """Cycles of a simdgroup for a record of 16 tokens, by `compiler.KINDS`. rows: query rows that they serve."""

    kinds: np.ndarray
    rows: int

    @property
    def cycles(self) -> float:
        """Cycles of all kinds."""
        return float(self.kinds.sum())


def layout_of(preset: str, dims: int) -> RecordLayout:
    config = texts.config_of(_text_preset(preset), dims)
    return record_layout(config, *config.dims(dims, dims))


def _text_preset(preset: str) -> str:
    return texts.MIXED_BITS if preset in WIDTHS else preset


def text_of(preset: str, dims: int, rows: int, name: str, step: str = "attend 1") -> texts.Text:
    """The text of a chat with `rows` query heads to a kv head, in bfloat16."""
    make = texts.Recorder()
    with texts.reading_once():
        texts.record(_text_preset(preset), dims, "bfloat16", make, groups=(rows,))
    found = (text for text in make.texts.values() if text.name == name)
    return next(text for text in found if any(use.step == step for use in text.uses))


def _replaced(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def _taken(preset: str, dims: int, rows: int) -> tuple[compiler.Takes, compiler.Nest]:
    """What `attend` takes, and its loop over pairs of records. The maximum is raised for few records."""
    text = text_of(preset, dims, rows, "attend")
    header = _replaced(text.kernel.header, WIDTHS.get(preset, {}) | {RAISED: "if (false)"})
    took = compiler.takes(replace(text.kernel, header=header), text.threads)
    return took, max(took.nests, key=lambda nest: nest.unpacks)


def by_multiply_adds(preset: str, dims: int, rows: int) -> Count:
    """Count `attend`: the loop over pairs of records, and of those inside it one over blocks of dims, which comes last,
    and one over query rows, where scales of channels are multiplied into queries. Of mixed bits: of each record, one
    over blocks of keys, and one over values."""
    layout, (_, record) = layout_of(preset, dims), _taken(preset, dims, rows)
    tile, parts, _ = attend.tile_of(layout, dims, rows)
    own, first = np.array(record.kinds), np.array(record.first)
    if preset in WIDTHS:
        keys, values = record.inner
        (block,) = keys.inner
        blocks = 2 * -(-dims // (BLOCK * parts))
        of_block, of_record = np.array(block.kinds), np.add(keys.kinds, values.kinds)
        return Count((own + 2 * (of_record + blocks * of_block)) * parts / 2, tile)
    blocks = -(-layout.keys.blocks // parts)
    *folds, keys = record.inner
    pairs_of_fold = (layout.keys.group if layout.keys.channel else 2 * TOKENS) // (2 * TOKENS)
    rows_at_once = max(1, 4 // blocks) if blocks != 3 else 1
    # What comes before the loop over blocks is for each fold.
    fold = sum((np.array(x.kinds) for x in folds), np.zeros_like(own))
    folded = first + fold * -(-tile // rows_at_once)
    return Count((own - first + blocks * _whole(keys) + folded / pairs_of_fold) * parts / 2, tile)


def _whole(nest: compiler.Nest) -> np.ndarray:
    """Cycles of a loop and those inside it, one turn of each."""
    return np.array(nest.kinds) + sum(map(_whole, nest.inner))


def ends(preset: str, dims: int, rows: int) -> float:
    """About the cycles of a simdgroup of `attend` outside of that loop: queries are read, and mapped if the preset
    transforms keys; outputs are added and written."""
    took, record = _taken(preset, dims, rows)
    at = took.nests.index(record)
    _, _, simdgroups = attend.tile_of(layout_of(preset, dims), dims, rows)
    # Loops over dims, of which one maps queries 16 dims a turn; then that over windows, which have threadgroups of
    # their own.
    *before, _ = took.nests[:at]
    turns, cycles = -(-dims // (32 * simdgroups)), sum(took.outside)
    for loop in (*before, *took.nests[at + 1 :]):
        cycles += turns * (loop.cycles + dims / 16 * sum(x.cycles for x in loop.inner))
    return cycles


def by_tiles(preset: str, dims: int) -> Count:
    """Count `attend_tile`, which takes as long for one query row as for eight."""
    layout = layout_of(preset, dims)
    keys, blocks, wide = layout.keys, -(-dims // BLOCK), dims > 128
    text = text_of(preset, dims, 4, "attend_tile")
    # Neither happens for every record: scales of channels change, and the running maximum is raised.
    header = _replaced(text.kernel.header, {RAISED: "if (false)"})
    source = text.kernel.source.replace("if (FOLDED && unit >= fold)", "if (false)")
    source = source.replace(HELD, HELD + UNSCALED)
    if preset == FILL:
        source = _replaced(source, {TILE_SPECIAL: "if (false)"})
    usual = compiler.takes(replace(text.kernel, source=source, header=header), text.threads)
    windows = 2 if wide else 1  # loops before
    loop = np.array(_large(usual)[windows].kinds)
    at_once = 2 if keys.bits + layout.values.bits < 7 and not wide else 1
    out = loop / at_once
    out[0] += 4 * (4 * blocks + 2) * (MATRIX - MODELLED)
    if keys.channel:
        whole = compiler.takes(replace(text.kernel, header=header), text.threads)
        # Above 128 dims a loop of its own over blocks.
        more = np.array(_large(whole)[windows].kinds)
        more = more * blocks if wide else more - loop
        more[0] += 4 * 4 * blocks * (MATRIX - MODELLED)
        out += more * 16 / keys.group
    return Count(out, TILE_ROWS)


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


def call(preset: str, dims: int, rows: int, batch: int, chip: str) -> tuple[float, float, float]:
    """(us, issue time over memory's, share of the ends in the issue time) of `attend` over TOKENS_OF_CALL tokens:
    cores take whole threadgroups, each simdgroup whole pairs of records."""
    cores, clock, bandwidth = CHIPS[chip]
    count, records = by_multiply_adds(preset, dims, rows), TOKENS_OF_CALL // TOKENS
    tile, parts, simdgroups = attend.tile_of(layout_of(preset, dims), dims, rows)
    tiles, heads = -(-rows // tile), batch * KV_HEADS
    splits, _ = attend.splits_for(records, 0, heads * tiles * simdgroups, cores)
    pairs = -(-records // (splits * 2 * simdgroups // parts))
    fixed = ends(preset, dims, rows)
    each = fixed + pairs * count.cycles * 2 / parts
    threadgroups = -(-heads * tiles * splits // cores)  # of a core
    issue = threadgroups * simdgroups * each / (SCHEDULERS * clock)  # ns
    memory = heads * TOKENS_OF_CALL * token_bytes(preset, dims) / bandwidth
    return max(issue, memory) / 1000, issue / memory, fixed / each


def prompt(preset: str, dims: int) -> tuple[float, float]:
    """Cycles of a simdgroup to quantize and to dequantize a record, keys and values: at most, loops take a turn for
    every block."""
    blocks = -(-dims // BLOCK)
    layout = layout_of(preset, dims)
    quantize = "quantize_channel" if layout.keys.channel else "quantize"
    out = []
    for name, step in ((quantize, "prefill quantize"), ("dequantize", "dequantize")):
        text = text_of(preset, dims, 4, name, step)
        took = compiler.takes(text.kernel, text.threads)
        out.append(sum(took.outside) + blocks * sum(float(_whole(x).sum()) for x in took.nests))
    return out[0], out[1]


def prompt_cells(preset: str, dims: int, rows: int) -> list[str]:
    """Issue over memory's time of quantizing by chip; and the attention of a chunk, full precision's over ours."""
    quantize, dequantize = prompt(preset, dims)
    moved, out = TOKENS * (4 * dims + token_bytes(preset, dims)), []
    for cores, clock, bandwidth in map(CHIPS.__getitem__, SHOWN):
        out.append(f"{quantize / (SCHEDULERS * cores * clock) / (moved / bandwidth):.2f}")
    for before in (CHUNK, 16 * CHUNK):  # tokens in pages
        products = rows * CHUNK * (before + CHUNK / 2) * 4 * dims / FLOPS
        more = CHUNK / TOKENS * quantize + before / TOKENS * dequantize
        out.append(f"{products / (products + more):.3f}")
    return [f"{quantize:.0f}", f"{dequantize:.0f}", *out]


def table(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    """Print a table of Markdown, line by line."""
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads), flush=True)
    for line in lines:
        print(f"| {' | '.join(map(str, line))} |", flush=True)
    print()


def main() -> None:
    if reason := compiler.why_not():
        sys.exit(f"[agx] {reason}")
    given = sys.argv[1:] + [""] * 3
    presets: Sequence[str] = given[0].split(",") if given[0] else PRESETS
    dims, rows = (
        [int(n) for n in x.split(",")] if x else usual
        for x, usual in zip(given[1:3], (DIMS, ROWS), strict=True)
    )

    def records() -> Iterator[list[object]]:
        for preset in presets:
            for dim in dims:
                for row in rows:
                    for body, count in _bodies(preset, dim, row).items():
                        kinds = -(-row // count.rows) * count.kinds
                        numbers = [f"{token_bytes(preset, dim):.0f}", f"{kinds.sum():.0f}"]
                        numbers += [f"{n:.0f}" for n in kinds]
                        yield [preset, dim, row, body, *numbers, *cells(preset, dim, row, count)]

    def calls() -> Iterator[list[object]]:
        for preset in presets:
            for dim in dims:
                for batch in BATCHES:
                    found = [call(preset, dim, 4, batch, chip) for chip in SHOWN]
                    shown = [
                        f"{us:.0f}, {ratio:.2f}, {100 * end:.0f} %" for us, ratio, end in found
                    ]
                    yield [preset, dim, batch, *shown]

    bytes_, cycles = "bytes a token", "cycles a record"
    table(["preset", "dims", "rows", "body", bytes_, cycles, *compiler.KINDS, *SHOWN], records())
    table(["preset", "dims", "batch", *SHOWN], calls())
    chunks = [f"chunk after {n:,}" for n in (CHUNK, 16 * CHUNK)]
    heads = ["preset", "dims", "quantize", "dequantize", *SHOWN, *chunks]
    table(heads, ([p, d, *prompt_cells(p, d, 4)] for p in presets for d in dims))


def _bodies(preset: str, dims: int, rows: int) -> dict[str, Count]:
    bodies = {"attend": by_multiply_adds(preset, dims, rows)}
    if preset != FILL_3:  # tiles of mixed bits: without branches
        bodies["attend_tile"] = by_tiles(preset, dims)
    return bodies


if __name__ == "__main__":
    main()
