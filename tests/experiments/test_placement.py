"""The SRFT paper's metric: codes as the specification has them, places, and where lambda comes from."""

import json

from experiments import placement
from mlxkv.models import load


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
