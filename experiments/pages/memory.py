"""Draw what a Mac needs for a model's whole context: `python -m experiments.pages.memory` (`make pictures`).

By the arithmetic of `mlxkv fit` (`mlxkv/models/catalog/sizes.py`), nothing is measured: weights of 4 bits, the
cache, the working memory of reading a prompt 2048 tokens at a time. mlx-lm's 4 bits store every token, and their
attention holds one score matrix of a layer while a prompt is read, heads x 2048 x context in 16 bits
(`quantized_scaled_dot_product_attention` in mlx_lm/models/base.py; a chunk's peak was 1.2 of that matrix on a
CPU). It is smaller with a smaller `--prefill-step-size`. A Mac of N GB has .75 N GiB to use, as `fit` counts.

Writes memory.svg and memory-dark.svg.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.options import Parser
from mlxkv import console
from mlxkv.doctor.planning import plan_of
from mlxkv.formats.names import parse_kv
from mlxkv.machine import USABLE
from mlxkv.models.catalog.known import CONFIGS, QUANTIZATION
from mlxkv.models.catalog.sizes import CHUNK, ModelPlan, layer_bytes, need

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
CONTEXT = 131072  # the limit of all three models
GIB = 2**30
MACS = (16, 32, 64, 128)
# Shapes of published config.json files; the first is the alias llama-3.1-8b.
LLAMA_70B = CONFIGS["llama-3.1-8b"] | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
MISTRAL_24B = {
    "model_type": "mistral",
    "rms_norm_eps": 1e-5,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 32768,
    "vocab_size": 131072,
    "tie_word_embeddings": False,
    "max_position_embeddings": CONTEXT,
}
MODELS = {
    "Llama 3.1 8B": CONFIGS["llama-3.1-8b"],
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
    """The smallest Mac that has so much to use."""
    size = next((size for size in MACS if gib <= USABLE * size), None)
    return f"a {size} GB Mac" if size else f"more than {MACS[-1]} GB"


def bars(config: dict) -> list[Bar]:
    """A bar for each of CACHES."""
    plan = plan_of(config | {"quantization": QUANTIZATION})
    return [_bar(plan, name) for name in CACHES]


def _bar(plan: ModelPlan, name: str) -> Bar:
    if name != MLX_LM:
        found = need(plan, parse_kv(name), CONTEXT)
        return Bar(name, found.weights / GIB, found.cache / GIB, found.transient / GIB)
    kv = replace(parse_kv("naive-int4"), sink=0, recent=0)
    stored = sum(layer_bytes(layer, kv, CONTEXT) for layer in plan.layers)
    working = plan.working * CHUNK
    scores = 2 * plan.layers[0].queries * CHUNK * CONTEXT
    return Bar(name, *(size / GIB for size in (plan.weights, stored, working, scores)))


@dataclass(frozen=True)
class Colours:
    paper: str
    ink: str
    quiet: str
    weights: str
    stored: str
    working: str
    scores: str


LIGHT = Colours("#ffffff", "#1f2328", "#59636e", "#c4ccd6", "#0969da", "#80b8f5", "#cf222e")
DARK = Colours("#0d1117", "#f0f6fc", "#9198a1", "#4a5462", "#4493f8", "#1f4f8f", "#ff7b72")
WIDTH, LEFT, SCALE = 830, 118, 6.05  # SCALE: pixels a GiB
ROW, THICK = 24, 15
NOTE = "Computed as mlxkv fit does, not measured. Weights in 4 bits. A bar that ends left of a Mac's line fits it."
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


def svg(colours: Colours) -> str:
    """The picture."""
    body: list[str] = []

    def text(x: float, y: float, words: str, colour: str, more: str = "") -> None:
        body.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" {more}>{words}</text>')

    def block(x: float, y: float, width: float, colour: str, more: str = "") -> None:
        body.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{THICK}" fill="{colour}" {more}/>'
        )

    hatched = f'fill-opacity=".22" stroke="{colours.scores}" stroke-dasharray="3 2"'
    bold = 'font-weight="600"'
    halo = f'stroke="{colours.paper}" stroke-width="5" paint-order="stroke"'
    text(
        14,
        28,
        "Memory for a context of 131,072 tokens, by cache",
        colours.ink,
        f'{bold} font-size="17"',
    )
    text(14, 48, NOTE, colours.quiet)
    x = 14.0
    for words, colour, more, width in (
        ("weights", colours.weights, "", 78),
        ("KV cache", colours.stored, "", 86),
        ("work of reading a prompt", colours.working, "", 182),
        (
            "mlx-lm's score matrix while it reads (its default step, 2048)",
            colours.scores,
            hatched,
            0,
        ),
    ):
        block(x, 60, 15, colour, more)
        text(x + 21, 72, words, colours.ink)
        x += width + 21
    top, y = 106, 128.0
    for name, config in MODELS.items():
        text(14, y, name, colours.ink, bold)
        y += 10
        for bar in bars(config):
            ours = bar.cache not in ("fp16", MLX_LM)
            text(
                LEFT - 8,
                y + 12,
                bar.cache,
                colours.ink,
                f'text-anchor="end" {bold if ours else ""}',
            )
            x = float(LEFT)
            for size, colour, more in (
                (bar.weights, colours.weights, ""),
                (bar.stored, colours.stored, ""),
                (bar.working, colours.working, ""),
                (bar.scores, colours.scores, hatched),
            ):
                if size:
                    block(x, y, size * SCALE, colour, more)
                    x += size * SCALE
            text(x + 7, y + 12, bar.said, colours.ink, f"{halo} {bold if ours else ''}")
            y += ROW
        y += 26
    bottom = y - 36
    lines = []
    for size in MACS[:-1]:
        x = LEFT + USABLE * size * SCALE
        lines.append(
            f'<path d="M{x:.1f} {top}V{bottom:.0f}" stroke="{colours.quiet}" stroke-dasharray="2 4"/>'
            f'<text x="{x:.1f}" y="{top - 5}" fill="{colours.quiet}" text-anchor="middle">{size} GB Mac</text>'
        )
    height = int(bottom + 12)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" font-family="{FONT}" font-size="13" role="img">',
            "<title>Memory for 131,072 tokens: weights, KV cache and working memory</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{colours.paper}"/>',
            *lines,
            *body,
            "</svg>",
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    Parser("pages.memory", __doc__).parse_args(arguments)
    for name, colours in (("memory", LIGHT), ("memory-dark", DARK)):
        path = FOLDER / f"{name}.svg"
        path.write_text(svg(colours), encoding="utf-8")
        print(f"{path.relative_to(FOLDER.parents[1])}: written", file=sys.stderr)


if __name__ == "__main__":
    console.run_tool(main)
