"""mlx-lm's tests with our caches: they are in place, and a difference without a reason is an error."""

from subprocess import CompletedProcess

import pytest

from experiments.peer_tests.__main__ import Run, differences, main, page, run
from mlxkv.errors import MachineError, UserError

SUITE = """
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

MODEL, _ = load("somebody/something")

def test_ours():
    assert type(make_prompt_cache(MODEL)[0]).__name__ == "CompressedKVCache"

def test_again():
    del MODEL.make_cache
    test_ours()

def test_plain():
    assert type(make_prompt_cache(MODEL)[0]).__name__ == "KVCache"
"""


def outcomes(**said: str) -> Run:
    by_test = {f"a.py::A::{n}": ("failed" if s else "passed", s) for n, s in said.items()}
    return Run(by_test, {"all": 2, "part": 1, "none": 0})


def test_differences_have_reasons():
    runs = {
        "plain": outcomes(test_gated_delta="TypeError", test_spark2_5="", test_x="", test_y=""),
        "int4": outcomes(test_gated_delta="TypeError", test_spark2_5="no", test_x="", test_y=""),
        "tight": outcomes(
            test_gated_delta="TypeError", test_spark2_5="no", test_x="why", test_y=""
        ),
    }
    lines, unknown = differences(runs)
    assert lines[:2] == [
        "`test_gated_delta` (plain too): needs Metal",
        "`test_spark2_5` (int4, tight): wants the class `KVCache`",
    ]
    assert unknown == ["a.py::A::test_x (tight): why"]
    text = page({"a": runs}, "command")
    assert "| a | 2 / 1 / 0 | 3 / 4 | 2 / 4 | 1 / 4 | `test_gated_delta` (plain too)" in text


def test_a_folder_without_tests(tmp_path):
    with pytest.raises(UserError, match=r"^\[--tests\] no test_models.py there; got "):
        main(["--tests", str(tmp_path)])


@pytest.mark.slow
def test_caches_are_in_place(tmp_path):
    (tmp_path / "test_it.py").write_text(SUITE)
    found = run(tmp_path, "test_it", "tight")
    assert {name.split("::")[1] for name in found.lost} == {"test_plain"}
    assert found.count == "2 / 3"


def test_a_suite_that_does_not_run(tmp_path, monkeypatch):
    ran = CompletedProcess([], 4, "no tests ran", "")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: ran)
    with pytest.raises(MachineError, match="test_it did not run"):
        run(tmp_path, "test_it", "plain")
