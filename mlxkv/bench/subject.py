"""The model of a benchmark: a real shape with random weights, or a loaded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlxkv.bench.options import MLX_LM, REPLAYED, cache_config
from mlxkv.bench.spread import allotted, spread
from mlxkv.cache import choose
from mlxkv.calibration.measure import random
from mlxkv.catalog import aliases
from mlxkv.catalog.shapes import text_config
from mlxkv.catalog.sizes import COMPRESSED
from mlxkv.errors import UserError
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.loading.attach import attach, detach
from mlxkv.loading.load import load
from mlxkv.loading.outline import NotBuilt, build, classes_of
from mlxkv.metal.launch import device_type
from mlxkv.patching.cache_shapes import layers_of
from mlxkv.patching.mark import mark
from mlxkv.patching.patch import patch
from mlxkv.patching.trees import flat

GROUP = 64  # weights per scale, as in mlx-lm's converter
# Models benchmarked with their real shape and random weights.
CONFIGS: dict[str, dict] = {
    name: aliases.CONFIGS[name] for name in ("gemma-3-1b", "qwen2.5-1.5b", "qwen3-4b", "qwen3-8b")
}


@dataclass(frozen=True)
class Subject:
    """A model to time. weights: "random" or "loaded"."""

    model: nn.Module
    config: dict
    weights: str
    dtype: mx.Dtype

    @cached_property
    def calibration(self) -> Calibration | None:
        """Random rotations with directions of unequal weight, for random weights; None: use the model's own
        calibration."""
        if self.weights != "random":
            return None
        return spread(random(self.model))

    @contextmanager
    def attached(self, preset: str) -> Iterator[list]:
        """Attach `preset` inside a `with` block; yields the reports of `attach`. REPLAYED: the model keeps
        its own caches, and its steps are replayed."""
        config = cache_config(preset)
        calibration = self.calibration if config.calibrated else None
        reports = attach(self.model, config, calibration=calibration)
        if preset == REPLAYED:
            mark(self.model, patch(self.model), {})
        try:
            yield reports
        finally:
            detach(self.model)

    def random_tokens(self, *shape: int) -> mx.array:
        """Return random ids of its vocabulary."""
        return mx.random.randint(0, int(text_config(self.config)["vocab_size"]), shape)

    def decoded_by(self, preset: str) -> str:
        """Return the attention code of the layers that keep the whole context."""
        if preset in MLX_LM:
            return "mlx-lm"
        config, labels = cache_config(preset), []
        for shape in layers_of(self.model):
            if shape.kind in COMPRESSED and config.compresses:
                dims, latent = (shape.key_dim, shape.value_dim), shape.kind == "latent"
                labels.append(
                    choose.plan(
                        allotted(config, shape.key_dim), dims, self.dtype, latent=latent
                    ).label
                )
        return ", ".join(dict.fromkeys(labels)) or "MLX"


def load_subject(name: str, bits: int | None) -> Subject:
    """Return the model `name`: one of CONFIGS, a folder (random weights if it holds none), or any name
    that `load` accepts. bits: quantise random weights, which have `default_dtype()`."""
    config = CONFIGS.get(name) or _bare_config(Path(name))
    if config is not None:
        dtype = default_dtype()
        return Subject(_random(config, dtype, bits), config, "random", dtype)
    if bits is not None:
        raise UserError(
            f"[--bits] quantises random weights; got --model {name}; choose --model from "
            f"{', '.join(CONFIGS)}, or leave --bits out"
        )
    loaded = load(name, "fp16")
    return Subject(loaded.model, loaded.config, "loaded", loaded.dtype)


def default_dtype() -> mx.Dtype:
    """bfloat16, or float32 without a GPU."""
    return mx.float32 if device_type() == "cpu" else mx.bfloat16


def short(dtype: mx.Dtype) -> str:
    """'bfloat16'"""
    return str(dtype).split(".")[-1]


def _bare_config(folder: Path) -> dict | None:
    """Return the config.json of a folder without weights."""
    file = folder / "config.json"
    if not file.is_file() or any(folder.glob("*.safetensors")):
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        classes_of(config)
    except (ValueError, AttributeError, NotBuilt) as error:
        raise UserError(
            f"[--model] no config.json of a model that mlx-lm knows ({type(error).__name__}); got "
            f"{folder}; choose another folder"
        ) from None
    return config


def _random(config: dict, dtype: mx.Dtype, bits: int | None) -> nn.Module:
    """Return a model with MLX's initial weights in `dtype`, quantised as mlx-lm does it if `bits` are given."""
    mx.random.seed(0)
    model = build(config)
    model.set_dtype(dtype)
    if bits is not None:
        nn.quantize(model, GROUP, bits)
    for _, x in flat(model.parameters()):
        mx.eval(x)  # one by one, to free the float32 original of each
    mx.clear_cache()
    return model
