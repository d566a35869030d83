"""`mlxkv demo`: reads for real, measures for real, and draws what it measured."""

import io
import json
import sys

import pytest
from rich.console import Console

from mlxkv.chat import demo
from mlxkv.chat.demo import ANSWER, HEIGHT, Chart
from mlxkv.cli import main
from mlxkv.loading.load import load


@pytest.fixture(scope="module")
def shown(smollm2) -> dict:
    """The document of a short demo on SmolLM2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxkv.chat.demo._fitting", lambda *_: (512, 100.0))
        patch.setattr(sys, "stdout", io.StringIO())
        assert main(["demo", "--json"]) == 0
        return json.loads(sys.stdout.getvalue().splitlines()[-1])


def test_both_caches_answer_from_the_text(shown):
    assert shown["right"] == {"fp16": True, "int4": True}
    assert shown["fact"].endswith(f"{ANSWER}.") and len(shown["answers"]) == 2


def test_a_file_of_the_cache_gives_the_same_answer(shown):
    pack = shown["pack"]
    assert pack["answer"] == shown["answers"]["int4"] and ANSWER in pack["answer"].lower()
    assert 0 < pack["seconds"] < shown["seconds"]
    assert shown["rows"][-1]["kv_bytes"] <= pack["bytes"] < 2 * shown["rows"][-1]["kv_bytes"]


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
    assert len(lines) == 4 and lines[-1] == "  1,000 tokens: fp16 1000 KiB, int4 250 KiB"


def test_a_slow_machine_reads_2000_tokens_too(monkeypatch, smollm2):
    clock = iter([0.0, 64.0])
    monkeypatch.setattr(demo.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(demo, "read_text", lambda *_: iter(()))
    loaded = load(str(smollm2), "fp16")
    count, rate = demo._fitting(loaded, ([], []))
    assert rate == demo.CHUNK / 64 and 2000 <= len(demo.make_text(loaded, count)[0]) <= count


def test_the_chart_begins_where_something_is_compressed(capsys):
    with Chart(("fp16", "int4"), 400) as chart:
        for tokens, first, second in ((100, 100, 100), (200, 200, 210), (400, 400, 300)):
            chart.add(tokens, first * 1024, second * 1024)
    assert [tokens for tokens, *_ in chart.points] == [100, 400]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["100", "400"]


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
