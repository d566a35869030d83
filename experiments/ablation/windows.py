"""Measure what full precision of the first (sink) and the last (recent) tokens gains."""

from __future__ import annotations

from dataclasses import replace

from experiments.ablation.asked import Asked
from experiments.ablation.parts import judged, numbers, title
from experiments.ablation.recipes import RECIPES, Kitchen
from mlxkv import console
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.tasks import divergence
from mlxkv.eval.tasks.part import Progress, Results
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv
from mlxkv.models import load
from mlxkv.models.catalog.sizes import layer_bytes
from mlxkv.models.hooks.held import layers_of
from mlxkv.texts.sources import calibration_tokens, evaluation_tokens

PRESET = "oscar-int2"


def names(asked: Asked) -> list[str]:
    return [BASELINE, *configs(asked)]


def configs(asked: Asked) -> dict[str, CacheConfig]:
    return {
        f"sink {sink}, recent {recent}": replace(parse_kv(PRESET), sink=sink, recent=recent)
        for sink in asked.sinks
        for recent in asked.recents
    }


def steps(asked: Asked) -> int:
    return asked.context + asked.decode


def measure(asked: Asked, names: list[str], progress: Progress) -> Results:
    """Return rows as in `parts`, and bits per value at this context: by the formula, with windows at
    16 bits, and of allocated bytes, with windows in the model's dtype."""
    loaded = load(asked.model, "fp16")
    made = Kitchen(loaded, calibration_tokens(loaded, asked.tokens)).make(RECIPES["full"])
    wanted = {name: config for name, config in configs(asked).items() if name in names}
    arms = Arms(loaded, wanted, calibrations=dict.fromkeys(wanted, made))
    text = evaluation_tokens(loaded, asked.context + asked.decode + 1)
    rows = {}
    for name, result in divergence.measure(
        arms, names, text.tokens, asked.context, progress
    ).items():
        layers = [layer for layer in layers_of(loaded.model) if layer.kind == "full"]
        stored = sum(layer_bytes(layer, arms.configs[name], asked.context) for layer in layers)
        rows[name] = judged(result) | {
            "bits_per_value": 8 * stored / result["values"],
            "allocated": 8 * result["kv_bytes"] / result["values"],
            "dtype": str(loaded.dtype).split(".")[-1],
            "config": [arms.configs[name].sink, arms.configs[name].recent],
        }
    return rows


def show(asked: Asked, rows: Results) -> None:
    cells = []
    for name, row in rows.items():
        sink, recent = row["config"] if name != BASELINE else ("all", "all")
        cells.append([str(sink), str(recent), *numbers(row), f"{row['bits_per_value']:.3f}"])
        cells[-1].append(f"{row['allocated']:.3f}")
    allocated = f"allocated, {next(iter(rows.values()))['dtype']}"
    columns = ("sink", "recent", "KL mean", "KL 99 %", "perplexity", "bits per value", allocated)
    console.print_table(columns, cells, f"{title(asked)}, {PRESET}")
