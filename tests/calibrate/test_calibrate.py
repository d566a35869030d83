"""Calibration: streamed moments equal direct ones, whatever the windows, chunks and heads."""

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from random_models import random_model
from turning import at_zero, moments_over

from mlxkv.errors import MachineError, UserError
from mlxkv.formats import matrices
from mlxkv.formats.calibration import artifact
from mlxkv.models import attach, detach, load
from mlxkv.models.calibration import measure
from mlxkv.spec import affine as ref
from mlxkv.spec import oscar as spec

TOKENS = np.random.default_rng(0).integers(0, 64, 600).tolist()


def direct(model, tokens, window, bos=None):
    """Per layer: (q, k, v, scale) of whole windows, from the model itself without any cache."""
    from mlx_lm.models import llama

    seen, original = [], llama.scaled_dot_product_attention

    def spy(q, k, v, cache=None, scale=1.0, mask=None, **rest):
        seen.append(([np.array(x, np.float64) for x in (q, k, v)], scale))
        return original(q, k, v, cache=cache, scale=scale, mask=mask, **rest)

    llama.scaled_dot_product_attention = spy
    try:
        for start in range(0, len(tokens), window):
            part = [*([] if bos is None else [bos]), *tokens[start : start + window]]
            mx.eval(model(mx.array(part)[None]))
    finally:
        llama.scaled_dot_product_attention = original
    layers = len(model.layers)
    return [seen[i::layers] for i in range(layers)]


def targets(windows):
    """(keys, values) targets [G, D, D] of the windows of one layer, by the spec; keys over all positions."""
    keys, rows = 0.0, 0
    parts = []
    for (q, k, v), scale in windows:
        n = q.shape[2]
        parts.append((q, k, v, n, scale))
        rows += n
        keys = keys + n * spec.key_target(at_zero(q), 2)
    exact = [n * spec.value_target(q, k, v, s, ref.causal_mask(n, n)) for q, k, v, n, s in parts]
    return moments_over(keys / rows), sum(exact) / rows


def moment_of(basis):
    """What eigenvectors and eigenvalues were made from."""
    vectors = basis.vectors.astype(np.float64)
    return vectors * basis.values[:, None].astype(np.float64) @ vectors.swapaxes(-1, -2)


def close(found, wanted, bound=1e-4):
    """Up to a factor, which changes no eigenvector."""
    found = found / np.trace(found, axis1=-2, axis2=-1)[:, None, None]
    wanted = wanted / np.trace(wanted, axis1=-2, axis2=-1)[:, None, None]
    assert np.abs(found - wanted).max() < bound * np.abs(wanted).max()


@cache
def llama():
    return random_model("llama")


def test_streamed_moments_equal_direct_ones(subtests, monkeypatch):
    for window, chunk, bos in [(600, 512, None), (200, 64, 1), (300, 7, 3)]:
        with subtests.test(window=window, chunk=chunk):
            monkeypatch.setattr(measure, "CHUNK", chunk)
            made = measure.calibrate(llama(), TOKENS, window=window, bos=bos)
            assert list(made.layers) == ["0", "1"]
            for windows, layer in zip(
                direct(llama(), TOKENS, window, bos), made.layers.values(), strict=True
            ):
                for basis, wanted in zip((layer.keys, layer.values), targets(windows), strict=True):
                    close(moment_of(basis), wanted)


FAMILIES = ("gemma3_text", "falcon_h1")


def test_layers_are_those_that_attach_would_compress(subtests):
    for family in FAMILIES:
        with subtests.test(family=family):
            model = random_model(family)
            made = measure.calibrate(model, TOKENS[:512])
            reports = attach(model, "oscar-int2", calibration=made)
            detach(model)
            indices = [r.index for r in reports if r.compressed]
            assert [int(name.split(".")[0]) for name in made.layers] == indices
            if family == "gemma3_text":
                assert indices == [1, 3]  # the others slide
            for layer in made.layers.values():
                for basis in (layer.keys, layer.values):
                    assert matrices.off_orthonormal(basis.vectors) < 1e-5


def test_the_model_is_left_as_it_was():
    from mlx_lm.models import llama as file

    before = file.scaled_dot_product_attention
    text = mx.array(TOKENS[:50])[None]
    plain = llama()(text)
    measure.calibrate(llama(), TOKENS)
    assert file.scaled_dot_product_attention is before
    assert mx.array_equal(llama()(text), plain)


def test_random_rotations_read_no_text():
    made = measure.random(llama())
    assert made.tokens == 0
    for layer in made.layers.values():
        for basis in (layer.keys, layer.values):
            assert matrices.off_orthonormal(basis.vectors) < 1e-5
            assert np.abs(basis.vectors - np.eye(64)).max() > 0.5


def test_too_little_text_is_one_line():
    with pytest.raises(UserError, match=r"\[calibrate\] too little text; got 100 tokens; .* 512"):
        measure.calibrate(llama(), TOKENS[:100])


def test_nan_is_one_line():
    model = random_model("llama", seed=3)
    weight = model.model.layers[1].self_attn.k_proj
    weight.weight = weight.weight.at[0, 0].add(float("nan"))
    with pytest.raises(MachineError, match=r"\[calibrate\] NaN or infinity in layer 1"):
        measure.calibrate(model, TOKENS)


def test_a_model_with_nothing_to_compress():
    with pytest.raises(UserError, match=r"\[calibrate\] this model has nothing to compress; got: "):
        measure.calibrate(random_model("mamba2"), TOKENS)


def test_constant_text_is_floored():
    """One token over and over: values of rank one. The rotation is still a rotation."""
    made = measure.calibrate(llama(), [5] * 512)
    layer = made.layers["0"]
    assert layer.values.floored > 100
    assert matrices.off_orthonormal(layer.values.vectors) < 1e-5


def test_the_command(model_folder, tmp_path, capsys, monkeypatch):
    from mlxkv.cli import main

    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path / "cache")
    text = tmp_path / "a.txt"
    text.write_text("Some words about nothing in particular. " * 40)
    args = ["calibrate", "--model", str(model_folder), "--text", str(text)]
    assert main(args) == 0
    assert "fewer than 8900" in capsys.readouterr().err
    path = artifact.kept_path(load(str(model_folder)).fingerprint)
    first = artifact.read(path)
    assert first.tokens == 1600 and len(first.layers) == 2
    path.write_bytes(b"damaged")
    out = tmp_path / "b.safetensors"
    assert main([*args, "-o", str(out)]) == 0
    assert artifact.read(out).digest
    assert f"--kv fill-3 --calibration {out}" in capsys.readouterr().out.splitlines()[-1]
    for more, message in (
        (["--target", "none"], "no such option; got --target"),
        (["--tokens", "3"], "choose 512 or more"),
        (["--text", str(tmp_path)], "a folder is not a text"),
    ):
        assert main([*args, *more]) == 2
        assert message in capsys.readouterr().err
    text.write_text("too short")
    assert main(args) == 2
    assert "too little text" in capsys.readouterr().err
