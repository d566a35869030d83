"""The golden table computed by torch, and proof that it bites."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cuda_track.golden import parity
from cuda_track.golden.table import TABLE as golden

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def by_set():
    return list(golden.by_set())


@pytest.fixture(scope="module")
def rows(by_set):
    return [row for _, row in by_set]


def test_every_row_holds(rows):
    bad = [row for row in rows if not row.ok]
    assert not bad, "\n".join(map(str, bad))


def test_the_parity_page_shows_every_row_and_what_is_wrong(by_set):
    written = [{"set": name, **row.as_dict()} for name, row in by_set]
    found = parity.sets(written)
    # Of another backend: a row with a side behind a comma, one that is wrong, a table of its own.
    quantize = next(row for _, row in by_set if row.table == "seal")
    others = [
        replace(quantize, case=f"{quantize.case}, keys"),
        replace(quantize, wrong=1),
        quantize,
    ]
    others = [row.as_dict() for row in others[:2]] + [{**quantize.as_dict(), "table": "more"}]
    columns = {"torch": written, "other": others, "GPU": None}
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in parity.page(columns, found, []).splitlines()
        if line.startswith("| ")
    ][1:]
    assert {line[0] for line in cells} == {*found.values(), "more"}
    assert sum(int(line[2]) for line in cells if line[0] != "more") == sum(
        row.values for _, row in by_set
    )
    kind = quantize.case.split(".")[0]
    line = next(line for line in cells if line[:2] == ["encode", kind])
    assert line[4:] == ["0 ties", f"WRONG: {quantize.case}", "not run"]
    assert not any("WRONG" in line[4] for line in cells)


def test_a_line_of_the_parity_page_shows_its_largest_error():
    rows = [{"ok": True, "rms": rms, "bound": 1e-2, "differ": 0} for rms in (1e-3, 4e-3, 2e-3)]
    assert parity.cell(rows) == "rms 4e-03"


def test_the_parity_page_in_docs_is_of_these_rows(by_set):
    text = (Path(__file__).parents[2] / parity.PAGE).read_text(encoding="utf-8")
    rows = [{"set": name, **row.as_dict()} for name, row in by_set]
    found = parity.sets(rows)
    for name, method in {parity.line_of(row, found) for row in rows}:
        assert f"| {name} | {method} | " in text
    assert "WRONG:" not in text
