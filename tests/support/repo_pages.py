"""Reads the Markdown pages of the repository: their links, anchors, code blocks and the marks above these."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.M | re.S)
LINK = re.compile(r"\]\(((?:[^()\s]|\([^()]*\))+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.M)
MARK = re.compile(r"<!-- not run: (.+?) -->\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block. line: of its first line in the page. mark: why it is not run; "" if it is."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """All Markdown pages that belong to the repository."""
    folders = ("docs", "cuda_track", "experiments", "mlxkv", "tests")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.md")]
    return sorted([*ROOT.glob("*.md"), *found])


def prose(text: str) -> str:
    """The page without fenced blocks and code in lines."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def links(text: str) -> list[str]:
    """Targets of links and pictures that lie in this repository."""
    found = [one or other for one, other in LINK.findall(prose(text))]
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub names them: lower case, no punctuation, hyphens for spaces;
    the second of a name ends in -1."""
    seen: dict[str, int] = {}
    found = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        count = seen[name] = seen.get(name, -1) + 1
        found.add(f"{name}-{count}" if count else name)
    return found | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found[2],
            found[3],
            mark[1] if (mark := MARK.search(text[: found.start()])) else "",
        )
        for found in FENCE.finditer(text)
    ]
