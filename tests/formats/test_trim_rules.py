"""Which tokens and pages a cut keeps, by the rules alone: a cache of numbered tokens."""

from types import SimpleNamespace

import numpy as np

from mlxkv.formats.rules.trimming import TrimRules

SINK, PAGE, RECENT = 3, 8, 5
ROOM = RECENT + PAGE


class Numbered(TrimRules):
    """Holds the numbers of its tokens. Codes lose nothing, and say that they are codes by .5."""

    def __init__(self, tokens: int):
        self.config = SimpleNamespace(page=PAGE, recent=RECENT)
        self._forget()
        numbers = window(range(tokens))
        self.offset, recent = tokens, numbers
        if tokens > SINK + ROOM:
            pages = -(-(tokens - SINK - ROOM) // PAGE)
            end = SINK + pages * PAGE
            self._sink = cut(numbers, 0, SINK)
            self._store.pages = [
                cut(numbers, at, at + PAGE)[0] + 0.5 for at in range(SINK, end, PAGE)
            ]
            self._last, recent = cut(numbers, end - PAGE, end), cut(numbers, end, tokens)
        self._put_recent(recent)

    def _forget(self):
        self._sink = self._last = self._recent = None
        self._count, self._store = 0, Pages()

    @property
    def _count_pages(self):
        return len(self._store.pages)

    def _put_recent(self, pair):
        self._recent, self._count = pair, pair[0].shape[2]

    def _last_and_recent(self):
        recent = cut(self._recent, 0, self._count)
        return tuple(np.concatenate(both, 2) for both in zip(self._last, recent, strict=True))

    def _decoded(self, page, count):
        return cut((self._store.pages[page],) * 2, 0, count)

    @property
    def tokens(self) -> list[float]:
        windows = [] if self._sink is None else [self._sink[0]]
        parts = [*windows, *self._store.pages, cut(self._recent, 0, self._count)[0]]
        return np.concatenate(parts, 2).ravel().tolist()


class Pages:
    def __init__(self):
        self.pages = []

    def truncate(self, count: int) -> None:
        self.pages = self.pages[:count]


def window(numbers) -> tuple[np.ndarray, np.ndarray]:
    x = np.array(list(numbers), float).reshape(1, 1, -1, 1)
    return x, x


def cut(pair, start: int, stop: int):
    return tuple(x[:, :, start:stop] for x in pair)


def test_a_cut_keeps_the_first_tokens_and_whole_pages(subtests):
    for held in (9, SINK + ROOM, SINK + ROOM + 1, 47, 48):
        with subtests.test(held=held):
            for left in range(1, held + 1):
                cache = Numbered(held)
                pages = cache._count_pages
                recent = left - cache._sunk - pages * PAGE
                assert cache.trim(held - left) == held - left and cache.offset == left
                assert [int(n) for n in cache.tokens] == list(range(left))
                exact = [n for n in cache.tokens if n == int(n)]
                if not pages or left <= SINK:  # all is recent, as it came
                    assert cache._sink is None and cache._count == left == len(exact)
                elif recent > RECENT:
                    assert (cache._count_pages, cache._count) == (pages, recent)
                elif recent > -PAGE:  # the last page is restored
                    assert (cache._count_pages, cache._count) == (pages - 1, PAGE + recent)
                    assert len(exact) == SINK + PAGE + recent
                else:  # whole pages stay codes; of the next one what stays is decoded
                    assert (cache._count_pages, cache._count) == divmod(left - SINK, PAGE)
                    assert len(exact) == SINK
                assert cache._last is None or recent > RECENT


def test_all_may_go_and_no_more():
    cache = Numbered(47)
    assert cache.trim(-1) == 0 and cache.trim(100) == 47
    assert cache.offset == 0 and cache._recent is None and not cache._count_pages
