"""Which tokens and pages a cut keeps, and what a full window gives up, by counts alone."""

import pytest

from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.quantizers import Affine
from mlxkv.formats.rules.windows import FlushPlan, TrimSource, Windows

SINK, PAGE, RECENT = 3, 16, 5
CAPACITY = RECENT + PAGE
CONFIG = CacheConfig(Side(Affine(4, 0)), Side(Affine(4, 0)), sink=SINK, recent=RECENT, page=PAGE)


def holding(tokens: int, **more) -> Windows:
    """The windows of a cache that has read so many tokens, one by one."""
    windows = Windows(CONFIG, 0, 0, 0, False, **more)
    for _ in range(tokens):
        sink, pages, recent = windows.sink, windows.pages, windows.recent + 1
        if recent > CONFIG.recent_capacity(bool(sink)):
            due = windows.flush(recent)
            sink, pages, recent = sink + due.sink, pages + due.pages, recent - due.stop
        windows = Windows(CONFIG, sink, pages, recent, pages > 0, **more)
    return windows


def test_a_full_window_gives_up_the_sink_and_the_oldest_pages():
    assert holding(SINK + CAPACITY).pages == 0
    full = holding(SINK + CAPACITY + 1)
    assert (full.sink, full.pages, full.recent) == (SINK, 1, RECENT + 1)
    empty = holding(0)
    assert empty.flush(SINK + CAPACITY + PAGE + 1) == FlushPlan(SINK, 2, SINK + 2 * PAGE)
    assert full.flush(CAPACITY + 1) == FlushPlan(0, 1, PAGE)


def test_a_cut_keeps_the_first_tokens_and_whole_pages(subtests):
    for held in (9, SINK + CAPACITY, SINK + CAPACITY + 1, 77, 78):
        with subtests.test(held=held):
            windows = holding(held)
            assert windows.offset == held == windows.trimmable
            for left in range(1, held):
                plan = windows.trim(held - left)
                assert plan.removed == held - left
                recent = windows.recent - plan.removed
                if left <= windows.sink:  # all is recent, as it came
                    found = TrimSource.SINK, 0, left
                elif not windows.pages or recent > RECENT:
                    found = TrimSource.RECENT, windows.pages, recent
                elif recent > -PAGE:  # the last page is restored
                    found = TrimSource.LAST, windows.pages - 1, PAGE + recent
                else:  # whole pages stay codes; of the next one what stays is decoded
                    found = TrimSource.PAGE, *divmod(left - SINK, PAGE)
                assert (plan.source, plan.pages, plan.recent) == found
                sink = 0 if plan.source is TrimSource.SINK else windows.sink
                assert sink + plan.pages * PAGE + plan.recent == left


def test_all_may_go_and_no_more():
    windows = holding(77)
    plan = windows.trim(-1)
    assert (plan.removed, plan.source) == (0, TrimSource.RECENT)
    assert (plan.pages, plan.recent) == (windows.pages, windows.recent)
    plan = windows.trim(100)
    assert (plan.removed, plan.source, plan.recent) == (77, TrimSource.SINK, 0)


def test_nothing_ends_among_chosen_tokens():
    windows = holding(77, dropped=8, shortest=60)
    assert windows.offset == 85 and windows.trimmable == 25
    assert windows.can_keep(60) and windows.can_keep(0) and not windows.can_keep(59)
    assert windows.trim(25).removed == 25 and windows.trim(85).source is TrimSource.SINK
    with pytest.raises(UserError, match="choose at most 25, or all 85"):
        windows.trim(26)
