"""`python -m experiments.latent_speed [--tokens 32768] [--out FILE]`: decode steps over latents, against mlx-lm's own.

One attention layer of GLM-4.7-Flash and one of DeepSeek-V3 in their sizes, with random weights in bfloat16, reads a
cache of random latents. A row is a cache: bytes, how far attention is from float32 products with the decoded latents,
the time of attention alone (the rotary scores' product included), and that of the whole layer. A cache that is too far
off is not timed. Steps depend on each other, so that a GPU cannot overlap them. What cannot run becomes a row with its
reason; --seconds bounds the run, and --out has all rows so far. The table of docs/results/latents.md.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from experiments.options import Parser, at_least, made_on, words
from mlxkv import console, faults
from mlxkv.cache.attention import attend
from mlxkv.cache.selftest import BOUND
from mlxkv.cache.view import View
from mlxkv.console import print_table
from mlxkv.formats.names import parse_kv
from mlxkv.metal import launch
from mlxkv.models import attach, detach

PRESETS = ("int8", "int4", "int4+rope16", "hadamard-int4", "naive-int3", "naive-int2")
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


def exact(q: mx.array, latents: View | mx.array, scale: float, added: mx.array) -> mx.array:
    """Attention by float32 products with all latents, decoded if need be: [B, H, 1, R]."""
    if isinstance(latents, View):
        parts = [latents.live[0]]
        if latents.pages is not None:
            parts.insert(0, latents.pages.decode(0, mx.float32))
        if latents.sink is not None:
            parts.insert(0, latents.sink[0])
        latents = mx.concatenate([part.astype(mx.float32) for part in parts], axis=2)
    x, (_, heads, _, dims) = latents.astype(mx.float32)[0, 0], q.shape
    scores = (q.astype(mx.float32).reshape(heads, dims) * scale) @ x.T
    weights = mx.softmax(scores + added.astype(mx.float32).reshape(heads, -1), axis=-1)
    return (weights @ x).reshape(q.shape)


def measured(model, tokens: int, steps: int) -> dict[str, float]:
    """Bytes of a cache of so many tokens, rms of the error of attention, and seconds of a step: attention alone,
    and the layer. Raises ArithmeticError where the error of a compressed cache is above BOUND."""
    cache = filled(model, tokens)
    layer = model.layers[0].self_attn
    heads, scale = layer.num_heads, layer.scale
    found = {"bytes": cache.nbytes}
    queries = mx.random.normal((1, heads, 1, RANK), mx.bfloat16, key=mx.random.key(1))
    turned = mx.random.normal((1, heads, 1, ROTARY), mx.bfloat16, key=mx.random.key(2))
    new = [mx.random.normal((1, 1, 1, n), mx.bfloat16) for n in (RANK, ROTARY)]
    latents, rotary = cache.update_and_fetch(*new)

    def attended(q: mx.array) -> mx.array:
        added = (turned * scale) @ rotary.swapaxes(-1, -2)
        if isinstance(latents, mx.array):
            return mx.fast.scaled_dot_product_attention(
                q, latents, latents, scale=scale, mask=added
            )
        return attend(q, latents, scale, added)

    def attention(q: mx.array) -> mx.array:
        return q + 0.01 * attended(q)

    def whole(x: mx.array) -> mx.array:
        return x + 0.01 * layer(x, None, cache)

    expected = exact(queries, latents, scale, (turned * scale) @ rotary.swapaxes(-1, -2))
    error = attended(queries).astype(mx.float32) - expected
    found["off"] = mx.sqrt((error**2).mean() / (expected**2).mean()).item()
    if isinstance(latents, View) and not found["off"] <= BOUND:
        raise ArithmeticError(f"attention is off by {found['off']:.2g}, bound {BOUND}")
    found["attention"] = seconds(attention, queries, steps)
    x = mx.random.normal((1, 1, model.args.hidden_size), mx.bfloat16, key=mx.random.key(3))
    found["layer"] = seconds(whole, x, steps)
    return found


def row(model, shape: str, name: str | None, by_ops: bool, tokens: int, steps: int) -> dict:
    """The row of a preset, or of mlx-lm's own cache; "error" in place of figures where something fails."""
    out = {"shape": shape, "cache": name or "bf16", "by": "mlx-lm"}
    try:
        if name is None:
            return out | measured(model, tokens, steps)
        with launch.using(None) if by_ops else nullcontext():
            (report,) = attach(model, name, strict=True)
            out["by"] = report.kernel
            try:
                return out | measured(model, tokens, max(2, steps // 4) if by_ops else steps)
            finally:
                detach(model)
    except Exception as error:  # a compiler or a driver may raise anything at all
        return out | {"error": faults.reason(error)}


def rows(chosen) -> Iterator[dict]:
    """Rows of all shapes, as long as there is time."""
    start = time.perf_counter()
    for shape in SHAPES:
        model = model_of(shape)
        plans = [(None, False), *((name, False) for name in chosen.kv)]
        for name, by_ops in plans + [(name, True) for name in BY_OPS if name in chosen.kv]:
            if by_ops and launch.factory() is None:
                continue  # it has run already
            if time.perf_counter() - start > chosen.seconds:
                print(f"[latent_speed] no time for {shape}, {name}", file=sys.stderr)
                continue
            made = row(model, shape, name, by_ops, chosen.tokens, chosen.steps)
            print(made, file=sys.stderr, flush=True)
            yield made


def cells(row: dict, own: dict | None) -> list[str]:
    """Cells of the table; own: the row of mlx-lm's own cache in the same shape."""
    out = [row["shape"], row["cache"], row["by"]]
    if "error" in row or own is None or "error" in own:
        return [*out, *("-",) * 7, row.get("error", "")]
    out += [f"{row['bytes'] / 2**20:.1f} MiB", f"{row['bytes'] / own['bytes']:.3f}"]
    out.append(f"{row['off']:.1e}")
    for name in ("attention", "layer"):
        out += [f"{1e6 * row[name]:.0f} us", f"{own[name] / row[name]:.2f}"]
    return [*out, ""]


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("latent_speed", __doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=32, help="in a chain")
    parser.add_argument("--kv", type=words, default=PRESETS)
    parser.add_argument("--seconds", type=float, default=600, help="no row begins after so many")
    parser.add_argument("--out", help="a JSON file for the figures")
    chosen = parser.parse_args(arguments)
    for name in ("tokens", "steps"):
        at_least(f"--{name}", getattr(chosen, name), 1)
    for name in chosen.kv:
        parse_kv(name)
    start, found = time.perf_counter(), []
    for made in rows(chosen):
        found.append(made)
        if chosen.out:
            document = {"rows": found, "tokens": chosen.tokens} | made_on(start)
            Path(chosen.out).write_text(json.dumps(document, indent=1), encoding="utf-8")
    owns = {made["shape"]: made for made in found if made["by"] == "mlx-lm"}
    heads = ["shape", "cache", "by", "bytes", "of bf16", "off", "attention", "x", "layer", "x", ""]
    print_table(heads, [cells(made, owns.get(made["shape"])) for made in found])


if __name__ == "__main__":
    console.run_tool(main)
