"""Texts and numbers that several commands of `mlxkv bench` print alike. No framework."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from mlxkv import console


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
