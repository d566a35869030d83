"""Thoughts are dim in a terminal and whole in a pipe."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlxkv.chat.terminal import wrapped
from mlxkv.chat.thoughts import DIM, PLAIN

THINKS = SimpleNamespace(think_start="<think>", think_end="</think>")


def shown(pieces, capsys, opened: bool = False) -> str:
    session = SimpleNamespace(loaded=SimpleNamespace(tokenizer=THINKS), opened=opened)
    with wrapped(session) as write:
        for piece in pieces:
            write(piece)
    return capsys.readouterr().out


@pytest.fixture
def terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("size", [1, 3, 100])
def test_between_the_marks_letters_are_dim(terminal, capsys, size):
    text = "<think>hm, a < b</think>It is <b>."
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert shown(pieces, capsys) == f"{DIM}hm, a < b{PLAIN}It is <b>."


def test_a_template_may_have_opened_them(terminal, capsys):
    assert shown(["hm</think>", "Yes."], capsys, opened=True) == f"{DIM}hm{PLAIN}Yes."


def test_an_end_amid_thoughts_leaves_no_dim_terminal(terminal, capsys):
    assert shown(["<think>hm <"], capsys) == f"{DIM}hm <{PLAIN}"


def test_a_pipe_gets_what_the_model_wrote(capsys):
    assert shown(["<think>hm</think>", "Yes."], capsys) == "<think>hm</think>Yes."
