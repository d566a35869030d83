"""Draw KL over int2's against bits read, a panel a model: published methods in grey, ours above them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.evidence.rows import Row
from mlxkv import plots
from mlxkv.eval import intervals

PANELS, WIDEST = 3, 5.2  # bits
GREY = "#8a8a8a"
INT, FILL, PAGES, ORACLE, NESTED = (
    "int2, int3, int4",
    "fill",
    "fewer pages",
    "the same, oracle",
    "nested",
)
STYLES = {
    INT: ("*", "black", 11),
    FILL: ("o", "#0072b2", 6),
    PAGES: ("s", "#d55e00", 6),
    ORACLE: ("s", "#d55e00", 6),
    NESTED: ("D", "#009e73", 6),
}
NAMED = ("oscar-int2", "kivi-int2", "turbo-int2", "naive-int2", "polar-tree", "kvarn-int3")
NAMED += ("naive-int4", "kivi-int4", "turbo-int3")
# What is drawn of the studies; what a code adds to int2 or fill lies on the marks of these.
DRAWN = {"int2": INT, "int3": INT, "int4": INT}
DRAWN |= dict.fromkeys(("fill-2.25", "fill-2.5", "fill-3", "fill-4.5"), FILL)
DRAWN |= dict.fromkeys(
    (f"2.25: {codes} {rank}" for codes in ("int4", "fill-3") for rank in ("diagonal", "boxes")),
    PAGES,
)
DRAWN |= {"2.25: int4 diagonal8 32": PAGES, "nested fill 1.6+1.3 base 0.125": NESTED}
DRAWN |= dict.fromkeys((f"2.25: {codes} oracle" for codes in ("int4", "fill-3")), ORACLE)
DRAWN |= dict.fromkeys(("nested fill 2+2 base", "nested fill 2+2 whole"), NESTED)
DRAWN |= dict.fromkeys((f"nested fill 2+2 base {share}" for share in (0.125, 0.25)), NESTED)
DRAWN |= dict.fromkeys((f"nested base {share}" for share in (0.125, 0.25)), NESTED)
LOWEST, HIGHEST, DECADE, LINE = (
    0.02,
    6.0,
    109.0,
    9.0,
)  # of KL; points of a decade, and of a line of text


def panels(found: dict[tuple, dict[str, dict]], beside: Sequence[Row]) -> str:
    """Return SVG text. found: arms by (model, context). beside: rows of published methods, of any context, over the
    `int2` of their own texts."""
    some = [(key, arms) for key, arms in found.items() if "int2" in arms][:PANELS]
    with plots.pyplot() as plt:
        figure, axes = plt.subplots(
            1, len(some), figsize=(5 * len(some), 4.8), sharey=True, squeeze=False
        )
        for axis, ((model, context), arms) in zip(axes[0], some, strict=True):
            _published(axis, [row for row in beside if row["model"] == model])
            labels, beside_marks = set(), []
            for name, one in arms.items():
                if name not in DRAWN:
                    continue
                group = DRAWN[name]
                mark, colour, size = STYLES[group]
                pair = intervals.ratio(one["kl"], arms["int2"]["kl"])
                low, high = (pair.low, pair.high) if pair.known else (pair.value, pair.value)
                axis.errorbar(
                    [one["bits"]],
                    [pair.value],
                    yerr=[[max(0, pair.value - low)], [max(0, high - pair.value)]],
                    marker=mark,
                    markersize=size,
                    color=colour,
                    markerfacecolor="white" if group == ORACLE else colour,
                    linestyle="",
                    elinewidth=1.2,
                    label=None if group in labels else group,
                    zorder=4,
                )
                labels.add(group)
                if group in (PAGES, ORACLE):
                    said = name.removeprefix("2.25: ")
                    beside_marks.append((pair.value, one["bits"], said, colour))
            _named(axis, beside_marks)
            axis.set_yscale("log")
            axis.set_xlim(1.1, WIDEST)
            axis.set_ylim(LOWEST, HIGHEST)
            axis.set_title(f"{model}, {context} tokens", fontsize=11)
            axis.set_xlabel("bits read per value and decode step")
        axes[0, 0].set_ylabel("mean KL over int2's")
        handles, names = axes[0, 0].get_legend_handles_labels()
        for axis in axes[0, 1:]:
            for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
                if name not in names:
                    handles.append(handle)
                    names.append(name)
        figure.legend(handles, names, loc="lower center", ncols=len(names), fontsize=9)
        figure.tight_layout(rect=(0, 0.07, 1, 1))
        return plots.svg(figure)


def _named(axis, marks: Sequence[tuple[float, float, str, str]]) -> None:
    """Write the name of each mark (KL, bits, name, colour) on its left, below the one above it."""
    last = float("inf")
    for value, bits, said, colour in sorted(marks, reverse=True):
        at = DECADE * np.log10(value / LOWEST)
        last = min(at, last - LINE)
        axis.annotate(
            said,
            (bits, value),
            xytext=(-7, last - at),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=8,
            color=colour,
        )


def _published(axis, rows: Sequence[Row]) -> None:
    kl: dict[str, dict[str, float]] = {}
    bits: dict[str, float] = {}
    for row in rows:
        kl.setdefault(row["preset"], {})[row["text"]] = row["kl"]
        bits[row["preset"]] = row["bits_per_value"]
    if "int2" not in kl:
        return
    base, drawn = kl.pop("int2"), False
    for name, own in kl.items():
        ours = name in ("int3", "int4", "int8") or name.startswith("fill-")
        if ours or bits[name] > WIDEST or set(base) - set(own):
            continue
        value = np.mean([own[text] for text in base]) / np.mean(list(base.values()))
        axis.plot(
            [bits[name]],
            [max(value, 1e-3)],
            marker="x",
            color=GREY,
            linestyle="",
            markersize=5,
            label=None if drawn else "published methods, 4096 tokens",
            zorder=2,
        )
        drawn = True
        if name in NAMED:
            axis.annotate(
                name,
                (bits[name], value),
                xytext=(5, 3),
                textcoords="offset points",
                fontsize=7.5,
                color="#555555",
            )
