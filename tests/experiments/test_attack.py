"""The attacks, in the short form of every area: all have to hold."""

import pytest

from experiments.attack.__main__ import page
from experiments.attack.frame import Area, Attempt, areas


@pytest.mark.slow
@pytest.mark.parametrize("area", areas(), ids=lambda area: area.name)
def test_attempts_hold(area):
    attempts = list(area.run(short=True))
    assert attempts
    lost = [f"{one.name}: {one.note}" for one in attempts if not one.held]
    assert not lost, "\n".join(lost)


def test_the_page_counts_and_names_what_did_not_hold():
    area = Area("files", "Files")
    rows = [(area, [Attempt("a link", True), Attempt("a FIFO", False, "hangs")], 2.0)]
    text = page(rows, "python -m experiments.attack")
    assert "2 attempts, 1 held, 1 did not." in text
    assert "| files | Files | 2 | 1 | 2 |" in text
    assert "- files: a FIFO: hangs" in text
