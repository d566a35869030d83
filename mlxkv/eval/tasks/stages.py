"""Task `stages`: the error of a compressed cache at each stage of the computation, layer by layer
(figure 2 of the OSCAR paper): stored keys and values, scores, attention, residual stream, logits.

A context is read in chunks, as a prompt is, and then the queries a few at a time, as in decoding.
All but `hidden` and `logits_kl` show the error of one layer alone: they compare, in one run of the
compressed model, with the exact keys and values that this run gave to its cache. Per layer:

    keys, values   ||stored - exact|| / ||exact|| over the tokens in sealed pages (`sealed` of
                   them, at the end of the run), all kv heads together. Windows are exact. Keys
                   that are stored without their mean are compared without it.
    scores_kl      mean over heads and queries of KL(softmax(q K^T) || softmax(q K_stored^T)) in
                   nats, causal, with this run's q, masks and attention sinks.
    attention      ||W_o (out - exact)|| / ||W_o exact|| over all queries: `out` of the model,
                   `exact` from the exact keys and values in float32, with the same q.
                   `attention_at` is "output projection", or "heads" if a gate or norm stands
                   between attention and W_o; then W_o is left out.
    hidden         ||h - h'|| / ||h'|| over all queries: h is the residual stream after the layer,
                   h' the same in a run with full-precision caches. It accumulates over layers.
                   None if the model does not call its layers as a whole.

    logits_kl      mean over queries of KL(full precision || compressed) of the next token, in nats.

The own errors of a layer are 0 if it is not compressed (`compressed` is false) or nothing is sealed
yet. Memory: the compressed caches of one arm, exact ones, and the scores of one layer and kv head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf, sqrt

import mlx.core as mx

from mlxkv.eval import feed
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.tasks.exact import compare, divergence
from mlxkv.eval.tasks.part import Part, Progress, Results, TaskOptions
from mlxkv.metal.launch import backend
from mlxkv.models.hooks.taps import (
    AttentionCall,
    CompressedObserver,
    LayerPass,
    observe,
    put_observers,
)

TASK = "stages"
QUERIES = 64  # tokens after the context
CONTEXT_CPU = 1024  # longest context on a CPU, where exact scores of every layer take long


def parts(arms: Arms, options: TaskOptions, tokens_of: Callable[[int], list[int]]) -> list[Part]:
    """Return one part per context, of at most CONTEXT_CPU tokens on a CPU. tokens_of(count): the
    first tokens of the text."""

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
    """Return the stages of each arm: tokens[:context] are the context, the rest are the queries."""
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
    """The norm of errors over the norm of the exact values."""

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
    """The measurements of one layer. hidden: an array per pass, [B, L, hidden size]. taps: the caches
    that its attention read, until `finish`."""

    kind: str
    hidden: list[mx.array] = field(default_factory=list)
    taps: list[CompressedObserver] = field(default_factory=list)
    compressed: bool = False
    sealed: int = 0
    stored: tuple[_Ratio, _Ratio] = field(default_factory=lambda: (_Ratio(), _Ratio()))
    nats: float = 0.0
    queries: int = 0
    heads: _Ratio = field(default_factory=_Ratio)
    projected: _Ratio | None = field(default_factory=_Ratio)  # None after a call without W_o

    def see(self, visit: LayerPass) -> None:
        for call in visit.calls:
            self._attended(visit, call)
        if visit.hidden is not None:
            self.hidden.append(visit.hidden)
            mx.eval(visit.hidden)

    def _attended(self, visit: LayerPass, call: AttentionCall) -> None:
        if not any(call.view.cache is t for t in self.taps):
            self.taps.append(call.view.cache)
        keys = _keys_read(call)
        exact, nats = compare(
            call.queries, call.exact, keys, call.scale, call.mask, call.sinks, call.softcap
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
        """Measure the stored keys and values, and release the caches."""
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
        """Return plain data. base: this layer in full precision."""
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


def _keys_read(call: AttentionCall) -> mx.array:
    """Return the keys that attention read, [B, G, T, D] float32."""
    view = call.view
    pieces = [view.live[0].astype(mx.float32)]
    if view.pages is not None:
        pieces.insert(0, view.pages.decode(0, mx.float32))
    if view.sink is not None:
        pieces.insert(0, view.sink[0].astype(mx.float32))
    return mx.concatenate(pieces, axis=2)


@dataclass
class _Trace:
    """One arm's run over one text. logits: an array per chunk of queries, [L, vocabulary] float32."""

    layers: dict[int, _Layer] = field(default_factory=dict)
    logits: list[mx.array] = field(default_factory=list)


def _chunks(total: int, context: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each chunk: the context as a prompt is read, the rest as in decoding."""
    steps = ((0, context, feed.PREFILL), (context, total, feed.DECODE))
    return [(s, min(s + step, end)) for start, end, step in steps for s in range(start, end, step)]


def _run(arms: Arms, name: str, tokens: Sequence[int], context: int, progress: Progress) -> _Trace:
    out, model = _Trace(), arms.loaded.model
    with arms.caches([name]) as made, ExitStack() as watching:
        cache, kinds = made[name], {r.index: r.kind for r in arms.reports[name]}
        taps = put_observers(cache)

        def see(visit: LayerPass) -> None:
            kind = kinds.get(visit.cache, "no cache of its own")
            out.layers.setdefault(visit.index, _Layer(kind)).see(visit)

        for start, stop in _chunks(len(tokens), context):
            if start == context:
                watching.enter_context(observe(model, cache, see))
            logits = model(mx.array(tokens[start:stop])[None], cache=cache)[0]
            if start >= context:
                out.logits.append(logits.astype(mx.float32))
            mx.eval(out.logits, [c.state for c in cache], [t.exact for t in taps])
            progress(1)
        for layer in out.layers.values():
            layer.finish()
    return out
