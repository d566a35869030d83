"""Where along the computation the error of a compressed cache appears, layer by layer (figure 2 of
the OSCAR paper): in the stored keys and values, the scores, attention, the residual stream, the
logits.

A context is read in chunks, as a prompt is; the queries behind it a few at a time, as in decoding.
All but `hidden` and `logits_kl` compare, inside one run of the compressed model, with what this
very run handed to its cache: they show the error of this layer alone. Per layer:

    keys, values   ||stored - exact|| / ||exact|| over the tokens in sealed pages (`sealed` of
                   them, at the end of the run), all kv heads together. Windows are exact.
    scores_kl      mean over heads and queries of KL(softmax(q K^T) || softmax(q K_stored^T)) in
                   nats, causal, with this run's q, masks and attention sinks.
    attention      ||W_o (out - exact)|| / ||W_o exact|| over all queries: out as the product
                   computes it, exact from the exact keys and values in float32, the same q.
                   `attention_at` is "output projection", or "heads" where something (a gate, a
                   norm) stands between attention and W_o: then W_o is left out.
    hidden         ||h - h'|| / ||h'|| over all queries, h the residual stream after the layer, h'
                   that of the run with full-precision caches on the same tokens. It accumulates.
                   None where the model does not call its layers as a whole.

    logits_kl      mean over queries of KL(full precision || compressed) of the next token, in nats.

A layer that is not compressed (`compressed` is false), and one where nothing is sealed yet, reads
exactly what it wrote: its own errors are 0. Memory: beside the compressed caches of one arm, exact
ones, and the scores of one layer and kv head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf, sqrt

import mlx.core as mx

from mlxkv.eval import feed
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.exact import compare, divergence
from mlxkv.eval.part import Options, Part, Progress, Results
from mlxkv.metal.launch import backend
from mlxkv.models.taps import Call, Tap, Visit, tap, watch

TASK = "stages"
QUERIES = 64  # tokens behind the context
CONTEXT_CPU = 1024  # at most there: exact scores of every layer beside the model's own work


def parts(arms: Arms, options: Options, tokens_of: Callable[[int], list[int]]) -> list[Part]:
    """One part per context, on a CPU of at most CONTEXT_CPU tokens. tokens_of(count): that many tokens
    of text, the same every time."""

    def part(context: int) -> Part:
        tokens = tokens_of(context + QUERIES)

        def run(arms: Arms, names: list[str], progress: Progress) -> Results:
            return measure(arms, names, tokens, context, progress)

        steps = len(_chunks(context + QUERIES, context))
        asks = {"queries": QUERIES, "tokens": tokens}
        return Part(TASK, f"{context}", run, steps, asks, baseline=False)

    most = CONTEXT_CPU if backend() == "cpu" else max(options.contexts)
    return [part(context) for context in dict.fromkeys(min(c, most) for c in options.contexts)]


def measure(
    arms: Arms, names: list[str], tokens: Sequence[int], context: int, progress: Progress
) -> Results:
    """The stages of each arm: tokens[:context] are read, the rest are the queries."""
    base = _run(arms, BASELINE, tokens, context, lambda _: None)
    out = {}
    for name in names:
        run = _run(arms, name, tokens, context, progress)
        pairs = zip(base.logits, run.logits, strict=True)
        nats = sum(divergence(mine, other).sum().item() for mine, other in pairs)
        queries = len(tokens) - context
        out[name] = {
            "tokens": context,
            "queries": queries,
            "layers": [
                {"index": index, **layer.row(base.layers.get(index))}
                for index, layer in sorted(run.layers.items())
            ],
            "logits_kl": nats / queries,
        }
    return out


@dataclass
class _Ratio:
    """The norm of errors over the norm of what they are errors of."""

    error: float = 0.0
    size: float = 0.0

    def add(self, error: mx.array, exact: mx.array) -> None:
        squares = [mx.square(x.astype(mx.float32)).sum() for x in (error, exact)]
        mx.eval(squares)
        self.error += squares[0].item()
        self.size += squares[1].item()

    @property
    def value(self) -> float:
        if not self.error:
            return 0.0
        return sqrt(self.error / self.size) if self.size else inf


@dataclass
class _Layer:
    """What is known of one layer. hidden: one array per pass, [B, L, hidden size]. taps: the caches
    that its attention read, until `finish`."""

    kind: str
    hidden: list[mx.array] = field(default_factory=list)
    taps: list[Tap] = field(default_factory=list)
    compressed: bool = False
    sealed: int = 0
    stored: tuple[_Ratio, _Ratio] = field(default_factory=lambda: (_Ratio(), _Ratio()))
    nats: float = 0.0
    queries: int = 0
    heads: _Ratio = field(default_factory=_Ratio)
    projected: _Ratio | None = field(default_factory=_Ratio)  # None once a call had no W_o

    def see(self, visit: Visit) -> None:
        for call in visit.calls:
            self._attended(visit, call)
        if visit.hidden is not None:
            self.hidden.append(visit.hidden)
            mx.eval(visit.hidden)

    def _attended(self, visit: Visit, call: Call) -> None:
        if not any(call.view.tap is t for t in self.taps):
            self.taps.append(call.view.tap)
        keys = _keys_read(call)
        exact, nats = compare(
            call.queries, call.exact, keys, call.scale, mask=call.mask, sinks=call.sinks
        )
        self.nats += nats.sum().item()
        self.queries += nats.size
        error = call.out.astype(mx.float32) - exact
        self.heads.add(error, exact)
        project = visit.projection(call)
        if project is None:
            self.projected = None
        elif self.projected is not None:
            self.projected.add(project(error), project(exact))

    def finish(self) -> None:
        """Measure what is stored, and let go of the caches."""
        for tapped in self.taps:
            view, _ = tapped.keys_and_values()
            if view.pages is None:
                continue
            start = view.sink[0].shape[2] if view.sink else 0
            self.sealed = max(self.sealed, view.pages.tokens)
            for side, ratio in enumerate(self.stored):
                exact = tapped.exact[side][:, :, start : start + view.pages.tokens]
                exact = exact.astype(mx.float32)
                ratio.add(view.pages.decode(side, mx.float32) - exact, exact)
        self.compressed = bool(self.taps)
        self.taps = []

    def row(self, base: _Layer | None) -> dict:
        """Plain data. base: this layer in full precision."""
        apart = None
        if self.hidden and base is not None:
            apart = _Ratio()
            for mine, exact in zip(self.hidden, base.hidden, strict=True):
                exact = exact.astype(mx.float32)
                apart.add(mine.astype(mx.float32) - exact, exact)
        where = "heads" if self.projected is None else "output projection"
        return {
            "kind": self.kind,
            "compressed": self.compressed,
            "sealed": self.sealed,
            "keys": self.stored[0].value,
            "values": self.stored[1].value,
            "scores_kl": self.nats / self.queries if self.queries else 0.0,
            "attention": (self.projected or self.heads).value,
            "attention_at": where if self.compressed else None,
            "hidden": None if apart is None else apart.value,
        }


def _keys_read(call: Call) -> mx.array:
    """The keys that attention read, [B, G, T, D] float32."""
    view = call.view
    pieces = [view.live[0].astype(mx.float32)]
    if view.pages is not None:
        pieces.insert(0, view.pages.decode(0, mx.float32))
    if view.sink is not None:
        pieces.insert(0, view.sink[0].astype(mx.float32))
    return mx.concatenate(pieces, axis=2)


@dataclass
class _Run:
    """One arm over one text. logits: one array per chunk of queries, [L, vocabulary] float32."""

    layers: dict[int, _Layer] = field(default_factory=dict)
    logits: list[mx.array] = field(default_factory=list)


def _chunks(total: int, context: int) -> list[tuple[int, int]]:
    """From, to: the context as a prompt is read, the rest as in decoding."""
    steps = ((0, context, feed.PREFILL), (context, total, feed.DECODE))
    return [(s, min(s + step, end)) for start, end, step in steps for s in range(start, end, step)]


def _run(arms: Arms, name: str, tokens: Sequence[int], context: int, progress: Progress) -> _Run:
    out, model = _Run(), arms.loaded.model
    with arms.caches([name]) as made, ExitStack() as watching:
        cache, kinds = made[name], {r.index: r.kind for r in arms.reports[name]}
        taps = tap(cache)

        def see(visit: Visit) -> None:
            kind = kinds.get(visit.cache, "no cache of its own")
            out.layers.setdefault(visit.index, _Layer(kind)).see(visit)

        for start, stop in _chunks(len(tokens), context):
            if start == context:
                watching.enter_context(watch(model, cache, see))
            logits = model(mx.array(tokens[start:stop])[None], cache=cache)[0]
            if start >= context:
                out.logits.append(logits.astype(mx.float32))
            mx.eval(out.logits, [c.state for c in cache], [t.exact for t in taps])
            progress(1)
        for layer in out.layers.values():
            layer.finish()
    return out
