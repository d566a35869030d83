"""OjaKV's experiment against the float64 law."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.papers import ojakv
from mlxkv.eval.rows import Rows
from mlxkv.spec import oja as spec


def test_steps_are_those_of_the_spec():
    rng = np.random.default_rng(0)
    u = spec.orthonormal(rng.standard_normal((2, 16, 8)))
    x = rng.standard_normal((2, 5, 16)) * 0.3
    made = torch.from_numpy(u).float(), torch.from_numpy(x).float()
    expected = {
        ojakv.NORMAL: spec.update(u, x, 0.1),
        ojakv.RAW: spec.update(u, x, 0.1, raw=True),
        ojakv.TOKEN: spec.orthonormal(spec.update_by_token(u, x, 0.1)),
    }
    for rule, right in expected.items():
        np.testing.assert_allclose(ojakv.step(*made, 0.1, rule), right, atol=1e-5)
    one = spec.orthonormal(spec.update_by_token(u, x[:, :1], 0.1))
    np.testing.assert_allclose(one, spec.update(u, x[:, :1], 0.1, raw=True), atol=1e-12)
    large = made[1] * 100  # the rule by tokens leaves float32
    torch.testing.assert_close(ojakv.step(made[0], large, 0.1, ojakv.TOKEN), made[0])


@pytest.mark.parametrize("start", [[7], []])
def test_a_change_and_its_control_measure_the_same_tokens(subject, monkeypatch, tmp_path, start):
    """Behind their own text, or behind another: prompts of one length, which begin as the tokenizer begins texts."""
    asked = {}
    monkeypatch.setattr(
        ojakv,
        "changed",
        lambda _, first, second, at: asked.setdefault(at, []).append((first, second)) or {},
    )
    monkeypatch.setattr(ojakv.sources, "start_of", lambda loaded: start)
    n = len(start)
    texts = SimpleNamespace(tokens=lambda loaded, name, count: [*start, *[-1] * (count - n)])
    args = SimpleNamespace(dtype="float32", decode=8, skip=("keep", "subspace", "update"))
    tokens = [*start, *range(100, 2400)]
    rows = Rows(tmp_path / "rows.jsonl")
    ojakv.more(subject, {}, 1024, "manual", tokens, rows, {subject.name: None}, texts, args)
    assert list(asked) == list(ojakv.POINTS)
    for at, ((own, second), (other, same)) in asked.items():
        assert second == same == tokens[-at - ojakv.READ :]
        assert len(own) == len(other) == 512 and own[:n] == other[:n] == start
        assert own[n:] + second == tokens[-at - ojakv.READ - 512 + n :]
        assert set(other[n:]) == {-1}
    asked.clear()
    ojakv.more(subject, {}, 1024, "prose", tokens, rows, {subject.name: None}, texts, args)
    assert not asked  # its kind changes within
