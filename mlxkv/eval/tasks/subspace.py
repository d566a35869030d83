"""Task `subspace`: how well bases of low rank fit a text that changes its kind half way (OjaKV,
section 4): residual-energy ratio, and overlap with the basis that is best for the second half.

A text is read in chunks, as a prompt is. Each chunk is judged by the basis as it was before the
chunk was read, so that no basis is judged on text that taught it. Per layer and side, means over kv
heads:

    static    residual-energy ratio ||x - x U U^T||^2 / ||x||^2 by the basis of the calibration
    adapted   the same by the basis at that place
    oracle    the same by the leading directions of the second half; no basis is better there
    overlap   Tr(U^T W W^T U) / R of the adapted basis with the oracle's W, along the text;
              overlap_static: the same of the calibration's basis

Keys have RoPE in them, as caches get them. Arms without low rank have no layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlxkv.eval.arms import Arms
from mlxkv.eval.questions import prompts
from mlxkv.eval.tasks.part import Part, Progress, Results, TaskOptions
from mlxkv.formats.calibration import subspace
from mlxkv.models.hooks.taps import CompressedObserver, put_observers
from mlxkv.texts import corpus

TASK = "subspace"
CHUNKS = 16  # of a text
SIDES = ("keys", "values")


def parts(arms: Arms, options: TaskOptions, tokens_of: Callable[[int], list[int]]) -> list[Part]:
    """Return one part per context. tokens_of(count): text of the usual kind, before the code."""

    def part(context: int) -> Part:
        tokens = shifted(arms, tokens_of, context)

        def run(arms: Arms, names: list[str], progress: Progress) -> Results:
            return {name: measure(arms, name, tokens, progress) for name in names}

        return Part(TASK, f"{context}", run, CHUNKS, {"tokens": tokens}, baseline=False)

    return [part(context) for context in options.contexts]


def shifted(arms: Arms, tokens_of: Callable[[int], list[int]], context: int) -> list[int]:
    """Return half a context of the usual text, then half of program code, or all that there is."""
    code = "\n\n".join(corpus.pieces("evaluation")["code"])
    first = context // 2
    return [*tokens_of(first), *prompts.encode(arms.loaded, code)[: context - first]]


def measure(arms: Arms, name: str, tokens: Sequence[int], progress: Progress) -> dict:
    """Return {"tokens", "shift", "positions": ends of chunks, "layers": [{"index", "keys", "values"}]}."""
    half, out = len(tokens) // 2, []
    each = -(-len(tokens) // CHUNKS)
    ends = [min(start + each, len(tokens)) for start in range(0, len(tokens), each)]
    if not arms.configs[name].low:
        progress(CHUNKS)
        return {"tokens": len(tokens), "shift": half, "positions": ends, "layers": out}
    with arms.caches([name]) as made:
        cache = made[name]
        taps = [one for one in put_observers(cache) if one.config.low]
        seen: list[list[tuple]] = [[] for _ in taps]
        for start, stop in zip([0, *ends], ends, strict=False):
            for one, bases in zip(taps, seen, strict=True):
                bases.append(_bases(one))
            arms.loaded.model(mx.array(tokens[start:stop])[None], cache=cache)
            mx.eval([c.state for c in cache], [one.exact for one in taps])
            progress(1)
        for one, bases in zip(taps, seen, strict=True):
            row = {"index": one.index}
            for i, side in enumerate(SIDES):
                if getattr(one.config, side).low is not None:
                    row[side] = _side(one, i, [pair[i] for pair in bases], ends, half)
            out.append(row)
    return {"tokens": len(tokens), "shift": half, "positions": ends, "layers": out}


def _bases(one: CompressedObserver) -> tuple[np.ndarray, np.ndarray]:
    """Return the current U of keys and of values, [G, D, R]."""
    downs = (one.basis.keys.down, one.basis.values.down)
    return tuple(np.array(x, np.float64).reshape(-1, *x.shape[-2:]) for x in downs)


def _side(
    one: CompressedObserver, side: int, bases: list[np.ndarray], ends: list[int], half: int
) -> dict:
    x = np.array(one.exact[side][0].astype(mx.float32), np.float64)  # [G, T, D]
    first, rank = bases[0], bases[0].shape[-1]
    best = subspace.basis(_moment(x[:, half:]), rank)
    moments = [_moment(x[:, a:b]) for a, b in zip([0, *ends], ends, strict=False)]

    def along(chosen: Sequence[np.ndarray]) -> list[float]:
        pairs = zip(moments, chosen, strict=True)
        return [float(subspace.residual(m, u).mean()) for m, u in pairs]

    return {
        "rank": rank,
        "static": along([first] * len(ends)),
        "adapted": along(bases),
        "oracle": along([best] * len(ends)),
        "overlap": [float(subspace.overlap(u, best).mean()) for u in bases],
        "overlap_static": float(subspace.overlap(first, best).mean()),
    }


def _moment(rows: np.ndarray) -> np.ndarray:
    return rows.swapaxes(-1, -2) @ rows


COLUMNS = ("preset", "side", "R", "home static", "adapted", "away static", "adapted", "oracle")
MORE = ("overlap static", "adapted")


def table(part: dict[str, dict]) -> list[list[str]]:
    """Return a row per arm and side, means over layers and chunks: residuals in the first half
    (home) and in the second (away), overlap at the end."""
    rows = []
    for name, result in part.items():
        away = [end > result["shift"] for end in result["positions"]]
        for side in SIDES:
            found = [layer[side] for layer in result["layers"] if side in layer]
            if not found:
                continue
            cells = [name, side, str(max(one["rank"] for one in found))]
            for where, keys in (
                (False, ("static", "adapted")),
                (True, ("static", "adapted", "oracle")),
            ):
                for key in keys:
                    pairs = (pair for one in found for pair in zip(one[key], away, strict=True))
                    cells.append(f"{np.mean([x for x, at in pairs if at == where]):.4f}")
            cells.append(f"{np.mean([one['overlap_static'] for one in found]):.3f}")
            cells.append(f"{np.mean([one['overlap'][-1] for one in found]):.3f}")
            rows.append(cells)
    return rows
