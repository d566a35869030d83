"""Whether shares are kept, on a small model: rows, what is measured again, and the tables."""

import json

import pytest

from experiments.evidence import agreement as evidence
from experiments.evidence.texts import TEXTS
from mlxkv.errors import UserError
from mlxkv.formats.agreement import DIAL
from mlxkv.loading import agreement


@pytest.fixture
def run(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("mlxkv.console.cache_dir", lambda: tmp_path)
    for name, value in (("CONTEXT", 128), ("NEXT", 32), ("LONGER", ())):
        monkeypatch.setattr(agreement, name, value)
    monkeypatch.setattr(evidence, "NEXT", 32)
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, name in enumerate((*evidence.HELD, TEXTS[-1])):
        (folder / f"{name}.txt").write_text(f"text {i}: " + f"{i} words of it " * 400)

    def run(*more: str) -> list[dict]:
        rows = tmp_path / "rows.jsonl"
        evidence.main([str(model_folder), "--contexts", "128", "-o", str(rows), *more])
        return [json.loads(line) for line in rows.read_text().splitlines()]

    return run


def test_a_run_goes_on_where_it_stopped(run, capsys):
    rows = run("--bounds", "80%")
    (choice,), held = [x for x in rows if "bound" in x], [x for x in rows if "texts" in x]
    assert choice["preset"] in ("int4", "int8") and choice["processor"] > 0
    assert choice["preset"] in {x["preset"] for x in held}
    assert all(set(x["texts"]) == set(evidence.HELD) and len(x["texts"]) == 12 for x in held)
    assert run("--bounds", "80%") == rows
    assert len(run("--bounds", "80%,60%")) == len(rows) + 1
    capsys.readouterr()
    run("--table")
    out = capsys.readouterr().out
    assert out.count(f"| `{choice['preset']}` |") >= 2 and "of 12 |" in out


def test_texts_of_ones_own(run, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    with pytest.raises(UserError, match=r"^\[--held\] no .txt file; got .*mine"):
        run("--held", str(mine))
    for name in ("a", "b"):
        (mine / f"{name}.txt").write_text(f"Text {name} has words of its own. " * 99)
    held = [x["texts"] for x in run("--bounds", "80%", "--held", str(mine)) if "texts" in x]
    assert held and all(set(x) == {"a", "b"} for x in held)


def test_no_text_is_one_that_choices_are_made_on():
    assert not set(evidence.HELD) & set(agreement.corpus.KINDS)
    assert len(set(evidence.HELD)) == 12


def test_neighbours_and_what_would_have_been_enough():
    assert evidence.around(DIAL, ["fill-3"]) == [
        f"fill-{x}" for x in ("2.25", "2.5", "2.75", "3", "3.25")
    ]
    assert evidence.around(DIAL, ["int8", "fp16"])[-1] == "int8" == DIAL[-1]
    assert evidence.around(("int4", "int8"), ["int4"]) == ["int4", "int8"]
    of = {"int8": [1.0] * 12, "fill-4": [0.98] * 12, "fill-5": [0.99] * 12}
    assert next(evidence._fewest(of, 0.985)) == "fill-5"
    assert next(evidence._fewest(of, 0.5)) == "fill-4"


def test_readings_below_are_counted_by_hand():
    said = {"preset": "int4", "context": 8, "tokens": 100, "same": [98, 98, 98, 98, 98, 98]}
    choice = {"model": "M", "preset": "int4", "short": said}
    rows = [choice | {"bound": 0.97}, choice | {"bound": 0.95}]
    texts = {"a": 97, "b": 94, "c": 96}
    for context in (8, 16):
        rows.append(
            {"model": "M", "preset": "int4", "context": context, "tokens": 100, "texts": texts}
        )
    rows.append(rows[-1] | {"preset": "int8"})
    # Of 97 % b and c are below, of 95 % b; the limit is 98 - 2.015 sqrt(2 + .6^2) sqrt(7/6) = 94.7 of 100.
    assert evidence.summary(rows) == (
        "6 of 12 readings are below, 50.0 %: 97% 4 of 6, M 6 of 12, 95% 2 of 6. "
        "Below the limit said at the short context: 2 of 6."
    )
