"""Thoughts are dim in a terminal and whole in a pipe."""

from types import SimpleNamespace

import pytest

from mlxkv.chat.terminal import wrapped
from mlxkv.chat.wrap import DIM, PLAIN
from mlxkv.models.replies.thinking import Thinking

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
