"""Codebooks and polar keys by Triton: the order of a pool, attention, prefill, and the PTX that looks levels up."""

import functools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from methods import LAWS

from cuda_track import bench
from cuda_track.cache.attention import attend, why_not
from cuda_track.cache.stores import Paged
from cuda_track.cache.view import CodePages, View
from cuda_track.codec.codec import Codec
from cuda_track.golden.kernels import encode_rows
from cuda_track.kernels import launch, layout
from cuda_track.kernels.pool import Pool
from cuda_track.kernels.record import Record
from experiments import codes_by_triton
from mlxkv.formats import levels
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.quantizers import POLAR_NUMBERS, Affine, Codebook, Full, Polar
from mlxkv.formats.records import NAMES
from mlxkv.spec.bounds import rms

pytest.importorskip("cuda_track.kernels.interpreter")

from cuda_track.kernels.codes import lookup  # noqa: E402 (the interpreter decides how kernels are built)

torch.set_num_threads(1)
BOUND = 2e-3  # queries, levels and weights are float16 in the kernel
PAGES = 2
# D, H, G, L, batch, page, keys, values, sink, recent, mask, cap
CASES = {
    "turbo 4": (128, 4, 1, 1, 1, 64, Codebook(4), Codebook(4), 16, 9, False, None),
    "turbo 3": (128, 4, 2, 1, 2, 32, Codebook(3), Codebook(3), 16, 9, True, None),
    "turbo 2": (128, 2, 1, 3, 1, 64, Codebook(2), Codebook(2), 16, 20, False, 1.5),
    "64 dims": (64, 2, 1, 1, 1, 32, Codebook(3), Codebook(2), 16, 9, True, None),
    "256 dims": (256, 2, 1, 1, 1, 32, Codebook(4), Codebook(3), 0, 17, False, None),
    "codebook beside affine": (64, 4, 2, 1, 1, 32, Affine(2, 0, axis="channel"), Codebook(4), 16, 9, False, None),
    "polar": (128, 4, 1, 1, 1, 128, Polar(4, 4), Affine(4, 128), 0, 9, False, None),
    "polar 3": (64, 4, 2, 1, 2, 64, Polar(3, 3), Affine(3, 64), 16, 9, True, None),
    "polar 2, 256 dims": (256, 2, 1, 1, 1, 32, Polar(2, 2), Affine(2, 32), 0, 9, False, 1.5),
    "radius and angle of other widths": (64, 2, 1, 1, 1, 32, Polar(2, 4), Codebook(4), 16, 9, False, None),
}  # fmt: skip


def filled(case: str) -> tuple[Paged, CodePages, list[torch.Tensor]]:
    """Random pages in a pool, the same for plain ops, and the vectors they were made of."""
    dims, _, heads, _, batch, page, *quantizers = CASES[case][:8]
    transforms = ["random" if isinstance(one, Codebook) else "none" for one in quantizers]
    sides = [Side(*pair) for pair in zip(quantizers, transforms, strict=True)]
    config = CacheConfig(*sides, page=page)
    assert launch.why_not(config, (dims, dims)) is None
    codecs = tuple(Codec(side, dims, page) for side in sides)
    pair = [torch.randn(batch, heads, PAGES * page, dims) for _ in "kv"]
    stored = tuple(code.encode(x) for code, x in zip(codecs, pair, strict=True))
    store = Paged(config, codecs)
    store.restore(dict(zip(NAMES, stored, strict=True)), PAGES)
    return store, CodePages(codecs, stored, PAGES * page), pair


@pytest.mark.parametrize("case", CASES)
def test_attention_and_prefill(case, monkeypatch):
    dims, heads, kv_heads, new, batch, page, _, _, sink, recent, masked, cap = CASES[case]
    monkeypatch.setattr(launch, "MANY", 0 if masked else launch.MANY)
    torch.manual_seed(0)
    store, plain, _ = filled(case)
    windows = [
        tuple(torch.randn(batch, kv_heads, n, dims) for _ in "kv") if n else None
        for n in (recent, sink)
    ]
    mask = "causal"
    if masked:
        mask = torch.ones(batch, 1, 1, sink + PAGES * page + recent, dtype=torch.bool)
        mask[-1, ..., : sink + page // 2 + 5] = False
    view, twin = (View(*windows, pages) for pages in (store.read(0, PAGES), plain))
    q = 3 * torch.randn(batch, heads, new, dims)
    assert why_not(q, view, mask) is None
    out, right = (attend(q, x, dims**-0.5, mask, None, cap).numpy() for x in (view, twin))
    assert rms(out, right) < BOUND
    for side in (0, 1):
        decoded = torch.empty(batch, kv_heads, PAGES * page + 5, dims)
        launch.dequantize(store.read(0, PAGES), side, decoded, 5)
        exact = plain.codecs[side].decode_stored(plain.stored[side], torch.float32)
        assert rms(decoded[:, :, 5:].numpy(), exact.numpy()) < 1e-6


@pytest.mark.parametrize("case", ["turbo 3", "64 dims", "polar 3"])
def test_a_pool_gives_codes_back_as_files_have_them(case):
    torch.manual_seed(0)
    store, plain, _ = filled(case)
    for found, stored in zip(store.read(0, PAGES).stored, plain.stored, strict=True):
        assert found.keys() == stored.keys()
        assert all(torch.equal(found[name], x) for name, x in stored.items())
    again = Paged(store.config, store.codecs)
    again.restore(store.state, PAGES)
    assert torch.equal(again.pool.bytes[:1], store.pool.bytes[:1])
    assert set(store.state) == set(NAMES)


@pytest.mark.parametrize("case", ["turbo 4", "turbo 2", "polar"])
def test_attention_agrees_with_the_law(case):
    """Pages decoded in float64 by the spec, softmax in float64."""
    dims, heads, kv_heads, _, _, page, *quantizers = CASES[case][:8]
    torch.manual_seed(0)
    store, plain, pair = filled(case)
    turned = [code.store(x).double().numpy() for code, x in zip(plain.codecs, pair, strict=True)]
    k, v = (
        np.stack([LAWS[type(one)](y, one) for y in np.split(x[0], PAGES, 1)], 1)
        for one, x in zip(quantizers, turned, strict=True)
    )
    k, v = (x.reshape(kv_heads, -1, dims) for x in (k, v))
    q = torch.randn(1, heads, 1, dims)
    scores = plain.codecs[0].query(q)[0, :, 0].double().numpy() @ k[0].T * dims**-0.5
    p = np.exp(scores - scores.max(-1, keepdims=True))
    right = torch.tensor(p / p.sum(-1, keepdims=True) @ v[0]).float()
    transform = plain.codecs[1].transform
    right = right if transform is None else transform.restore(right[None, None])[0, 0]
    nothing = tuple(torch.randn(1, kv_heads, 0, dims) for _ in "kv")
    out = launch.attend(q, store.read(0, PAGES), None, nothing, dims**-0.5)
    assert rms(out[0, :, 0].numpy(), right.numpy()) < BOUND


# quantizer, dims, page, dtype, keys
ENCODED = {
    "codebook of 4 bits": (Codebook(4), 128, 64, torch.bfloat16, True),
    "codebook of 3 bits": (Codebook(3), 64, 32, torch.float32, False),
    "codebook of 2 bits": (Codebook(2), 256, 32, torch.float16, False),
    "polar": (Polar(4, 4), 128, 128, torch.bfloat16, True),
    "polar 3": (Polar(3, 3), 64, 64, torch.float32, True),
    "polar 2, 256 dims": (Polar(2, 2), 256, 256, torch.float16, True),
    "radius and angle of other widths": (Polar(3, 2), 64, 32, torch.float32, True),
}


def quantized(case: str, x: torch.Tensor) -> tuple[layout.PlaneLayout, dict, dict]:
    """Pages x [B, G, T, D] by the kernel, at places in disorder, and by plain ops."""
    quantizer, dims, page, _, keys = ENCODED[case]
    side = Side(quantizer, "random" if isinstance(quantizer, Codebook) else "none")
    code, at = Codec(side, dims, page), layout.PlaneLayout(quantizer, dims, page, keys)
    count = x.shape[0] * x.shape[2] // page
    places, pool = torch.randperm(count).tolist(), Pool()
    pool.reserve(count, Record((at, at)), x.shape[1], x.device)
    launch.quantize_pages(code, x, at, pool.sides[0], places)
    where = torch.tensor(places).view(x.shape[0], -1)
    return at, at.restore({n: y[where] for n, y in pool.sides[0].items()}), code.encode(x)


@pytest.mark.parametrize("case", ENCODED)
def test_quantizing_gives_the_codes_of_plain_ops(case):
    _, dims, page, dtype, _ = ENCODED[case]
    torch.manual_seed(0)
    x = torch.randn(2, 2, 3 * page + 7, dims).to(dtype)[:, :, 7:]
    x[0, 0, 3] = 0  # a token of zeros
    x[0, 1, :, 5] = -1.5  # a constant channel
    x[1, 0, :, dims // 2 + 5] = 0  # angles of 0 and pi
    at, found, right = quantized(case, x)
    for name in set(found) - {"codes"}:
        step = (found[name].float() - right[name].float()).abs()
        assert (step <= 2**-10 * right[name].float().abs()).all(), name
    gap = (at._parts(found)[0] - at._parts(right)[0]).abs()
    assert gap.max() <= 1
    assert gap.sum() <= 2e-4 * gap.numel()  # sums in another order, at a boundary


def test_an_infinite_key_has_a_radius_and_an_angle():
    torch.manual_seed(0)
    x = torch.randn(1, 1, 64, 64)
    x[0, 0, 3, 5] = x[0, 0, 3, 37] = torch.inf
    at, found, right = quantized("polar 3", x)
    assert right["radius_step"].max() == 65504  # the largest number
    for name in POLAR_NUMBERS:
        torch.testing.assert_close(found[name], right[name], rtol=2**-10, atol=0)
    assert (at._parts(found)[0] - at._parts(right)[0]).abs().sum() <= 1


@pytest.mark.parametrize("name", ["turbo-int3", "polar"])
def test_no_torch_op_encodes_pages_of_a_pool(name, monkeypatch):
    """Which a cache of these presets fills."""
    config = replace(parse_kv(name), sink=0, recent=0)
    codecs = tuple(Codec(side, 64, config.page) for side in (config.keys, config.values))
    monkeypatch.setattr(Codec, "encode", None)
    store = Paged(config, codecs)
    store.append(tuple(torch.randn(1, 1, config.page, 64) for _ in "kv"), 1)
    assert store.count == 1


def test_codes_of_the_kernel_are_those_of_the_golden_rows(subtests):
    rows = list(encode_rows())
    assert {row.case.split(".")[0] for row in rows} == {"64", "128", "polar"}
    for row in rows:
        with subtests.test(case=row.case):
            assert row.ok, row


def test_why_not():
    def why(keys, values, page=64):
        return launch.why_not(CacheConfig(Side(keys), Side(values), page=page), (128, 128))

    for name in ("turbo-int2", "turbo-int3", "turbo-int4", "polar", "polar-int3", "polar-int2"):
        assert launch.why_not(parse_kv(name), (128, 128)) is None
    assert "1 bit" in why(Codebook(1), Codebook(4))
    assert "angle" in why(Affine(4, 64), Polar(4, 4))
    assert why(Polar(4, 4), Full()) == "full precision has no Triton kernel"


def run_ptx(text: str, word: int, count: int) -> list[int]:
    """Run PTX on one 32-bit register: what it leaves in its outputs."""
    names = {f"${count}": word}

    def value(name):
        return names[name] if name in names else int(name, 0)

    def prmt(a, b, selector):
        table = (b << 32 | a).to_bytes(8, "little")
        nibbles = [selector >> 4 * i & 15 for i in range(4)]
        assert max(nibbles) < 8  # above it copies signs
        return int.from_bytes(bytes(table[i] for i in nibbles), "little")

    def lop3(a, b, c, bits):
        row = [(a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32)]
        return sum((bits >> at & 1) << i for i, at in enumerate(row))

    ops = {
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, n: a << n & 0xFFFFFFFF if n < 32 else 0,
        "shr.b32": lambda a, n: a >> n,  # of .b32 bits: without a sign
        "prmt.b32": prmt,
        "lop3.b32": lop3,
    }
    for line in re.findall(r"([\w.]+) ([^;]+);", text):
        if line[0] == ".reg":
            continue
        into, *given = line[1].split(", ")
        names[into] = ops[line[0]](*map(value, given))
    return [names[f"${i}"] for i in range(count)]


@pytest.mark.parametrize("bits", [2, 4])
def test_levels_by_ptx(bits):
    """Every code in every plane of either word."""
    planes, rng = 16 // bits, np.random.default_rng(0)
    table = levels.sphere(128, bits).astype(np.float16).view(np.uint16)
    at = layout.PlaneLayout(Codebook(bits), 128, 64, True)
    assert at.planes == planes
    for _ in range(64):
        codes = rng.integers(0, 2**bits, (2, planes))
        folded = [
            sum(int(at.folded(int(c))) << bits * i for i, c in enumerate(row)) for row in codes
        ]
        found = run_ptx(lookup(128, bits), folded[1] << 16 | folded[0], planes)
        right = [int(table[a]) | int(table[b]) << 16 for a, b in codes.T]
        assert found == right


def test_rows_on_a_gpu_go_on_where_they_stopped(tmp_path, monkeypatch):
    path, timed = tmp_path / "rows.jsonl", []

    def attention(config, shape):
        timed.append(config)
        if len(timed) == 2:
            raise KeyboardInterrupt
        return 5.0, 1000

    monkeypatch.setattr(bench, "CASES", {"tiny": bench.Shape(1, 2, 1, 128, 128)})
    monkeypatch.setattr(bench, "DTYPE", torch.float32)
    monkeypatch.setattr(bench, "baseline", lambda shape: (20.0, "flash rows"))
    monkeypatch.setattr(bench, "attention", attention)
    run = functools.partial(codes_by_triton.measure, path, ("tiny",), ("turbo-int2", "polar"))
    with pytest.raises(KeyboardInterrupt):
        run()
    run()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["kind"] for row in rows if "kind" in row] == [
        "torch flash rows",
        "turbo-int2",
        "polar",
    ]
    golden = [row for row in rows if "golden" in row]
    assert {row["golden"].split(",")[0] for row in golden} >= {
        "attention.128.4",
        "attention.64.4.4",
    }
    assert len(timed) == 3
