"""Random walks of reading, taking back, copying and saving: traced steps leave what untraced ones do."""

import copy
import pickle
from dataclasses import replace
from random import Random

import mlx.core as mx
import mlx_lm.models.cache as mlx_cache
import pytest
from methods import METHODS
from random_models import VOCAB, random_model
from step_twins import INT4, INT8, Twins, small

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.formats.presets import FULL
from mlxkv.loading.attach import attach, detach
from mlxkv.patching.trees import trim_caches

STEPS = 30
LONGEST = 400  # tokens; longer caches are cut back before the walk goes on
WINDOWS = ({}, {"sink": 0}, {"sink": 0, "recent": 0}, {"sink": 16, "recent": 33})


class Walk(Twins):
    """A walk of both caches of one model."""

    def __init__(self, model, seed: int, folder):
        super().__init__(model)
        self.random, self.file = Random(seed), str(folder / "cache.safetensors")
        self.next = self.read(self._text(self.random.randint(1, 120)))
        self.left_behind: list[tuple[list, list]] = []

    @property
    def tokens(self) -> int:
        return self.plain[0].offset

    def step(self) -> None:
        actions = ["speak"] * 6 + ["several"] * 4 + ["trim"] * 4 + ["chunk", "page", "cut"]
        actions += ["copy", "return", "pickle", "save", "state", "mix"]
        action = "cut" if self.tokens > LONGEST else self.random.choice(actions)
        getattr(self, f"_{action}")()
        self.compare()

    def _text(self, count: int) -> mx.array:
        return mx.array([self.random.randrange(VOCAB) for _ in range(count)])

    def _speak(self) -> None:
        self.next = self.speak(self.next, self.random.randint(1, 12))

    def _several(self) -> None:
        """A draft to verify; often a part of it is taken back."""
        new = self.random.randint(2, 8)
        self.next = self.read(self._text(new))
        rejected = self.random.randint(0, new - 1)
        self._take_back(rejected)

    def _chunk(self) -> None:
        self.next = self.read(self._text(self.random.randint(9, 70)))

    def _page(self) -> None:
        """Up to the token that quantizes a page, or just before, or just behind."""
        cache = self.plain[0]
        capacity = cache.config.recent_capacity(cache.sink is not None) - cache.windows.recent
        new = max(1, capacity + self.random.choice((0, 1, 2)))
        self.next = self.read(self._text(new)) if new < 9 else self.speak(self.next, new)

    def _trim(self) -> None:
        page = self.plain[0].config.page
        some = (0, 1, 2, 8, page, page + 1, self.random.randint(0, self.tokens))
        self._take_back(min(self.random.choice(some), self.tokens))

    def _take_back(self, n: int) -> None:
        for caches in (self.traced, self.plain):
            assert mlx_cache.trim_prompt_cache(caches, n) == n
        if not self.tokens:
            self.next = self.read(self._text(20))

    def _cut(self) -> None:
        left = self.random.randint(1, min(self.tokens, LONGEST // 2))
        held = self.tokens
        assert all(trim_caches(caches, held, left) for caches in (self.traced, self.plain))
        self.next = self.read(self._text(10))

    def _copy(self) -> None:
        self.left_behind.append((self.traced, self.plain))
        self.each(copy.deepcopy if self.random.random() < 0.5 else copy.copy)

    def _return(self) -> None:
        """What was copied goes on; the copy must not have changed it."""
        if self.left_behind:
            index = self.random.randrange(len(self.left_behind))
            other, self.left_behind[index] = self.left_behind[index], (self.traced, self.plain)
            self.traced, self.plain = other

    def _pickle(self) -> None:
        self.each(lambda cache: pickle.loads(pickle.dumps(cache)))

    def _state(self) -> None:
        self.each(lambda cache: CompressedKVCache.from_state(cache.state))

    def _save(self) -> None:
        for name in ("traced", "plain"):
            mlx_cache.save_prompt_cache(self.file, getattr(self, name))
            setattr(self, name, mlx_cache.load_prompt_cache(self.file))

    def _mix(self) -> None:
        """The steps of one cache by turns traced and not."""
        self.traced, self.plain = self.plain, self.traced

    def finish(self) -> None:
        for pair in self.left_behind:
            self.traced, self.plain = pair
            self.compare()
        assert not self.steps.refused


@pytest.fixture
def walk(tmp_path, monkeypatch):
    """Makes a walk of a random llama with these pages, which is detached behind the test."""
    monkeypatch.setattr(mlx_cache, "CompressedKVCache", CompressedKVCache, raising=False)
    attached = []

    def make(config, seed: int, **changes) -> Walk:
        model = random_model("llama", **changes)
        attached.append(model)
        attach(model, config)
        return Walk(model, seed, tmp_path)

    yield make
    for model in attached:
        detach(model)


@pytest.mark.parametrize("seed", (0, 2))
def test_any_walk_leaves_the_same(walk, seed):
    random = Random(seed)
    sides = [INT4.keys, INT8.values, FULL]
    config = small(random.choice(sides[:2]), random.choice(sides), **random.choice(WINDOWS))
    one = walk(config, seed, num_key_value_heads=random.choice((1, 2, 4)))
    for _ in range(STEPS):
        one.step()
    one.finish()
    assert one.steps.traced  # not all of it without


# A method of each kind of pages.
KINDS = ("kivi", "online", "fill")


@pytest.mark.parametrize("name", KINDS)
def test_pages_of_every_kind(walk, name):
    """By plain ops, for which every method has pages."""
    config = METHODS[name].config(64)
    one = walk(replace(config, sink=4, recent=8), seed=len(name), num_hidden_layers=1)
    one.next = one.read(one._text(2 * config.page))
    for action in ("_speak", "_page", "_several", "_speak", "_trim", "_save", "_page", "_speak"):
        getattr(one, action)()
        one.compare()
    one.finish()
    assert one.steps.traced
