"""Draw pictures in one style, as SVG text. matplotlib is imported on first use."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from mlxkv.errors import UserError

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

    with plt.rc_context(SETTINGS):
        yield plt


def svg(figure) -> str:
    """Return a figure as the text of an `<svg>` element, and close it."""
    import matplotlib.pyplot as plt

    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]
