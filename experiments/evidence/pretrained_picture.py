"""Draw KL of pretrained models against bits per value, and against the context."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.evidence.cells import OURS, Cells
from mlxkv.eval import plots
from mlxkv.eval.arms import BASELINE

BITS, CONTEXTS = "bits.svg", "contexts.svg"
CONTEXT = 8192  # of the first picture, or the longest below it
LINES = ("int4", "fill-4", "fill-3", "fill-2.25", "int2", "naive-int4", "kivi-int2")
COLOURS = {"ours": "#0b5cad", "mlx-lm": "#c2410c", "papers": "#6b7280"}
LABELS = {"ours": "mlxkv's presets", "mlx-lm": "mlx-lm's codes", "papers": "methods of papers"}
MOST_BITS = 5.3  # 8 bits would press the others together
OWN = ("int", "fill-", "centred-")


def drawn(models: Mapping[str, Cells], names: Mapping[str, str]) -> dict[str, str]:
    """Return the SVG text of both pictures, by file."""
    return {BITS: against_bits(models, names), CONTEXTS: against_context(models, names)}


def maker(preset: str) -> str:
    if preset.startswith("naive-"):
        return "mlx-lm"
    return "ours" if preset.startswith(OWN) else "papers"


def against_bits(models: Mapping[str, Cells], names: Mapping[str, str]) -> str:
    with plots.pyplot() as plt:
        figure, axes = plt.subplots(1, len(models), figsize=(5.2 * len(models), 6.8), squeeze=False)
        for axis, (name, cells) in zip(axes[0], models.items(), strict=True):
            context = max((c for c in cells.contexts if c <= CONTEXT), default=cells.contexts[0])
            presets = [
                p
                for p in cells.presets(OURS, context)
                if p != BASELINE and cells.bits[p] <= MOST_BITS
            ]
            points = {p: (cells.bits[p], cells.kl(p, context).value) for p in presets}
            axis.set_xlim(1.0, MOST_BITS + 0.9)
            axis.set_xticks([2, 3, 4, 5])
            axis.set_title(f"{names.get(name, name)}, {cells.lengths[context]:,} tokens")
            axis.set_xlabel("bits per value")
            plots.scatter(figure, axis, points, lambda name: COLOURS[maker(name)])
        axes[0, 0].set_ylabel("mean KL over texts (nats)")
        for kind, label in LABELS.items():
            axes[0, 0].plot([], [], "o", color=COLOURS[kind], label=label)
        figure.legend(loc="upper center", ncol=3, bbox_to_anchor=(0.5, 1.05))
        figure.tight_layout()
        return plots.svg(figure)


def against_context(models: Mapping[str, Cells], names: Mapping[str, str]) -> str:
    with plots.pyplot() as plt:
        figure, axes = plt.subplots(
            1, len(models), figsize=(4.6 * len(models), 4.6), sharey=True, squeeze=False
        )
        for axis, (name, cells) in zip(axes[0], models.items(), strict=True):
            ends = {}
            for i, preset in enumerate(LINES):
                contexts = [c for c in cells.contexts if cells.measured(preset, c)]
                if not contexts:
                    continue
                means = [cells.kl(preset, c).value for c in contexts]
                dashed = maker(preset) != "ours"
                axis.plot(
                    contexts,
                    means,
                    "o--" if dashed else "o-",
                    color=f"C{i}",
                    markersize=4,
                    linewidth=1.5,
                )
                ends[preset] = (contexts[-1], means[-1], f"C{i}")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(cells.contexts, [f"{c // 1024}K" for c in cells.contexts])
            axis.minorticks_off()
            axis.set_title(names.get(name, name))
            axis.set_xlabel("context, tokens")
            axis.set_ylim(5e-4, 10)
            axis.set_xlim(0.85 * cells.contexts[0], 3.2 * cells.contexts[-1])
            _at_the_ends(figure, axis, ends)
        axes[0, 0].set_ylabel("mean KL over texts (nats)")
        figure.tight_layout()
        return plots.svg(figure)


def _at_the_ends(figure, axis, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Write each name right of the end of its line, none on another."""
    figure.canvas.draw()
    size, scale = 9, figure.dpi / 72
    above = float("inf")
    for name, (x, y, colour) in sorted(ends.items(), key=lambda end: -end[1][1]):
        place = axis.transData.transform((x, y))[1]
        target = min(place, above - 1.25 * size * scale)
        above = target
        axis.annotate(
            name,
            (x, y),
            xytext=(8, (target - place) / scale),
            textcoords="offset points",
            fontsize=size,
            va="center",
            color=colour,
        )
