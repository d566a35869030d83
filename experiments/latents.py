"""`python -m experiments.latents [--out FILE]`: what compressed latents (MLA) cost and lose, on random weights.

A model in the shape of GLM-4.7-Flash's attention (latents of 512, rotary keys of 64, 20 heads), of two layers and small
outside of it, reads random tokens; the last ones one by one. Random weights have no outliers and attend to nothing
in particular: figures compare presets with each other and with full precision on the same numbers, and say
nothing about a trained model. The table of docs/internals/mla.md.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from experiments.options import Parser
from mlxkv import console
from mlxkv.console import print_table
from mlxkv.formats.names import parse_kv
from mlxkv.models import attach, detach
from mlxkv.models.calibration import measure

PRESETS = (
    "int8",
    "int4",
    "int4+rope16",
    "int3",
    "int2",
    "hadamard-int4",
    "srft-int4",
    "kvarn-int4",
    "turbo-int4",
)
PRESETS += ("oscar-int2", "naive-int2")
RANK, ROTARY, VOCABULARY = 512, 64, 512
CONTEXT, STEPS, SEEDS = 640, 24, (0, 1)
CONFIG = {
    "model_type": "glm4_moe_lite",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "n_routed_experts": None,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 192,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": ROTARY,
    "v_head_dim": 256,
    "rope_theta": 1e6,
    "max_position_embeddings": 8192,
}


def model_of(seed: int):
    """The model with random float32 weights; norms differ by channel, and queries are large enough to choose."""
    mx.random.seed(seed)
    family = import_module(f"mlx_lm.models.{CONFIG['model_type']}")
    model = family.Model(family.ModelArgs.from_dict(CONFIG))
    model.update(tree_map(lambda x: x + 0.02 * mx.random.normal(x.shape), model.parameters()))
    for layer in model.layers:
        at = layer.self_attn
        at.kv_a_layernorm.weight = mx.exp(0.5 * mx.random.normal((RANK,)))
        at.q_b_proj.weight = 4 * at.q_b_proj.weight
    mx.eval(model.parameters())
    return model


def logits(model, text: mx.array) -> mx.array:
    """[STEPS, vocabulary] of the tokens that are read one by one."""
    cache = make_prompt_cache(model)
    for start in range(0, CONTEXT, 512):
        mx.eval(model(text[None, start : start + 512], cache=cache))
    out = [model(text[None, i : i + 1], cache=cache)[0] for i in range(CONTEXT, CONTEXT + STEPS)]
    return mx.concatenate(out)


def divergence(plain: mx.array, other: mx.array) -> float:
    p, q = (x - mx.logsumexp(x, -1, keepdims=True) for x in (plain, other))
    return (mx.exp(p) * (p - q)).sum(-1).mean().item()


def measured(seed: int) -> dict[str, tuple[float, float]]:
    """{preset: (mean KL in nats, rms of the error of logits over rms of their spread)} of one model and text."""
    model = model_of(seed)
    text = mx.random.randint(0, VOCABULARY, (CONTEXT + STEPS,), key=mx.random.key(seed + 100))
    other = mx.random.randint(0, VOCABULARY, (1024,), key=mx.random.key(seed + 200))
    calibration = measure.calibrate(model, other.tolist())
    plain, out = logits(model, text), {}
    for name in PRESETS:
        needs = {"calibration": calibration} if parse_kv(name).calibrated else {}
        attach(model, name, strict=True, **needs)
        found = logits(model, text)
        detach(model)
        error, spread = found - plain, plain - plain.mean(-1, keepdims=True)
        ratio = mx.sqrt((error**2).mean() / (spread**2).mean()).item()
        out[name] = divergence(plain, found), ratio
        print(f"{seed} {name}: KL {out[name][0]:.2g}", file=sys.stderr)
    return out


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("latents", __doc__)
    parser.add_argument("--out", help="a JSON file for the figures")
    chosen = parser.parse_args(arguments)
    found, rows = [measured(seed) for seed in SEEDS], []
    whole = 2 * (RANK + ROTARY)
    for name in PRESETS:
        bits = parse_kv(name).of_latents.bits_per_value(RANK, ROTARY)
        size = bits * (RANK + ROTARY) / 8
        nats, ratios = zip(*(one[name] for one in found), strict=True)
        rows.append(
            {
                "preset": name,
                "bits": bits,
                "bytes": size,
                "share": whole / size,
                "kl": sum(nats) / len(SEEDS),
                "kl_range": [min(nats), max(nats)],
                "logits": sum(ratios) / len(SEEDS),
            }
        )
    print_table(
        [
            "preset",
            "bits/value",
            "bytes a token and layer",
            "of 16 bits",
            "KL",
            f"of {len(SEEDS)} models",
            "logits",
        ],
        [
            [
                row["preset"],
                f"{row['bits']:.2f}",
                f"{row['bytes']:.0f}",
                f"1/{row['share']:.1f}",
                f"{row['kl']:.2g}",
                "{:.2g} to {:.2g}".format(*row["kl_range"]),
                f"{row['logits']:.2g}",
            ]
            for row in rows
        ],
    )
    if chosen.out:
        with open(chosen.out, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    console.run_tool(main)
