"""Programmatic dependent launch: the kernels of one attention follow each other without a gap."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CAPABILITY = 9  # of the first GPUs that can


@triton.jit
def wait_for_previous(CHAINED: tl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible.

    Before this, read only what is older than the previous kernel, and write nothing: it may still be read.
    Every program has to call this, so that what the previous kernel waited for has ended, too.
    """
    if CHAINED:
        gdc_wait()


@triton.jit
def launch_next(CHAINED: tl.constexpr):
    """Let the next kernel start once every program has called this. Call it behind `after`."""
    if CHAINED:
        gdc_launch_dependents()
