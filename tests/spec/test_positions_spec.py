"""Moments over positions: the closed form against sums over every position, and what is left of a moment."""

import numpy as np

from mlxkv.spec import positions


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def plain(dims, base=1e4):
    return base ** (-np.arange(0, dims, 2) / dims)


KINDS = {  # dims, pairs, frequencies
    "halves": (16, positions.rotary_pairs(16), plain(16)),
    "neighbours": (16, positions.rotary_pairs(16, interleaved=True), plain(16)),
    "part of the channels": (24, positions.rotary_pairs(16), plain(16)),
    "last channels": (24, positions.rotary_pairs(8, 16), plain(8)),
    "equal frequencies": (8, positions.rotary_pairs(8), np.array([0.5, 0.5, 0.0, 1e-9])),
    "whole turns": (8, positions.rotary_pairs(8), np.array([2 * np.pi, np.pi, 0.3, 4 * np.pi])),
    "none": (8, np.zeros((0, 2), int), np.zeros(0)),
}


def test_closed_form_is_the_mean_over_every_position(subtests):
    for span in ((0, 1), (0, 37), (100, 1100)):
        for kind in KINDS:
            with subtests.test(span=span, kind=kind):
                dims, pairs, frequencies = KINDS[kind]
                rows = normal(40, dims)
                moment, mean = rows.T @ rows / len(rows), rows.mean(0)
                rotations = [positions.rotation(t, pairs, frequencies, dims) for t in range(*span)]
                np.testing.assert_allclose(
                    positions.moment_over(moment, span, pairs, frequencies),
                    np.mean([r @ moment @ r.T for r in rotations], 0),
                    atol=1e-12,
                )
                np.testing.assert_allclose(
                    positions.mean_over(mean, span, pairs, frequencies),
                    np.mean([r @ mean for r in rotations], 0),
                    atol=1e-12,
                )


def test_rows_turn_as_their_moment(subtests):
    for kind in KINDS:
        with subtests.test(kind=kind):
            dims, pairs, frequencies = KINDS[kind]
            rows, t = normal(7, dims), np.arange(7) * 1000
            rotate = positions.rotate(rows, t, pairs, frequencies)
            for row, at, x in zip(rotate, t, rows, strict=True):
                np.testing.assert_allclose(
                    row, x @ positions.rotation(at, pairs, frequencies, dims).T, atol=1e-12
                )
            np.testing.assert_allclose(
                positions.rotate(rotate, -t, pairs, frequencies), rows, atol=1e-12
            )


def test_contexts_halve():
    assert positions.contexts(8192) == [(0, 8192), (0, 4096), (0, 2048), (0, 1024)]
    assert positions.contexts(1500) == [(0, 1500)]
