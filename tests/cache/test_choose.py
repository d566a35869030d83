"""Kernels are chosen once: what a cache is given, when it asks again, and what it shows of itself."""

import copy

import mlx.core as mx

from mlxkv.cache import choose, selftest
from mlxkv.cache.backends import PLAIN_OPS, PortableBackend, TileBackend
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.formats.presets import PRESETS
from mlxkv.metal import launch

INT4, DIMS = PRESETS["int4"], (64, 64)


def make(**_):
    raise AssertionError("no kernel is built here")


make.tiles = True


def pair(count: int, seed: int = 0):
    return tuple(mx.random.normal((2, 1, 2, count, 64), key=mx.random.key(seed)))


def test_a_plan_holds_until_the_machine_changes(monkeypatch):
    monkeypatch.setattr(selftest, "test", lambda *_, **__: selftest.TrialResult({}, 0.0, None))
    with launch.using(make):
        first = choose.plan(INT4, DIMS, mx.float16)
        assert (first.backend, first.reason) == (TileBackend(make), None)
        cache = CompressedKVCache(INT4, plan=first)
        assert cache.plan(DIMS, mx.float16) is first
        assert cache.plan(DIMS, mx.float32).backend == PortableBackend(make)  # another request
        launch.switch_off(launch.TILES, "lost")
        found = CompressedKVCache(INT4, plan=first).plan(DIMS, mx.float16)
        assert (
            found.backend == PortableBackend(make)
            and "lost" in found.reason
            and found.label == "kernels"
        )
        launch.switch_off(launch.KERNELS, "lost too")
        found = CompressedKVCache(INT4, plan=first).plan(DIMS, mx.float16)
        assert found.backend == PLAIN_OPS and "lost too" in found.label
    assert (
        CompressedKVCache(INT4, plan=first).plan(DIMS, mx.float16).backend == PLAIN_OPS
    )  # no GPU here


def test_kernels_that_fail_their_test_are_not_chosen(monkeypatch):
    result = selftest.TrialResult({}, 0.0, "quantize is off by 1")
    monkeypatch.setattr(selftest, "test", lambda *_, **__: result)
    with launch.using(make):
        found = choose.plan(INT4, DIMS, mx.float16)
    assert found.backend == PLAIN_OPS and found.reason == f"{choose.FAILED}: quantize is off by 1"


def test_steps_between_two_pages_share_one_snapshot():
    cache = CompressedKVCache(INT4)
    cache.update_and_fetch(*pair(300))
    first, then = (cache.update_and_fetch(*pair(1, i))[0].pages for i in (1, 2))
    assert first is then
    other = copy.deepcopy(cache)
    other.update_and_fetch(*pair(200, 3))
    assert cache.update_and_fetch(*pair(1, 4))[0].pages is first
    assert other.update_and_fetch(*pair(1, 4))[0].pages.tokens > first.tokens
    cache.trim_to(150)
    assert cache.update_and_fetch(*pair(1, 5))[0].pages.tokens < first.tokens
