"""Runs: quantized pages of one cache, each run behind a basis of its own. Which pages are joined, moved and
dropped when the basis changes; arithmetic on tensors belongs to the tracks. No framework is imported here.

The pages of an old basis are transported into the new one, or keep theirs in a run of their own (up to a
number of runs; then `joining` says which one is transported into the next), or stay as they are and are
read by the new one. Spec: `mlxkv.spec.oja.transported`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlxkv.formats.lowrank import STAY, LowRank, joining
from mlxkv.formats.records import NAMES

Tensor = Any  # of the track
# (first page, pages) -> positions [B, G, N] that stay, and whether they count pages; else tokens, N a
# whole number of pages.
Choose = Callable[[int, int], tuple[Tensor, bool]]


class Runs:
    """A store of stores: each run has one that `make` returns for its basis.

    start: the basis of the calibration; basis: of the next page. online: how the basis follows the text, None
    if it does not.
    """

    def __init__(self, make: Callable, start, basis, page: int, online: LowRank | None):
        self.make, self.start, self.page, self.online = make, start, page, online
        self.runs, self.bases = [make(basis)], [basis]

    # -- what a track adds

    _codes: Callable[..., dict[str, dict[str, Tensor]]]  # the pages of a run as plain ops read them
    _merged: Callable[..., dict]  # the states of two runs as one, in the basis of the later
    _parts: Callable[[Sequence], Any]  # one snapshot of several
    _counts: Callable[[list[int]], Tensor]
    # The codes of the first `begin` of `count` units (pages or tokens) and of those at `positions`
    # behind them, and how many units these are; of (codes, begin, positions, count).
    _selected: Callable[[dict, int, Tensor, int], tuple[dict, int]]

    # -- pages

    @property
    def count(self) -> int:
        return sum(run.count for run in self.runs)

    def append(self, pair, count: int, start: int = 0) -> None:
        """Encode `count` pages of keys and values [B, G, T, D], from token `start` on."""
        self.runs[-1].append(pair, count, start)

    def rebase(self, new) -> None:
        """Encode further pages by `new`."""
        online = self._online
        if online.stored == STAY:
            for i, run in enumerate(self.runs):
                self.runs[i], self.bases[i] = self._transformed(run, new), new
            return
        if not self.runs[-1].count:
            del self.runs[-1], self.bases[-1]
        self.runs.append(self.make(new))
        self.bases.append(new)
        while len(self.runs) > online.runs:
            self._merge()

    @property
    def _online(self) -> LowRank:
        assert self.online is not None  # else no basis changes
        return self.online

    def _transformed(self, run, new):
        """Return the same codes, read by another basis."""
        store = self.make(new)
        if run.count:
            store.restore(self._codes(run), run.count)
        return store

    def _merge(self) -> None:
        """Transport a run into the basis of the next one."""
        at = joining([run.count for run in self.runs])
        run, following = self.runs[at : at + 2]
        store = self.make(self.bases[at + 1])
        if count := run.count + following.count:
            store.restore(self._merged(run, following), count)
        self.runs[at : at + 2] = [store]
        del self.bases[at]

    def read(self, start: int, stop: int):
        """Return a snapshot of pages start .. stop - 1."""
        parts, first = [], 0
        for run in self.runs:
            low, high = max(start - first, 0), min(stop - first, run.count)
            if low < high:
                parts.append(run.read(low, high))
            first += run.count
        return parts[0] if len(parts) == 1 else self._parts(parts)

    def truncate(self, count: int) -> None:
        """Keep the first `count` pages, and the basis as the text has made it."""
        first, counts = 0, [run.count for run in self.runs]
        for run, pages in zip(self.runs, counts, strict=True):
            run.truncate(min(pages, max(0, count - first)))
            first += pages
        last = len(self.runs) - 1
        places = [i for i, run in enumerate(self.runs) if run.count or i == last]
        self.runs, self.bases = ([x[i] for i in places] for x in (self.runs, self.bases))

    def keep(self, choose: Choose, fixed: int) -> int:
        """Drop what `choose` does not select from page `fixed` on. Returns the number of pages dropped."""
        total, first = self.count, 0
        for i, run in enumerate(self.runs):
            count, begin = run.count, max(0, fixed - first)
            if begin < count:
                positions, by_page = choose(first + begin, count - begin)
                unit = 1 if by_page else self.page
                codes, units = self._selected(
                    self._codes(run), begin * unit, positions, count * unit
                )
                self.runs[i] = self.make(self.bases[i])
                self.runs[i].restore(codes, units // unit)
            first += count
        return total - self.count

    @property
    def by_token(self) -> bool:
        """Return whether every tensor has a row per token, so that single tokens can be dropped."""
        return all(
            x.shape[2] == run.count * self.page
            for run in self.runs
            if run.count
            for side in self._codes(run).values()
            for x in side.values()
        )

    # -- what is stored

    def arrays(self) -> list[Tensor]:
        """Return the allocated arrays, without bases shared by all caches."""
        bases = [x for basis in self.bases for x in saved(basis).values()]
        return [x for run in self.runs for x in run.arrays()] + bases

    @property
    def state(self) -> dict:
        out: dict = {"counts": self._counts([run.count for run in self.runs])}
        for i, (run, basis) in enumerate(zip(self.runs, self.bases, strict=True)):
            out[f"run{i}"] = run.state if run.count else {}
            if basis is not None:
                out[f"basis{i}"] = saved(basis)
        return out

    def restore(self, state: dict, count: int) -> None:
        """Restore the pages of a state."""
        counts = state["counts"].tolist()
        longest = self.online.runs if self.online else 1
        if sum(counts) != count or min(counts) < 0 or len(counts) > longest:
            raise ValueError(f"{sum(counts)} pages in {len(counts)} runs")
        self.runs, self.bases = [], []
        for i, pages in enumerate(counts):
            self.bases.append(loaded(self.start, state.get(f"basis{i}", {})))
            self.runs.append(self.make(self.bases[-1]))
            if pages:
                self.runs[-1].restore(state[f"run{i}"], pages)


def saved(basis) -> dict[str, Tensor]:
    """Return the sides of a basis that belong to one cache alone: down [B, G, D, R], by name."""
    sides = {} if basis is None else {name: getattr(basis, name).down for name in NAMES}
    return {name: u for name, u in sides.items() if u.ndim == 4}


def loaded(start, arrays: dict[str, Tensor]):
    """Invert `saved`; start: the basis of the calibration."""
    transforms = {n: type(getattr(start, n))(u, u.swapaxes(-1, -2)) for n, u in arrays.items()}
    return replace(start, **transforms) if transforms else start
