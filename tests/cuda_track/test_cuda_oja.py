"""Low rank and token selection in torch, beside MLX: the same golden rows, bases, codes, tokens kept and
files."""

from dataclasses import replace

import low_rank_cache as mlx
import numpy as np
import pytest
import torch
from low_rank_cache import DIMS, HEADS, KV_HEADS, SCALE
from methods import config_named
from tensors import to_torch

from cuda_track.cache import adaptive, choose
from cuda_track.cache.attention import attend
from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.cache.view import CodePages, Parts
from cuda_track.codec import maps
from cuda_track.kernels.pool import PoolPages
from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.cache.compressed import CompressedKVCache as MlxCache
from mlxkv.codec.maps import sample
from mlxkv.errors import UserError
from mlxkv.formats.names import parse_kv
from mlxkv.formats.records import NAMES

NAMED = (
    *(
        "static-r24+int4",
        "oja-r24",
        "oja-r24+int8+segments3",
        "oja-r24+fast+transport",
    ),
    *("oja-r24+stay+raw", "fp16+keep0.25", "int4+pages0.5"),
    "oja-r24+int4+pinned+keep0.5",
    *("kivi-int2+keep0.5", "oja-r24+all/int8"),
)


def data(tokens: int, seed: int, heads: int = KV_HEADS, batch: int = 1) -> np.ndarray:
    return np.array(mlx.data(tokens, seed, heads, batch))


def caches(name: str) -> tuple[CompressedKVCache, MlxCache]:
    """The same cache on both sides, its bases random."""
    config = mlx.config(name, config_named(name).page if "kivi" in name else 16)
    mine = theirs = None
    if config.calibrated:
        theirs = sample(KV_HEADS, (DIMS, DIMS), config.fitted)
        sides = (getattr(theirs, side) for side in NAMES)
        pairs = (maps.pair(np.array(x.down), np.array(x.up)) for x in sides)
        mine = maps.LayerMaps(*pairs, "sample", "0")
    if not config.needs_queries:
        return CompressedKVCache(config, mine), MlxCache(config, theirs)
    return adaptive.AdaptiveKVCache(config, mine), AdaptiveKVCache(config, theirs)


def feed(cache, tokens: int, seed: int = 0, chunk: int = 64, batch: int = 1) -> np.ndarray:
    """`tokens` tokens through a cache of either side; what attention gave out last."""
    if isinstance(cache, MlxCache):
        return np.array(mlx.feed(cache, tokens, seed, chunk, batch))
    heads = HEADS, KV_HEADS, KV_HEADS
    q, k, v = (torch.from_numpy(data(tokens, seed + i, h, batch)) for i, h in enumerate(heads))
    for start in range(0, tokens, chunk):
        part = slice(start, min(start + chunk, tokens))
        view = cache.update_and_fetch(k[:, :, part], v[:, :, part])
        out = attend(q[:, :, part], view, SCALE, "causal")
    return out.numpy()


def apart(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2)))


def test_caches_learn_and_keep_what_those_of_mlx_do(subtests):
    for name in NAMED:
        with subtests.test(name=name):
            ours, theirs = caches(name)
            for tokens, seed, chunk in ((300, 0, 150), (40, 5, 1), (90, 9, 90), (2, 12, 1)):
                found = [feed(cache, tokens, seed, chunk) for cache in (ours, theirs)]
                assert apart(*found) < 0.01  # a code at a boundary may differ
                assert ours.windows == theirs.windows
                if ours.config.needs_queries:
                    assert ours.pinned == theirs.pinned
            assert ours.windows.dropped > 0 or ours.config.keep == 1
            mine, right = (c.store.state for c in (ours, theirs))
            if not ours.config.needs_queries:
                mine, right = ({"run0": x, "counts": None} for x in (mine, right))
            assert set(mine) == set(right)
            right = to_torch({n: x for n, x in right.items() if n != "counts"})
            for n, x in right.items():
                for side, y in x.items():
                    if n.startswith("basis"):
                        assert (mine[n][side] - y).abs().max() < 1e-4
                    elif "codes" in y:
                        pair = [
                            z["codes"].contiguous().view(torch.uint8) for z in (mine[n][side], y)
                        ]
                        assert (pair[0] != pair[1]).float().mean() < 2e-3


def test_rows_are_chosen_with_their_bases(subtests):
    """Beams: rows of a batch take their bases, their queries and their pages along."""
    for name in ("oja-r24+int8", "oja-r24+transport+keep0.5"):
        with subtests.test(name=name):
            check_rows_are_chosen_with_their_bases(name)


def check_rows_are_chosen_with_their_bases(name):
    both = caches(name)[0]
    feed(both, 190, batch=2)
    both.select(torch.tensor([1, 1]))
    out = feed(both, 40, 5, 1, batch=2)
    for row in (0, 1):
        alone = caches(name)[0]
        for tokens, seed, chunk, of in ((190, 0, 64, 1), (40, 5, 1, row)):
            q, k, v = (
                torch.from_numpy(data(tokens, seed + i, heads, 2)[of : of + 1])
                for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
            )
            for start in range(0, tokens, chunk):
                part = slice(start, min(start + chunk, tokens))
                view = alone.update_and_fetch(k[:, :, part], v[:, :, part])
                last = attend(q[:, :, part], view, SCALE, "causal").numpy()
        assert apart(out[row : row + 1], last) < 0.01
        assert alone.offset == both.offset and alone.dropped == both.dropped


def test_trim_and_forget():
    one = caches("oja-r24+fast")[0]
    feed(one, 150)
    feed(one, 40, 5, 1)
    whole = one.view().whole(torch.float32)
    assert type(one.view().pages) is Parts
    for n in (3, 20, 70):
        one.trim_to(one.offset - n)
        quantized = one._sunk + one._count_pages * one.config.page
        for x, y in zip(one.view().whole(torch.float32), whole, strict=True):  # behind: exact again
            assert torch.allclose(x[:, :, :quantized], y[:, :, :quantized], atol=1e-6)
    one.clear()
    assert (one.offset, one.nbytes, one.basis) == (0, 0, one.layer_maps)
    kept = caches("fp16+keep0.25")[0]
    feed(kept, 160, chunk=160)
    feed(kept, 1, 3)
    assert kept.trim(1) == 1 and kept.offset == 160
    with pytest.raises(UserError, match="choose at most [0-9]+, or all 160"):
        kept.trim(140)
    assert not kept.windows.can_keep(30) and kept.offset == 160  # the prompt goes as a whole


def test_what_cannot_be_is_refused():
    one = caches("fp16+keep0.25")[0]
    view = one.update_and_fetch(*(torch.from_numpy(data(160, s)) for s in (1, 2)))
    padded = torch.ones(160, 160).tril().bool()[None, None]
    with pytest.raises(UserError, match="prompts without padding"):
        attend(torch.from_numpy(data(160, 0, HEADS)), view, SCALE, padded)
    other, _ = caches("static-r24+int4")
    with pytest.raises(UserError, match="transforms of 2 kv heads; got keys of 4"):
        other.update_and_fetch(*(torch.from_numpy(data(160, s, HEADS)) for s in (1, 2)))
    config = parse_kv("static-0.75+int4")
    with choose.using(choose.TRITON), pytest.raises(UserError, match="low rank has no Triton"):
        choose.store(
            config, (128, 128), torch.device("cpu"), caches("static-r24+int4")[0].layer_maps
        )


def test_triton_reads_what_was_kept(subtests):
    """In its interpreter, against plain ops: pages that were chosen from stay in a pool."""
    for name in ("int4+pages0.5", "naive-int4+keep0.5"):
        with subtests.test(name=name):
            pytest.importorskip("cuda_track.kernels.interpreter")
            torch.manual_seed(0)
            steps = [[torch.randn(1, h, n, 64) for h in (4, 2, 2)] for n in (300, 1)]
            outs, kept = [], []
            for way in (choose.TRITON, choose.OPS):
                with choose.using(way):
                    one = adaptive.AdaptiveKVCache(replace(config_named(name), sink=16, recent=16))
                    for q, k, v in steps:
                        view = one.update_and_fetch(k, v)
                        outs.append(attend(q, view, 0.125, "causal"))
                kept.append((one.dropped, type(view.pages)))
            assert kept == [(128, PoolPages), (128, CodePages)]
            assert apart(outs[1].numpy(), outs[3].numpy()) < 2e-3
