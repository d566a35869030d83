"""`mlxkv demo`: reads for real, measures for real, and draws what it measured."""

import io
import json
import sys

import pytest
from rich.console import Console

from mlxkv.chat.demo import ANSWER, HEIGHT, Chart
from mlxkv.cli import main


@pytest.fixture(scope="module")
def shown(smollm2) -> dict:
    """The document of a short demo on SmolLM2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxkv.chat.demo._fitting", lambda *_: 512)
        patch.setattr(sys, "stdout", io.StringIO())
        assert main(["demo", "--json"]) == 0
        return json.loads(sys.stdout.getvalue().splitlines()[-1])


def test_both_caches_answer_from_the_text(shown):
    assert shown["right"] == {"fp16": True, "int4": True}
    assert shown["fact"].endswith(f"{ANSWER}.") and len(shown["answers"]) == 2


def test_what_it_draws_was_measured(shown):
    first, last = shown["rows"][0], shown["rows"][-1]
    assert last["tokens"] > 440
    # Exact up to 192 tokens: the same bytes. Then int4 grows more slowly.
    assert first["tokens"] <= 192 and first["kv_bytes"] == first["kv_bytes_fp16"]
    assert last["kv_bytes"] < 0.8 * last["kv_bytes_fp16"]
    sizes = [row["kv_bytes_fp16"] for row in shown["rows"]]
    assert sizes == sorted(sizes)


def test_lines_where_there_is_no_terminal(capsys):
    with Chart(("fp16", "int4"), 1000) as chart:
        for tokens in range(100, 1001, 100):
            chart.add(tokens, tokens * 1024, tokens * 256)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[-1] == "  1,000 tokens: fp16 1000.0 KiB, int4 250.0 KiB"


def test_the_chart_has_the_heights_of_its_numbers():
    chart = Chart(("fp16", "int4"), 1000)
    for tokens in range(10, 501, 10):
        chart.add(tokens, tokens * 1000, tokens * 500)
    out = io.StringIO()
    Console(file=out, width=100, color_system=None).print(chart.drawing())
    rows = out.getvalue().splitlines()
    assert "1,000 tokens" in rows[HEIGHT] and "500 tokens: fp16" in rows[-1]
    column = [
        row[11 + 31] if len(row) > 42 else " " for row in rows[:HEIGHT]
    ]  # at half of the axis
    assert column.count("░") + column.count("█") == HEIGHT // 2  # half of the text is read
    assert column.count("█") in (2, 3)  # and int4 takes half of that
    assert all(len(row) < 100 for row in rows)


def test_what_cannot_be_shown(model_folder, capsys, subtests):
    for wrong, said in (
        (("-m", str(model_folder), "--kv", "fp16"), "nothing is compressed"),
        (("-m", str(model_folder), "--kv", "int5"), "unknown preset"),
        (("-m", "smolm2"), "did you mean smollm2"),
    ):
        with subtests.test(wrong=wrong):
            assert main(["demo", *wrong]) == 2
            assert said in capsys.readouterr().err.splitlines()[-1]
