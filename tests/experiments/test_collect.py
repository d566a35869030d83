"""What is kept of rows: under the model's name, what tables need, stages apart."""

from __future__ import annotations

import json

import pytest

from experiments.evidence import collect, page, rows
from experiments.evidence.corpus import SELECTION, TEST
from experiments.evidence.measure import KL, RETRIEVAL
from mlxkv.errors import UserError


def row(preset: str, text: str, kl: float, task: str = KL, split: str = TEST) -> dict:
    found = {"task": task, "split": split, "model": "hub", "preset": preset, "windows": "64,64"}
    found |= {"text": text, "context": 4096, "state": text, "when": 1.0, "bits_per_value": 2.25}
    found |= {"bits_with_windows": 2.68, "kl": kl, "kl_p99": kl, "top1": 0.9, "nll": 1.0}
    found |= {"kl_blocks": [kl], "of": "x"}
    return found if task == KL else found | {"right": {"single": [[True]]}}


@pytest.fixture
def measured(tmp_path):
    texts = [f"prose-{n}" for n in range(4)]
    stages = {
        "main": [row(p, t, k) for p, k in (("int2", 0.0123456), ("fp16", 0.0)) for t in texts],
        "ask": [row("int2", "prose-0", 9.0), row("int2", "haystack", 0.0, RETRIEVAL)],
        "chosen": [row("int2+sink4+recent124", t, 0.01) for t in texts],
        "papers": [row("oja-0.75", t, 0.02) for t in texts],
        "select": [row("int2", t, 0.5, split=SELECTION) for t in texts],
        "frontier-pages": [row("int2", t, 7.0) for t in texts],
    }
    for stage, some in stages.items():
        file = tmp_path / "rows" / stage / "small" / "rows.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text("".join(json.dumps(one) + "\n" for one in some))
    tries = {"int2": {"preset": "int2", "kl": 0.5, "tries": {"int2": 0.5123456}, "failed": []}}
    (tmp_path / "rows/select/small/chosen.json").write_text(json.dumps({"hub": tries}))
    return tmp_path


def test_rows_are_kept_by_stage_under_the_name_of_the_model(measured):
    out = measured / "docs"
    collect.main([str(measured / "rows"), "--out", str(out)])
    written = {str(file.relative_to(out)) for file in out.rglob("*.*")}
    assert written == {
        "natural/small.jsonl",
        "natural/small-papers.jsonl",
        "selection/small.jsonl",
        "selection/tries.json",
    }
    main = rows.read([out / "natural/small.jsonl"])
    assert {r["model"] for r in main} == {"small"}
    assert [r["task"] for r in main].count(RETRIEVAL) == 1 and len(main) == 9
    assert not any(r.get("kl") == 9.0 for r in main)  # the few tokens behind questions are no KL
    assert main[0]["kl"] == 0.012346 and "kl_blocks" not in main[0]
    tries = json.loads((out / "selection/tries.json").read_text())
    assert tries == {"small": {"int2": {"chosen": "int2", "tries": {"int2": 0.51235}}}}


def test_a_page_is_made_of_what_is_kept(measured):
    out = measured / "docs"
    collect.main([str(measured / "rows"), "--out", str(out)])
    page.main([str(out / "natural/small.jsonl"), "--out", str(measured / "page.md")])
    text = (measured / "page.md").read_text()
    assert "## small, 4096 tokens" in text and "`int2` | 2.25 | 2.68 | 0.0123" in text


def test_a_line_of_several_texts_is_read_as_their_rows(measured):
    file = measured / "docs/natural/small.jsonl"
    collect.main([str(measured / "rows"), "--out", str(measured / "docs")])
    assert len(file.read_text().splitlines()) == 3  # two presets, one document of questions
    found = rows.read([file])
    kl = [r for r in found if r["task"] == KL]
    assert sorted((r["preset"], r["text"]) for r in kl) == sorted(
        (preset, f"prose-{n}") for preset in ("int2", "fp16") for n in range(4)
    )
    broken = json.loads(file.read_text().splitlines()[0])
    broken["top1"] = [0.5]  # what was cut off is left out
    file.write_text(json.dumps(broken) + "\n")
    assert rows.read([file]) == []


def test_a_folder_without_rows_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"\[evidence.collect\] no rows; got"):
        collect.main([str(tmp_path), "--out", str(tmp_path)])
