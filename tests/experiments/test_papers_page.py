"""The page of the papers is what its rows say."""

import json

import pytest

from experiments.papers import page
from experiments.papers.page import Figures
from mlxkv.errors import UserError

SMOL, GEMMA = list(page.MODELS)[:2]


def row(preset, text, model=SMOL, task="oscar", **numbers):
    about = {"task": task, "split": "test", "model": model, "preset": preset, "windows": "64,64"}
    return about | {"text": text, "context": 4096} | numbers


@pytest.fixture
def figures(tmp_path):
    rows = [row("a", t, kl=kl, nll=2.0, nll_base=1.0, bits=2.5) for t, kl in enumerate((0.1, 0.3))]
    rows += [row("b", t, kl=0.1, bits=2.5) for t in range(3)]
    rows += [row("a", 0, GEMMA, kl=1234.56789, bits=2.25, state="x", versions={})]
    for model in (SMOL, GEMMA):
        file = tmp_path / "run" / "oscar" / f"{model}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(json.dumps(x) for x in rows if x["model"] == model))
    page.keep(tmp_path / "run", tmp_path / "kept")
    return Figures(tmp_path / "kept")


def test_the_page_is_that_of_its_rows():
    assert page.page(Figures()) == page.PAGE.read_text(encoding="utf-8")
    for paper in page.PICTURES:
        assert f"](papers/{paper}.svg)" in page.PAGE.read_text(encoding="utf-8")
        assert (page.ROWS / f"{paper}.svg").exists()


def test_figures_are_those_of_rows(figures):
    assert figures.kl("oscar", "a") == "SmolLM2 .20, Gemma 1,235"
    assert figures.kl("oscar", "a", "SmolLM2") == ".20"
    assert figures.kl("oscar", "b") == "SmolLM2 .10"
    assert figures.bits("oscar", "a") == "SmolLM2 2.5, Gemma 2.2"
    assert figures.bits("oscar", "b") == "2.5"
    assert figures.over("oscar", "a", "b", "SmolLM2") == "2.0"  # of the two texts that both read
    assert figures.counted("oscar", "a") == "SmolLM2 2, Gemma 1"
    assert figures.perplexity("oscar", "a", "SmolLM2") == "+4.7"  # e^2 - e


def test_kept_rows_have_what_pages_need(figures):
    (kept,) = figures.texts("oscar", "a", GEMMA).values()
    assert kept == row("a", 0, GEMMA, kl=1234.6, bits=2.25)


def test_numbers_have_two_digits():
    said = {
        0.0: "0",
        0.0123: ".012",
        0.999: "1.00",
        -0.5: "-.50",
        9.96: "10.0",
        55.4: "55",
        1234.5: "1,234",
    }
    assert {x: page.number(x) for x in said} == said


def test_what_is_not_there_is_said(figures, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"no rows; got oscar of Qwen"):
        figures.kl("oscar", "a", "Qwen")
    with pytest.raises(UserError, match=r"--keep.*no rows"):
        page.keep(tmp_path / "nowhere")
    monkeypatch.setattr(page, "TEMPLATE", tmp_path / "page.md")
    for text in ("{klx('oscar')}", "{kl(}", "{open('x')}", "{kl()}"):
        page.TEMPLATE.write_text(text)
        with pytest.raises(UserError, match=r"page\.md"):
            page.page(figures)
