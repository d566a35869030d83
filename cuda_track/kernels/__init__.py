"""Triton kernels, their launches, the order of codes that they read and the pool of pages they write to.

Only the kernels' own modules import triton, and only when one is launched.
"""

from __future__ import annotations

import os


def interpreted() -> bool:
    """Return whether Triton's kernels run in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"
