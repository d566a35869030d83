"""What attention reads: the view of a cache after one update, and the sealed pages in it.

Sealed pages are read through snapshots, which a store returns. All have the same members:

    plan                 which code reads them (`KernelPlan`)
    tokens               in these pages
    parts                runs of pages of one transform, in the order of their tokens
    decode(side, dtype)  keys (side 0) or values (1) as attention sees them

Snapshots of one run also have the parts of an attention over them:

    scores(q)            q . k^ for every token
    scorer()             `scores` for several q: what is decoded for them is decoded once
    mix(p)               sum_t p_t v^_t
    turns                transforms that lead into the stored domain, where attention may stay in it
    between(sink, live)  keys and values of all tokens, pages in the stored domain
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import mlx.core as mx

from mlxkv.codec import records
from mlxkv.codec.codec import Codec, Stored
from mlxkv.codec.transform import Transform
from mlxkv.errors import UserError
from mlxkv.formats.records import NAMES, TOKENS, RecordLayout
from mlxkv.metal import attend as kernels
from mlxkv.metal.launch import Factory
from mlxkv.metal.lengths import Later

Pair = tuple[mx.array, mx.array]
OPS, PORTABLE, TILES = "plain ops", "kernels", "tile kernels"


@dataclass(frozen=True)
class KernelPlan:
    """Which code seals and reads the pages of one format on this machine.

    body: OPS, PORTABLE or TILES. reason: why no faster body, None for TILES. layout: of the page
    records. make: builds the kernels. Both are None for OPS. asked: the question that `choose.plan` answered.
    """

    body: str
    reason: str | None = None
    layout: RecordLayout | None = None
    make: Factory | None = None
    asked: tuple | None = field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        """For reports; plain ops say why."""
        return f"{OPS} ({self.reason})" if self.body == OPS else self.body

    def __deepcopy__(self, memo):
        return self  # MLX's kernel builders cannot be copied


BY_OPS = KernelPlan(OPS)


# -- sealed pages


@dataclass(frozen=True)
class CodePages:
    """Pages as plain ops read them. tokens: in these pages."""

    codecs: tuple[Codec, Codec]
    stored: tuple[Stored, Stored]
    tokens: int
    plan: KernelPlan = BY_OPS

    @property
    def parts(self) -> tuple[CodePages]:
        return (self,)

    @property
    def turns(self) -> tuple[Transform | None, Transform | None] | None:
        """Transforms that turn windows, queries and outputs; None where one cannot be applied so."""
        return _turns(self.codecs)

    def scores(self, q: mx.array) -> mx.array:
        """q [B, G, N, D] float32 -> q . k^ for every token: [B, G, N, T] float32."""
        return self.codecs[0].scores(q, self.stored[0])

    def scorer(self) -> Callable[[mx.array], mx.array]:
        return self.scores

    def mix(self, p: mx.array) -> mx.array:
        """p [B, G, N, T] float32 -> sum_t p_t v^_t: [B, G, N, D] float32."""
        return self.codecs[1].mix(p, self.stored[1])

    def decode(self, side: int, dtype: mx.Dtype) -> mx.array:
        """Keys (side 0) or values (1) as attention sees them: [B, G, T, D]."""
        return self.codecs[side].decode(self.stored[side], dtype)

    def between(self, sink: Pair | None, live: Pair) -> Pair:
        """Keys and values: sink, these pages in the stored domain, live: [B, G, T, R] in the dtype of
        live."""
        pages = (
            code.decode_stored(stored, x.dtype)
            for code, stored, x in zip(self.codecs, self.stored, live, strict=True)
        )
        return _joined(sink, pages, live)


@dataclass(frozen=True)
class RecordPages:
    """Pages as kernels read them: the first `tokens` / 16 records of `buffer` [B, G, capacity, words],
    and the headers of the pages, where the format has any."""

    codecs: tuple[Codec, Codec]
    plan: KernelPlan
    buffer: mx.array
    tokens: int
    headers: mx.array | None = None

    @property
    def parts(self) -> tuple[RecordPages]:
        return (self,)

    @property
    def records(self) -> int:
        return self.tokens // TOKENS

    @property
    def turns(self) -> tuple[Transform | None, Transform | None] | None:
        """As `CodePages.turns`."""
        return _turns(self.codecs)

    @property
    def maps(self) -> tuple[Transform | None, Transform | None]:
        """Return how queries meet the codes of the keys, and how mixtures of values come back."""
        keys, values = self.codecs
        return keys.transform, values.transform

    def scores(self, q: mx.array) -> mx.array:
        """q [B, G, N, D] float32 -> q . k^ for every token: [B, G, N, T] float32."""
        return self.scorer()(q)

    def scorer(self) -> Callable[[mx.array], mx.array]:
        turn = self.codecs[0].transform
        keys = self._unsealed(0, mx.float32).swapaxes(-1, -2)
        if turn is None:
            return lambda q: q @ keys
        return lambda q: turn.query(q) @ keys  # queries are turned, not the many keys

    def mix(self, p: mx.array) -> mx.array:
        """p [B, G, N, T] float32 -> sum_t p_t v^_t: [B, G, N, D] float32."""
        return p @ self.decode(1, mx.float32)

    def decode(self, side: int, dtype: mx.Dtype) -> mx.array:
        """Keys (side 0) or values (1) as attention sees them: [B, G, T, D]."""
        code = self.codecs[side]
        return code.restore(self._unsealed(side, code.work_dtype(dtype)), dtype)

    def between(self, sink: Pair | None, live: Pair) -> Pair:
        """As `CodePages.between`."""
        return kernels.unseal(
            self.buffer,
            self.records,
            self.plan.layout,
            live[0].dtype,
            self.plan.make,
            sink,
            live,
            self.headers,
        )

    def _unsealed(self, side: int, dtype: mx.Dtype) -> mx.array:
        """One side in the stored domain: [B, G, T, R]."""
        plan = self.plan
        return kernels.unseal_side(
            self.buffer, self.records, plan.layout, side == 0, dtype, plan.make, self.headers
        )

    def _codes(self, side: int) -> Stored:
        used = {"records": self.buffer[:, :, : self.records]}
        if self.headers is not None:
            used["headers"] = self.headers[:, :, : self.tokens // self.codecs[0].page]
        return records.to_codes(used, self.codecs)[NAMES[side]]


@dataclass(frozen=True)
class Parts:
    """Snapshots of several runs of pages, each of one transform, in the order of their tokens."""

    parts: tuple[CodePages | RecordPages, ...]

    turns = None  # one would have to be applied to each run

    @property
    def plan(self) -> KernelPlan:
        return self.parts[0].plan

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    def decode(self, side: int, dtype: mx.Dtype) -> mx.array:
        """Keys (side 0) or values (1) as attention sees them: [B, G, T, D]."""
        return mx.concatenate([part.decode(side, dtype) for part in self.parts], axis=2)


Snapshot = CodePages | RecordPages | Parts


def _turns(codecs: tuple[Codec, Codec]) -> tuple[Transform | None, Transform | None] | None:
    turns = codecs[0].turn, codecs[1].turn
    same = all(code.transform is turn for code, turn in zip(codecs, turns, strict=True))
    return turns if same else None


def _joined(sink: Pair | None, pages: Iterable[mx.array], live: Pair) -> Pair:
    parts = zip(pages, live, strict=True) if sink is None else zip(sink, pages, live, strict=True)
    return tuple(mx.concatenate(part, axis=2) for part in parts)


# -- views


class CacheView:
    """Stands where mlx-lm's models expect keys and values: answers what they ask of an array.

    batched: whether sequences of different lengths are read; then `rows` has the view of each, with
    the number of new tokens that are its own (None: all), or None where all are padding.
    fixed: whether shapes are the same at every step (`FixedView`).
    """

    batched = fixed = False
    skips = None

    @property
    def dtype(self) -> mx.Dtype:
        """Return the type of the keys."""
        return self.live[0].dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, G, T, D] of the keys."""
        batch, heads, _, dims = self.live[0].shape
        return batch, heads, self.tokens, dims

    @property
    def columns(self) -> int:
        """Return how many columns a mask has that is an array."""
        return self.tokens

    def astype(self, dtype: mx.Dtype) -> CacheView:
        """Itself: attention casts what it reads."""
        return self

    def __getattr__(self, name):
        if name.startswith("__"):  # protocols that Python itself looks for
            raise AttributeError(name)
        raise UserError(
            f"[attach] this model's code uses compressed keys as an array; got .{name}; "
            "choose --kv fp16 for this model"
        )


@dataclass(frozen=True)
class View(CacheView):
    """What attention reads of one cache.

    live, sink: (keys, values), each [B, G, T, D]. pages: between the two, or None.
    plain: nothing has been sealed yet, so results have to equal a plain cache's.
    sealed: arrays that this update wrote, to be computed before attention.
    buffers: the arrays that hold live, spare room included; kernels take them whole, uncopied.
    observer: called by attention with (queries, output, scale, mask), returns the output.
    """

    live: Pair
    sink: Pair | None = None
    pages: Snapshot | None = None
    plain: bool = False
    sealed: tuple[mx.array, ...] = field(default=(), repr=False)
    buffers: Pair | None = field(default=None, repr=False)
    observer: Callable[..., mx.array] | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        sink = self.sink[0].shape[2] if self.sink else 0
        pages = self.pages.tokens if self.pages else 0
        return sink + pages + self.live[0].shape[2]


@dataclass(frozen=True, eq=False)
class FixedView(CacheView):
    """What attention reads in a step of fixed shapes: whole buffers, of which an array says how much is in
    use (`cache.fixed`).

    live, sink: (keys, values), each [B, G, room, D]. pages: with the spare room of their arrays, or
    None. lengths: for kernels, where there are pages. seen: for plain ops, new tokens -> which columns
    of (sink | pages | live) each of them sees, boolean [B or 1, 1, L, T].
    """

    live: Pair
    sink: Pair | None
    pages: CodePages | RecordPages | None
    lengths: Later | None
    seen: Callable[[int], mx.array]

    fixed = True

    @property
    def tokens(self) -> int:
        """The room for tokens."""
        sink = self.sink[0].shape[2] if self.sink else 0
        pages = self.pages.tokens if self.pages else 0
        return sink + pages + self.live[0].shape[2]

    @property
    def shape(self):
        """Raises UserError: how many tokens there are is known on the device alone."""
        raise UserError("[attend] this model's code reads how many tokens a cache holds")


@dataclass(frozen=True)
class BatchView(CacheView):
    """What attention reads of sequences one after the other: `CacheView.rows`.

    skips: how many of the new tokens are padding on the left of each sequence. padding: how many columns of a
    mask are, where prompts were padded on the left. like: (keys, values) of no tokens, where all new ones are
    padding.
    """

    rows: tuple[tuple[View, int | None] | None, ...]
    skips: tuple[int, ...] | None = None
    padding: tuple[int, ...] | None = None
    like: Pair | None = field(default=None, repr=False)

    batched = True
    starts = None

    @property
    def live(self) -> Pair:
        """Return the live window of the first sequence, for its shape and type."""
        return next((row[0].live for row in self.rows if row is not None), self.like)

    @property
    def tokens(self) -> int:
        """Return the tokens of the longest sequence."""
        return max((row[0].tokens for row in self.rows if row is not None), default=0)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        _, heads, _, dims = self.live[0].shape
        return len(self.rows), heads, self.tokens, dims


@dataclass(frozen=True)
class RaggedView(CacheView):
    """What attention reads of all sequences at once.

    pages: of all sequences, in one buffer. starts: the first record of each sequence. lengths: of
    each (records, sink tokens, live tokens). sink, live: (keys, values), [B, G, room, D]. padding: as in
    `BatchView`.
    """

    pages: RecordPages
    starts: tuple[int, ...]
    lengths: tuple[tuple[int, int, int], ...]
    sink: Pair | None
    live: Pair
    padding: tuple[int, ...] | None = None

    batched = True

    @property
    def tokens(self) -> int:
        """Return the tokens of the longest sequence."""
        return max(records * TOKENS + sink + live for records, sink, live in self.lengths)

    @cached_property
    def rows(self) -> tuple[tuple[View, None], ...]:
        """Each sequence alone."""
        out = []
        for i, (at, (count, sink, live)) in enumerate(zip(self.starts, self.lengths, strict=True)):
            windows = tuple(x[i : i + 1, :, :live] for x in self.live)
            first = tuple(x[i : i + 1] for x in self.sink) if sink else None
            if not count:
                out.append((View(windows, first, plain=True), None))
                continue
            each, headers = self.pages.codecs[0].page // TOKENS, self.pages.headers
            if headers is not None:
                headers = headers[:, :, at // each : (at + count) // each]
            buffer, tokens = self.pages.buffer[:, :, at : at + count], count * TOKENS
            pages = replace(self.pages, buffer=buffer, tokens=tokens, headers=headers)
            out.append((View(windows, first, pages), None))
        return tuple(out)
