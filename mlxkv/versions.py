"""Installed versions of mlxkv's dependencies, and which are outside the tested range."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from mlxkv import __version__

PACKAGES = ("mlx", "mlx-lm", "numpy", "safetensors", "transformers", "huggingface-hub")
OPTIONAL = ("mlx-vlm", "mlx-metal", "mlx-cpu", "mlx-cuda-13", "mlx-cuda-12", "torch", "triton")


def versions() -> dict[str, str | None]:
    """Installed versions by name; None: a required package is missing. Missing optional ones are left out."""
    found = {"mlxkv": __version__}
    found |= {name: _version(name) for name in PACKAGES + OPTIONAL}
    return {name: text for name, text in found.items() if text or name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def out_of_range() -> list[str]:
    """Dependencies outside the range of pyproject.toml: 'mlx 0.1, wanted >=0.32'."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in requires("mlxkv") or []]
    except PackageNotFoundError:
        return []  # a source tree that is not installed
    wrong = []
    for need in wanted:
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        found = _version(need.name)
        if found is None or not need.specifier.contains(found, prereleases=True):
            wrong.append(f"{need.name} {found or 'missing'}, wanted {need.specifier}")
    return wrong
