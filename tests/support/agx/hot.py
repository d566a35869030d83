"""Print the loop over records of `attend`, part by part: turns for two records, and issue cycles by kind.

From the project's root, after `make agx`: PYTHONPATH=tests/support python -m agx.hot [PRESET [DIMS [ROWS]]]
"""

import sys

import numpy as np

from agx import compiler, roofline
from mlxkv.formats.layout import BLOCK, TOKENS
from mlxkv.metal import attend


def parts(preset: str, dims: int, rows: int) -> list[tuple[str, float, np.ndarray]]:
    """(part, turns of a simdgroup for 32 tokens, cycles of a turn by kind) of a preset without mixed bits."""
    layout, (_, record) = roofline.layout_of(preset, dims), roofline._taken(preset, dims, rows)
    tile, shared_by, _ = attend.tile_of(layout, dims, rows)
    *folds, keys = record.inner
    own, first = np.array(record.kinds), np.array(record.first)
    blocks = -(-dims // (BLOCK * shared_by))
    out = []
    if layout.keys.channel:
        turns = 2 * TOKENS / layout.keys.group
        rows_at_once = max(1, 4 // blocks)
        out.append(("scales of channels, loaded", turns, first))
        for fold in folds:
            out.append(
                (
                    "scales times the queries of a row",
                    turns * -(-tile // rows_at_once),
                    np.array(fold.kinds),
                )
            )
    out.append((f"keys: a block of {BLOCK} dims", blocks, roofline._whole(keys)))
    out.append(("scores, softmax, weights, values", 1, own - first))
    return out


def main() -> None:
    if reason := compiler.why_not():
        sys.exit(f"[agx] {reason}")
    given = sys.argv[1:]
    preset, dims, rows = (*given, *("int4", "128", "4")[len(given) :])[:3]
    found = parts(preset, int(dims), int(rows))
    roofline.table(
        ["part", "turns", "cycles a turn", *compiler.KINDS],
        [[name, f"{turns:g}", kinds.sum(), *kinds] for name, turns, kinds in found],
    )
    print("cycles for 32 tokens:", f"{sum(turns * kinds.sum() for _, turns, kinds in found):.0f}")


if __name__ == "__main__":
    main()
