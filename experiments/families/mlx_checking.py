"""What one family of mlx-lm does on compressed caches."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from experiments.families.found import EXACT, INT4, NEAR, NEW, PROMPT, Family, line
from experiments.families.mlx_building import NOT_BUILT, VOCABULARY, build
from mlxkv.formats.config import CacheConfig
from mlxkv.models import attach, detach
from mlxkv.models.catalog.reports import LayerReport


def family(name: str) -> Family:
    """Build `name` and compare it: plain, on lossless pages, on int4, and plain again after detach."""
    result = Family(name)
    if name in NOT_BUILT:
        return replace(result, skipped=NOT_BUILT[name])
    try:
        model = build(name)
    except Exception as error:
        return replace(result, skipped=f"is not built: {line(error)}")
    try:
        plain, logits = _written(model)
    except Exception as error:
        return replace(result, skipped=f"does not run in mlx-lm: {line(error)}")
    if not mx.isfinite(logits).all().item():
        return replace(
            result, skipped="its logits are no numbers with random weights, in mlx-lm too"
        )
    try:
        _attached(model, EXACT)
        tokens, logits_ours = _written(model)
        gap = (mx.linalg.norm(logits_ours - logits) / mx.linalg.norm(logits)).item()
        result = replace(result, exact=gap)
        if tokens != plain or not gap < NEAR:
            return replace(result, fault=f"lossless pages: logits {gap:.1e} apart")
        reports = _attached(model, INT4)
        tokens, logits_ours = _written(model)
        if not mx.isfinite(logits_ours).all().item():
            return replace(result, fault="int4: logits are not finite")
        result = replace(result, layers=tuple(reports), int4=any(r.compressed for r in reports))
        detach(model)
        if not mx.array_equal(_written(model)[1], logits).item():
            return replace(result, fault="after detach the model is another")
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1].name
        return replace(result, fault=f"{line(error)} at {at}")
    return result


def _attached(model: nn.Module, config: CacheConfig) -> list[LayerReport]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is compressed stands in the table
        return attach(model, config)


def _written(model: nn.Module) -> tuple[list[int], mx.array]:
    """Greedy tokens and their logits [NEW, V], after a prompt in two chunks."""
    text = mx.random.randint(3, VOCABULARY - 20, (1, PROMPT), key=mx.random.key(5))
    caches, tokens, rows = make_prompt_cache(model), [], []
    for part in (text[:, :30], text[:, 30:]):
        out = model(part, cache=caches)
    for _ in range(NEW):
        rows.append(out[:, -1, : VOCABULARY - 1])
        tokens.append(mx.argmax(rows[-1]).item())
        out = model(mx.array([[tokens[-1]]]), cache=caches)
    return tokens, mx.concatenate(rows).astype(mx.float32)
