"""Which pages a store of several runs reads and keeps: runs of numbered pages."""

from mlxkv.formats.lowrank import LowRank
from mlxkv.formats.rules.runs import Runs


class Run:
    def __init__(self, pages: list[int]):
        self.pages = pages

    @property
    def count(self) -> int:
        return len(self.pages)

    def read(self, start: int, stop: int) -> list[int]:
        return self.pages[start:stop]

    def truncate(self, count: int) -> None:
        self.pages = self.pages[:count]


class Numbered(Runs):
    def _parts(self, snapshots):
        return sum(snapshots, [])


def runs_of(*counts: int) -> Numbered:
    out = Numbered(lambda basis: Run([]), None, None, 16, LowRank(0.5, follows=True, segments=4))
    numbers = iter(range(sum(counts)))
    out.runs = [Run([next(numbers) for _ in range(count)]) for count in counts]
    out.bases = list("abcd"[: len(counts)])
    return out


def test_pages_are_read_from_the_runs_that_hold_them():
    runs = runs_of(3, 4, 2)
    for start in range(9):
        for stop in range(start + 1, 10):
            assert runs.read(start, stop) == list(range(start, stop))


def test_a_cut_keeps_the_last_basis(subtests):
    """It has learned from the text since."""
    for count, bases in [(9, "abc"), (8, "abc"), (7, "abc"), (6, "abc"), (3, "ac"), (0, "c")]:
        with subtests.test(count=count, bases=bases):
            runs = runs_of(3, 4, 2)
            runs.truncate(count)
            assert runs.count == count and "".join(runs.bases) == bases
            assert [page for run in runs.runs for page in run.pages] == list(range(count))
