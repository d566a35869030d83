"""Caches in steps of fixed shapes."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.traced import NotYet, Own
from mlxkv.formats.presets import PRESETS


def test_before_a_page_is_sealed_there_is_no_form():
    cache = CompressedKVCache(PRESETS["int4"])
    cache.update_and_fetch(*[mx.zeros((1, 1, 20, 64))] * 2)
    assert cache.windows is None
    with pytest.raises(NotYet):
        Own(cache, 1)
