"""The kernel for latents in the emulator, under both lane maps, against the spec and the plain ops."""

import dataclasses

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from on_emulator import make, make_mma, make_tiles
from random_models import latent_model
from samples import rms

from mlxkv.cache import choose, selftest
from mlxkv.cache.attention import attend
from mlxkv.cache.backends import PLAIN_OPS
from mlxkv.cache.latent import LatentKVCache
from mlxkv.codec.codec import Codec
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.quantizers import Affine
from mlxkv.loading.attach import attach, detach
from mlxkv.metal import latents, launch
from mlxkv.spec import affine as spec

RANK, ROTARY = 128, 32
SCALE = (64 + ROTARY) ** -0.5


def made(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def test_it_is_attention_over_what_is_stored(subtests):
    """With the lane maps of CUDA and Metal in turn."""
    for factory, form, rank, heads, batch, sink, dtype in [
        (make_tiles, Affine(4, 64, axis="channel"), 512, 20, 1, 4, mx.bfloat16),
        (make_mma, Affine(2, 32, True, "channel"), 64, 5, 2, 0, mx.float32),
        (make_mma, Affine(8, 64), 128, 33, 1, 0, mx.float16),
        (make_mma, Affine(3, 32, True), 256, 9, 1, 40, mx.float32),
        (make_tiles, Affine(3, 64), 64, 16, 2, 3, mx.float32),
    ]:
        with subtests.test(form=form, rank=rank):
            code, tokens, recent = Codec(Side(form), rank, 64), 128, 21
            stored = code.encode(made(batch, 1, tokens, rank))
            pages = code.decode(stored, mx.float32)
            first = made(batch, 1, sink, rank, seed=1).astype(dtype) if sink else None
            last = made(batch, 1, recent, rank, seed=2).astype(dtype)
            seen = [np.array(x.astype(mx.float32)) for x in (first, pages, last) if x is not None]
            q = made(batch, heads, 1, rank, seed=3)
            added = made(batch, heads, 1, sink + tokens + recent, seed=4).astype(dtype)
            out = latents.attend(q, code, stored, tokens, first, last, added, SCALE, factory)
            whole = np.concatenate(seen, axis=2).astype(np.float64)
            bias = np.array(added.astype(mx.float32))
            expected = spec.attention(np.array(q), whole, whole, SCALE, bias)
            bound = 4e-3 if dtype == mx.bfloat16 else 8e-4
            assert rms(out, mx.array(expected.astype(np.float32))) < bound


def cache_of(kv: str | Side) -> LatentKVCache:
    config = kv
    if isinstance(kv, Side):
        config = CacheConfig(kv, kv, sink=16, recent=32, page=32)
    return LatentKVCache(config.of_latents)


def test_what_it_does_not_compute_plain_ops_do(trusted):
    with launch.using(make_tiles):
        cache = cache_of(Side(Affine(4, 64)))
        cache.update_and_fetch(made(1, 1, 150, RANK), made(1, 1, 150, ROTARY))
        view = cache.keys_and_values()[0]
        q = made(1, 6, 1, RANK, seed=5)
        shown = mx.array(np.arange(150) > 20)[None, None, None]
        plain = dataclasses.replace(view, pages=dataclasses.replace(view.pages, backend=PLAIN_OPS))
        for mask, softcap in ((shown, None), (None, 20.0)):
            out = attend(q, view, SCALE, mask, softcap=softcap)
            assert rms(out, attend(q, plain, SCALE, mask, softcap=softcap)) == 0.0
        assert 0 < rms(attend(q, view, SCALE), attend(q, plain, SCALE)) < 8e-4


def test_it_says_why_it_does_not_run():
    for kv, dims, why in [
        ("turbo-int4", 128, "reads affine codes"),
        ("int4", 96, "is for 64, 128, 256, 512 dims, not 96"),
    ]:
        with launch.using(make_tiles):
            found = choose.plan(parse_kv(kv).of_latents, (dims, 32), mx.float32, latent=True)
        assert found.backend == PLAIN_OPS and why in found.label


def test_no_machine_and_a_failed_trial(monkeypatch):
    config = parse_kv("int4").of_latents

    def plan():
        return choose.plan(config, (128, 32), mx.float32, latent=True)

    with launch.using(make):
        assert plan().reason == "this backend has no tiles"
    with launch.using(None):
        assert plan().reason == "no GPU here"

    def broken(*names, **texts):
        raise RuntimeError("no such compiler")

    broken.tiles = True
    with launch.using(broken):
        assert plan().backend == PLAIN_OPS and "no such compiler" in plan().label
    with launch.using(make_tiles), monkeypatch.context() as here:
        here.setenv(launch.TILES_SWITCH, "0")
        assert plan().reason == "MLXKV_TILES=0"
    with launch.using(make_tiles):
        monkeypatch.setattr(selftest, "_results", {})
        monkeypatch.setattr(selftest, "BOUND", 1e-9)
        assert "is off by" in plan().label


def test_a_model_decodes_by_it_as_by_plain_ops(trusted):
    """Logits of single steps, of one sequence and of a merged batch."""
    model = latent_model("glm4_moe_lite")
    config = dataclasses.replace(
        parse_kv("naive-int4"), sink=4, recent=16, page=16, rotary=8, keys=Side(Affine(4, 32))
    )
    ids = mx.random.randint(0, 60, (2, 90), key=mx.random.key(3))

    def steps() -> list[mx.array]:
        caches = [make_prompt_cache(model) for _ in ids]
        for row, one in zip(ids, caches, strict=True):
            model(row[None, :80], cache=one)
        out = [model(ids[:1, 80:81], cache=caches[0])]
        model(ids[1:, 80:81], cache=caches[1])
        merged = [type(a).merge([a, b]) for a, b in zip(*caches, strict=True)]
        return [*out, model(ids[:, 81:82], cache=merged)]

    attach(model, config)
    plain = steps()
    detach(model)
    with launch.using(make_tiles):
        (report, *_) = attach(model, config)
        assert report.kernel == "cpu tile kernels"
        ours = steps()
    detach(model)
    for one, other in zip(ours, plain, strict=True):
        assert rms(one, other) < 2e-3
