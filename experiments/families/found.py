"""What is found of one family, and the configurations that it is tried with; no framework of models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlxkv.formats.affine import Full
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.names import parse_kv
from mlxkv.machine import machine
from mlxkv.models.catalog.reports import LayerReport, ranges
from mlxkv.versions import versions

PROMPT, NEW = 45, 20  # tokens; pages are sealed while reading and while writing
WINDOWS = {"sink": 4, "recent": 16, "page": 16}
NEAR = 1e-3  # of the norm of the logits


class Lossless(CacheConfig):
    """Pages that hold the numbers themselves, and go all the ways of compressed ones."""

    compresses = True
    why_no_latents = None


EXACT = Lossless(Side(Full()), Side(Full()), **WINDOWS)
INT4 = replace(parse_kv("int4"), **WINDOWS)


@dataclass(frozen=True)
class Family:
    """What was found. built: name of its class. skipped: why nothing was compared. compressed: of `layers`
    reports. exact: distance of the logits to the plain model's with lossless pages. fault: what is wrong."""

    name: str
    built: str = ""
    skipped: str = ""
    layers: tuple[LayerReport, ...] = ()
    exact: float | None = None
    int4: bool = False
    fault: str = ""

    @property
    def compressed(self) -> list[int]:
        return [r.index for r in self.layers if r.compressed]

    @property
    def why(self) -> str:
        """Why the other layers are not compressed."""
        groups: dict[str, list[int]] = {}
        for r in self.layers:
            if not r.compressed:
                groups.setdefault(f"{r.kind}: {r.reason}", []).append(r.index)
        return "; ".join(f"{ranges(found)} ({why})" for why, found in groups.items())


def line(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160]


def row(one, last: str, *more: str) -> str:
    """Return a family's line of a table. last: its last cell where nothing is wrong. more: behind its name."""
    where = f"{ranges(one.compressed)} of {len(one.layers)}" if one.compressed else "-"
    cells = [one.name, *more, where, one.why or "-"]
    cells += [f"**{one.fault}**", ""] if one.fault else ["yes", last]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def ending(skipped: list, command: str, what: str = "family") -> list[str]:
    """Return the end of a page: what was not compared, and what made the page."""
    out = ["\n## Not compared\n", f"| {what} | why |", "|---|---|"]
    out += [f"| {one.name} | {one.skipped.replace('|', '/')} |" for one in skipped]
    used = ", ".join(f"{name} {number}" for name, number in versions().items())
    return [*out, f"\nMade by `{command}` on {machine()['chip']}; {used}.\n"]
