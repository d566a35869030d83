"""Which runs of pages are moved into another basis, and how much that is."""

import pytest

from mlxkv.formats.lowrank import SETTLED, joining


def _moved(runs: list[int], steps: list[int]) -> list[int]:
    """Pages moved at each step that adds so many pages behind a new basis."""
    out = []
    for pages in steps:
        runs = [*runs, 0] if runs[-1] else [*runs[:-1], 0]
        moved = 0
        while len(runs) > 2:
            at = joining(runs)
            moved += runs[at]
            runs = [*runs[:at], runs[at] + runs[at + 1], *runs[at + 2 :]]
        runs[-1] += pages
        out.append(moved)
    return out


def test_the_run_of_the_fewest_pages_goes():
    assert joining([5, 3, 0]) == 1
    assert joining([3, 5, 0]) == 0
    assert joining([4, 4, 0]) == 1  # the newer: what is older keeps its basis
    assert joining([9, 2, 5, 0]) == 1


def test_a_long_run_is_not_moved_again_and_again():
    assert joining([SETTLED + 8, SETTLED, 0]) == 1
    assert joining([1000, 500, 0]) == 0


@pytest.mark.parametrize("prompt", (16, 128, 500, 1500))
def test_decoding_moves_little_whatever_the_prompt_was(prompt):
    for second in (prompt // 8, prompt // 3, prompt // 2):
        moved = _moved([prompt - second, second], [0, 1] * 64)  # a page of 64 tokens, steps of 32
        assert sum(moved) / 128 < max(SETTLED, 3 * prompt**0.5)
