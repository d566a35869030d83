"""The input of attention: the view of a cache after one update, and the quantized pages in it.

Quantized pages are read through snapshots, which a store returns. All have the same members:

    backend              the code that reads them (`backends`)
    tokens               in these pages
    parts                runs of pages of one transform, in the order of their tokens
    decode(side, dtype)  keys (side 0) or values (1) as attention sees them, [B, G, T, D]

Snapshots of one run (`PageRun`) also have the parts of an attention over them. Shapes: q [B, G, N, D], p [B, G, N, T],
both float32.

    scorer()             a function of q: q . k^ for every token, [B, G, N, T]; keys are decoded once for several q
    mix(p)               sum_t p_t v^_t: [B, G, N, D] float32
    square_transforms    transforms that lead into the stored domain, where attention may stay in it
    between(sink, recent)  keys and values of all tokens, [B, G, T, R], pages in the stored domain, in the dtype of
    recent
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar, overload

import mlx.core as mx

from mlxkv.cache.backends import PLAIN_OPS, Backend
from mlxkv.codec.codec import Codec, Stored
from mlxkv.codec.transform import Transform
from mlxkv.errors import UserError
from mlxkv.formats.layout import TOKENS
from mlxkv.metal import attend as kernels
from mlxkv.metal.attend import Run
from mlxkv.metal.lengths import Lengths
from mlxkv.metal.template import ints

Pair = tuple[mx.array, mx.array]
T = TypeVar("T")
OneRun = TypeVar("OneRun", bound="PageRun")


@overload
def both(change: Callable[[mx.array], mx.array], pair: Pair, /) -> Pair: ...
@overload
def both(
    change: Callable[[mx.array, mx.array], mx.array], first: Pair, second: Pair, /
) -> Pair: ...
def both(change: Callable[..., mx.array], *pairs: Pair) -> Pair:
    """Apply `change` to the keys of all pairs, and to their values."""
    keys, values = zip(*pairs, strict=True)
    return change(*keys), change(*values)


def joined(*pairs: Pair) -> Pair:
    """Concatenate keys and values [B, G, T, D] of all pairs."""
    keys, values = zip(*pairs, strict=True)
    return mx.concatenate([*keys], axis=2), mx.concatenate([*values], axis=2)


# -- quantized pages


@dataclass(frozen=True)
class PageRun:
    """Pages of one transform."""

    codecs: tuple[Codec, Codec]

    @property
    def parts(self: OneRun) -> tuple[OneRun]:
        return (self,)

    @property
    def square_transforms(self) -> tuple[Transform | None, Transform | None] | None:
        """Transforms for windows, queries and outputs; None if one is not square."""
        transforms = self.codecs[0].square_transform, self.codecs[1].square_transform
        is_pure = all(
            code.transform is transform
            for code, transform in zip(self.codecs, transforms, strict=True)
        )
        return transforms if is_pure else None


@dataclass(frozen=True)
class CodePages(PageRun):
    """Pages as plain ops read them. tokens: in these pages."""

    stored: tuple[Stored, Stored]
    tokens: int
    backend: Backend = PLAIN_OPS

    def scorer(self) -> Callable[[mx.array], mx.array]:
        return partial(self.codecs[0].scores, stored=self.stored[0])

    def mix(self, p: mx.array) -> mx.array:
        return self.codecs[1].mix(p, self.stored[1])

    def decode(self, side: int, dtype: mx.Dtype) -> mx.array:
        return self.codecs[side].decode(self.stored[side], dtype)

    def between(self, sink: Pair | None, recent: Pair) -> Pair:
        (keys, values), (stored_keys, stored_values) = self.codecs, self.stored
        pages = (
            keys.decode_stored(stored_keys, recent[0].dtype),
            values.decode_stored(stored_values, recent[1].dtype),
        )
        return joined(pages, recent) if sink is None else joined(sink, pages, recent)


@dataclass(frozen=True)
class RecordPages(PageRun):
    """Pages as kernels read them."""

    backend: Backend
    run: Run

    @property
    def tokens(self) -> int:
        return self.run.records * TOKENS

    def scorer(self) -> Callable[[mx.array], mx.array]:
        transform = self.codecs[0].transform
        keys = self._dequantized(0, mx.float32).swapaxes(-1, -2)
        if transform is None:
            return lambda q: q @ keys
        return lambda q: transform.query(q) @ keys  # queries are transformed, not the many keys

    def mix(self, p: mx.array) -> mx.array:
        return p @ self.decode(1, mx.float32)

    def decode(self, side: int, dtype: mx.Dtype) -> mx.array:
        code = self.codecs[side]
        return code.restore(self._dequantized(side, code.work_dtype(dtype)), dtype)

    def between(self, sink: Pair | None, recent: Pair) -> Pair:
        return kernels.dequantize(self.run, recent[0].dtype, self.backend.builder, sink, recent)

    def _dequantized(self, side: int, dtype: mx.Dtype) -> mx.array:
        """Dequantize one side in the stored domain, [B, G, T, R]."""
        return kernels.dequantize_side(self.run, side == 0, dtype, self.backend.builder)


@dataclass(frozen=True)
class LatentPages(CodePages):
    """As CodePages, both sides the same codes of one kv head, which a kernel reads in a decode step (`metal.latents`).

    rotary: the codec and the codes of rotary keys, where these are not exact."""

    rotary: tuple[Codec, Stored] | None = None

    def decode_rotary(self, dtype: mx.Dtype) -> mx.array:
        """Return the rotary keys of these pages, [B, 1, T, N]."""
        assert self.rotary is not None  # the config says so
        code, stored = self.rotary
        return code.decode(stored, dtype)


@dataclass(frozen=True)
class Parts:
    """Snapshots of several runs of pages, each of one transform, in the order of their tokens."""

    parts: tuple[CodePages | RecordPages, ...]

    square_transforms = None  # one would have to be applied to each run

    @property
    def backend(self) -> Backend:
        return self.parts[0].backend

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    def decode(self, side: int, dtype: mx.Dtype) -> mx.array:
        """Return keys (side 0) or values (1) as attention sees them, [B, G, T, D]."""
        return mx.concatenate([part.decode(side, dtype) for part in self.parts], axis=2)


Snapshot = CodePages | RecordPages | Parts


# -- what attention reads


@dataclass(frozen=True, eq=False)
class View:
    """The input of attention after one update of a cache. Replaces keys and values in mlx-lm's models, and implements
    the array members that they use.

    recent, sink: (keys, values), each [B, G, T, D]. pages: between the two, or None.
    plain: nothing has been quantized yet, so results have to equal a plain cache's.
    quantized: arrays that this update wrote, to be computed before attention.
    buffers: the arrays that hold recent, spare capacity included; kernels take them whole, uncopied.
    observer: called by attention with (queries, output, scale, mask), returns the output.

    lengths: how much of the arrays each sequence of a batch has in use, where they share them; None: all.
    padding: how many columns of a mask are padding on the left of each sequence of a batch, where prompts had some.
    """

    recent: Pair
    sink: Pair | None = None
    pages: Snapshot | None = None
    plain: bool = False
    quantized: tuple[mx.array, ...] = field(default=(), repr=False)
    buffers: Pair | None = field(default=None, repr=False)
    observer: Callable[..., mx.array] | None = field(default=None, repr=False)
    lengths: Lengths | None = None
    padding: tuple[int, ...] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the longest sequence; the capacity in a step of fixed shapes."""
        if self.lengths is not None:
            rows = self.lengths.rows
            return max(records * TOKENS + sink + recent for records, sink, recent, _ in rows)
        return self._capacity

    @property
    def _capacity(self) -> int:
        sink = self.sink[0].shape[2] if self.sink else 0
        pages = self.pages.tokens if self.pages else 0
        return sink + pages + self.recent[0].shape[2]

    @property
    def columns(self) -> int:
        """The columns of an array mask."""
        return self.tokens

    @property
    def dtype(self) -> mx.Dtype:
        """The type of the keys."""
        return self.recent[0].dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, G, T, D] of the keys."""
        batch, heads, _, dims = self.recent[0].shape
        return batch, heads, self.tokens, dims

    def astype(self, dtype: mx.Dtype) -> View:
        """Return self: attention casts its inputs."""
        return self

    def __getattr__(self, name: str):
        if name.startswith("__"):  # protocols that Python itself looks for
            raise AttributeError(name)
        raise UserError(
            f"[attach] this model's code uses compressed keys as an array; got .{name}; "
            "choose --kv fp16 for this model"
        )

    @property
    def sizes(self) -> Callable[..., mx.array] | None:
        """What makes the sizes of a kernel over latents, where only the device knows lengths."""
        return None

    def check(self, mask: mx.array | str | None) -> None:
        """Raise UserError for a mask of the wrong shape: columns of buffers differ from what models expect, and a batch
        has the columns of its longest sequence."""
        if isinstance(mask, mx.array) and self.lengths is not None:
            self._check_columns(mask)

    def _check_columns(self, mask: mx.array) -> None:
        if mask.ndim != 4 or mask.shape[-1] < self.tokens:
            raise UserError(
                f"[attach] this model's mask does not fit a batch; got shape {list(mask.shape)} for "
                f"{self.tokens} tokens; serve its requests one at a time"
            )

    def visible(self, mask: mx.array | str | None, new: int) -> mx.array | str | None:
        """Return the mask for plain ops over all columns."""
        return mask

    def split(self) -> RowsView:
        """Return sequences in shared arrays one by one."""
        out: list[tuple[View, None]] = []
        lengths, pages = self.lengths, self.pages
        assert lengths is not None and isinstance(pages, RecordPages)  # of `BatchBuffers`
        for i, (count, sink, recent, at) in enumerate(lengths.rows):
            (keys, values), first = self.recent, None
            windows = keys[i : i + 1, :, :recent], values[i : i + 1, :, :recent]
            if sink and self.sink is not None:
                first = self.sink[0][i : i + 1], self.sink[1][i : i + 1]
            if not count:
                out.append((View(windows, first, plain=True), None))
                continue
            run = pages.run
            buffer, headers = run.buffer[:, :, at : at + count], run.headers
            if headers is not None:
                headers = headers[:, :, at // run.page : (at + count) // run.page]
            run = replace(run, buffer=buffer, records=count, headers=headers)
            out.append((View(windows, first, replace(pages, run=run)), None))
        return RowsView(self.recent, padding=self.padding, rows=tuple(out))


Row = tuple[View, int | None] | None


@dataclass(frozen=True, eq=False)
class RowsView(View):
    """Sequences of a batch that are read one after the other. recent: of any of them.

    rows: the view of each, with the number of new tokens that are its own (None: all); None where all are padding.
    skips: how many of the new tokens are padding on the left of each sequence.
    """

    rows: tuple[Row, ...] = field(kw_only=True)
    skips: tuple[int, ...] | None = None

    @property
    def tokens(self) -> int:
        return max((row[0].tokens for row in self.rows if row is not None), default=0)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.rows), *super().shape[1:]

    def check(self, mask: mx.array | str | None) -> None:
        if isinstance(mask, mx.array):
            self._check_columns(mask)


@dataclass(frozen=True, eq=False)
class TracedView(View):
    """What attention reads in a step of fixed shapes (`cache.static`), where only the device knows lengths.

    seen: new tokens -> which columns of (sink | pages | recent) each of them sees, boolean [B or 1, 1, L, T].
    """

    seen: Callable[[int], mx.array] = field(kw_only=True, repr=False)

    @property
    def tokens(self) -> int:
        return self._capacity

    @property
    def shape(self) -> tuple[int, int, int, int]:
        raise UserError("[attend] this model's code reads how many tokens a cache holds")

    def check(self, mask: mx.array | str | None) -> None:
        if isinstance(mask, mx.array):
            raise UserError(
                "[attend] this model's code makes a mask of its own for compressed layers"
            )

    def visible(self, mask: mx.array | str | None, new: int) -> mx.array:
        return self.seen(new)


class Once(Protocol):
    """Return the result of `make`, called once per step and key."""

    def __call__(self, key: Hashable, make: Callable[[], T], /) -> T: ...


@dataclass(frozen=True, eq=False)
class TracedLatents(TracedView):
    """What attention reads of latents in a step of fixed shapes, for one new token.

    counts: [tokens in pages, sink tokens, recent tokens], int32, on the device. width: columns of rotary scores: in the
    order of tokens, with room behind the last one, or if not `in_order` sink | pages | recent with the capacity of
    each.
    once: returns what a function makes, once a step for each key.
    """

    counts: mx.array = field(kw_only=True)
    width: int = field(kw_only=True)
    in_order: bool = field(kw_only=True)
    once: Once = field(kw_only=True, repr=False)

    @property
    def columns(self) -> int:
        return self.width

    def check(self, mask: mx.array | str | None) -> None:
        if not isinstance(mask, mx.array) or mask.shape[-2:] != (1, self.width):
            raise UserError(
                "[attend] this model's code adds no rotary scores to the scores of latents"
            )

    @property
    def sizes(self) -> Callable[..., mx.array]:
        return self._sizes

    def _sizes(self, rows: int, splits: int, *capacities: int) -> mx.array:
        """Return the kernel's sizes (`metal.latents.attend`), which all layers share."""

        def make() -> mx.array:
            first = self.counts[0] + self.counts[1]
            if not self.in_order:
                first = mx.array(self.tokens - self.recent[0].shape[2], mx.int32)
            parts = [ints(rows, splits), self.counts, ints(*capacities), first[None]]
            return mx.concatenate(parts)

        return self.once(("latent sizes", rows, splits, *capacities, self.in_order), make)

    def visible(self, mask: mx.array | str | None, new: int) -> mx.array:
        """Return rotary scores [B, H, 1, columns] in view order, [B, H, 1, sink + pages + recent], unused masked."""
        assert isinstance(mask, mx.array)  # `check` says so
        scores, recent, batch = mask, self.recent[0].shape[2], mask.shape[0]
        columns = self.tokens - recent
        if self.in_order:

            def places() -> mx.array:
                at = self.counts[0] + self.counts[1] + mx.arange(recent, dtype=mx.int32)
                return mx.concatenate([mx.arange(columns, dtype=mx.int32), at])

            scores = mx.take(scores, self.once(("places", columns, recent), places), axis=3)
        lowest = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
        columns_seen = self.seen(new)
        return mx.where(
            columns_seen if columns_seen.shape[0] == 1 else columns_seen[:batch], scores, lowest
        )
