"""Siblings of the balanced maps as plain operations: each coder against the spec, the cache, and the tables."""

import json

import mlx.core as mx
import numpy as np
import pytest

from experiments.rivals import __main__ as rivals
from experiments.rivals import coders, reading
from experiments.rivals.caches import Lossy
from experiments.rivals.coders import Coder, Fit
from mlxkv.errors import UserError
from mlxkv.spec import affine, oscar
from mlxkv.spec.mixed import transform_coding as spec

DIMS = 32


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.fixture(scope="module")
def fit() -> Fit:
    """Two heads with outlier channels, offsets, and queries that read some directions more than others."""
    size = np.exp(normal(2, 1, DIMS, seed=1))
    rows = normal(2, 900, DIMS) * size + 6 * normal(2, 1, DIMS, seed=2)
    queries = normal(2, 900, DIMS, seed=3) * np.exp(normal(2, 1, DIMS, seed=4))
    noise, reads = (x.swapaxes(-1, -2) @ x / 900 for x in (rows, queries))
    return Fit(rows, noise, reads, np.stack([oscar.rotation(one) for one in reads]))


def coded(coder: Coder, x: np.ndarray) -> np.ndarray:
    return np.array(coder.code(mx.array(x[None].astype(np.float32))))[0]


def rms(x) -> float:
    return float(np.sqrt((np.asarray(x) ** 2).mean()))


def score_error(fit: Fit, coder: Coder) -> float:
    """The error of scores over their spread between keys, for queries with the moment `reads`."""
    new = fit.rows[:, :320]
    gone, apart = coded(coder, new) - new, new - new.mean(1, keepdims=True)
    squares = [np.einsum("gnd,gde,gne->", x, fit.reads, x) for x in (gone, apart)]
    return float(np.sqrt(squares[0] / squares[1]))


@pytest.mark.parametrize("centred", (False, True))
def test_rotated_keys_are_those_of_the_spec(fit, centred):
    coder, x = coders.rotated(fit, 0.96, centred), fit.rows[:, :64]
    back = coded(coder, x)
    for g in range(2):
        mean = fit.mean[g] if centred else 0.0
        stored = spec.centred(x[g], mean) @ fit.rotation[g]
        codes = affine.affine_encode(stored, 2, DIMS, clip=0.96)
        expected = affine.affine_decode(*codes, DIMS) @ fit.rotation[g].T + mean
        close = np.abs(back[g] - expected) < 1e-3
        assert close.mean() > 0.98  # but for ties of float32
    assert coder.bits == 2 + 32 / DIMS


def test_grouped_keys_are_those_of_the_spec(fit):
    coder, x = coders.grouped(fit, rounds=3), fit.rows[:, :64]
    back = coded(coder, x)
    for g in range(2):
        down = spec.attention_map(fit.regular(True)[0][g], fit.regular(True)[1][g])[0]
        down = down[:, spec.stratified(DIMS)]
        stored = (fit.rows[g] - fit.mean[g]) @ down
        parts = (stored / np.sqrt((stored**2).mean(-1, keepdims=True))).reshape(-1, DIMS // 4, 4)
        books = np.stack([spec.fp8(spec.codebook(parts[:, i], 256, 3)) for i in range(DIMS // 4)])
        codes = spec.grouped_encode((x[g] - fit.mean[g]) @ down, books)
        expected = spec.grouped_decode(*codes, books) @ np.linalg.inv(down) + fit.mean[g]
        assert rms(back[g] - expected) < 0.02 * rms(expected - x[g])
    assert coder.bits == 2 + 16 / DIMS


def test_allotted_bits_are_those_of_the_spec(fit):
    coder, bits = coders.allotted(fit, 2.0)
    assert bits.sum() == 2 * 2 * DIMS and bits.max() > 3 and (bits == 0).any()
    assert coder.bits == 2 + 16 / DIMS
    x = fit.rows[:, :64]
    back = coded(coder, x)
    for g in range(2):
        down, variances = spec.attention_map(fit.regular(True)[0][g], fit.regular(True)[1][g])
        white = down / np.sqrt(variances)
        codes = spec.levels_encode((x[g] - fit.mean[g]) @ white, bits[g])
        expected = spec.levels_decode(*codes, bits[g]) @ np.linalg.inv(white) + fit.mean[g]
        assert rms(back[g] - expected) < 0.02 * rms(expected - x[g])


def test_flat_keys_keep_one_direction(fit):
    coder, x = coders.flat(fit, 0.5, 0.96), fit.rows[:, :64]
    assert coder.bits == pytest.approx((2 * 31 + 48) / 32)
    back = coded(coder, x)
    for g in range(2):
        down = spec.partly_whitened(*(m[g] for m in fit.regular(False)), 0.5)[0]
        gap = np.abs((back[g] - x[g]) @ down)
        assert gap[:, 0].max() < 0.01 < gap[:, 1:].max()


def test_where_keys_have_an_offset_removal_pays_and_codebooks_pay_more(fit):
    error = {
        "rotated": score_error(fit, coders.rotated(fit, 0.96)),
        "centred": score_error(fit, coders.rotated(fit, 0.96, True)),
        "balanced": score_error(fit, coders.balanced(fit, 0.92, True)),
        "grouped": score_error(fit, coders.grouped(fit, 8)),
        "allotted": score_error(fit, coders.allotted(fit, 2.0)[0]),
    }
    assert error["centred"] < 0.7 * error["rotated"]
    assert error["balanced"] < error["centred"]
    assert max(error["grouped"], error["allotted"]) < error["balanced"]


def test_a_centred_coder_does_not_see_an_offset(fit):
    far = fit.rows + 50.0
    moved = Fit(far, far.swapaxes(-1, -2) @ far / 900, fit.reads, fit.rotation)
    for make in (lambda f: coders.rotated(f, 0.96, True), lambda f: coders.balanced(f, 0.92, True)):
        gone = [coded(make(f), f.rows[:, :64]) - f.rows[:, :64] for f in (fit, moved)]
        assert np.isclose(gone[0], gone[1], atol=1e-2).mean() > 0.95
    plain = [coded(coders.rotated(f, 0.96), f.rows[:, :64]) - f.rows[:, :64] for f in (fit, moved)]
    assert rms(plain[1]) > 2 * rms(plain[0])


@pytest.mark.parametrize("steps", ([300], [100, 1, 1, 150, 1], [64] * 5 + [1] * 70))
def test_the_cache_codes_what_compressed_caches_seal(steps):
    """Tokens behind the windows come back coded by the next call, all others as they were."""
    total, halves = sum(steps), Coder(lambda x: x / 2, 1.0)
    keys, values = (mx.array(normal(1, 2, total, 8, seed=s).astype(np.float32)) for s in (0, 1))
    cache, at = Lossy((halves, halves), 16, 32, 64), 0
    for count in steps:
        sink, pages = affine.split(at, 16, 32, 64)
        part = slice(at, at + count)
        for read, given in zip(
            cache.update_and_fetch(keys[:, :, part], values[:, :, part]),
            (keys, values),
            strict=True,
        ):
            expected = np.array(given[:, :, : at + count])
            expected[:, :, sink : sink + 64 * pages] /= 2
            np.testing.assert_array_equal(np.array(read), expected)
        at += count
    assert cache.done == 64 * affine.split(total, 16, 32, 64)[1] > 0


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(reading, "CALIBRATION", 600)
    monkeypatch.setattr(reading, "STORIES", ("stories-1",))
    monkeypatch.setattr(rivals, "STORIES", ("stories-1",))
    monkeypatch.setattr(reading, "CORPUS", ("prose",))
    monkeypatch.setattr(rivals, "CORPUS", ("prose",))


def test_a_table_of_rivals(short, model_folder, capsys, monkeypatch):
    monkeypatch.setattr(rivals, "ARMS", ("rotation", "rotation, keys centred", "allotted 1.5"))
    arguments = [
        "--model",
        str(model_folder),
        "--kv",
        "oscar-int2",
        "--context",
        "300",
        "--decode",
        "4",
    ]
    rivals.main(arguments)
    out = capsys.readouterr().out
    arms = json.loads(out.splitlines()[-1])["arms"]
    assert list(arms) == [*rivals.ARMS, "oscar-int2"]
    kl = {name: one["kl"]["prose"]["decode"] for name, one in arms.items()}
    assert all(x > 0 for x in kl.values())
    # The control: the same rotation, clip and windows as the preset.
    assert kl["rotation"] == pytest.approx(kl["oscar-int2"], rel=0.05)
    assert arms["rotation"]["bits"] == arms["oscar-int2"]["bits"]
    assert "| arm | bits | prompt | prompt, over oscar-int2 |" in out


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (rivals, ["--context", "1"], "--context"),
        (rivals, ["--decode", "1"], "--decode"),
        (rivals, ["--kv", "int5x"], "int5x"),
        (rivals, ["--out", "/nowhere/there.json"], "--out"),
    ],
)
def test_a_mistake_is_refused_before_a_model_is_loaded(command, arguments, message):
    with pytest.raises(UserError, match=message):
        command.main(arguments)


def test_a_context_beyond_the_corpus_is_refused(model_folder):
    with pytest.raises(UserError, match="choose a shorter context"):
        rivals.main(["--model", str(model_folder), "--kv", "int4", "--context", "60000"])
