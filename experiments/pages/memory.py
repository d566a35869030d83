"""Draw what a Mac needs for a model's whole context: `python -m experiments.pages.memory` (`make pictures`).

By the arithmetic of `mlxkv fit` (`mlxkv/catalog/sizes.py`), nothing is measured: weights of 4 bits, the
cache, the working memory of reading a prompt 2048 tokens at a time. mlx-lm's 4 bits store every token, and their
attention holds one score matrix of a layer while a prompt is read, heads x 2048 x context in 16 bits
(`quantized_scaled_dot_product_attention` in mlx_lm/models/base.py; a chunk's peak was 1.2 of that matrix on a
CPU). It is smaller with a smaller `--prefill-step-size`. A Mac of N GB has .75 N GiB to use, as `fit` counts.

Writes memory.svg and memory-dark.svg.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.options import Parser
from mlxkv import console
from mlxkv.catalog.aliases import CONFIGS, QUANTIZATION
from mlxkv.catalog.sizes import CHUNK, ModelPlan, bits_in_pages, need
from mlxkv.eval import plots
from mlxkv.formats.names import parse_kv
from mlxkv.loading.plans import plan_of
from mlxkv.machine import USABLE

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
CONTEXT = 131072  # the limit of all three models
GIB = 2**30
MACS = (16, 32, 64, 128)
# Shapes of published config.json files; the first is the alias llama-3.1-8b.
LLAMA_8B = CONFIGS["llama-3.1-8b"]
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672,
}  # fmt: skip
MISTRAL_24B = {
    "model_type": "mistral", "rms_norm_eps": 1e-5, "hidden_size": 5120, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 32768,
    "vocab_size": 131072, "tie_word_embeddings": False, "max_position_embeddings": CONTEXT,
}  # fmt: skip
MODELS = {
    "Llama 3.1 8B": LLAMA_8B,
    "Mistral Small 3.2 24B": MISTRAL_24B,
    "Llama 3.3 70B": LLAMA_70B,
}
MLX_LM = "mlx-lm, 4 bits"
CACHES = ("fp16", MLX_LM, "int4", "fill-2.25")


@dataclass(frozen=True)
class Bar:
    """GiB of one cache at CONTEXT. scores: of the score matrix while a prompt is read, beside the rest."""

    cache: str
    weights: float
    stored: float
    working: float
    scores: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.stored + self.working

    @property
    def said(self) -> str:
        if self.scores:
            return f"{self.total:.1f} GiB, {self.total + self.scores:.1f} while reading"
        return f"{self.total:.1f} GiB, {mac(self.total)}"


def mac(gib: float) -> str:
    """Return the smallest Mac that has so much to use."""
    size = next((size for size in MACS if gib <= USABLE * size), None)
    return f"a {size} GB Mac" if size else f"more than {MACS[-1]} GB"


def bars(config: dict) -> list[Bar]:
    """Return a bar for each of CACHES."""
    plan = plan_of(config | {"quantization": QUANTIZATION})
    return [_bar(plan, name) for name in CACHES]


def _bar(plan: ModelPlan, name: str) -> Bar:
    if name != MLX_LM:
        found = need(plan, parse_kv(name), CONTEXT)
        return Bar(name, found.weights / GIB, found.cache / GIB, found.transient / GIB)
    kv = parse_kv("naive-int4")  # of every token
    stored = sum(x.values(CONTEXT) * bits_in_pages(x, kv) / 8 for x in plan.layers)
    working = plan.working * CHUNK
    scores = 2 * plan.layers[0].queries * CHUNK * CONTEXT
    return Bar(name, *(size / GIB for size in (plan.weights, stored, working, scores)))


PARTS = ("weights", "stored", "working", "scores")
LABELS = (
    "weights",
    "KV cache",
    "work of reading a prompt",
    "mlx-lm's score matrix while it reads (its step: 2048)",
)
# Paper, ink, quiet text, and each of PARTS.
LIGHT = ("#ffffff", "#1f2328", "#59636e", "#c4ccd6", "#0969da", "#80b8f5", "#cf222e")
DARK = ("#0d1117", "#f0f6fc", "#9198a1", "#4a5462", "#4493f8", "#1f4f8f", "#ff7b72")
TITLE = "Memory for a context of 131,072 tokens, by cache"
NOTE = "Computed as mlxkv fit does, not measured. Weights in 4 bits. A bar that ends left of a Mac's line fits it."


def svg(colours: tuple[str, ...]) -> str:
    """Return the picture."""
    paper, ink, quiet, *fills = colours
    with plots.pyplot() as plt:
        plt.rcParams.update({"font.size": 11, "text.color": ink, "font.family": "sans-serif"})
        figure, axis = plt.subplots(figsize=(10, 6), facecolor=paper)
        axis.set_axis_off()
        y = 0.0
        for name, config in MODELS.items():
            axis.text(-17, y, name, weight="bold")
            for bar in bars(config):
                y, x = y - 1, 0.0
                ours = "normal" if bar.cache in ("fp16", MLX_LM) else "bold"
                axis.text(-1, y, bar.cache, ha="right", va="center", weight=ours)
                for part, fill in zip(PARTS, fills, strict=True):
                    if size := getattr(bar, part):
                        hatch = {"alpha": 0.3, "hatch": "//"} if part == "scores" else {}
                        axis.barh(y, size, 0.62, x, color=fill, **hatch)
                        x += size
                axis.text(
                    x + 1, y, bar.said, va="center", weight=ours, backgroundcolor=paper, zorder=3
                )
            y -= 1.6
        for size in MACS[:-1]:
            x = USABLE * size
            axis.plot([x, x], [0.9, y + 1.2], ":", color=quiet, linewidth=1)
            axis.text(x, 1.1, f"{size} GB Mac", color=quiet, ha="center")
        for place, (label, fill) in enumerate(zip(LABELS, fills, strict=True)):
            axis.barh(0, 0, color=fill, label=label, alpha=0.3 if place == 3 else 1)
        axis.text(-17, 4.6, TITLE, weight="bold", size=14)
        axis.text(-17, 3.8, NOTE, color=quiet)
        axis.set_ylim(top=5.5)
        axis.legend(
            **{"loc": "upper left", "bbox_to_anchor": (-0.17, 0.935), "ncol": 4, "labelcolor": ink},
            **{"columnspacing": 1, "handlelength": 1},
        )
        return plots.svg(figure)


def main(arguments: list[str] | None = None) -> None:
    Parser("pages.memory", __doc__).parse_args(arguments)
    for name, colours in (("memory", LIGHT), ("memory-dark", DARK)):
        (FOLDER / f"{name}.svg").write_text(svg(colours), encoding="utf-8")
        console.note(f"docs/pictures/{name}.svg: written")


if __name__ == "__main__":
    console.run_tool(main)
