"""Calibration: streamed moments equal direct ones, whatever the windows, chunks and heads."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from calibration_inputs import TEXT, at_zero, moments_over, seen_by
from methods import config_named
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from random_models import random_model

from mlxkv.calibration import measure, moments
from mlxkv.errors import MachineError, UserError
from mlxkv.formats import matrices
from mlxkv.formats.calibration import artifact, subspace
from mlxkv.loading.attach import attach, detach
from mlxkv.loading.load import load
from mlxkv.patching.observers import AttentionCall
from mlxkv.spec import affine as ref
from mlxkv.spec import oscar as spec


def targets(windows):
    """(keys, values) targets [G, D, D] of the windows of one layer, by the spec; keys over all positions."""
    counts = [q.shape[2] for q, _, _ in windows]
    keys = [
        n * spec.key_target(at_zero(q), 2) for n, (q, _, _) in zip(counts, windows, strict=True)
    ]
    values = [
        n * spec.value_target(*window, 64**-0.5, ref.causal_mask(n, n))
        for n, window in zip(counts, windows, strict=True)
    ]
    return moments_over(sum(keys) / sum(counts)), sum(values) / sum(counts)


def close(found, wanted, bound=1e-4):
    """Up to a factor, which changes no eigenvector."""
    found = found / np.trace(found, axis1=-2, axis2=-1)[:, None, None]
    wanted = wanted / np.trace(wanted, axis1=-2, axis2=-1)[:, None, None]
    assert np.abs(found - wanted).max() < bound * np.abs(wanted).max()


def test_streamed_moments_equal_direct_ones(subtests, model, monkeypatch):
    for window, chunk, before in [(700, 512, ()), (350, 64, (1,))]:
        with subtests.test(window=window, chunk=chunk):
            monkeypatch.setattr(measure, "CHUNK", chunk)
            made = measure.calibrate(model, TEXT, window=window, start=before)
            assert list(made.layers) == ["0", "1"]
            seen = seen_by(model, TEXT, window, before)
            for windows, layer in zip(seen, made.layers.values(), strict=True):
                for basis, wanted in zip((layer.keys, layer.values), targets(windows), strict=True):
                    close(subspace.read_moment(basis.values, basis.vectors), wanted)


def test_attention_by_numpy_is_that_of_mlx(subtests, monkeypatch):
    monkeypatch.setattr(moments, "device_type", lambda: "cpu")
    q, k, v = (
        mx.random.normal((1, heads, tokens, dims), key=mx.random.key(i))
        for i, (heads, tokens, dims) in enumerate([(6, 40, 64), (2, 100, 64), (2, 100, 32)])
    )
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, mask="causal")
    call = AttentionCall((k, v), q, 0.2, "causal", None, out)
    found = moments.by_numpy(call).out
    assert found is not out and found.dtype == mx.float32 and mx.allclose(found, out, atol=1e-5)
    nan = replace(call, queries=q.at[0, 0, 0, 0].add(float("nan")))
    assert mx.isnan(moments.by_numpy(nan).out).any()
    for other in (
        replace(call, mask=None),
        replace(call, mask=mx.ones((40, 100), mx.bool_)),
        replace(call, sinks=mx.zeros(6)),
        replace(call, softcap=30.0),
        replace(call, queries=q.astype(mx.float16)),
        replace(call, queries=mx.concatenate([q, q])),
    ):
        with subtests.test(mask=other.mask, queries=other.queries.dtype):
            assert moments.by_numpy(other) is other
    monkeypatch.setattr(moments, "device_type", lambda: "metal")
    assert moments.by_numpy(call) is call


def test_layers_are_those_that_attach_would_compress(subtests):
    for family, layers in (("gemma3_text", [1, 3]), ("falcon_h1", None)):  # the others slide
        with subtests.test(family=family):
            model = random_model(family)
            made = measure.calibrate(model, TEXT[:512])
            reports = attach(model, "oscar-int2", calibration=made)
            detach(model)
            indices = [r.index for r in reports if r.compressed]
            assert (
                [int(name.split(".")[0]) for name in made.layers] == indices == (layers or indices)
            )


def test_the_model_is_left_as_it_was(model):
    before = llama.scaled_dot_product_attention
    text = mx.array(TEXT[:50])[None]
    plain = model(text)
    measure.calibrate(model, TEXT[:520])
    assert llama.scaled_dot_product_attention is before
    assert mx.array_equal(model(text), plain)


def test_random_rotations_read_no_text(model):
    made = measure.random(model)
    assert made.tokens == 0
    for layer in made.layers.values():
        for basis in (layer.keys, layer.values):
            assert matrices.off_orthonormal(basis.vectors) < 1e-5
            assert np.abs(basis.vectors - np.eye(64)).max() > 0.5


def test_too_little_text_is_one_line(model):
    with pytest.raises(UserError, match=r"\[calibrate\] too little text; got 100 tokens; .* 512"):
        measure.calibrate(model, TEXT[:100])


def test_nan_and_overflow_are_one_line(subtests):
    for layer, factor in ((1, float("nan")), (0, 1e25)):
        with subtests.test(factor=factor):
            model = random_model("llama", seed=3)
            projection = model.layers[layer].self_attn.k_proj
            projection.weight = projection.weight * factor
            said = rf"\[calibrate\] NaN or infinity in layer {layer}"
            with pytest.raises(MachineError, match=said):
                measure.calibrate(model, TEXT[:600])


def test_dead_and_sharp_heads(subtests, tmp_path):
    """Weights of one kv head are 0 or huge: a file that can be read, and caches near what is exact."""
    parts = {"q": slice(128), "k": slice(64), "v": slice(64), "o": (slice(None), slice(128))}
    path, x = tmp_path / "a.safetensors", mx.array(TEXT[:300])[None]
    for names, size, bound in (
        *(("kv", 0, 0.05), ("qkvo", 0, 0.05)),
        *(("qk", 100, 1), ("v", 1e4, 0.05)),
    ):
        with subtests.test(names=names, size=size):
            model = random_model("llama", seed=3)
            for layer in model.layers:
                for name in names:
                    projection = getattr(layer.self_attn, f"{name}_proj")
                    projection.weight = projection.weight.at[parts[name]].multiply(size)
            made = measure.calibrate(model, TEXT)
            assert all(layer.exchange is not None for layer in made.layers.values())
            artifact.write_calibration(path, made)
            want = model(x)[:, -4:]
            for kv in ("fill-3.25", "oja-e0.95"):
                attach(model, config_named(kv), calibration=artifact.read_calibration(path))
                caches = make_prompt_cache(model)
                model(x[:, :-4], cache=caches)
                off = mx.square(model(x[:, -4:], cache=caches) - want).mean() / mx.var(want)
                assert off.item() < bound**2, kv
                detach(model)


def test_a_model_with_nothing_to_compress():
    with pytest.raises(UserError, match=r"\[calibrate\] this model has nothing to compress; got: "):
        measure.calibrate(random_model("mamba2"), TEXT)


def test_constant_text_is_floored(model):
    """One token over and over: values of rank one. The rotation is still a rotation."""
    made = measure.calibrate(model, [5] * 512)
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
    first = artifact.read_calibration(path)
    assert first.tokens == 1600 and len(first.layers) == 2
    path.write_bytes(b"damaged")
    out = tmp_path / "b.safetensors"
    assert main([*args, "-o", str(out)]) == 0
    assert artifact.read_calibration(out).digest
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
