"""Decode steps of fixed shapes in batches: they say, and leave, what steps that Python builds do."""

from contextlib import contextmanager, nullcontext
from copy import deepcopy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchRotatingKVCache, make_prompt_cache
from on_emulator import make_tiles
from random_models import random_model, tokens
from small_caches import SMALL, together

from mlxkv.cache.backends import TileBackend
from mlxkv.cache.batch_buffers import BatchBuffers
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.static import of_batch
from mlxkv.formats.presets import PRESETS
from mlxkv.loading.attach import attach
from mlxkv.metal import launch
from mlxkv.patching import steps
from mlxkv.patching.trees import MARK

pytestmark = pytest.mark.usefixtures("trusted")


def attached(family: str = "llama", kernels: str = "ops", config=SMALL, **changes):
    """A model and its steps, which no trace holds where kernels are the emulator's. Tiles are of 16 bits."""
    model = random_model(family, **changes)
    if kernels == "tiles":
        model.set_dtype(mx.float16)
    attach(model, config, strict=family == "llama")
    steps = vars(model)[MARK].steps
    steps.compiles = kernels == "ops"
    return model, steps


@contextmanager
def without(steps):
    """Inside, Python builds every step."""
    steps.off = "for this test"
    try:
        yield
    finally:
        steps.off = None


def noted(steps, monkeypatch) -> list[int]:
    """The batches of the steps of fixed shapes that are taken from now on."""
    taken, take = [], steps._step

    def note(model, call, inputs, caches):
        out = take(model, call, inputs, caches)
        taken.append(inputs.shape[0])
        return out

    monkeypatch.setattr(steps, "_step", note)
    return taken


def exact(cache) -> tuple[mx.array, mx.array]:
    """The keys and values that a cache has in full precision."""
    pair = cache.keys_and_values()
    return getattr(pair[0], "recent", pair)


def close(x: mx.array, y: mx.array) -> bool:
    bound = 1e-2 if x.dtype == mx.float16 else 1e-3
    return mx.allclose(x, y, rtol=bound, atol=bound).item()


class Pair:
    """The same batch twice: `ours` takes steps of fixed shapes, `plain` does not."""

    def __init__(self, model, steps, lengths):
        self.model, self.steps, self.seed = model, steps, 100
        self.ours = self.read(lengths)
        self.plain = deepcopy(self.ours)

    def read(self, lengths) -> list:
        rows = []
        for length in lengths:
            rows.append(make_prompt_cache(self.model))
            mx.eval(self.model(tokens(length, seed=length)[None], cache=rows[-1]))
        return [layers[0].merge(list(layers)) for layers in zip(*rows, strict=True)]

    def say(self, count: int, new: int = 1) -> None:
        for _ in range(count):
            self.seed += 1
            batch = len(self.plain[-1].offset.tolist())
            inputs = tokens(batch * new, seed=self.seed).reshape(batch, new)
            got = self.model(inputs, cache=self.ours)
            with without(self.steps):
                want = self.model(inputs, cache=self.plain)
            assert close(got, want)
        self.check()

    def each(self, what) -> None:
        """Do it to every cache of both."""
        for caches in (self.ours, self.plain):
            for cache in caches:
                what(cache)

    def join(self, lengths) -> None:
        new = self.read(lengths)
        for caches, more in ((self.ours, deepcopy(new)), (self.plain, new)):
            for cache, other in zip(caches, more, strict=True):
                cache.extend(other)

    def check(self) -> None:
        for ours, plain in zip(self.ours, self.plain, strict=True):
            assert ours.offset.tolist() == plain.offset.tolist()
            for i in range(len(plain.offset.tolist())):
                a, b = ours.extract(i), plain.extract(i)
                for x, y in zip(exact(a), exact(b), strict=True):
                    assert x.shape == y.shape and close(x, y)


@pytest.mark.parametrize("kernels", ["ops", pytest.param("tiles", marks=pytest.mark.slow)])
def test_sequences_come_go_and_are_taken_back(kernels, monkeypatch):
    """Over pages that are quantized at different steps."""
    with launch.using(make_tiles) if kernels == "tiles" else nullcontext():
        model, steps = attached(kernels=kernels, num_hidden_layers=1)
        pair = Pair(model, steps, (110, 84, 97))
        pair.say(1)  # sequences join
        taken = noted(steps, monkeypatch)
        pair.say(10)
        pair.each(lambda cache: cache.filter([2, 0]))
        pair.say(5)
        pair.join((102, 86))
        pair.say(2)
        pair.say(1, new=3)
        pair.each(lambda cache: cache.trim(2))
        pair.say(4)
        pair.each(lambda cache: cache.filter(mx.array([3])))
        pair.say(3)
        assert {1, 2, 3, 4} <= set(taken) and len(taken) >= 23 and not steps.refused
        statics = [static for cache in pair.ours for static in of_batch(cache, 1)]
        kind = CompressedKVCache if kernels == "ops" else BatchBuffers
        assert statics and all(type(static.cache) is kind for static in statics)
        if kernels != "ops":
            assert all(type(static.store.backend) is TileBackend for static in statics)


def test_windows_of_mlx_lm_beside(monkeypatch):
    """Rings with padding, before they are full and around."""
    model, steps = attached("gemma3_text", sliding_window=160)
    pair = Pair(model, steps, (150, 97, 121))
    taken = noted(steps, monkeypatch)
    assert any(type(cache) is BatchRotatingKVCache for cache in pair.ours)
    pair.say(15)
    pair.each(lambda cache: cache.filter([0, 2]))
    pair.join((130,))
    pair.say(25)
    assert len(taken) >= 35 and not steps.refused
    for ours, plain in zip(pair.ours, pair.plain, strict=True):
        if type(plain) is BatchRotatingKVCache:
            names = ("_idx", "_offset", "rotated")
            assert [getattr(ours, n) for n in names] == [getattr(plain, n) for n in names]
            assert ours.left_padding.tolist() == plain.left_padding.tolist()


@pytest.mark.slow
def test_states_beside(monkeypatch):
    model, steps = attached("qwen3_next")
    taken = noted(steps, monkeypatch)
    prompts = [tokens(n, seed=n).tolist() for n in (150, 97, 121)]
    ours = together(model, prompts, (6, 12, 8), late=1)
    assert len(taken) > 8 and not steps.refused
    with without(steps):
        assert together(model, prompts, (6, 12, 8), late=1) == ours


def test_members_that_change_make_no_trace():
    model, steps = attached(num_hidden_layers=1)
    pair = Pair(model, steps, (90, 92))
    pair.say(5)
    before = steps.traced
    assert before == 1
    pair.each(lambda cache: cache.filter([1]))
    pair.join((91,))
    pair.say(5)
    assert steps.traced == before
    pair.join((93,))
    pair.say(2)
    assert steps.traced == before + 1


def adding(input_names, **texts):
    """A factory of kernels of plain ops, which a trace can hold: they add up what says how much is read."""

    def call(inputs, template, grid, threadgroup, output_shapes, output_dtypes):
        named = dict(zip(input_names, inputs, strict=True))
        read = [x.astype(mx.float32).sum() for n, x in named.items() if x.dtype == mx.int32]
        said = mx.sin(sum(read, mx.array(float(grid[1]))))  # how the work is shared out, too
        zeros = (mx.zeros(*each) for each in zip(output_shapes, output_dtypes, strict=True))
        return [(x + said).astype(x.dtype) for x in zeros]

    return call


def test_shared_arrays_are_traced(monkeypatch):
    """Over pages that are quantized, with kernels that tell lengths, starts and divisions apart."""
    monkeypatch.setattr(adding, "tiles", True, raising=False)
    monkeypatch.setattr(TileBackend, "emulated", False)
    with launch.using(adding):
        model, steps = attached(kernels="tiles", num_hidden_layers=2)
        steps.compiles = True
        pair = Pair(model, steps, (150, 97, 121))
        pair.say(1)
        for cache in pair.ours:
            assert type(cache.buffers.store.backend) is TileBackend
        pair.say(4)
        assert steps.traced == 1
        pair.say(30)
        pair.say(1, new=3)
        pair.each(lambda cache: cache.filter([2, 0]))
        pair.say(3)
        assert 3 <= steps.traced <= 9 and not steps.refused


def test_a_batch_before_its_first_tokens_can_be_traced_later():
    """It is unused so far, like a cache of one sequence: nothing says that its class has no static form."""
    for kind, row in steps.ROWS.items():
        batch = kind.merge([row(PRESETS["int4"]) for _ in range(2)])
        (static,) = steps.static_caches_of(batch, 1)
        assert isinstance(static, steps.UnusedStaticCache)
