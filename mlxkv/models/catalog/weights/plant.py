"""Plant what makes caches of large models hard to quantize, in the weights of a small one.

Small trained models have no outlier channels in K, so even naive 4-bit codes lose nothing on them. Four
plants, each a function of the weights; a table is fair only with the plain model beside them all.

reciprocal  Both channels of a rotary pair (i, i + D/2) of K times a power of two, the pair of Q divided by
            it: the same function, bit for bit. Invariant: balanced maps (their sigma and what they store), and
            codes of keys per channel, with all their errors in scores. Not: rotations, codes per token.
keys        Pairs of K scaled alone, Q as it was. Another function: those pairs count 4 times as much in
            every score (at 8 times small models lose what they read). It is judged against its own full
            precision.
            Invariant: codes of keys per channel, but not their errors in scores; OSCAR's key rotation, which
            queries alone decide, but not what it is given. No method has the same errors as on the plain model.
offset      A constant in one channel of slow pairs of K: models with a bias of k_proj (qwen2). RoPE comes
            after, so scores change by about |q| |constant| times the angle that the pair turns over the
            context; at pairs that turn by less than .05 in 8192 tokens softmax hardly sees it. Invariant: codes
            of keys per channel with a zero point, and any method after the mean of keys is removed. Not: maps
            from second moments, which take the offset for a direction that varies.
massive     Tokens that end a paragraph carry one huge hidden number through all layers (Sun et al.,
            arXiv 2402.17762). They lose most of their own content, their keys are alike, large in a few
            channels, and their values nearly nothing, as attention sinks have them, but inside the text, behind
            windows that keep the first tokens exact. Another function. Invariant: codes per token, but for
            these tokens themselves, without a rotation. Not: codes per channel, whose range the tokens widen.

`tiny-hard` is `tiny` after "reciprocal", `tiny-KIND` after the others; `FOLDER+KIND` plants in any folder
of these families.

    weights = plant(weights, config)                  # a dict of arrays, a dict like config.json
    weights = plant(weights, config, "massive", (12, 40))     # ids of the tokens

Arrays may be of NumPy, torch or MLX. "reciprocal" and "keys" only multiply and add: in qwen2 the rows of
the q and k projections and their biases are scaled. gemma3_text has norms between projection and rotary
embedding, with gains 1 + w, so the gains of q_norm and k_norm are scaled; training/export.py rounds them so
that the scaled gains are float16 numbers again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path
from random import Random
from typing import Any

from mlxkv.errors import UserError

Weights = dict[str, Any]
RECIPROCAL, KEYS, OFFSET, MASSIVE = KINDS = ("reciprocal", "keys", "offset", "massive")


@dataclass(frozen=True)
class Recipe:
    """By what the pairs of a kv head are scaled, one pair per scale, and from which range they are taken.

    Pair i turns by theta ** (-2 i / D) a token: large i hardly turn, as in real models.
    """

    scales: tuple[int, ...]
    pairs: tuple[float, float]  # from, to; as shares of all pairs
    seed: int = 7


RECIPES = {  # of each family, by kind
    "gemma3_text": {
        RECIPROCAL: Recipe(scales=(16, 8, 8), pairs=(0.75, 1.0)),
        KEYS: Recipe(scales=(4, 4, 4), pairs=(0.75, 1.0)),
        MASSIVE: Recipe(scales=(16, 8, 8), pairs=(0.75, 1.0)),
    },
    "qwen2": {  # tiny-qwen has constants of its own in K, at the slowest pairs
        RECIPROCAL: Recipe(scales=(16, 8, 8), pairs=(0.5, 0.8)),
        KEYS: Recipe(scales=(4, 4, 4), pairs=(0.75, 1.0)),
        OFFSET: Recipe(scales=(32, 16, 16), pairs=(0.875, 1.0)),
        MASSIVE: Recipe(scales=(16, 8, 8), pairs=(0.75, 1.0)),
    },
}
WHY_NOT = {
    OFFSET: "offset needs a bias of k_proj, which only qwen2 has here",
}
HUGE = 64  # of "massive": the hidden number over the largest entry of the embedding, at least
ENDS = ("\n\n", "ĊĊ")  # of a token that ends a paragraph; the second in byte-level vocabularies


@dataclass(frozen=True)
class Outlier:
    """One planted pair: channels `pair` and `pair + D/2` of a kv head in a layer."""

    layer: int
    kv_head: int
    pair: int
    scale: int


def outliers(config: dict[str, Any], kind: str = RECIPROCAL) -> list[Outlier]:
    """The planted pairs of a model: the same on every machine."""
    recipe = RECIPES[config["model_type"]][kind]
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


def why_not(config: dict[str, Any], kind: str) -> str | None:
    """Return why `kind` cannot be planted in a model, or None."""
    family = config.get("model_type")
    if kind not in KINDS:
        return f"no plant {kind!r}. Choose from: {', '.join(KINDS)}."
    if family not in RECIPES:
        return f"no recipe for {family!r}. Choose from: {', '.join(RECIPES)}."
    if config.get("quantization") or config.get("quantization_config"):
        return "quantized weights cannot be planted in; take the model's 16-bit weights."
    if kind not in RECIPES[family]:
        return f"{WHY_NOT[kind]}; got {family!r}."
    return None


def check(config: dict[str, Any], kind: str) -> None:
    """Raise UserError where `why_not` has a reason."""
    if reason := why_not(config, kind):
        raise UserError(f"[--model] {reason}")


def plant(
    weights: Weights, config: dict[str, Any], kind: str = RECIPROCAL, tokens: tuple[int, ...] = ()
) -> Weights:
    """Return the weights with what `kind` plants; the dict that is given is not changed.

    tokens: ids of the massive tokens (`paragraph_ends`), for "massive". Raises ValueError where `why_not`
    has a reason.
    """
    if reason := why_not(config, kind):
        raise ValueError(f"[plant] {reason}")
    if kind == OFFSET:
        return _offset(dict(weights), config)
    if kind == MASSIVE:
        return _massive(dict(weights), config, tokens)
    family = _gemma if config["model_type"] == "gemma3_text" else _qwen
    return family(dict(weights), config, kind)


def plant_folder(weights: Weights, config: dict[str, Any], kind: str, folder: Path) -> Weights:
    """`plant`, with the massive tokens from the tokenizer of a model folder. Raises UserError for none."""
    tokens = paragraph_ends(folder) if kind == MASSIVE else ()
    if kind == MASSIVE and not tokens:
        raise UserError(f"[--model] no token of {folder} ends a paragraph; choose another plant")
    return plant(weights, config, kind, tokens)


def paragraph_ends(folder: Path) -> tuple[int, ...]:
    """Return the ids of tokens that end a paragraph, from the tokenizer.json of a model folder."""
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    pieces = json.loads(text)["model"]["vocab"]  # {piece: id}, or a list of [piece, score]
    if isinstance(pieces, list):
        pieces = {piece: i for i, (piece, _) in enumerate(pieces)}
    return tuple(sorted(i for piece, i in pieces.items() if piece.endswith(ENDS)))


def channel_scales(config: dict[str, Any], layer: int, kind: str = RECIPROCAL) -> list[list[float]]:
    """The scale of each K channel, one list per planted head."""
    half = head_dim(config) // 2
    planted = [o for o in outliers(config, kind) if o.layer == layer]
    scales = [[1.0] * (2 * half) for _ in range(1 + max(o.kv_head for o in planted))]
    for o in planted:
        scales[o.kv_head][o.pair] = scales[o.kv_head][o.pair + half] = float(o.scale)
    return scales


def _gemma(weights: Weights, config: dict[str, Any], kind: str) -> Weights:
    for layer in range(config["num_hidden_layers"]):
        (scales,) = channel_scales(config, layer, kind)
        parts = {"k": scales} if kind == KEYS else {"k": scales, "q": [1 / s for s in scales]}
        for part, factors in parts.items():
            name = f"model.layers.{layer}.self_attn.{part}_norm.weight"
            by = _like(weights[name], factors)
            weights[name] = weights[name] * by + (by - 1)  # (1 + w) * by - 1, each term exact
    return weights


def _qwen(weights: Weights, config: dict[str, Any], kind: str) -> Weights:
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    for layer in range(config["num_hidden_layers"]):
        scales = channel_scales(config, layer, kind)
        parts = {"k": [s for head in scales for s in head]}
        if kind != KEYS:
            parts["q"] = [1 / s for head in scales for _ in range(groups) for s in head]
        for part, factors in parts.items():
            name = f"model.layers.{layer}.self_attn.{part}_proj"
            matrix, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
            by = _like(bias, factors)
            weights[f"{name}.weight"] = matrix * by[:, None]
            weights[f"{name}.bias"] = bias * by
    return weights


def _offset(weights: Weights, config: dict[str, Any]) -> Weights:
    """Add to the bias of the first channel of each pair `scale` times the size that it has without a bias."""
    dims = head_dim(config)
    planted = outliers(config, OFFSET)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn.k_proj"
        sizes, bias = _sizes(weights, layer), _numbers(weights[f"{name}.bias"])
        for o in (o for o in planted if o.layer == layer):
            channel = o.kv_head * dims + o.pair
            bias[channel] += o.scale * sizes[channel]
        weights[f"{name}.bias"] = _like(weights[f"{name}.bias"], bias)
    return weights


def _massive(weights: Weights, config: dict[str, Any], tokens: tuple[int, ...]) -> Weights:
    """Free one hidden channel, so that it is 0 but for `tokens`, and let keys alone read it.

    Its number is so much larger than all others that the norm before attention makes it sqrt(hidden size):
    a planted channel of these keys is then `scale` times as large as it usually is.
    """
    if not tokens:
        raise ValueError("[plant] massive needs the ids of its tokens; got none.")
    hidden, gemma = config["hidden_size"], config["model_type"] == "gemma3_text"
    channel, dims = (
        Random(RECIPES[config["model_type"]][MASSIVE].seed).randrange(hidden),
        head_dim(config),
    )
    out = {}

    def edit(name: str, change) -> None:
        array = _numbers(weights[name])
        change(array)
        out[name] = _like(weights[name], array)

    def embedding(table: Any) -> None:
        # A power of two from the largest entry, so that rounding in another dtype makes no other model.
        huge = HUGE * 2.0 ** ceil(log2(abs(table).max()))
        table[:, channel] = 0
        table[list(tokens), channel] = huge

    def unread(matrix: Any) -> None:
        matrix[:, channel] = 0

    def unwritten(matrix: Any) -> None:
        matrix[channel] = 0

    def gain(value: float):
        def change(vector: Any) -> None:
            vector[channel] = value - 1 if gemma else value

        return change

    edit("model.embed_tokens.weight", embedding)
    edit("model.norm.weight", gain(0.0))  # what is predicted after these tokens does not read it
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        sizes = _sizes(weights, layer)
        edit(f"{at}.input_layernorm.weight", gain(1.0))
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            edit(f"{at}.{name}.weight", unread)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            edit(f"{at}.{name}.weight", unwritten)
        column = [0.0] * len(sizes)
        for head in range(config["num_key_value_heads"]):
            scales = channel_scales(config, layer, MASSIVE)[0 if gemma else head]
            for i, scale in enumerate(scales):
                if scale > 1:
                    column[head * dims + i] = scale * sizes[head * dims + i] / hidden**0.5

        def keys(matrix: Any, column: list[float] = column) -> None:
            matrix[:, channel] = column

        edit(f"{at}.self_attn.k_proj.weight", keys)
    if "lm_head.weight" in weights and config.get("tie_word_embeddings"):  # torch names both
        out["lm_head.weight"] = out["model.embed_tokens.weight"]
    return weights | out


def _sizes(weights: Weights, layer: int) -> Any:
    """The root mean square [G D] of each key channel for white inputs of the norm, without its bias."""
    matrix = _numbers(weights[f"model.layers.{layer}.self_attn.k_proj.weight"])
    gains = _numbers(weights[f"model.layers.{layer}.input_layernorm.weight"])
    if f"model.layers.{layer}.self_attn.k_norm.weight" in weights:  # of gemma3_text: 1 + w
        gains = gains + 1
    return ((matrix * gains) ** 2).sum(1) ** 0.5


def _numbers(array: Any) -> Any:
    """A copy in NumPy's float64."""
    import numpy as np

    kind = type(array).__module__.partition(".")[0]
    if kind == "mlx":
        import mlx.core as mx

        array = np.array(array.astype(mx.float32))
    if kind == "torch":
        array = array.detach().float().cpu().numpy()
    return np.array(array, dtype=np.float64)


def _like(array: Any, values: Any) -> Any:
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
