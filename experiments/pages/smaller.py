"""Have pictures take fewer bytes: `python -m experiments.pages.smaller FILE.svg...`.

Of what matplotlib writes, coordinates keep one decimal, lines are not indented, and styles that come again and again
become classes, named by what they say, so that several pictures may stand in one page.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from experiments.options import Parser
from mlxkv import console

OFTEN = 3  # times that a style is written, before it becomes a class
COORDINATE = re.compile(r'(?<=[ "\n])(-?\d+\.\d)\d+(?=[ "\n])')
AROUND = re.compile(r"[ \t]*\n[ \t]*")  # a break of a line
STYLE = re.compile(r' style="([^"]+)"')


def smaller(svg: str) -> str:
    """Return the picture; one that is small already stays as it is."""
    svg = AROUND.sub("\n", svg)
    text = re.sub(r'(?<=[ "\n])(-?\d+)\.0(?=[ "\n])', r"\1", COORDINATE.sub(r"\1", svg))
    counts = Counter(STYLE.findall(text))
    names = {s: f"s{sha256(s.encode()).hexdigest()[:6]}" for s, n in counts.items() if n >= OFTEN}
    if not names or "</style>" not in text:
        return text
    text = STYLE.sub(lambda m: f' class="{names[m[1]]}"' if m[1] in names else m[0], text)
    rules = "".join(f".{name}{{{style}}}\n" for style, name in sorted(names.items()))
    return text.replace("</style>", rules + "</style>", 1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser("pages.smaller", __doc__)
    parser.add_argument("files", type=Path, nargs="+", help="pictures, which are overwritten")
    for file in parser.parse_args(arguments).files:
        text = file.read_text(encoding="utf-8")
        file.write_text(smaller(text), encoding="utf-8")
        console.note(f"{file}: {len(text):,} -> {len(smaller(text)):,} bytes")


if __name__ == "__main__":
    console.run_tool(main)
