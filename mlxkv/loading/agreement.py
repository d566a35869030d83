"""Choose the preset with the fewest bits that keeps a share of the next tokens of a model: `--kv 99%`.

Full precision reads CONTEXT tokens of six texts that no calibration reads; each preset that is tried stores them, and
the next NEXT tokens of each text are read through it, all texts at once. The share of changed tokens about halves with
HALVING bits, so what was measured tells where on the dial to look next: three to five of its eighteen presets are
tried. What is chosen must keep the bound at the longest context that a minute allows, too. All of it is computed in
float32, where memory allows, so that what changes is changed by codes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from math import inf, log2
from typing import Any

import mlx.core as mx

from mlxkv import console, startup
from mlxkv.calibration.fitting import find_calibration
from mlxkv.corpora import corpus, sources
from mlxkv.errors import UserError, is_of_memory
from mlxkv.formats import agreement
from mlxkv.formats.agreement import DIAL, PLAIN, TEXTS, Choice, Measured, bits_of, percent, short
from mlxkv.formats.names import bound_of, parse_kv
from mlxkv.generate import reading
from mlxkv.loading.attach import attach, detach
from mlxkv.loading.weights import in_float32
from mlxkv.metal.gpu import array_memory

CONTEXT, NEXT = 1024, 512  # tokens read before, and compared
STEP = 32  # tokens at once through a cache: with 128, so many more are exact that a fifth of the changes are left
LONGER = (32768, 16384, 8192, 4096, 2048)  # contexts, the first that fits
MINUTE = 60.0  # seconds for reading longer texts in full precision
FEWEST = 2  # longer texts
HALVING = (
    1.3  # bits that about halve the changes: where to look first, what is measured corrects it
)
USUAL = 4.5, 0.98  # bits, and the share that 19 texts of 20 keep with them: where to look first
GUESSES = 4
CHARACTERS = 6  # a token's, at most
LEAST = 1e-4  # share of changes that a search takes for none
SHARE = 8  # one in so many bytes of memory may hold full caches


def choose(loaded, kv: str) -> Choice:
    """Return the kept choice for a model (a `mlxkv.Loaded`) and a share such as "99%", or measure one and keep it.
    Caches are detached."""
    bound, model = bound_of(kv), loaded.model
    assert bound is not None
    calibration = find_calibration(model)
    digest, dtype = calibration and calibration.digest, _numbers(loaded)
    choice = agreement.find(loaded.fingerprint, bound, digest, dtype)
    if choice is None:
        detach(model)
        dial, why = dial_of(loaded, calibration)
        try:
            with startup.one_thread(), in_float32(model):
                choice = _chosen(loaded, bound, dial, why)
        finally:
            detach(model)
        with suppress(OSError, UserError):
            agreement.keep(loaded.fingerprint, choice, digest, dtype)
    return choice


def _numbers(loaded) -> str:
    """Return the dtype of a model's activations, and the bits of its codes: --weights 8 changes no fingerprint."""
    bits = sorted({module.bits for module in loaded.model.modules() if hasattr(module, "bits")})
    return " ".join([str(loaded.dtype), *(f"int{number}" for number in bits)])


def dial_of(loaded, calibration) -> tuple[tuple[str, ...], str]:
    """Return the presets to choose from, none where nothing is compressed, and why not all of them."""
    mixed = parse_kv(DIAL[0])
    serves = calibration is not None and calibration.serves(mixed.fitted)
    config = mixed if serves else parse_kv(PLAIN[0])
    reports = [x for x in attach(loaded.model, config, calibration=calibration) if x.compressed]
    detach(loaded.model)
    if not reports:
        return (), "no layer is compressed"
    if calibration is None:
        return PLAIN, "mlxkv calibrate would allow fewer bits"  # no name: servers show the line
    if serves and all(report.reason == config.label for report in reports):
        return DIAL, ""
    return PLAIN, "its layers or its calibration allow no mixed bits"


def _chosen(loaded, bound: float, dial: Sequence[str], why: str) -> Choice:
    today, asked = date.today().isoformat(), f"choosing bits for {100 * bound:g}%"
    if not dial:
        return Choice(bound, "fp16", None, None, why, today)
    most = loaded.context or LONGER[0]
    tokens = min(NEXT, most // 2)
    near = Readings(loaded, min(CONTEXT, most - tokens), tokens)
    tried = min(GUESSES, len(dial))  # about
    texts = texts_of(loaded, near.length, TEXTS)
    if len(texts) < TEXTS:
        raise UserError(
            f"[--kv] a share is measured on {TEXTS} texts of {near.length:,} tokens; got {len(texts)}, as numpy is "
            "here without its source code; choose a number of bits"
        )
    steps = TEXTS * (near.length + tried * tokens)
    with console.progress(asked, steps, "measured once for a model") as count:
        near.read(texts, count)
        start = USUAL[0] + _more(USUAL[1], bound)
        at = _first(dial, lambda preset: near.measured(preset, count).low(), bound, start)
    far = None
    for context, number in near.longer() if at < len(dial) else ():
        texts = texts_of(loaded, context + tokens, number)
        if len(texts) < FEWEST:
            continue
        far = Readings(loaded, context, tokens)
        what = f"{asked} after {context:,} tokens"
        steps = len(texts) * (far.length + tried * tokens)
        try:
            with console.progress(what, steps, "measured once for a model") as count:
                far.read(texts, count)
                at = _at_least(dial, at, bound, partial(_low, near, far, count))
            break
        except Exception as error:  # MLX has no kind of its own
            if not is_of_memory(error):
                raise
            far = None  # a shorter one is tried
            mx.clear_cache()
    if at == len(dial):
        missed, spread = (far or near).measured(dial[-1]), near.measured(dial[-1])
        where = f" at {short(missed.context)}" if far else ""
        best = f"{dial[-1]} keeps {percent(missed.low(spread))} %{where}"
        return Choice(bound, "fp16", None, None, best, today, near.found)
    long = far and far.measured(dial[at])
    return Choice(bound, dial[at], near.measured(dial[at]), long, why, today, near.found)


def _low(near: Readings, far: Readings, count: Callable[[int], None], preset: str) -> float:
    """Return the share that a preset keeps behind a longer context."""
    found = far.measured(preset, count)
    return found.low(None if len(found.same) == TEXTS else near.measured(preset))


def _at_least(dial: Sequence[str], at: int, bound: float, low: Callable[[str], float]) -> int:
    """Return the place of the first preset from `at` on that keeps the bound."""
    if (share := low(dial[at])) >= bound:
        return at
    start = bits_of(dial[at]) + _more(share, bound)
    return at + 1 + _first(dial[at + 1 :], low, bound, start)


def _first(presets: Sequence[str], low: Callable[[str], float], bound: float, start: float) -> int:
    """Return the place of the first preset that keeps the bound, where all behind it do; their number if none does.
    low: the share that a preset keeps. start: bits to try first. What was measured tells where to look next; after
    GUESSES, halves are taken."""
    bits = [bits_of(preset) for preset in presets]
    begin, end, halving = 0, len(presets), HALVING
    known: list[tuple[float, float]] = []  # bits, share of changes as a power of two
    while begin < end:
        at = min(max(begin, bisect_left(bits, start)), end - 1)
        if len(known) >= GUESSES:
            at = (begin + end) // 2
        share = low(presets[at])
        begin, end = (begin, at) if share >= bound else (at + 1, end)
        known.append((bits[at], log2(max(1 - share, LEAST))))
        if len(known) > 1 and (fall := known[-2][1] - known[-1][1]):
            slope = (known[-1][0] - known[-2][0]) / fall
            halving = min(max(slope, HALVING / 3), HALVING * 3)
        start = bits[at] + _more(share, bound, halving)
    return begin


def _more(share: float, bound: float, halving: float = HALVING) -> float:
    """Return how many bits more than one that keeps `share` a preset has that just keeps the bound."""
    return halving * log2(max(1 - share, LEAST) / (1 - bound))


@dataclass
class Readings:
    """Texts of one context, read in full precision, and what presets keep of their next tokens."""

    loaded: Any  # a `mlxkv.Loaded`
    context: int
    tokens: int
    seconds: float = inf  # a token, where it took the least: the first ones also wait for kernels
    _texts: mx.array = field(default_factory=lambda: mx.zeros((0, 0), mx.int32))
    _exact: list = field(default_factory=list)  # caches of all texts
    _likeliest: mx.array = field(default_factory=lambda: mx.zeros((0, 0)))
    _found: dict[str, Measured] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Return the tokens of a text."""
        return self.context + self.tokens

    def read(self, texts: Iterable[Sequence[int]], count: Callable[[int], None]) -> None:
        """Read texts of `length` tokens each. count: gets the tokens that were read."""
        detach(self.loaded.model)
        self._texts, last = mx.array([list(text) for text in texts]), time.perf_counter()

        def counted(n: int) -> None:
            nonlocal last
            now = time.perf_counter()
            self.seconds, last = min(self.seconds, (now - last) / n), now
            count(n)

        self._exact = reading.prefill(self.loaded, self._texts[:, : self.context], counted)
        self._likeliest = self._following(deepcopy(self._exact), count)

    @property
    def found(self) -> tuple[Measured, ...]:
        """Return all that was measured."""
        return tuple(self._found.values())

    def measured(self, preset: str, count: Callable[[int], None] = lambda _: None) -> Measured:
        """Return what a preset keeps, measured once."""
        if preset not in self._found:
            attach(self.loaded.model, preset)
            cache = reading.stored(self.loaded, self._texts[:, : self.context], self._exact)
            same = self._following(cache, count) == self._likeliest
            detach(self.loaded.model)
            counts = tuple(int(same[i].sum()) for i in range(len(self._texts)))
            self._found[preset] = Measured(preset, self.context, self.tokens, counts)
        return self._found[preset]

    def longer(self) -> Iterator[tuple[int, int]]:
        """Yield the contexts that a minute and the memory allow, and for how many texts, the longest first."""
        size = sum(cache.nbytes for cache in self._exact) / self.context / len(self._texts)
        whole = (self.loaded.context or 0) - self.tokens
        for context in dict.fromkeys(min(context, whole) for context in LONGER):
            if context <= self.context:
                continue
            seconds = self.seconds * context * (1 + context / 16384)  # attention takes longer there
            number = min(TEXTS, int(MINUTE / seconds), int(array_memory() / SHARE / size / context))
            if number >= FEWEST:
                yield context, number

    def _following(self, cache: list, count: Callable[[int], None]) -> mx.array:
        """Return the likeliest token after each of those behind the context, [number, tokens]."""
        out = []
        for logits in reading.follow(self.loaded, cache, self._texts[:, self.context :], STEP):
            out.append(mx.argmax(logits, axis=-1))
            mx.eval(out[-1])
            count(out[-1].size)
        return mx.concatenate(out, axis=1)


def texts_of(loaded, count: int, number: int) -> list[list[int]]:
    """Return up to `number` texts of `count` tokens, of six kinds that differ in how hard they are to store; no
    calibration reads them. Fewer where there is not enough text.

    Each is documentation of numpy, in the end nothing else, or source code of mlx-lm, records in JSON, or passages of
    the corpus's evaluation. With fewer, easy and hard ones are mixed."""
    start, passages = sources.start_of(loaded), corpus.passages("evaluation")
    docs, out = sources.docstrings("numpy"), []
    ends = (
        *("", passages["languages"], sources.records(), passages["dialogue"]),
        *(sources.code("mlx_lm"), passages["mathematics"]),
    )
    for place, end in enumerate(ends[:number]):
        text = sources.BETWEEN.join([*docs[place::TEXTS], end])[-CHARACTERS * count :]
        tokens = loaded.tokenizer.encode(text, add_special_tokens=False)
        if len(start) + len(tokens) >= count:
            out.append([*start, *tokens[len(start) - count :]])
    return out
