"""Bytes of one layer's cache of n tokens: the only rule, for `fit`, reports, `eval`, the server's memory and `run`.

    in use:     codes of the pages that n tokens fill, exact tokens of the windows and of the page quantized last
    allocated:  what the arrays take (`cache.nbytes`): the same with room to grow

A cache is walked read by read, with counts in place of arrays; caches grow by the functions that stand here. No
framework is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

from mlxkv.formats.config import CacheConfig
from mlxkv.formats.layout import TOKENS
from mlxkv.formats.lowrank import STAY, LowRank
from mlxkv.formats.records import record_layout, why_no_records
from mlxkv.formats.rules.windows import WINDOW

EXACT_BYTES = (
    2  # of an exact number in figures that compare caches, also where arrays hold it in 32 bits
)
DECODE_TOKENS = 8  # new tokens of one call at most that count as decoded: more are part of a prompt
STEP = 256  # tokens: windows grow by whole steps, as mlx-lm's own caches do
GROWTH = 16  # room is at most 1/16 of what is stored, or that of `grown`, or what one append adds
WASTE = 16  # at most one page of so many is a gap
FEW, MORE = 8, 16  # pages in which room grows in steps of fixed shapes: first, and from 32 pages on
STEPS = 16  # in which lengths are counted between powers of two, where they are long


# -- how arrays grow


def whole(tokens: int) -> int:
    """Return `tokens` rounded up to whole steps."""
    return -(-tokens // STEP) * STEP


@lru_cache(maxsize=256)
def grown(pages: int) -> int:
    """Return the capacity for so many pages and one more, in steps of fixed shapes: others of about this length
    have the same, and share the trace of a step. 6 capacities up to 64 pages: a trace takes the host as long
    as some ten steps, a page few bytes."""
    step = FEW if pages < 4 * FEW else MORE
    step = max(step, 1 << max(0, pages.bit_length() - STEPS.bit_length()))
    return -(-(pages + 1) // step) * step


def largest_share(pages: int) -> int:
    """Pages that a sequence of so many takes among others at most, with its share of room and gaps."""
    return -(-(pages * (GROWTH + 1) + GROWTH) * WASTE // (GROWTH * (WASTE - 1)))


def page_room(count: int, pages: int, sequences: int = 1) -> int:
    """Pages of room, `count` new ones included, behind each sequence once there is no room for these. pages: of all
    sequences."""
    return max(count, pages // (GROWTH * sequences))


def buffer_tokens(tokens: int, end: int) -> int:
    """Tokens that a buffer of `tokens` tokens is made for where it has to hold `end`."""
    return whole(max(end, tokens + tokens // GROWTH))


# -- a cache as counts, after each read


class Counts(NamedTuple):
    """Contents of a cache as counts.

    pages, room: quantized pages, and with their slack. recent, width: tokens of the window, and capacity of its buffer.
    sink, last: exact tokens of the sink, and of the page quantized last. rotary: capacity of the buffer of exact rotary
    keys. queries: queries kept per head. runs: runs of pages, each with a basis, or 1 before the first page. since:
    tokens decoded since the last basis update.
    """

    tokens: int = 0
    pages: int = 0
    room: int = 0
    recent: int = 0
    width: int = 0
    sink: int = 0
    last: int = 0
    rotary: int = 0
    queries: int = 0
    runs: int = 0
    since: int = 0
    is_fresh: bool = False  # the last run has no pages
    chosen: int = 0  # pages of the prompt that tokens were chosen from
    pins: bool = False  # the prompt's last tokens are to be moved
    has_pinned: bool = False


Read = Callable[[Counts, int], Counts]  # what so many more tokens, in one call, make of a cache


def _compressed(c: CacheConfig, s: Counts, new: int) -> Counts:
    if c.needs_queries and new > DECODE_TOKENS:  # attended to in full precision, then quantized
        online = c.online
        s = s._replace(tokens=s.tokens + new, since=0, pins=bool(c.pinned) and not s.has_pinned)
        if c.keep < 1:
            s = s._replace(queries=min(new, online.window if online else WINDOW))
        if online:
            s = _learnt(online, s)
        recent = s.recent + new
        if recent <= c.recent_capacity(s.sink > 0):
            return s._replace(recent=recent, width=recent)
        return _quantized(c, s, recent)
    if c.needs_queries:
        s = _decoding(c, s)
        s = s._replace(since=s.since + new)
    s, recent = s._replace(tokens=s.tokens + new), s.recent + new
    limit = c.recent_capacity(s.sink > 0)
    if recent > limit:
        return _quantized(c, s, recent)
    if recent <= s.width:
        return s._replace(recent=recent)
    return s._replace(recent=recent, width=min(limit, buffer_tokens(s.recent, recent)))


def _quantized(c: CacheConfig, s: Counts, recent: int) -> Counts:
    sink = s.sink
    if not sink and c.sink:
        sink, recent = c.sink, recent - c.sink
    count = c.pages_over(recent)
    pages, room, recent = s.pages + count, s.room, recent - count * c.page
    if c.is_online:  # runs that are joined have no room
        room = pages
    elif pages > room:
        room = s.pages + page_room(count, s.pages)
    width = min(c.recent_capacity(sink > 0), whole(recent))
    return s._replace(
        **{"pages": pages, "room": room, "recent": recent, "width": width, "sink": sink},
        **{"last": c.page, "runs": max(1, s.runs) if c.is_online else 0, "is_fresh": False},
    )


def _learnt(online: LowRank, s: Counts) -> Counts:
    """Start a run of pages of its own, once the basis has learned."""
    if not s.pages or online.stored == STAY or s.is_fresh:
        return s._replace(runs=max(1, s.runs))
    return s._replace(runs=min(online.runs, s.runs + 1), is_fresh=True)


def _decoding(c: CacheConfig, s: Counts) -> Counts:
    """Drop, move and learn tokens, as due after a prompt or decoded tokens, before more are decoded."""
    if s.queries:
        s = s._replace(queries=0)
        if s.pages > s.chosen:
            pages = s.chosen + max(1, round(c.keep * (s.pages - s.chosen)))
            s = s._replace(pages=pages, room=pages, chosen=pages, last=0)
    if s.pins:
        count = min(c.pinned, s.recent)
        head = 0 if s.sink else min(c.sink, s.recent - count)
        recent, limit = s.recent - count - head, c.recent_capacity(True)
        s = s._replace(
            **{"sink": s.sink + head + count, "recent": recent, "width": min(limit, whole(recent))},
            **{"last": 0, "pins": False, "has_pinned": True},
        )
    if c.online and s.since >= c.online.every:
        s = _learnt(c.online, s._replace(since=0)) if s.recent else s._replace(since=0)
    return s


def _latent(c: CacheConfig, s: Counts, new: int) -> Counts:
    end, rotary = s.tokens + new, s.rotary
    if end > rotary and c.rotary == 16:
        rotary = buffer_tokens(s.tokens, end)
    return _compressed(c, s, new)._replace(rotary=rotary)


def _plain(s: Counts, new: int) -> Counts:
    """mlx-lm's KVCache."""
    width = s.width
    if s.recent + new > width:
        width = (s.recent if s.recent % STEP else width) + whole(new)
    return s._replace(tokens=s.tokens + new, recent=s.recent + new, width=width)


def _ring(window: int, s: Counts, new: int) -> Counts:
    """mlx-lm's RotatingKVCache."""
    width = s.width
    if new > 1:
        width = min(width, s.tokens, window - 1) + new
    else:
        if not width or (s.tokens >= width and width < window):
            width += min(STEP, window - s.tokens)
        width = min(width, window)
    tokens = s.tokens + new
    return s._replace(tokens=tokens, recent=min(tokens, window), width=width)


def _chunks(window: int, s: Counts, new: int) -> Counts:
    """mlx-lm's ChunkedKVCache."""
    if s.recent > window:
        s = s._replace(recent=window, width=window)
    return _plain(s, new)


def _numbers(s: Counts, new: int) -> Counts:
    """Model a family's own cache, which grows by the tokens it receives."""
    tokens = s.tokens + new
    return s._replace(tokens=tokens, recent=tokens, width=tokens)


def _reader(config: CacheConfig | None, kind: str, window: int) -> Read:
    """Return the walk of one kind of cache. kind, window: as of `CacheShape`."""
    if config is not None:
        return partial(_latent if kind == "latent" else _compressed, config)
    if kind in ("sliding", "chunked"):
        return partial(_ring if kind == "sliding" else _chunks, window)
    return _numbers if kind == "own" else _plain


@lru_cache(maxsize=64)
def _begun(config: CacheConfig | None, kind: str, window: int, chunk: int) -> list[Counts]:
    """Return counts after 0, 1, 2 ... whole chunks, as far as they were asked for: all longer prompts begin so."""
    return [Counts()]


# -- bytes


@dataclass(frozen=True)
class CacheShape:
    """One layer's cache of one sequence.

    heads: kv heads G (times the batch). key_dim, value_dim: of keys and values, or of latents and rotary keys. config:
        as it is compressed; None for mlx-lm's own cache. kind: as of `LayerShape`, for its own caches: "full",
        "sliding" (a ring of `window` tokens), "chunked", "own" or "state". fixed: bytes whatever it holds.
    number: bytes of an exact number in its arrays. queries: query heads. records: whether kernels read it, where the
        format has page records. together: whether sequences of a batch share arrays.
    """

    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    config: CacheConfig | None = None
    kind: str = "full"
    window: int = 0
    fixed: int = 0
    number: int = EXACT_BYTES
    queries: int = 0
    records: bool = False
    together: bool = False

    @property
    def numbers(self) -> int:
        """Numbers per token."""
        return self.heads * (self.key_dim + self.value_dim)

    @property
    def plain(self) -> CacheShape:
        """The mlx-lm cache that it replaces."""
        return replace(self, config=None, kind="full") if self.config else self

    @property
    def _has_rotary(self) -> bool:
        """Return whether exact rotary keys are in a buffer of their own."""
        return self.kind == "latent" and self._format.rotary == 16

    @property
    def _format(self) -> CacheConfig:
        assert self.config is not None
        return self.config

    def page_bytes(self, number: int) -> float:
        """Bytes of a page, exact rotary keys beside latents left out. number: of an exact number in it."""
        c, dims, bits = self._format, (self.key_dim, self.value_dim), 0.0
        if self.records and self.kind != "latent" and why_no_records(c, *dims) is None:
            layout = record_layout(c, *c.dims(*dims))
            return 4 * self.heads * (c.page // TOKENS * layout.words + layout.header_words)
        for side, dim in list(zip((c.keys, c.values), dims, strict=True))[: 2 - self._has_rotary]:
            exact = side.quantizer.exact
            bits += dim * (8 * number if exact else side.bits_per_value(dim, c.page))
        return self.heads * c.page * bits / 8

    def held(self, tokens: int, prompt: int | None = None, rests: bool = False) -> int:
        """Return the bytes in use for so many tokens. Exact numbers count 16 bits, also where arrays hold them in 32,
        so that figures compare.

        prompt: how many of them are a prompt behind which a reply has begun, for caches that then drop or move tokens;
            None: all are, and none has. rests: on a shelf, where nobody needs the exact tokens of the page quantized
            last.
        """
        if self.config is None:
            count = min(tokens, self.window) if self.window else tokens
            return self.fixed + EXACT_BYTES * self.numbers * count
        s, c = self._walked(tokens, 0, prompt), self.config
        exact = s.sink + s.recent + (0 if rests and not c.needs_queries else s.last)
        rotary = self.heads * self.value_dim * s.pages * c.page if self._has_rotary else 0
        numbers = self.numbers * exact + rotary
        pages = int(s.pages * self.page_bytes(EXACT_BYTES))
        return pages + EXACT_BYTES * numbers + self._more(s, EXACT_BYTES)

    def allocated(
        self,
        tokens: int,
        chunk: int = 0,
        prompt: int | None = None,
        most: bool = False,
        padded: bool = False,
    ) -> int:
        """Return the bytes that its arrays take after so many tokens, with their room to grow.

        chunk: tokens that were read at once, 0: all. prompt: how many of them were read so, the others one by one, as
            in `held`.
        most: the most that such a cache takes, however it came about: chunks, trims, decode steps of fixed shapes.
            padded: in one of mlx-lm's own batches, which pads to the longest sequence; with `most`.
        """
        if most:
            return self._most(tokens, chunk, padded)
        s = self._walked(tokens, chunk, prompt)
        if self.config is None:
            return self.fixed + self.number * self.numbers * s.width
        rotary = self.heads * self.value_dim * s.rotary
        exact = self.numbers * (s.sink + s.width + s.last) + rotary
        pages = int(s.room * self.page_bytes(self.number))
        return pages + self.number * exact + self._more(s, self.number)

    def _more(self, s: Counts, number: int) -> int:
        """Return the bytes of bases learned from the text, and of queries kept until the end of a prompt."""
        c, bases = self._format, 0
        if s.runs and c.online:
            most = c.basis_bytes(self.heads, self.key_dim, self.value_dim)
            bases = s.runs * most // c.online.runs
        return bases + number * self.queries * self.key_dim * s.queries

    def _walked(self, tokens: int, chunk: int, prompt: int | None) -> Counts:
        """Return counts after `prompt` tokens by chunks (None: all), and the others one by one."""
        kind = self.config, self.kind, self.window
        read, s, count = _reader(*kind), Counts(), tokens if prompt is None else prompt
        if 0 < chunk < count:
            chunks = _begun(*kind, chunk)
            while len(chunks) <= count // chunk:
                chunks.append(read(chunks[-1], chunk))
            s = chunks[count // chunk]
        if count > s.tokens:
            s = read(s, count - s.tokens)
        if prompt is not None:
            if self.config is not None and self.config.needs_queries:
                s = _decoding(self.config, s)
            elif self.kind == "sliding" and self.config is None:
                s = s._replace(width=min(s.width, self.window))
            for _ in range(tokens - prompt):
                s = read(s, 1)
        return s

    def _most(self, tokens: int, chunk: int, padded: bool) -> int:
        if self.config is None:
            return self.fixed + self.number * self.numbers * self._most_plain(tokens, chunk, padded)
        c, size = self.config, self.page_bytes(self.number)
        token, rotary = self.number * self.numbers, 0
        pages = max(0, tokens - c.sink) // c.page  # one that was trimmed may have no exact tokens
        if self.together:
            # One that runs alone grows as `grown` says, and several together fill up to such a number.
            windows = shared_window(c)
            return int(max(largest_share(pages), grown(pages)) * size) + token * windows
        if self._has_rotary:
            rotary = self.number * self.heads * self.value_dim
            size += rotary * c.page
        exact, room = min(c.window, buffer_tokens(tokens, tokens)), 0
        if pages:  # with the room that steps of fixed shapes take
            exact = c.sink + c.recent + 2 * c.page + DECODE_TOKENS
            room = int(max(grown(pages), pages + pages // GROWTH) * size)
        runs = c.online.runs if c.online else 0
        queries = (c.online.window if c.online else WINDOW) if c.keep < 1 else 0
        more = self._more(Counts(runs=runs, queries=queries), self.number)
        return room + token * (exact + c.pinned) + rotary * (c.window + STEP) + more

    def _most_plain(self, tokens: int, chunk: int, padded: bool) -> int:
        """Return the largest capacity of mlx-lm's plain cache, which grows in whole steps from any size."""
        if padded:  # as far as prompts that are read at the same time
            tokens += min(chunk, tokens)
        if not self.window:
            return tokens + STEP - 1
        if self.kind != "sliding":
            return min(tokens, self.window + chunk) + STEP - 1
        if padded:  # the window of a batch fills up over all its sequences
            return self.window + min(chunk, tokens)
        return min(tokens + STEP - 1, self.window) + chunk * (self.window < tokens)


def shared_window(config: CacheConfig) -> int:
    """Return the most exact tokens allocated per sequence in shared arrays."""
    return 2 * config.sink + config.recent + 2 * config.page + DECODE_TOKENS
