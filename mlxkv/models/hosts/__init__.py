"""Programs of others (`mlxkv run`): `wrap` has the functions by which they load models wrapped, `attach_loaded` gives
such a model compressed caches, `usage_report` counts what they held."""

from __future__ import annotations

from dataclasses import dataclass

from mlxkv.formats.config import CacheConfig


@dataclass(frozen=True)
class Options:
    """The options of `mlxkv run`. strict: end the process with exit code 2 where a layer that grows stays in
    full precision. quiet: say only what is
    wrong."""

    kv: CacheConfig
    strict: bool = False
    quiet: bool = False
