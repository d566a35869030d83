"""Draw pictures of reports and pages in one style, as SVG text. matplotlib is imported on first use."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
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
    """Yield `matplotlib.pyplot` with SETTINGS and without a window. Raises UserError if matplotlib is missing."""
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


SMALLEST = 1e-7  # least value on logarithmic axes


def scatter(
    figure, axis, points: Mapping[str, tuple[float, float]], colour: Callable[[str], str]
) -> None:
    """Plot points (x, y) by name, y on a logarithmic axis, after the limits of x are set. Each name is written beside
    its point, moved up or down until it lies on no other name or point. colour: of a name."""
    for name, (x, y) in points.items():
        axis.plot([x], [y], "o", color=colour(name), markersize=5)
    axis.set_yscale("log")
    figure.canvas.draw()
    at = {name: axis.transData.transform(point) for name, point in points.items()}
    size, scale = 8.5, figure.dpi / 72
    high = 1.18 * size * scale
    boxes_used: list[tuple[float, float, float, float]] = []
    dots = [(x - 8, y - 8, x + 8, y + 8) for x, y in at.values()]
    for name in sorted(at, key=lambda n: -at[n][1]):
        x, y = at[name]
        wide = 0.58 * size * scale * len(name)
        steps = [0.0] + [s * k * high / 4 for k in range(1, 80) for s in (1, -1)]
        sides = (x + 9, x - 9 - wide)
        boxes = [
            (a, y + step - high / 2, a + wide, y + step + high / 2) for step in steps for a in sides
        ]
        low, top = axis.bbox.y0, axis.bbox.y1
        free = (
            box
            for box in boxes
            if box[0] >= axis.bbox.x0 + 2
            and low <= box[1]
            and box[3] <= top
            and not any(_meet(box, obstacle) for obstacle in [*boxes_used, *dots])
        )
        box = next(free, boxes[0])
        boxes_used.append(box)
        middle = ((box[0]) - x) / scale, ((box[1] + box[3]) / 2 - y) / scale
        axis.annotate(
            name,
            points[name],
            xytext=middle,
            textcoords="offset points",
            fontsize=size,
            va="center",
            color=colour(name),
            arrowprops={
                "arrowstyle": "-",
                "color": "#bbbbbb",
                "linewidth": 0.6,
                "shrinkA": 1,
                "relpos": (0.0 if middle[0] > 0 else 1.0, 0.5),
            }
            if abs(middle[1]) > size / 2
            else None,
        )


def _meet(a: tuple, b: tuple) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def bits(data: dict) -> str | None:
    """Draw bits per value against KL, mean and 99 %, a row for each context; None without such numbers."""
    panels = {}
    for context, rows in data["rows"].items():
        rows = {name: row for name, row in rows.items() if name != BASELINE}
        if rows and all("kl_mean" in row for row in rows.values()):
            panels[context] = rows
    if not panels:
        return None
    with pyplot() as plt:
        size = (11, 4.2 * len(panels))
        figure, axes = plt.subplots(len(panels), 2, figsize=size, squeeze=False)
        for (context, rows), pair in zip(panels.items(), axes, strict=True):
            pair[0].set_title(f"{data['model']}, after {context} tokens")
            _against_bits(figure, pair[0], rows, "kl_mean", "mean KL (nats)")
            _against_bits(figure, pair[1], rows, "kl_p99", "99 % KL (nats)")
        return svg(figure)


def _against_bits(figure, axis, rows: dict, key: str, label: str) -> None:
    """Plot bits per value against one number of each preset, with the interval of its mean."""
    colours = {name: f"C{index % 10}" for index, name in enumerate(rows)}
    points = {name: (row["bits_per_value"], max(row[key], SMALLEST)) for name, row in rows.items()}
    widths = [x for x, _ in points.values()]
    axis.set_xlim(min(widths) - 0.5, max(widths) + 1.5)
    axis.set_xlabel("bits per value in pages")
    axis.set_ylabel(label)
    for name, row in rows.items() if key == "kl_mean" else ():
        if limits := row.get("kl_interval"):
            ends = [max(x, SMALLEST) for x in limits]
            axis.vlines(row["bits_per_value"], *ends, color=colours[name], linewidth=1)
    scatter(figure, axis, points, colours.__getitem__)
