"""Tile kernels in the emulator, under both lane maps, against the spec's softmax and the plain ops."""

from contextlib import contextmanager, nullcontext
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from on_emulator import make, make_mma, make_tiles
from random_models import random_model
from record_sides import seal_by_ops
from samples import data, rms, softmax
from small_cache import SMALL, TIES, layout, walk

from mlxkv.cache import selftest
from mlxkv.cache.view import TILES
from mlxkv.codec.transform import Transform
from mlxkv.codec.transform import make as make_transform
from mlxkv.formats.config import Affine
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.records import RecordLayout
from mlxkv.metal import launch, tiles
from mlxkv.metal.attend import Run
from mlxkv.metal.lengths import alone
from mlxkv.models import attach, detach

# D, H, G, L, records, sink, live, key bits, value bits, dtype
SHAPES = [
    (64, 4, 1, 1, 4, 16, 20, 4, 4, mx.float16),
    (64, 6, 1, 8, 5, 16, 33, 4, 2, mx.bfloat16),
    (80, 2, 2, 4, 4, 16, 63, 2, 3, mx.float16),
    (128, 8, 2, 1, 37, 64, 31, 2, 2, mx.bfloat16),
    (256, 4, 1, 2, 19, 5, 31, 4, 4, mx.float16),
    (40, 16, 1, 1, 3, 0, 7, 4, 3, mx.float16),
]
BOUNDS = {mx.float16: 2e-3, mx.bfloat16: 6e-3}


@contextmanager
def divided(splits):
    """Kernels with so many threadgroups for the records and the windows of a head; None: as many as they choose."""
    with mock.patch.object(tiles, "splits_for", lambda *_: splits) if splits else nullcontext():
        tiles._plan.cache_clear()
        yield
    tiles._plan.cache_clear()


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
    """(output, what softmax over the decoded pages gives). factory: None for the latter alone. ramp: how much
    larger the last stored keys are."""
    dims, heads, kv_heads, new, count, n_sink, n_live, k_bits, v_bits, dtype = case
    specs = [Affine(b, g, bool(s)) for b, (g, s) in zip((k_bits, v_bits), formats, strict=True)]
    x = [mx.array(data(1, kv_heads, (count + 2) * 16, dims, seed=i)) for i in range(2)]
    x[0] = x[0] * mx.linspace(1, ramp, x[0].shape[2])[:, None]
    buffer, both, held = seal_by_ops(x, specs)
    turn = transform if isinstance(transform, Transform) else make_transform(transform, dims, 0)
    run = Run(buffer, count, both, 1, (turn, turn))
    paged = [y[:, :, : count * 16] for y in held]
    if turn is not None:
        paged = [turn.restore(p) for p in paged]
    shape = (1, kv_heads, n_sink + n_live + 7, dims)
    windows = [mx.array(data(*shape, seed=2 + i)).astype(dtype) for i in range(2)]
    sink = tuple(y[:, :, :n_sink] for y in windows) if n_sink else None
    live = tuple(y[:, :, n_sink:] for y in windows)  # 7 tokens more than are in use
    q = mx.array(data(1, heads, new, dims, seed=9)).astype(dtype)
    logits = mx.array(3 * data(16, seed=6)[:heads]) if sinks else None
    lengths = alone(((count, n_sink, n_live),), 0, 1)
    with divided(splits):
        call = q, [run], sink, live, lengths, dims**-0.5, factory, logits, softcap
        out = tiles.attend(*call) if factory else None
    keys, values = (
        mx.concatenate([w[:, :, :n_sink], p, w[:, :, n_sink : n_sink + n_live]], 2)
        for w, p in zip(windows, paged, strict=True)
    )
    return out, softmax(q, keys, values, dims**-0.5, logits, softcap)


def test_scores_are_capped(subtests):
    for case, factory in [(SHAPES[0], make_tiles), (SHAPES[2], make_mma)]:
        with subtests.test(case=case, factory=factory):
            out, spec = attended(case, factory, softcap=0.7)
            assert rms(out, spec) < BOUNDS[case[-1]]
            _, uncapped = attended(case, None)
            assert rms(uncapped, spec) > 0.05  # the cap matters here


def test_scores_that_grow_along_the_records(subtests):
    """The running maximum is raised again and again, and what was summed before shrinks."""
    for factory in [make_tiles, make_mma]:
        with subtests.test(factory=factory):
            case = (64, 4, 1, 1, 40, 16, 20, 4, 4, mx.float16)
            out, spec = attended(case, factory, splits=(1, 1), ramp=8)
            assert rms(out, spec) < 1e-2


# Lane maps of CUDA and Metal in turn.
TURNS = [(case, (make_mma, make_tiles)[i % 2]) for i, case in enumerate(SHAPES)]


def test_attend_is_softmax_over_what_is_stored(subtests):
    for case, factory in TURNS:
        with subtests.test(case=case, factory=factory):
            out, spec = attended(case, factory)
            assert rms(out, spec) < BOUNDS[case[-1]]


OPTIONS = (
    {"sinks": True, "splits": (2, 1)},
    {"transform": "none", "formats": ((32, 1), (32, 1))},
    {"transform": "hadamard", "splits": (3, 2), "formats": ((0, 0), (32, 1))},
    {"splits": (7, 1), "sinks": True, "formats": ((32, 0), (0, 0))},
)


def test_formats_splits_and_sinks(subtests):
    """With the lane maps of CUDA and Metal in turn."""
    for i, (bits, options) in enumerate(zip((2, 8, 4, 3), OPTIONS, strict=True)):
        with subtests.test(bits=bits, options=options):
            case = (64, 6, 2, 2, 21, 16, 20, bits, bits, mx.float16)
            out, spec = attended(case, (make_mma, make_tiles)[i % 2], **options)
            assert rms(out, spec) < (1.2e-2 if bits == 2 else 2e-3)  # kv_pair_near rounds more


def test_sixteen_simdgroups(monkeypatch):
    """What large GPUs run, with all rows of the merging at work."""
    monkeypatch.setattr(tiles, "SIMDGROUPS", 16)
    tiles._plan.cache_clear()
    out, spec = attended(SHAPES[1], make_mma, splits=(3, 1))
    assert rms(out, spec) < BOUNDS[mx.bfloat16]
    tiles._plan.cache_clear()


def test_a_matrix_for_each_kv_head():
    """Rotations that differ by head, as calibration makes them."""
    q = np.stack([np.linalg.qr(data(64, 64, seed=i))[0] for i in range(2)])
    turn = Transform(mx.array(q.swapaxes(1, 2).copy()), mx.array(q))
    for factory in (make_tiles, make_mma):
        out, spec = attended((64, 6, 2, 1, 9, 16, 20, 4, 4, mx.float16), factory, turn)
        assert rms(out, spec) < BOUNDS[mx.float16]


def test_queries_of_any_size_stay_finite():
    """Offsets of codes are multiplied with the queries' sums: halves must hold them."""
    case = (64, 4, 1, 1, 9, 16, 20, 4, 4, mx.float16)
    dims, count = case[0], case[4]
    x = mx.array(data(1, 1, count * 16, dims))
    buffer, both, _ = seal_by_ops((x, x), (Affine(4, 64), Affine(4, 64)))
    live = tuple(mx.array(data(1, 1, 20, dims, seed=2)).astype(mx.float16) for _ in range(2))
    q = mx.full((1, 4, 1, dims), 200.0, mx.float16)
    lengths = alone(((count, 0, 20),), 0, 1)
    out = tiles.attend(q, [Run(buffer, count, both)], None, live, lengths, 1.0, make_tiles)
    assert bool(mx.all(mx.isfinite(out.astype(mx.float32))))


def test_a_cache_decodes_by_tiles_as_by_plain_ops(subtests, trusted):
    for factory in (make_tiles, make_mma):
        with subtests.test(factory=factory):
            cache, _ = walk(factory, mx.float16, TIES)
            assert cache._store.plan.body == TILES


def test_a_model_decodes_by_tiles(trusted):
    model, prompt = random_model("llama"), mx.arange(90) % 50
    model.set_dtype(mx.float16)
    spoken = []
    for factory in (make_tiles, None):
        with launch.using(factory):
            reports = attach(model, SMALL)
            assert all(("tile" in r.kernel) == (factory is make_tiles) for r in reports)
            cache = make_prompt_cache(model)
            steps = generate_step(prompt, model, max_tokens=26, prompt_cache=cache)
            spoken.append([int(token) for token, _ in steps])
            detach(model)
    same = [a == b for a, b in zip(*spoken, strict=True)]
    assert all(same[:20])  # then rounding may part them


def test_a_wrong_tile_product_is_not_used():
    """Functions of the lane map, broken: the self-test has to refuse the tiles."""
    faults = [
        ("a.w[2 * k + h]", "a.w[2 * h + k]"),
        ("value += simd_shuffle_xor(value, ushort(4));\nreturn", "return"),
        ("b.w[1] = kv_halves(c.v[2], c.v[3]);", "b.w[1] = kv_halves(c.v[3], c.v[2]);"),
    ]
    for good, bad in faults:

        def broken(name, input_names, output_names, source, header="", good=good, bad=bad):
            if "tile" in name:
                assert good in header, good
                header = header.replace(good, bad)
            return make(name, input_names, output_names, source, header)

        reason = selftest.fault(PRESETS["srft-int2+g32"], 64, mx.float16, broken, tiled=True)
        assert reason is not None, good


def test_the_reason_why_not():
    both = RecordLayout(*(layout(4, 64, False, 128, side) for side in (True, False)))
    wide = RecordLayout(*(layout(4, 64, False, 512, side) for side in (True, False)))
    many = RecordLayout(*(layout(4, 16 * 2, False, 288, side) for side in (True, False)))
    assert tiles.why_not(both, 128, mx.float16, make_tiles) is None
    assert "no tiles" in tiles.why_not(both, 128, mx.float16, make)
    assert "16-bit types, not float32" in tiles.why_not(both, 128, mx.float32, make_tiles)
    assert "multiple of 8" in tiles.why_not(both, 100, mx.float16, make_tiles)
    assert "256 dims" in tiles.why_not(wide, 512, mx.float16, make_tiles)
    assert tiles.why_not(many, 288, mx.float16, make_tiles) is not None


def test_the_whole_head_of_a_group_of_128_rows_is_covered():
    """16 query heads a kv head, 8 new tokens: 16 tiles of rows."""
    out, spec = attended((64, 16, 1, 8, 5, 16, 33, 4, 4, mx.float16), make_mma)
    assert rms(out, spec) < BOUNDS[mx.float16]
