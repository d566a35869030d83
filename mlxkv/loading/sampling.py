"""Sampling settings recommended by a model's makers: of generation_config.json, of a GGUF file, or of a model card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlxkv import untrusted
from mlxkv.catalog.aliases import PACKAGES
from mlxkv.catalog.folder import SMALL

FILE = "generation_config.json"
GGUF = {  # ours by GGUF's names (docs/gguf.md of ggml), behind "general.sampling."
    **{name: name for name in ("top_p", "top_k", "min_p")},
    **{"temp": "temperature", "penalty_repeat": "repetition_penalty"},
}
# What makers recommend for families whose GGUF files rarely say it, by architecture: the model cards of Qwen3-8B
# ("Best Practices", thinking), Qwen2.5-7B-Instruct and gemma-3-4b-it (generation_config.json).
FAMILIES: dict[str, dict[str, float]] = {
    "qwen3": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "qwen2": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "gemma3": {"temperature": 1.0, "top_p": 0.95, "top_k": 64},
}
# Of one architecture are many families; their templates tell: DeepSeek-R1's distilled models, which go round in circles
# when they think greedily, and Llama 3 (generation_config.json of both).
THINKING, LLAMA = {"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.9}
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


def read_sampling(
    path: Path, name: str, vocabulary: int, header: Mapping[str, Any] | None = None
) -> Sampling:
    """Return the settings for the model `name` in the folder `path`; the defaults if its makers recommend none.
    Values that no sampler accepts are ignored. header: the values of a GGUF file."""
    if header is not None and name not in PACKAGES:
        return _sampling(of_gguf(header), vocabulary)
    try:
        settings = untrusted.read_json(path / FILE, SMALL)
    except (OSError, ValueError):  # a GGUF file has no such config; Unsound is a ValueError
        settings = {}
    settings = settings if isinstance(settings, dict) else {}
    if settings.get("do_sample") is False:
        return Sampling()
    if not settings.get("do_sample") and "temperature" not in settings:
        settings = PACKAGES[name].sampling if name in PACKAGES else {}
    return _sampling(settings, vocabulary)


def of_gguf(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a GGUF file names, else those of its family."""
    named = {ours: header.get(f"general.sampling.{name}") for name, ours in GGUF.items()}
    if named["temperature"] is not None:
        # Stored in 32 bits: the intended number is the shortest that rounds to it.
        return {key: float(f"{x:.7g}") if isinstance(x, float) else x for key, x in named.items()}
    kind = str(header.get("general.architecture"))
    template = str(header.get("tokenizer.chat_template", ""))
    if not template:  # a base model
        return {}
    if "<think>" in template and kind != "qwen3":  # whose own settings are of thinking, too
        return THINKING
    return FAMILIES.get(kind, LLAMA if "<|start_header_id|>" in template else {})


def _sampling(settings: Mapping[str, Any], vocabulary: int) -> Sampling:
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
