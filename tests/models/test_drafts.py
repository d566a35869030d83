"""mlx-lm's speculative decoding on compressed caches: what is refused leaves no trace, and replies are those
without a draft."""

from __future__ import annotations

from random import Random

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from small_models import TINY, story_tokens
from stepping import INT8, small

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.formats.presets import PRESETS
from mlxkv.models import load

MOST = 15  # tokens that are drafted at once
ROUNDS = 60
KINDS = {
    "naive": small(),
    "eight": small(INT8.keys, INT8.values, sink=0),
    "kivi": PRESETS["kivi-int2"],
}


def same_contents(ours: CompressedKVCache, plain: CompressedKVCache) -> None:
    """All that attention reads is equal to the bit. Only the exact tokens of the last page, which attention does
    not read, may be gone: a seal that was taken back has used them."""
    assert ours.offset == plain.offset
    one, other = (dict(tree_flatten(cache.state)) for cache in (ours, plain))
    for held in (one, other):
        for name in [name for name in held if name.startswith(("last", "header"))]:
            del held[name]
    assert one.keys() == other.keys() and len(one) > 4
    for name, x in one.items():
        assert mx.array_equal(x, other[name]), name


def some(random: Random, count: int) -> tuple[mx.array, mx.array]:
    """Keys and values [1, 2, count, 64]."""
    mx.random.seed(random.randrange(1 << 30))
    return mx.random.normal((1, 2, count, 64)), mx.random.normal((1, 2, count, 64))


def rounds(random: Random):
    """(tokens of a step, those of them that are refused), as a draft of changing quality makes them."""
    for _ in range(ROUNDS):
        count = random.randint(1, MOST)
        yield count + 1, random.choice((0, random.randint(0, count), count))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_holds_what_it_holds_without_the_refused_tokens(kind):
    """Across the ends of pages, to the bit, for the most tokens that may be drafted."""
    random = Random(kind)
    ours, plain = CompressedKVCache(KINDS[kind]), CompressedKVCache(KINDS[kind])
    start = some(random, KINDS[kind].window + 40)
    for cache in (ours, plain):
        cache.update_and_fetch(*start)
    sealed = back = 0
    for count, refused in rounds(random):
        keys, values = some(random, count)
        before = ours._count_pages
        ours.update_and_fetch(keys, values)
        reached = ours._count_pages
        assert ours.trim(refused) == refused
        back += ours._count_pages < reached
        sealed += ours._count_pages > before
        kept = count - refused
        for i in range(kept):
            plain.update_and_fetch(keys[:, :, i : i + 1], values[:, :, i : i + 1])
        same_contents(ours, plain)
    assert sealed > 1 and back  # seals were made, and taken back


class Poor:
    """A draft model that is wrong in every fourth step."""

    def __init__(self, model):
        self.model, self.layers, self.calls = model, model.layers, 0

    def __call__(self, tokens, cache=None):
        self.calls += 1
        logits = self.model(tokens, cache=cache)
        return logits if self.calls % 4 else mx.roll(logits, 1, axis=-1)


@pytest.mark.parametrize("poor", [False, True])
def test_replies_of_mlx_lm_are_those_without_a_draft(poor):
    """Behind pages that were sealed, with the caches of both models compressed."""
    loaded, other = load(TINY, "int4"), load(TINY, "int4")
    text, draft = story_tokens(loaded, 300), Poor(other.model) if poor else other.model

    def said(caches: list, **more) -> list:
        asked = {"max_tokens": 60, "prompt_cache": caches} | more
        return list(stream_generate(loaded.model, loaded.tokenizer, text, **asked))

    plain, ours = make_prompt_cache(loaded.model), make_prompt_cache(loaded.model)
    caches = [*ours, *make_prompt_cache(draft)]
    alone, drafted = said(plain), said(caches, draft_model=draft, num_draft_tokens=5)
    assert [one.token for one in drafted] == [one.token for one in alone]
    assert ours[1]._count_pages == plain[1]._count_pages > 0
    assert 0 < sum(one.from_draft for one in drafted) < len(drafted)
