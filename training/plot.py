"""Draw the loss curves of training logs.

python training/plot.py training/results/tiny.csv training/results/tiny-qwen.csv training/loss.png
"""

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 - the backend must be chosen first

LENGTHS = {512: "#d98c3f", 2048: "#3f9a8a", 8192: "#4a5fc1"}


def smooth(values: list[float], span: int = 8) -> list[float]:
    """Return the running mean over up to `span` points."""
    return [
        sum(values[max(0, i - span + 1) : i + 1]) / min(span, i + 1) for i in range(len(values))
    ]


def main(*names: str) -> None:
    *logs, out = map(Path, names)
    figure, axes = plt.subplots(
        2, len(logs), figsize=(6 * len(logs), 6), sharex="col", squeeze=False
    )
    for column, log in zip(axes.T, logs, strict=True):
        rows = list(csv.DictReader(log.open()))
        for axis, key, title in (
            (column[0], "loss_text", "loss on text"),
            (column[1], "loss_answers", "loss on answers"),
        ):
            for length, colour in LENGTHS.items():
                some = [row for row in rows if int(row["length"]) == length]
                x = [int(row["tokens"]) / 1e6 for row in some]
                y = smooth([float(row[key]) for row in some])
                axis.plot(x, y, ".", ms=2.5, color=colour, label=f"length {length}")
            axis.set_yscale("log")
            axis.set_ylabel(title)
            axis.grid(alpha=0.3, which="both")
        column[0].set_title(log.stem)
        column[0].legend(markerscale=4)
        column[1].set_xlabel("million tokens")
    figure.tight_layout()
    figure.savefig(out, dpi=90)


if __name__ == "__main__":
    main(*sys.argv[1:])
