"""`mlxkv.eval` in Python: the command's own rows, nothing printed, errors that name arguments."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest
import repo_pages
from mlx_lm.models.cache import make_prompt_cache

import mlxkv
from mlxkv import Method, UserError, parse_kv
from mlxkv.cli import main
from mlxkv.eval import call
from mlxkv.eval import run as evaluation

PAGE = repo_pages.ROOT / "docs" / "guide" / "research.md"
ROUGH = Method("rough", lambda x: {"x": mx.round(x).astype(mx.int8)}, lambda s: s["x"])
EXACT = Method("exact", lambda x: {"x": x}, lambda s: s["x"])


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(evaluation, "QUICK", replace(evaluation.QUICK, decode=8))
    monkeypatch.setattr(call, "QUICK", evaluation.QUICK)


def test_it_returns_the_rows_of_the_command_and_prints_nothing(model_folder, tmp_path, capsys):
    text = tmp_path / "own.txt"
    text.write_text("The harbour of Amsel lies east of the mill; nobody knows why. " * 400)
    words = ["--kv", "int4,int8/int4", "--context", "512,600", "--samples", "2"]
    words += ["--text", str(text), "--out", str(tmp_path / "out"), "--json"]
    assert main(["eval", "-m", str(model_folder), *words]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    expected = [
        {"preset": name, "context": int(context)} | row
        for context, by_name in rows.items()
        for name, row in by_name.items()
    ]
    asked = SimpleNamespace(kv=["int4", "int8/int4"], context=[512, "600"], samples=2, text=text)
    assert mlxkv.eval(str(model_folder), **vars(asked)) == expected
    assert capsys.readouterr() == ("", "")
    names = "fp16", "int4", "int8/int4"
    assert [row["preset"] for row in expected] == [*names, *names]
    assert expected[1]["kl_mean"] > 0 and 4 < expected[1]["bits_per_value"] < 5


def test_a_method_and_a_loaded_model(model_folder):
    """Whose own cache is attached again; and `mlxkv.eval` is one thing, before and after its package is imported."""
    loaded = mlxkv.load(str(model_folder), "int8")
    own = replace(parse_kv("int8"), values=mlxkv.Side(ROUGH), name="values by hand")
    full, exact, rough, by_hand = mlxkv.eval(loaded, [EXACT, ROUGH, own], 512, samples=2)
    assert [r["preset"] for r in (exact, rough, by_hand)] == ["exact", "rough", "values by hand"]
    assert (exact["bits_per_value"], rough["bits_per_value"]) == (32, 8)
    assert exact["kl_mean"] < 1e-9 < by_hand["kl_mean"] < rough["kl_mean"]
    assert full["ppl"] == pytest.approx(exact["ppl"]) and full["top1"] == 1
    assert make_prompt_cache(loaded.model)[0].config.label == "int8"
    first = "import mlxkv; first = mlxkv.eval; import mlxkv.eval.rows; assert first is mlxkv.eval"
    subprocess.run([sys.executable, "-c", f"{first} and callable(first)"], check=True)


def test_the_page_shows_code_that_runs(model_folder, capsys):
    """With a small model of SmolLM2's head dim in its place: the guide marks the block, which takes minutes, as not
    run. The output below it has the same rows, and the same bits of each."""
    block, output = repo_pages.blocks(PAGE)[:2]
    assert (block.language, output.language) == ("python", "text")
    assert len([line for line in block.text.splitlines() if line.strip()]) < 25
    small = block.text.replace('"smollm2", [', f"{str(model_folder)!r}, context=512, kv=[")
    exec(compile(small, block.name, "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    names, shown = ("fp16", "int4", "nf4", "nf4, keys rotated"), output.text.strip().splitlines()
    for line, real, name in zip(printed, shown, names, strict=True):
        form = rf"({name} +[\d.]+ bits, )KL [\d.]+ \[[\d.]+, [\d.]+\], same next token [\d.]+%"
        assert re.fullmatch(form, line), line
        assert re.fullmatch(form, real)[1] == re.fullmatch(form, line)[1]


def test_errors_name_arguments(subtests, model_folder):
    for arguments, line in [
        ({"kv": "int5"}, "[kv] unknown preset; got 'int5'; "),
        (
            {"kv": [ROUGH, Method("rough", EXACT.encode, EXACT.decode)]},
            "[kv] two caches of one name; ",
        ),
        ({"context": 100}, "[context] must be at least 512 tokens; got 100"),
        ({"context": [512, "x"]}, "[context] "),
        ({"samples": 0}, "[samples] must be at least 1; got 0; "),
        ({"tasks": "speed"}, "[tasks] unknown task; got 'speed'; choose from divergence, "),
        ({"windows": (1, 2, 3)}, "[windows] not two numbers; got '1,2,3'; "),
        ({"text": "no-such-file.txt"}, "[text] "),
        ({"model": "no-such-model"}, "[model] "),
    ]:
        with subtests.test(line=line):
            with pytest.raises(UserError) as error:
                mlxkv.eval(**{"model": str(model_folder)} | arguments)
            assert str(error.value).startswith(line) and "\n" not in str(error.value)
