"""Find the shapes of a model's own caches by dry runs, which compute nothing."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from mlxkv.catalog.shapes import LayerShape
from mlxkv.patching import probe
from mlxkv.patching.patch import patched
from mlxkv.patching.probe import Findings
from mlxkv.patching.record import PROMPT, record
from mlxkv.patching.traced_weights import unchanged
from mlxkv.patching.trees import Place, cached_part, class_of, leaves, own_caches

# Lengths at which caches of a family's own class are measured: whole groups of tokens, beyond its windows.
NEAR, FAR = 1 << 14, 1 << 15


def layers_of(model: nn.Module) -> list[LayerShape]:
    """Return the shape of each cache that `model` makes and uses by itself, attached or not.

    Layers after a failure in the model's code are assumed to equal others of their class. Reraises the failure if no
    layer of a class was reached.
    """
    model = cached_part(model)
    with patched(model), unchanged(model):
        caches, error = _run(model, PROMPT)
        findings = Findings({}, {}) if error else probe.find(model)
        odd = [place for place, cache in caches if not class_of(cache).has_keys]
        growing = _growth(model, odd) if odd and not error else {}
    expanded = _expanded(model)
    shapes: dict[Place, LayerShape] = {}
    reached: dict[type, LayerShape] = {}
    for place, cache in caches:
        if class_of(cache).has_keys and cache.keys is not None:
            shapes[place] = _of_keys(place, cache, findings, expanded)
            reached[type(cache)] = shapes[place]
        elif place in growing:
            shapes[place] = growing[place]
        elif error is not None:
            if type(cache) not in reached:
                raise error
            shapes[place] = reached[type(cache)]
    return list(shapes.values())


def _run(model: nn.Module, tokens: int) -> tuple[list[tuple[Place, Any]], Exception | None]:
    """Return the model's own caches with their places after a prompt of `tokens`, and the error of its code, if
    any."""
    error = record(model, caches := own_caches(model), (tokens,)).error
    return [(place, cache) for place, cache in leaves(caches) if cache is not None], error


def _of_keys(place: Place, cache, findings: Findings, expanded: int) -> LayerShape:
    """Return the shape of a cache of keys and values after an update."""
    kind, window = class_of(cache).kind, class_of(cache).window
    sizes = (cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3])
    reason, shape = findings.refused.get(place, ""), findings.shapes.get(place)
    extras = {"window": getattr(cache, window)} if window else {}
    if reason == probe.INDEX_KEYS:
        kind = "index"
    elif shape is not None:
        extras |= {"queries": shape.queries, "tied": shape.sinks or shape.softcap is not None}
        if shape.latent:
            kind, extras["expanded"] = "latent", expanded
    return LayerShape(kind, *sizes, reason=reason, index=place[0], **extras)


def _growth(model: nn.Module, places: list[Place]) -> dict[Place, LayerShape]:
    """Return the shapes of caches of other classes: states of fixed size, or caches that grow with the context and are
    not compressed."""
    runs = [dict(_run(model, PROMPT)[0])]
    if any(class_of(runs[0][place]).grows for place in places):
        runs = [dict(_run(model, tokens)[0]) for tokens in (NEAR, FAR)]
    out = {}
    for place in places:
        sizes = [run[place].nbytes for run in runs]
        per_token = (sizes[-1] - sizes[0]) // (FAR - NEAR)
        name, kind = type(runs[0][place]).__name__, "own" if per_token else "state"
        reason = f"mlxkv does not know the class {name}" if per_token else ""
        state = sizes[0] - per_token * NEAR if per_token else sizes[0]
        out[place] = LayerShape(
            kind, int(per_token > 0), per_token // 2, state=state, reason=reason, index=place[0]
        )
    return out


def _expanded(model: nn.Module) -> int:
    """Return how many numbers a prefill expands from one token's latent: keys and values of all heads. 0 without
    latents."""
    for module in probe.modules_of(model)[:1]:
        sizes = [getattr(module, name).weight.shape for name in probe.ABSORBED]
        return sum(heads * dims for heads, dims in ((sizes[0][0], sizes[0][2]), sizes[1][:2]))
    return 0
