"""Mixed bits in Triton's interpreter: their order in a pool, encoding, decoding, attention, caches."""

import random
import re

import numpy as np
import pytest
import torch

pytest.importorskip(
    "cuda_track.kernels.interpreter"
)  # which says how kernels are built; no Triton on a Mac

from cuda_track.cache import choose
from cuda_track.cache.attention import attend, why_not
from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.cache.stores import Paged
from cuda_track.cache.view import CodePages, View
from cuda_track.codec import mixed_bits, transform
from cuda_track.codec.codec import Codec, Stored
from cuda_track.codec.maps import LayerMaps
from cuda_track.golden.kernels import mixed_bits_rows
from cuda_track.kernels import blocks, launch
from cuda_track.kernels import mixed_bits as kernels
from cuda_track.kernels.blocks import BlockLayout
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.quantizers import WIDTHS, Affine, MixedBits
from mlxkv.formats.records import NAMES
from mlxkv.spec.bounds import rms

torch.set_num_threads(1)
BOUND = 2e-3  # weights of values are float16 in the kernel
PAGE, PAGES = 64, 2


def maps(heads: int, dims: int, stored: int, rng) -> transform.Transform:
    """A dense map of each kv head, not orthogonal, of which the first dims are stored."""
    down = np.linalg.qr(rng.standard_normal((heads, dims, dims)))[0]
    down *= rng.uniform(0.5, 2, (heads, 1, dims))
    return transform.of(down[:, :, :stored], np.linalg.inv(down)[:, :stored])


def layer(dims: int, heads: int, keys: tuple, values: tuple, page: int = PAGE):
    """(config, maps) of a layer with these widths; keys lose a mean."""
    rng = np.random.default_rng(dims + len(keys))
    pair = [maps(heads, dims, 16 * len(widths), rng) for widths in (keys, values)]
    mean = torch.tensor(rng.standard_normal((heads, 1, dims))).float()
    sides = Side(MixedBits(2.0, keys), "fill-centred"), Side(MixedBits(2.0, values), "fill")
    return CacheConfig(*sides, sink=16, recent=16, page=page), LayerMaps(*pair, mean=mean)


def filled(config: CacheConfig, pair: LayerMaps | None, batch: int, heads: int, dims: int):
    """(pages in a pool, the same for plain ops), of the same codes."""
    assert launch.why_not(config, (dims, dims)) is None
    of = (None, None) if pair is None else (pair.keys, pair.values)
    sides = zip((config.keys, config.values), of, strict=True)
    codecs = tuple(Codec(side, dims, config.page, one) for side, one in sides)
    tokens = PAGES * config.page
    stored = tuple(code.encode(torch.randn(batch, heads, tokens, dims)) for code in codecs)
    store = Paged(config, codecs)
    store.restore(dict(zip(NAMES, stored, strict=True)), PAGES)
    return store, CodePages(codecs, stored, tokens)


# -- the order in a pool


def some_widths():
    draw = random.Random(0)
    for _ in range(30):
        yield tuple(sorted(draw.choices(WIDTHS, k=draw.randint(1, 16)), reverse=True))


def test_pages_of_a_pool_take_the_bytes_of_files_and_lose_nothing():
    for i, widths in enumerate(some_widths()):
        quantizer, page = MixedBits(2.0, widths), (64, 128)[i % 2]
        code = Codec(Side(quantizer), quantizer.dims, page)
        stored = code.encode(torch.randn(2, 3, 2 * page, quantizer.dims))
        for keys in (True, False):
            at = BlockLayout(quantizer, page, keys)
            pool, shapes = at.arrange(stored), at.shapes(3)
            assert {n: (x.shape[2:], x.dtype) for n, x in pool.items()} == shapes
            assert sum(x.nbytes for x in pool.values()) == sum(x.nbytes for x in stored.values())
            back = at.restore(pool)
            assert all(torch.equal(back[name], x) for name, x in stored.items())


def test_no_code_crosses_a_tile_or_another():
    for widths in some_widths():
        at = BlockLayout(MixedBits(2.0, widths), 64, True)
        taken = 0
        for _, _, bits, _, bit in at.pieces:
            mask = ((1 << bits) - 1) << bit
            assert bit % 8 + bits <= 8 and not taken & mask
            taken |= mask
        assert taken.bit_length() <= 8 * at.quantizer.words


# -- PTX, which the interpreter does not run


def ran(text: str, *words: np.ndarray) -> list[np.ndarray]:
    """What a snippet of PTX leaves in $0 .. $3. words: $4 and on, uint32."""
    names = {f"${4 + i}": x.astype(np.uint64) for i, x in enumerate(words)}

    def value(name: str):
        return names[name] if name in names else np.uint64(int(name, 0))

    for kind, rest in re.findall(r"\b(lop3|shr|shl)\.b32 ([^;]+);", text):
        out, *given = (x.strip() for x in rest.split(","))
        if kind == "lop3":
            assert given.pop() == "0xea"  # (a & b) | c
            a, b, c = map(value, given)
            names[out] = (a & b) | c
        else:
            a, by = map(value, given)
            names[out] = (a >> by if kind == "shr" else a << by) & np.uint64(0xFFFFFFFF)
    return [names[f"${k}"].astype(np.uint32).view(np.float16) for k in range(4)]


def test_ptx_unpacks_as_plain_operations_do():
    rng = np.random.default_rng(0)
    words, others = (rng.integers(0, 2**32, 500, dtype=np.uint32) for _ in "ab")
    lows = {8: (0,), 4: (0,), 3: (0, 8), 2: (0, 8), 1: (0, 4, 8, 12)}
    tried = [(bits, low, top) for bits in WIDTHS for low in lows[bits] for top in (0, 4, 8, 12)]
    for bits, low, top in tried:
        found = ran(kernels._ptx.fn(bits, low, top), words, others)
        word, other = words.view(np.uint16).astype(int), others.view(np.uint16).astype(int)
        for k in range(4):
            if bits == 8:
                code = ((word, other)[k // 2] >> (k % 2 * 8)) & 255
            elif bits == 3:
                code = ((word >> (low + 2 * k)) & 3) | ((other >> (top + k)) & 1) << 2
            else:
                code = (word >> (low + bits * k)) & ((1 << bits) - 1)
            assert (found[k] == 1 + code / 2**bits).all(), (bits, low, top, k)


# -- attention, encoding and decoding

# D, H, G, L, batch, widths of keys and of values, dtype
CASES = {
    "all dims": (64, 1, 1, 1, 1, (4, 3, 2, 1), (3, 3, 2, 1), torch.float32),
    "fewer dims": (64, 4, 2, 1, 2, (8, 4, 1), (2, 1), torch.float16),
    "odd numbers of blocks": (128, 8, 2, 1, 1, (4, 4, 3, 3, 2, 2, 1), (3, 2, 2), torch.bfloat16),
    "a draft": (64, 2, 1, 4, 1, (8, 3, 3, 1), (4, 2, 1), torch.float32),
    "half a tile of values": (64, 4, 2, 1, 2, (4, 2), (2,), torch.bfloat16),
    "many rows": (64, 6, 1, 4, 1, (3,), (1, 1), torch.float16),
    "wide": (256, 2, 1, 1, 1, (8, 4, 3, 3, 2, 2, 1, 1), (3, 3, 2, 2, 1), torch.float16),
}


def check_attention(case: str, cap: float | None = None) -> None:
    dims, heads, kv_heads, new, batch, keys, values, dtype = CASES[case]
    torch.manual_seed(0)
    config, pair = layer(dims, kv_heads, keys, values)
    store, plain = filled(config, pair, batch, kv_heads, dims)
    windows = [
        tuple(torch.randn(batch, kv_heads, n, dims).to(dtype) for _ in "kv") for n in (21, 16)
    ]
    q, logits = torch.randn(batch, heads, new, dims).to(dtype), torch.randn(heads)
    view, mask = View(*windows, store.read(0, PAGES)), "causal"
    if batch > 1:  # one row begins inside a page
        mask = torch.ones(batch, 1, 1, view.tokens, dtype=torch.bool)
        mask[1, ..., : 16 + PAGE + 21] = False
    assert why_not(q, view, mask) is None
    out = attend(q, view, dims**-0.5, mask, logits, cap).float().numpy()
    floats = (tuple(x.float() for x in pair) for pair in windows)
    right = attend(q.float(), View(*floats, plain), dims**-0.5, mask, logits, cap).numpy()
    assert rms(out, right) < (2 * BOUND if dtype == torch.bfloat16 else BOUND), case


def test_attention_over_blocks(subtests):
    """Rows share programs before and after attention in every second case."""
    for i, case in enumerate(CASES):
        with subtests.test(case=case), pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "MANY", 0 if i % 2 else launch.MANY)
            check_attention(case)
    with subtests.test(case="capped"):
        check_attention("a draft", cap=1.5)


def test_each_width_alone_and_layers_in_turn_with_other_formats(subtests):
    """One process serves many layers: what a layer gives does not depend on what ran before it."""
    torch.manual_seed(0)
    layers = {f"{bits} bits": ((bits,) * 3, (bits,)) for bits in WIDTHS}
    layers["a mix"] = ((8, 4, 3, 1), (3, 2, 2, 1))
    made, first = {}, {}
    recent, q = tuple(torch.randn(1, 1, 9, 64) for _ in "kv"), torch.randn(1, 4, 1, 64)
    for name, widths in layers.items():
        config, pair = layer(64, 1, *widths)
        made[name] = filled(config, pair, 1, 1, 64)
    for name in ("int4", "int3"):
        side = Side(parse_kv(name).values.quantizer, "srft")
        made[name] = filled(CacheConfig(side, side, page=PAGE), None, 1, 1, 64)
    for name in (*made, *reversed(made)):
        with subtests.test(name=name, again=name in first):
            store, plain = made[name]
            out = attend(q, View(recent, None, store.read(0, PAGES)), 0.125)
            right = attend(q, View(recent, None, plain), 0.125)
            assert rms(out.numpy(), right.numpy()) < BOUND
            assert torch.equal(out, first.setdefault(name, out))


def check_codes(quantizer: MixedBits, found: Stored, right: Stored) -> None:
    """Sums in another order may change a scale by a step, and a code at a boundary."""
    step = (found["scale"].float() - right["scale"].float()).abs()
    assert (step <= 2**-10 * right["scale"].float()).all()
    codes = [mixed_bits.unpack(quantizer, stored["codes"]) for stored in (found, right)]
    gap = (codes[0] - codes[1]).abs()
    assert gap.max() <= 1
    assert gap.sum() <= 2e-4 * gap.numel()


@pytest.mark.parametrize("page", (64, 128))
def test_quantizing_and_dequantizing_are_those_of_plain_ops(page, subtests):
    for (dims, *_, keys, values, dtype), side in ((CASES[c], i % 2) for i, c in enumerate(CASES)):
        with subtests.test(dims=dims, widths=(keys, values)[side]):
            torch.manual_seed(0)
            config, pair = layer(dims, 2, keys, values, page)
            which, one = ((config.keys, pair.keys), (config.values, pair.values))[side]
            code = Codec(which, dims, page, one)
            x = torch.randn(2, 2, 2 * page + 7, dims).to(dtype)[:, :, 7:]
            x[0, 0, 3] = 0  # a token of zeros
            both_sides = CacheConfig(*(Side(which.quantizer, "fill"),) * 2, page=page)
            store = Paged(both_sides, (code, code))
            store.append((x, x), 2)
            pages, right = store.read(0, 2), code.encode(x)
            found = pages.stored[side]
            check_codes(code.quantizer, found, right)
            out = torch.full((2, 2, 2 * page + 5, code.dims), 7.0)
            launch.dequantize(pages, side, out, 5)
            plain = code.decode_stored(found, torch.float32)
            assert torch.equal(out[:, :, 5:], plain) and (out[:, :, :5] == 7).all()


def test_the_golden_rows():
    rows = list(mixed_bits_rows())
    assert len(rows) == 14 and not [row for row in rows if not row.ok]


def test_dequantized_numbers_stay_in_the_range_of_their_dtype():
    quantizer = MixedBits(2.0, (8,) * 4)
    config = CacheConfig(Side(quantizer), Side(quantizer), page=PAGE)
    store, _ = filled(config, None, 1, 1, 64)
    pages = store.read(0, PAGES)
    pages.sides[1]["numbers"].fill_(0x7BFF7BFF)  # the largest scale
    out = torch.empty(1, 1, PAGES * PAGE, 64, dtype=torch.float16)
    launch.dequantize(pages, 1, out, 0)
    assert out.abs().max() == 65504
    pages.sides[1]["numbers"].fill_(0x7E007E00)  # NaN
    launch.dequantize(pages, 1, out, 0)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("widths", ((4, 3, 2, 1), (4, 2)))
def test_prefill_reads_what_was_quantized(dtype, widths):
    """All dims stored: in the stored domain; fewer: in the model's, since windows lose nothing."""
    torch.manual_seed(0)
    config, pair = layer(64, 2, widths, widths)
    new = [torch.randn(2, 2, 160, 64).to(dtype) for _ in "kv"]
    q = torch.randn(2, 4, 13, 64).to(dtype)
    with choose.using(choose.TRITON):
        cache = CompressedKVCache(config, pair)
        cache.update_and_fetch(*new)
        view = cache.view()
        out = attend(q, view, 0.125, "causal").float().numpy()
    pages = view.pages
    floats = (tuple(x.float() for x in two) for two in (view.recent, view.sink))
    plain = View(*floats, CodePages(pages.codecs, pages.stored, pages.tokens))
    right = attend(q.float(), plain, 0.125, "causal").numpy()
    assert rms(out, right) < (1e-5 if dtype == torch.float32 else BOUND)


def test_a_cache_with_a_pool_is_a_cache():
    """Appending, quantizing, trimming, rows in another order, states: as with plain ops."""
    config, pair = layer(64, 1, (4, 3, 1), (3, 2, 2, 1))
    caches = {}
    for way in (choose.TRITON, choose.OPS):
        torch.manual_seed(1)
        with choose.using(way):
            cache = caches[way] = CompressedKVCache(config, pair)
            for tokens in (160, 1, 60):
                cache.update_and_fetch(*(torch.randn(2, 1, tokens, 64) for _ in "kv"))
            cache.trim_to(151)
            cache.update_and_fetch(*(torch.randn(2, 1, 90, 64) for _ in "kv"))
            cache.select(torch.tensor([1, 0, 1]))
    ours, plain = caches[choose.TRITON], caches[choose.OPS]
    assert type(ours.store) is Paged and type(plain.store) is not Paged
    q = torch.randn(3, 2, 1, 64)
    assert rms(*(attend(q, c.view(), 0.125).numpy() for c in (ours, plain))) < BOUND
    for side, of in zip(NAMES, (config.keys, config.values), strict=True):
        check_codes(of.quantizer, *(c.state["pages"][side] for c in (ours, plain)))
    with choose.using(choose.TRITON):
        again = CompressedKVCache.from_state(plain.state, lambda *_: pair)
    assert type(again.store) is Paged
    assert torch.equal(again.store.state["keys"]["codes"], plain.state["pages"]["keys"]["codes"])


def test_a_calibrated_preset_is_read_by_the_kernel_and_what_is_not_says_why():
    def why(keys, values, dims=64, page=PAGE):
        return launch.why_not(CacheConfig(Side(keys), Side(values), page=page), (dims, dims))

    assert launch.why_not(parse_kv("fill-2.25"), (128, 128)) is None  # before a calibration
    mix = MixedBits(2.0, (4, 3, 2, 1))
    assert why(mix, mix) is None
    assert "64, 128, 256" in why(mix, mix, 80)
    assert "80 stored dims" in why(mix, MixedBits(2.0, (2,) * 5))
    assert "beside other codes" in why(mix, Affine(4, 64))
    assert "page of 32 tokens" in why(mix, mix, page=32)


def test_tables_of_layers_with_equal_widths_are_shared():
    layouts = [BlockLayout(MixedBits(rate, (4, 2)), 64, True) for rate in (2.0, 2.0)]
    cpu = torch.device("cpu")
    assert blocks.recipe(layouts[0], 64, cpu) is blocks.recipe(layouts[1], 64, cpu)
