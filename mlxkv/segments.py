"""Sealed pages in runs of one basis each: the store of caches whose basis follows the text.

What becomes of the pages of an old basis: they are transported into the new one, keep their own in a
run of theirs (of at most so many runs; then `joining` says which moves into that of the next), or
stay as they are and are read by the new one. Spec: `reference_oja.transported`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxkv.calibrated import Rotations
from mlxkv.codec import Codec, Stored
from mlxkv.formats_lowrank import STAY, LowRank, joining
from mlxkv.oja import following
from mlxkv.sealed import NAMES, CodePages, Codes, Pair, RecordPages, Records, codes_of

Make = Callable[[Rotations | None], Codes | Records]


@dataclass(frozen=True)
class Parts:
    """Snapshots of runs of pages, in the order of their tokens."""

    parts: tuple[CodePages | RecordPages, ...]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    def decode(self, side: int, dtype: mx.Dtype) -> mx.array:
        """Keys (side 0) or values (1) as attention sees them: [B, G, T, D]."""
        return mx.concatenate([part.decode(side, dtype) for part in self.parts], axis=2)


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
        self.runs: list[Codes | Records] = [make(now)]
        self.bases: list[Rotations | None] = [now]

    def __deepcopy__(self, memo):
        other = copy(self)
        other.runs = deepcopy(self.runs, memo)
        other.bases = list(self.bases)
        return other

    @property
    def count(self) -> int:
        return sum(run.count for run in self.runs)

    @property
    def dims(self) -> tuple[int, int]:
        return self.runs[0].dims

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

    def _turned(self, run, new: Rotations):
        """The same codes, read by another basis."""
        if not run.count:
            return self.make(new)
        made = self.make(new)
        made.restore(codes_of(run), run.count)
        return made

    def _merge(self) -> None:
        """Transport a run into the basis of the next one."""
        at = joining([run.count for run in self.runs])
        run, after = self.runs[at : at + 2]
        made = self.make(self.bases[at + 1])
        if count := run.count + after.count:
            made.restore(_merged(run, after), count)
        self.runs[at : at + 2] = [made]
        del self.bases[at]

    def read(self, start: int, stop: int) -> Parts | CodePages | RecordPages:
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
        first = 0
        for run in self.runs:
            run.truncate(min(run.count, max(0, count - first)))
            first += run.count
        now = self.bases[-1]
        kept = [i for i, run in enumerate(self.runs[:-1]) if run.count]
        self.runs = [self.runs[i] for i in kept] + [self.runs[-1]]
        self.bases = [self.bases[i] for i in kept] + [now]

    def select(self, choose: Callable[[int, int], tuple[mx.array, bool]], fixed: int) -> int:
        """Drop what is not chosen of the pages from `fixed` on; how many pages went.

        choose: (first page, pages) -> positions [B, G, N] of those that stay, and whether they are of
        pages; else of tokens, N a whole number of pages.
        """
        before, first = self.count, 0
        for i, run in enumerate(self.runs):
            count, begin = run.count, max(0, fixed - first)
            if begin < count:
                positions, by_page = choose(first + begin, count - begin)
                codes = codes_of(run)
                each = 1 if by_page else self.page
                left = begin + positions.shape[2] // each
                lead = mx.broadcast_to(
                    mx.arange(begin * each), (*positions.shape[:2], begin * each)
                )
                at = mx.concatenate([lead, begin * each + positions], axis=2)
                codes = {
                    n: {k: _taken(x, at, count * each) for k, x in codes[n].items()} for n in NAMES
                }
                self.runs[i] = self.make(self.bases[i])
                self.runs[i].restore(codes, left)
            first += count
        return before - self.count

    @property
    def by_token(self) -> bool:
        """Whether every array has a row for each token, so that tokens can go one by one."""
        rows = (
            x.shape[2] == run.count * self.page
            for run in self.runs
            if run.count
            for side in codes_of(run).values()
            for x in side.values()
        )
        return all(rows)

    def arrays(self) -> list[mx.array]:
        """What is allocated; bases that are shared by all caches are not."""
        own = [x for b in self.bases if b is not None for x in (b.keys.down, b.values.down)]
        return [x for run in self.runs for x in run.arrays()] + [x for x in own if x.ndim == 4]

    @property
    def state(self) -> dict:
        out: dict = {"counts": mx.array([run.count for run in self.runs], mx.int32)}
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


def saved(basis: Rotations) -> Stored:
    """The U of the sides that have one of this cache alone."""
    sides = {name: getattr(basis, name).down for name in NAMES}
    return {name: u for name, u in sides.items() if u.ndim == 4}


def loaded(start: Rotations | None, arrays: Stored) -> Rotations | None:
    """The inverse of `saved`; start: of the calibration."""
    return replace(start, **{n: following(u) for n, u in arrays.items()}) if arrays else start


def _merged(run: Codes | Records, after: Codes | Records) -> dict:
    """The state of a run, transported, and the next one together."""
    if not run.count:
        return after.state
    if type(run) is Records and run.layout.sealed_by_kernel:
        moved = run.transported(after.codecs)
        return _joined(moved, after.state) if after.count else moved
    moved = transported(run, after.codecs)
    if not after.count:
        return moved
    rest = codes_of(after)
    return {name: _joined(moved[name], rest[name]) for name in NAMES}


def transported(run: Codes | Records, codecs: tuple[Codec, Codec]) -> dict[str, Stored]:
    """The codes of a run as the bases of `codecs` would have stored them."""
    out = {}
    if not run.count:
        return out
    stored = codes_of(run)
    for name, old, new in zip(NAMES, run.codecs, codecs, strict=True):
        if old.transform is new.transform:
            out[name] = stored[name]
            continue
        values = old.decode_stored(stored[name], mx.float32)
        moved = values @ (old.transform.up @ new.transform.down)
        out[name] = new.method.encode(new.spec, moved, new.page)
    return out


def _joined(first: Stored, second: Stored) -> Stored:
    return {k: mx.concatenate([x, second[k]], axis=2) for k, x in first.items()}


def _taken(x: mx.array, at: mx.array, units: int) -> mx.array:
    """Rows of x [B, G, rows, W] that belong to the units `at` [B, G, N] of `units`."""
    batch, heads, rows, width = x.shape
    each = rows // units
    x = x.reshape(batch, heads, units, each * width)
    return mx.take_along_axis(x, at[..., None], axis=2).reshape(batch, heads, -1, width)
