"""`Observing`: what a cache that observes queries counts and decides; arithmetic on tensors belongs to the
tracks. No framework is imported here.

    prompt:  a chunk is attended to in full precision; then its last queries choose the tokens that
             teach the basis (OjaKV), and only then its oldest pages are quantized
    decode:  the first step drops what the last queries of the prompt did not vote for (SnapKV), and
             moves the prompt's last tokens behind the sink, if they are to stay exact (OjaKV, section
             5.1); every so many tokens the basis learns from those decoded since

A prompt that is read in chunks updates once per chunk: the paper reads it at once, which would take all
of it in full precision. Keys carry their positions (RoPE is in them), so tokens may go; `offset` counts
all that were ever read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mlxkv.formats.rules.runs import Runs, loaded, saved
from mlxkv.formats.rules.windowed import WindowedCache
from mlxkv.formats.rules.windows import WINDOW, Pair, Tensor, TrimPlan, Windows, between

POOL = 7  # tokens: neighbours of an important token stay too
BLOCK = 8  # queries whose scores are computed at a time


class Observing(WindowedCache):
    """A mixin over a compressed cache of either track.

    dropped: tokens that were read and are not stored. pinned: length of the prompt whose last tokens stand behind the
        sink, out of order: nothing ends inside it.
    """

    def _forget(self) -> None:
        super()._forget()
        self._basis: Any = None  # the basis, once it has learned
        self._since = 0  # tokens decoded since it learned
        self._pending: Any = None  # the view of a chunk of a prompt that attention has not read
        self._chunk = 0  # its tokens
        # Last queries of a prompt, [B, G, H / G, w, D], and their scale.
        self._queries: tuple[Tensor, float] | None = None
        self.dropped = 0  # tokens
        self.pinned = 0  # length of the prompt whose last tokens were moved
        self._fixed = 0  # pages that have been chosen from

    @property
    def basis(self) -> Any:
        """The basis of the next page, or None."""
        return self._basis or self.layer_maps

    # -- what a track adds: how much the last queries look at each token (`importance`, [B, G, T]), and
    # which tokens that chooses

    layer_maps: Any
    view: Callable[[], Any]  # what attention reads
    importance: Callable[..., Tensor]
    salient: Callable[..., Tensor]
    taken: Callable[..., Tensor]
    votes: Callable[..., Tensor]
    kept: Callable[..., Tensor]
    kept_pages: Callable[..., Tensor]
    # After keys and values [B, G, N, D], of a prompt or not.
    _next_basis: Callable[[Pair, bool], Any]

    def _before_decoding(self, new: int) -> None:
        """Drop, pin and learn what the end of a prompt and the tokens since ask for, ahead of `new` decoded ones."""
        self._keep()
        self._pin()
        self._learn()
        self._since += new

    # -- queries

    def _quantize_rest(self) -> None:
        """Quantize the tokens beyond capacity: the basis has learned from them, or no attention read them."""
        self._pending = None
        if self._recent is not None and self._count > self._recent_capacity:
            recent, self._recent = self._read_recent(), None
            self._quantize_pages(recent)

    def _observe(self, queries: Tensor, scale: float, rows) -> bool:
        """Observe queries [B, H, L, D] of attention over the last chunk. rows(n): the mask of the last n.

        Returns False if another layer that reads this cache was observed before.
        """
        view = self._pending
        if view is None:
            return False
        online = self.config.online
        last = queries[:, :, -(online.window if online else WINDOW) :]
        if self.config.keep < 1:
            batch, heads, count, dims = last.shape
            kv_heads = view.recent[0].shape[1]
            grouped = last.reshape(batch, kv_heads, heads // kv_heads, count, dims)
            self._queries = self._compact(grouped), scale
        if online:
            new = self._chunk
            weights = self.importance(last, view, scale, rows(last.shape[2]))[..., -new:]
            at = self.salient(weights, max(1, round(online.salient * new)))
            keys, values = between(view.recent, -new, None)
            self._teach((self.taken(keys, at), self.taken(values, at)), True)
        self._quantize_rest()
        return True

    def _compact(self, x: Tensor) -> Tensor:
        """x, or a copy where it would hold a larger tensor."""
        return x

    def _learn(self) -> None:
        """Teach the basis the tokens decoded since the last time, when they are enough."""
        online = self.config.online
        if online is None or self._since < online.every:
            return
        count = min(self._since, self._count)
        self._since = 0
        if count:
            self._teach(between(self._read_recent(), -count, None), False)

    def _teach(self, batch: Pair, prompt: bool) -> None:
        basis = self._next_basis(batch, prompt)
        if basis is not self.basis:
            self._basis = basis
            if self.store is not None:
                self._runs.rebase(basis)

    @property
    def _runs(self) -> Runs:
        assert isinstance(self.store, Runs)
        return self.store

    def _keep(self) -> None:
        """Drop the quantized tokens of the prompt that its last queries did not vote for."""
        if self._queries is None:
            return
        (queries, scale), self._queries = self._queries, None
        if self._count_pages <= self._fixed:
            return
        page, sink = self.config.page, self.sink[0].shape[2] if self.sink else 0
        votes = self.votes(self.importance(queries.flatten(1, 2), self.view(), scale))
        by_page = self.config.whole_pages or not self._runs.by_token

        def choose(first: int, count: int) -> tuple[Tensor, bool]:
            part = votes[..., sink + first * page :][..., : count * page]
            pages = max(1, round(self.config.keep * count))
            if by_page:
                return self.kept_pages(part, page, pages), True
            return self.kept(part, pages * page), False

        self.dropped += page * self._runs.keep(choose, self._fixed)
        self._fixed = self._count_pages
        self.last = None  # of another page now

    def _pin(self) -> None:
        """Move the last tokens of the first prompt, now that it is read, behind the sink, where they stay exact.

        Attention asks for no order among tokens that all new ones see. Up to `cache.attention.DECODE_TOKENS`
        tokens that end a prompt count as decoded.
        """
        if not self._chunk or self.pinned or not self.config.pinned:
            return
        pair, sink = self._read_recent(), self.sink
        tail = self._count - min(self.config.pinned, self._count)
        head = min(self.config.sink, tail) if sink is None else 0
        first = between(pair, None, head) if sink is None else sink
        last = between(pair, tail, None)
        self.sink = self._join(first, last)
        middle = between(pair, head, tail)
        self._recent, self._count, self.last = None, 0, None
        if head < tail:
            self._append(*middle)
        self.pinned = self.offset

    # -- the rest of the contract

    @property
    def windows(self) -> Windows:
        """Where its tokens are: nothing ends among tokens that were chosen for a prompt, or moved."""
        windows = super().windows
        chosen = self._fixed if self.dropped else 0
        shortest = self.dropped and self.dropped + windows.sink + chosen * self.config.page
        return replace(windows, dropped=self.dropped, shortest=max(shortest, self.pinned))

    def _trim(self, plan: TrimPlan) -> None:
        """Trim as without selection; bases keep what they have learned."""
        super()._trim(plan)
        if n := plan.removed:
            self._since = max(0, self._since - n)
            self._fixed = min(self._fixed, self._count_pages)
            self._pending = self._queries = None

    def _extra(self) -> tuple[dict, dict]:
        header = {"since": self._since, "dropped": self.dropped, "fixed": self._fixed}
        if self.config.pinned:
            header |= {"pinned": self.pinned, "chunk": self._chunk}
        tree: dict = {}
        if self._basis is not None:
            tree["basis"] = saved(self._basis)
        if self._queries is not None:
            tree["asked"], header["scale"] = self._queries
        return header, tree

    def _restore_extra(self, header: dict, tree: dict) -> None:
        self._since, self.dropped, self._fixed = (header[n] for n in ("since", "dropped", "fixed"))
        self.pinned, self._chunk = (header.get(name, 0) for name in ("pinned", "chunk"))
        if "basis" in tree:
            self._basis = loaded(self.layer_maps, tree["basis"])
        if ("asked" in tree) != ("scale" in header):
            raise ValueError("queries without their scale, or without queries")
        if "asked" in tree:
            self._queries = tree["asked"], float(header["scale"])

    def _own_arrays(self) -> list[Tensor]:
        """Return arrays other than windows and pages; the store includes the basis, once it has one."""
        queries = [] if self._queries is None else [self._queries[0]]
        alone = self._basis is not None and self.store is None
        return [*queries, *(saved(self._basis).values() if alone else ())]
