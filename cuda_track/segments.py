"""Sealed pages in runs of one basis each: the store of caches whose basis follows the text.

What becomes of the pages of an old basis: they are transported into the new one, keep their own in a
run of theirs (of at most so many runs; then `joining` says which moves into that of the next), or
stay as they are and are read by the new one. Spec: `reference_oja.transported`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from cuda_track.calibrated import Rotations
from cuda_track.codec import Codec, Stored
from cuda_track.kernels.pool import Paged, PoolPages
from cuda_track.oja import following
from cuda_track.sealed import NAMES, CodePages, Codes, Pair
from mlxkv.formats_lowrank import STAY, LowRank, joining

Make = Callable[[Rotations | None], Codes | Paged]
# (first page, pages) -> positions [B, G, N] of those that stay, and whether they are of pages; else
# of tokens, N a whole number of pages
Choose = Callable[[int, int], tuple[torch.Tensor, bool]]


@dataclass(frozen=True)
class Parts:
    """Snapshots of runs of pages, in the order of their tokens."""

    parts: tuple[CodePages | PoolPages, ...]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    def decode(self, side: int, dtype: torch.dtype) -> torch.Tensor:
        """Keys (side 0) or values (1) as attention sees them: [B, G, T, D]."""
        return torch.cat([part.decode(side, dtype) for part in self.parts], 2)


class Segments:
    """start: of the calibration; now: of the next page. rule: how the basis follows, None where it does
    not. make: an empty store for a basis."""

    def __init__(
        self,
        make: Make,
        start: Rotations | None,
        now: Rotations | None,
        page: int,
        rule: LowRank | None,
    ):
        self.make, self.start, self.page, self.rule = make, start, page, rule
        self.runs: list[Codes | Paged] = [make(now)]
        self.bases: list[Rotations | None] = [now]

    @property
    def count(self) -> int:
        return sum(run.count for run in self.runs)

    def make_room(self, pair: Pair, count: int) -> None:
        """Room for `count` pages of keys and values [B, G, T, D]."""
        self.runs[-1].make_room(pair, count)

    def append(self, pair: Pair, count: int, start: int = 0) -> None:
        """Encode `count` pages of keys and values [B, G, T, D], from token `start` on."""
        self.runs[-1].append(pair, count, start)

    def rebase(self, new: Rotations) -> None:
        """From here on pages are encoded by `new`."""
        if self.rule.stored == STAY:
            for i, run in enumerate(self.runs):
                self.runs[i], self.bases[i] = self._turned(run, new), new
            return
        if not self.runs[-1].count:
            self.runs.pop(), self.bases.pop()
        self.runs.append(self.make(new))
        self.bases.append(new)
        while len(self.runs) > self.rule.runs:
            self._merge()

    def _turned(self, run: Codes | Paged, new: Rotations) -> Codes | Paged:
        """The same codes, read by another basis."""
        made = self.make(new)
        if run.count:
            made.restore(run.state, run.count)
        return made

    def _merge(self) -> None:
        """Transport a run into the basis of the next one."""
        at = joining([run.count for run in self.runs])
        run, after = self.runs[at : at + 2]
        moved = transported(run, after.codecs)
        if after.count:
            rest = after.state
            moved = {name: _joined(moved[name], rest[name]) for name in NAMES}
        made, count = self.make(self.bases[at + 1]), run.count + after.count
        if count:
            made.restore(moved, count)
        self.runs[at : at + 2] = [made]
        del self.bases[at]

    def read(self, start: int, stop: int) -> Parts | CodePages | PoolPages:
        """A snapshot of pages start .. stop - 1."""
        parts, first = [], 0
        for run in self.runs:
            low, high = max(start - first, 0), min(stop - first, run.count)
            if low < high:
                parts.append(run.read(low, high))
            first += run.count
        return parts[0] if len(parts) == 1 else Parts(tuple(parts))

    def truncate(self, count: int) -> None:
        """Keep the first `count` pages. The basis stays what the text has made of it."""
        first, counts = 0, [run.count for run in self.runs]
        for run, pages in zip(self.runs, counts, strict=True):
            run.truncate(min(pages, max(0, count - first)))
            first += pages
        kept = [i for i, run in enumerate(self.runs[:-1]) if run.count]
        self.runs = [*(self.runs[i] for i in kept), self.runs[-1]]
        self.bases = [*(self.bases[i] for i in kept), self.bases[-1]]

    def keep(self, choose: Choose, fixed: int) -> int:
        """Drop what is not chosen of the pages from `fixed` on; how many pages went."""
        before, first = self.count, 0
        for i, run in enumerate(self.runs):
            count, begin = run.count, max(0, fixed - first)
            if begin < count:
                positions, by_page = choose(first + begin, count - begin)
                each = 1 if by_page else self.page
                lead = torch.arange(begin * each, device=positions.device)
                lead = lead.expand(*positions.shape[:2], -1)
                at = torch.cat([lead, begin * each + positions], 2)
                codes = {
                    name: {n: _taken(x, at, count * each) for n, x in side.items()}
                    for name, side in run.state.items()
                }
                self.runs[i] = self.make(self.bases[i])
                self.runs[i].restore(codes, at.shape[2] // each)
            first += count
        return before - self.count

    def select(self, rows: torch.Tensor) -> None:
        """Rows of the batch, in this order, each with the bases that it has."""
        for i, (run, basis) in enumerate(zip(self.runs, self.bases, strict=True)):
            if run.count:
                run.select(rows)
            chosen = of_rows(basis, rows)
            if chosen is not basis:
                self.runs[i], self.bases[i] = self._turned(run, chosen), chosen

    @property
    def by_token(self) -> bool:
        """Whether every tensor has a row for each token, so that tokens can go one by one."""
        rows = (
            x.shape[2] == run.count * self.page
            for run in self.runs
            if run.count
            for side in run.state.values()
            for x in side.values()
        )
        return all(rows)

    def arrays(self) -> list[torch.Tensor]:
        """What is allocated; bases that are shared by all caches are not."""
        own = [x for basis in self.bases for x in saved(basis).values()]
        return [x for run in self.runs for x in run.arrays()] + own

    @property
    def state(self) -> dict:
        out: dict = {"counts": torch.tensor([run.count for run in self.runs], dtype=torch.int32)}
        for i, (run, basis) in enumerate(zip(self.runs, self.bases, strict=True)):
            out[f"run{i}"] = run.state if run.count else {}
            if basis is not None:
                out[f"basis{i}"] = saved(basis)
        return out

    def restore(self, state: dict, count: int) -> None:
        """Take over the pages of a state."""
        counts = state["counts"].tolist()
        if sum(counts) != count:
            raise ValueError(f"{sum(counts)} pages in runs")
        self.runs, self.bases = [], []
        for i, pages in enumerate(counts):
            basis = loaded(self.start, state.get(f"basis{i}", {}))
            run = self.make(basis)
            if pages:
                run.restore(state[f"run{i}"], pages)
            self.runs.append(run)
            self.bases.append(basis)


def saved(basis: Rotations | None) -> Stored:
    """The U of the sides that have one of this cache alone."""
    if basis is None:
        return {}
    sides = {name: getattr(basis, name).down for name in NAMES}
    return {name: u for name, u in sides.items() if u.ndim == 4}


def loaded(start: Rotations | None, arrays: Stored) -> Rotations | None:
    """The inverse of `saved`; start: of the calibration."""
    return replace(start, **{n: following(u) for n, u in arrays.items()}) if arrays else start


def of_rows(basis: Rotations | None, rows: torch.Tensor) -> Rotations | None:
    """That of these rows of the batch; itself where all rows share it."""
    return loaded(basis, {name: u[rows] for name, u in saved(basis).items()})


def transported(run: Codes | Paged, codecs: tuple[Codec, Codec]) -> dict[str, Stored]:
    """The codes of a run as the bases of `codecs` would have stored them."""
    out = {}
    if not run.count:
        return out
    stored = run.state
    for name, old, new in zip(NAMES, run.codecs, codecs, strict=True):
        if old.transform is new.transform:
            out[name] = stored[name]
            continue
        values = old.decode_stored(stored[name], torch.float32)
        moved = values @ (old.transform.up @ new.transform.down)
        out[name] = new.method.encode(new.spec, moved, new.page)
    return out


def _joined(first: Stored, second: Stored) -> Stored:
    return {name: torch.cat([x, second[name]], 2) for name, x in first.items()}


def _taken(x: torch.Tensor, at: torch.Tensor, units: int) -> torch.Tensor:
    """Rows of x [B, G, rows, W] that belong to the units `at` [B, G, N] of `units`."""
    batch, heads, rows, width = x.shape
    x = x.reshape(batch, heads, units, rows // units * width)
    return x.take_along_dim(at[..., None], 2).reshape(batch, heads, -1, width)
