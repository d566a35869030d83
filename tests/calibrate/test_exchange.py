"""What errors of keys and values cost a model: the law, Fisher's information, and the bits that follow from them."""

from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from calibration_inputs import TEXT, at_zero, data, moments_over, seen_by

from mlxkv.calibration import exchange, measure, moments
from mlxkv.calibration.exchange import ExchangeMeasure
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact, mixed_bits, sums
from mlxkv.formats.calibration.layers import fitted
from mlxkv.formats.names import parse_kv
from mlxkv.patching.observers import AttentionCall, PlainObserver
from mlxkv.patching.patch import patched
from mlxkv.patching.probe import find
from mlxkv.patching.trees import own_caches, put
from mlxkv.spec import mixed_bits as spec


@pytest.fixture(scope="module")
def information(model):
    with patched(model):
        heads = {place: x.heads for place, x in find(model).shapes.items()}
        yield heads, exchange.fisher(model, heads, TEXT, [])


def falling(heads, dims, spread, seed):
    x = np.exp(spread * np.random.default_rng(seed).standard_normal((heads, dims)))
    return np.sort(x)[:, ::-1]


def test_sums_over_calls_are_the_laws():
    q, k, v = data(4, 300, 64), data(2, 300, 64, seed=1), data(2, 300, 32, seed=2) + 1
    root = data(2, 32, 32, seed=3)
    fisher = (root @ root.swapaxes(-1, -2)).astype(np.float64)
    law, weights = spec.exchange(*(x.astype(np.float64) for x in (q, k, v)), fisher, 0.2, sink=16)
    scores = np.where(np.tri(300, dtype=bool), 0.2 * q @ k.repeat(2, 0).swapaxes(-1, -2), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out = p / p.sum(-1, keepdims=True) @ v.repeat(2, 0)
    found = ExchangeMeasure(fisher)
    for start, stop in ((0, 130), (130, 210), (210, 300)):
        exact = mx.array(k[None, :, :stop]), mx.array(v[None, :, :stop])
        part = (
            mx.array(q[None, :, start:stop]),
            mx.array(out[None, :, start:stop].astype(np.float32)),
        )
        call = AttentionCall(exact, part[0], 0.2, "causal", None, part[1])
        if (asked := moments.far_attention(call, 16)) is not None:
            costs = np.array(found.add(call, *asked, 16)).reshape(4, -1)
            np.testing.assert_allclose(costs, weights[:, start + np.array(asked[0])], rtol=1e-3)
    tail = v[:, 16:].astype(np.float64)
    ours = found.costs(tail.swapaxes(-1, -2) @ tail / 284)
    np.testing.assert_allclose(ours, law, rtol=1e-4)
    assert ExchangeMeasure(fisher).costs(fisher) is None  # no query was far
    assert sums.floored({0: ours, 1: None}) == {}


def test_information_is_that_of_tokens_which_the_model_draws(model, information):
    """KL of outputs that are off by a little, over that of nothing, is half of d^T F d."""
    heads, found = information
    (place, fisher), size = list(found.items())[-1], 3e-2
    ids = TEXT[: sums.DIFFERENTIATED]
    plain = model(mx.array(ids)[None]).astype(mx.float32)[0]

    def shifted(shift, call):
        assert call.out.shape == shift.shape
        return call.out + shift

    total, expected, rng = 0.0, 0.0, np.random.default_rng(0)
    with patched(model):
        for _ in range(6):
            noise = size * rng.standard_normal((1, 4, len(ids), 64)).astype(np.float32)
            noise[:, :, : sums.FIRST] = 0
            caches = own_caches(model)
            put(caches, place, PlainObserver(partial(shifted, mx.array(noise))))
            off = model(mx.array(ids)[None], cache=caches).astype(mx.float32)[0]
            logp, logq = (x - mx.logsumexp(x, -1, keepdims=True) for x in (plain, off))
            total += (mx.exp(logp) * (logp - logq)).sum().item()
            expected += size**2 / 2 * np.trace(fisher.sum(0)) * (len(ids) - sums.FIRST)
    assert total == pytest.approx(expected, rel=0.15)


def test_what_cannot_be_differentiated_counts_alike(model, made, monkeypatch, capsys):
    def broken(*args):
        raise fault

    monkeypatch.setattr(exchange.mx, "grad", broken)
    fault = ValueError("Not implemented for this kernel")
    plain = measure.calibrate(model, TEXT)
    assert "alike in all layers: no gradient (Not implemented" in capsys.readouterr().err
    fault = RuntimeError("CUDA: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory"):  # the GPU is lost
        measure.calibrate(model, TEXT)
    assert all(layer.exchange is None for layer in plain.layers.values())
    assert all(layer.keys.queries is None for layer in plain.layers.values())
    assert all(layer.exchange.shape == (2, layer.kv_heads) for layer in made.layers.values())
    assert plain.digest != made.digest


def test_measured_costs_decide_about_bits_as_the_law_says():
    layers = [(falling(2, 48, 1.5, 2 * n), falling(2, 48, 1.2, 2 * n + 1)) for n in range(3)]
    measured = [np.exp(2 * data(2, 2, seed=n).astype(np.float64)) for n in range(3)]
    sides = [pair for both in layers for pair in zip(artifact.SIDES, both, strict=True)]
    costs = [row for one in measured for row in one]
    found = mixed_bits.allot(sides, 2.5, exchange=costs)
    assert list(zip(found[::2], found[1::2], strict=True)) == spec.allotted(layers, 2.5, measured)
    assert found != mixed_bits.allot(sides, 2.5)
    more = mixed_bits.allot(sides, 2.5, exchange=[costs[0] * 100, *costs[1:]])
    assert sum(more[0]) > sum(found[0])
    assert mixed_bits.weighed("values", np.zeros((2, 16)), costs[0])[1].max() == 0


def test_roots_of_what_rounding_leaves():
    """Sharp heads: F of rank one from float32, which has eigenvalues below 0. Dead ones: F is 0."""
    x = data(1, 64, 1)
    fisher = (x @ x.swapaxes(-1, -2)).astype(np.float64).repeat(2, 0)
    fisher[0] -= 1e-5 * np.trace(fisher[0]) / 64 * np.eye(64)
    fisher[1] = 0
    root = sums.root(fisher).astype(np.float64)
    found = root @ root.swapaxes(-1, -2)
    np.testing.assert_allclose(found[0], fisher[0], atol=1e-4 * np.abs(fisher[0]).max())
    assert np.isfinite(root).all() and not root[1].any()


def test_gradients_that_are_none(capsys):
    one = np.ones((1, 2, 2))
    assert sums.information({0: one * 4, 1: one * 0}, 2)[0].max() == 2  # a dead layer
    for totals, expected in ([{0: one * 0}, "are 0"], [{0: one, 1: one * np.inf}, "have NaN"]):
        assert sums.information(totals, 2) == {}
        assert f"alike in all layers: gradients {expected}" in capsys.readouterr().err


def test_a_file_holds_them(made, tmp_path):
    artifact.write_calibration(tmp_path / "a.safetensors", made)
    back = artifact.read_calibration(tmp_path / "a.safetensors")
    for name, layer in made.layers.items():
        np.testing.assert_array_equal(back.layers[name].exchange, layer.exchange)
        np.testing.assert_array_equal(back.layers[name].keys.queries, layer.keys.queries)
        assert [layer.costs(side).tolist() for side in artifact.SIDES] == layer.exchange.tolist()
    config = dict.fromkeys(made.layers, parse_kv("fill-2.25"))
    assert fitted(config, back) == fitted(config, made)
    equal = {n: replace(layer, exchange=None) for n, layer in made.layers.items()}
    assert fitted(config, replace(made, layers=equal)) != fitted(config, made)


def test_costs_of_a_layer_and_its_queries_are_the_laws(model, information, monkeypatch):
    """Of the model's own queries, keys and values."""
    monkeypatch.setattr(measure, "CHUNK", 50)
    _, fisher = information
    found = measure.calibrate(model, TEXT, window=350)
    for place, windows, layer in zip(
        fisher, seen_by(model, TEXT, 350), found.layers.values(), strict=True
    ):
        windows = [[x[0] for x in window] for window in windows]
        laws = [spec.exchange(*window, fisher[place], 64**-0.5) for window in windows]
        np.testing.assert_allclose(layer.exchange, np.mean([x for x, _ in laws], 0), rtol=2e-2)
        queries = np.concatenate([at_zero(q) for q, _, _ in windows], 1)
        weights = np.concatenate([w for _, w in laws], 1)
        law = moments_over(spec.readers(queries, weights, 2))
        alike = moments_over(spec.readers(queries, np.ones_like(weights), 2))
        off, usual = (np.abs(law - x).max() for x in (layer.keys.queries, alike))
        assert layer.keys.queries.dtype == np.float32 and layer.values.queries is None
        assert off < 2e-3 * np.abs(law).max() and off < usual / 20


def test_faults_of_a_file_are_named(made, tmp_path, subtests):
    first, layer = next(iter(made.layers.items()))
    costs, queries = layer.exchange, layer.keys.queries
    lopsided = queries.copy()
    lopsided[0, 0, 1] += np.abs(lopsided).max()
    moment = "no second moment of queries in layer 0, keys"
    for name, faulty, words in (
        ("costs below 0", {"exchange": -costs}, "costs that are not positive"),
        ("costs that are no numbers", {"exchange": np.nan * costs}, "NaN, infinity"),
        ("costs of keys alone", {"exchange": costs[:1]}, "parts missing"),
        ("no costs", {"exchange": None}, "parts missing"),
        ("queries below 0", {"keys": replace(layer.keys, queries=-queries)}, moment),
        ("queries of 0", {"keys": replace(layer.keys, queries=0 * queries)}, moment),
        ("lopsided queries", {"keys": replace(layer.keys, queries=lopsided)}, moment),
        ("queries of a head", {"keys": replace(layer.keys, queries=queries[:1])}, "parts missing"),
    ):
        with subtests.test(fault=name):
            layers = {**made.layers, first: replace(layer, **faulty)}
            artifact.write_calibration(tmp_path / "b.safetensors", replace(made, layers=layers))
            with pytest.raises(UserError, match=words):
                artifact.read_calibration(tmp_path / "b.safetensors")
