"""Low rank that follows the text: updates, what becomes of stored tokens, and caches that hear queries."""

import copy
import weakref
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from low_rank_cache import DIMS, HEADS, KV_HEADS, SCALE, cache, close, data, feed, start
from methods import config_named
from mlx_lm.models.cache import KVCache
from on_emulator import make

from mlxkv.cache import adaptive
from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.cache.attention import attend, decode_all
from mlxkv.codec import maps
from mlxkv.codec.maps import sample
from mlxkv.errors import UserError
from mlxkv.metal import whiten
from mlxkv.patching.trees import trim_caches
from mlxkv.serve.sessions import shapes_of
from mlxkv.spec import oja as spec

pytestmark = pytest.mark.usefixtures("trusted")


@pytest.mark.parametrize(("tokens", "dims", "rank"), [(32, 32, 24), (9, 48, 33)])
def test_the_kernel_updates_as_plain_ops_do(tokens, dims, rank):
    assert whiten.why_not(dims, rank, make) is None
    rng = np.random.default_rng(tokens)
    u = adaptive.orthonormal(mx.array(rng.standard_normal((1, 2, dims, rank))))
    x = mx.array(rng.standard_normal((1, 2, tokens, dims)).astype(np.float32))
    ours = adaptive.update(u, x, 0.5, builder=make)
    assert close(ours, adaptive.update(u, x, 0.5)) and whiten.off_orthonormal(ours) < 1e-5
    assert close(adaptive.update(u, 3000 * x, 0.5, builder=make), ours)
    for bad in (x * np.nan, x * np.inf):
        assert close(adaptive.update(u, bad, 0.5, builder=make), u, 1e-9)
    zero = adaptive.update(u, mx.zeros_like(x), 0.5, builder=make)
    assert close(zero, u, 1e-6) and whiten.off_orthonormal(zero) < 1e-5


def test_batches_of_any_length_take_few_kernels():
    """Each would be compiled, and kept: chunks of prompts teach by as many tokens as they have."""
    built = []

    def counting(**names):
        built.append(names["name"])
        return make(**names)

    u = start()
    for tokens in (1, 5, 17, 31, 32):
        x = data(tokens, tokens)
        assert close(adaptive.update(u, x, 0.5, builder=counting), adaptive.update(u, x, 0.5))
    assert len(built) == 2  # of tokens, and of the basis itself


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch):
    def spoiled(**names):
        call = make(**names)
        return lambda **kw: [1.001 * x for x in call(**kw)]

    def spoiled_inverse(**names):
        return spoiled(**names) if "INVERSE = 1" in names["source"] else make(**names)

    assert "off by" in whiten.why_not(32, 24, spoiled)
    assert "off by" in whiten.why_not(32, 24, spoiled_inverse)
    assert "does not fit" in whiten.why_not(256, 192, make)
    assert "no GPU" in whiten.why_not(32, 24, None)


@pytest.mark.parametrize("poison", (float("nan"), float("inf")))
@pytest.mark.parametrize("raw", (False, True))
def test_a_batch_that_is_not_sound_teaches_nothing(poison, raw):
    x, u = np.array(data(8)), start()
    x[0, 0, 3, 5] = poison
    made = adaptive.update(u, mx.array(x), 0.1, raw)
    assert mx.array_equal(made[:, 0], u[:, 0]) and not mx.array_equal(made[:, 1], u[:, 1])
    zero = adaptive.update(u, mx.zeros((1, KV_HEADS, 8, DIMS)), 0.1, raw)
    assert close(zero, u) and whiten.off_orthonormal(zero) < 1e-5


@pytest.mark.parametrize("name", ("static-r24", "oja-r24", "oja-r24+segments3", "oja-r24+int8"))
def test_attention_in_low_rank_is_that_over_what_comes_back(name):
    """A.3 of the paper: Eigen-N and reconstruct-then-attend are one."""
    one = cache(name)
    feed(one, 160)
    feed(one, 48, seed=5, chunk=1)
    q, view = data(1, 9, HEADS), one.keys_and_values()[0]
    keys, values = decode_all(view, mx.float32)
    expected = mx.fast.scaled_dot_product_attention(q, keys, values, scale=SCALE)
    assert close(attend(q, view, SCALE), expected, 1e-5)


def test_the_first_chunk_teaches_before_it_is_quantized():
    one = cache()
    feed(one, 128, chunk=128)
    q, k, v = data(128, 0, HEADS), data(128, 1), data(128, 2)
    seen = spec.importance(np.array(q[:, :, -32:], np.float64), np.array(k, np.float64), SCALE)
    at = spec.salient(seen, round(0.05 * 128))[0]
    layer_maps = sample(KV_HEADS, (DIMS, DIMS), one.config.fitted)
    for x, now, was in (
        (k, one.basis.keys, layer_maps.keys),
        (v, one.basis.values, layer_maps.values),
    ):
        expected = spec.update(
            np.array(was.down, np.float64), np.array(x[0], np.float64)[:, at], 0.1
        )
        assert close(now.down[0], expected)
        assert whiten.off_orthonormal(now.down) < 1e-5
    pages = one.keys_and_values()[0].pages
    u = one.basis.keys.down
    stored = k[:, :, 4 : 4 + pages.tokens] @ u
    assert pages.tokens == 96
    assert close(pages.decode(0, mx.float32), stored @ u.swapaxes(-1, -2), 1e-3)


def test_decoding_teaches_by_every_32_tokens():
    one = cache(recent=32)
    feed(one, 64)
    bases = []
    for step in range(66):
        feed(one, 1, seed=100 + step, chunk=1)
        bases.append(one.basis.keys.down)
    changed = [i for i in range(1, 66) if not mx.array_equal(bases[i], bases[i - 1])]
    assert changed == [32, 64]
    last = mx.concatenate([data(1, 100 + step + 1) for step in range(32)], axis=2)
    assert close(bases[32], adaptive.update(bases[31], last, 0.05))
    still = cache("oja-r24+prompt")
    feed(still, 64)
    before = still.basis.keys.down
    feed(still, 70, seed=3, chunk=1)
    assert mx.array_equal(still.basis.keys.down, before)


def test_what_becomes_of_stored_tokens():
    """(a) U_old^T U_new, (b) a basis per run, (c) as they are."""
    seen = {}
    for name in ("transport", "segments", "stay"):
        one = cache(f"oja-r24+fast+{name}")
        feed(one, 96, chunk=96)
        old = one.basis.keys.down
        stored = one.keys_and_values()[0].pages.decode(0, mx.float32)
        feed(one, 33, seed=7, chunk=1)
        new = one.basis.keys.down
        assert not close(old, new, 1e-3)
        found = one.keys_and_values()[0].pages.decode(0, mx.float32)[:, :, : stored.shape[2]]
        codes = stored @ old
        back = {
            "transport": codes @ old.swapaxes(-1, -2) @ new @ new.swapaxes(-1, -2),
            "segments": stored,
            "stay": codes @ new.swapaxes(-1, -2),
        }
        assert close(found, back[name], 2e-3)
        seen[name] = found
    assert not close(seen["stay"], seen["segments"], 0.01)


@pytest.mark.parametrize("segments", (1, 2, 3))
def test_runs_are_bounded_and_keep_every_page(segments):
    one = cache(f"oja-r24+segments{segments}")
    feed(one, 64)
    for round_ in range(12):
        feed(one, 40, seed=10 * round_, chunk=1 if round_ % 2 else 40)
        assert len(one.store.runs) <= segments
        assert one.store.count * 16 + one._count + 4 == one.offset
        view = one.keys_and_values()[0]
        assert view.tokens == one.offset
        for run, basis in zip(one.store.runs, one.store.bases, strict=True):
            assert run.codecs[0].transform is basis.keys
            assert whiten.off_orthonormal(basis.keys.down) < 1e-5


@pytest.mark.parametrize(
    "name",
    (
        *("oja-r24", "oja-r24+int4+segments3", "int4+keep0.5", "oja-r24+int8+pages0.5"),
        *("oja-r24+pinned", "oja-r24+int4+pinned+keep0.5"),
    ),
)
def test_saved_and_copied_caches_go_on_alike(name, monkeypatch):
    one = cache(name)
    layer_maps = one.layer_maps
    monkeypatch.setattr(maps, "find", lambda *_: layer_maps)
    if layer_maps is not None:
        object.__setattr__(layer_maps, "digest", "sample")
    feed(one, 150)
    for steps in (0, 40):
        if steps:
            feed(one, steps, seed=5, chunk=1)
        others = [
            copy.deepcopy(one),
            adaptive.AdaptiveKVCache.from_state(one.state),
            copy.copy(one),
        ]
        outs = [feed(copy.deepcopy(x), 36, seed=8, chunk=1) for x in (one, *others)]
        assert all(mx.array_equal(out, outs[0]) for out in outs[1:])
        assert all(x.nbytes <= one.nbytes for x in others)
        assert {x.windows.trimmable for x in others} == {one.windows.trimmable}


def test_a_run_of_the_calibrations_basis_keeps_it_when_saved(monkeypatch):
    """Decoded before any prompt has taught: the first run is of the calibration, the second is not."""
    one = cache("oja-r24+prompt+int8")
    monkeypatch.setattr(maps, "find", lambda *_: one.layer_maps)
    feed(one, 100, seed=4, chunk=1)
    feed(one, 64, seed=9, chunk=64)
    assert [basis.keys.down.ndim for basis in one.store.bases] == [3, 4]
    again = AdaptiveKVCache.from_state(one.state)
    for x, y in zip(
        *(decode_all(c.keys_and_values()[0], mx.float32) for c in (one, again)), strict=True
    ):
        assert mx.array_equal(x, y)


def test_the_last_tokens_of_a_prompt_stay_exact_for_good():
    """OjaKV, section 5.1. By default the window slides on: what ended a prompt is stored in the end."""
    plain, pinned = cache("oja-r24"), cache("oja-r24+pinned")
    keys = np.array(data(150, 1))[:, :, np.r_[:4, 134:150]]  # the first 4 and the last 16

    def holds(one):
        view = one.keys_and_values()[0]
        exact = [np.array(x[0]) for x in (view.sink, view.recent) if x is not None]
        off = np.abs(np.concatenate(exact, 2)[:, :, None] - keys[:, :, :, None]).max((1, 4))
        return bool((off[0].min(1) == 0).all())

    for one in (plain, pinned):
        feed(one, 150)
        feed(one, 8, seed=5, chunk=1)
        assert holds(one)
        feed(one, 120, seed=6, chunk=1)
        assert one.offset == one.keys_and_values()[0].tokens == 278
    assert holds(pinned) and not holds(plain)
    assert pinned._sunk == plain._sunk + 16
    feed(pinned, 64, seed=7)  # of the first prompt alone: a chat would end without pages
    feed(pinned, 40, seed=8, chunk=1)
    assert holds(pinned) and pinned._sunk == plain._sunk + 16


@pytest.mark.parametrize("tokens", (6, 20, 36, 150))
def test_pinned_tokens_change_nothing_but_what_is_exact(tokens):
    """Full rank of a fixed basis loses nothing but float16's last bits: whatever is stored, attention is the same."""
    full = cache("oja-r32+prompt+pinned")
    object.__setattr__(full.config.keys.low, "prefill_rate", 0.0)
    object.__setattr__(full.config.values.low, "prefill_rate", 0.0)
    exact = cache("fp16+keep0.999999")
    assert close(*(feed(one, tokens, chunk=200) for one in (full, exact)), 2e-3)
    for steps, chunk in ((1, 1), (40, 1), (7, 7), (30, 30), (5, 1)):
        outs = [feed(one, steps, seed=tokens + steps, chunk=chunk) for one in (full, exact)]
        assert close(*outs, 2e-3)
        assert full.offset == full.keys_and_values()[0].tokens
    assert full.pinned == tokens or tokens <= 8


def test_pinned_tokens_cannot_be_taken_back_alone():
    one = cache("oja-r24+pinned")
    feed(one, 150)
    feed(one, 6, seed=5, chunk=1)
    assert one.pinned == 150 and one.windows.trimmable == 6
    before = decode_all(one.keys_and_values()[0], mx.float32)
    with pytest.raises(UserError, match="choose at most 6, or all 156"):
        one.trim(7)
    can_keep = one.windows.can_keep
    assert can_keep(150) and not can_keep(149) and not can_keep(20) and can_keep(0)
    one.trim(6)
    for x, y in zip(decode_all(one.keys_and_values()[0], mx.float32), before, strict=True):
        assert mx.array_equal(x, y[:, :, :150])
    feed(one, 90, seed=5, chunk=1)
    assert one.windows.can_keep(160) and one.windows.trimmable == 90
    assert one.trim(10**6) and one.offset == 0 and one.empty() and not one.pinned
    feed(one, 40)


def test_moving_bases_of_full_rank_are_not_kept_by_anyone():
    """Not by a cache that has learned, either, but for those of its pages."""
    one, made = cache("oja-1.0+int8+segments3"), []
    plain = adaptive.transform_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            adaptive, "transform_of", lambda u: made.append(weakref.ref(t := plain(u))) or t
        )
        feed(one, 300, chunk=50)
    assert one.store.runs[-1].codecs[0].is_online and one.basis.keys.down.shape[-1] == DIMS
    assert len(made) > 8 and sum(ref() is not None for ref in made) <= 6


def kept_by_spec(q, k, sink, pages, keep, page=16):
    seen = spec.importance(np.array(q[:, :, -32:], np.float64), np.array(k, np.float64), SCALE)
    votes = spec.votes(seen, KV_HEADS)[..., sink : sink + pages * page]
    return sink + spec.kept(votes, max(1, round(keep * pages)) * page)


def test_selection_keeps_what_the_last_queries_look_at_and_positions():
    """SnapKV on full-precision pages: attention is that over the tokens that stay."""
    one = cache("fp16+keep0.25", page=16)
    feed(one, 160, chunk=160)
    q, k, v = data(160, 0, HEADS), data(160, 1), data(160, 2)
    pages, before = one.store.count, one.nbytes
    new = [data(1, seed, heads) for seed, heads in ((20, HEADS), (21, KV_HEADS), (22, KV_HEADS))]
    view, _ = one.update_and_fetch(*new[1:])
    out = attend(new[0], view, SCALE)
    at = kept_by_spec(q, k, 4, pages, 0.25)
    rest = np.arange(4 + pages * 16, 160)
    index = [np.concatenate([np.arange(4), at[0, g], rest]) for g in range(KV_HEADS)]
    left = []
    for x, last in ((k, new[1]), (v, new[2])):
        own = mx.stack([x[0, g][mx.array(i)] for g, i in enumerate(index)])[None]
        left.append(mx.concatenate([own, last], axis=2))
    assert close(out, mx.fast.scaled_dot_product_attention(new[0], *left, scale=SCALE), 1e-5)
    assert one.offset == 161 and one.dropped == (pages - one.store.count) * 16
    assert one.nbytes < before and not one.is_trimmable()
    assert one.make_mask(3, return_array=True).shape == (3, 161 - one.dropped + 3)
    assert one.trim(1) == 1 and one.offset == 160
    with pytest.raises(UserError, match="choose at most [0-9]+, or all 160"):
        one.trim(140)
    assert not trim_caches([one], 160, 30) and one.offset == 160  # the prompt goes as a whole
    with pytest.raises(Exception, match="whole context; got a mask with a window of 8"):
        one.make_mask(3, window_size=8)


def test_a_prompt_that_was_cut_is_not_chosen_from():
    """Its last queries are gone."""
    one = cache("fp16+keep0.25")
    feed(one, 160, chunk=160)
    one.trim(3)
    feed(one, 1, seed=3, chunk=1)
    assert one.offset == 158 and one.dropped == 0


def test_pages_that_were_cut_off_are_no_longer_those_that_stay():
    """Of four pages 0.9 are four; a later prompt has eight, and one of them goes."""
    one = cache("fp16+keep0.9")
    feed(one, 88, chunk=88)
    feed(one, 1, seed=3, chunk=1)
    assert one.store.count == 4 and one.dropped == 0
    one.trim(80)
    feed(one, 148, seed=5, chunk=148)
    feed(one, 1, seed=7, chunk=1)
    assert one.dropped == 16


def test_a_cut_behind_what_was_chosen_takes_no_quantize_back():
    """The exact page is of tokens that may be gone."""
    one = cache("fp16+keep0.25")
    feed(one, 160, chunk=160)
    feed(one, 1, seed=3, chunk=1)
    before = decode_all(one.keys_and_values()[0], mx.float32)
    one.trim(14)
    for x, y in zip(decode_all(one.keys_and_values()[0], mx.float32), before, strict=True):
        assert mx.array_equal(x, y[:, :, :-14])


def test_tokens_that_were_taken_back_teach_nothing():
    one, fresh = cache(recent=32), cache(recent=32)
    for each in (one, fresh):
        feed(each, 64)
    feed(one, 20, seed=3, chunk=1)
    one.trim(20)
    for step in range(36):
        for each in (one, fresh):
            feed(each, 1, seed=100 + step, chunk=1)
        assert mx.array_equal(one.basis.keys.down, fresh.basis.keys.down)


@pytest.mark.parametrize(
    "name",
    ("kivi-int2+keep0.5", "turbo-int2+keep0.5", "polar-tree+keep0.5", "oja-r24+srft-int3+keep0.5"),
)
def test_selection_goes_with_every_format(name):
    """Where tokens share scales, whole pages go."""
    made = config_named(name)
    made = replace(made, sink=4, recent=16)
    layer_maps = sample(KV_HEADS, (DIMS, DIMS), made.fitted) if made.calibrated else None
    one = AdaptiveKVCache(made, layer_maps)
    tokens = 15 + 5 * made.page
    feed(one, tokens, chunk=tokens)
    pages, before = one.store.count, one.store.read(0, one.store.count).decode(0, mx.float32)
    feed(one, 1, seed=4, chunk=1)
    assert one.store.count == max(1, round(pages / 2))
    assert one.offset == tokens + 1 == one.dropped + one.keys_and_values()[0].tokens
    rows = np.array(before.reshape(-1, DIMS))
    after = one.store.read(0, one.store.count).decode(0, mx.float32)
    if "+keep" not in name or "oja" not in name:
        # A product of another shape transforms them back: equal but for the last bits.
        apart = [np.abs(rows - row).max(-1).min() for row in np.array(after.reshape(-1, DIMS))]
        assert max(apart) < 1e-5


@pytest.mark.parametrize(
    "name", ("oja-r24", "oja-r24+int8+segments3", "int4+keep0.25", "oja-r24+pinned")
)
def test_a_server_sets_enough_aside(name):
    """Bases besides pages; and all pages of a prompt, which stay until it is read, and of the reply."""
    one = cache(name)
    feed(one, 1)
    (shape,) = shapes_of([one])
    assert shape.plain.held(100) == shapes_of([filled_plainly(100)])[0].held(100)
    for round_ in range(6):
        feed(one, 64 if round_ < 2 else 40, seed=round_, chunk=64 if round_ < 2 else 4)
        asked = 0 if one._queries is None else one._queries[0].nbytes  # of so many query heads
        assert one.nbytes - asked <= shape.allocated(one.offset, 64, most=True)


def filled_plainly(tokens: int) -> KVCache:
    plain = KVCache()
    plain.update_and_fetch(data(tokens), data(tokens))
    return plain
