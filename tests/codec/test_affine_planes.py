"""Scores by planes of codes, which a CPU takes for many tokens: the products that MLX takes with few."""

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.codec import affine, packing
from mlxkv.formats.quantizers import Affine

PAGE, DIMS = 64, 128
SPECS = [
    *(Affine(2, 32), Affine(4, 64, True), Affine(8, 128), Affine(4, 128)),
    *(Affine(2, 64, True, "channel"), Affine(8, 64, axis="channel")),
]


@pytest.fixture
def planes(monkeypatch):
    """How often words are split into planes; as on a machine with a compiler."""
    seen, split = [], packing.planes
    monkeypatch.setattr(affine, "_has_compiler", lambda: True)
    monkeypatch.setattr(packing, "planes", lambda bits: seen.append(bits) or split(bits))
    return seen


def case(spec, rows, tokens, dims=DIMS):
    draw = np.random.default_rng(0).standard_normal
    x = draw((2, 2, tokens, dims)).astype(np.float32)
    x[..., 3] += 9
    stored = affine.encode(spec, mx.array(x), PAGE)
    decoded = np.array(affine.decode(spec, stored, dims, PAGE, mx.float32), np.float64)
    q = draw((2, 2, rows, dims)).astype(np.float32)
    return mx.array(q), stored, q.astype(np.float64) @ decoded.swapaxes(-1, -2)


def test_they_are_products_with_decoded_keys(subtests, planes, monkeypatch):
    monkeypatch.setattr(affine, "PLANE_TOKENS", 1)
    for spec in SPECS:
        for rows in (1, 20):
            with subtests.test(spec=spec, rows=rows):
                planes.clear()
                q, stored, expected = case(spec, rows, 2 * PAGE)
                with mx.stream(mx.cpu):
                    got = np.array(affine.scores(spec, q, stored, DIMS, PAGE))
                assert planes == [spec.bits]
                assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


def test_others_are_as_before(subtests, planes):
    few = affine.PLANE_TOKENS - PAGE
    for spec, tokens, dims in (
        (Affine(4), few, 128),
        (Affine(3), 1024, 128),
        (Affine(4), 1024, 80),
    ):
        with subtests.test(spec=spec, tokens=tokens, dims=dims):
            planes.clear()
            q, stored, expected = case(spec, 1, tokens, dims)
            got = np.array(affine.scores(spec, q, stored, dims, PAGE))
            assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()
            assert bool(planes) == (dims == 80)  # whose whole groups are read so


def test_without_a_compiler_words_stay_whole(planes, monkeypatch):
    monkeypatch.setattr(affine, "_has_compiler", lambda: False)
    q, stored, expected = case(Affine(4), 1, affine.PLANE_TOKENS)
    got = np.array(affine.scores(Affine(4), q, stored, DIMS, PAGE))
    assert not planes
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()
