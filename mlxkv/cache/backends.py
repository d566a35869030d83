"""Backends: the code that quantizes pages and attends to them.

    OpsBackend        plain MLX operations on the codes, anywhere
    PortableBackend   kernels for any GPU, over page records
    TileBackend       kernels for GPUs with matrix units, over page records
    RowsBackend       both, by the number of query rows: on Apple GPUs
    LatentBackend     the same over latents (MLA), whose codes are those of plain ops

`can_run` returns why a backend cannot run, or None; `choose.plan` asks them, the fastest first. Page stores and their
snapshots hold the chosen backend.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, cast

import mlx.core as mx

from mlxkv.codec import records
from mlxkv.codec.codec import Codec, Stored
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.records import NAMES, RecordLayout, record_layout, why_no_records
from mlxkv.metal import attend as kernels
from mlxkv.metal import latents, launch, quantize, tiles
from mlxkv.metal.launch import KernelBuilder
from mlxkv.metal.lengths import separate_lengths
from mlxkv.metal.template import Pair

if TYPE_CHECKING:
    from mlxkv.cache.view import LatentPages, RecordPages, Snapshot, View

RUNS = 2  # most runs of pages, each with its own basis, that a kernel reads in one pass
Mask = mx.array | str | None


@dataclass(frozen=True)
class Backend:
    """Quantizes and reads pages of one kind.

    name: printed in reports. kernel_builder: builds its kernels; None for plain ops.
    """

    kernel_builder: KernelBuilder | None = None
    name: ClassVar[str]

    def supports(self, config: CacheConfig, dims: tuple[int, int], dtype: mx.Dtype) -> str | None:
        """Return why this backend cannot read such pages on any machine, or None.

        config: the cache's. dims: key and value head dims. dtype: dtype of the windows.
        """

    def can_run(self, config: CacheConfig, dims: tuple[int, int], dtype: mx.Dtype) -> str | None:
        """Return why this machine cannot run it for pages that it `supports`, or None."""

    def reads(self, pages: Snapshot, mask: Mask) -> bool:
        """Return whether `attend` accepts these pages with this mask; otherwise they are decoded."""
        return True

    def attend(
        self,
        queries: mx.array,
        view: View,
        scale: float,
        mask: Mask,
        sink_logits: mx.array | None,
        softcap: float | None,
    ) -> mx.array:
        """Attend to a view with pages by queries [B, H, L, D] of a few new tokens; arguments as `attention.attend`."""
        raise NotImplementedError

    @property
    def builder(self) -> KernelBuilder:
        """Return `kernel_builder` of a backend with kernels."""
        assert self.kernel_builder is not None
        return self.kernel_builder

    @property
    def emulated(self) -> bool:
        """Return whether its kernels are emulated, and so cannot be traced."""
        return self.kernel_builder not in (None, mx.fast.metal_kernel, mx.fast.cuda_kernel)

    def __deepcopy__(self, memo):
        return self  # MLX's kernel builders cannot be copied

    def __reduce__(self):
        return type(self), ()  # kernel builders belong to a process


class OpsBackend(Backend):
    """Plain MLX operations: products with codes, scores of all parts side by side, one softmax."""

    name = "plain ops"

    @staticmethod
    def quantize(pair: Pair, codecs: tuple[Codec, ...], start: int, tokens: int) -> list[Stored]:
        """Encode `tokens` of keys and values [B, G, T, D] from token `start` on, whole pages, with each codec."""
        sides = zip(codecs, pair, strict=False)
        return [code.encode(x[:, :, start : start + tokens]) for code, x in sides]

    def attend(self, queries, view, scale, mask, sink_logits, softcap):
        """As `Backend.attend`."""
        batch, heads, new, dims = queries.shape
        sink, recent, pages = view.sink, view.recent, view.pages
        assert pages is not None
        # All query heads of a kv head in one product: [B, G, H/G * L, D].
        q = (queries.astype(mx.float32) * scale).reshape(batch, recent[0].shape[1], -1, dims)
        s = scorer(view)(q).reshape(batch, heads, new, -1)
        p = softmax(s, view.visible(mask, new), sink_logits, softcap).reshape(*q.shape[:3], -1)
        out, start = None, 0
        if sink is not None:
            start = sink[1].shape[2]
            out = p[..., :start] @ sink[1].astype(mx.float32)
        for run in pages.parts:
            part = run.mix(p[..., start : start + run.tokens])
            out = part if out is None else out + part
            start += run.tokens
        assert out is not None
        out = out + p[..., start:] @ recent[1].astype(mx.float32)
        return out.reshape(batch, heads, new, -1).astype(queries.dtype)


PLAIN_OPS = OpsBackend()


class PortableBackend(Backend):
    """Kernels over page records: codes are read once, nothing is decoded."""

    name = "kernels"
    launch: ClassVar[Callable[..., mx.array]] = staticmethod(kernels.attend)

    def supports(self, config: CacheConfig, dims: tuple[int, int], dtype: mx.Dtype) -> str | None:
        """As `Backend.supports`."""
        return why_no_records(config, *dims)

    def reads(self, pages: Snapshot, mask: Mask) -> bool:
        """Return False for array masks, since kernels compute their own, and for more than `RUNS` runs."""
        return not isinstance(mask, mx.array) and len(pages.parts) <= RUNS

    def quantize(
        self, pair: Pair, codecs: tuple[Codec, Codec], layout: RecordLayout, start: int, tokens: int
    ) -> Stored:
        """Encode `tokens` of keys and values [B, G, T, D] from token `start` on, whole pages, into records."""
        if (write := quantize.record_writer(layout)) is not None:
            transforms = codecs[0].transform, codecs[1].transform
            ranks = quantize.clip_ranks(codecs, (layout.keys.dims, layout.values.dims))
            return write(pair, layout, self.builder, transforms, start, tokens, ranks)
        codes = {}
        for name, x, code in zip(NAMES, pair, codecs, strict=True):
            codes[name] = code.encode(x[:, :, start : start + tokens])
        return records.to_records(codes, codecs)

    def attend(self, queries, view, scale, mask, sink_logits, softcap):
        """As `Backend.attend`."""
        sink, recent, lengths = view.sink, view.buffers or view.recent, view.lengths
        parts = cast("Sequence[RecordPages]", cast("Snapshot", view.pages).parts)
        runs = list(map(attrgetter("run"), parts))
        if lengths is None:
            heads, capacity = runs[0].buffer.shape[1:3]
            row = runs[0].records, sink[0].shape[2] if sink else 0, view.recent[0].shape[2]
            lengths = separate_lengths((row,) * len(queries), heads * capacity, runs[0].page)
        out = self.launch(
            queries, runs, sink, recent, lengths, scale, self.kernel_builder, sink_logits, softcap
        )
        return out.astype(queries.dtype)


class TileBackend(PortableBackend):
    """A PortableBackend with matrix-tile kernels: one dispatch."""

    name = "tile kernels"
    launch = staticmethod(tiles.attend)

    def can_run(self, config: CacheConfig, dims: tuple[int, int], dtype: mx.Dtype) -> str | None:
        """As `Backend.can_run`."""
        layout = record_layout(config, *config.dims(*dims))
        return tiles_off() or tiles.why_not(layout, dims[0], dtype, self.builder)


class RowsBackend(TileBackend):
    """Multiply-adds for up to `kernels.MOST_ROWS` query rows per kv head, tiles for more.

    On Apple GPUs each issues fewer instructions there (`agx.roofline`).
    """

    name = "kernels by rows"

    @staticmethod
    def launch(queries, runs, sink, recent, *arguments):
        """As `attend` of the body for these queries [B, H, L, D]."""
        body = kernels if rows_of(queries, recent) <= kernels.MOST_ROWS else tiles
        return body.attend(queries, runs, sink, recent, *arguments)

    def can_run(self, config: CacheConfig, dims: tuple[int, int], dtype: mx.Dtype) -> str | None:
        """As `Backend.can_run`."""
        layout = record_layout(config, *config.dims(*dims))
        decoded = None if kernels.multiplies(layout) else "codes are decoded first"
        return super().can_run(config, dims, dtype) or decoded


def rows_of(queries: mx.array, recent: Pair) -> int:
    """Return the query rows per kv head of queries [B, H, L, D] and keys [B, G, T, D]."""
    return queries.shape[1] // recent[0].shape[1] * queries.shape[2]


class LatentBackend(Backend):
    """A kernel over latents, for one new token of each sequence; plain ops for other calls."""

    name = TileBackend.name

    def supports(self, config: CacheConfig, dims: tuple[int, int], dtype: mx.Dtype) -> str | None:
        """As `Backend.supports`."""
        side = config.keys
        return latents.why_not(side.quantizer, side.dims(dims[0]), config.page, dtype)

    def can_run(self, config: CacheConfig, dims: tuple[int, int], dtype: mx.Dtype) -> str | None:
        """As `Backend.can_run`."""
        return tiles_off() or latents.why_not_here(self.builder)

    def attend(self, queries, view, scale, mask, sink_logits, softcap):
        """As `Backend.attend`. mask: added to the scores, or None."""
        pages, recent = cast("LatentPages", view.pages), view.recent[0]
        added = mask is None or (isinstance(mask, mx.array) and mask.dtype != mx.bool_)
        transform = pages.codecs[0].transform
        is_square = transform is None or transform.up.size == queries.shape[3] ** 2
        plain = added and is_square and softcap is None and sink_logits is None
        if queries.shape[2] != 1 or not plain:
            return PLAIN_OPS.attend(queries, view, scale, mask, sink_logits, softcap)
        shape, scores = (*queries.shape[:3], view.columns), cast("mx.array | None", mask)
        if scores is None:
            scores = mx.zeros(shape, recent.dtype)
        elif scores.shape != shape:
            scores = mx.broadcast_to(scores, shape)
        out = latents.attend(
            *(queries, pages.codecs[0], pages.stored[0], pages.tokens, view.sink and view.sink[0]),
            *(recent, scores, scale, self.builder, view.sizes),
        )
        return out.astype(queries.dtype)


def tiles_off() -> str | None:
    """Return why tile kernels are off in this process, or None."""
    if os.environ.get(launch.TILES_SWITCH) == "0":
        return f"{launch.TILES_SWITCH}=0"
    return launch.switched_off(launch.TILES)


# -- scores and softmax by plain ops


def scorer(view: View) -> Callable[[mx.array], mx.array]:
    """Return a function that multiplies q [B, G, N, D] float32 with the keys of sink, pages and recent: [B, G, N, T].

    Keys are decoded at most once.
    """

    def exact(window: Pair) -> Callable[[mx.array], mx.array]:
        keys = window[0].astype(mx.float32).swapaxes(-1, -2)
        return lambda q: q @ keys

    parts = [] if view.sink is None else [exact(view.sink)]
    for run in view.pages.parts if view.pages else ():
        parts.append(run.scorer())
    parts.append(exact(view.recent))

    def score(q: mx.array) -> mx.array:
        out = []
        for part in parts:
            out.append(part(q))
        return out[0] if len(out) == 1 else mx.concatenate(out, axis=-1)

    return score


def masked(scores: mx.array, mask: Mask) -> mx.array:
    """Apply `mask`, as in `attention.attend`, to scores [B, H, L, T] float32 of the last L tokens."""
    new, total = scores.shape[2:]
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f"[attend] unknown mask; got {mask!r}; choose causal, or an array")
        mask = mx.arange(total - new, total)[:, None] >= mx.arange(total)[None] if new > 1 else None
    if mask is not None:
        if mask.dtype == mx.bool_:
            # Not -inf: a fully masked row (left padding) must not become NaN.
            scores = mx.where(mask, scores, mx.finfo(mx.float32).min)
        else:
            scores = scores + mask.astype(mx.float32)
    return scores


def softmax(
    scores: mx.array, mask: Mask, sink_logits: mx.array | None, softcap: float | None = None
) -> mx.array:
    """Return the softmax of scores [B, H, L, T] float32, with sink logits in the denominator only."""
    total = scores.shape[3]
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    if mask is not None:
        scores = masked(scores, mask)
    if sink_logits is None:
        return mx.softmax(scores, axis=-1, precise=True)
    column = mx.broadcast_to(
        sink_logits.astype(mx.float32)[None, :, None, None], (*scores.shape[:3], 1)
    )
    return mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1, precise=True)[..., :total]
