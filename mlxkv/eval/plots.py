"""Draw pictures of reports and pages in one style, as SVG text. matplotlib is imported on first use."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from mlxkv.errors import UserError
from mlxkv.eval.arms import BASELINE

SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mlxkv",  # the same picture is the same text
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def available() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


@contextmanager
def pyplot() -> Iterator:
    """Give `matplotlib.pyplot` with SETTINGS and without a window. Raises UserError if matplotlib is missing."""
    if not available():
        raise UserError("[pictures] needs matplotlib; pip install matplotlib")
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with plt.rc_context(SETTINGS):  # pyright: ignore[reportArgumentType]  # its keys are literals
        yield plt


def svg(figure) -> str:
    """Return a figure as the text of an `<svg>` element, and close it."""
    import matplotlib.pyplot as plt

    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


SMALLEST = 1e-7  # the least value on logarithmic axes


def _compressed(rows: dict) -> dict:
    return {name: row for name, row in rows.items() if name != BASELINE}


def method(name: str) -> str:
    """Return a preset's name without its bits: int4 -> int, oscar-int2+g64 -> oscar+g64. A name
    of another form is returned as it is."""
    match = re.fullmatch(r"(?:(.+)-)?int\d(\+[^/]+)?", name)
    return f"{match[1] or 'int'}{match[2] or ''}" if match else name


def _scatter(axis, rows: dict, key: str, label: str) -> None:
    """Plot bits per value against one number of each preset, on a logarithmic axis. A line joins
    the widths of a method."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, row in rows.items():
        point = (row["bits_per_value"], max(row[key], SMALLEST))
        curves.setdefault(method(name), []).append(point)
    for name, points in curves.items():
        index = list(curves).index(name)
        axis.plot(
            *zip(*sorted(points), strict=True),
            marker="os^vDP*X"[index % 8],
            color=f"C{index % 10}",
            linewidth=1,
            alpha=0.85,
            label=name,
            zorder=3,
        )
    for name, row in rows.items() if key == "kl_mean" else ():
        if limits := row.get("kl_interval"):
            index = list(curves).index(method(name))
            ends = [max(x, SMALLEST) for x in limits]
            axis.vlines(row["bits_per_value"], *ends, color=f"C{index % 10}", linewidth=1)
    axis.set_yscale("log")
    axis.set_xlabel("bits per value in pages")
    axis.set_ylabel(label)


def bits(data: dict) -> str | None:
    """Draw bits per value against KL, mean and 99 %, a row for each context; None without such numbers."""
    panels = {context: _compressed(rows) for context, rows in data["rows"].items()}
    panels = {
        context: rows
        for context, rows in panels.items()
        if rows and all("kl_mean" in row for row in rows.values())
    }
    if not panels:
        return None
    with pyplot() as plt:
        size = (11, 4.2 * len(panels))
        figure, axes = plt.subplots(len(panels), 2, figsize=size, sharex=True, squeeze=False)
        for (context, rows), pair in zip(panels.items(), axes, strict=True):
            _scatter(pair[0], rows, "kl_mean", "mean KL (nats)")
            _scatter(pair[1], rows, "kl_p99", "99 % KL (nats)")
            pair[0].set_title(f"{data['model']}, after {context} tokens")
            pair[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
        return svg(figure)
