"""`AdaptiveKVCache`: a compressed cache that hears the queries.

    prompt:  a chunk is attended to in full precision; then its last queries choose the tokens that
             teach the basis (OjaKV), and only then its oldest pages are sealed
    decode:  the first step drops what the last queries of the prompt did not vote for (SnapKV); every
             so many tokens the basis learns from those decoded since

A prompt that is read in chunks updates once per chunk: the paper reads it at once, which would need all
of it in full precision. Keys carry their positions (RoPE is in them), so tokens may go; `offset` counts
all that were ever read.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlxkv import oja, salience, segments
from mlxkv.attention import DECODE_TOKENS
from mlxkv.cache import CompressedKVCache, Pair, View
from mlxkv.calibrated import Rotations
from mlxkv.errors import UserError
from mlxkv.sealed import store
from mlxkv.segments import Segments

WINDOW = 32  # last queries that choose tokens, where no basis follows


class AdaptiveKVCache(CompressedKVCache):
    """As CompressedKVCache, for every `config`."""

    def _clear(self) -> None:
        super()._clear()
        self._now: Rotations | None = None  # the basis as it is, once it has learned
        self._since = 0  # tokens decoded since it learned
        self._unheard: View | None = None  # a chunk of a prompt, before anybody attends to it
        self._chunk = 0  # its tokens
        # Last queries of a prompt, [B, G, H / G, w, D], and their scale.
        self._asked: tuple[mx.array, float] | None = None
        self.dropped = 0  # tokens
        self._fixed = 0  # pages that have been chosen from

    @property
    def basis(self) -> Rotations | None:
        """That of the next page."""
        return self._now or self.rotations

    def _new_store(self, dims: tuple[int, int], dtype: mx.Dtype):
        if not self.config.listens:
            return super()._new_store(dims, dtype)
        make = partial(store, self._stored, dims, dtype)
        rule = self.config.rule
        return Segments(make, self.rotations, self.basis, self.config.page, rule)

    # -- reading and writing

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[View, View]:
        if not self.config.listens:
            return super().update_and_fetch(keys, values)
        self._follow_weights()
        self._seal_rest()
        if keys.shape[2] <= DECODE_TOKENS:
            self._select()
            self._learn()
            self._since += keys.shape[2]
            return super().update_and_fetch(keys, values)
        new = (keys, values)
        self._check_batch(keys)
        if self._count:
            new = tuple(mx.concatenate(p, axis=2) for p in zip(self._read_live(), new, strict=True))
        self._live, self._count = new, new[0].shape[2]
        self.offset += keys.shape[2]
        self._since = 0
        pages = self._store.read(0, self._count_pages) if self._count_pages else None
        view = View(new, self._sink, pages, plain=pages is None, heard=self._hear)
        self._unheard, self._chunk = view, keys.shape[2]
        return view, view

    def _seal_rest(self) -> None:
        """Seal what is beyond the room; the basis has learned from it, or nobody attended to it."""
        self._unheard = None
        if self._live is not None and self._count > self._room:
            live = self._read_live()
            self._live = None
            self._seal(live)

    def _hear(self, queries: mx.array, out: mx.array, scale: float, mask) -> mx.array:
        """queries: [B, H, L, D] of attention over the chunk that was handed over last -> its `out`, by
        then computed together with what it changes here."""
        view = self._unheard
        if view is None:  # another layer that reads this cache has been here
            return out
        window = self.config.rule.window if self.config.follows else WINDOW
        last = queries[:, :, -window:]
        if self.config.keep < 1:
            batch, heads, count, dims = last.shape
            kv_heads = view.live[0].shape[1]
            self._asked = last.reshape(batch, kv_heads, heads // kv_heads, count, dims), scale
        if self.config.follows:
            rows = mask[..., -last.shape[2] :, :] if isinstance(mask, mx.array) else None
            self._learn_from_prompt(last, view, scale, rows)
        self._seal_rest()
        return mx.depends(out, list(self._arrays()))

    def _learn_from_prompt(self, queries: mx.array, view: View, scale: float, mask) -> None:
        """By the tokens of this chunk that its last queries look at most."""
        new = self._chunk
        seen = salience.importance(queries, view, scale, mask)[..., -new:]
        count = max(1, round(self.config.rule.salient * new))
        at = salience.salient(seen, count)
        chunk = (x[:, :, -new:] for x in view.live)
        self._teach(tuple(salience.taken(x, at) for x in chunk), True)

    def _learn(self) -> None:
        """By the tokens decoded since the last time, when they are enough."""
        if not self.config.follows or self._since < self.config.rule.every:
            return
        count = min(self._since, self._count)
        self._since = 0
        if count:
            self._teach(tuple(x[:, :, -count:] for x in self._read_live()), False)

    def _teach(self, batch: Pair, prompt: bool) -> None:
        now = oja.taught(self.basis, self.config, batch, prompt, batch[0].shape[:2])
        if now is not self.basis:
            self._now = now
            if self._store is not None:
                self._store.rebase(now)

    def _select(self) -> None:
        """Drop the sealed tokens of the prompt that its last queries did not vote for."""
        if self._asked is None:
            return
        (queries, scale), self._asked = self._asked, None
        queries = queries.flatten(1, 2)
        if self._count_pages <= self._fixed:
            return
        page, sink = self.config.page, self._sink[0].shape[2] if self._sink else 0
        view = self._view(self._read_live(), self._sink, self._count_pages)
        found = salience.votes(salience.importance(queries, view, scale))
        by_page = self.config.whole_pages or not self._store.by_token

        def choose(first: int, count: int) -> tuple[mx.array, bool]:
            part = found[..., sink + first * page :][..., : count * page]
            left = max(1, round(self.config.keep * count))
            if by_page:
                return salience.kept_pages(part, page, left), True
            return salience.kept(part, left * page), False

        self.dropped += page * self._store.select(choose, self._fixed)
        self._fixed = self._count_pages

    # -- the rest of mlx-lm's contract

    def is_trimmable(self) -> bool:
        """Not once tokens have gone: what was chosen was chosen for this prompt."""
        return not self.dropped

    def trim(self, n: int) -> int:
        """As without selection. Raises UserError where tokens are gone."""
        if not self.dropped:
            n = super().trim(n)
        else:
            since = self._count + (self._count_pages - self._fixed) * self.config.page
            if n > since:
                raise UserError(
                    f"[CompressedKVCache] tokens were dropped: the last {since} can be trimmed; got {n}"
                )
            gone, self.dropped = self.dropped, 0  # positions in what is stored
            fixed, self._fixed, self.offset = self._fixed, 0, self.offset - gone
            n = super().trim(n)
            self.offset, self.dropped, self._fixed = self.offset + gone, gone, fixed
        self._since = max(0, self._since - n)
        self._fixed = min(self._fixed, self._count_pages)
        self._unheard = self._asked = None
        return n

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        if not self.dropped or (window_size is None and not return_array):
            return super().make_mask(N, return_array, window_size)
        if window_size is not None:
            raise UserError(
                "[--kv] token selection needs layers that see the whole context; got a mask with a "
                f"window of {window_size}; choose a preset without +keep"
            )
        self.offset -= self.dropped
        try:
            return super().make_mask(N, return_array, window_size)
        finally:
            self.offset += self.dropped

    def _arrays(self) -> tuple[mx.array, ...]:
        asked = () if self._asked is None else (self._asked[0],)
        now = (
            ()
            if self._now is None or self._store is not None
            else segments.saved(self._now).values()
        )
        return (*super()._arrays(), *asked, *now)

    def _extra(self) -> tuple[dict, dict]:
        header = {"since": self._since, "dropped": self.dropped, "fixed": self._fixed}
        tree: dict = {}
        if self._now is not None:
            tree["basis"] = segments.saved(self._now)
        if self._asked is not None:
            tree["asked"], header["scale"] = self._asked[0], self._asked[1]
        return header, tree

    def _restore_extra(self, header: dict, tree: dict) -> None:
        self._since, self.dropped, self._fixed = (header[n] for n in ("since", "dropped", "fixed"))
        if "basis" in tree:
            self._now = segments.loaded(self.rotations, tree["basis"])
        if "asked" in tree:
            self._asked = tree["asked"], float(header["scale"])
