"""`mlxkv run`: `wrap` wraps the loaders that a program imports, `attach_loaded` gives its models compressed caches."""

from __future__ import annotations

from dataclasses import dataclass

from mlxkv.formats.config import CacheConfig


@dataclass(frozen=True)
class Options:
    """The options of `mlxkv run`. strict: exit with code 2 if a layer whose cache grows stays in full
    precision. quiet: print only warnings."""

    kv: CacheConfig
    strict: bool = False
    quiet: bool = False
