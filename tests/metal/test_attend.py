"""Decode attention over records in the emulator: the portable body, and tiles under both lane maps, against the
spec's softmax over what is stored."""

import mlx.core as mx
import numpy as np
import pytest
from on_emulator import make, make_mma, make_tiles, quantize_by_ops
from samples import data, rms, softmax

from mlxkv.codec.transform import Transform
from mlxkv.codec.transform import make as make_transform
from mlxkv.formats.quantizers import Affine
from mlxkv.metal import attend as portable
from mlxkv.metal import tiles
from mlxkv.metal.attend import Run
from mlxkv.metal.lengths import separate_lengths

BOUNDS = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 6e-3}
CAP = {"softcap": 0.7}
BY_TOKEN = {"formats": ((64, 0), (32, 1)), "transform": "values"}
# D, H, G, L, records, sink, recent, key bits, value bits, dtype
PORTABLE = [
    ((64, 4, 1, 1, 4, 16, 20, 4, 4, mx.float16), CAP),
    ((64, 6, 1, 8, 5, 16, 33, 4, 2, mx.bfloat16), {"sinks": True}),
    ((96, 10, 2, 3, 3, 0, 17, 3, 8, mx.float32), {}),
    ((80, 2, 2, 4, 4, 16, 63, 2, 3, mx.float32), CAP | {"sinks": True}),
    ((64, 6, 2, 1, 0, 0, 40, 4, 4, mx.float32), {}),
    ((256, 4, 1, 2, 3, 5, 31, 4, 4, mx.float16), {"sinks": True}),
    ((40, 16, 1, 1, 3, 16, 7, 4, 3, mx.float32), {}),
]
TILES = [
    ((64, 4, 1, 1, 4, 16, 20, 4, 4, mx.float16), CAP),
    ((64, 16, 1, 8, 5, 16, 33, 4, 2, mx.bfloat16), {}),  # 128 rows
    ((80, 2, 2, 4, 4, 16, 63, 2, 3, mx.float16), CAP),
    ((128, 8, 2, 1, 37, 64, 31, 2, 2, mx.bfloat16), {}),
    ((256, 4, 1, 2, 19, 5, 31, 4, 4, mx.float16), {}),
    ((40, 16, 1, 1, 3, 0, 7, 4, 3, mx.float16), {}),
]
# bits: formats, splits, sinks.
OPTIONS = {
    2: {"sinks": True, "splits": (2, 1)},
    8: {"transform": "heads", "formats": ((32, 1), (32, 1))},
    4: {"transform": "hadamard", "splits": (3, 2), "formats": ((0, 0), (32, 1))},
    3: {"splits": (7, 1), "sinks": True, "formats": ((32, 0), (0, 0))},
}


def turns_of(transform: str, dims: int) -> tuple:
    """The transforms of keys and values. "values": of these alone, by a matrix. "heads": a rotation a head."""
    if transform == "values":
        up = mx.array(np.linalg.qr(data(dims, dims, seed=5))[0])
        return None, Transform(up.T, up)
    if transform == "heads":
        q = np.stack([np.linalg.qr(data(dims, dims, seed=i))[0] for i in range(2)])
        return (Transform(mx.array(q.swapaxes(1, 2).copy()), mx.array(q)),) * 2
    return (make_transform(transform, dims, 0),) * 2


def attended(
    case,
    factory,
    transform="srft",
    sinks=False,
    splits=None,
    formats=((64, 0), (64, 0)),
    softcap=None,
    ramp=1,
):
    """(output, what softmax over the decoded pages gives). splits: threadgroups for the records and the windows of a
    head, where not as many as the kernels choose. ramp: how much larger the last stored keys are than the first."""
    dims, heads, kv_heads, new, count, n_sink, n_recent, k_bits, v_bits, dtype = case
    specs = [Affine(b, g, bool(s)) for b, (g, s) in zip((k_bits, v_bits), formats, strict=True)]
    x = [mx.array(data(1, kv_heads, (count + 2) * 16, dims, seed=i)) for i in range(2)]
    x[0] = x[0] * mx.linspace(1, ramp, x[0].shape[2])[:, None]
    buffer, whole, held = quantize_by_ops(x, specs)
    layer_maps = turns_of(transform, dims)
    run = Run(buffer, count, whole, 1, layer_maps)  # of count + 2 records
    paged = [y[:, :, : count * 16] for y in held]
    paged = [
        y if transform is None else transform.restore(y)
        for y, transform in zip(paged, layer_maps, strict=True)
    ]
    shape = (1, kv_heads, n_sink + n_recent + 7, dims)
    windows = [mx.array(data(*shape, seed=2 + i)).astype(dtype) for i in range(2)]
    sink = tuple(y[:, :, :n_sink] for y in windows) if n_sink else None
    recent = tuple(y[:, :, n_sink:] for y in windows)  # 7 tokens more than are in use
    q = mx.array(data(1, heads, new, dims, seed=9)).astype(dtype)
    logits = mx.array(3 * data(16, seed=6)[:heads]) if sinks else None
    call = (
        q,
        [run],
        sink,
        recent,
        separate_lengths(((count, n_sink, n_recent),), 0, 1),
        dims**-0.5,
        factory,
    )
    body = tiles if getattr(factory, "tiles", False) else portable
    with pytest.MonkeyPatch.context() as patch:
        if splits:
            patch.setattr(tiles, "splits_for", lambda *_: splits)
        tiles._plan.cache_clear()
        out = body.attend(*call, logits, softcap)
    tiles._plan.cache_clear()
    keys, values = (
        mx.concatenate([w[:, :, :n_sink], p, w[:, :, n_sink : n_sink + n_recent]], 2)
        for w, p in zip(windows, paged, strict=True)
    )
    spec = softmax(q, keys, values, dims**-0.5, logits, softcap)
    if softcap:  # which matters here
        assert rms(softmax(q, keys, values, dims**-0.5, logits), spec) > 0.05
    return out, spec


def test_the_portable_body(subtests):
    for case, options in PORTABLE:
        with subtests.test(case=case, options=options):
            assert rms(*attended(case, make, **BY_TOKEN, **options)) < BOUNDS[case[-1]]


def test_parts_of_dims_that_are_no_whole_groups():
    """A simdgroup's share of the values begins in the middle of a group."""
    case = (160, 4, 1, 1, 3, 0, 7, 4, 4, mx.float32)
    assert rms(*attended(case, make, "none", formats=((0, 0), (64, 0)))) < BOUNDS[mx.float32]


def test_queries_that_need_more_memory_than_scores():
    case = (384, 2, 1, 1, 3, 0, 7, 4, 4, mx.float32)
    assert rms(*attended(case, make, "random", formats=((0, 0), (0, 0)))) < BOUNDS[mx.float32]


def test_tiles(subtests):
    """With the lane maps of CUDA and Metal in turn."""
    for i, (case, options) in enumerate(TILES):
        with subtests.test(case=case, options=options):
            out, spec = attended(case, (make_mma, make_tiles)[i % 2], **options)
            assert rms(out, spec) < BOUNDS[case[-1]]


def test_formats_splits_and_sinks_of_tiles(subtests):
    for i, (bits, options) in enumerate(OPTIONS.items()):
        with subtests.test(bits=bits, options=options):
            case = (64, 6, 2, 2, 21, 16, 20, bits, bits, mx.float16)
            out, spec = attended(case, (make_mma, make_tiles)[i % 2], **options)
            assert rms(out, spec) < (1.2e-2 if bits == 2 else 2e-3)  # kv_pair_near rounds more


def test_scores_that_grow_along_the_records():
    """The running maximum is raised again and again, and what was summed before shrinks."""
    case = (64, 4, 1, 1, 80, 16, 20, 4, 4, mx.float16)
    assert rms(*attended(case, make, **BY_TOKEN, ramp=8)) < BOUNDS[mx.float16]
    case = (64, 4, 1, 1, 40, 16, 20, 4, 4, mx.float16)
    assert rms(*attended(case, make_tiles, splits=(1, 1), ramp=8)) < 1e-2


def test_sixteen_simdgroups(monkeypatch):
    """What large GPUs run, with all rows of the merging at work."""
    monkeypatch.setattr(tiles, "SIMDGROUPS", 16)
    case = (64, 6, 1, 8, 5, 16, 33, 4, 2, mx.bfloat16)
    assert rms(*attended(case, make_mma, splits=(3, 1))) < BOUNDS[mx.bfloat16]


def test_queries_of_any_size_stay_finite():
    """Offsets of codes are multiplied with the queries' sums: halves must hold them."""
    x = mx.array(data(1, 1, 9 * 16, 64))
    buffer, both, _ = quantize_by_ops((x, x), (Affine(4, 64), Affine(4, 64)))
    recent = tuple(mx.array(data(1, 1, 20, 64, seed=2)).astype(mx.float16) for _ in range(2))
    q, lengths = mx.full((1, 4, 1, 64), 200.0, mx.float16), separate_lengths(((9, 0, 20),), 0, 1)
    out = tiles.attend(q, [Run(buffer, 9, both)], None, recent, lengths, 1.0, make_tiles)
    assert bool(mx.all(mx.isfinite(out.astype(mx.float32))))
