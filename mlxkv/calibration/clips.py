"""Search clips per layer: the quantile at which a token is cut before it is quantised (OSCAR's --search-clip).

The paper uses the same quantiles (keys .96, values .92) for all models and layers, but their errors differ. Keys are
stored with each candidate while values stay exact, and vice versa, by the codec of the cache, with the model in full
precision. A few queries at the end of every window attend to them as in decoding. The energy of the error is relative
to that of the exact output, after the layer's output projection; before it if a gate or a norm is in between, or if
other layers read the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import log

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxkv.calibration.measure import CHUNK, WINDOW, Progress, read, windows
from mlxkv.codec.codec import Codec
from mlxkv.codec.maps import LayerMaps, of
from mlxkv.codec.transform import subtract_mean
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.calibration.artifact import SIDES, Calibration
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.presets import PRESETS
from mlxkv.metal.quantize import MAX_RANK
from mlxkv.patching.fold import refuse_folded
from mlxkv.patching.mark import layer_name, origin_of, sizes
from mlxkv.patching.observers import AttentionCall, PlainObserver
from mlxkv.patching.patch import patched
from mlxkv.patching.probe import find
from mlxkv.patching.projections import projections
from mlxkv.patching.trees import own_caches, put

# Few: each pair of clips in use is one more build of the quantize kernel.
CANDIDATES = (1.0, 0.98, 0.96, 0.94, 0.92, 0.88, 0.84, 0.8, 0.7, 0.6)
GAIN = 0.05  # least relative gain for which a layer has a clip, and so kernels, of its own
QUERIES = 256  # of the last CHUNK tokens of a window, evenly spaced


@dataclass
class Trial:
    """Errors of one layer. losses: energy of the error by side and clip. energy: of the exact outputs."""

    losses: dict[str, dict[float, float]] = field(default_factory=lambda: {s: {} for s in SIDES})
    energy: float = 0.0

    def add(self, side: str, clip: float, error: float) -> None:
        self.losses[side][clip] = self.losses[side].get(clip, 0.0) + error

    def errors(self, side: str) -> dict[float, float]:
        """Return the relative errors of a side by clip, the preset's own clip first."""
        return {clip: x / max(self.energy, 1e-30) for clip, x in self.losses[side].items()}

    def best(self, side: str) -> float:
        """Return the clip with the smallest error; of equal ones, the largest clip."""
        errors = self.errors(side)
        return min(errors, key=lambda clip: (errors[clip], -clip))


def why_not(config: CacheConfig) -> str | None:
    """Return why `config` has no clips to search, or None."""
    if config.mixed_bits:  # their maps need widths, allotted over all layers
        return "clips are not searched beside mixed bits; choose a pair without fill-NUMBER"
    if config.keys.searchable or config.values.searchable:
        return None
    names = ", ".join(
        name
        for name, preset in PRESETS.items()
        if preset.keys.searchable or preset.values.searchable
    )
    return f"clips are searched for calibrated presets with affine codes; choose from {names}"


def search(
    model: nn.Module,
    calibration: Calibration,
    config: CacheConfig,
    tokens: Sequence[int],
    *,
    window: int = WINDOW,
    start: Sequence[int] = (),
    candidates: Sequence[float] = CANDIDATES,
    progress: Progress | None = None,
) -> tuple[Calibration, dict[str, Trial]]:
    """Return `calibration` with clips for the formats of `config`, and the errors by layer.

    tokens: read in windows as in `calibrate`. candidates: the clips of `config` are added, so that
    the choice is never worse on this text.

    Raises UserError for a configuration without clips to search, a calibration that does not fit, folded weights, and
    windows shorter than the exact tokens of `config`; MachineError for NaN.
    """
    refuse_folded(model, "search-clip")
    if reason := why_not(config):
        raise UserError(f"[search-clip] {reason}")
    parts = windows(tokens, window)
    if not parts or len(start) + len(parts[-1]) - 1 <= config.window:
        raise UserError(
            f"[search-clip] too little text at once; got {len(parts[-1]) if parts else 0} tokens; "
            f"this preset keeps {config.window} exact, choose more than that"
        )
    with patched(model):
        shapes = {layer_name(p): (p, s) for p, s in find(model).shapes.items()}
        if any(shape.latent for _, shape in shapes.values()):
            raise UserError(
                "[search-clip] clips are searched for keys and values apart, and a latent is both; got a model "
                "with latents; leave it out"
            )
        places = {name: shapes[name] for name in calibration.layers if name in shapes}
        origin = origin_of(model)
        calibration.check(sizes(dict(places.values())), origin and origin.fingerprint)
        rotations = of(calibration, config.fitted)
        trials = {name: Trial() for name in places}
        projected = projections(model, [place for place, _ in places.values()])

        def judge(name: str, call: AttentionCall) -> None:
            project = projected.get(places[name][0], lambda out: out)
            _judge(trials[name], call, project, config, rotations[name], candidates)

        for part in parts:
            caches, observers = own_caches(model), {name: PlainObserver() for name in places}
            for name, observer in observers.items():
                put(caches, places[name][0], observer)
            cut = max(0, len(part) - CHUNK)
            read(model, caches, part[:cut], start)
            for name, observer in observers.items():
                observer.on_attention = partial(judge, name)
            read(model, caches, part[cut:], () if cut else start)
            if progress:
                progress(len(part))
    for name, trial in trials.items():
        sums = [trial.energy, *(x for side in SIDES for x in trial.losses[side].values())]
        if not np.isfinite(sums).all():
            raise MachineError(
                f"[search-clip] NaN or infinity in the attention of layer {name}; try another "
                "--dtype, or other text"
            )
    return _with_chosen(calibration, trials, config), trials


def choose(trials: Mapping[str, Trial], side: str) -> dict[str, float]:
    """Choose a clip for each layer.

    This is the clip with the smallest error over all layers, if in this layer it is no worse than the preset's and the
    layer's own best gains less than GAIN over it; else the layer's best. So most layers share kernels, and the noise of
    a short text does not separate them.
    """
    errors = {name: trial.errors(side) for name, trial in trials.items() if trial.losses[side]}
    common = set.intersection(*(set(layer) for layer in errors.values())) if errors else set()
    overall = min(
        sorted(common, reverse=True),
        key=lambda clip: sum(log(max(layer[clip], 1e-30)) for layer in errors.values()),
        default=None,
    )
    out = {}
    for name, layer in errors.items():
        usual, best = next(iter(layer)), trials[name].best(side)
        agrees = overall is not None and layer[overall] <= min(
            layer[usual], layer[best] * (1 + GAIN)
        )
        out[name] = overall if agrees else best
    return out


def _with_chosen(
    calibration: Calibration, trials: Mapping[str, Trial], config: CacheConfig
) -> Calibration:
    layers = dict(calibration.layers)
    for name in SIDES:
        side = getattr(config, name)
        for layer, clip in choose(trials, name).items():
            basis = getattr(layers[layer], name)
            form = side.format(basis.values.shape[1], config.page)
            chosen = replace(basis, clips={**basis.clips, form: clip})
            layers[layer] = replace(layers[layer], **{name: chosen})
    return replace(calibration, layers=layers)


def _judge(
    trial: Trial,
    call: AttentionCall,
    project: Callable[[mx.array], mx.array],
    config: CacheConfig,
    rotations: LayerMaps,
    candidates: Sequence[float],
) -> None:
    """Add the errors of the candidates in one call of attention.

    For a query at token t, tokens sink .. end(t) are in pages, as in `CompressedKVCache`, which quantizes
    when the tokens before t no longer fit. project: errors are measured after it.
    """
    keys, values = (x.astype(mx.float32) for x in call.exact)  # [B, G, T, D]
    new, total = call.queries.shape[2], keys.shape[2]
    rows = np.unique(np.linspace(0, new - 1, QUERIES).astype(int))  # [N]
    at = total - new + rows
    capacity = config.sink + config.recent + config.page
    ends = config.sink + config.page * np.maximum(0, -(-(at - capacity) // config.page))
    place = mx.arange(total)[None]
    paged = (place >= config.sink) & (place < mx.array(ends)[:, None])  # [N, T]
    rows = mx.array(rows)

    def mix(p: mx.array, v: mx.array) -> mx.array:
        return (p.reshape(*v.shape[:2], -1, total) @ v).reshape(*p.shape[:3], -1)

    def energy(out: mx.array) -> float:
        x = project(out.astype(call.out.dtype)).astype(mx.float32)
        return float((x * x).sum())

    exact = call.scores(rows, keys)
    p = call.weights(rows, exact)
    trial.energy += energy(mix(p, values))
    inside = slice(config.sink, int(ends.max()))

    key_mean = rotations.key_mean if config.centred else None

    def stored(name: str, x: mx.array, clip: float) -> mx.array:
        """Return the error of the pages, decoded minus exact, [B, G, T, D]; zero outside them."""
        side = getattr(config, name).clipped(clip)
        codec = Codec(side, x.shape[3], config.page, getattr(rotations, name))
        pages = subtract_mean(key_mean if name == "keys" else None, x[:, :, inside])
        change = codec.decode(codec.encode(pages), mx.float32) - pages
        return mx.pad(change, [(0, 0), (0, 0), (inside.start, total - inside.stop), (0, 0)])

    if config.keys.searchable:
        for clip in _candidates(candidates, config.keys.quantizer, keys.shape[3]):
            change = call.scores(rows, stored("keys", keys, clip))
            p_changed = call.weights(rows, exact + mx.where(paged, change, 0))
            trial.add("keys", clip, energy(mix(p_changed - p, values)))
    if config.values.searchable:
        for clip in _candidates(candidates, config.values.quantizer, values.shape[3]):
            trial.add("values", clip, energy(mix(p * paged, stored("values", values, clip))))


def _candidates(clips: Sequence[float], quantizer, dims: int) -> list[float]:
    """Return the preset's own clip and the `clips` with a different effect, without those that no kernel supports."""
    ranks: dict[int, float] = {}
    for clip in (quantizer.clip, *clips):
        rank = replace(quantizer, clip=clip).clip_rank(dims)
        if clip == quantizer.clip or rank <= MAX_RANK:
            ranks.setdefault(rank, clip)
    return list(ranks.values())
