"""Measure what a preset in one layer costs: KL divergence of the model's next tokens from full precision.

Text is read in windows that do not see each other. The first half of a window is a prompt; the second half is
read in small parts behind it and scored, so that attention reads what was stored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlxkv import __version__, console, files, untrusted
from mlxkv.errors import MachineError
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.plans.plan import Part, Plan
from mlxkv.models.origin import origin_of
from mlxkv.models.seam import attach, detach
from mlxkv.untrusted import Unsound

WINDOW = 1024  # tokens that see each other
CHUNK = 256  # tokens that go through the model at once
EXACT = "fp16"
LOWEST = -1e30  # for a masked token, whose logit is -inf


def divergence(scores: mx.array, others: mx.array) -> mx.array:
    """Return KL(softmax(scores) || softmax(others)) over the last axis, in nats: [..., T] -> [...].

    Sums q - p - p log(q / p): no term is negative, so a small divergence is not a difference of
    large sums.
    """
    log_p = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    log_q = others - mx.logsumexp(others, axis=-1, keepdims=True)
    p, q, gap = mx.exp(log_p), mx.exp(log_q), log_q - log_p
    near = p * (mx.expm1(mx.minimum(gap, 1)) - gap)
    terms = mx.where(gap < 1, near, q - p - p * gap)
    # Of tokens that have no chance at all (logits of minus infinity) the gap is no number.
    return mx.where(p > 0, terms, q).sum(axis=-1)


@dataclass(eq=False)
class Sensitivity:
    """Measures plans of one model on some windows of text, and keeps the numbers.

    windows: of token ids. calibration: for presets that need one. file: where numbers are kept from run to
    run, or None. progress: called with the tokens of each window that was read.
    """

    model: nn.Module
    windows: Sequence[Sequence[int]]
    calibration: Calibration | None = None
    file: Path | None = None
    progress: Callable[[int], None] | None = None
    _known: dict[str, list[float]] = field(default_factory=dict, init=False)

    def __post_init__(self):
        if self.file is not None:
            self._known = _read(self.file)

    def measure(self, plans: Mapping[str, CacheConfig | Plan]) -> dict[str, np.ndarray]:
        """The mean divergence of each window under each plan, [windows] float64, by name.

        Raises MachineError for NaN or infinity in what the model computes.
        """
        keys = {name: self._key(kv) for name, kv in plans.items()}
        for at, window in enumerate(self.windows):
            new = [name for name in plans if len(self._known.get(keys[name], ())) <= at]
            if self.progress and (kept := len(plans) - len(new)):
                self.progress(kept * len(window))
            if not new:
                continue
            exact = self._logits(window)
            for name in new:
                attach(self.model, plans[name], calibration=self._needed(plans[name]))
                try:
                    found = _apart(exact, self._logits(window))
                finally:
                    detach(self.model)
                if not np.isfinite(found):
                    raise MachineError(
                        f"[calibrate] NaN or infinity in the logits with {name}; try another --dtype, or "
                        "other text"
                    )
                self._known.setdefault(keys[name], []).append(found)
                if self.progress:
                    self.progress(len(window))
            self._keep()
        count = len(self.windows)
        return {name: np.array(self._known[keys[name]][:count]) for name in plans}

    def _needed(self, kv: CacheConfig | Plan) -> Calibration | None:
        return self.calibration if kv.calibrated else None

    def _key(self, kv: CacheConfig | Plan) -> str:
        """A hash of all that a number depends on but the text of its window, which the file names."""
        used = self._needed(kv)
        told = [
            {k: v for k, v in kv.as_dict().items() if k != "presets"},
            used and [used.digest, used.header()["layers"]],
            [list(window) for window in self.windows],
        ]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:24]

    def _logits(self, window: Sequence[int]) -> list[mx.array]:
        """The logits [L, V] of the second half of a window, in parts, by the caches of the model as it is."""
        caches, out, half = make_prompt_cache(self.model), [], len(window) // 2
        ends = [*range(CHUNK, half, CHUNK), half, *range(half + CHUNK, len(window), CHUNK)]
        for start, stop in zip([0, *ends], [*ends, len(window)], strict=True):
            logits = self.model(mx.array(window[start:stop])[None], cache=caches)[0]
            if start >= half:
                out.append(mx.maximum(logits.astype(mx.float32), LOWEST))
                mx.eval(out[-1])
            mx.eval([cache.state for cache in caches])
        return out

    def _keep(self) -> None:
        if self.file is None:
            return
        try:
            files.make_folder(self.file.parent)
            with files.written(self.file) as file:
                file.write(json.dumps(self._known).encode())
        except OSError:
            pass  # only a run that is killed loses by it


def _apart(exact: Iterable[mx.array], logits: Iterable[mx.array]) -> float:
    parts = [divergence(a, b) for a, b in zip(exact, logits, strict=True)]
    return float(np.mean(np.concatenate([np.array(one, np.float64) for one in parts])))


def alone(layer: int, name: str, config: CacheConfig, exact: CacheConfig) -> Plan:
    """The plan that has this preset in one layer, and full precision in all others."""
    return Plan.of(
        Part(EXACT, exact), {layer: Part(name, config)}, label=f"{name} in layer {layer}"
    )


def kept_path(model: nn.Module, window: int) -> Path | None:
    """Where the numbers of a model are kept, which a run that was stopped goes on from; None for a model from
    elsewhere."""
    origin = origin_of(model)
    if origin is None:
        return None
    kinds = {str(x.dtype) for x in _weights(model)}
    told = json.dumps([origin.fingerprint, sorted(kinds), window, CHUNK, __version__])
    name = hashlib.sha256(told.encode()).hexdigest()[:24]
    return console.cache_dir() / "sensitivity" / f"{name}.json"


def _weights(model: nn.Module) -> list[mx.array]:

    return [x for _, x in tree_flatten(model.parameters())]


def _read(path: Path) -> dict[str, list[float]]:
    """The numbers of an earlier run; none where the file is not there or not sound."""
    try:
        data = untrusted.read_json(path, 16 << 20)
    except (FileNotFoundError, Unsound):
        return {}
    sound = isinstance(data, dict) and all(
        isinstance(x, list) and all(isinstance(v, float) for v in x) for x in data.values()
    )
    return data if sound else {}
