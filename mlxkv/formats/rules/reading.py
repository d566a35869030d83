"""Reading fewer pages: how many of the chunks of a cache a step reads. No framework."""

from __future__ import annotations

CHUNK = 32  # tokens that are read or left out together
PARTS = 256  # in which a share is counted
CODES = (
    (127, 128),
    (255, 0),
)  # of means and of deviations: the largest number of steps, and the code of none


def parts(share: float) -> int:
    """Return a share in `PARTS`, at least one of them."""
    return max(1, round(share * PARTS))


def count(chunks: int, share: int) -> int:
    """Return how many of so many chunks are read; share: in `PARTS`. Rounded half up, and at least one."""
    return min(chunks, max(1, (chunks * share + PARTS // 2) // PARTS))


def chunk(page: int, whole_pages: bool) -> int:
    """Return the tokens of a chunk: of CHUNK where they divide a page, else of whole pages."""
    return page if whole_pages or page % CHUNK else CHUNK


def words(dims: int) -> int:
    """Return how many uint32 words say what a chunk is ranked by: codes of the means of so many dims, codes of the
    deviations, and two steps in float16. Each row of codes ends with a whole word."""
    return 2 * -(-dims // 4) + 1
