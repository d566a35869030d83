"""`Segments`: quantized pages in runs of one basis each, for caches whose basis follows the text."""

from __future__ import annotations

import torch

from cuda_track.cache.stores import Codes, Paged
from cuda_track.cache.view import Parts
from cuda_track.codec.codec import Codec, Stored
from cuda_track.codec.maps import LayerMaps
from mlxkv.formats.records import NAMES
from mlxkv.formats.rules.runs import Runs, loaded, saved

Store = Codes | Paged


class Segments(Runs):
    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order, each with its bases."""
        for i, (run, basis) in enumerate(zip(self.runs, self.bases, strict=True)):
            if run.count:
                run.select(rows)
            chosen = of_rows(basis, rows)
            if chosen is not basis:
                self.runs[i], self.bases[i] = self._transformed(run, chosen), chosen

    def _codes(self, run: Store) -> dict[str, Stored]:
        return dict(zip(NAMES, run.read(0, run.count).stored, strict=True))

    def _merged(self, run: Store, next_run: Store) -> dict:
        parts = [transported(run, next_run.codecs)] if run.count else []
        parts += [self._codes(next_run)] if next_run.count else []
        if len(parts) == 1:
            return parts[0]
        return {
            name: {n: torch.cat([part[name][n] for part in parts], 2) for n in parts[0][name]}
            for name in NAMES
        }

    def _parts(self, snapshots) -> Parts:
        return Parts(tuple(snapshots))

    def _selected(
        self, codes: dict[str, Stored], begin: int, chosen: torch.Tensor, count: int
    ) -> tuple[dict[str, Stored], int]:
        first = torch.arange(begin, device=chosen.device).expand(*chosen.shape[:2], -1)
        at = torch.cat([first, begin + chosen], 2)

        def taken(x: torch.Tensor) -> torch.Tensor:
            units = x.unflatten(2, (count, -1)).flatten(3)
            units = units.take_along_dim(at[..., None], 2)
            return units.view(*units.shape[:3], -1, x.shape[3]).flatten(2, 3)

        picked_codes = {
            name: {n: taken(x) for n, x in side.items()} for name, side in codes.items()
        }
        return picked_codes, at.shape[2]

    def _counts(self, counts: list[int]) -> torch.Tensor:
        return torch.tensor(counts, dtype=torch.int32)


def of_rows(basis: LayerMaps | None, rows: torch.Tensor) -> LayerMaps | None:
    """Return the basis of these rows of the batch; itself where all rows share it."""
    return loaded(basis, {name: u[rows] for name, u in saved(basis).items()})


def transported(run: Store, codecs: tuple[Codec, Codec]) -> dict[str, Stored]:
    """Return the codes of a run as the bases of `codecs` would have stored them."""
    out, codes = {}, run.read(0, run.count).stored
    for name, stored, old, new in zip(NAMES, codes, run.codecs, codecs, strict=True):
        if old.transform is not new.transform:
            assert old.transform is not None and new.transform is not None  # of low rank
            values = old.decode_stored(stored, torch.float32)
            moved = values @ (old.transform.up @ new.transform.down)
            stored = new.method.encode(new.quantizer, moved, new.page)
        out[name] = stored
    return out
