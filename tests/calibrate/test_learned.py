"""Learned transforms at work: the command, the file, the presets."""

import dataclasses
import functools
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from calibration_inputs import rewritten
from random_models import random_model
from small_models import TINY

from mlxkv.calibrate import run as command
from mlxkv.calibration import learn, measure
from mlxkv.cli import main
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.calibration.learned import Learned
from mlxkv.loading.attach import attach, detach
from mlxkv.loading.load import load

TOKENS = np.random.default_rng(0).integers(0, 64, 600).tolist()
RECIPE = Learned("householder+scale", "srft", 4, 64, 5)


@cache
def llama():
    return random_model("llama")


@cache
def made():
    """(calibration, what was gained, the usual calibration, the sample) of the random model."""
    samples = {}
    usual = measure.calibrate(llama(), TOKENS, samples=samples)
    return (*learn.learn(usual, samples, RECIPE), usual, samples)


@pytest.fixture
def path(tmp_path):
    artifact.write_calibration(tmp_path / "a.safetensors", made()[0])
    return tmp_path / "a.safetensors"


def test_the_file_comes_back_the_same(path):
    ours, back = made()[0], artifact.read_calibration(path)
    assert back.learned == dataclasses.replace(RECIPE, rows=536 - 536 // learn.HELD)
    assert (back.digest, back.header()) == (ours.digest, ours.header())
    assert not back.serves(("balanced", "pca 8")) and made()[2].serves(("balanced", "pca 8"))
    for name, layer in ours.layers.items():
        for side in artifact.SIDES:
            one, other = getattr(layer, side), getattr(back.layers[name], side)
            assert (one.balance.down == other.balance.down).all()
            assert (one.vectors == getattr(made()[2].layers[name], side).vectors).all()
            down, up = (x.astype(np.float64) for x in other.balance.pair())
            assert np.abs(down @ up - np.eye(64)).max() < 1e-5
            assert (down == one.balance.down).all()  # nothing is mixed in behind it


@pytest.mark.parametrize(
    "entry",
    (None, {}, {**RECIPE.as_dict(), "bits": "4"}, {**RECIPE.as_dict(), "base": "x"}, {"a": 1}, 3),
)
def test_a_changed_header_is_one_line(path, entry):
    """Without its entry the file would pass for a balanced one."""
    rewritten(path, {"learned": entry})
    with pytest.raises(UserError, match=r"\[calibration\] .*a.safetensors (has|was)") as caught:
        artifact.read_calibration(path)
    assert "\n" not in str(caught.value)


def test_each_preset_takes_its_own_kind_of_file_only(path):
    ours, _, usual, _ = made()
    for kv, wrong, message in (
        ("learned-int4", usual, "holds no learned transforms; make one with .* --learn scale -o"),
        ("balanced-int4", ours, "holds learned transforms in place of balanced ones"),
        ("learned-int4/balanced-int4", ours, "holds learned transforms in place of balanced ones"),
    ):
        with pytest.raises(UserError, match=message):
            attach(llama(), kv, calibration=wrong)
    reports = attach(llama(), "oscar-int2", calibration=ours)  # rotations are there as usual
    detach(llama())
    assert all(report.compressed for report in reports)


def test_a_preset_without_a_file_is_one_line(subtests, model_folder, capsys):
    """Also where the model has a calibration with balanced transforms of its own."""
    for kv in ("learned-int4", "int8/learned-int4"):
        with subtests.test(kv=kv):
            for model in (str(model_folder), TINY):
                assert main(["chat", "--model", model, "--kv", kv, "--prompt", "a", "--raw"]) == 2
                said = capsys.readouterr().err.strip().splitlines()[-1]
                assert said.startswith(
                    f"[attach] {kv} needs learned transforms; got no calibration; make "
                )
                assert "mlxkv calibrate --model MODEL --learn scale -o FILE" in said
                assert "--calibration FILE" in said


def test_weights_take_the_learned_map_of_values():
    text = mx.array(TOKENS[:300])[None]
    outs = []
    model = llama.__wrapped__()  # one of its own: folding is for good
    for fold in (False, True):
        reports = attach(model, "learned-int4", calibration=made()[0], fold=fold)
        try:
            outs.append(np.array(model(text, cache=model.make_cache())[0, -1]))
        finally:
            detach(model)
    assert all(report.fold == "folded" for report in reports)
    np.testing.assert_allclose(*outs, atol=2e-2 * np.abs(outs[0]).max())


def test_the_command(model_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path / "cache")
    text = tmp_path / "a.txt"
    text.write_text("Some words about nothing in particular. " * 40)
    args = ["calibrate", "--model", str(model_folder), "--text", str(text), "--tokens", "700"]
    args += ["--learn", "rotation+scale"]
    monkeypatch.setattr(command, "Learned", functools.partial(Learned, steps=3))
    assert main([*args, "--bits", "3"]) == 0
    fingerprint = load(str(model_folder)).fingerprint
    kept = artifact.read_calibration(command.learned_path(fingerprint))
    wanted = Learned("rotation+scale", "srft", 3, 64, 3).as_dict()
    assert kept.learned.as_dict() | {"rows": 0} == wanted and list(kept.layers) == ["0", "1"]
    assert kept.path.name == f"{fingerprint[:16]}-learned.safetensors"
    assert not artifact.kept_path(fingerprint).exists()  # the model's own stays as it was
    assert artifact.with_digest(kept.digest) is not None  # for caches that were saved
    out = tmp_path / "b.safetensors"
    assert main([*args, "-o", str(out)]) == 0
    said = capsys.readouterr()
    assert f"use it: --kv learned-int4 --calibration {out}" in said.out
    assert artifact.read_calibration(out).learned.bits == 4
    chat = ["chat", "--model", str(model_folder), "--kv", "learned-int4", "--prompt", "a" * 300]
    assert main([*chat, "--raw", "--calibration", str(out), "--max-tokens", "3", "--json"]) == 0


def test_slips_of_the_command_are_one_line(subtests, capsys):
    for more, message in (
        (
            ["--learn", "cayley"],
            "[--learn] unknown; got 'cayley'; choose from scale, rotation, hous",
        ),
        (["--learn", "scale", "--search-clip"], "[--learn] got scale with --search-clip"),
        (["--bits", "3"], "[--bits] is for learned transforms; got 3; add --learn scale"),
        (["--learn", "scale", "--bits", "5"], "[--bits] unknown; got 5; choose from 2, 3, 4"),
        (["--learn", "scale", "--tokens", "5"], "[--tokens] too little text; got 5"),
    ):
        with subtests.test(more=more, message=message):
            assert main(["calibrate", *more]) == 2
            said = capsys.readouterr().err.strip()
            assert said.startswith(message) and "\n" not in said
