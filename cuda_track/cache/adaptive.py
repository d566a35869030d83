"""`AdaptiveKVCache`: a compressed cache that observes the queries (`mlxkv.formats.rules.observing` says what for),
and how much the last queries of a prompt look at each token. Spec: `mlxkv.spec.oja`."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import pad

from cuda_track.cache import choose, following, runs
from cuda_track.cache.attention import DECODE_TOKENS, Mask, causal, masked, scores
from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.cache.runs import Segments, Store
from cuda_track.cache.view import Pair, View
from cuda_track.codec.codec import both
from cuda_track.codec.maps import LayerMaps
from mlxkv.errors import UserError
from mlxkv.formats.rules.observing import BLOCK, POOL, Observing


def importance(
    queries: torch.Tensor, view: View, scale: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum the softmax scores of the last queries [B, H, w, D] over them and over the heads of a kv head.

    mask: of these queries; None: causal. Returns [B, G, T] float32.
    """
    batch, heads, new, dims = queries.shape
    kv_heads, total = view.recent[0].shape[1], view.tokens
    if mask is None:
        mask = causal(new, total, queries.device)
    q = (queries.float() * scale).reshape(batch, kv_heads, -1, new, dims)
    out = queries.new_zeros(batch, kv_heads, total, dtype=torch.float32)
    for start in range(0, new, BLOCK):  # the scores of all at once would be large
        part = slice(start, min(start + BLOCK, new))
        s = scores(q[..., part, :].flatten(2, 3), view).reshape(batch, heads, -1, total)
        rows = mask[..., part, :] if mask.shape[-2] > 1 else mask
        p = masked(s, rows).softmax(-1)
        out = out + p.reshape(batch, kv_heads, -1, total).sum(2)
    return out


def salient(importance: torch.Tensor, count: int) -> torch.Tensor:
    """[B, count] ascending positions that all heads together look at most; importance: [B, G, T]."""
    return _largest(importance.sum(1), count)


def taken(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Tokens `at` [B, N] of x [B, G, T, D]."""
    return x.take_along_dim(at[:, None, :, None], 2)


def votes(importance: torch.Tensor, pool: int = POOL) -> torch.Tensor:
    """[B, G, T]: the largest importance among `pool` neighbours."""
    reach = pool // 2
    return pad(importance, (reach, reach), value=-torch.inf).unfold(-1, pool, 1).amax(-1)


def kept(votes: torch.Tensor, count: int) -> torch.Tensor:
    """[B, G, count] ascending positions of the largest votes [B, G, T]."""
    return _largest(votes, count)


def kept_pages(votes: torch.Tensor, page: int, count: int) -> torch.Tensor:
    """[B, G, count] ascending pages, the same for all kv heads, by the votes of all their tokens."""
    batch, heads, total = votes.shape
    by_page = votes.reshape(batch, heads, total // page, page).sum((1, 3))
    return _largest(by_page, count)[:, None].expand(batch, heads, count)


def _largest(x: torch.Tensor, count: int) -> torch.Tensor:
    """Ascending positions of the `count` largest; of equal ones the earlier."""
    return x.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(-1).values


class AdaptiveKVCache(Observing, CompressedKVCache):
    """As CompressedKVCache, for a `config` that needs queries."""

    importance = staticmethod(importance)
    salient, taken = staticmethod(salient), staticmethod(taken)
    votes = staticmethod(votes)
    kept, kept_pages = staticmethod(kept), staticmethod(kept_pages)

    def _new_store(self, recent: Pair) -> Store | Segments:
        dims = both(lambda x: x.shape[3], recent)
        make = partial(choose.store, self.config, dims, recent[0].device)
        return Segments(make, self.layer_maps, self.basis, self.config.page, self.config.online)

    def update_and_fetch(self, keys: torch.Tensor, values: torch.Tensor) -> View:
        self._quantize_rest()
        if keys.shape[2] <= DECODE_TOKENS:
            self._before_decoding(keys.shape[2])
            return super().update_and_fetch(keys, values)
        self._check_batch(keys)
        self._recent = self._with_recent((keys, values))
        self._count, self._chunk, self._since = self._recent[0].shape[2], keys.shape[2], 0
        self.offset += keys.shape[2]
        self._pending = View(self._recent, self.sink, self._pages(), observer=self._attended)
        return self._pending

    def _attended(self, queries: torch.Tensor, scale: float, mask: Mask) -> None:
        """Take the queries [B, H, L, D] of the last chunk; attention calls it."""
        rows = mask if isinstance(mask, torch.Tensor) else None
        if self._pending is not None and self.config.keep < 1 and rows is not None:
            raise UserError(
                "[--kv] token selection takes prompts without padding; got a mask; choose a preset "
                "without +keep, or one prompt at a time"
            )
        self._observe(queries, scale, lambda n: rows if rows is None else rows[..., -n:, :])

    def _compact(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def _next_basis(self, batch: Pair, prompt: bool) -> LayerMaps:
        return following.taught(self.basis, self.config, batch, prompt)

    def select(self, rows: torch.Tensor) -> None:
        super().select(rows)
        self._basis = runs.of_rows(self._basis, rows)
        if self._queries is not None:
            self._queries = self._queries[0][rows], self._queries[1]

    def _arrays(self) -> list[torch.Tensor]:
        return [*super()._arrays(), *self._own_arrays()]
