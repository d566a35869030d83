"""What orders memory across threadgroups: the fused merge, right in several ways and wrong in more."""

from __future__ import annotations

import emulator
import numpy as np
import pytest
from emulator_kernels import FUSED_MERGE

REASON = emulator.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
needs_checks = pytest.mark.skipif(
    not emulator.can_check(), reason="the checked build needs g++ on Linux x86-64"
)

GROUPS = 7

# PUBLISH is what stands between the partial sums and the counter, SEE between the counter and the sum.
MERGE = """
threadgroup uint arrived[1];
uint t = thread_index_in_threadgroup;
uint group = threadgroup_position_in_grid.x;
uint groups = threadgroups_per_grid.x;
partial[group * 64 + t] = x[group * 64 + t] * 2.0f;
PUBLISH
if (t == 0) {
  FENCE_BEFORE
  device atomic_uint* place = (device atomic_uint*)counter;
  arrived[0] = atomic_fetch_add_explicit(place, 1u, memory_order_relaxed);
  FENCE_AFTER
}
SEE
if (arrived[0] == groups - 1) {
  FENCE_OF_ALL
  float sum = 0.0f;
  for (uint g = 0; g < groups; g++) sum += partial[g * 64 + t];
  o[t] = sum;
}
"""
FENCE = "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);"
WEAK = FENCE.replace("seq_cst", "relaxed")
NARROW = FENCE.replace("scope_device", "scope_threadgroup")
DEVICE = "threadgroup_barrier(mem_flags::mem_device);"
SHARED = "threadgroup_barrier(mem_flags::mem_threadgroup);"
BOTH = "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);"
NONE = "threadgroup_barrier(mem_flags::mem_none);"

# name: PUBLISH, FENCE_BEFORE, FENCE_AFTER, SEE, FENCE_OF_ALL
RIGHT = {
    "every thread fences its own writes": (FENCE + NONE, "", "", SHARED, FENCE),
    "thread 0 fences for all": (DEVICE, FENCE, "", SHARED, FENCE),
    "thread 0 fences on both sides": (DEVICE, FENCE, FENCE, BOTH, ""),
}
WRONG = {
    "no fence at all": (DEVICE, "", "", BOTH, ""),
    "no fence before the counter": (DEVICE, "", "", SHARED, FENCE),
    "no fence after the counter": (DEVICE, FENCE, "", BOTH, ""),
    "the barrier does not bring the writes to thread 0": (SHARED, FENCE, "", SHARED, FENCE),
    "the barrier does not bring the fence to all": (DEVICE, FENCE, FENCE, SHARED, ""),
    "no barrier before the counter": ("", FENCE, "", SHARED, FENCE),
    "a relaxed fence": (WEAK + NONE, "", "", SHARED, FENCE),
    "a fence of the threadgroup": (DEVICE, NARROW, "", SHARED, FENCE),
}


def merge(source: str, checks: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two launches with one counter; the sums, the wanted sums, the counter."""
    kernel = emulator.metal_kernel(
        *("merge", ["x", "counter"], ["partial", "o"], source), checks=checks, writable=["counter"]
    )
    x = np.random.default_rng(0).normal(size=(GROUPS, 64)).astype(np.float32)
    counter = np.zeros(8, np.uint32)
    for _ in range(2 if "atomic_store" in source else 1):
        _, o = kernel(
            inputs=[x, counter],
            grid=(64 * GROUPS, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(GROUPS, 64), (64,)],
            output_dtypes=[np.float32, np.float32],
        )
    return o, 2 * x.sum(axis=0), counter


def written(parts: tuple[str, ...]) -> str:
    source = MERGE
    names = ["PUBLISH", "FENCE_BEFORE", "FENCE_AFTER", "SEE", "FENCE_OF_ALL"]
    for name, text in zip(names, parts, strict=True):
        source = source.replace(name, text)
    return source


@pytest.mark.parametrize("checks", [True, False], ids=["checked", "plain"])
def test_merge_by_the_last_threadgroup(checks):
    got, want, counter = merge(FUSED_MERGE, checks)
    assert np.allclose(got, want, atol=1e-5)
    assert counter[0] == 0, "the counter is zero again for the next launch"


@needs_checks
@pytest.mark.parametrize("name", RIGHT)
def test_right_orders(name):
    got, want, counter = merge(written(RIGHT[name]), checks=True)
    assert np.allclose(got, want, atol=1e-5)
    assert counter[0] == GROUPS


@needs_checks
@pytest.mark.parametrize("name", WRONG)
def test_wrong_orders(name):
    with pytest.raises(emulator.EmulatorFault) as caught:
        merge(written(WRONG[name]), checks=True)
    assert caught.value.kind.startswith("race"), caught.value
