"""Installed versions, and which of them lie outside the range that mlxkv was tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from mlxkv import __version__

PACKAGES = ("mlx", "mlx-lm", "numpy", "safetensors", "transformers", "huggingface-hub")
OPTIONAL = ("mlx-metal", "mlx-cpu", "mlx-cuda-13", "mlx-cuda-12", "torch", "triton")


def versions() -> dict[str, str | None]:
    """Installed versions; an optional package that is missing is left out."""
    found = {"mlxkv": __version__}
    found |= {name: _version(name) for name in PACKAGES + OPTIONAL}
    return {name: text for name, text in found.items() if text or name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def out_of_range() -> list[str]:
    """Dependencies whose installed version lies outside the range that mlxkv was tested with."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in requires("mlxkv") or []]
    except PackageNotFoundError:
        return []  # a source tree on the path, not installed
    wrong = []
    for need in wanted:
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        found = _version(need.name)
        if found is None or not need.specifier.contains(found, prereleases=True):
            wrong.append(f"{need.name} {found or 'missing'}, wanted {need.specifier}")
    return wrong
