"""The holder of quantized pages: one sequence, cut back within its capacity and beyond it."""

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.cache.pages import Pages


def numbered(first: int, count: int) -> dict:
    """Pages of two rows that hold their numbers."""
    x = np.repeat(np.arange(first, first + count, dtype=np.float32), 2)
    return {"codes": mx.array(x[None, None, :, None])}


def numbers(pages: Pages) -> list[float]:
    return np.array(pages.read()["codes"])[0, 0, ::2, 0].tolist()


@pytest.mark.parametrize("held", (3, 17, 40, 96))
def test_any_cut_keeps_the_first_pages(held):
    for count in range(1, held + 1):
        pages = Pages()
        pages.append(numbered(0, held - 1), held - 1)
        pages.append(numbered(held - 1, 1), 1)
        pages.truncate(count)
        assert pages.counts == [count] and numbers(pages) == list(range(count))
        assert pages.capacity - count <= max(1, count // 16)
        pages.append(numbered(count, 2), 2)
        assert numbers(pages) == list(range(count + 2))
