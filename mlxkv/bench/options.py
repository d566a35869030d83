"""Options and texts that several commands of `mlxkv bench` share, parsed and checked. No framework."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import canonical, parse_kv
from mlxkv.formats.presets import FULL_PAGES

BASELINE = "fp16"
# Full precision through steps like those of compressed caches, for `mlxkv bench decode` alone: mlx-lm's own
# caches in a replayed step, and float16 pages that our kernels read.
REPLAYED, PAGED = "fp16-replayed", "fp16-pages"
MLX_LM = {"mlx-lm-kv8": 8, "mlx-lm-kv4": 4}  # mlx-lm's own quantized cache: name -> kv_bits
MLX_LM_GROUP = 64
BITS = (2, 3, 4, 6, 8)


def parse_presets(text: str, others: tuple[str, ...] = ()) -> list[str]:
    """'fp16, int4' -> ["fp16", "int4"], each once. others: names that are allowed beside presets. Raises
    UserError for an unknown preset."""
    words = (name.strip() for name in text.split(","))
    names = list(dict.fromkeys(name if name in others else canonical(name) for name in words))
    for name in names:
        if name not in others:
            parse_kv(name)
    return names


def cache_config(name: str) -> CacheConfig:
    """Return what the caches of a row of this name store."""
    if name == PAGED:
        return FULL_PAGES
    return parse_kv(BASELINE if name == REPLAYED or name in MLX_LM else name)


def parse_contexts(text: str, least: int, why: str = "too short to time") -> tuple[int, ...]:
    """'1k,4k' -> (1024, 4096), each once. Raises UserError below `least` tokens, and says `why`."""
    lengths = dict.fromkeys(console.parse_tokens(name, "--contexts") for name in text.split(","))
    if min(lengths) < least:
        raise UserError(f"[--contexts] {why}; got {min(lengths)}; choose at least {least}")
    return tuple(lengths)


def check_counts(**counts: int) -> None:
    """Raise UserError for a number below 1. Named like the options."""
    for name, number in counts.items():
        if number < 1:
            raise UserError(f"[--{name}] must be at least 1; got {number}; choose a larger one")


def check_bits(bits: int | None) -> None:
    """Raise UserError for a value of --bits that mlx-lm has no codes for."""
    if bits is not None and bits not in BITS:
        choices = ", ".join(map(str, BITS))
        raise UserError(f"[--bits] unknown value; got {bits}; choose from {choices}")


def print_machine(machine: dict, versions: dict) -> None:
    """Print the machine, the backend in use, and versions."""
    memory = console.human_bytes(machine["memory_bytes"])
    print(f"{machine['chip']} · {memory} · {machine['system']}")
    print(f"backend {machine['backend']}: {machine['device']}")
    print(" · ".join(f"{name} {text or 'missing'}" for name, text in versions.items()))


def weights_text(weights: str, bits: int | None) -> str:
    """'random weights in 4 bits'. weights: "random" or "loaded"."""
    text = "random weights" if weights == "random" else "weights as stored"
    return f"{text} in {bits} bits" if bits else text


def ratio_text(ratio: float | None) -> str:
    return f"{ratio:.2f}" if ratio else "-"


def spread(values: Sequence[float]) -> float:
    """The largest minus the smallest value, as a share of the median."""
    return (max(values) - min(values)) / median(values)
