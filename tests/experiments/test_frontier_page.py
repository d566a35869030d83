"""What is kept of a study's rows, and what its page prints of them."""

import json

import pytest

from experiments.frontier import compact, page, picture

TEXTS = [f"prose-{i}" for i in range(6)]
ABOUT = {"model": "natural-qwen", "windows": "64,64", "split": "test", "context": 640}


def kl(name: str, text: str, value: float) -> dict:
    numbers = {
        "kl": value,
        "top1": 0.9,
        "accepted": 0.95,
        "bits_per_value": 2.25,
        "bits_with_windows": 5.0,
    }
    return ABOUT | {"task": "kl", "preset": name, "text": text} | numbers


@pytest.fixture
def kept(tmp_path):
    """Rows of two arms, of questions and of what an oracle needs, made compact."""
    found = [
        kl(name, text, (i + 1) * factor)
        for name, factor in (("int2", 0.01), ("fill-2.25", 0.005))
        for i, text in enumerate(TEXTS)
    ]
    right = {"single": [[True], [False]], "multi-query": [[True, True], [True, False]]}
    bits = {"bits_per_value": 2.25, "bits_with_windows": 5.0}
    found.append(
        ABOUT | {"task": "retrieval", "preset": "int2", "text": "prose-0", "right": right} | bits
    )
    for i, text in enumerate(TEXTS):
        shares = {"0.9": [0.1, 0.2], "0.95": [0.1 * i, 0.5], "0.99": [0.5, 0.9]}
        where = {"task": "need", "preset": "layer 3, pages of 64", "layer": 3, "page": 64}
        found.append(ABOUT | where | {"text": text, "need": shares, "need_kv": {"0.95": [0.6]}})
    rows, out = tmp_path / "rows.jsonl", tmp_path / "kept.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    compact.main([str(rows), "--out", str(out)])
    return out


def test_compact_keeps_numbers_by_text_and_means_by_head(kept):
    arms, needs = page.read([kept])
    int2 = arms["natural-qwen", 640]["int2"]
    assert int2["texts"] == TEXTS and int2["kl"] == pytest.approx([0.01 * i for i in range(1, 7)])
    assert int2["right"] == [[2, 4]]
    assert needs[0]["need 0.95"] == [0.25, 0.5] and needs[0]["need_kv 0.95"] == [0.6]
    assert needs[0]["need 0.95 texts"][2] == pytest.approx(0.35)


def test_the_page_compares_on_the_same_texts(kept, capsys):
    page.main([str(kept)])
    printed = capsys.readouterr().out
    assert "| `fill-2.25` | 2.25 |" in printed and "**0.50 [0.50, 0.50]**" in printed
    assert "| natural-qwen | 3 | 0.15 | 0.38 | 0.70 | 0.25 0.50 | 0.60 |" in printed
    arms = page.read([kept])[0]["natural-qwen", 640]
    assert page.ratio(arms, "int2", "int4") is None
    assert page.lower(arms, "fill-2.25", "int2") == "6 of 6"


def test_the_picture_has_a_panel_with_published_methods_over_int2(kept):
    pytest.importorskip("matplotlib")
    beside = [
        {"model": "natural-qwen", "preset": name, "text": text, "kl": value, "bits_per_value": 3.0}
        for name, value in (("int2", 0.02), ("kivi-int2", 0.01))
        for text in TEXTS
    ]
    svg = picture.panels(page.read([kept])[0], beside)
    for text in ("natural-qwen, 640 tokens", "kivi-int2", "published methods", "fill"):
        assert text in svg
