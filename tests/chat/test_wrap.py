"""Words of a reply are not broken at the edge of a terminal, however the reply is cut into pieces;
thoughts are dim there, and whole in a pipe."""

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from mlxkv.chat.terminal import DIM, PLAIN, Wrap, wrapped
from mlxkv.generate.roles import Thinking

WORDS = st.lists(
    st.sampled_from(["a", "bird", "日本語", "  ", "\n", "longer-than-all"]), max_size=40
)


def broken(text: str, width: int, cuts: list[int]) -> str:
    out: list[str] = []
    wrap, start = Wrap(out.append, width), 0
    for cut in sorted(c % (len(text) + 1) for c in cuts):
        wrap(text[start:cut])
        start = cut
    wrap(text[start:])
    wrap.close()
    return "".join(out)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
@given(WORDS, st.integers(1, 30), st.lists(st.integers(0, 200), max_size=9))
def test_only_spaces_become_ends_of_lines(words, width, cuts):
    text = " ".join(words)
    found = broken(text, width, cuts)
    assert found.split() == text.split()
    assert found == broken(text, width, [])
    for line in found.split("\n"):
        code = line.startswith("    ")
        assert cell_len(line.rstrip()) <= width or len(line.split()) == 1 or code


def test_a_line_that_fits_stays_as_it_is():
    text = "# Title\n\n- one  two\n\n    code that is longer than the line\n```\nso is this one here\n```\n"
    assert broken(text, 12, [5, 20]) == text
    assert broken("one two three", 8, [4]) == "one two\nthree"
    assert broken("one two three", 3, []) == "one\ntwo\nthree"


THINKS = Thinking(SimpleNamespace(think_start="<think>", think_end="</think>"))


def shown(pieces, capsys, monkeypatch=None, opened: bool = False) -> str:
    if monkeypatch is not None:  # a terminal
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", "80")
    session = SimpleNamespace(thinking=THINKS, opened=opened)
    with wrapped(session) as write:
        for piece in pieces:
            write(piece)
    return capsys.readouterr().out


@pytest.mark.parametrize("size", [1, 3, 100])
def test_between_the_marks_letters_are_dim(monkeypatch, capsys, size):
    text = "<think>hm, a < b</think>It is <b>."
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert shown(pieces, capsys, monkeypatch) == f"{DIM}hm, a < b{PLAIN}It is <b>."


def test_a_template_may_have_opened_them(monkeypatch, capsys):
    assert shown(["hm</think>", "Yes."], capsys, monkeypatch, opened=True) == f"{DIM}hm{PLAIN}Yes."


def test_an_end_amid_thoughts_leaves_no_dim_terminal(monkeypatch, capsys):
    assert shown(["<think>hm <"], capsys, monkeypatch) == f"{DIM}hm <{PLAIN}"


def test_a_pipe_gets_what_the_model_wrote(capsys):
    assert shown(["<think>hm</think>", "Yes."], capsys) == "<think>hm</think>Yes."
