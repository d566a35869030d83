"""Speculative decoding: what is refused leaves no trace in a cache, and replies are those without a draft."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache
from model_folders import save
from random_models import VOCAB, config_of, random_model
from small_models import TINY
from stepping import INT8, small

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.chat.session import Session
from mlxkv.errors import UserError
from mlxkv.formats.presets import PRESETS
from mlxkv.models import attach, detach, load
from mlxkv.models.catalog.asked import MOST_DRAFT_TOKENS, check_draft
from mlxkv.models.generate import Stats, new_cache, stream
from mlxkv.models.speculative.draft import Draft, check, why_not
from mlxkv.models.speculative.rings import trimmable

ROUNDS = 60
KINDS = {
    "int4": PRESETS["int4"],
    "naive": small(),
    "eight": small(INT8.keys, INT8.values, sink=0),
    "bare": small(sink=0, recent=0),
    "kivi": PRESETS["kivi-int2"],
    "srft": PRESETS["srft-int4"],
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


def rounds(random: Random, most: int):
    """(tokens of a step, those of them that are refused), as a draft of changing quality makes them."""
    for _ in range(ROUNDS):
        count = random.randint(1, most)
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
    for count, refused in rounds(random, MOST_DRAFT_TOKENS):
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


@pytest.mark.parametrize("keep", [0, 4])
def test_a_sliding_window_holds_what_it_holds_without_the_refused_tokens(keep):
    """mlx-lm's own refuses to be trimmed once it is full."""
    random = Random(keep)
    ours, plain = RotatingKVCache(32, keep=keep), RotatingKVCache(32, keep=keep)
    start = some(random, 20)
    ours.update_and_fetch(*start)
    plain.update_and_fetch(*start)
    full = False
    with trimmable([ours]):
        for count, refused in rounds(random, 7):
            keys, values = some(random, count)
            ours.update_and_fetch(keys, values)
            assert ours.is_trimmable() and ours.trim(refused) == refused
            kept = count - refused
            plain.update_and_fetch(keys[:, :, :kept], values[:, :, :kept])
            assert ours.offset == plain.offset
            full = full or not plain.is_trimmable()
            for a, b in zip(in_order(ours), in_order(plain), strict=True):
                assert mx.array_equal(a, b)
    assert full and not ours.is_trimmable() and "trim" not in vars(ours)


def in_order(ring: RotatingKVCache) -> list[mx.array]:
    """The first tokens that it keeps, and the last ones that a next token sees."""
    out = []
    for x in (ring.keys, ring.values):
        x = ring._temporal_order(x)
        last = min(ring.offset, ring.max_size - 1) - ring.keep
        out += [x[:, :, : ring.keep], x[:, :, -last:]]
    return out


def test_a_window_that_is_not_full_is_trimmed_as_mlx_lm_does():
    random, ours, plain = Random(1), RotatingKVCache(64), RotatingKVCache(64)
    keys, values = some(random, 9)
    with trimmable([ours]):
        for ring in (ours, plain):
            ring.update_and_fetch(keys, values)
            ring.update_and_fetch(*some(Random(2), 1))
            ring.trim(4)
            ring.update_and_fetch(*some(Random(3), 1))
    assert all(mx.array_equal(a, b) for a, b in zip(in_order(ours), in_order(plain), strict=True))


# -- whole models


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two random models that share a tokenizer: three layers, and one layer of other weights."""
    out = {}
    for name, layers, seed in (("large", 3, 0), ("small", 1, 1)):
        changes = {"num_hidden_layers": layers, "max_position_embeddings": 4096}
        mx.random.seed(seed)
        model = random_model("llama", **changes)
        path = tmp_path_factory.mktemp(name)
        out[name] = save(path, model, {**config_of("llama"), **changes})
    return out


def prompt(count: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(1, VOCAB) for _ in range(count)]


class Poor:
    """A draft model that is wrong in every fourth step."""

    def __init__(self, model):
        self.model, self.layers, self.calls = model, model.layers, 0

    def __call__(self, tokens, cache=None):
        self.calls += 1
        logits = self.model(tokens, cache=cache)
        return logits if self.calls % 4 else mx.roll(logits, 1, axis=-1)


def poor(loaded) -> SimpleNamespace:
    return SimpleNamespace(model=Poor(loaded.model), name="poor", kv_name="fp16")


@pytest.mark.parametrize("drafts", ["small", "large"])
def test_greedy_replies_in_full_precision_are_those_without_a_draft(folders, drafts):
    loaded, other = load(str(folders["large"]), "fp16"), load(str(folders[drafts]), "fp16")
    draft, text = Draft(other if drafts == "large" else poor(other), 5), prompt(230)
    plain, ours, stats = new_cache(loaded), new_cache(loaded), Stats()
    want = [p.token for p in stream(loaded, text, plain, max_tokens=80)]
    got = stream(loaded, text, ours, max_tokens=80, stats=stats, draft=draft)
    assert [p.token for p in got] == want
    assert stats.held == ours[0].offset == plain[0].offset == 230 + len(want)
    assert (draft.drafted, draft.accepted) == (stats.drafted, stats.accepted)
    if drafts == "large":
        assert stats.acceptance > 0.9  # the last round ends with the reply
    else:
        assert stats.acceptance < 0.9


@pytest.mark.parametrize("kv", ["small", "int4"])
def test_greedy_replies_of_compressed_caches_are_likeliest_tokens(folders, kv):
    """A page that is sealed by a step is still exact for its tokens, so logits may be a little apart from those
    of single steps: what is said is the likeliest there, or next to it."""
    loaded, other = load(str(folders["large"]), "fp16"), load(str(folders["small"]), "fp16")
    attach(loaded.model, small() if kv == "small" else kv)
    try:
        text, ours, plain, stats = prompt(230), new_cache(loaded), new_cache(loaded), Stats()
        pieces = stream(loaded, text, ours, max_tokens=80, stats=stats, draft=Draft(poor(other), 5))
        said = [p.token for p in pieces]
        loaded.model(mx.array(text[:-1])[None], cache=plain)
        for before, after in zip([text[-1], *said], said, strict=False):
            logits = loaded.model(mx.array([[before]]), cache=plain)[0, -1]
            spread = mx.std(logits).item()
            assert (mx.max(logits) - logits[after]).item() <= 0.1 * spread
        loaded.model(mx.array(said[-1:])[None], cache=plain)
        assert stats.drafted > stats.accepted > 0
        assert [c.offset for c in ours] == [c.offset for c in plain] == [230 + len(said)] * 3
        assert [c._count_pages for c in ours] == [c._count_pages for c in plain]
    finally:
        detach(loaded.model)


def test_a_reply_that_is_stopped_leaves_the_caches_consistent(folders):
    loaded, other = load(str(folders["large"]), small()), load(str(folders["large"]), "fp16")
    text = prompt(150)
    whole = [
        p.token
        for p in stream(loaded, text, new_cache(loaded), max_tokens=30, draft=Draft(other, 4))
    ]
    for ending in range(1, 9):  # within a draft, and behind one
        draft, cache, stats, said = Draft(other, 4), new_cache(loaded), Stats(), []
        for piece in stream(
            loaded,
            text,
            cache,
            max_tokens=30,
            stats=stats,
            draft=draft,
            stop=lambda said=said, ending=ending: len(said) >= ending,
        ):
            said.append(piece.token)
        assert said == whole[:ending] and stats.held == cache[0].offset == 150 + ending
        assert draft._held == [*text, *said][: len(draft._held)] and len(draft._held) >= 149


def test_a_chat_reads_only_what_is_new_in_both_models(folders):
    loaded, other = load(str(folders["large"]), "int4"), load(str(folders["small"]), "fp16")
    draft = Draft(other, 3)
    plain = Session(loaded, raw=True, max_tokens=30)
    ours = Session(loaded, raw=True, max_tokens=30, draft=draft)
    read: list[int] = []
    model = other.model

    class Counted:
        layers = model.layers

        def __call__(self, tokens, cache=None):
            read.append(tokens.shape[1])
            return model(tokens, cache=cache)

    draft.loaded = SimpleNamespace(model=Counted(), name="small", kv_name="fp16")
    first = " ".join(f"w{i}" for i in prompt(200))
    for text in (first, " w5 w6 w7", " w8"):
        read.clear()
        assert "".join(ours.ask(text)) == "".join(plain.ask(text))
        assert ours.tokens == plain.tokens and ours.stats.drafted
        assert sum(read) < 300 if text == first else sum(read) < 100


def test_what_cannot_draft_or_verify_is_refused_in_one_line(folders, tmp_path):
    loaded = load(str(folders["large"]), "fp16")
    with pytest.raises(
        UserError, match=r"tiny has another tokenizer than .*; got \d+ tokens for 64"
    ):
        check(loaded, load(TINY, "fp16"))
    follows = load(str(folders["large"]), "oja-0.75")
    with pytest.raises(
        UserError, match="cannot verify drafts: its cache has seen the queries"
    ) as caught:
        check(follows, loaded)
    assert "\n" not in str(caught.value)
    state = SimpleNamespace(make_cache=lambda: [ArraysLike()], layers=[0])
    assert "ArraysLike cannot take tokens back" in why_not(SimpleNamespace(model=state))
    shared = SimpleNamespace(make_cache=lambda: [KVCache()], layers=[0, 1])
    assert "a cache for each layer" in why_not(SimpleNamespace(model=shared))


class ArraysLike:
    """A state of fixed size."""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((None, 3), "is for a draft model; got 3"),
        ((TINY, 0), "from 1 to 15; got 0"),
        ((TINY, 16), "from 1 to 15; got 16"),
    ],
)
def test_numbers_out_of_range_are_refused(given, said):
    with pytest.raises(UserError, match=said):
        check_draft(*given)
    check_draft(TINY, 15)
