"""`python -m experiments.image_memory [--tokens 32768] [--out FILE]`: peak memory of a prompt with an image.

A small vision model of mlx-vlm (qwen2_vl, random weights) reads an image and random text behind it, in chunks, by the
loop of `mlxkv chat` (mlx-lm's, with the embeddings of the image) and by mlx-vlm's own. A row is a cache: its bytes, and
the peak above the weights while the prompt is read. Where MLX has no fused attention (a CPU) full precision has a
score matrix of a chunk; its bytes are a column, so that nobody takes them for the cache's. Needs mlx-vlm.
"""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from experiments.options import Parser, at_least, check_out, made_on, words, write
from mlxkv import console
from mlxkv.models import attach, detach
from mlxkv.models.vision.host import VisionModel, check_host

HEADS, DIMS, VOCABULARY, PATCHES = 2, 128, 264, 32  # an image: 32 x 32 patches, 256 tokens
START, END, IMAGE, VIDEO = 258, 259, 260, 261
TEXT = {
    "model_type": "qwen2_vl",
    "hidden_size": HEADS * DIMS,
    "intermediate_size": 256,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1 << 17,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": False,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "eos_token_id": 257,
}
VISION = {
    "model_type": "qwen2_vl",
    "depth": 2,
    "embed_dim": 64,
    "hidden_size": HEADS * DIMS,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "mlp_ratio": 2,
}
COLUMNS = ["loop", "cache", "peak", "of full", "cache, bytes", "of full", "scores", "seconds"]


def model_of(layers: int, dtype: mx.Dtype):
    """A vision model of mlx-vlm with random weights."""
    file = import_module("mlx_vlm.models.qwen2_vl")
    config = file.ModelConfig.from_dict(
        TEXT | {"num_hidden_layers": layers, "vision_config": VISION}
    )
    config.text_config = file.TextConfig.from_dict(TEXT | {"num_hidden_layers": layers})
    config.vision_config = file.VisionConfig.from_dict(VISION)
    mx.random.seed(0)
    model = file.Model(config)

    def own(x: mx.array) -> mx.array:
        is_number = x.size and mx.issubdtype(x.dtype, mx.floating)
        return (x + 0.02 * mx.random.normal(x.shape)).astype(dtype) if is_number else x

    model.update(tree_map(own, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def prompt(tokens: int) -> tuple[list[int], dict]:
    """An image and random text behind it, and what the image's processor gives."""
    places = [START, *[IMAGE] * (PATCHES // 2) ** 2, END]
    key = mx.random.key(1)
    text = mx.random.randint(0, 256, (tokens - len(places),), key=key).tolist()
    pixels = mx.random.normal((PATCHES**2, 3 * 2 * 14 * 14), key=key)
    return places + text, {
        "pixel_values": pixels,
        "image_grid_thw": mx.array([[1, PATCHES, PATCHES]]),
    }


def by_chat(model, tokens: list[int], given: dict, step: int) -> list:
    """As `mlxkv chat --image` reads a prompt. Returns the caches."""
    host = VisionModel(model)
    cache = make_prompt_cache(host)
    embeddings = host.embed(tokens, dict(given))
    options = {"prompt_cache": cache, "prefill_step_size": step, "max_tokens": 1}
    for _ in generate_step(mx.array(tokens), host, input_embeddings=embeddings, **options):
        pass
    return cache


def by_mlx_vlm(model, tokens: list[int], given: dict, step: int) -> list:
    """As mlx-vlm reads it."""
    from mlx_vlm.generate.ar import generate_step as own
    from mlx_vlm.models.cache import make_prompt_cache as make

    ids, more = mx.array([tokens]), dict(given)
    cache, pixels = make(model.language_model), more.pop("pixel_values")
    options = {"prompt_cache": cache, "prefill_step_size": step, "max_tokens": 1, "temperature": 0}
    for _ in own(ids, model, pixels, mx.ones_like(ids), **options, **more):
        pass
    return cache


LOOPS = {"mlxkv chat": by_chat, "mlx-vlm": by_mlx_vlm}


def measured(model, loop: str, kv: str, tokens: int, step: int) -> dict:
    """A row: peak above what was there before, and bytes of the caches."""
    ids, given = prompt(tokens)
    mx.eval(list(given.values()))
    reports = attach(model, kv) if kv != "fp16" else []
    try:
        mx.clear_cache()
        before, start = mx.get_active_memory(), time.perf_counter()
        mx.reset_peak_memory()
        cache = LOOPS[loop](model, ids, given, step)
        mx.eval([one.state for one in cache])
        size = sum(one.nbytes for one in cache)
        return {
            "loop": loop,
            "kv": kv,
            "compressed": sum(report.compressed for report in reports),
            "peak": mx.get_peak_memory() - before,
            "bytes": size,
            "seconds": round(time.perf_counter() - start, 1),
        }
    finally:
        detach(model)


def main(argv: list[str] | None = None) -> None:
    parser = Parser("image_memory", __doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--step", type=int, default=256, help="tokens of a chunk")
    parser.add_argument("--kv", type=words, default=("fp16", "int4"))
    parser.add_argument("--loops", type=words, default=tuple(LOOPS))
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--out", type=Path, default=None)
    asked = parser.parse_args(argv)
    check_host("mlx-vlm")
    check_out(asked.out)
    for name, least in (("tokens", 512), ("layers", 1), ("step", 1)):
        at_least(f"--{name}", getattr(asked, name), least)
    start, dtype = time.perf_counter(), getattr(mx, asked.dtype)
    model, rows = model_of(asked.layers, dtype), []
    scores = HEADS * asked.step * asked.tokens * dtype.size
    for loop in asked.loops:
        for kv in asked.kv:
            rows.append(measured(model, loop, kv, asked.tokens, asked.step))
            console.note(str(rows[-1]))
    full = {row["loop"]: row for row in rows if row["kv"] == "fp16"}
    cells = []
    for row in rows:
        own = full.get(row["loop"], row)
        cell = [row["loop"], row["kv"]]
        for name in ("peak", "bytes"):
            cell += [console.human_bytes(row[name]), f"{row[name] / own[name]:.3f}"]
        cell += [console.human_bytes(scores) if row["kv"] == "fp16" else "-", row["seconds"]]
        cells.append(cell)
    title = f"{asked.tokens} tokens, an image in front, {asked.layers} layers, {asked.dtype}"
    console.print_table(COLUMNS, cells, title)
    write({"tokens": asked.tokens, "rows": rows, "scores": scores} | made_on(start), asked.out)


if __name__ == "__main__":
    console.run_tool(main)
