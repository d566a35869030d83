"""The picture of `mlxkv.eval.methods`: bits against quality, a colour per family of presets."""

from __future__ import annotations

import re
from collections.abc import Callable

from mlxkv.eval.arms import BASELINE
from mlxkv.eval.pictures import SETTINGS, SMALLEST, _svg, plt

OURS = "int"  # the presets of plain names: the best measured
Row = dict[str, float]


def _found(row: Row) -> float:
    """Values that were found, in percent, over the kinds of questions."""
    found = row["retrieval"].values()
    return 100 * sum(found) / len(found)


MEASURES: dict[str, Callable[[Row], float]] = {
    "mean KL (nats)": lambda row: max(row["kl_mean"], SMALLEST),
    "99 % KL (nats)": lambda row: max(row["kl_p99"], SMALLEST),
    "facts found (%)": _found,
}


def family(name: str) -> str:
    """What presets of one method have in common: kvarn-int2+fixed -> kvarn, turbo-2.5 -> turbo,
    int4 -> int, polar-tree+online -> polar-tree."""
    plain = name.split("+")[0]
    return re.sub(r"-?(int\d|k\dv\d|\d\.\d)$", "", plain) or OURS


def frontier(points: list[tuple[float, float]], rises: bool) -> list[tuple[float, float]]:
    """Of (bits, measure) those that none with as few bits beats, by bits."""
    best: list[tuple[float, float]] = []
    sign = -1 if rises else 1
    for bits, value in sorted(points, key=lambda p: (p[0], sign * p[1])):
        if not best or sign * value < sign * best[-1][1]:
            best.append((bits, value))
    return best


def overview(reports: list[dict], context: int) -> str:
    """A column per report, a row per measure: SVG. Points are presets; a line joins those of a family
    that no other of it beats."""
    with plt.rc_context(SETTINGS):
        size = (3.4 * len(reports), 3.0 * len(MEASURES))
        figure, axes = plt.subplots(
            len(MEASURES), len(reports), figsize=size, sharex=True, sharey="row", squeeze=False
        )
        tables = [data["rows"][str(context)] for data in reports]
        families = list(dict.fromkeys(family(n) for rows in tables for n in rows if n != BASELINE))
        for column, (data, rows) in enumerate(zip(reports, tables, strict=True)):
            axes[0, column].set_title(f"{data['model']}, {context} tokens")
            axes[-1, column].set_xlabel("bits per value in pages")
            for axis, (label, measure) in zip(axes[:, column], MEASURES.items(), strict=True):
                rises = measure is _found
                axis.set_yscale("linear" if rises else "log")
                if not column:
                    axis.set_ylabel(label)
                for index, one in enumerate(families):
                    _family(axis, one, index, rows, measure, rises)
        handles, names = axes[0, 0].get_legend_handles_labels()
        axes[0, -1].legend(handles, names, loc="upper left", bbox_to_anchor=(1.02, 1))
        figure.tight_layout()
        return _svg(figure)


def _family(axis, one: str, index: int, rows: dict, measure, rises: bool) -> None:
    points = [
        (row["bits_per_value"], measure(row))
        for name, row in rows.items()
        if name != BASELINE and family(name) == one and ("retrieval" in row or not rises)
    ]
    ours = one == OURS
    style = {
        "color": "black" if ours else f"C{index % 10}",
        "marker": "*" if ours else "os^vDPX<>ph"[index % 11],
        "markersize": 11 if ours else 5,
        "zorder": 4 if ours else 3,
    }
    label = "int4, int3, int2" if ours else one
    if points:
        axis.plot(*zip(*points, strict=True), linestyle="", alpha=0.85, label=label, **style)
        best = frontier(points, rises)
        axis.plot(*zip(*best, strict=True), color=style["color"], linewidth=1, alpha=0.6)
