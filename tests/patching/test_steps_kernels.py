"""Kernels in steps of fixed shapes, by the emulator, which no trace can hold: the same code, not traced.

Lengths come to the kernels as an array, and buffers whole. The work is shared out by the capacity of the buffers, so
that results are equal to the last bit.
"""

from functools import partial

import mlx.core as mx
import pytest
from methods import config_named
from mlx_lm.models.cache import make_prompt_cache
from on_emulator import make, make_mma, make_tiles
from random_models import random_model, tokens
from step_twins import Twins, same_caches, small, steps_of, untraced

from mlxkv.cache.attention import attend
from mlxkv.cache.backends import PortableBackend, TileBackend
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.static import CompressedStaticCache, StepIndices
from mlxkv.calibration import measure
from mlxkv.formats.config import Side
from mlxkv.formats.quantizers import Affine
from mlxkv.loading.attach import attach, detach
from mlxkv.metal import launch

pytestmark = pytest.mark.usefixtures("trusted")

BODIES = {
    "portable": (make, mx.float32, PortableBackend),
    "tiles": (make_tiles, mx.float16, TileBackend),
    "mma": (make_mma, mx.bfloat16, TileBackend),
}
PAGES = small(Side(Affine(4), "srft"), Side(Affine(3, 32)), sink=5, recent=16, page=16)
CHANNELS = small(Side(Affine(4, 32, axis="channel")), Side(Affine(4, 64)), recent=32, page=32)


@pytest.fixture
def emulated():
    """Makes an attached model whose steps run by kernels of the emulator; pages of one layer."""
    models = []

    def with_body(body: str, family: str = "llama", config=PAGES, fitted=False, **changes):
        factory, dtype, expected = BODIES[body]
        model = random_model(family, **changes)
        made = measure.calibrate(model, tokens(600).tolist()) if fitted else None
        model.set_dtype(dtype)
        models.append(model)
        context = launch.using(factory)
        context.__enter__()
        models.append(context)
        attach(model, config, calibration=made)
        steps_of(model).compiles = False
        cache = next(c for c in make_prompt_cache(model) if hasattr(c, "config"))
        assert type(cache.plan((64, 64), dtype).backend) is expected
        return model

    yield with_body
    for one in reversed(models):
        detach(one) if hasattr(one, "layers") else one.__exit__(None, None, None)


def go(model, parts=(1, 8, 7, 1), prompt: int = 60, near: float = 0.0) -> Twins:
    """Twins that read past the quantizing of pages, several tokens at a time, to the last bit alike by default."""
    twins = Twins(model, near)
    twins.read(tokens(prompt))
    for i, new in enumerate(parts):
        twins.read(tokens(new, seed=i))
    twins.compare()
    assert not twins.steps.refused and twins.steps.traced == len(parts)
    return twins


@pytest.mark.parametrize("body", BODIES)
def test_lengths_from_an_array_give_the_same_bits(emulated, body):
    twins = go(emulated(body, num_hidden_layers=1))
    assert twins.plain[0].store.count > 2


def test_attention_sinks_beside_sliding_windows(emulated):
    """gpt_oss: rings and kernels in one step. A ring that is not full has a mask, so bits
    may differ; the experts of MLX's CPU are of float32 alone."""
    types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128}
    go(emulated("portable", "gpt_oss", num_hidden_layers=2, **types), parts=(1, 4), near=1e-5)


@pytest.mark.parametrize(("body", "new"), [("portable", 4), ("tiles", 1)])
def test_logits_of_attention_sinks(body, new):
    factory, dtype, expected = BODIES[body]
    draw = partial(mx.random.normal, dtype=dtype, key=mx.random.key(new))
    with launch.using(factory):
        ours, plain = CompressedKVCache(PAGES), CompressedKVCache(PAGES)
        for cache in (ours, plain):
            cache.update_and_fetch(draw((1, 2, 70, 64)), draw((1, 2, 70, 64)) * 2)
        keys, values = draw((1, 2, new, 64)) + 1, draw((1, 2, new, 64))
        queries, logits = draw((1, 6, new, 64)), draw((6,))
        static = CompressedStaticCache(ours, new)
        proxy = static.proxy(static.arrays, StepIndices(mx.array(static.indices, mx.int32)))
        mask = "causal" if new > 1 else None
        views = [one.update_and_fetch(keys, values)[0] for one in (proxy, plain)]
        assert type(views[1].pages.backend) is expected
        found, spec = (attend(queries, view, 0.125, mask, logits) for view in views)
        assert mx.array_equal(found, spec)
        static.commit(proxy.written)
        assert mx.abs(found - attend(queries, views[0], 0.125, mask)).max() > 1e-3
    same_caches(ours, plain, 0.0)


def test_bits_by_direction(emulated):
    """Fewer stored dims than a head has, and other widths in each layer."""
    config = config_named("fill-1.2+sink16+recent16+page16")
    model = emulated("portable", config=config, fitted=True, num_hidden_layers=2)
    twins = go(model, parts=(1, 8, 8, 1), prompt=80)
    sides = [(cache.config.keys, cache.config.values) for cache in twins.plain]
    widths = {tuple(side.quantizer.widths for side in both) for both in sides}
    assert len(widths) == 2 and all(len(one) < 4 for both in widths for one in both)


def test_headers_of_pages(emulated):
    """Scales per channel, which a page has once."""
    model = emulated("tiles", config=CHANNELS, num_hidden_layers=1)
    go(model, parts=(1, 8, 8, 1), prompt=80)


def test_a_batch_of_one_length(emulated):
    """Each sequence has a first record of its own."""
    model = emulated("tiles", num_hidden_layers=1)
    ours, plain = make_prompt_cache(model), make_prompt_cache(model)
    text = tokens(140).reshape(2, 70)
    for part in (text[:, :60], text[:, 60:61], text[:, 61:65], text[:, 65:66]):
        assert mx.array_equal(model(part, cache=ours), untraced(model, part, plain))
    assert steps_of(model).traced == 3


def test_a_trace_holds_no_kernel_of_the_emulator(emulated):
    model = emulated("portable", num_hidden_layers=1)
    steps_of(model).compiles = True
    twins = Twins(model, near=0.0)
    twins.read(tokens(60))
    twins.read(tokens(1))
    assert list(twins.steps.refused.values()) == ["kernels of no GPU"]
