"""Draw the roofline: bits per value against the predicted gain over bfloat16, four query rows, 128 dims, five chips.

From the project's root, after `make agx`: PYTHONPATH=tests/support python -m agx.picture [FOLDER]

Writes roofline.svg. Solid: what runs (`attend`), dashed: matrix tiles, grey: as many bytes fewer as are read.
"""

import sys
from pathlib import Path

from agx import compiler, roofline
from mlxkv.eval import plots
from mlxkv.metal.predict import CHIPS, SCHEDULERS, token_bytes

DIMS, ROWS = 128, 4
SHOWN = ("int8", "int4", "int3", "int2")  # on the line; mixed bits beside it
COLOURS = ("#1b6ca8", "#c8553d", "#3b7a57", "#8a5a9e", "#b8860b")  # of chips


def gain(preset: str, cycles: float, chip: str) -> float:
    """Time of bfloat16 bound by memory over that of the preset, whose record takes these issue cycles."""
    cores, clock, bandwidth = CHIPS[chip]
    issue = cycles / (SCHEDULERS * cores * clock)
    full, read = (roofline.TOKENS * n / bandwidth for n in (4 * DIMS, token_bytes(preset, DIMS)))
    return full / max(issue, read)


def bits(preset: str) -> float:
    """Bits per value, scales included."""
    return 8 * token_bytes(preset, DIMS) / (2 * DIMS)


def draw() -> str:
    """The picture, as the text of an SVG element."""
    ours = {p: roofline.by_multiply_adds(p, DIMS, ROWS).cycles for p in (*SHOWN, roofline.FILL)}
    tiles = {p: roofline.by_tiles(p, DIMS).cycles for p in SHOWN}
    with plots.pyplot() as plt:
        figure, axis = plt.subplots(figsize=(7.6, 4.6))
        places = [bits(p) for p in SHOWN]
        axis.plot(places, [16 / b for b in places], color="0.6", linewidth=1.5, label="bytes alone")
        for chip, colour in zip(roofline.SHOWN, COLOURS, strict=True):
            axis.plot(
                places, [gain(p, ours[p], chip) for p in SHOWN], "o-", color=colour, label=chip
            )
            axis.plot(
                places, [gain(p, tiles[p], chip) for p in SHOWN], "--", color=colour, linewidth=1
            )
            fill = roofline.FILL
            axis.plot([bits(fill)], [gain(fill, ours[fill], chip)], "D", color=colour, markersize=4)
        for preset, place in zip(SHOWN, places, strict=True):
            axis.annotate(preset, (place, 1.0), ha="center", fontsize=9)
        axis.annotate(f"{roofline.FILL} ◆", (2.05, 1.3), ha="right", fontsize=9)
        axis.set_xlim(9, 2)
        axis.set_ylim(0.8, 7.6)
        axis.set_xlabel("bits per value, scales included")
        axis.set_ylabel("predicted gain of decode attention over bfloat16")
        axis.set_title(
            f"{ROWS} query rows a kv head, {DIMS} dims; dashed: matrix tiles", fontsize=10
        )
        axis.legend(loc="upper left", fontsize=9)
        return plots.svg(figure)


def main() -> None:
    if reason := compiler.why_not():
        sys.exit(f"[agx] {reason}")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")
    (folder / "roofline.svg").write_text(f"{draw()}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
