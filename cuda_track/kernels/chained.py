"""Kernels of one attention that follow each other without a gap: programmatic dependent launch."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CAPABILITY = 9  # of GPUs that have it


@triton.jit
def after(CHAINED: tl.constexpr):
    """Waits until the kernel before has ended and its memory is there. What is read before this must be
    older than the kernel before, and nothing may be written: others may still read it. Every program
    has to come here, so that what the kernel before waited for is there as well."""
    if CHAINED:
        gdc_wait()


@triton.jit
def before(CHAINED: tl.constexpr):
    """The next kernel may take its place as soon as every program has come here. Behind `after`."""
    if CHAINED:
        gdc_launch_dependents()
