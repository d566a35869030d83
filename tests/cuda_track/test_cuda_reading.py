"""Reading fewer pages on the torch track: golden tensors, and caches beside MLX's."""

from __future__ import annotations

from dataclasses import replace

import golden_reading
import mlx.core as mx
import numpy as np
import pytest
import torch
from samples import data

from cuda_track.cache import choose, reading
from cuda_track.cache.attention import attend, weights
from cuda_track.cache.compressed import CompressedKVCache
from mlxkv.cache import attention as theirs
from mlxkv.cache.compressed import CompressedKVCache as Theirs
from mlxkv.errors import UserError
from mlxkv.formats.config import Affine, CacheConfig, Side
from mlxkv.formats.rules.reading import count, parts
from mlxkv.spec import bounds
from mlxkv.spec import reading as law

WHOLE = CacheConfig(Side(Affine(4, 32)), Side(Affine(4, 32)))
HALF = replace(WHOLE, read=0.5)
HEADS, KV_HEADS, DIMS = 4, 2, 64


def test_golden_tensors():
    it, chunk = bounds.read("reading")[0], golden_reading.CHUNK
    ours = reading.moments(reading.summary(torch.from_numpy(it["keys"])[None], chunk))
    off = torch.stack(ours, -2)[0].numpy() - law.moments((it["codes"], it["steps"]))
    # A float32 sum may round a code to its neighbour.
    assert (np.abs(off) <= 1.01 * it["steps"].astype(np.float64)[..., None]).all()
    assert (np.abs(off) > 1e-3).mean() < 0.02
    q = torch.from_numpy(it["q"]).float()[None]
    stored = [it["codes"].reshape(*it["codes"].shape[:2], -1), it["steps"].view(np.uint8)]
    summaries = torch.from_numpy(np.concatenate(stored, axis=-1))[None]
    logs = reading.estimates(q, summaries, chunk)
    assert np.allclose(logs[0].numpy(), it["logs"], atol=2e-5, rtol=1e-6)
    weight = reading.weights(logs, torch.from_numpy(it["beside"])[None, ..., None])
    assert np.allclose(weight[0].numpy(), it["weights"], atol=1e-5)
    for number, share in enumerate(golden_reading.SHARES):
        taken = reading.taken(weight, parts(share))[0].numpy()
        assert [np.flatnonzero(row).tolist() for row in taken] == it[f"{number}.chosen"].tolist()


@pytest.mark.parametrize("new", [1, 3])
def test_both_tracks_read_the_same(new):
    slow = np.repeat(data(2, KV_HEADS, 16, DIMS, seed=1), 64, axis=2)
    keys, values = (data(2, KV_HEADS, 1024, DIMS, seed=i) + slow for i in (2, 3))
    q = 0.7 * data(2, HEADS, new, DIMS, seed=4)
    out = {}
    for config in (WHOLE, HALF):
        ours, mine = CompressedKVCache(config), Theirs(config)
        for start, stop in ((0, 900), (900, 900 + new)):
            some = [x[:, :, start:stop] for x in (keys, values)]
            view = ours.update_and_fetch(*map(torch.from_numpy, some))
            other, _ = mine.update_and_fetch(*map(mx.array, some))
        mask = "causal" if new > 1 else None
        found = attend(torch.from_numpy(q), view, DIMS**-0.5, mask).numpy()
        right = np.array(theirs.attend(mx.array(q), other, DIMS**-0.5, mask))
        assert np.abs(found - right).max() < 1e-4
        out[config] = found
    assert np.abs(out[WHOLE] - out[HALF]).max() > 1e-2


def test_padding_is_not_read():
    """A row of a batch that begins with padding reads what it reads alone; its share is of what it has."""
    keys, values = (data(1, KV_HEADS, 901, DIMS, seed=i) for i in (2, 3))
    keys[:, :, :64] *= 9  # would be chosen first
    q, padded = 0.7 * data(1, HEADS, 1, DIMS, seed=4), 320
    cache = CompressedKVCache(HALF)
    for start, stop in ((0, 900), (900, 901)):
        some = (torch.from_numpy(x[:, :, start:stop].copy()) for x in (keys, values))
        view = cache.update_and_fetch(*some)
    mask = torch.ones(1, 1, 1, 901, dtype=torch.bool)
    mask[..., :padded] = False
    weight = weights(torch.from_numpy(q), view, DIMS**-0.5, mask)[0, :, 0]
    start, pages = 64, view.pages.tokens
    chunks = weight[:, start : start + pages].unflatten(-1, (-1, 32)).sum(-1) > 0
    visible = (pages - (padded - start)) // 32
    assert not chunks[:, : (padded - start) // 32].any()
    assert (chunks.sum(-1) == parts_read(visible)).all()


def parts_read(chunks: int) -> int:
    return count(chunks, parts(HALF.read))


def test_a_saved_cache_is_ranked_again():
    cache = CompressedKVCache(HALF)
    cache.update_and_fetch(
        *(torch.from_numpy(data(1, KV_HEADS, 700, DIMS, seed=i)) for i in (0, 1))
    )
    store = cache._store
    assert set(store.state) == {"keys", "values"}
    other = type(store)(HALF, store.codecs)
    other.restore(store.state, store.count)
    mine, again = (x.read(0, x.count).reading.summaries for x in (store, other))
    assert torch.equal(mine, again)


def test_kernels_say_why_they_do_not_run():
    with choose.using(choose.TRITON), pytest.raises(UserError, match="by plain ops alone"):
        choose.store(HALF, (DIMS, DIMS), torch.device("cpu"))
