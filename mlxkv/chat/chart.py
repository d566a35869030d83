"""A live chart of the memory of two caches in a terminal; plain lines elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from mlxkv.console import human_bytes, say

HEIGHT, WIDTH = 10, 64  # cells of the chart
LABEL = 10  # cells left of it
LINES = 4  # plain lines in all


class Chart:
    """Bytes of two caches over the tokens that they hold, as areas: the second is drawn before the first.

    names: of the caches. total: tokens at the end.
    """

    def __init__(self, names: tuple[str, str], total: int, quiet: bool = False):
        self.names, self.total, self.quiet = names, total, quiet
        self.points: list[tuple[int, int, int]] = []
        self._live: Live | None = None

    def __enter__(self) -> Chart:
        if not self.quiet and sys.stdout.isatty():
            self._live = Live(self.drawing(), console=Console(highlight=False), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exc) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, tokens: int, first: int, second: int) -> None:
        """Note the bytes of both caches when they hold so many tokens."""
        last_tokens = self.points[-1][0] if self.points else 0
        self.points.append((tokens, first, second))
        if self._live is not None:
            self._live.update(self.drawing(), refresh=True)
        elif not self.quiet and tokens * LINES // self.total > last_tokens * LINES // self.total:
            say(f"  {self.line()}")

    def line(self) -> str:
        """Return the last point: '1,024 tokens: fp16 2.5 MiB, int4 1.1 MiB'."""
        tokens, first, second = self.points[-1] if self.points else (0, 0, 0)
        first_name, second_name = self.names
        return f"{tokens:,} tokens: {first_name} {human_bytes(first)}, {second_name} {human_bytes(second)}"

    def drawing(self) -> Group:
        """Return the chart as it is now."""
        largest = max((first for _, first, _ in self.points), default=1)
        done = self.points[-1][0] if self.points else 0
        # The axis is as long as the text, and as high as the whole text will be in the first cache.
        high = max(1, int(largest * self.total / max(done, 1)))
        columns = self._columns(high)
        rows = []
        for row in range(HEIGHT, 0, -1):
            label = human_bytes(high) if row == HEIGHT else ""
            line = Text(f"{label:>{LABEL}} ", "dim")
            for first, second in columns:
                inside = second >= row - 0.5
                line.append("█" if inside else "░" if first >= row - 0.5 else " ", _style(inside))
            rows.append(line)
        end = f"{self.total:,} tokens"
        rows.append(Text(f"{'':>{LABEL}} 0{end:>{WIDTH - 1}}", "dim"))
        key = Text(f"{'':>{LABEL}} ")
        for sign, name, which in (("░", self.names[0], False), ("█", self.names[1], True)):
            key.append(f"{sign} {name}   ", _style(which))
        return Group(*rows, key.append(self.line()))

    def _columns(self, high: int) -> list[tuple[float, float]]:
        """Heights of both caches in cells, for each column that is reached."""
        out, at = [], 0
        for column in range(WIDTH):
            tokens = (column + 1) * self.total / WIDTH
            while at < len(self.points) and self.points[at][0] < tokens:
                at += 1
            if at == len(self.points):
                break
            _, first, second = self.points[at]
            out.append((HEIGHT * first / high, HEIGHT * second / high))
        return out


def _style(inside: bool) -> str:
    return "green" if inside else "red"
