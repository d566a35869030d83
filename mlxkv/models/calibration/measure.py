"""Compute a calibration: rotations (OSCAR) and balanced transforms of every kv head, from one pass over
some text.

Queries, keys (after RoPE), values and outputs are observed where attention reads our caches, so every
family that can be compressed can be calibrated. Only second moments are kept, [G, D, D] per layer
and side. Spec: `spec/oscar.py`. The value target V^T S^T S V is (S V)^T (S V), the second moment of
the output of attention, so scores need not be kept. Balanced transforms
(`formats/calibration/balance.py`) also use the moments of keys and values behind the first tokens of
a window, which caches keep exact, and what the output projection makes of errors in values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxkv.codec import transform
from mlxkv.errors import MachineError, UserError
from mlxkv.formats import matrices
from mlxkv.formats.calibration import balance
from mlxkv.formats.calibration.artifact import SIDES, Basis, Calibration, Layer
from mlxkv.formats.calibration.balance import Balance
from mlxkv.models.calibration import TOKENS
from mlxkv.models.calibration.latents import Readers
from mlxkv.models.hooks.fold import refuse_folded
from mlxkv.models.hooks.latent import modules_of
from mlxkv.models.hooks.layers import find
from mlxkv.models.hooks.mark import own_make_cache
from mlxkv.models.hooks.outputs import sensitivities
from mlxkv.models.hooks.probe import Place, Shape, leaves, put
from mlxkv.models.hooks.rebind import bind, release
from mlxkv.models.hooks.taps import AttentionCall, LatentObserver, PlainObserver
from mlxkv.models.origin import Origin, layer_name, origin_of
from mlxkv.texts import corpus
from mlxkv.texts.sources import Text

LEAST = 512  # tokens: fewer are too few for heads of 64 to 256 dims
WINDOW = 4096  # tokens that see each other
SINK = 64  # first tokens of a window, which presets keep exact
ROWS = 4096  # of a sample, at most, per kv head
CHUNK = 512  # tokens that go through the model at once
# What the bases are eigenvectors of: what attention reads (the paper), the same with the surrogate of
# the released code for values, the cache itself, and two that need no text.
TARGETS = ("attention", "surrogate", "tensor", "random", "none")
WITHOUT_TEXT = ("random", "none")
Progress = Callable[[int], None]


@dataclass
class Sample:
    """Every `every`-th of the keys and values of one layer that caches would compress.

    keys, values: parts [G, N, D] in the model's dtype. seen: how many there were.
    """

    every: int
    keys: list[mx.array] = field(default_factory=list)
    values: list[mx.array] = field(default_factory=list)
    seen: int = 0

    def add(self, keys: mx.array, values: mx.array) -> None:
        """Add keys, values: [1, G, L, D], in the order of the text."""
        first = -self.seen % self.every
        self.seen += keys.shape[2]
        if first < keys.shape[2]:
            # Copies: a view would keep the whole array alive.
            pair = [mx.contiguous(x[0, :, first :: self.every]) for x in (keys, values)]
            mx.eval(pair)
            self.keys.append(pair[0])
            self.values.append(pair[1])

    def rows(self, side: str) -> mx.array:
        """All rows of a side, [G, N, D] float32."""
        return mx.concatenate(getattr(self, side), axis=1).astype(mx.float32)


@dataclass
class Moments:
    """Sums of x^T x of one layer, and of keys.

    sums: [G, D, D] float64 by name: keys, values (rows of the target), stored keys, stored values
    (what caches were handed). rows: how many rows each sum has. peaks: [G, D] by side, of the
    channels after SRFT, behind the first tokens of a window. total: [G, D] float64, the sum of the
    `counted` keys of each kv head there. weights: Sigma_K of a first pass, for the surrogate. output:
    M_o of `sensitivities`, or None. begun: tokens of this window. sample: the rows to keep, or None.
    readers: of latents, or None; their values are rotary keys, which are stored as they are. seconds: spent
    on sums.
    """

    shape: Shape
    target: str
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, np.ndarray] = field(default_factory=dict)
    total: np.ndarray | float = 0.0
    counted: int = 0
    weights: mx.array | None = None
    output: np.ndarray | None = None
    begun: int = 0
    sample: Sample | None = None
    readers: Readers | None = None
    seconds: float = 0.0

    def add_queries(self, queries: mx.array, scale: float) -> None:
        """Add the queries that meet latents, [B, H, L, D] (`LatentObserver`)."""
        if self.target == "attention" and self.counted:
            mean = self.total[0] / self.counted
            covariance = self.mean("stored keys")[0] - np.outer(mean, mean)
            self._add("keys", self.readers.rows(queries, scale, covariance))

    def add_attention(self, call: AttentionCall) -> None:
        """Add the queries and outputs of one call of attention, [B, H, L, D]."""
        if self.target == "attention" or (self.target == "surrogate" and self.weights is None):
            self._add("keys", call.queries)
        if self.target == "attention":
            self._add("values", call.out)

    def add_update(self, keys: mx.array, values: mx.array) -> None:
        """Add what a cache was handed, [B, G, L, D]; each token once."""
        skipped = max(0, SINK - self.begun)
        self.begun += keys.shape[2]
        if self.sample is not None and skipped < keys.shape[2]:
            self.sample.add(keys[:, :, skipped:], values[:, :, skipped:])
        if skipped < keys.shape[2]:
            for side, x in zip(SIDES, (keys, values), strict=True):
                self._raise(side, x[:, :, skipped:])
            self.total = self.total + np.array(total(keys[:, :, skipped:]), np.float64)
            self.counted += keys.shape[0] * (keys.shape[2] - skipped)
        if self.target == "attention" and skipped < keys.shape[2]:
            self._add("stored keys", keys[:, :, skipped:])
            self._add("stored values", values[:, :, skipped:])
        elif self.target == "tensor":
            self._add("keys", keys)
            self._add("values", values)
        elif self.weights is not None:
            k = keys.astype(mx.float32)
            energy = ((k @ self.weights) * k).sum(-1, keepdims=True)
            self._add("values", values.astype(mx.float32) * mx.sqrt(mx.maximum(energy, 0)))

    def _add(self, side: str, x: mx.array) -> None:
        mx.eval(x)  # outside of the time that is taken
        start = time.perf_counter()
        moment = second_moment(x, self.shape.heads)
        rows = x.size // (self.shape.heads * x.shape[-1])
        self.sums[side] = self.sums.get(side, 0.0) + np.array(moment, np.float64)
        self.rows[side] = self.rows.get(side, 0) + rows
        self.seconds += time.perf_counter() - start

    def _raise(self, side: str, x: mx.array) -> None:
        found = np.array(peaks(x))
        self.peaks[side] = np.maximum(self.peaks.get(side, found), found)

    def mean(self, side: str) -> np.ndarray:
        mean = self.sums[side] / self.rows[side]
        with_readers = self.readers and side == "keys" and self.target == "attention"
        return self.readers.whole(mean) if with_readers else mean


def second_moment(x: mx.array, kv_heads: int) -> mx.array:
    """x^T x over the rows of each kv head's group: [B, H, L, D] -> [G, D, D] float32."""
    batch, _, _, dims = x.shape
    rows = x.astype(mx.float32).reshape(batch, kv_heads, -1, dims)
    rows = rows.swapaxes(0, 1).reshape(kv_heads, -1, dims)
    return rows.swapaxes(-1, -2) @ rows


def total(x: mx.array) -> mx.array:
    """The sum over tokens: [B, G, L, D] -> [G, D] float32."""
    return x.astype(mx.float32).sum((0, 2))


def peaks(x: mx.array) -> mx.array:
    """The largest absolute values of the channels after SRFT: [B, G, L, D] -> [G, D] float32."""
    return mx.abs(transform.make("srft", x.shape[-1], 0).store(x)).max((0, 2))


def calibrate(
    model: nn.Module,
    tokens: Sequence[int] = (),
    *,
    text: str = "",
    target: str = "attention",
    parts: str = matrices.PARTS,
    per_layer: bool = False,
    window: int = WINDOW,
    bos: int | None = None,
    progress: Progress | None = None,
    timing: dict[str, float] | None = None,
    samples: dict[str, Sample] | None = None,
) -> Calibration:
    """Calibrate all layers of `model` (any model of mlx-lm) that could be compressed.

    tokens: the text, read in windows of `window` tokens that do not see each other, each after
    `bos`. text: its name. target: one of TARGETS; the last two read no text. parts: of U, H and P,
    those that the rotations use. per_layer: one rotation for all kv heads of a layer. progress:
    called with the tokens done since the last call; they are read `passes(target)` times. timing:
    filled with the seconds of sums and eigenvectors by layer. samples: filled with up to ROWS keys
    and values per kv head by layer.

    Raises UserError for unknown settings, too little text, a model with nothing to compress and one
    with folded weights; MachineError for NaN or infinity in what a layer computes.
    """
    refuse_folded(model, "calibrate")
    if target not in TARGETS:
        raise UserError(f"[--target] unknown; got {target!r}; choose from {', '.join(TARGETS)}")
    if not set(parts) <= set(matrices.PARTS):
        raise UserError(f"[--parts] unknown; got {parts!r}; choose some of {matrices.PARTS}")
    if target not in WITHOUT_TEXT and len(tokens) < LEAST:
        raise UserError(
            f"[calibrate] too little text; got {len(tokens)} tokens; choose at least {LEAST}, "
            f"better {TOKENS}"
        )
    own, slots = own_make_cache(model), bind(model)
    try:
        found = find(model, own)
        shapes = {p: s for p, s in found.shapes.items() if not (s.key_dim % 2 or s.value_dim % 2)}
        if not shapes:
            reason = next(iter(found.refused.values()), "no layer has a cache that grows")
            raise UserError(f"[calibrate] this model has nothing to compress; got: {reason}")
        moments = {place: Moments(shape, target) for place, shape in shapes.items()}
        if all(shape.latent for shape in shapes.values()):
            if target == "surrogate":
                raise UserError(
                    "[--target] a latent is read as a key and as a value; got surrogate, which weighs values "
                    "by keys; choose attention"
                )
            for one, module in zip(moments.values(), modules_of(model), strict=True):
                one.readers = Readers(module, one.shape.key_dim)
        elif target == "attention":
            for place, output in sensitivities(model, own, shapes).items():
                moments[place].output = output
        if samples is not None:
            samples |= {layer_name(p): Sample(-(-len(tokens) // ROWS)) for p in moments}
            for place, one in moments.items():
                one.sample = samples[layer_name(place)]
        for turn in range(passes(target)):
            for part in windows(tokens, window):
                _read(model, own, moments, part, [] if bos is None else [bos], progress)
            if target == "surrogate" and not turn:
                for one in moments.values():
                    one.weights = mx.array(one.mean("keys").astype(np.float32))
    finally:
        release(slots)
    layers = {}
    for place, one in moments.items():
        start = time.perf_counter()
        name = layer_name(place)
        bases = [_basis(one, side, f"layer {name}, {side}", per_layer) for side in SIDES]
        layers[name] = Layer(one.shape.heads, *bases)
        if timing is not None:
            timing[name] = one.seconds + time.perf_counter() - start
    origin = origin_of(model)
    return Calibration(
        fingerprint=origin.fingerprint if origin else "",
        model=origin.name if origin else "",
        model_type=str(getattr(model, "model_type", "")),
        target=target,
        parts="".join(part for part in matrices.PARTS if part in parts),
        per_layer=per_layer,
        tokens=len(tokens) if passes(target) else 0,
        text=text,
        text_digest=sha256(np.array(tokens, "<i4").tobytes()).hexdigest()[:16],
        layers=layers,
    )


def windows(tokens: Sequence[int], most: int) -> list[Sequence[int]]:
    """Split `tokens` into parts of one length, at most `most`; the last may be a little shorter."""
    size = -(-len(tokens) // max(1, -(-len(tokens) // most)))
    return [tokens[i : i + size] for i in range(0, len(tokens), size or 1)]


def passes(target: str) -> int:
    """How often the text is read for `target`."""
    return 0 if target in WITHOUT_TEXT else 2 if target == "surrogate" else 1


def _read(
    model: nn.Module,
    make_cache: Callable[[], list],
    moments: dict[Place, Moments],
    tokens: Sequence[int],
    first: list[int],
    progress: Progress | None,
) -> None:
    """Run `first` and one window through the model, chunk by chunk; observers add to `moments`."""
    caches = make_cache()
    for place, one in moments.items():
        one.begun = 0
        if one.readers is None:
            put(caches, place, PlainObserver(one.add_attention, one.add_update))
        else:
            put(caches, place, LatentObserver(one.add_queries, one.add_update))
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        lead = [] if start else first
        model(mx.array([*lead, *part])[None], cache=caches)
        mx.eval([cache.state for _, cache in leaves(caches) if not cache.empty()])
        if progress:
            progress(len(part))


def _basis(moments: Moments, side: str, where: str, per_layer: bool) -> Basis:
    heads = 1 if per_layer else moments.shape.heads
    dims = moments.shape.key_dim if side == "keys" else moments.shape.value_dim
    if moments.target in WITHOUT_TEXT or (moments.readers and side == "values"):
        if moments.target != "random":
            vectors = np.broadcast_to(np.eye(dims), (heads, dims, dims))
        else:
            vectors = matrices.random_basis(heads, dims, dims)
        vectors, ones = vectors.astype(np.float32), np.ones((heads, dims), np.float32)
        none = np.zeros((moments.shape.heads, dims), np.float32) if side == "keys" else None
        # Of moments I.
        return Basis(ones, vectors, balance=Balance(vectors, ones), peaks=ones, mean=none)
    mean = _mean(moments, side, where, per_layer)
    values, vectors, floored = matrices.eigenbasis(mean)
    return Basis(
        values.astype(np.float32),
        vectors.astype(np.float32),
        floored,
        balance=_balance(moments, side, where, per_layer, mean),
        peaks=_peaks(moments, side, where, per_layer),
        mean=_key_mean(moments, where) if side == "keys" else None,
    )


def _mean(moments: Moments, name: str, where: str, per_layer: bool) -> np.ndarray:
    """The mean [G or 1, D, D] of a sum. Raises MachineError for NaN or infinity."""
    mean = moments.mean(name)
    _check_finite(mean, where)
    return mean.mean(0, keepdims=True) if per_layer else mean


def _peaks(moments: Moments, side: str, where: str, per_layer: bool) -> np.ndarray | None:
    """The peaks [G or 1, D] of a side; 1 for channels of zeros. None where windows ended in their first tokens.

    Raises MachineError for NaN or infinity."""
    found = moments.peaks.get(side)
    if found is None:
        return None
    _check_finite(found, where)
    found = found.max(0, keepdims=True) if per_layer else found
    return np.where(found > 0, found, 1.0).astype(np.float32)


def _key_mean(moments: Moments, where: str) -> np.ndarray | None:
    """The mean [G, D] of keys; None where windows ended in their first tokens. Raises MachineError."""
    if not moments.counted:
        return None
    _check_finite(moments.total, where)
    return (moments.total / moments.counted).astype(np.float32)


def _check_finite(x: np.ndarray, where: str) -> None:
    if not np.isfinite(x).all():
        raise MachineError(
            f"[calibrate] NaN or infinity in {where}; the model computes them on this text; try "
            "another --dtype, or other text"
        )


def _balance(
    moments: Moments, side: str, where: str, per_layer: bool, queries: np.ndarray
) -> Balance | None:
    """The balanced transform of a side, or None. queries: their second moment, used for keys."""
    if moments.target != "attention":
        return None
    noise = _mean(moments, f"stored {side}", where, per_layer)
    reads = queries
    if side == "values":
        output = moments.output
        reads = np.broadcast_to(np.eye(noise.shape[-1]), noise.shape) if output is None else output
        if per_layer:
            reads = reads.mean(0, keepdims=True)
    down, sigma, floored = balance.balance(noise, reads)
    if side == "values":  # the unit of errors is free: stored values keep their size
        size = np.trace(noise, axis1=-2, axis2=-1) / sigma.sum(-1)
        down, sigma = down * np.sqrt(size)[:, None, None], sigma * size[:, None]
    return Balance(down.astype(np.float32), sigma.astype(np.float32), floored)


def calibrate_with_samples(
    loaded, text: Text, per_layer: bool = False
) -> tuple[Calibration, dict[str, Sample]]:
    """Calibrate a loaded model and keep a sample of keys and values of each layer in the same pass, with a
    progress bar on stderr."""
    samples: dict[str, Sample] = {}
    with progress_bar(len(text.tokens)) as progress:
        made = calibrate(
            loaded.model,
            text.tokens,
            text=text.name,
            per_layer=per_layer,
            window=min(WINDOW, loaded.context or WINDOW),
            bos=bos_of(loaded.tokenizer),
            progress=progress,
            samples=samples,
        )
    return made, samples


def from_corpus(model: nn.Module, origin: Origin) -> Calibration:
    """Calibrate on the corpus with default settings and a progress bar on stderr."""
    text = "\n\n".join(corpus.interleaved("calibration"))
    tokens = list(origin.tokenizer.encode(text, add_special_tokens=False))[:TOKENS]
    with progress_bar(len(tokens)) as progress:
        return calibrate(
            model,
            tokens,
            text="corpus calibration",
            window=min(WINDOW, origin.context or WINDOW),
            bos=bos_of(origin.tokenizer),
            progress=progress,
        )


@contextmanager
def progress_bar(total: int, what: str = "calibrating") -> Iterator[Progress]:
    """Show a bar on stderr that disappears at the end."""
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(what, total=total)
        yield partial(bars.advance, bar)


def bos_of(tokenizer) -> int | None:
    """The token that starts a text, or None."""
    return getattr(tokenizer, "bos_token_id", None)
