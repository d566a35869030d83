"""Whatever a cache goes through, it holds what a cache holds that read the same tokens afresh, as long as the exact
tokens exist that it takes."""

import copy
import pickle
from dataclasses import dataclass, field, replace
from functools import lru_cache

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import config_named
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_cache
from on_emulator import make

from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.cache.attention import attend
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.codec import maps
from mlxkv.errors import UserError
from mlxkv.metal import launch
from mlxkv.patching.mark import register_caches
from mlxkv.patching.trees import trim_caches

pytestmark = pytest.mark.usefixtures("trusted")

HEADS, KV_HEADS, DIMS = 4, 2, 64
POOL = 4096  # tokens that walks draw from
KINDS = ("int4", "int8", "polar", "turbo-int3", "int8/int4", "oja-0.5+int4", "int4+keep0.5")


@lru_cache
def pool() -> tuple[mx.array, mx.array, mx.array]:
    """(queries, keys, values) of all tokens, [1, heads, POOL, DIMS]: multiples of 1/64, so that a Hadamard
    rotation is exact. OpenBLAS rounds a product by how many rows it has."""
    rng = np.random.default_rng(7)
    shapes = ((1, heads, POOL, DIMS) for heads in (HEADS, KV_HEADS, KV_HEADS))
    drawn = (np.round(64 * rng.standard_normal(shape)) / 64 for shape in shapes)
    return tuple(mx.array(x.astype(np.float32)) for x in drawn)


@lru_cache
def made(kv: str) -> tuple:
    """(class, config, maps): of one calibration, which saved caches find again by its digest."""
    config = config_named(kv)
    config = replace(config, sink=8, recent=24, page=min(config.page, 64))
    layer_maps = None
    if config.calibrated:
        some = maps.sample(KV_HEADS, (DIMS, DIMS), config.fitted)
        layer_maps = pickle.loads(pickle.dumps(replace(some, digest=f"walk {kv}", layer="0")))
    return (AdaptiveKVCache if config.needs_queries else CompressedKVCache), config, layer_maps


def new(kv: str) -> CompressedKVCache:
    kind, config, layer_maps = made(kv)
    return kind(config, layer_maps)


def read(cache, tokens: list[int]) -> None:
    """Read these tokens of the pool at once, attention included."""
    if not tokens:
        return
    queries, keys, values = (x[:, :, mx.array(tokens)] for x in pool())
    attend(queries, cache.update_and_fetch(keys, values)[0], DIMS**-0.5, "causal")


def held(cache) -> dict[str, mx.array]:
    """The arrays of a state: pages, and exact tokens (the sink, which parts from the recent tokens when
    a page is quantized, and these). Not the exact tokens of the last page, which go when it is cut."""
    arrays = dict(tree_flatten(cache.state))
    out = {
        n: x for n, x in arrays.items() if n.split(".")[0] not in ("header", "last", "live", "sink")
    }
    for side in ("keys", "values"):
        parts = [arrays[n] for n in (f"sink.{side}", f"live.{side}") if n in arrays]
        if parts:
            out[side] = mx.concatenate(parts, axis=2)
    return out


def assert_same(one, other) -> None:
    ours, theirs = held(one), held(other)
    assert one.offset == other.offset and ours.keys() == theirs.keys()
    for name, x in ours.items():
        assert x.shape == theirs[name].shape and mx.array_equal(x, theirs[name]).item(), name


def is_exact(cache, left: int) -> bool:
    """Whether the first `left` tokens stay as a cache holds them that read no others."""
    pages, page = cache._count_pages, cache.config.page
    recent = left - cache.windows.dropped - cache._sunk - pages * page
    exact = cache.last is not None and recent + page > cache.config.recent
    return left <= cache._sunk or not pages or recent > cache.config.recent or exact


@dataclass
class Walk:
    """A cache that goes through everything, and its twin, which only reads and gives tokens back."""

    kv: str
    file: str
    tokens: list[int] = field(default_factory=list)  # what both hold
    drawn: int = 0
    exact: bool = True  # whether no token was decoded to stay

    def __post_init__(self):
        self.cache, self.twin = new(self.kv), new(self.kv)

    def append(self, count: int) -> None:
        some = list(range(self.drawn, self.drawn + count))
        self.drawn += count
        self.tokens += some
        for cache in (self.cache, self.twin):
            read(cache, some)

    def trim(self, count: int) -> None:
        left = max(0, len(self.tokens) - count)
        before = self.cache.offset, held(self.cache)
        self.exact = self.exact and is_exact(self.cache, left) or not left
        if self.cache.windows.can_keep(left):
            assert self.cache.trim(count) == self.twin.trim(count) == before[0] - left
        else:
            with pytest.raises(
                UserError, match=f"choose at most {self.cache.windows.trimmable}, or all"
            ):
                self.cache.trim(count)
            assert self.cache.offset == before[0]
            assert all(mx.array_equal(x, before[1][n]) for n, x in held(self.cache).items())
            assert not any(
                trim_caches([cache], before[0], left) for cache in (self.cache, self.twin)
            )
            self.cache, self.twin = new(self.kv), new(self.kv)
            for cache in (self.cache, self.twin):
                read(cache, self.tokens[:left])
        del self.tokens[left:]

    def batch(self, count: int) -> None:
        """Decode some tokens beside another sequence."""
        other = new(self.kv)
        read(other, list(range(POOL - 90, POOL)))
        both = type(self.cache).merge([self.cache, other] if self.tokens else [other, self.cache])
        at = 0 if self.tokens else 1
        queries, keys, values = pool()
        for token in range(self.drawn, self.drawn + count):
            pair = mx.array([token, POOL - 1] if at == 0 else [POOL - 1, token])
            q, k, v = (x[0][:, pair].swapaxes(0, 1)[:, :, None] for x in (queries, keys, values))
            attend(q, both.update_and_fetch(k, v)[0], DIMS**-0.5, None)
            read(self.twin, [token])
            self.tokens.append(token)
        self.drawn += count
        self.cache = both.extract(at)

    def changed(self, how: str) -> None:
        """Go on with what comes back; what was left behind is used, and must not matter."""
        old, state = self.cache, self.cache.state
        match how:
            case "copy":
                self.cache = copy.copy(old)
            case "deep copy":
                self.cache = copy.deepcopy(old)
            case "pickle":
                self.cache = pickle.loads(pickle.dumps(old))
            case "state":
                self.cache = type(old).from_state(state)
            case "save":
                register_caches()
                mlx_cache.save_prompt_cache(self.file, [old])
                (self.cache,) = mlx_cache.load_prompt_cache(self.file)
        read(old, list(range(130)))  # quantizes pages of its own

    def check(self) -> None:
        assert_same(self.cache, self.twin)
        if self.cache.shares_buffers and self.tokens and self.exact:
            fresh = new(self.kv)
            read(fresh, self.tokens)
            assert_same(self.cache, fresh)


COUNTS = st.one_of(st.integers(1, 3), st.integers(20, 30), st.integers(60, 70), st.integers(1, 300))
STEPS = st.one_of(
    st.tuples(st.just("append"), COUNTS),
    st.tuples(st.just("append"), COUNTS),
    st.tuples(st.just("trim"), COUNTS),
    st.tuples(st.just("batch"), st.integers(1, 40)),
    st.tuples(
        st.just("changed"), st.sampled_from(("copy", "deep copy", "pickle", "state", "save"))
    ),
)


def walk(kv: str, file: str, count: int) -> None:
    """Take so many walks."""

    @settings(max_examples=count, deadline=None, derandomize=True, database=None)
    @given(st.lists(STEPS, min_size=2, max_size=12))
    def walks(steps):
        one = Walk(kv, file)
        one.append(100)
        for name, argument in steps:
            getattr(one, name)(argument)
            one.check()

    walks()


@pytest.mark.parametrize("kv", KINDS)
def test_any_walk_leaves_what_a_fresh_cache_holds(kv, tmp_path):
    walk(kv, str(tmp_path / "cache.safetensors"), 20)


@pytest.mark.slow
def test_any_walk_by_kernels(tmp_path):
    """In the emulator; sequences decode in shared arrays there."""
    with launch.using(make):
        walk("int4", str(tmp_path / "cache.safetensors"), 4)
