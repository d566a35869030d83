"""The formats of the other methods in both bodies of decode attention, under both lane maps."""

import mlx.core as mx
import pytest
from on_emulator import make, make_mma, make_tiles
from test_kernels import data, rms, softmax

from mlxkv import attention, golden, kernels, selftest, tiles
from mlxkv.attention import attend
from mlxkv.cache import View
from mlxkv.config import Affine, CacheConfig, Codebook, DualScale, Polar, PolarTree, Side
from mlxkv.golden import codebook as golden_codebook
from mlxkv.metal import launch
from mlxkv.presets import PRESETS
from mlxkv.sealed import Codes, Records

OWN_BOOKS = ((0.3, *(0.5 + 0.4 * i for i in range(15))),) + ((0.2, 0.6, 0.9, 1.3),) * 3
# keys, values, page, transform of both
FORMATS = {
    "turbo": (Codebook(4), Codebook(2), 64, "random"),
    "turbo-int3": (Codebook(3), Affine(4, 32), 64, "hadamard"),
    "qjl": (Codebook(4, residual=True), Codebook(3), 64, "random"),
    "qjl-int3": (Codebook(3, residual=True), Codebook(4), 32, "none"),
    "tree": (PolarTree(), PolarTree(), 64, "random"),
    "tree of its own": (PolarTree(OWN_BOOKS), PolarTree(), 64, "none"),
    "online": (PolarTree(online=True), PolarTree(online=True), 64, "random"),
    "online-kvarn": (PolarTree(online=True), DualScale(4, "token"), 64, "none"),
    "kivi": (Affine(2, 32, axis="channel"), Affine(2, 32), 64, "none"),
    "kivi-16": (Affine(4, 16, axis="channel"), Affine(8, 32), 32, "none"),
    "symmetric": (Affine(3, 32, True, axis="channel"), Affine(3, 32, True), 32, "none"),
    "kvarn": (DualScale(4, "channel"), DualScale(2, "token"), 64, "srft"),
    "kvarn-int3": (DualScale(3, "channel"), DualScale(3, "token"), 64, "none"),
    "polar": (Polar(4, 4), Affine(4, 64), 64, "none"),
    "polar-int3": (Polar(3, 3), DualScale(3, "token"), 64, "none"),
    "polar-tree": (Polar(2, 2), PolarTree(), 64, "none"),
}
PORTABLE = ("qjl", "qjl-int3", "tree", "tree of its own", "online", "online-kvarn", "polar-tree")


def stores(name, dims, factory, tiled=False, pages=3):
    """(pages as records, the same as codes) of a format."""
    keys, values, page, turn = FORMATS[name]
    turn = "random" if turn != "none" and dims & (dims - 1) else turn
    config = CacheConfig(Side(keys, turn), Side(values, turn), page=page)
    pair = tuple(mx.array(data(1, 2, pages * page, dims, seed=i)) for i in range(2))
    ours, plain = Records(config, (dims, dims), factory, tiled), Codes(config, (dims, dims))
    plain.append(pair, pages)
    ours.restore(plain.state, pages)  # by plain ops: a fault of sealing has tests of its own
    return ours, plain


def run(name, dims, heads, new, dtype, factory, tiled=False, pages=3):
    ours, plain = stores(name, dims, factory, tiled, pages)
    windows = [mx.array(data(1, 2, 21, dims, seed=2 + i)).astype(dtype) for i in range(2)]
    sink, live = tuple(x[:, :, :4] for x in windows), tuple(x[:, :, 4:] for x in windows)
    q = mx.array(data(1, heads, new, dims, seed=9)).astype(dtype)
    logits = mx.array(data(16, seed=6)[:heads])
    mask = "causal" if new > 1 else None
    view = View(live, sink, ours.read(0, pages))
    assert attention.why_not(q, view, mask) is None
    out = attend(q, view, dims**-0.5, mask, logits)
    keys, values = attention._whole(View(live, sink, plain.read(0, pages)), mx.float32)
    return rms(out, softmax(q, keys, values, dims**-0.5, 0, logits))


def each(names, quick):
    """Every case builds a kernel: some with the quick tests, all with the slow ones."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", each(FORMATS, ("tree of its own", "kvarn")))
def test_tiles_are_softmax_over_what_is_stored(name):
    """Tiles of CUDA, more rows than a tile has, dims that are no whole blocks where they may be."""
    dims = 128 if "polar" in name or "qjl" in name else 80
    ours, _ = stores(name, dims, make_mma)
    assert tiles.why_not(ours.layout, dims, mx.float16, make_mma) is None
    assert run(name, dims, 6, 4, mx.float16, make_mma, tiled=True) < 3e-3


@pytest.mark.parametrize("name", each(FORMATS, ("polar-tree", "qjl")))
def test_the_tiles_of_metal_are_too(name):
    assert run(name, 64, 2, 1, mx.float16, make_tiles, tiled=True) < 3e-3


@pytest.mark.parametrize("bits", each((2, 4), (2,)))  # two records at once, and one
def test_scales_of_channels_change_inside_the_run_of_a_simdgroup(bits, monkeypatch):
    """Runs of 6 records, pages of 4: some simdgroups begin and end inside a page."""
    side = Affine(bits, 64, axis="channel"), Affine(bits, 32), 64, "none"
    monkeypatch.setitem(FORMATS, "runs", side)
    monkeypatch.setattr(tiles, "splits_for", lambda *args: (1, 1))
    assert run("runs", 40, 2, 1, mx.float16, make_mma, tiled=True, pages=9) < 3e-3


@pytest.mark.parametrize("name", each(PORTABLE, ("online",)))
def test_portable_attention_is_softmax_over_what_is_stored(name):
    dims = 128 if "qjl" in name or "polar" in name else 80
    assert run(name, dims, 6, 3, mx.float32, make) < 2e-6


@pytest.mark.parametrize("name", each(PORTABLE, ("tree of its own",)))
def test_records_hold_the_same_as_codes_and_unseal_reads_them(name):
    dims = 128 if "qjl" in name or "polar" in name else 80
    ours, plain = stores(name, dims, make)
    back = Codes(ours.config, (dims, dims))
    back.restore(ours.state, 3)
    for side in ("keys", "values"):
        for key, x in plain.state[side].items():
            assert mx.array_equal(back.state[side][key], x), (side, key)
    live = mx.array(data(1, 2, 5, dims, seed=7))
    for side in (0, 1):
        for start, stop in ((0, 3), (1, 2)):  # a cut of the buffer has headers of its own
            found, right = (
                s.read(start, stop).between(None, (live, live))[side] for s in (ours, plain)
            )
            assert rms(found, right) < 3e-6
            found, right = (s.read(start, stop).decode(side, mx.float32) for s in (ours, plain))
            assert rms(found, right) < 3e-6


@pytest.mark.slow
def test_the_golden_tensors_hold_with_kernels():
    with launch.using(make):
        rows = [row for row in golden_codebook.polar_tree_rows() if row.table == "attention"]
        residual = [row for row in golden_codebook.codebook_rows() if row.table == "attention"]
    assert len(rows) == 3 and len(residual) == 3
    assert not [row for row in [*rows, *residual] if not row.ok]
    assert golden.BOUNDS["attention"] < 1e-5


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        pytest.param(  # which half of eight dims
            "of_eight * metal::fast::sin(three)",
            "of_eight * metal::fast::cos(three)",
            marks=pytest.mark.slow,
        ),
        ("kv_tree_two(high, 16 + 2 * h)", "kv_tree_two(high, 16)"),
    ],
)
def test_a_fault_in_the_tree_is_found(good, bad):
    def broken(name, input_names, output_names, source, header=""):
        assert good in header or "merge" in name
        return make(name, input_names, output_names, source, header.replace(good, bad))

    assert run("tree", 64, 2, 1, mx.float32, broken) > 1e-2


def test_what_tiles_do_not_read_says_why():
    def why(keys, values, dims=64):
        config = CacheConfig(Side(keys), Side(values), page=64)
        layout = kernels.record_layout(config, dims, dims)
        return tiles.why_not(layout, dims, mx.float16, make_tiles)

    channel = Affine(4, 32, axis="channel")
    assert why(channel, Affine(4)) is None
    assert "scales per channel of values" in why(Affine(4), channel)
    assert "scales swapped" in why(DualScale(4, "token"), Affine(4))
    assert "256 dims" in why(Codebook(4, residual=True), Codebook(4), 256)
    assert why(PolarTree(), PolarTree(), 256) is None


@pytest.mark.slow
@pytest.mark.parametrize("body", (make, make_mma), ids=("portable", "tiles"))
@pytest.mark.parametrize(
    "name", ("polar-tree+online", "turbo-int3+qjl", "kvarn-int2", "polar-int2", "int2")
)
def test_presets_pass_their_own_test(name, body):
    assert selftest.fault(PRESETS[name], 64, mx.float16, body, body is make_mma) is None
