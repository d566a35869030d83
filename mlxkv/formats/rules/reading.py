"""Reading fewer pages: how many of the chunks of a cache a step reads. No framework."""

from __future__ import annotations

CHUNK = 64  # tokens that are read or left out together
PARTS = 256  # in which a share is counted


def parts(share: float) -> int:
    """Return a share in `PARTS`, at least one of them."""
    return max(1, round(share * PARTS))


def count(chunks: int, share: int) -> int:
    """Return how many of so many chunks are read; share: in `PARTS`. Rounded half up, and at least one."""
    return min(chunks, max(1, (chunks * share + PARTS // 2) // PARTS))


def chunk(page: int, whole_pages: bool) -> int:
    """Return the tokens of a chunk: of CHUNK where they divide a page, else of whole pages."""
    return page if whole_pages or page % CHUNK else CHUNK
