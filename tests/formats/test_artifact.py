"""The calibration file survives a round trip, and every fault is one line."""

import dataclasses
import json
import os

import numpy as np
import pytest
from calibration_inputs import basis, rewritten
from safetensors import safe_open
from safetensors.numpy import save

from mlxkv.errors import MachineError, UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.calibration.artifact import Calibration, Layer


@pytest.fixture
def made() -> Calibration:
    layers = {
        "1": Layer(2, basis(2, 64, 0), basis(2, 96, 1, keys=False)),
        "3.1": Layer(
            2, basis(2, 64, 2, {"int2 g64": 0.9, "int3 g64": 1.0}), basis(2, 96, 3, keys=False)
        ),
    }
    return Calibration("f" * 16, "some", "llama", 9, "t", "d", layers, 4096)


@pytest.fixture
def path(made, tmp_path):
    artifact.write_calibration(tmp_path / "new" / "a.safetensors", made)
    return tmp_path / "new" / "a.safetensors"


SHAPES = {"1": (2, 64, 96), "3.1": (2, 64, 96)}


def refused(path, reason):
    with pytest.raises(UserError, match=reason) as caught:
        artifact.read_calibration(path)
    line = str(caught.value)
    assert line.startswith(f"[calibration] {path}") and "\n" not in line and "mlxkv calib" in line


def test_it_comes_back_the_same(made, path):
    back = artifact.read_calibration(path)
    assert json.dumps(back.header()) == json.dumps(made.header())
    assert (back.digest, back.path) == (made.digest, path)
    assert back.layers["3.1"].keys.clips == {"int2 g64": 0.9, "int3 g64": 1.0}
    assert back.layers["3.1"].values.clips == back.layers["1"].keys.clips == {}
    for name, layer in made.layers.items():
        for side in artifact.SIDES:
            ours, theirs = getattr(layer, side), getattr(back.layers[name], side)
            assert (ours.values == theirs.values).all() and (ours.vectors == theirs.vectors).all()
            assert (ours.rotation() == theirs.rotation()).all()
            assert ours.floored == theirs.floored
    back.check(SHAPES, "f" * 16)
    back.check({"1": (2, 64, 96)}, None)  # an unknown fingerprint
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no draft is left


def test_the_same_calibration_is_the_same_bytes(made, path, tmp_path):
    artifact.write_calibration(tmp_path / "b.safetensors", made)
    assert (tmp_path / "b.safetensors").read_bytes() == path.read_bytes()


def test_the_digest_knows_rotations_only(made):
    assert dataclasses.replace(made, model="other", tokens=1).digest == made.digest
    layers = {**made.layers, "1": Layer(2, basis(2, 64, 7), basis(2, 96, 1, keys=False))}
    assert dataclasses.replace(made, layers=layers).digest != made.digest


def test_another_model_or_shape(path):
    made = artifact.read_calibration(path)
    for shapes, mark, reason in (
        (SHAPES, "0" * 16, "another model; got one for some .f{16}., this model is 0{16}"),
        (
            {"1": (4, 64, 96)},
            None,
            "shape in layer 1; got 2 kv heads of 64 and 96 .* has 4 kv heads",
        ),
        ({"1": (2, 128, 96)}, None, "has 2 kv heads of 128 and 96 dims"),
        ({"2": (2, 64, 96)}, None, "no rotation for layer 2; got 2 layers"),
    ):
        with pytest.raises(UserError, match=reason) as caught:
            made.check(shapes, mark)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="another model"):  # one that mlxkv did not load
        dataclasses.replace(made, fingerprint="").check(SHAPES, "f" * 16)


def test_files_that_are_none(path, tmp_path):
    whole = path.read_bytes()
    for size in (0, 5, 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(path, "no safetensors file, or only part of one")
    path.write_bytes(whole + b"x")
    refused(path, "no safetensors file, or only part of one")
    path.write_bytes(save({"a": np.zeros(3, np.float32)}))
    refused(path, "is not a calibration of mlxkv")
    path.write_bytes(save({"a": np.zeros(3, np.float32)}, {"mlxkv": "{"}))
    refused(path, "is not a calibration of mlxkv")
    refused(tmp_path / "nowhere", "is not there")


HARM = {  # what the header says otherwise: (in place of what, the reason)
    '"format": "5"': ('"format": 5', "has format 5; this version"),
    '"format": true': ('"format": 5', "has format True"),
    '"format": 1e999': ('"format": 5', "beyond all bounds"),
    '"floored": [-1': ('"floored": [0', "parts missing .*floored"),
    '"floored": [0.5': ('"floored": [0', "parts missing .*floored"),
    '"lacking": ["x"': ('"lacking": [0', "parts missing"),
    '"positions": 0': ('"positions": 4096', "parts missing .*positions"),
    '"positions": 1.5': ('"positions": 4096', "parts missing .*positions"),
    '"kv_heads": 1e9': ('"kv_heads": 2', "parts missing"),
    '"kv_heads": true': ('"kv_heads": 2', "parts missing"),
}


def test_headers_that_mean_harm(subtests, path):
    with safe_open(path, "numpy") as file:
        text = file.metadata()["mlxkv"]
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    changed = [("[" * 100_000, "header is nested deeper than 64"), ("[3]", "no such header")]
    changed += [(text.replace(old, new), reason) for new, (old, reason) in HARM.items()]
    for header, reason in changed:
        with subtests.test(header=header[:40], reason=reason):
            assert header != text
            path.write_bytes(save(tensors, {"mlxkv": header}))
            refused(path, reason)


def test_what_is_no_file(path):
    path.unlink()
    os.mkfifo(path)
    refused(path, "is a named pipe, not a file")
    path.unlink()
    path.symlink_to(path.name)
    refused(path, "Too many levels")
    path.unlink()
    with path.open("wb") as file:
        head = b'{"a":{"dtype":"U8","shape":[2147483648],"data_offsets":[0,2147483648]}}'
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + (2 << 30))  # sparse
    refused(path, "larger than")
    with pytest.raises(UserError, match=r"^\[--calibration\] no file can have this name"):
        artifact.read_calibration("~nouser/x")


def test_another_version(path):
    rewritten(path, {"format": 6})
    refused(path, "has format 6; this version reads 5")


CLIPS = (
    ([{"int2 g64": 1.5}, {}], "no share .* in layer 1, keys; got int2 g64: 1.5"),
    ([{}, {"int2 g64": 0}], "no share .* in layer 1, values; got int2 g64: 0"),
    ([{"int2 g64": float("nan")}, {}], "its header has NaN for a number"),
    ([{"int2 g64": "much"}, {}], "no share .* got int2 g64: much"),
    ([{}], "parts missing"),
    ([0.96, 0.92], "parts missing"),
    ({"int2 g64": [0.9, 0.9]}, "parts missing"),
)


def test_broken_headers(subtests, path):
    layers = artifact.read_calibration(path).header()["layers"]
    whole, rows = (
        path.read_bytes(),
        [
            ({"layers": {}}, "parts missing"),
            ({"layers": {"7": layers["1"]}}, "parts missing .*7.keys"),
            ({"tokens": "many"}, "parts missing"),
            ({"digest": "0" * 16}, "was changed after it was made"),
        ],
    )
    rows += [
        ({"layers": layers | {"1": layers["1"] | {"clips": clips}}}, reason)
        for clips, reason in CLIPS
    ]
    for header, reason in rows:
        with subtests.test(header=header, reason=reason):
            path.write_bytes(whole)
            rewritten(path, header)
            refused(path, reason)


def test_files_are_found_again(made, tmp_path, monkeypatch):
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path / "cache")
    model = tmp_path / "model"
    model.mkdir()
    mark = made.fingerprint
    assert artifact.find(mark, model) is None
    assert artifact.with_digest(made.digest) is None
    artifact.write_calibration(artifact.kept_path(mark), made)
    assert artifact.find(mark, model).path == artifact.kept_path(mark)
    assert artifact.with_digest(made.digest).digest == made.digest
    (artifact.folder() / "broken.safetensors").write_bytes(b"x")
    assert artifact.with_digest(made.digest).digest == made.digest
    # The shipped file goes first; of two, the one with this fingerprint.
    shipped = model / f"{artifact.NAME}.safetensors"
    artifact.write_calibration(shipped, made)
    assert artifact.find(mark, model).path == shipped
    assert artifact.read_calibration(model).path == shipped
    hard = model / f"{artifact.NAME}-hard.safetensors"
    artifact.write_calibration(hard, dataclasses.replace(made, fingerprint="e" * 16))
    assert artifact.find("e" * 16, model).path == hard
    assert artifact.find(mark, model).path == shipped


def test_what_cannot_be_written_changes_nothing(made, path):
    before = path.read_bytes()
    with pytest.raises(MachineError, match="could not write"):
        artifact.write_calibration(path / "inside-a-file.safetensors", made)
    assert path.read_bytes() == before
