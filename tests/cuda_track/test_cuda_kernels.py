"""Triton's kernels in its interpreter: attention over pools of pages, and what pools share."""

import contextlib
import copy
import os
import re
import subprocess
import sys
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
import torch
from emulator import build
from methods import METHODS, names

from cuda_track import bench
from cuda_track.cache import choose
from cuda_track.cache.attention import attend, why_not
from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.cache.stores import Paged
from cuda_track.cache.view import CodePages, View
from cuda_track.codec import packing, transform
from cuda_track.codec.codec import Codec
from cuda_track.codec.maps import LayerMaps
from cuda_track.golden import kernels as golden_kernels
from cuda_track.kernels import launch, layout
from cuda_track.kernels.pool import Pool
from cuda_track.kernels.record import Record
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.quantizers import Affine, Codebook, MixedBits, Polar
from mlxkv.formats.records import NAMES
from mlxkv.spec.bounds import rms

pytest.importorskip(
    "cuda_track.kernels.interpreter"
)  # which says how kernels are built; no Triton on a Mac

from triton import language as tl  # noqa: E402

from cuda_track.kernels import encode  # noqa: E402

torch.set_num_threads(1)
# Weights of values are float16 in the kernel: half a step is 2^-12, and codes of 2 bits are coarse.
BOUND = 2e-3
SIDES = {
    "int4": Side(Affine(4, 64), "srft"),
    "int4 g32": Side(Affine(4, 32, symmetric=True), "hadamard"),
    "int8": Side(Affine(8, 64)),
    "int3": Side(Affine(3, 64), "srft"),
    "int2": Side(Affine(2, 0, clip=0.92), "hadamard"),
    "int2 g32": Side(Affine(2, 32), "srft"),
    "int2 channels": Side(Affine(2, 0, axis="channel"), "srft"),
    "int3 channels": Side(Affine(3, 0, axis="channel")),
    "int4 channels": Side(Affine(4, 16, axis="channel")),
}
# D, H, G, L, batch, keys, values, sink, recent, mask, attention sinks
CASES = {
    "odd draft": (64, 5, 1, 4, 1, "int4", "int4", 16, 9, False, True),
    "gemma": (256, 2, 1, 1, 1, "int4", "int4", 16, 17, False, False),
    "padded batch": (64, 4, 2, 1, 2, "int8", "int8", 16, 9, True, False),
    "gpt-oss": (64, 8, 1, 1, 1, "int4 g32", "int2", 16, 16, False, True),
    "channels": (64, 4, 1, 8, 1, "int2 channels", "int2 g32", 16, 21, False, False),
    "runs of channels": (64, 4, 2, 2, 2, "int4 channels", "int4", 16, 9, False, True),
    "3 bits of channels": (64, 4, 2, 1, 2, "int3 channels", "int4", 16, 9, True, False),
}
PAGES, PAGE = 3, 32


def filled(
    keys: Side, values: Side, batch: int, heads: int, dims: int = 64, pool: Pool | None = None
) -> tuple[Paged, CodePages]:
    """Random pages in a pool, and the same for plain ops."""
    config = CacheConfig(keys, values, page=PAGE)
    assert launch.why_not(config, (dims, dims)) is None
    codecs = tuple(Codec(side, dims, PAGE) for side in (keys, values))
    pair = [torch.randn(batch, heads, PAGES * PAGE, dims) for _ in "kv"]
    stored = tuple(code.encode(x) for code, x in zip(codecs, pair, strict=True))
    store = Paged(config, codecs, pool)
    store.restore(dict(zip(NAMES, stored, strict=True)), PAGES)
    return store, CodePages(codecs, stored, PAGES * PAGE)


def used(pool: Pool) -> int:
    """Pages that are held."""
    return len(pool.holders) - len(pool._free)


def test_which_methods_have_kernels(subtests):
    for name in METHODS:
        with subtests.test(name=name):
            why = launch.why_not(METHODS[name].config(64), (64, 64))
            assert (why is None) == METHODS[name].triton, why
    assert "128, 256" in launch.why_not(parse_kv("int4"), (80, 80))
    long = CacheConfig(SIDES["int2 channels"], SIDES["int2"], page=512)
    assert "512 tokens" in launch.why_not(long, (64, 64))


def test_attention_over_a_cache_of_each_method(subtests):
    for name in names(triton=True):
        with subtests.test(name=name):
            out, dims = [], 64
            torch.manual_seed(0)
            new = [torch.randn(1, 1, 170, dims) for _ in "kv"]
            q = torch.randn(1, 2, 1, dims)
            for way in (choose.TRITON, choose.OPS):
                with choose.using(way):
                    cache = CompressedKVCache(METHODS[name].config(dims))
                    cache.update_and_fetch(*new)
                    assert (type(cache.store) is Paged) == (way == choose.TRITON)
                    out.append(attend(q, cache.view(), dims**-0.5).numpy())
            assert rms(*out) < BOUND


def test_attention_over_codes(subtests):
    """Rows share programs before and after attention in every second case."""
    for i, case in enumerate(CASES):
        with subtests.test(case=case), pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "MANY", 0 if i % 2 else launch.MANY)
            if "channels" in case:  # several turns of a page read with the same queries
                patch.setattr(layout, "STEP_TOKENS", 16)
            check_attention(case)


def check_attention(case):
    dims, heads, kv_heads, new, batch, keys, values, sink, recent, masked, sinks = CASES[case]
    torch.manual_seed(0)
    store, plain = filled(SIDES[keys], SIDES[values], batch, kv_heads, dims)
    windows = [
        tuple(torch.randn(batch, kv_heads, n, dims) for _ in "kv") if n else None
        for n in (recent, sink)
    ]
    q = torch.randn(batch, heads, new, dims)
    mask, logits = "causal", torch.randn(heads) if sinks else None
    if masked:  # one row begins inside a page
        mask = torch.ones(batch, 1, 1, sink + PAGES * PAGE + recent, dtype=torch.bool)
        mask[1, ..., : sink + PAGE + 5] = False
        mask[0, ..., -2] = False  # and the other lacks a recent token
    view = View(*windows, store.read(0, PAGES))
    assert why_not(q, view, mask) is None
    out = attend(q, view, dims**-0.5, mask, logits)
    right = attend(q, View(*windows, plain), dims**-0.5, mask, logits)
    assert rms(out.numpy(), right.numpy()) < BOUND


def test_capped_scores(subtests):
    for keys in [Affine(4, 64), Affine(2, 64, axis="channel")]:
        with subtests.test(keys=keys):
            torch.manual_seed(0)
            store, plain = filled(Side(keys), Side(Affine(4, 64)), 1, 1)
            windows = [tuple(torch.randn(1, 1, n, 64) for _ in "kv") for n in (9, 4)]
            q = 3 * torch.randn(1, 2, 2, 64)
            view, twin = (View(*windows, pages) for pages in (store.read(0, PAGES), plain))
            assert why_not(q, view, "causal") is None
            out, right = (attend(q, x, 0.125, "causal", None, 1.5) for x in (view, twin))
            assert rms(out.numpy(), right.numpy()) < BOUND
            assert rms(attend(q, twin, 0.125, "causal").numpy(), right.numpy()) > 10 * BOUND


def test_a_page_that_nobody_sees_weighs_nothing(subtests):
    """Whatever scores are multiplied by: NVIDIA's `fma` shows a wrong maximum at any scale, NumPy at large ones."""
    for keys in [Affine(4, 64), Affine(4, 0, axis="channel")]:
        with subtests.test(keys=keys):
            torch.manual_seed(0)
            store, plain = filled(Side(keys), Side(Affine(4, 64)), 1, 1)
            windows = [tuple(torch.randn(1, 1, n, 64) for _ in "kv") for n in (9, 4)]
            q = 1e10 * torch.randn(1, 2, 1, 64)
            view, twin = (View(*windows, pages) for pages in (store.read(0, PAGES), plain))
            mask = (torch.arange(view.tokens) >= 4 + PAGE)[None, None, None]
            out, right = (attend(q, x, 0.125, mask) for x in (view, twin))
            assert rms(out.numpy(), right.numpy()) < BOUND


PREFILLED = {
    "int4": (64, torch.float16, "int4", "int4 g32"),
    "int3": (64, torch.float32, "int3 channels", "int3"),
}


@pytest.mark.parametrize("name", PREFILLED)
def test_prefill_decodes_pages_in_the_stored_domain(name, monkeypatch):
    monkeypatch.setattr(layout, "STEP_TOKENS", 16)
    dims, dtype, keys, values = PREFILLED[name]
    torch.manual_seed(0)
    store, plain = filled(SIDES[keys], SIDES[values], 2, 2, dims)
    windows = [tuple(torch.randn(2, 2, n, dims) for _ in "kv") for n in (21, 16)]
    q = torch.randn(2, 4, 13, dims)
    right = attend(q, View(*windows, plain), dims**-0.5, "causal").numpy()
    view = View(*(tuple(x.to(dtype) for x in pair) for pair in windows), store.read(0, PAGES))
    out = attend(q.to(dtype), view, dims**-0.5, "causal").float().numpy()
    assert rms(out, right) < (1e-5 if dtype == torch.float32 else BOUND)


def test_causal_masks_of_drafts_are_recognised():
    store, _ = filled(SIDES["int4"], SIDES["int4"], 2, 1)
    recent, q = tuple(torch.randn(2, 1, 7, 64) for _ in "kv"), torch.randn(2, 2, 4, 64)
    view = View(recent, None, store.read(0, PAGES))
    total = view.tokens
    mask = torch.ones(2, 1, 4, total, dtype=torch.bool).tril(total - 4)
    assert why_not(q, view, mask) is None
    assert torch.equal(attend(q, view, 0.125, mask), attend(q, view, 0.125, "causal"))
    mask[1, ..., :40] = False  # left padding: the same object, looked at again
    assert why_not(q, view, mask) is None
    plain = View(recent, None, CodePages(store.codecs, view.pages.stored, view.pages.tokens))
    out, right = attend(q, view, 0.125, mask), attend(q, plain, 0.125, mask)
    assert rms(out.numpy(), right.numpy()) < BOUND
    mask[0, 0, 1, 50] = False
    assert "causal ones" in why_not(q, view, mask)


def test_transforms_of_a_calibration_differ_by_head(monkeypatch):
    """Not orthogonal, one per kv head: quantized by the kernel, read by the kernel."""
    monkeypatch.setattr(launch, "MANY", 0)
    dtype = torch.float16
    rng = np.random.default_rng(0)
    pairs = []
    for _ in "kv":
        down = np.linalg.qr(rng.standard_normal((2, 64, 64)))[0] * rng.uniform(0.5, 2, (2, 1, 64))
        pairs.append(transform.of(down, np.linalg.inv(down)))
    side = Side(Affine(4, 64, clip=0.96), "balanced")
    config = CacheConfig(side, side, sink=16, recent=16, page=PAGE)
    out, q = [], torch.tensor(rng.standard_normal((1, 4, 1, 64))).to(dtype)
    new = [torch.tensor(rng.standard_normal((1, 2, 180, 64))).to(dtype) for _ in "kv"]
    for way in (choose.TRITON, choose.OPS):
        with choose.using(way):
            cache = CompressedKVCache(config, LayerMaps(*pairs))
            cache.update_and_fetch(*new)
            out.append(attend(q, cache.view(), 0.125).float().numpy())
    assert type(cache.store) is not Paged
    assert rms(*out) < BOUND


def test_rows_of_different_lengths():
    """What a server does: each row with its own pages, windows of one length."""
    torch.manual_seed(0)
    store, plain = filled(SIDES["int4"], SIDES["int4"], 2, 1)
    store.pool.release(store.rows[1][1:])
    del store.rows[1][1:]
    recent, q = tuple(torch.randn(2, 1, 7, 64) for _ in "kv"), torch.randn(2, 4, 1, 64)
    out = launch.attend(q, store.read(0, PAGES), None, recent, 0.125)
    for row, pages in ((0, PAGES), (1, 1)):
        stored = tuple(
            {n: x[row : row + 1, :, : pages * PAGE] for n, x in s.items()} for s in plain.stored
        )
        short = CodePages(plain.codecs, stored, pages * PAGE)
        right = attend(
            q[row : row + 1], View(tuple(x[row : row + 1] for x in recent), None, short), 0.125
        )
        assert rms(out[row : row + 1].numpy(), right.numpy()) < BOUND


def test_the_golden_table():
    """A part of it: the interpreter is slow."""
    for table in golden_kernels.TABLES:
        rows = list(islice(table(), 2))
        assert rows and not [row for row in rows if not row.ok]


def test_a_cache_with_a_pool_is_a_cache():
    """Appending, quantizing, trimming, rows in another order: as with plain ops."""
    torch.manual_seed(0)
    config = CacheConfig(SIDES["int4"], SIDES["int4"], sink=16, recent=16, page=PAGE)
    caches = {}
    for way in (choose.TRITON, choose.OPS):
        torch.manual_seed(1)
        with choose.using(way):
            cache = caches[way] = CompressedKVCache(config)
            for tokens in (100, 1, 60):
                cache.update_and_fetch(*(torch.randn(2, 1, tokens, 64) for _ in "kv"))
            cache.trim_to(91)
            cache.update_and_fetch(*(torch.randn(2, 1, 90, 64) for _ in "kv"))
            cache.select(torch.tensor([1, 0, 1]))
    ours, plain = caches[choose.TRITON], caches[choose.OPS]
    assert type(ours.store) is Paged
    q = torch.randn(3, 2, 1, 64)
    out, right = (attend(q, c.view(), 0.125).numpy() for c in (ours, plain))
    assert rms(out, right) < BOUND
    for side in ("keys", "values"):
        for name, x in plain.state["pages"][side].items():
            assert torch.equal(ours.state["pages"][side][name], x)


def test_a_row_that_is_chosen_twice_holds_its_pages():
    pool = Pool()
    store, _ = filled(SIDES["int4"], SIDES["int4"], 1, 1, pool=pool)
    before = store.read(0, PAGES).stored
    store.select(torch.tensor([0, 0]))
    assert used(pool) == PAGES
    store.append(tuple(torch.randn(2, 1, PAGE, 64) for _ in "kv"), 1)
    assert used(pool) == PAGES + 2
    for side, old in zip(store.read(0, PAGES).stored, before, strict=True):
        assert all(torch.equal(side[n], x.repeat_interleave(2, 0)) for n, x in old.items())


def test_prefixes_are_shared_and_given_back():
    pool = Pool()
    store, _ = filled(SIDES["int4"], SIDES["int4"], 1, 1, pool=pool)
    other = copy.deepcopy(store)
    assert used(pool) == PAGES
    other.append(tuple(torch.randn(1, 1, PAGE, 64) for _ in "kv"), 1)
    assert used(pool) == PAGES + 1
    before = store.read(0, PAGES).stored
    store.truncate(1)
    assert used(pool) == PAGES + 1
    other.truncate(1)
    assert used(pool) == 1
    kept = store.read(0, 1).stored
    assert all(
        torch.equal(kept[0][n], before[0][n][:, :, : x.shape[2]]) for n, x in kept[0].items()
    )
    store.truncate(0)
    other.truncate(0)
    assert used(pool) == 0


ENCODED = {
    "int4": (128, torch.float32, True),
    "int8": (64, torch.bfloat16, True),
    "int3": (128, torch.bfloat16, True),
    "int2": (64, torch.float16, True),
    "int2 g32": (64, torch.float32, False),
    "int2 channels": (64, torch.bfloat16, True),
    "int4 channels": (128, torch.float32, True),
}


def test_quantizing_gives_the_codes_of_plain_ops(subtests):
    for name in ENCODED:
        with subtests.test(name=name):
            dims, dtype, keys = ENCODED[name]
            torch.manual_seed(0)
            code = Codec(SIDES[name], dims, PAGE)
            x = torch.randn(2, 2, 3 * PAGE + 7, dims).to(dtype)[:, :, 7:]
            x[0, 0, 3] = 0  # a token of zeros
            at = layout.PlaneLayout(code.quantizer, dims, PAGE, keys)
            pool, places = Pool(), [4, 0, 2, 5, 1, 3]
            pool.reserve(6, Record((at, at)), 2, x.device)
            launch.quantize_pages(code, x, at, pool.sides[0], places)
            right = code.encode(x)
            found = {n: y[torch.tensor(places).view(2, 3)] for n, y in pool.sides[0].items()}
            found = at.restore(found)
            for number in set(found) - {"codes"}:
                step = (found[number].float() - right[number].float()).abs()
                assert (step <= 2**-10 * right[number].float().abs()).all(), number
            codes = [packing.unpack(y["codes"], code.quantizer.bits, dims) for y in (found, right)]
            gap = (codes[0] - codes[1]).abs()
            assert gap.max() <= 1
            assert gap.sum() <= 2e-4 * gap.numel()  # sums in another order, at a boundary


def test_an_infinite_number_is_quantized_as_plain_ops_do(monkeypatch):
    monkeypatch.setattr(launch, "interpreted", lambda: False)  # divided as on a GPU
    torch.manual_seed(0)
    code, pool = Codec(SIDES["int4 channels"], 64, PAGE), Pool()
    x = torch.randn(1, 1, PAGE, 64)
    x[0, 0, 3, 5] = torch.inf
    at = layout.PlaneLayout(code.quantizer, 64, PAGE, True)
    pool.reserve(1, Record((at, at)), 1, x.device)
    launch.quantize_pages(code, x, at, pool.sides[0], [0])
    found = at.restore({n: y[:1].unsqueeze(0) for n, y in pool.sides[0].items()})
    right = code.encode(x)
    assert right["scale"].max() == 65504 and torch.equal(found["bias"], right["bias"])
    torch.testing.assert_close(found["scale"], right["scale"], rtol=2**-10, atol=0)


SPOILED = {
    **{name: (Codec(side, 64, PAGE), PAGE) for name, side in SIDES.items()},
    "codebook": (Codec(Side(Codebook(4), "hadamard"), 64, PAGE), PAGE),
    "polar": (Codec(Side(Polar(4, 4)), 64, 128), 128),
    "mixed bits": (
        Codec(
            Side(MixedBits(4.0, (4, 4, 4, 4)), "fill"), 64, 64, transform.make("srft", 64, 0, "cpu")
        ),
        64,
    ),
}


def test_nan_stays_nan_as_in_plain_ops(subtests, monkeypatch):
    monkeypatch.setattr(launch, "interpreted", lambda: False)  # divided as on a GPU
    torch.manual_seed(0)
    for name, dim in product(SPOILED, (5, 40)):  # of either half
        with subtests.test(name=name, dim=dim):
            code, page = SPOILED[name]
            x = torch.randn(1, 1, page, 64)
            x[0, 0, 3, dim] = torch.nan
            (at, _), pool = layout.layouts((code, code)), Pool()
            pool.reserve(1, Record((at, at)), 1, x.device)
            launch.quantize_pages(code, x, at, pool.sides[0], [0])
            found = at.restore({n: y[:1].unsqueeze(0) for n, y in pool.sides[0].items()})
            made, right = (code.decode(y, torch.float32).isnan() for y in (found, code.encode(x)))
            assert made.any() and torch.equal(made, right)


@pytest.mark.parametrize("name", ["int4 g32", "int2 channels"])
def test_the_gpus_way_to_the_largest_keeps_nan_and_numbers(name, monkeypatch):
    """The interpreter takes another, as it reduces by a function element by element."""
    torch.manual_seed(0)
    code, x = Codec(SIDES[name], 64, PAGE), torch.randn(1, 1, PAGE, 64)
    found = []
    for spoiled, interpreted in ((False, True), (False, False), (True, False)):
        monkeypatch.setattr(encode, "INTERPRETED", tl.constexpr(interpreted))
        if spoiled:
            x[0, 0, 3, 5] = torch.nan
        (at, _), pool = layout.layouts((code, code)), Pool()
        pool.reserve(1, Record((at, at)), 1, x.device)
        launch.quantize_pages(code, x, at, pool.sides[0], [0])
        found.append(at.restore({n: y[:1].unsqueeze(0) for n, y in pool.sides[0].items()}))
    for number in found[0]:
        assert torch.equal(found[0][number], found[1][number]), number
    made, right = (code.decode(y, torch.float32).isnan() for y in (found[2], code.encode(x)))
    assert made.any() and torch.equal(made, right)


def test_the_benchmark_checks_what_it_times_and_takes_the_fastest_baseline(monkeypatch):
    micros = iter([8.0, 2.0, 6.0, 4.0, 0.5])  # four forms of the baseline, then ours
    monkeypatch.setattr(bench, "timed", lambda calls, q: [next(micros), calls[0](q)][0])
    monkeypatch.setattr(bench, "buffers", lambda size: 1)
    monkeypatch.setattr(bench, "DTYPE", torch.float16)
    monkeypatch.setattr(bench, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    monkeypatch.setitem(bench.CASES, "tiny", bench.Shape(2, 2, 1, 64, 2 * 64))
    torch.manual_seed(0)
    base, ours = bench.attention_rows(["tiny"], ["int4"])
    assert base.microseconds == 2 and "rows" in base.kind
    assert ours.ratio == 4 and 0 < ours.rms < bench.BOUND
    bits = 4 + 32 / 64  # of a value, of keys and values of two rows
    assert ours.gigabytes_per_second == 2 * 2 * 128 * 64 * bits / 8 / 0.5e3
    attend = launch.attend
    monkeypatch.setattr(launch, "attend", lambda *a, **k: attend(*a, **k) * 1.01)
    monkeypatch.setattr(bench, "baseline", lambda shape: (1.0, ""))
    with pytest.raises(UserError, match="int4 is wrong by"):
        list(bench.attention_rows(["tiny"], ["int4"]))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
def test_kernels_compile_for_hopper(tmp_path):
    """No GPU is needed for it. Stacks would be registers that were spilled: two may be, around a loop."""
    script = Path(__file__).parents[1] / "support" / "triton_compile.py"
    root = str(script.parents[2])
    # Triton names what it keeps by the text of a kernel, its constants and its own version.
    kept = str(build.cache_dir() / "triton")
    env = {**os.environ, "PYTHONPATH": root, "TRITON_CACHE_DIR": kept}
    env.pop("TRITON_INTERPRET")
    names = "attend int4", "quantize", "quantize polar keys of 4 bits"
    names += "quantize codebook of 4 bits", "quantize codebook of 3 bits"
    names += "vllm attend mixed bits", "vllm quantize"
    command = [sys.executable, str(script), str(tmp_path), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    stacks = [int(n) for n in re.findall(r"(\d+) stack", done.stdout)]
    assert len(stacks) == len(names) and sum(stacks) <= 8, done.stdout
