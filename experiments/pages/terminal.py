"""Take the picture of a terminal: `python -m experiments.pages.terminal` (`make pictures`).

Runs a command in a pseudo-terminal, keeps what its screen shows at the end, and writes it as
docs/pictures/terminal.svg, with --png terminal.png, too. Nothing is edited: the picture is the run. A minute on two
cores.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from html import escape
from itertools import groupby
from pathlib import Path

from experiments.options import Parser
from experiments.pages.memory import DARK, FOLDER, WIDTH, png
from mlxkv import console
from mlxkv.errors import MachineError

COMMAND = "mlxkv demo --tokens 1k"
COLUMNS, ROWS = 98, 60
ESCAPE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|([\r\n])|(.)", re.S)
COLOURS = {"31": "#ff7b72", "32": "#3fb950", "33": "#d29922", "34": "#58a6ff", "36": "#39c5cf"}
CELL = (WIDTH - 28) / COLUMNS  # pixels
LINE = 20
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SHADES = {"█": 1.0, "░": 0.32}  # drawn as areas: fonts differ

Cell = tuple[str, str, bool]  # character, colour, dim


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("pages.terminal", __doc__)
    parser.add_argument("--command", default=COMMAND)
    parser.add_argument("--png", action="store_true", help="write terminal.png, too")
    args = parser.parse_args(arguments)
    rows = screen(record(args.command))
    path = FOLDER / "terminal.svg"
    path.write_text(svg(args.command, rows), encoding="utf-8")
    if args.png:
        png(path)
    print(f"{path.relative_to(FOLDER.parents[1])}: written", file=sys.stderr)


def record(command: str) -> str:
    """What a command that begins with mlxkv writes to a terminal of COLUMNS by ROWS. Raises MachineError."""
    name, *words = command.split()
    arguments = [sys.executable, "-m", name, *words]
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    clean = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        arguments,
        stdin=its,
        stdout=its,
        stderr=its,
        cwd=root,
        env=clean | {"TERM": "xterm-256color"},
    ) as run:
        os.close(its)
        parts = []
        while part := _read(own):
            parts.append(part)
    os.close(own)
    if run.returncode:
        raise MachineError(f"[pages.terminal] {command} ended with exit code {run.returncode}")
    return b"".join(parts).decode()


def _read(end: int) -> bytes:
    try:
        return os.read(end, 65536)
    except OSError:  # the other end is closed
        return b""


def screen(text: str) -> list[list[Cell]]:
    """The lines that a terminal of COLUMNS shows after `text`: line ends, lines up, erased lines, colours."""
    rows: list[list[Cell]] = [[]]
    row = column = 0
    colour, dim = "", False
    for found in ESCAPE.finditer(text):
        numbers, order, control, sign = found.groups()
        if order == "m":
            for code in numbers.split(";"):
                if code in ("", "0"):
                    colour, dim = "", False
                elif code == "2":
                    dim = True
                elif code in COLOURS:
                    colour = COLOURS[code]
        elif order == "A":
            row = max(0, row - int(numbers or 1))
        elif order == "K":
            rows[row] = [] if numbers == "2" else rows[row][:column]
        elif control == "\r":
            column = 0
        elif control == "\n":
            row += 1
            rows += [[] for _ in range(row + 1 - len(rows))]
        elif sign:
            if column == COLUMNS:
                row, column = row + 1, 0
                rows += [[] for _ in range(row + 1 - len(rows))]
            line = rows[row]
            line += [(" ", "", False)] * (column + 1 - len(line))
            line[column] = sign, colour, dim
            column += 1
    while rows and not rows[-1]:
        rows.pop()
    return rows


def svg(command: str, rows: list[list[Cell]]) -> str:
    """The picture: a prompt with the command, then the rows."""
    prompt = [(sign, "", False) for sign in f"$ {command}"]
    prompt[0] = ("$", COLOURS["32"], False)
    body = []
    for number, row in enumerate([prompt, *rows]):
        y = 48 + number * LINE
        column = 0
        for kind, run in groupby(row, key=_kind):
            signs = "".join(cell[0] for cell in run)
            if signs.strip():
                body.append(_run(signs, 14 + column * CELL, y, *kind))
            column += len(signs)
    height = 48 + (1 + len(rows)) * LINE
    dots = "".join(
        f'<circle cx="{22 + 18 * i}" cy="18" r="5.5" fill="{colour}"/>'
        for i, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" font-family="{FONT}" font-size="{CELL / 0.602:.2f}" role="img">',
            f"<title>{escape(command)}</title>",
            f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="9" fill="{DARK.paper}" '
            f'stroke="{DARK.weights}"/>',
            dots,
            *body,
            "</svg>",
            "",
        ]
    )


def _kind(cell: Cell) -> tuple[str, str, bool]:
    """What cells of one run share: shade, colour, dim."""
    sign, colour, dim = cell
    return (sign if sign in SHADES else "", colour, dim)


def _run(signs: str, x: float, y: int, shade: str, colour: str, dim: bool) -> str:
    colour, width = colour or DARK.ink, len(signs) * CELL
    if shade:
        return (
            f'<rect x="{x:.1f}" y="{y - 15}" width="{width + 0.3:.1f}" height="{LINE}.3" fill="{colour}" '
            f'fill-opacity="{SHADES[shade]}"/>'
        )
    lead = len(signs) - len(signs.lstrip())
    words = signs.strip().replace(" ", "\u00a0")  # SVG joins other spaces
    faint = ' fill-opacity=".65"' if dim else ""
    return (
        f'<text x="{x + lead * CELL:.1f}" y="{y}" fill="{colour}"{faint} textLength="{len(words) * CELL:.1f}" '
        f'lengthAdjust="spacingAndGlyphs">{escape(words)}</text>'
    )


if __name__ == "__main__":
    console.run_tool(main)
