"""Sampling settings recommended by a model's makers, from generation_config.json or the model card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlxkv import untrusted
from mlxkv.catalog.aliases import PACKAGES
from mlxkv.catalog.folder import SMALL

FILE = "generation_config.json"
# The lowest and the highest value that mlx-lm's samplers accept.
LIMITS = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-3, 1.0),
    "top_k": (0, 1 << 20),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 100.0),
}


@dataclass(frozen=True)
class Sampling:
    """Settings of mlx-lm's samplers, by their names in requests. The defaults choose the likeliest token.
    repetition_penalty: 0 for none."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 0.0

    def drawing(self) -> tuple[Callable, list[Callable]]:
        """Return mlx-lm's sampler and logits processors."""
        sampler = make_sampler(self.temperature, self.top_p, self.min_p, top_k=self.top_k)
        return sampler, make_logits_processors(repetition_penalty=self.repetition_penalty or None)


def read_sampling(path: Path, name: str, vocabulary: int) -> Sampling:
    """Return the settings for the model `name` in the folder `path`; the defaults if its makers recommend none.
    Values that no sampler accepts are ignored."""
    try:
        settings = untrusted.read_json(path / FILE, SMALL)
    except (OSError, ValueError):  # a GGUF file has no such config; Unsound is a ValueError
        settings = {}
    settings = settings if isinstance(settings, dict) else {}
    if settings.get("do_sample") is False:
        return Sampling()
    if not settings.get("do_sample") and "temperature" not in settings:
        settings = PACKAGES[name].sampling if name in PACKAGES else {}
    values: dict[str, Any] = {
        key: settings[key] for key in LIMITS if _takes(key, settings.get(key))
    }
    if settings.get("do_sample") and "temperature" not in values:
        values["temperature"] = 1.0  # as transformers
    if values.get("top_k", 0) >= vocabulary:  # keeps every token: mlx-lm's sampler refuses that
        del values["top_k"]
    if values.get("repetition_penalty") == 1:
        del values["repetition_penalty"]
    return Sampling(**values) if values.get("temperature") else Sampling()


def _takes(key: str, value: object) -> bool:
    kinds = int if key == "top_k" else (int, float)
    low, high = LIMITS[key]
    if isinstance(value, bool) or not isinstance(value, kinds):
        return False
    return isfinite(value) and low <= value <= high
