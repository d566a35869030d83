"""Sessions with the same first tokens store them once, count them once, and come back unchanged."""

import gc
from copy import deepcopy

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from on_emulator import make
from random_models import random_model, tokens
from small_caches import CHUNK, memory_of, read

from mlxkv.cache.backends import PortableBackend
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.stores import Records
from mlxkv.formats.presets import PRESETS
from mlxkv.loading.attach import attach
from mlxkv.serve.sessions import BLOCK, BlockStore, Sessions, StoredCache

pytestmark = pytest.mark.usefixtures("trusted")

COMMON = 900


def session(model, caches: list, own: int, count: int = 70) -> list:
    """Copies of `caches` that have read `count` more tokens. own: tells sessions apart."""
    caches = deepcopy(caches)
    more = (tokens(count) + own) % 50
    for start in range(0, count, CHUNK):
        model(more[None, start : start + CHUNK], cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches


def names(own: int, count: int = 70) -> list[int]:
    return tokens(COMMON).tolist() + ((tokens(count) + own) % 50).tolist()


def same(a, b) -> bool:
    """Whether both hold the same, but for exact tokens of a quantized page, which a cache at rest drops."""
    left, right = (
        {n: y for n, y in tree_flatten(x.state) if not n.startswith("last.")} for x in (a, b)
    )
    return left.keys() == right.keys() and all(
        mx.array_equal(x, right[name]).item() for name, x in left.items()
    )


@pytest.fixture(scope="module", params=["int4", "polar", "int8/int4", "fp16"])
def model(request):
    return made(request.param)


@pytest.fixture(scope="module")
def plain():
    return made("int4")


def made(kv: str):
    model = random_model("llama")
    attach(model, kv)
    return model


def test_what_is_shared_is_stored_once_and_comes_back_as_it_was(model):
    start = read(model, COMMON)
    sessions = [session(model, start, own) for own in range(4)]
    wanted = [deepcopy(one) for one in sessions]
    store = BlockStore()
    for own, one in enumerate(sessions):
        store.put(names(own), one)
    kept = [cache for one in sessions for cache in one if isinstance(cache, StoredCache)]
    if not kept:  # full precision: mlx-lm's own caches stay as they are
        assert store.saved == 0
        return
    blocks = {id(block): block for cache in kept for block in cache._blocks}
    apart = sum(block.nbytes for cache in kept for block in cache._blocks)
    assert store.saved == apart - sum(block.nbytes for block in blocks.values()) > apart / 2
    layers = len(wanted[0])
    assert len(blocks) <= layers * (2 + (COMMON + 70) // BLOCK + 4)
    for one, want in zip(sessions, wanted, strict=True):
        back = deepcopy(one)
        assert all(same(a, b) for a, b in zip(back, want, strict=True))
        more = tokens(40)[None]  # and go on as they would have
        assert mx.array_equal(model(more, cache=back), model(more, cache=want)).item()
    again = deepcopy(sessions[0])  # shared parts have not changed
    assert all(c.size() == COMMON + 70 for c in again)
    del kept, blocks, one, again
    sessions.clear()
    gc.collect()
    assert store.saved == 0 and not store._blocks


def test_memory_holds_them_once(plain):
    """By MLX's count of allocated bytes."""
    start = read(plain, COMMON)
    store, kept, taken = BlockStore(), [], []
    for own in range(4):
        kept.append(session(plain, start, own))
        store.put(names(own), kept[-1])
        gc.collect()
        taken.append(mx.get_active_memory())
    first = sum(cache.nbytes for cache in kept[0])
    grown = [b - a for a, b in zip(taken, taken[1:], strict=False)]
    private = 4 * first - store.saved - first
    assert private < 1.2 * first  # of three sessions
    assert sum(grown) < 2 * private  # MLX rounds allocations up


def test_other_tokens_or_other_bytes_are_not_shared(plain):
    one, other, third = (read(plain, COMMON) for _ in range(3))
    store = BlockStore()
    store.put(tokens(COMMON).tolist(), one)
    store.put([7, *tokens(COMMON).tolist()[1:]], other)  # the first token differs: so does all
    assert store.saved == 0
    third[0].sink = tuple(x + 1 for x in third[0].sink)
    store.put(tokens(COMMON).tolist(), third)
    assert store.saved == sum(
        block.nbytes for i, c in enumerate(third) for j, block in enumerate(c._blocks) if i or j
    )


def test_the_bound_counts_them_once(plain):
    memory = memory_of(plain)
    sessions = Sessions(memory, lambda: None)
    start = read(plain, COMMON)
    for own in range(4):
        sessions.keep(names(own), session(plain, start, own))
    assert sessions.nbytes < 0.6 * sessions.bytes_apart
    memory.bound = sessions.nbytes
    sessions.shrink()
    assert len(sessions.entries) == 4
    memory.bound -= 1
    sessions.shrink()
    assert len(sessions.entries) == 3 and sessions.nbytes <= memory.bound
    memory.bound = 0
    sessions.shrink()
    assert len(sessions.entries) == sessions.nbytes == sessions.block_store.saved == 0


@pytest.mark.parametrize("preset", ["int4", "srft-int4+g64"])
def test_records_of_kernels_are_shared_too(monkeypatch, preset):
    """Pages in the layout of the kernels: one buffer of records, and headers if there are any."""
    monkeypatch.setattr(
        "mlxkv.cache.choose.store",
        lambda plan, *_: Records(*plan.request[:2], PortableBackend(make)),
    )
    store, kept = BlockStore(), []
    for own in range(2):
        cache = CompressedKVCache(PRESETS[preset])
        for count, seed in ((COMMON, 0), (70, 1 + own)):
            pair = mx.random.normal((2, 1, 1, count, 64), key=mx.random.key(seed))
            cache.update_and_fetch(*pair.astype(mx.float16))
        want = deepcopy(cache)
        kept.append([cache])
        store.put(names(own), kept[-1])
        back = deepcopy(kept[-1][0])
        assert isinstance(back.store, Records) and same(back, want)
    shared = [a is b for a, b in zip(*(one[0]._blocks for one in kept), strict=True)]
    assert all(shared[: 1 + (COMMON - 256) // BLOCK]) and store.saved > 0
