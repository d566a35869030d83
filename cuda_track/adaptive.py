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

import torch

from cuda_track import oja, salience, segments
from cuda_track.attention import DECODE_TOKENS, Mask
from cuda_track.cache import CompressedKVCache, Pair, View
from cuda_track.calibrated import Rotations
from cuda_track.segments import Segments
from cuda_track.stores import store
from mlxkv.errors import UserError

WINDOW = 32  # last queries that choose tokens, where no basis follows


class AdaptiveKVCache(CompressedKVCache):
    """As CompressedKVCache, for every `config`."""

    def clear(self) -> None:
        """Forget all tokens, and what they have taught."""
        super().clear()
        self._now: Rotations | None = None  # the basis as it is, once it has learned
        self._since = 0  # tokens decoded since it learned
        self._unheard: View | None = None  # a chunk of a prompt, before anybody attends to it
        self._chunk = 0  # its tokens
        # Last queries of a prompt, [B, G, H / G, w, D], and their scale.
        self._asked: tuple[torch.Tensor, float] | None = None
        self._fixed = 0  # pages that have been chosen from

    @property
    def basis(self) -> Rotations | None:
        """That of the next page."""
        return self._now or self.rotations

    def _new_store(self, live: Pair):
        if not self.config.listens:
            return super()._new_store(live)
        dims = tuple(x.shape[3] for x in live)
        make = partial(store, self.config, dims, live[0].device)
        return Segments(make, self.rotations, self.basis, self.config.page, self.config.rule)

    # -- reading and writing

    def update_and_fetch(self, keys: torch.Tensor, values: torch.Tensor) -> View:
        if not self.config.listens:
            return super().update_and_fetch(keys, values)
        self._seal_rest()
        if keys.shape[2] <= DECODE_TOKENS:
            self._keep()
            self._learn()
            self._since += keys.shape[2]
            return super().update_and_fetch(keys, values)
        new = (keys, values)
        self._check_batch(keys)
        if self._count:
            new = tuple(torch.cat(pair, 2) for pair in zip(self._read_live(), new, strict=True))
        self._live, self._count = new, new[0].shape[2]
        self.offset += keys.shape[2]
        self._since = 0
        pages = self._store.read(0, self._count_pages) if self._count_pages else None
        self._unheard = View(new, self._sink, pages, heard=self._hear)
        self._chunk = keys.shape[2]
        return self._unheard

    def _seal_rest(self) -> None:
        """Seal what is beyond the room; the basis has learned from it, or nobody attended to it."""
        self._unheard = None
        if self._live is not None and self._count > self._room:
            live, self._live = self._read_live(), None
            self._seal(live)

    def _hear(self, queries: torch.Tensor, scale: float, mask: Mask) -> None:
        """queries: [B, H, L, D] of attention over the chunk that was handed over last."""
        view = self._unheard
        if view is None:  # another layer that reads this cache has been here
            return
        tensor = isinstance(mask, torch.Tensor)
        if self.config.keep < 1 and tensor:
            raise UserError(
                "[--kv] token selection takes prompts without padding; got a mask; choose a preset "
                "without +keep, or one prompt at a time"
            )
        window = self.config.rule.window if self.config.follows else WINDOW
        last = queries[:, :, -window:]
        if self.config.keep < 1:
            batch, heads, count, dims = last.shape
            kv_heads = view.live[0].shape[1]
            grouped = last.reshape(batch, kv_heads, heads // kv_heads, count, dims)
            self._asked = grouped.clone(), scale
        if self.config.follows:
            rows = mask[..., -last.shape[2] :, :] if tensor else None
            self._learn_from_prompt(last, view, scale, rows)
        self._seal_rest()

    def _learn_from_prompt(self, queries: torch.Tensor, view: View, scale: float, mask) -> None:
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

    def _keep(self) -> None:
        """Drop the sealed tokens of the prompt that its last queries did not vote for."""
        if self._asked is None:
            return
        (queries, scale), self._asked = self._asked, None
        if self._count_pages <= self._fixed:
            return
        page, sink = self.config.page, self._sink[0].shape[2] if self._sink else 0
        seen = salience.importance(queries.flatten(1, 2), self.view(), scale)
        found = salience.votes(seen)
        by_page = self.config.whole_pages or not self._store.by_token

        def choose(first: int, count: int) -> tuple[torch.Tensor, bool]:
            part = found[..., sink + first * page :][..., : count * page]
            left = max(1, round(self.config.keep * count))
            if by_page:
                return salience.kept_pages(part, page, left), True
            return salience.kept(part, left * page), False

        self.dropped += page * self._store.keep(choose, self._fixed)
        self._fixed = self._count_pages

    # -- the rest of the contract

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

    def select(self, rows: torch.Tensor) -> None:
        super().select(rows)
        self._now = segments.of_rows(self._now, rows)
        if self._asked is not None:
            self._asked = self._asked[0][rows], self._asked[1]

    def _arrays(self) -> list[torch.Tensor]:
        asked = [] if self._asked is None else [self._asked[0]]
        now = [] if self._store is not None else segments.saved(self._now).values()
        return [*super()._arrays(), *asked, *now]

    def _extra(self) -> tuple[dict, dict]:
        header = {"since": self._since, "dropped": self.dropped, "fixed": self._fixed}
        tree: dict = {}
        if self._now is not None:
            tree["basis"] = segments.saved(self._now)
        if self._asked is not None:
            tree["asked"], header["scale"] = self._asked
        return header, tree

    def _restore_extra(self, header: dict, tree: dict) -> None:
        self._since, self.dropped, self._fixed = (header[n] for n in ("since", "dropped", "fixed"))
        if "basis" in tree:
            self._now = segments.loaded(self.rotations, tree["basis"])
        if "asked" in tree:
            self._asked = tree["asked"], float(header["scale"])
