"""The checks of the SRFT paper's orderings: arms, calibrated scales, tables."""

import json

import mlx.core as mx
import numpy as np
import pytest

from experiments import orderings
from mlxkv.errors import UserError
from mlxkv.eval.arms import Arms
from mlxkv.models import load


def test_a_scale_per_channel_evens_out_channels(model_folder):
    """A channel that is 100 times as large as the others does not spoil their codes."""
    loaded = load(str(model_folder), "fp16")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 1, 128, 64))
    x[..., 7] *= 100
    x = mx.array(x, mx.float32)
    scales = orderings.ChannelScales([(x, x)] * 2)
    errors = {}
    for name, config in orderings.scale_arms().items():
        if not name.startswith("none 4"):
            continue
        arms = Arms(loaded, {name: config}, prepare=scales.prepare)
        with arms.caches([name]) as caches:
            cache = caches[name][0]
            cache.update_and_fetch(x, x)
            cache.update_and_fetch(x, x)
            back = cache._store.read(0, 1).decode(0, mx.float32)
        small = [d for d in range(64) if d != 7]
        gap = (back - x[:, :, 64:128])[..., mx.array(small)]
        errors[name.split(", ")[1]] = float(mx.sqrt((gap**2).mean()).item())
    assert errors["per channel and group"] < 0.3 * errors["per group"]


@pytest.mark.parametrize("what", ("seeds", "scales"))
def test_a_table_on_a_random_model(what, model_folder, capsys, monkeypatch):
    monkeypatch.setattr(orderings, "BITS", (4,))
    monkeypatch.setattr(orderings, "CALIBRATION", 128)
    arguments = [what, "--model", str(model_folder), "--context", "300", "--decode", "4"]
    orderings.main([*arguments, "--seeds", "2"])
    out = capsys.readouterr().out
    kl = json.loads(out.splitlines()[-1])["kl"]
    assert len(kl) == (4 if what == "seeds" else 6)
    assert all(one["mean"] > 0 for one in kl.values())
    assert "±" in out if what == "seeds" else "per channel and group" in out


def test_one_seed_has_no_deviation():
    with pytest.raises(UserError, match="--seeds"):
        orderings.main(["seeds", "--seeds", "1"])
