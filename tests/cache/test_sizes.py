"""Bytes that are computed (`formats.sizes`) are those that caches take: in use and allocated, of every kind."""

from dataclasses import replace

import mlx.core as mx
import pytest
from methods import config_named
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache
from on_emulator import make

from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.cache.attention import attend
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.latent import LatentKVCache
from mlxkv.cache.stores import Records
from mlxkv.catalog.shapes import LayerShape
from mlxkv.catalog.sizes import CHUNK, ModelPlan, need
from mlxkv.codec.maps import sample
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.quantizers import DIMS, MixedBits
from mlxkv.formats.sizes import CacheShape
from mlxkv.generate.usage import in_use, shape_of
from mlxkv.metal import launch

DIAL = ("int8", "int4", "int3", "int2", "fill-2.25", "fill-3", "fill-4", "fill-4.5", "fill-6")
PAPERS = ("kivi-int4", "kivi-int2", "oscar-int4", "polar", "turbo-int3", "srft-int4+tensor")
PAPERS += ("polar-tree+online", "static-0.75", "fp16/int4")
FOLLOWING = ("oja-0.75", "oja-0.75+pinned", "oja-0.75+int4", "int4+keep0.5", "fp16+keep0.25")
HEADS, QUERIES = 2, 4


def fitted(name: str, dim: int) -> CacheConfig:
    """The configuration of a layer: mixed bits have widths, as a calibration gives them."""
    config = config_named(name)
    for side in ("keys", "values") if config.mixed_bits else ():
        quantizer = getattr(config, side).quantizer
        bits, blocks = round(quantizer.rate * dim - 16) // DIMS, dim // DIMS
        widths = [next(w for w in (8, 4, 3, 2, 1) if w <= -(-bits // blocks))] * blocks
        while sum(widths) > bits:
            widths.pop()
        own = replace(getattr(config, side), quantizer=MixedBits(quantizer.rate, tuple(widths)))
        config = replace(config, **{side: own})
    return config


def made(config: CacheConfig, dim: int):
    layer_maps = sample(HEADS, (dim, dim), config.fitted) if config.calibrated else None
    if not config.compresses:
        return KVCache()
    return (AdaptiveKVCache if config.needs_queries else CompressedKVCache)(config, layer_maps)


def read(cache, tokens: int, dim: int, chunk: int = 0):
    """Have a cache read so many tokens, which a layer attends to."""
    for start in range(0, tokens, chunk or tokens):
        new = min(chunk or tokens, tokens - start)
        keys, values = (mx.random.normal((1, HEADS, new, dim)).astype(mx.float16) for _ in "kv")
        view, _ = cache.update_and_fetch(keys, values)
        if isinstance(cache, AdaptiveKVCache):
            queries = mx.random.normal((1, QUERIES, new, dim)).astype(mx.float16)
            mx.eval(attend(queries, view, 1.0, "causal" if new > 1 else None))
        if start % 64 == 0:
            mx.eval([cache.state])
    return cache


def shape(config: CacheConfig, dim: int, records: bool = False) -> CacheShape:
    coded = config if config.compresses else None
    return CacheShape(HEADS, dim, dim, coded, queries=QUERIES, records=records)


def lengths(config: CacheConfig) -> tuple[int, ...]:
    return 1, config.window, config.window + 1, 1000, 8192


@pytest.mark.parametrize("dim", [64, 128])
def test_bytes_are_those_of_caches_of_every_preset(dim, subtests):
    """After one prompt; and what `fit` prints after the same in chunks."""
    for name in ("fp16", *DIAL, *(() if dim > 64 else (*PAPERS, *FOLLOWING))):
        config = fitted(name, dim)
        if config.why_not(dim, dim):
            continue
        for tokens in (n for n in lengths(config) if n <= 1000):
            with subtests.test(name=name, tokens=tokens):
                cache = read(made(config, dim), tokens, dim)
                assert shape(config, dim).allocated(tokens) == cache.nbytes
                assert shape(config, dim).held(tokens) == in_use(cache)
                chunk = 300 if config.needs_queries else CHUNK
                if tokens > chunk:
                    cache = read(made(config, dim), tokens, dim, chunk)
                    assert shape(config, dim).allocated(tokens, chunk) == cache.nbytes
                if not config.mixed_bits and not config.needs_queries:
                    plan = ModelPlan("one", [LayerShape("full", HEADS, dim, dim)], 0, "")
                    found = need(plan, config, tokens)
                    assert (found.cache, found.in_use) == (cache.nbytes, in_use(cache))


@pytest.mark.parametrize("name", ["int4", "fill-3", "oja-0.75+int4"])
def test_bytes_are_those_of_records(name):
    """Of kernels, also of heads that fill no whole blocks of 32 dims: there a record takes more than codes."""
    for dim in (64, 80):
        config = fitted(name, dim)
        with launch.using(make):
            for tokens in (config.window, config.window + 1):
                cache = read(made(config, dim), tokens, dim)
                store = cache.store and getattr(cache.store, "runs", [cache.store])[-1]
                assert store is None or isinstance(store, Records)
                assert shape(config, dim, True).allocated(tokens) == cache.nbytes
                assert shape(config, dim, True).held(tokens) == in_use(cache)
                known = replace(shape_of(cache), together=False)
                assert known == replace(shape(config, dim, True), queries=0)
        codes, records = (shape(config, dim, x).page_bytes(2) for x in (False, True))
        stored = -(-config.dims(dim, dim)[0] // 8) * 8  # in whole words of 4 bits, as codes are
        is_whole = stored % 32 == 0 or config.mixed_bits
        assert codes == records if is_whole else codes < records


FOLLOWED = ["int4", "oscar-int4", "int4+keep0.5", "oja-0.75", "oja-0.75+pinned"]


@pytest.mark.parametrize(
    ("name", "prompt"),
    # Behind 32 pages, room for more than one.
    [*((name, prompt) for name in FOLLOWED for prompt in (0, 300)), ("int4", 4400)],
)
def test_eager_growth_in_a_decode_loop(name, prompt):
    """One token after the other, from nothing and behind a prompt: what it drops or moves is gone with the first."""
    config, dim = fitted(name, 64), 64
    cache = read(made(config, dim), prompt, dim) if prompt else made(config, dim)
    for tokens in range(prompt + 1, prompt + 270):
        read(cache, 1, dim)
        if tokens % 23 == 0 or tokens == prompt + 1:
            said = shape(config, dim).allocated(tokens, prompt=prompt)
            assert said == cache.nbytes, (tokens, said)
            assert shape(config, dim).held(tokens, prompt=prompt) == in_use(cache)
            assert cache.nbytes <= shape(config, dim).allocated(tokens, prompt, most=True)


@pytest.mark.parametrize("name", ["int4", "naive-int4", "int8+rotary8"])
def test_bytes_of_latents(name):
    """DeepSeek's sizes: latents of 512, rotary keys of 64, exact or with codes."""
    config = config_named(name).of_latents
    sizes = CacheShape(1, 512, 64, config, "latent")
    for chunk in (8192, 512, 1):
        cache, done = LatentKVCache(config), 0
        for tokens in (1, config.window, config.window + 1) if chunk == 1 else lengths(config):
            if chunk > 1:
                cache, done = LatentKVCache(config), 0
            for start in range(done, tokens, chunk):
                new = min(chunk, tokens - start)
                parts = (mx.zeros((1, 1, new, n), mx.bfloat16) for n in (512, 64))
                cache.update_and_fetch(*parts)
            done = tokens
            assert sizes.allocated(tokens, chunk) == cache.nbytes
            assert sizes.held(tokens) == in_use(cache)
            assert replace(shape_of(cache), together=False) == sizes


@pytest.mark.parametrize("chunk", [1, 100, 300, 512])
def test_bytes_of_mlx_lms_own_caches(chunk, subtests):
    """A prompt in chunks, and a token behind it, with which a window is cut."""
    for kind, window in (("full", 0), ("sliding", 128), ("sliding", 700), ("chunked", 256)):
        with subtests.test(kind=kind, window=window):
            makers = {"full": lambda _: KVCache(), "chunked": ChunkedKVCache}
            cache = makers.get(kind, RotatingKVCache)(window)
            sizes = CacheShape(2, 64, 32, None, kind, window)

            def append(new: int, cache=cache) -> int:
                if isinstance(cache, ChunkedKVCache):
                    cache.maybe_trim_front()
                cache.update_and_fetch(*(mx.zeros((1, 2, new, n), mx.float16) for n in (64, 32)))
                return cache.nbytes

            for tokens in range(chunk, 1700 if chunk > 1 else 900, chunk):
                assert sizes.allocated(tokens, chunk) == append(chunk), tokens
            before = sizes.allocated(tokens, chunk, prompt=tokens)
            found = append(1)
            assert sizes.allocated(tokens + 1, chunk, prompt=tokens) == found
            assert sizes == shape_of(cache) and (kind != "sliding" or before == found)
