"""Caches are cut back to any length: what stays is read as before, alone, in batches, saved, and by hosts."""

import copy
import pickle
from dataclasses import replace
from functools import lru_cache

import mlx.core as mx
import pytest
from methods import METHODS, config_named
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from on_emulator import make
from random_models import random_model, tokens

from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.cache.attention import attend
from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.latent import LatentKVCache, decoded
from mlxkv.codec import maps
from mlxkv.errors import UserError
from mlxkv.loading.attach import attach, detach
from mlxkv.metal import launch

pytestmark = pytest.mark.usefixtures("trusted")

HEADS, DIMS = 2, 64
CALIBRATED = ("oscar-int4", "int2", "static-0.75+int4", "centred-int3", "oja-0.75", "oja-0.5+int4")
INT4 = replace(config_named("naive-int4"), sink=4, recent=16, page=16)


@lru_cache
def made(name: str):
    """An empty cache of this method or preset, with small windows."""
    if name in METHODS:
        return CompressedKVCache(METHODS[name].config(DIMS))
    latent = name.startswith("latents of ")
    config = config_named(name.removeprefix("latents of "))
    config = replace(config, sink=4, recent=16, page=min(config.page, 64))
    if latent:
        return LatentKVCache(config.of_latents)
    layer_maps = None
    if config.calibrated:
        layer_maps = replace(
            maps.sample(HEADS, (DIMS, DIMS), config.fitted), digest=f"trim {name}", layer="0"
        )
        layer_maps = pickle.loads(pickle.dumps(layer_maps))
    return (AdaptiveKVCache if config.needs_queries else CompressedKVCache)(config, layer_maps)


@lru_cache
def text(heads: int, count: int, seed: int = 0):
    mx.random.seed(seed)
    return tuple(mx.random.normal((1, heads, count, DIMS)) for _ in "qkv")


def read(cache, start: int, stop: int, seed: int = 0) -> None:
    """Read tokens start .. stop - 1 at once, attention included."""
    heads = 1 if isinstance(cache, LatentKVCache) else HEADS
    q, k, v = (x[:, :, start:stop] for x in text(heads, 512, seed))
    view, _ = cache.update_and_fetch(k, v)
    if heads > 1:
        mx.eval(attend(q, view, DIMS**-0.5, "causal"))


def shown(cache) -> tuple[mx.array, mx.array]:
    """Keys and values of all tokens as attention sees them."""
    view, rotary = cache.keys_and_values()
    if isinstance(cache, LatentKVCache):
        return decoded(view), rotary
    parts = [view.sink, view.recent]
    parts = [[pair[side] for pair in parts if pair is not None] for side in (0, 1)]
    if view.pages is not None:
        for side in (0, 1):
            parts[side].insert(-1, view.pages.decode(side, mx.float32))
    return tuple(mx.concatenate(part, axis=2) for part in parts)


def last_page(cache, page: int) -> tuple[mx.array, mx.array]:
    """A quantized page as attention sees it."""
    one = cache.store.read(page, page + 1)
    if isinstance(cache, LatentKVCache):
        return (one.decode(0, mx.float32),)
    return tuple(one.decode(side, mx.float32) for side in (0, 1))


def filled(name: str):
    """A cache of 4 pages or more; the second chunk quantizes pages of its own."""
    cache = copy.deepcopy(made(name))
    count = 4 + 3 * cache.config.page + 40
    read(cache, 0, count)
    read(cache, count, count + cache.config.page)
    return cache


EVERY = (*METHODS, *CALIBRATED, "latents of int4", "latents of int4+rotary16", "latents of int8")


@pytest.mark.parametrize("name", EVERY[::2])
def test_any_trim_leaves_what_was_read(name):
    cache = filled(name)
    before, held, page = shown(cache), cache.offset, cache.config.page
    recent = cache._count
    # Pages end where n is 8 times an odd number.
    for n in [n for n in range(1, held + 1) if n % 8 in (0, 1, 7) or n == held]:
        one = copy.deepcopy(cache)
        assert one.is_trimmable() and one.trim(n) == n and one.offset == held - n
        if n == held:
            assert one.empty()
            continue
        kept = shown(one)
        assert {x.shape[2] for x in kept} == {held - n}
        first, count = divmod(held - n - one._sunk, page)
        # rows of a page are recent now, to the last bit
        if n > recent + page and one.sink and count:
            assert one._count_pages == first and one._count == count
            for x, y in zip(one._read_recent(), last_page(cache, first), strict=False):
                assert mx.array_equal(x, y[:, :, :count]).item()
        if one._count_pages < cache._count_pages:  # or the next trim would restore it once more
            assert one.last is None
        whole = one._sunk + one._paged
        for side, (x, y) in enumerate(zip(kept, before, strict=True)):
            at = slice(whole) if n <= recent + page else slice(None)
            part = x[:, :, at], y[:, :, : held - n][:, :, at]
            assert mx.abs(part[0] - part[1]).max().item() < 2e-6, (n, side)


@pytest.mark.parametrize("name", EVERY[1::2])
def test_reading_on_quantizes_again_what_was_decoded(name):
    """Pages that stay are untouched, what is encoded twice stays near, and saved and copied caches are the same."""
    cache = filled(name)
    before, page = shown(cache), cache.config.page
    left = 4 + page + page // 2 + 3
    cache.trim_to(left)
    others = [
        copy.deepcopy(cache),
        pickle.loads(pickle.dumps(cache)),
        type(cache).from_state(cache.state),
    ]
    for one in (cache, *others):
        read(one, left, left + 3 * page + 20, seed=1)
        assert one._count_pages >= 3 and one.offset == left + 3 * page + 20
    after = shown(cache)
    for one in others:
        for x, y in zip(shown(one), after, strict=True):
            assert mx.allclose(x, y, atol=1e-5)
    exact = text(before[0].shape[1], 512)[1:]
    for x, y, z in zip(after, before, exact, strict=True):
        assert mx.abs(x[:, :, : 4 + page] - y[:, :, : 4 + page]).max().item() < 2e-6
        again, once, truth = (a[:, :, 4 + page : left] for a in (x, y, z))
        if name.startswith("oja"):  # the basis has learned since
            continue
        errors = [mx.sqrt(mx.mean((x - truth) ** 2)).item() for x in (again, once)]
        assert errors[0] <= 1.7 * errors[1] + 1e-6, errors


@pytest.mark.parametrize(("n", "factory"), [(47, None), (3, make), (10, make)])
def test_sequences_of_a_batch_are_cut_alike(n, factory):
    """One cut ends at another place of a page in each. By kernels a short cut stays in the shared arrays; after
    another they are built anew."""
    with launch.using(factory):
        rows = [CompressedKVCache(INT4) for _ in range(3)]
        for i, row in enumerate(rows):
            read(row, 0, 100 + 37 * i)
        both = BatchedKVCache.merge(rows)

        def step(seed):
            q, k, v = (
                mx.concatenate([x[:, :, seed + i : seed + i + 1] for i in range(3)])
                for x in text(HEADS, 512, 2)
            )
            view, _ = both.update_and_fetch(k, v)
            out = attend(q, view, DIMS**-0.5, None)
            for i, row in enumerate(rows):
                own = row.update_and_fetch(k[i : i + 1], v[i : i + 1])[0]
                alone = attend(q[i : i + 1], own, DIMS**-0.5, None)
                assert mx.abs(alone - out[i : i + 1]).max().item() < 2e-3
                assert mx.allclose(alone, out[i : i + 1], atol=1e-4)

        for seed in range(4):
            step(seed)
        assert (both.buffers is not None) == (factory is not None)
        assert both.is_trimmable() and both.trim(n) == n
        assert (both.buffers is not None) == (n == 3)
        for row in rows:
            row.trim(n)
        assert both.offsets == [row.offset for row in rows]
        for seed in range(16):
            step(10 + seed)
        for i, row in enumerate(rows):
            assert both.extract(i)._count_pages == row._count_pages


def test_what_is_chosen_for_a_prompt_says_so_before_it_is_trimmed():
    """mlx-lm asks `is_trimmable` and trims without asking how far: silently not at all, or into the prompt."""
    for name in ("int4+keep0.5", "oja-0.75+pinned"):
        cache = copy.deepcopy(made(name))
        assert not cache.is_trimmable()
        read(cache, 0, 150)
        read(cache, 150, 151)
        assert not cache.is_trimmable() and 1 <= (most := cache.windows.trimmable) < 30
        with pytest.raises(UserError, match=f"choose at most {most}, or all 151"):
            cache.trim(most + 1)
        assert cache.trim(1) == 1 and cache.trim(150) == 150


def test_tokens_that_two_prompts_drop_add_up():
    cache = copy.deepcopy(made("int4+keep0.5"))
    for start, stop in ((0, 150), (150, 151), (151, 300), (300, 301)):
        read(cache, start, stop)
    view, _ = cache.keys_and_values()
    assert cache.dropped > 100 and view.tokens + cache.dropped == cache.offset == 301


def test_a_batch_is_cut_as_far_as_the_shortest():
    rows = [CompressedKVCache(INT4) for _ in range(2)]
    for row, count in zip(rows, (9, 60), strict=True):
        read(row, 0, count)
    both = BatchedKVCache.merge(rows)
    assert both.trim(12) == 9 and both.offsets == [0, 51]


# -- hosts


@pytest.fixture(scope="module")
def model():
    model = random_model("llama")
    attach(model, "int4")
    yield model
    detach(model)


def test_mlx_lms_prompt_cache_finds_what_it_finds_in_full_precision(model):
    """Edited questions, replies without their reasoning, other questions under the same system prompt."""
    plain = random_model("llama")
    asked, found = tokens(400).tolist(), ([], [])
    for one, lengths in zip((model, plain), found, strict=True):
        kept = LRUPromptCache()
        cache = make_prompt_cache(one)
        one(mx.array(asked)[None], cache=cache)
        kept.insert_cache("m", asked, cache)
        for shared in (399, 380, 300, 222, 150, 64, 20):
            cache, rest = kept.fetch_nearest_cache("m", [*asked[:shared], 1, 2])
            lengths.append(len(rest))
            assert {layer.offset for layer in cache} == {shared}
            assert mx.isfinite(one(mx.array(rest)[None], cache=cache)).all().item()
    assert found == ([2] * 7, [2] * 7)
