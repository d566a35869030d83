"""The runner of the papers' experiments: presets as their caches have them, windows, rows, tables."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import CALIBRATION, TINY, story_tokens

from cuda_track.models.attach_model import attach, compressed_from
from cuda_track.models.loader import load
from cuda_track.models.taps import observing
from cuda_track.models.transformers_compat import handed
from experiments.papers import runner
from mlxkv.corpora import sources
from mlxkv.errors import UserError
from mlxkv.eval.rows import read
from mlxkv.formats.calibration import artifact
from mlxkv.formats.names import parse_kv
from mlxkv.spec import oscar as oscar_spec

CONTEXT, DECODE = 64 + 64 + 3 * 64 + 10, 12  # as many pages are stored here as in a cache


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    torch.set_num_threads(1)
    made = runner.Subject(
        load(TINY, "fp16", "float32"), "tiny", tmp_path_factory.mktemp("out"), 600
    )
    made.calibration = artifact.read_calibration(Path(TINY) / CALIBRATION)
    return made


@pytest.fixture(scope="module")
def tokens(subject):
    return story_tokens(subject.loaded, CONTEXT + DECODE + 1)


@pytest.mark.parametrize("name", ["int4", "turbo-int2", "fill-3", "oscar-int2+centred"])
def test_a_preset_is_what_its_cache_computes(subject, tokens, name):
    exact = subject.prefill(tokens[:CONTEXT])
    rest = tokens[CONTEXT:-1]
    stored = subject.reconstruct(exact, subject.preset(name))
    got = subject.go_on(exact, [stored], rest)
    whole = {i: (layer.keys[0], layer.values[0]) for i, layer in enumerate(exact.layers)}
    plain = subject.go_on(exact, [whole], rest)
    config = replace(parse_kv(name), sink=64, recent=64)
    attach(subject.model, config, subject.calibration)
    try:
        with torch.no_grad():
            cache = compressed_from(subject.model, exact)
            ids = torch.tensor([rest])
            expected = subject.model(ids, **handed(cache)).logits
    finally:
        attach(subject.model, "fp16")
    error = (got - expected).square().mean().sqrt()
    change = (plain - expected).square().mean().sqrt()
    assert error < 1e-3 * change, (error, change)


def test_exact_keys_cost_nothing_and_rows_go_on(subject, tokens, tmp_path):
    variants = {
        "exact": runner.Variant(runner.side_by_side(runner.exact, runner.exact), 16),
        "none": runner.Variant(lambda layer, k, v: (0 * k, 0 * v), 0),
    }
    found = {}
    subject.measure(variants, tokens, CONTEXT, 2, found.__setitem__)
    assert found["exact"]["kl"] < 1e-9 and found["exact"]["top1"] == 1
    assert found["none"]["kl"] > 1e-3 and found["none"]["bits"] == 0
    alone = {}
    subject.measure({"none": variants["none"]}, tokens, CONTEXT, 1, alone.__setitem__)
    assert alone["none"]["kl"] == pytest.approx(found["none"]["kl"], rel=1e-4)


def test_windows_stay_exact(subject, tokens):
    variant = runner.Variant(lambda layer, k, v: (k + 1, v + 1), 1, sink=32, recent=40, page=128)
    assert variant.stored(CONTEXT) == slice(32, 32 + 256)
    exact = subject.prefill(tokens[:CONTEXT])
    for i, pair in subject.reconstruct(exact, variant).items():
        for x, own in zip(pair, (exact.layers[i].keys, exact.layers[i].values), strict=True):
            moved = (x - own[0]).abs().amax((0, 2))
            assert (moved[32:288] > 0.9).all() and not moved[:32].any() and not moved[288:].any()


def test_moments_are_those_of_the_spec(subject):
    """Rows of the calibration text: the second moments of queries and of attention's outputs."""
    calls = {}
    ids = sources.calibration_tokens(subject.loaded, 600).tokens
    bos = subject.loaded.tokenizer.bos_token_id
    with observing(subject.model, lambda call: calls.setdefault(call.layer, call) and None):
        with torch.no_grad():
            subject.model(torch.tensor([[bos, *ids]]), use_cache=False)
    layer = subject.layers[1]
    call = calls[1]
    q, k, v = (x.double().numpy() for x in (call.queries, call.keys, call.values))
    mask = np.tril(np.ones((q.shape[2],) * 2, bool))
    np.testing.assert_allclose(
        layer.queries, oscar_spec.key_target(q, k.shape[1]), rtol=1e-4, atol=1e-4
    )
    target = oscar_spec.value_target(q, k, v, call.scale, mask)
    np.testing.assert_allclose(layer.outputs, target, rtol=1e-3, atol=1e-4 * target.max())
    np.testing.assert_allclose(layer.keys, call.keys[0], atol=1e-5)


def test_a_command_writes_rows_once(tmp_path, capsys):
    text = "--variants int4,exact --contexts 200 --decode 8 --tokens 600 --texts-at-most 1 --out"
    options = [TINY, *text.split(), str(tmp_path)]
    args = runner.parser("try", None).parse_args(options)
    made = {"exact": lambda: runner.Variant(runner.side_by_side(runner.exact, runner.exact), 16)}
    runner.run("try", args, lambda subject: made)
    first = (tmp_path / "tiny.jsonl").read_bytes()
    rows = {row["preset"]: row for row in read([tmp_path / "tiny.jsonl"])}
    assert rows["exact"]["kl"] < 1e-9 < rows["int4"]["kl"]
    assert rows["int4"]["bits"] == pytest.approx(4.5) and rows["int4"]["seed"] == 0
    runner.run("try", args, lambda subject: made)
    assert (tmp_path / "tiny.jsonl").read_bytes() == first
    assert "| 200 | int4 | 64,64 | 4.5 |" in capsys.readouterr().out


def test_presets_that_follow_queries_are_refused(subject):
    with pytest.raises(UserError, match="oja-0.75 follows the text"):
        subject.preset("oja-0.75")


def test_the_table_divides_means_on_the_same_texts():
    def row(preset, text, kl):
        return {
            "model": "m", "context": 512, "preset": preset, "windows": "64,64", "text": text, "kl": kl,
            "nll": 2.0, "nll_base": 1.0, "top1": 0.5, "bits": 2.0,
        }  # fmt: skip

    rows = [row("a", "x", 1.0), row("a", "y", 3.0), row("b", "x", 1.0), row("b", "z", 100.0)]
    lines = runner.table(rows, "m", "b").splitlines()
    assert lines[2].split(" | ")[-1] == "1 |" and lines[2].split(" | ")[4] == "2"
