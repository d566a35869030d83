"""The attacks, in the short form of every area: all have to hold."""

import subprocess
import sys

import pytest

from experiments.attack.__main__ import main, page
from experiments.attack.frame import Area, Attempt, areas
from mlxkv.errors import UserError


@pytest.mark.slow
@pytest.mark.parametrize("area", [area.name for area in areas()])
def test_attempts_hold(area):
    """In a process of its own: areas end processes, and leave models attached."""
    command = [sys.executable, "-m", "experiments.attack", "--short", area]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-4000:]
    counts = ran.stderr.splitlines()[-1].split()  # AREA: 9 of 9 held, 1 s
    assert int(counts[1]) == int(counts[3]) > 0


def test_the_page_counts_and_names_what_did_not_hold():
    area = Area("files", "Files")
    rows = [(area, [Attempt("a link", True), Attempt("a FIFO", False, "hangs")], 2.0)]
    text = page(rows, "python -m experiments.attack")
    assert "2 attempts, 1 held, 1 did not." in text
    assert "| files | Files | 2 | 1 | 2 |" in text
    assert "- files: a FIFO: hangs" in text


def test_an_area_that_is_none_is_one_line():
    with pytest.raises(UserError, match="unknown area; got 'fire'; choose from .*sessions"):
        main(["fire"])
