"""`LatentPages`: sealed pages of latents, which a kernel reads in a decode step (`metal.latents`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import mlx.core as mx

from mlxkv.cache.view import OPS, CodePages, FixedView, View
from mlxkv.codec.codec import Codec, Stored
from mlxkv.metal import latents
from mlxkv.metal.template import ints


@dataclass(frozen=True)
class LatentPages(CodePages):
    """As CodePages, both sides the same codes of one kv head. plan: OPS, or with what builds the kernel.
    rotary: the codec and the codes of rotary keys, where these are not exact."""

    rotary: tuple[Codec, Stored] | None = None

    def decode_rotary(self, dtype: mx.Dtype) -> mx.array:
        """The rotary keys of these pages, [B, 1, T, N]."""
        code, stored = self.rotary
        return code.decode(stored, dtype)

    def reads(self, queries: mx.array, mask, sink_logits, softcap) -> bool:
        """Return whether the kernel computes this attention: one token a sequence, with scores to add or nothing."""
        if self.plan.body == OPS or queries.shape[2] != 1 or softcap is not None:
            return False
        turn = self.codecs[0].transform
        whole = turn is None or turn.up.size == queries.shape[3] ** 2
        added = mask is None or (isinstance(mask, mx.array) and mask.dtype != mx.bool_)
        return whole and added and sink_logits is None

    def attended(
        self,
        queries: mx.array,
        view: View | FixedLatents,
        scale: float,
        mask: mx.array | None,
    ) -> mx.array:
        """Attention of one token: queries [B, H, 1, R] -> [B, H, 1, R]. mask: added to the scores,
        broadcast to [B, H, 1, T]."""
        batch, heads, _, dims = queries.shape
        code, live = self.codecs[0], view.live[0]
        q = queries.reshape(batch, 1, heads, dims)
        exact = q.astype(mx.float32)
        stored = exact if code.transform is None else code.transform.query(exact)
        shape = batch, heads, 1, view.columns
        if mask is None:
            rotary = mx.zeros(shape, live.dtype)
        else:
            rotary = mask if mask.shape == shape else mx.broadcast_to(mask, shape)
        out = latents.attend(
            stored.reshape(batch, heads, dims),
            q.reshape(batch, heads, dims),
            self.stored[0],
            code.spec,
            code.page,
            self.tokens,
            None if view.sink is None else view.sink[0],
            live,
            rotary.reshape(batch, heads, -1),
            scale,
            self.plan.make,
            None if code.transform is None else code.transform.up,
            view.sizes if view.fixed else None,
        )
        return out.reshape(batch, heads, 1, dims).astype(queries.dtype)


@dataclass(frozen=True, eq=False)
class FixedLatents(FixedView):
    """What attention reads of latents in a step of fixed shapes, for one new token.

    counts: [tokens in pages, sink tokens, live tokens], int32, on the device. width: columns of rotary scores: in the
    order of tokens, with room behind the last one, or if not `in_order` sink | pages | live with the room of each.
    once: returns what a function makes, once a step for each key.
    """

    counts: mx.array
    width: int
    in_order: bool
    once: Callable[[Hashable, Callable[[], object]], object]

    @property
    def columns(self) -> int:
        return self.width

    def sizes(self, rows: int, splits: int, *rooms: int) -> mx.array:
        """The kernel's sizes (`metal.latents.attend`), which all layers share."""

        def make() -> mx.array:
            first = self.counts[0] + self.counts[1]
            if not self.in_order:
                first = mx.array(self.tokens - self.live[0].shape[2], mx.int32)
            parts = [ints(rows, splits), self.counts, ints(*rooms), first[None]]
            return mx.concatenate(parts)

        return self.once(("latent sizes", rows, splits, *rooms, self.in_order), make)

    def added(self, scores: mx.array) -> mx.array:
        """Rotary scores [B, H, 1, columns] in the order of the view, [B, H, 1, sink + pages + live], with what is not
        in use out of sight."""
        live, batch = self.live[0].shape[2], scores.shape[0]
        before = self.tokens - live
        if self.in_order:

            def places() -> mx.array:
                at = self.counts[0] + self.counts[1] + mx.arange(live, dtype=mx.int32)
                return mx.concatenate([mx.arange(before, dtype=mx.int32), at])

            scores = mx.take(scores, self.once(("places", before, live), places), axis=3)
        lowest = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
        seen = self.seen(1)
        return mx.where(seen if seen.shape[0] == 1 else seen[:batch], scores, lowest)
