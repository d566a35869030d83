"""Draw mean KL against bits with intervals, at most three panels."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.evidence.table import Block, Entry
from experiments.methods import family
from mlxkv import plots
from mlxkv.eval import intervals
from mlxkv.eval.report.pictures import SMALLEST

PANELS = 3
# Ours, mlx-lm's codes, two rivals; tables have the rest.
SHOWN = ("fill", "int", "naive", "kivi", "oscar")
NAMES = {
    "fill": "fill-4, fill-3, fill-2.25, fill-1.6",
    "int": "int4, int3, int2",
    "naive": "mlx-lm's codes",
    "kivi": "KIVI",
    "oscar": "OSCAR",
}
OURS = ("fill", "int")
NEAR, STEP = 0.04, 0.06  # bits
MOST = 6.0  # bits: 8 are as good as exact, and would flatten the rest
TUNED = "+sink"  # in the names that selection chose: hollow marks


def panels(blocks: Sequence[Block]) -> str:
    """Return SVG text: a panel for each of the first blocks. Marks are presets, bars their intervals
    over texts; ours are black. Presets of about the same bits stand side by side. Of the methods only
    SHOWN are drawn, or as many others where a block has none of them."""
    some = list(blocks)[:PANELS]
    with plots.pyplot() as plt:
        figure, axes = plt.subplots(
            1, len(some), figsize=(4.2 * len(some), 4), sharey=True, squeeze=False
        )
        measured = list(dict.fromkeys(family(e.name) for b in some for e in b.whole()))
        families = [one for one in SHOWN if one in measured] or measured[: len(SHOWN)]
        handles: dict[str, object] = {}
        for axis, block in zip(axes[0], some, strict=True):
            shown = [e for e in block.whole() if family(e.name) in families and e.bits <= MOST]
            for entry in shown:
                one = family(entry.name)
                found = intervals.mean(block.values(entry.name))
                low, high = (found.low, found.high) if found.known else (found.value, found.value)
                value = max(found.value, SMALLEST)
                ours, index = one in OURS, families.index(one)
                color = "black" if ours else f"C{index % 10}"
                handles[one] = axis.errorbar(
                    [entry.bits + _aside(entry, shown)],
                    [value],
                    yerr=[[max(0.0, value - max(low, SMALLEST))], [max(0.0, high - value)]],
                    marker="P" if one == "fill" else "*" if ours else "os^vDPX<>ph"[index % 11],
                    markersize={"fill": 7, "int": 10}.get(one, 5),
                    markerfacecolor="white" if TUNED in entry.name else color,
                    color=color,
                    linestyle="",
                    elinewidth=0.9,
                    zorder=4 if ours else 3,
                )
            axis.set_yscale("log")
            axis.set_title(f"{block.model}, {block.context} tokens", fontsize=10)
            axis.set_xlabel("bits per value in pages")
        axes[0, 0].set_ylabel("mean KL over texts (nats)")
        names = [NAMES.get(one, one) for one in handles]
        axes[0, -1].legend(
            list(handles.values()), names, loc="center left", bbox_to_anchor=(1.02, 0.5)
        )
        figure.tight_layout()
        return plots.svg(figure)


def _aside(entry: Entry, entries: Sequence[Entry]) -> float:
    """Return how far a mark is moved, in bits, so that those of the same bits do not hide each other."""
    same = [one.name for one in entries if abs(one.bits - entry.bits) < NEAR]
    return STEP * (same.index(entry.name) - (len(same) - 1) / 2)
