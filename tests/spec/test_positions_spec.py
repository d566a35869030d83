"""Moments over positions: the closed form against sums over every position, and what is left of a moment."""

import numpy as np

from mlxkv.spec import balanced, positions


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def plain(dims, base=1e4):
    return base ** (-np.arange(0, dims, 2) / dims)


def llama3(dims, base=5e5, factor=8.0, old=8192):
    wave = 2 * np.pi / plain(dims, base)
    smooth = np.clip((old / wave - 1) / 3, 0, 1)
    return plain(dims, base) * ((1 - smooth) / factor + smooth)


KINDS = {  # dims, pairs, frequencies
    "halves": (16, positions.rotary_pairs(16), plain(16)),
    "neighbours": (16, positions.rotary_pairs(16, interleaved=True), plain(16)),
    "part of the channels": (24, positions.rotary_pairs(16), plain(16)),
    "last channels": (24, positions.rotary_pairs(8, 16), plain(8)),
    "linear": (16, positions.rotary_pairs(16), plain(16) / 8),
    "llama3": (16, positions.rotary_pairs(16), llama3(16)),
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
                turns = [positions.rotation(t, pairs, frequencies, dims) for t in range(*span)]
                np.testing.assert_allclose(
                    positions.moment_over(moment, span, pairs, frequencies),
                    np.mean([r @ moment @ r.T for r in turns], 0),
                    atol=1e-12,
                )
                np.testing.assert_allclose(
                    positions.mean_over(mean, span, pairs, frequencies),
                    np.mean([r @ mean for r in turns], 0),
                    atol=1e-12,
                )


def test_rows_turn_as_their_moment(subtests):
    for kind in KINDS:
        with subtests.test(kind=kind):
            dims, pairs, frequencies = KINDS[kind]
            rows, t = normal(7, dims), np.arange(7) * 1000
            turned = positions.turned(rows, t, pairs, frequencies)
            for row, at, x in zip(turned, t, rows, strict=True):
                np.testing.assert_allclose(
                    row, x @ positions.rotation(at, pairs, frequencies, dims).T, atol=1e-12
                )
            np.testing.assert_allclose(
                positions.turned(turned, -t, pairs, frequencies), rows, atol=1e-12
            )


def test_keys_at_every_position_have_the_centred_moment():
    dims, pairs, frequencies = KINDS["part of the channels"]
    rows, span = normal(50, dims) + 3 * normal(dims, seed=1), (0, 300)
    everywhere = np.concatenate(
        [positions.turned(rows, np.full(50, t), pairs, frequencies) for t in range(*span)]
    )
    mean = positions.mean_over(rows.mean(0), span, pairs, frequencies)
    moment = positions.moment_over(rows.T @ rows / 50, span, pairs, frequencies)
    np.testing.assert_allclose(
        balanced.about_mean(moment, mean), np.cov(everywhere.T, ddof=0), atol=1e-10
    )


def test_fast_pairs_keep_their_energy_alone_and_slow_ones_everything():
    dims, pairs = 8, positions.rotary_pairs(8)
    frequencies = np.array([1.0, 0.4, 1e-9, 2e-9])
    rows = normal(40, dims) + 1
    moment = rows.T @ rows / 40
    over = positions.moment_over(moment, (0, 1 << 17), pairs, frequencies)
    slow = np.array([2, 3, 6, 7])
    np.testing.assert_allclose(over[np.ix_(slow, slow)], moment[np.ix_(slow, slow)], atol=2e-3)
    fast = np.array([0, 4])
    np.testing.assert_allclose(
        over[np.ix_(fast, fast)], np.eye(2) * moment[fast, fast].mean(), atol=1e-3
    )
    assert np.abs(over[np.ix_(fast, slow)]).max() < 1e-3 < np.abs(moment[fast][:, slow]).max()


def test_contexts_halve():
    assert positions.contexts(8192) == [(0, 8192), (0, 4096), (0, 2048), (0, 1024)]
    assert positions.contexts(1500) == [(0, 1500)]
