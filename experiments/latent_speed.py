"""`python -m experiments.latent_speed [--tokens 32768] [--out FILE]`: decode steps over latents, against mlx-lm's own.

One attention layer of GLM-4.7-Flash and one of DeepSeek-V3 in their sizes, with random weights in bfloat16, reads a
cache of random latents. A row is a cache: bytes, the time of attention alone (the rotary scores' product included), and
that of the whole layer. Steps depend on each other, so that a GPU cannot overlap them. The table of
docs/internals/mla.md.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from experiments.options import Parser, words
from mlxkv import console
from mlxkv.cache.attention import attend
from mlxkv.console import print_table
from mlxkv.errors import UserError
from mlxkv.formats.names import parse_kv
from mlxkv.metal import launch
from mlxkv.models import attach, detach

PRESETS = ("int8", "int4", "int4+rope8", "hadamard-int4", "naive-int3", "naive-int2")
BY_OPS = ("int4",)  # measured by plain ops, too
RANK, ROTARY, CHUNK = 512, 64, 4096
COMMON = {
    "vocab_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": None,
    "kv_lora_rank": RANK,
    "qk_rope_head_dim": ROTARY,
    "max_position_embeddings": 1 << 17,
}
SHAPES = {
    "GLM-4.7-Flash": {
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rope_theta": 1e6,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rope_theta": 1e4,
    },
}


def model_of(shape: str):
    """A model of one layer with random weights in bfloat16."""
    mx.random.seed(0)
    config = COMMON | SHAPES[shape]
    family = import_module(f"mlx_lm.models.{config['model_type']}")
    model = family.Model(family.ModelArgs.from_dict(config))
    model.update(tree_map(lambda x: x.astype(mx.bfloat16), model.parameters()))
    mx.eval(model.parameters())
    return model


def filled(model, tokens: int):
    """The cache of the layer with so many random latents of unit mean square."""
    (cache,) = make_prompt_cache(model)
    for start in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - start)
        key = mx.random.key(start)
        sizes = (RANK, ROTARY)
        pair = (mx.random.normal((1, 1, count, n), mx.bfloat16, key=key) for n in sizes)
        cache.update_and_fetch(*pair)
        mx.eval(cache.state)
    return cache


def seconds(step: Callable[[mx.array], mx.array], x: mx.array, steps: int) -> float:
    """Of a step, the fastest of three chains of them."""
    best = []
    for _ in range(4):  # the first one builds kernels
        start, y = time.perf_counter(), x
        for _ in range(steps):
            y = step(y)
        mx.eval(y)
        best.append((time.perf_counter() - start) / steps)
    return min(best[1:])


def measured(model, tokens: int, steps: int) -> dict[str, float]:
    """Bytes of a cache of so many tokens, and seconds of a step: attention alone, and the layer."""
    cache = filled(model, tokens)
    layer = model.layers[0].self_attn
    heads, scale = layer.num_heads, layer.scale
    found = {"bytes": cache.nbytes}
    queries = mx.random.normal((1, heads, 1, RANK), mx.bfloat16, key=mx.random.key(1))
    turned = mx.random.normal((1, heads, 1, ROTARY), mx.bfloat16, key=mx.random.key(2))
    new = [mx.random.normal((1, 1, 1, n), mx.bfloat16) for n in (RANK, ROTARY)]
    latents, rotary = cache.update_and_fetch(*new)

    def attention(q: mx.array) -> mx.array:
        added = (turned * scale) @ rotary.swapaxes(-1, -2)
        if isinstance(latents, mx.array):
            out = mx.fast.scaled_dot_product_attention(q, latents, latents, scale=scale, mask=added)
        else:
            out = attend(q, latents, scale, added)
        return q + 0.01 * out

    def whole(x: mx.array) -> mx.array:
        return x + 0.01 * layer(x, None, cache)

    found["attention"] = seconds(attention, queries, steps)
    x = mx.random.normal((1, 1, model.args.hidden_size), mx.bfloat16, key=mx.random.key(3))
    found["layer"] = seconds(whole, x, steps)
    return found


def rows_of(shape: str, tokens: int, steps: int, presets: tuple[str, ...]) -> list[dict]:
    model = model_of(shape)
    rows = [{"shape": shape, "cache": "bf16", "by": "mlx-lm"} | measured(model, tokens, steps)]
    for name in presets:
        for by_ops in (False, True) if name in BY_OPS else (False,):
            with launch.using(None) if by_ops else nullcontext():
                (report,) = attach(model, name, strict=True)
                found = measured(model, tokens, max(2, steps // 4) if by_ops else steps)
                detach(model)
            rows.append({"shape": shape, "cache": name, "by": report.kernel, **found})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("latent_speed", __doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=32, help="in a chain")
    parser.add_argument("--kv", type=words, default=PRESETS)
    parser.add_argument("--out", help="a JSON file for the figures")
    chosen = parser.parse_args(arguments)
    for name in ("tokens", "steps"):
        if (value := getattr(chosen, name)) < 1:
            raise UserError(f"[--{name}] must be at least 1; got {value}")
    for name in chosen.kv:
        parse_kv(name)
    rows = [
        row for shape in SHAPES for row in rows_of(shape, chosen.tokens, chosen.steps, chosen.kv)
    ]
    table = []
    for row in rows:
        own = next(one for one in rows if one["shape"] == row["shape"])
        cells = [row["shape"], row["cache"], row["by"], f"{row['bytes'] / 2**20:.1f} MiB"]
        cells.append(f"{row['bytes'] / own['bytes']:.3f}")
        for name in ("attention", "layer"):
            cells += [f"{1e6 * row[name]:.0f} us", f"{own[name] / row[name]:.2f}"]
        table.append(cells)
    heads = ["shape", "cache", "by", "bytes", "of bf16", "attention", "x", "layer", "x"]
    print_table(heads, table)
    if chosen.out:
        with open(chosen.out, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    console.run_tool(main)
