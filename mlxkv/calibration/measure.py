"""Compute a calibration: rotations (OSCAR, `spec/oscar.py`) and balanced transforms of every kv head, from one pass
over some text.

Queries, keys (after RoPE), values and outputs are observed where attention reads our caches: every family that can be
compressed can be calibrated. Only second moments are kept, [G, D, D] per layer and side: of keys and queries, rotated
back to position 0 and averaged over the model's context (`spec/positions.py`), and of outputs, as OSCAR's target
V^T S^T S V is (S V)^T (S V). Balanced transforms (`formats/calibration/balance.py`) also use the costs of errors in
scores (`exchange`) and the amplification of errors in values by the output projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxkv import __version__, console, startup
from mlxkv.calibration import TOKENS
from mlxkv.calibration.begun import Begun
from mlxkv.calibration.exchange import ExchangeMeasure, fisher
from mlxkv.calibration.moments import ROWS, Moments, Readers, Sample, rotations, unit_basis
from mlxkv.corpora.sources import Text, calibration_tokens, start_of
from mlxkv.errors import UserError
from mlxkv.formats import matrices
from mlxkv.formats.calibration import artifact, sums
from mlxkv.formats.calibration.artifact import SIDES, Calibration, Layer
from mlxkv.formats.calibration.rotary import DEFAULT_CONTEXT, contexts
from mlxkv.formats.calibration.sums import (
    DIFFERENTIATED,
    LEAST,
    PROBES,
    TIMES,
    WINDOW,
    windows,
)
from mlxkv.patching.fold import refuse_folded
from mlxkv.patching.mark import Origin, layer_name, origin_of
from mlxkv.patching.observers import PlainObserver
from mlxkv.patching.patch import patched
from mlxkv.patching.probe import ProbedShape, find, modules_of
from mlxkv.patching.projections import sensitivities
from mlxkv.patching.trees import Place, leaves, own_caches, put

if TYPE_CHECKING:
    from mlxkv.loading.load import Loaded

CHUNK = 512  # tokens per call of the model
GRADIENT = 3  # what a token takes that is differentiated, in tokens that are read
Progress = Callable[[int], None]


def calibrate(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    text: str = "",
    window: int = WINDOW,
    start: Sequence[int] = (),
    positions: int | None = None,
    progress: Progress | None = None,
    samples: dict[str, Sample] | None = None,
    begun: Begun | None = None,
) -> Calibration:
    """Calibrate all compressible layers of `model` (any model of mlx-lm).

    tokens: the text, in independent windows of `window` tokens, each after `start`. positions: the length of context
    to calibrate for; by default the model's, or DEFAULT_CONTEXT if that is unknown. text: its name. progress: called
    with the tokens done since the last call (GRADIENT times if they are differentiated). samples: filled with up to
    ROWS keys and values per kv head by layer. begun: holds the sums of each whole window; what is in it is not read
    again. Not for latents, nor with samples.

    Raises UserError for too little text, a model without compressible layers and one with folded weights; MachineError
    for NaN or infinity in a layer's outputs.
    """
    refuse_folded(model, "calibrate")
    if len(tokens) < LEAST:
        raise UserError(
            f"[calibrate] too little text; got {len(tokens)} tokens; choose at least {LEAST}, "
            f"better {TOKENS}"
        )
    with patched(model):
        shapes = _compressible(model)
        positions = positions or _positions(model)
        probes, longest = mx.array(list(tokens[:PROBES])), max(positions, window)
        rotaries = rotations(model, shapes, probes, longest)
        spans = contexts(positions)
        moments = {p: Moments(rotaries[p], spans, shape=shape) for p, shape in shapes.items()}
        if all(shape.latent for shape in shapes.values()):
            for layer, module in zip(moments.values(), modules_of(model), strict=True):
                layer.readers = Readers(module, layer.shape.key_dim)
        else:
            for place, output in sensitivities(model, shapes).items():
                moments[place].output = output
            if begun and begun.sums:
                begun.restore(moments)
            else:
                heads = {place: shape.heads for place, shape in shapes.items()}
                found = fisher(
                    model, heads, tokens, start, progress and (lambda n: progress(GRADIENT * n))
                )
                for place, x in found.items():
                    moments[place].exchange = ExchangeMeasure(x)
        if samples is not None:
            samples |= {layer_name(p): Sample(-(-len(tokens) // ROWS)) for p in moments}
            for place, layer in moments.items():
                layer.sample = samples[layer_name(place)]
        if any(shape.latent for shape in shapes.values()) or samples is not None:
            begun = None
        first = begun.windows if begun else 0
        for at, part in enumerate(windows(tokens, window)[first:], first):
            if begun:
                begun.hold(moments, at)
            caches, observers = own_caches(model), {p: x.observer() for p, x in moments.items()}
            for place, observer in observers.items():
                put(caches, place, observer)
            read(model, caches, part, start, progress)
            for place, observer in observers.items():
                if isinstance(observer, PlainObserver):
                    moments[place].end_window(observer.exact[0])
    layers = {}
    costs = sums.floored({place: layer.costs() for place, layer in moments.items()})
    for place, layer in moments.items():
        name = layer_name(place)
        keys, values = (layer.basis(side, f"layer {name}, {side}") for side in SIDES)
        layers[name] = Layer(layer.shape.heads, keys, values, costs.get(place))
    if None in rotaries.values():
        positions = min(positions, len(next(iter(windows(tokens, window)))))
    return _calibration(model, tokens, text, layers, positions)


def random(model: nn.Module) -> Calibration:
    """Return random rotations for all compressible layers of `model`: for timing models with random weights.

    Raises UserError as `calibrate` does."""
    with patched(model):
        shapes = _compressible(model)
    layers = {}
    for place, shape in shapes.items():
        dims = zip(SIDES, (shape.key_dim, shape.value_dim), strict=True)
        keys, values = (
            unit_basis(matrices.random_basis(shape.heads, d, d), side) for side, d in dims
        )
        layers[layer_name(place)] = Layer(shape.heads, keys, values)
    return _calibration(model, (), "", layers, _positions(model))


def _compressible(model: nn.Module) -> dict[Place, ProbedShape]:
    """Return the shapes of compressible caches. The attention function must be patched. Raises UserError if there are
    none."""
    findings = find(model)
    shapes = {p: s for p, s in findings.shapes.items() if not (s.key_dim % 2 or s.value_dim % 2)}
    if not shapes:
        reason = next(iter(findings.refused.values()), "no layer has a cache that grows")
        raise UserError(f"[calibrate] this model has nothing to compress; got: {reason}")
    return shapes


def _positions(model: nn.Module) -> int:
    origin = origin_of(model)
    return (origin and origin.context) or DEFAULT_CONTEXT


def _calibration(
    model: nn.Module,
    tokens: Sequence[int],
    text: str,
    layers: dict[str, Layer],
    positions: int,
) -> Calibration:
    origin = origin_of(model)
    return Calibration(
        fingerprint=origin.fingerprint if origin else "",
        model=origin.name if origin else "",
        model_type=str(getattr(model, "model_type", "")),
        tokens=len(tokens),
        text=text,
        text_digest=_digest(tokens),
        layers=layers,
        positions=positions,
    )


def _digest(tokens: Sequence[int]) -> str:
    return sha256(np.array(tokens, "<i4").tobytes()).hexdigest()[:16]


def read(
    model: nn.Module,
    caches: list,
    tokens: Sequence[int],
    first: Sequence[int],
    progress: Progress | None = None,
) -> None:
    """Run `first` and then `tokens` through the model, CHUNK of these at a time."""
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        lead = [] if start else first
        model(mx.array([*lead, *part])[None], cache=caches)
        mx.eval([cache.state for _, cache in leaves(caches) if not cache.empty()])
        if progress:
            progress(len(part))


def on_text(
    model: nn.Module,
    source: Loaded | Origin,
    text: Text,
    samples: dict[str, Sample] | None = None,
    kept: Path | None = None,
) -> Calibration:
    """Calibrate on a text with progress on stderr. source: the model's tokenizer and context. samples: as in
    `calibrate`. kept: the file that keeps the sums when Ctrl-C breaks it off, and to go on from."""
    window, start = min(WINDOW, source.context or WINDOW), start_of(source)
    parts, count = [len(part) for part in windows(text.tokens, window)], len(text.tokens)
    of = {
        "version": __version__,
        "fingerprint": source.fingerprint,
        "text": _digest(text.tokens),
        "window": window,
        "start": start,
    }
    begun = None if kept is None else Begun.read(kept, of)
    steps = sum(parts) + GRADIENT * min(count, TIMES * DIFFERENTIATED)
    said, done = f"reading {count:,} tokens", 0
    if begun and begun.sums:
        done = steps - sum(parts[begun.windows :])
        said += f"; {done / steps:.0%} was kept"
    try:
        told = console.progress("calibrating", steps, said, done)
        with startup.one_thread(), told as progress:
            out = calibrate(
                model,
                text.tokens,
                text=text.name,
                window=window,
                start=start,
                progress=progress,
                samples=samples,
                begun=begun,
            )
    except KeyboardInterrupt:
        if begun and begun.write():
            console.note(
                "[calibrate] stopped; what is measured is kept, and the next goes on there"
            )
        raise
    if begun:
        begun.delete()
    return out


def from_corpus(model: nn.Module, origin: Origin) -> Calibration:
    """Calibrate with default settings, as `mlxkv calibrate` does; Ctrl-C keeps what is measured for the next time."""
    kept = artifact.kept_path(origin.fingerprint).with_suffix(".begun")
    return on_text(model, origin, calibration_tokens(origin, TOKENS), kept=kept)
