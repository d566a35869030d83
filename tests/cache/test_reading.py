"""Reading fewer pages: plain ops against the law in float64, kernels in the emulator against plain ops."""

from __future__ import annotations

from dataclasses import replace

import golden_reading
import mlx.core as mx
import numpy as np
import pytest
from on_emulator import make, make_mma, make_tiles
from samples import data, rms

from mlxkv.bench import reference as reference_of
from mlxkv.bench.reference import reference, relative_rms
from mlxkv.cache import selftest, stores
from mlxkv.cache.attention import attend
from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.reading import summary
from mlxkv.cache.view import PORTABLE, TILES, RaggedView, View
from mlxkv.errors import UserError
from mlxkv.eval import feed
from mlxkv.formats.config import Affine, CacheConfig, Fill, Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.rules import reading
from mlxkv.metal import launch
from mlxkv.metal.reading import choose
from mlxkv.models import usage
from mlxkv.spec import bounds
from mlxkv.spec import reading as ref

HEADS, KV_HEADS, DIMS, SCALE = 4, 2, 64, 64**-0.5
TOKENS, LONGEST = 64 * 11 + 128 + 20, 1024


TRIED = selftest.fault


@pytest.fixture(autouse=True)
def kernels_are_trusted(monkeypatch):
    """Their own test takes seconds."""
    monkeypatch.setattr(selftest, "fault", lambda *_, **__: None)


def off(x, law) -> float:
    """`rms` of anything."""
    return rms(*(mx.array(np.array(y, np.float32)) for y in (x, law)))


def uneven(tokens: int, seed: int, dims: int = DIMS, batch: int = 1) -> np.ndarray:
    """Vectors [batch, KV_HEADS, tokens, dims] that have more in common the nearer they are, as a text's have."""
    x = data(batch, KV_HEADS, LONGEST, dims, seed=seed)
    slow = np.repeat(data(batch, KV_HEADS, LONGEST // 64, dims, seed=seed + 1), 64, axis=2)
    return (x + 1.5 * slow)[:, :, :tokens]


def filled(config: CacheConfig, dtype=mx.float32, tokens: int = TOKENS, batch: int = 1):
    cache = CompressedKVCache(config)
    cache.update_and_fetch(
        *(mx.array(uneven(tokens, i, batch=batch)).astype(dtype) for i in (0, 5))
    )
    return cache


def asked(new: int, seed: int = 20, dtype=mx.float32, batch: int = 1) -> mx.array:
    return mx.array(0.7 * data(batch, HEADS, new, DIMS, seed=seed)).astype(dtype)


def read(cache, new: int = 1, dtype=mx.float32, batch: int = 1) -> tuple[mx.array, View]:
    more = (mx.array(uneven(new, 40 + i, batch=batch)).astype(dtype) for i in range(2))
    view, _ = cache.update_and_fetch(*more)
    return attend(
        asked(new, dtype=dtype, batch=batch), view, SCALE, "causal" if new > 1 else None
    ), view


# -- the law


def test_the_law_reads_what_has_the_mass():
    keys, values = uneven(640, 1)[0, 0], uneven(640, 3)[0, 0]
    q, windows = data(3, DIMS, seed=9) / 10, (data(20, DIMS, seed=11), data(20, DIMS, seed=12))
    s = q @ np.concatenate([keys, windows[0]]).T
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    whole = p @ np.concatenate([values, windows[1]])
    assert off(ref.attend(q, keys, values, windows, 1.0), whole) < 1e-5
    few = [off(ref.attend(q, keys, values, windows, share), whole) for share in (0.2, 0.5, 0.8)]
    assert few[0] > few[1] > few[2] > 0
    # The ranking is near the best there is: the true mass of each chunk.
    true = p[:, :640].reshape(3, 20, 32).sum(-1).sum(0)
    weight = ref.weights(
        ref.estimates(q, ref.summary(keys)), np.log(np.exp(q @ windows[0].T).sum(-1))
    )
    best = np.sort(true)[-10:].sum()
    assert true[ref.chosen(weight, 0.5)].sum() > 0.9 * best


def test_independent_gaussian_numbers_have_the_mass_that_is_estimated():
    rng = np.random.default_rng(3)
    keys = rng.normal(rng.normal(size=16), rng.random(16), (1 << 16, 16))
    q = rng.normal(size=(2, 16)) / 2
    estimate = ref.estimates(q, ref.summary(keys, 1 << 16), 1 << 16)[:, 0]
    assert np.allclose(estimate, np.log(np.exp(q @ keys.T).sum(-1)), atol=0.05)


def test_shares_are_counted_alike():
    for share in (0.001, 0.25, 0.3, 0.5, 0.63, 1.0):
        for chunks in (1, 2, 3, 7, 64, 1000):
            assert ref.count(chunks, share) == reading.count(chunks, reading.parts(share))
    assert reading.count(10, reading.parts(0.0001)) == 1
    assert reading.count(0, 128) == 0


def test_plain_ops_follow_the_law():
    keys, q, windows = (
        uneven(640, 1),
        data(1, KV_HEADS, 3, DIMS, seed=9),
        data(1, KV_HEADS, 20, DIMS, seed=4),
    )
    ours = summary.summary(mx.array(keys), 32)
    assert ours.shape == (1, KV_HEADS, 20, reading.words(DIMS)) and ours.dtype == mx.uint32
    law = ref.summary(keys)
    assert np.allclose(np.stack(summary.moments(ours, DIMS), -2), ref.moments(law), atol=2e-3)
    logs = summary.estimates(mx.array(q), words_of(*law), 32)
    assert np.abs(np.array(logs) - ref.estimates(q, law)).max() < 1e-3
    beside = np.log(np.exp(q @ windows.swapaxes(-1, -2)).sum(-1))
    weight = ref.weights(ref.estimates(q, law), beside)
    mine = summary.weights(logs, mx.array(beside[..., None].astype(np.float32)))
    assert np.abs(np.array(mine) - weight).max() < 1e-3
    for share in (0.1, 0.5, 0.9):
        taken = np.array(summary.taken(mine, reading.parts(share)))
        for g in range(KV_HEADS):
            assert np.flatnonzero(taken[0, g]).tolist() == ref.chosen(weight[0, g], share).tolist()


def words_of(codes: np.ndarray, steps: np.ndarray) -> mx.array:
    """Codes [.., chunks, 2, R] and steps [.., chunks, 2] of the law as words, with zeros behind each row of codes."""
    rows = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % 4)])
    rows = rows.reshape(*rows.shape[:-2], -1).view(np.uint32)
    return mx.array(np.concatenate([rows, steps.view(np.uint32)], axis=-1))


def test_plain_ops_agree_with_the_golden_tensors():
    it, chunk = bounds.read("reading")[0], golden_reading.CHUNK
    law = it["codes"], it["steps"]
    ours = summary.summary(mx.array(it["keys"])[None], chunk)
    # A float32 sum may round a code to its neighbour, and a step.
    off = np.stack(summary.moments(ours, golden_reading.DIMS), -2)[0] - ref.moments(law)
    assert (np.abs(off) <= 1.01 * it["steps"].astype(np.float64)[..., None]).all()
    assert (np.abs(off) > 1e-3).mean() < 0.02
    q = mx.array(it["q"].astype(np.float32))[None]
    logs = summary.estimates(q, words_of(*law)[None], chunk)
    assert np.allclose(np.array(logs)[0], it["logs"], atol=2e-5, rtol=1e-6)
    weight = summary.weights(logs, mx.array(it["beside"])[None, ..., None])
    assert np.allclose(np.array(weight)[0], it["weights"], atol=1e-5)
    for number, share in enumerate(golden_reading.SHARES):
        taken = np.array(summary.taken(weight, reading.parts(share)))[0]
        assert [np.flatnonzero(row).tolist() for row in taken] == it[f"{number}.chosen"].tolist()


def test_spare_room_is_not_read():
    weight = mx.array([[[0.1, 0.5, 0.2, 0.9, 0.8]]])
    there = mx.array([[[True, True, True, False, False]]])
    assert summary.taken(weight, 128, there).tolist() == [[[False, True, True, False, False]]]
    assert summary.taken(weight, 1, there).tolist() == [[[False, True, False, False, False]]]


# -- caches by plain ops

WHOLE = CacheConfig(Side(Affine(8, 32)), Side(Affine(8, 32)))
HALF = replace(WHOLE, read=0.5)
WORDS = reading.words(DIMS)


def test_a_cache_reads_what_the_law_says():
    out, view = read(filled(HALF))
    pages, sink, live = view.pages, view.sink, view.live
    q = np.array(asked(1), np.float64).reshape(KV_HEADS, -1, DIMS) * SCALE
    for g in range(KV_HEADS):
        keys, values = (np.array(pages.decode(i, mx.float32), np.float64)[0, g] for i in range(2))
        windows = [np.concatenate([np.array(x[i])[0, g] for x in (sink, live)]) for i in range(2)]
        law = ref.attend(q[g], keys, values, windows, 0.5)
        assert off(np.array(out).reshape(KV_HEADS, -1, DIMS)[g], law) < 1e-4
    other, _ = read(filled(WHOLE))
    assert rms(out, other) > 0.01


def test_a_prompt_reads_all():
    a, b = (read(filled(config), new=20)[0] for config in (WHOLE, HALF))
    assert mx.array_equal(a, b)


def test_a_mask_of_another_kind_reads_all():
    """As with kernels, which take no such mask."""
    for kind in ("boolean", "additive"):
        found = []
        for config in (WHOLE, HALF):
            view = read(filled(config), 3)[1]
            mask = mx.tril(mx.ones((3, view.tokens), mx.bool_), view.tokens - 3)
            mask = mask if kind == "boolean" else mx.where(mask, 0.0, -1e9)
            found.append(attend(asked(3), view, SCALE, mask))
        assert mx.array_equal(*found)


def test_scores_are_capped_before_tokens_are_left_out():
    cap = 1.5
    _, view = read(filled(HALF))
    out = attend(asked(1), view, SCALE, softcap=cap)
    pages = view.pages
    q = np.array(asked(1), np.float64).reshape(KV_HEADS, -1, DIMS) * SCALE
    for g in range(KV_HEADS):
        parts = [view.sink, tuple(pages.decode(i, mx.float32) for i in range(2)), view.live]
        sides = [[np.array(x[i], np.float64)[0, g] for x in parts] for i in range(2)]
        windows = np.concatenate([q[g] @ sides[0][n].T for n in (0, 2)], axis=-1)
        weight = ref.weights(
            ref.estimates(q[g], ref.summary(sides[0][1])), np.log(np.exp(windows).sum(-1))
        )
        tokens = (ref.chosen(weight, 0.5)[:, None] * 32 + np.arange(32)).ravel()
        keys, values = (np.concatenate([a, b[tokens], c]) for a, b, c in sides)
        s = cap * np.tanh(q[g] @ keys.T / cap)
        p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
        assert off(np.array(out).reshape(KV_HEADS, -1, DIMS)[g], p @ values) < 1e-4


def test_few_pages_are_all_read():
    """Two chunks, of which a share of three quarters is both."""
    tokens, most = WHOLE.window + 1, replace(WHOLE, read=0.75)
    a, b, c = (read(filled(config, tokens=tokens))[0] for config in (WHOLE, most, HALF))
    assert mx.array_equal(a, b) and not mx.array_equal(a, c)


@pytest.mark.parametrize(
    "name", ["int4", "kivi-int4", "fill-2.25", "turbo-int4", "polar", "srft-int4"]
)
def test_a_saved_cache_reads_the_same(name):
    config = parse_kv(f"{name}+read0.4")
    if config.calibrated:
        config = replace(config, keys=replace(WHOLE.keys), values=WHOLE.values)
    cache = filled(config)
    state = cache.state
    assert not any("summary" in str(key) for key in state["pages"])
    again = CompressedKVCache.from_state(state)
    assert again.config == config
    assert mx.array_equal(read(cache)[0], read(again)[0])


def test_many_pages_of_a_file_are_summarised_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(stores, "SUMMARISED", 192)
    for factory in (None, make):
        with launch.using(factory):
            cache, sizes = filled(HALF), []
            kind = type(cache.store)
            keys_of = kind._stored_keys

            def noted(store, held, keys_of=keys_of, sizes=sizes):
                keys = keys_of(store, held)
                sizes.append(keys.shape[2])
                return keys

            monkeypatch.setattr(kind, "_stored_keys", noted)
            again = CompressedKVCache.from_state(cache.state)
            assert max(sizes) == 192 and sum(sizes) == 64 * cache.store.count
            ours, other = (x.store.pages.read()["summary"] for x in (cache, again))
            assert mx.array_equal(ours, other) and ours.shape[2] > 8


def test_what_is_taken_back_is_not_ranked():
    cache, short = filled(HALF), filled(HALF, tokens=TOKENS - 70)
    assert cache.trim(70) == 70
    assert mx.allclose(read(cache)[0], read(short)[0], atol=1e-5)


def test_summaries_are_counted():
    more = 32 * WORDS / 32 / (2 * DIMS)  # .25 of codes, and two steps
    assert 0.25 < more < 0.26
    assert HALF.bits_per_value(DIMS, DIMS) == WHOLE.bits_per_value(DIMS, DIMS) + more
    a, b = filled(WHOLE), filled(HALF)
    assert b.nbytes - a.nbytes == KV_HEADS * 2 * 4 * WORDS * b.store.pages.capacity
    assert a.store.count > 8


def test_a_file_brings_no_summaries():
    """They follow from the codes: others would be read without a look at their shape."""
    for config in (WHOLE, HALF):
        with launch.using(make):
            cache = filled(config)
            state = cache.state
            state["pages"]["summary"] = mx.zeros((1, KV_HEADS, cache.store.count, 4096), mx.uint32)
            again = CompressedKVCache.from_state(state)
            assert mx.array_equal(read(cache)[0], read(again)[0])
            held = again.store.held.get("summary")
            assert held is None if config is WHOLE else held.shape[3] == WORDS
            state["pages"]["records"] = state["pages"]["records"][..., :-8]
            with pytest.raises(UserError):
                CompressedKVCache.from_state(state)


def test_chunks_and_groups_of_channels_do_not_straddle():
    config = parse_kv("kivi-int2+kg48+page192+read0.5")
    assert config.chunk == 192
    assert parse_kv("kivi-int2+read0.5").chunk == 32
    assert parse_kv("int2+read0.5").chunk == 32


def test_bytes_in_use_count_what_chunks_are_ranked_by():
    a, b = filled(WHOLE), filled(HALF)
    more = KV_HEADS * 2 * 4 * WORDS * b.store.count
    assert usage.in_use(b) - usage.in_use(a) == more


def test_an_evaluation_decodes_token_by_token():
    assert (
        feed.decode_step([filled(HALF)]) == 1 and feed.decode_step([filled(WHOLE)]) == feed.DECODE
    )


def test_files_of_before_have_no_share():
    assert "read" not in WHOLE.as_dict()
    assert CacheConfig.from_dict(HALF.as_dict()) == HALF
    assert WHOLE.in_window(0, 1024).read == HALF.in_window(0, 1024).read == 1.0


@pytest.mark.parametrize(
    "name", ["int4+read0", "int4+read1.5", "fp16", "oja-0.75", "turbo-int4+qjl", "int4+page48"]
)
def test_what_cannot_be_read_in_part_is_refused(name):
    text = name if "read" in name else f"{name}+read0.5"
    with pytest.raises(UserError, match=r"\[CacheConfig\].*read"):
        parse_kv(text)


def test_a_benchmark_judges_the_chunks_that_were_read(monkeypatch):
    """Of near ties either may be read; what promises much less, or a chunk read twice, is wrong."""
    with launch.using(make):
        out, view = read(filled(HALF))
        assert relative_rms(out, reference(asked(1), view, SCALE)) < 1e-4
        choice = reference_of.chosen_of

        def other(*args, at: int, to: int):
            found = choice(*args)
            chunks = np.array(found.chunks)
            chunks[:, :, at] = to
            return replace(found, chunks=mx.array(chunks))

        weight = summary.weights  # all alike: any choice is as good
        monkeypatch.setattr(summary, "weights", lambda *args: mx.ones_like(weight(*args)))
        assert relative_rms(out, reference(asked(1), view, SCALE)) < 1e-4
        monkeypatch.setattr(reference_of, "chosen_of", lambda *args: other(*args, at=0, to=1))
        assert relative_rms(out, reference(asked(1), view, SCALE)) > 1e-2
        monkeypatch.undo()
        monkeypatch.setattr(summary, "weights", lambda *args: 1 / weight(*args))
        assert relative_rms(out, reference(asked(1), view, SCALE)) > 1e-2


# -- kernels

FORMATS = {
    "by token": WHOLE,
    "narrow": CacheConfig(Side(Affine(2, 32)), Side(Affine(3, 32))),
    "channels": CacheConfig(Side(Affine(2, 128, axis="channel")), Side(Affine(2, 32)), page=128),
    "groups of 48": CacheConfig(
        Side(Affine(2, 48, axis="channel")), Side(Affine(2, 32)), page=192, recent=32
    ),
    "channels of 32": CacheConfig(Side(Affine(4, 32, axis="channel")), Side(Affine(4, 32))),
    "no sink": replace(WHOLE, sink=0),
    "blocks": CacheConfig(Side(Fill(2.6, (4, 3, 2, 1))), Side(Fill(2.6, (3, 3, 2, 1)))),
    "polar": PRESETS["polar"],
    "codebook": PRESETS["turbo-int3"],
    "kvarn": PRESETS["kvarn-int2"],
}
BODIES = {
    "portable": (make, mx.float32, 2e-4),
    "metal": (make_tiles, mx.float16, 4e-3),
    "cuda": (make_mma, mx.bfloat16, 1e-2),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", FORMATS)
def test_kernels_read_what_plain_ops_read(name, body):
    factory, dtype, bound = BODIES[body]
    config = replace(FORMATS[name], read=0.3)
    for batch, new in ((1, 1), (2, 3)):
        with launch.using(factory):
            cache = filled(config, dtype, batch=batch)
            out, view = read(cache, new, dtype, batch)
        assert view.pages.plan.body in (TILES, PORTABLE)
        assert view.pages.plan.body == TILES or body == "portable"
        plain = CompressedKVCache.from_state(filled_state(config, cache, new))
        right, _ = again(plain, new, dtype, batch)
        assert rms(out.astype(mx.float32), right.astype(mx.float32)) < bound
        whole = replace(view, pages=replace(view.pages, reading=None))
        with launch.using(factory):
            all_read = attend(
                asked(new, dtype=dtype, batch=batch), whole, SCALE, "causal" if new > 1 else None
            )
        assert rms(out.astype(mx.float32), all_read.astype(mx.float32)) > 4 * bound


def filled_state(config, cache, new: int):
    """The state of a cache of kernels before its last tokens."""
    cache.trim(new)
    return cache.state


def again(cache, new: int, dtype, batch: int):
    with launch.using(None):
        return read(cache, new, dtype, batch)


def test_sequences_of_a_batch_read_what_each_reads_alone():
    """In shared arrays, with kernels; lengths that differ, one without pages."""
    lengths = (TOKENS, 130, TOKENS - 64 * 5, 64 * 3)
    with launch.using(make):
        caches = [filled(HALF, tokens=n) for n in lengths]
        alone = []
        for i, cache in enumerate(caches):
            other = CompressedKVCache.from_state(cache.state)
            pair = (mx.array(uneven(1, 60 + 3 * i + j)) for j in range(2))
            alone.append(attend(asked(1, 30 + i), other.update_and_fetch(*pair)[0], SCALE))
        batch = BatchedKVCache.merge(caches)
        pairs = [
            [mx.array(uneven(1, 60 + 3 * i + j)) for i in range(len(lengths))] for j in range(2)
        ]
        view, _ = batch.update_and_fetch(*(mx.concatenate(x) for x in pairs))
        assert isinstance(view, RaggedView)
        q = mx.concatenate([asked(1, 30 + i) for i in range(len(lengths))])
        out = attend(q, view, SCALE)
        assert off(out, mx.concatenate(alone)) < 1e-5
        back = batch.extract(2)
        assert back.store.held["summary"].shape[2] == 2 * back.store.count


@pytest.mark.parametrize("factory", [None, make, make_tiles])
def test_a_replayed_step_reads_the_same(factory):
    """The count of chunks grows on the device alone. To the last bit with kernels: the work is divided alike."""
    from mlxkv.cache.fixed.form import Numbers
    from mlxkv.cache.fixed.own import Own

    dtype = mx.float16 if factory is make_tiles else mx.float32
    with launch.using(factory):
        for tokens in (TOKENS, TOKENS - 64, TOKENS - 64 * 6, 468):
            cache, other = filled(HALF, dtype, tokens), filled(HALF, dtype, tokens)
            right, _ = read(other, 1, dtype)
            cache.windows  # noqa: B018  has the room made
            form = Own(cache, 1)
            standing = form.standing_in(form.arrays, Numbers(mx.array(form.numbers, mx.int32)))
            pair = (mx.array(uneven(1, 40 + i)).astype(dtype) for i in range(2))
            view, _ = standing.update_and_fetch(*pair)
            found = attend(asked(1, dtype=dtype), view, SCALE)
            assert mx.array_equal(found, right) if factory else off(found, right) < 1e-5


@pytest.mark.parametrize("chunks, shares", [(700, (1, 2, 3, 128, 255)), (1500, (2, 128))])
def test_a_long_context_is_chosen_from(chunks, shares, monkeypatch):
    """More chunks than a threadgroup has threads, and many that are equal; of dims that fill no word."""
    rows, dims = 2, 30
    monkeypatch.setattr(choose, "MANY", 1024)
    q = mx.zeros((1, 1, rows, dims))
    heavy = mx.array([3, 17, 255, 256, 511, 699])
    keys = mx.zeros((1, 1, chunks, dims))
    keys[:, :, heavy, 29] = 4.0
    summaries = summary.summary(mx.repeat(keys, 32, axis=2), 32)
    q[..., 29] = 2.0
    live = tuple(mx.zeros((1, 1, 16, dims)) for _ in range(2))
    for share in shares:
        chosen = choose.choose(
            *(q, q, summaries, share, 2, None, live, ((chunks * 2, 0, 16),), 1.0, 1, make), page=4
        )
        wanted = reading.count(chunks, share)
        found = chosen.chunks[0, 0].tolist()[:wanted]
        rest = [n for n in range(chunks) if n not in heavy.tolist()]
        right = [*heavy.tolist(), *rest][:wanted] if wanted > 6 else heavy.tolist()[:wanted]
        assert found == sorted(right), share
        assert chosen.lengths == ((wanted * 2, 0, 16),)


@pytest.mark.parametrize("chunks, dims", [(1100, 32), (70, 160)])
def test_many_rows_and_chunks_are_weighed(chunks, dims, monkeypatch):
    """More chunks than registers hold, more rows than are summed at a time; weights all different."""
    rows = 11
    monkeypatch.setattr(choose, "MANY", 1024)
    monkeypatch.setattr(choose, "MOST", 4)
    draw = np.random.default_rng(8).standard_normal
    means = 5 * draw((1, 1, chunks, dims)).astype(np.float32) / dims**0.5
    summaries = summary.summary(mx.repeat(mx.array(means), 32, axis=2), 32)
    q = mx.array(draw((1, 1, rows, dims)).astype(np.float32))
    live = tuple(mx.array(draw((1, 1, 16, dims)).astype(np.float32)) for _ in range(2))
    logs = summary.estimates(q, summaries, 32)
    beside = mx.logsumexp(q @ live[0].swapaxes(-1, -2), axis=-1, keepdims=True)
    weight = summary.weights(logs, beside)
    for share in (4, 100):
        chosen = choose.choose(
            *(q, q, summaries, share, 2, None, live, ((chunks * 2, 0, 16),), 1.0, 1, make), page=4
        )
        right = np.flatnonzero(np.array(summary.taken(weight, share))[0, 0])
        assert chosen.chunks[0, 0].tolist() == right.tolist()


BROKEN = {  # part of a text -> what stands there instead, and what the trial says
    "] = i;": ("] = 0;", "read twice"),
    "(chunks * size[4] + 128) / 256": ("(chunks * size[4] + 128) / 300", "read twice"),
    "return list[unit / LIST] * LIST + unit % LIST;": ("return unit;", "is off by"),
    "fma(asked, variance, mean)": ("fma(asked, -100.0f, mean)", "not those that promise most"),
}


def altered(old: str, new: str, tiled: bool):
    def factory(name, input_names, output_names, source, header=""):
        changed = [text.replace(old, new) for text in (source, header)]
        return (make_tiles if tiled else make)(name, input_names, output_names, *changed)

    factory.tiles = tiled
    return factory


@pytest.mark.parametrize("old", BROKEN)
def test_kernels_that_are_wrong_are_not_used(old):
    """And only where a share is read."""
    new, said = BROKEN[old]
    case = selftest.Case(HEADS, KV_HEADS)
    factory = altered(old, new, False)
    assert said in TRIED(HALF, DIMS, mx.float32, factory, False, case)
    assert TRIED(WHOLE, DIMS, mx.float32, factory, False, case) is None


@pytest.mark.parametrize("name", ["by token", "channels", "blocks"])
def test_kernels_that_are_right_are_used(name):
    config = replace(FORMATS[name], read=0.45)
    for factory, dtype in ((make, mx.float32), (make_tiles, mx.float16)):
        case = selftest.Case(HEADS, KV_HEADS, sinks=True, softcap=20.0)
        assert TRIED(config, DIMS, dtype, factory, factory is make_tiles, case) is None
