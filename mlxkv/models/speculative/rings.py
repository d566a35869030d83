"""Let mlx-lm's sliding windows take tokens back while drafts are verified.

mlx-lm's `RotatingKVCache` refuses to once it is full, and mlx-lm's loop then goes on with the refused tokens
in it. But a step of several tokens leaves the window in order and longer than it has to be, by as many tokens
as the step had: so the last ones can be dropped, and what is left is what reading only the others leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from mlx_lm.models.cache import RotatingKVCache

from mlxkv.models.hooks.probe import leaves


@contextmanager
def trimmable(caches: list) -> Iterator[None]:
    """Inside the block every sliding window of `caches` can be trimmed by less than the last step had tokens."""
    rings = [cache for _, cache in leaves(caches) if type(cache) is RotatingKVCache]
    try:
        for ring in rings:
            ring.is_trimmable = lambda: True
            ring.trim = partial(_trim, ring)
        yield
    finally:
        for ring in rings:
            for name in ("is_trimmable", "trim"):
                vars(ring).pop(name, None)


def _trim(ring: RotatingKVCache, n: int) -> int:
    """Drop the last n tokens: exactly behind a step of more than n tokens, or before the window is full.

    Behind single steps in a full window (a draft model's) the tokens that the dropped ones had replaced are
    gone: the window holds the dropped ones in their place until it is written there again. The drafts may get
    worse by it; what is said does not, because the other model verifies it.
    """
    n = min(ring.offset, n)
    if not n or ring.keys is None:
        return 0
    length = ring.keys.shape[2]
    if ring.offset <= length and ring.offset <= ring.max_size:  # not full, in order
        ring._idx -= n
    elif ring._idx == length and length - n >= min(ring.offset - n, ring.max_size - 1):
        ring.keys, ring.values = ring.keys[..., :-n, :], ring.values[..., :-n, :]
        ring._idx -= n
    else:
        at = ring._idx - n
        ring._idx = at if at >= ring.keep else at + ring.max_size - ring.keep
    ring.offset -= n
    return n
