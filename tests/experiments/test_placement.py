"""The SRFT paper's metric: codes as the specification has them, places, and where lambda comes from."""

import json

import mlx.core as mx
import numpy as np
import pytest

from experiments import placement
from mlxkv.errors import UserError
from mlxkv.models import load
from mlxkv.spec import affine as spec


def test_codes_are_those_of_the_specification(subtests):
    for group in (0, 32):
        with subtests.test(group=group):
            x = np.random.default_rng(0).standard_normal((3, 64))
            codes, scale, bias = spec.affine_encode(x, 4, group or 64, symmetric=True)
            expected = spec.affine_decode(codes, scale, bias, group or 64)
            got = np.array(placement.decoded(mx.array(x.astype(np.float32)), 4, group))
            assert np.abs(got - expected).max() < 2e-3  # scales are rounded to float16 there


def test_a_scale_per_channel_is_behind_the_transform_and_undone():
    x = mx.random.normal((1, 2, 40, 64), key=mx.random.key(0))
    tap = placement.Tap(placement.Arm("behind", "srft", group=32, peaks="all texts"), noting=40)
    assert tap(x, (0, "keys")) is x
    down = mx.array(spec.transform("srft", 64)[0].astype(np.float32))
    assert mx.allclose(tap.peaks[0, "keys"], mx.abs(x @ down).max(axis=(0, 2))[:, None], atol=1e-5)
    tap.noting = 0
    own = placement.Tap(placement.Arm("behind", "srft", group=32, peaks="each call"))
    got = tap(x, (0, "keys"))
    assert mx.allclose(got, own(x, (0, "keys")), atol=1e-5)
    assert 0 < mx.abs(got - x).max().item() < 1


def test_a_table_on_a_random_model(model_folder, capsys, monkeypatch):
    monkeypatch.setattr(placement, "LENGTH", 64)
    monkeypatch.setattr(placement, "PREFIX", 16)
    placement.main(["--model", str(model_folder), "--texts", "5", "--seeds", "1"])
    out, err = capsys.readouterr()
    nll = json.loads(out.splitlines()[-1])["nll"]
    assert len(nll) == 1 + len(placement.arms(1)) == len(set(map(str, nll.values())))
    assert len(nll["full precision"]) == 5 and "before RoPE" in err
    loaded = load(str(model_folder), "fp16")
    assert not any("Tap" in type(module).__name__ for module in loaded.model.modules())


def test_too_few_texts():
    with pytest.raises(UserError, match="--texts"):
        placement.main(["--texts", "2"])
