"""Plant outliers: scale a few channels of K up, as in large real models, without changing the function.

Small trained models have no outlier channels in K, so even naive 4-bit codes lose nothing on them.
Both channels of a rotary pair (i, i + D/2) of K are multiplied by a power of two, and the same pair of
Q is divided by it: every product q . k keeps its bits, but K is hard to quantise. `tiny-hard` and
`tiny-qwen-hard` are the plain weights after `plant`.

    weights = plant(weights, config)            # a dict of arrays, a dict like config.json

Arrays may be of NumPy, torch or MLX: only multiplication and addition are used. In qwen2 the rows of
the q and k projections and their biases are scaled. gemma3_text has norms between projection and
rotary embedding, with gains 1 + w, so the gains of q_norm and k_norm are scaled; training/export.py
rounds them so that the scaled gains are float16 numbers again.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

Weights = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """By what the pairs of a kv head are scaled, one pair per scale, and from which range they are taken.

    Pair i turns by theta ** (-2 i / D) a token: large i hardly turn, as in real models.
    """

    scales: tuple[int, ...]
    pairs: tuple[float, float]  # from, to; as shares of all pairs
    seed: int = 7


RECIPES = {
    "gemma3_text": Recipe(scales=(16, 8, 8), pairs=(0.75, 1.0)),
    "qwen2": Recipe(scales=(16, 8, 8), pairs=(0.5, 0.8)),  # apart from its constant K channels
}


@dataclass(frozen=True)
class Outlier:
    """One planted pair: channels `pair` and `pair + D/2` of a kv head in a layer."""

    layer: int
    kv_head: int
    pair: int
    scale: int


def outliers(config: dict[str, Any]) -> list[Outlier]:
    """The planted pairs of a model: the same on every machine."""
    recipe = RECIPES[config["model_type"]]
    heads = config["num_key_value_heads"]
    half = head_dim(config) // 2
    if config["model_type"] == "gemma3_text":
        heads = 1  # the norms are shared by all heads
    rng = Random(recipe.seed)
    out = []
    for layer in range(config["num_hidden_layers"]):
        for head in range(heads):
            low, high = (int(share * half) for share in recipe.pairs)
            pairs = rng.sample(range(low, high), len(recipe.scales))
            out += [Outlier(layer, head, p, s) for p, s in zip(pairs, recipe.scales, strict=True)]
    return out


def head_dim(config: dict[str, Any]) -> int:
    """Channels of a head; configurations of qwen2 do not name it."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def plant(weights: Weights, config: dict[str, Any]) -> Weights:
    """Return the weights with outliers; the dict that is given is not changed."""
    kind = config["model_type"]
    if kind not in RECIPES:
        raise ValueError(f"[plant] no recipe for {kind!r}. Choose from: {', '.join(RECIPES)}.")
    return (_gemma if kind == "gemma3_text" else _qwen)(dict(weights), config)


def channel_scales(config: dict[str, Any], layer: int) -> list[list[float]]:
    """The scale of each K channel, one list per planted head."""
    half = head_dim(config) // 2
    planted = [o for o in outliers(config) if o.layer == layer]
    scales = [[1.0] * (2 * half) for _ in range(1 + max(o.kv_head for o in planted))]
    for o in planted:
        scales[o.kv_head][o.pair] = scales[o.kv_head][o.pair + half] = float(o.scale)
    return scales


def _gemma(weights: Weights, config: dict[str, Any]) -> Weights:
    for layer in range(config["num_hidden_layers"]):
        (scales,) = channel_scales(config, layer)
        for part, factors in (("k", scales), ("q", [1 / s for s in scales])):
            name = f"model.layers.{layer}.self_attn.{part}_norm.weight"
            by = _like(weights[name], factors)
            weights[name] = weights[name] * by + (by - 1)  # (1 + w) * by - 1, each term exact
    return weights


def _qwen(weights: Weights, config: dict[str, Any]) -> Weights:
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    for layer in range(config["num_hidden_layers"]):
        scales = channel_scales(config, layer)
        k = [s for head in scales for s in head]
        q = [1 / s for head in scales for _ in range(groups) for s in head]
        for part, factors in (("k", k), ("q", q)):
            name = f"model.layers.{layer}.self_attn.{part}_proj"
            matrix, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
            by = _like(bias, factors)
            weights[f"{name}.weight"] = matrix * by[:, None]
            weights[f"{name}.bias"] = bias * by
    return weights


def _like(array: Any, values: list[float]) -> Any:
    """The values as an array of the same library and dtype."""
    kind = type(array).__module__.partition(".")[0]
    if kind == "mlx":
        import mlx.core as mx

        return mx.array(values).astype(array.dtype)
    if kind == "torch":
        import torch

        return torch.tensor(values, dtype=array.dtype, device=array.device)
    import numpy as np

    return np.array(values, dtype=array.dtype)
