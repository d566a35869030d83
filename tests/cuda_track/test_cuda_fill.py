"""Bits by direction in Triton's interpreter: their order in the pool, sealing, attention, prefill, caches."""

import random
import re

import numpy as np
import pytest
import torch

pytest.importorskip("cuda_track.kernels.interpreter")

from cuda_track import bench
from cuda_track.cache import choose
from cuda_track.cache.attention import attend, why_not
from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.cache.stores import Paged
from cuda_track.cache.view import CodePages, View
from cuda_track.codec import fill, transform
from cuda_track.codec.codec import Codec
from cuda_track.codec.maps import LayerMaps
from cuda_track.kernels import launch, layout
from cuda_track.kernels.filled import kernels
from mlxkv.errors import UserError
from mlxkv.formats.config import Affine, CacheConfig, Fill, Side
from mlxkv.spec.bounds import rms

torch.set_num_threads(1)
BOUND = 2e-3  # weights of values are float16 in the kernel
PAGE, PAGES = 32, 3
CPU = torch.device("cpu")


def maps(heads: int, dims: int, stored: int, rng) -> transform.Transform:
    """A dense map of each kv head, not orthogonal, of which the first dims are stored."""
    down = np.linalg.qr(rng.standard_normal((heads, dims, dims)))[0]
    down *= rng.uniform(0.5, 2, (heads, 1, dims))
    return transform.of(down[:, :, :stored], np.linalg.inv(down)[:, :stored])


def made(dims: int, heads: int, keys: tuple[int, ...], values: tuple[int, ...], page: int = PAGE):
    """(configuration, maps) of a layer with these widths; keys lose a mean."""
    rng = np.random.default_rng(dims + len(keys))
    turns = (maps(heads, dims, 16 * len(widths), rng) for widths in (keys, values))
    mean = torch.tensor(rng.standard_normal((heads, 1, dims))).float()
    sides = Side(Fill(2.0, keys), "fill-centred"), Side(Fill(2.0, values), "fill")
    return CacheConfig(*sides, sink=16, recent=16, page=page), LayerMaps(*turns, mean=mean)


# -- the order in the pool


def test_pages_of_a_pool_take_the_bytes_of_files_and_lose_nothing():
    draw = random.Random(0)
    for _ in range(40):
        widths = sorted(draw.choice((8, 4, 3, 2, 1)) for _ in range(draw.randint(1, 16)))
        spec, page = Fill(2.0, tuple(widths[::-1])), draw.choice((16, 32, 64, 128))
        code = Codec(Side(spec), spec.dims, page)
        stored = code.encode(torch.randn(2, 3, 2 * page, spec.dims))
        for keys in (True, False):
            at = layout.side(spec, spec.dims, page, keys)
            pool = at.arrange(stored)
            for name, (shape, dtype) in at.shapes(3).items():
                assert pool[name].shape[2:] == shape and pool[name].dtype == dtype
            assert sum(x.nbytes for x in pool.values()) == sum(x.nbytes for x in stored.values())
            back = at.restore(pool)
            assert all(torch.equal(back[name], stored[name]) for name in stored)


@pytest.mark.parametrize("bits", (8, 4, 3, 2, 1))
def test_no_code_crosses_a_field(bits):
    for blocks in range(1, 17):
        for more in ((), (1,), (1, 1)):
            at = layout.FillLayout(Fill(2.0, (bits,) * blocks + more), 64, True)
            taken = [0] * len(at.fields)
            for _, _, count, field, bit in at.pieces:
                mask = ((1 << count) - 1) << bit
                assert bit + count <= at.fields[field][1] and not taken[field] & mask
                taken[field] |= mask


# -- PTX, which the interpreter does not run


def ran(text: str, *operands: np.ndarray) -> np.ndarray:
    """What a snippet of PTX computes. operands: $1 and on, uint32."""
    names = {f"${i}": x.astype(np.uint64) for i, x in enumerate(operands, 1)}

    def value(name: str):
        return names[name] if name in names else np.uint64(int(name, 0))

    for line in re.findall(r"\b(\w+)\.b32 ([^;]+);", text):
        out, *given = (x.strip() for x in line[1].split(","))
        if line[0] == "reg":
            continue
        if line[0] == "lop3":
            assert given.pop() == "0xea"  # (a & b) | c
            a, b, c = map(value, given)
            names[out] = (a & b) | c
        else:
            a, by = map(value, given)
            names[out] = (a >> by if line[0] == "shr" else a << by) & np.uint64(0xFFFFFFFF)
    return names["$0"].astype(np.uint32)


def test_ptx_unpacks_as_plain_operations_do():
    rng = np.random.default_rng(0)
    words, tops = (rng.integers(0, 2**32, 500, dtype=np.uint32) for _ in "ab")
    halves = words.view(np.uint16)

    def both(mask: int) -> np.ndarray:
        return np.full(500, mask * 0x10001, np.uint32)

    for bits in (8, 4, 2, 1):
        for at in range(0, 16, bits):
            word = ran(kernels.DOWN.value, words, np.full(500, 8)) if at >= 8 else words
            mask = both(((1 << bits) - 1) << at % 8)
            found = ran(kernels.MASKED.value, word, mask, mask).view(np.float16)
            code = (halves >> at) & ((1 << bits) - 1)
            assert (found == 1024 + 2.0 ** (at % 8) * code).all(), (bits, at)
    for low in range(0, 8, 2):
        for top in range(16):
            by = low + 2 - top
            text = (kernels.JOINED_UP if by >= 0 else kernels.JOINED_DOWN).value
            shift = np.full(500, abs(by))
            masks = [x for x in (both(3 << low), both(4 << low)) for _ in "ab"]
            found = ran(text, words, tops, shift, shift, *masks).view(np.float16)
            code = ((halves >> low) & 3) | ((tops.view(np.uint16) >> top) & 1) << 2
            assert (found == 1024 + 2.0**low * code).all(), (low, top)


# -- attention, sealing and prefill

# D, H, G, L, batch, widths of keys and of values, dtype
CASES = {
    "one head, all dims": (64, 1, 1, 1, 1, (4, 3, 2, 1), (3, 3, 2, 1), torch.float32),
    "pairs, fewer dims": (64, 4, 2, 1, 2, (4, 3, 1), (2, 1), torch.float16),
    "fours": (128, 8, 2, 1, 1, (4, 4, 3, 3, 2, 2, 1, 1), (3, 3, 2, 2, 2, 1, 1), torch.bfloat16),
    "a draft": (128, 4, 2, 4, 2, (8, 4, 3, 1), (4, 2, 1), torch.float32),
    "wide": (256, 2, 1, 1, 1, (8, 4, 3, 3, 2, 2, 1, 1, 1, 1), (3,) * 3 + (2,) * 9, torch.float16),
}
QUICK = ("one head, all dims", "pairs, fewer dims", "fours")


@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_attention_over_blocks(case, monkeypatch):
    dims, heads, kv_heads, new, batch, keys, values, dtype = CASES[case]
    torch.manual_seed(0)
    config, turns = made(dims, kv_heads, keys, values)
    assert launch.why_not(config, (dims, dims), CPU) is None
    codecs = tuple(
        Codec(side, dims, PAGE, turn)
        for side, turn in ((config.keys, turns.keys), (config.values, turns.values))
    )
    pair = tuple(torch.randn(batch, kv_heads, PAGES * PAGE, dims).to(dtype) for _ in "kv")
    store, sealed = Paged(config, codecs), Paged(config, codecs, seal=launch.seal)
    store.append(pair, PAGES)
    sealed.append(pair, PAGES)
    right, found = store.read(0, PAGES).stored, sealed.read(0, PAGES).stored
    for code, ours, theirs in zip(codecs, found, right, strict=True):
        step = (ours["scale"].float() - theirs["scale"].float()).abs()
        assert (step <= 2**-10 * theirs["scale"].float()).all()
        ours, theirs = (fill.unpack(code.spec, x["codes"]) for x in (ours, theirs))
        gap = (ours - theirs).abs()
        assert gap.max() <= 1
        assert gap.sum() <= 2e-4 * gap.numel()  # sums in another order, at a boundary
    windows = [
        tuple(torch.randn(batch, kv_heads, n, dims).to(dtype) for _ in "kv") for n in (21, 16)
    ]
    view = View(*windows, store.read(0, PAGES))
    floats = (tuple(x.float() for x in pair) for pair in windows)
    twin = View(*floats, CodePages(codecs, right, PAGES * PAGE))
    q = torch.randn(batch, heads, new, dims).to(dtype)
    logits = torch.randn(heads)
    mask = "causal"
    if batch > 1 and new == 1:  # one row begins inside a page
        mask = torch.ones(batch, 1, 1, view.tokens, dtype=torch.bool)
        mask[1, ..., : 16 + PAGE + 5] = False
    bound = 2 * BOUND if dtype == torch.bfloat16 else BOUND  # that of the output itself
    assert why_not(q, view, mask) is None
    want = attend(q.float(), twin, dims**-0.5, mask, logits).numpy()
    assert rms(attend(q, view, dims**-0.5, mask, logits).float().numpy(), want) < bound
    monkeypatch.setattr(launch, "MANY", 0)  # rows that share programs before and after
    assert rms(attend(q, view, dims**-0.5, mask, logits).float().numpy(), want) < bound


def test_capped_scores():
    torch.manual_seed(0)
    config, turns = made(64, 1, (4, 2, 1), (3, 2))
    codecs = (
        Codec(config.keys, 64, PAGE, turns.keys),
        Codec(config.values, 64, PAGE, turns.values),
    )
    store = Paged(config, codecs)
    store.append(tuple(torch.randn(1, 1, 2 * PAGE, 64) for _ in "kv"), 2)
    pages = store.read(0, 2)
    live, q = tuple(torch.randn(1, 1, 9, 64) for _ in "kv"), 3 * torch.randn(1, 2, 2, 64)
    twin = View(live, None, CodePages(codecs, pages.stored, 2 * PAGE))
    out = attend(q, View(live, None, pages), 0.125, "causal", None, 1.5)
    assert rms(out.numpy(), attend(q, twin, 0.125, "causal", None, 1.5).numpy()) < BOUND


@pytest.mark.parametrize("page", (16, 64, 128))
def test_pages_of_other_sizes(page):
    """Words that tokens share belong to one turn of a program; pages of 128 have two."""
    torch.manual_seed(0)
    config, turns = made(64, 1, (4, 3, 2, 1), (3, 2, 2), page)
    pair, q = [torch.randn(1, 1, 3 * page + 60, 64) for _ in "kv"], torch.randn(1, 2, 1, 64)
    out = []
    for way in (choose.TRITON, choose.OPS):
        with choose.using(way):
            cache = CompressedKVCache(config, turns)
            cache.update_and_fetch(*pair)
            out.append(attend(q, cache.view(), 0.125).numpy())
    assert rms(*out) < BOUND


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("widths", ((4, 3, 2, 1), (4, 2)))
def test_prefill_reads_what_was_sealed(dtype, widths):
    """All dims stored: in the stored domain; fewer: in the model's, since windows lose nothing."""
    torch.manual_seed(0)
    config, turns = made(64, 2, widths, widths)
    pair = [torch.randn(2, 2, 200, 64).to(dtype) for _ in "kv"]
    q = torch.randn(2, 4, 13, 64).to(dtype)
    with choose.using(choose.TRITON):
        cache = CompressedKVCache(config, turns)
        cache.update_and_fetch(*pair)
        view = cache.view()
        out = attend(q, view, 0.125, "causal").float().numpy()
    pages = view.pages
    floats = (tuple(x.float() for x in pair) for pair in (view.live, view.sink))
    twin = View(*floats, CodePages(pages.codecs, pages.stored, pages.tokens))
    right = attend(q.float(), twin, 0.125, "causal").numpy()
    assert rms(out, right) < (1e-5 if dtype == torch.float32 else BOUND)


def test_a_cache_in_a_pool_is_a_cache():
    """Appending, sealing, trimming, rows in another order, states: as with plain ops."""
    config, turns = made(64, 1, (4, 3, 1), (3, 2, 2, 1))
    caches = {}
    for way in (choose.TRITON, choose.OPS):
        torch.manual_seed(1)
        with choose.using(way):
            cache = caches[way] = CompressedKVCache(config, turns)
            for tokens in (100, 1, 60):
                cache.update_and_fetch(*(torch.randn(2, 1, tokens, 64) for _ in "kv"))
            cache.cut(91)
            cache.update_and_fetch(*(torch.randn(2, 1, 90, 64) for _ in "kv"))
            cache.select(torch.tensor([1, 0, 1]))
    ours, plain = caches[choose.TRITON], caches[choose.OPS]
    assert type(ours._store) is Paged
    for side in ("keys", "values"):
        for name, x in plain.state["pages"][side].items():
            assert torch.equal(ours.state["pages"][side][name], x)
    with choose.using(choose.TRITON):
        again = CompressedKVCache.from_state(plain.state, lambda *_: turns)
    q = torch.randn(3, 2, 1, 64)
    right = attend(q, plain.view(), 0.125).numpy()
    for cache in (ours, again):
        assert rms(attend(q, cache.view(), 0.125).numpy(), right) < BOUND


# -- what is refused, and the benchmark


def test_what_has_no_kernel_says_why():
    def why(keys, values, dims=64):
        return launch.why_not(CacheConfig(Side(keys), Side(values)), (dims, dims), CPU)

    four = Fill(2.0, (4, 3, 2, 1))
    assert why(four, four) is None
    assert why(Fill(2.0), Fill(2.0)) is None  # before a calibration
    assert "80, 64" in why(four, four, 80)
    assert "64, 80" in why(four, Fill(2.0, (2,) * 5))
    assert "beside another format" in why(four, Affine(4, 64))
    with choose.using(choose.TRITON), pytest.raises(UserError, match="beside another format"):
        choose.store(CacheConfig(Side(four), Side(Affine(4, 64))), (64, 64), CPU)


def test_the_benchmark_checks_what_it_times(monkeypatch):
    shape = bench.Shape(1, 4, 2, 64, 2 * 64)
    config = bench.config_of("fill-2.25", shape.dims)
    torch.manual_seed(0)
    assert bench.checked(config, shape, torch.float16, launch.Launch()) < bench.BOUND
    plain = launch.attend
    monkeypatch.setattr(launch, "attend", lambda *a, **k: plain(*a, **k) * 1.01)
    assert bench.checked(config, shape, torch.float16, launch.Launch()) > bench.BOUND


def test_on_a_gpu_its_kernel_runs_where_it_is_asked_for(monkeypatch):
    """It failed on the one GPU that ran it, and a launch that fails cannot be taken back."""
    config, _ = made(64, 1, (4, 2), (3, 1))
    gpu = torch.device("cuda")
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    assert "MLXKV_TRITON_FILL=1" in launch.why_not(config, (64, 64), gpu)
    plain = CacheConfig(Side(Affine(4, 64)), Side(Affine(4, 64)))
    assert launch.why_not(plain, (64, 64), gpu) is None
    monkeypatch.setenv("MLXKV_TRITON_FILL", "1")
    assert launch.why_not(config, (64, 64), gpu) is None
